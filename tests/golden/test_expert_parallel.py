"""Mixtures of experts, with expert parallelism and without: real checkpoints are read and written bit for bit.

The same training run exists in many topologies. Values of what is written are read back by a reader that shares no
code with the converter, which itself reads the trainer's files right. The trainer lets tensors that every tp rank holds
drift apart in these models; the truth is the first rank's copy.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

import paddle_reshard
from paddle_reshard.pipeline.changes.fill import open_filling
from paddle_reshard.pipeline.core.errors import CheckpointError, CoverageError, PlanError, RuleError
from paddle_reshard.storage.locate import Access
from tests import oracle
from tests.conftest import case_directory
from tests.expert_oracle import differing, read_expert_parallel, slice_lengths
from tests.golden.compare_one_card import read_one_card

QWEN = "ep2_sh2_s1v2_meta_ema"
ACROSS_TP = "ep4_mp2pp2sh2_s1v2_meta"
"""Neighbouring experts are on different tp ranks: those of the first are 0 and 2, those of the second 1 and 3."""
DSV3, GLM4 = "dsv3_ep2_sh2_s1v2_meta_ema", "glm4moe_ep2_sh2_s1v2_meta_ema"
BIAS = "*.e_score_correction_bias"
WHOLE_ON_EVERY_RANK = (
    *("moe_single", "moe_pp2", "moe_sh2_s1v1_meta", "moe_sh2_s1v2_meta", "moe_mp2", "moe_mp2pp2sh2_s1v2_meta_ema"),
    *("qwen2moe_single", "ernie45moe_single", "dsv3_single", "nlp_dsv2_single", "nlp_qwen2moe_single"),
)  # fmt: skip
COMPLETE = (
    "ep2_mp2", "ep2_mp2sh2_s1v2_meta", "ep2_pp2sh2_s1v2_meta", "ep2_sh2_s1v2", QWEN, ACROSS_TP,
    "ernie45moe_mpmoe_mp2", "nlp_dsv2_ep_dp2", "nlp_dsv2_ep_dp2sh2_s1v2_meta", "glm4moe_single",
    "gptoss_single", "moe_fused_single", "moe_fused_sh2_s1v2_meta", *WHOLE_ON_EVERY_RANK,
)  # fmt: skip
DRIFTED = ("ep2_mp2", "ep2_mp2sh2_s1v2_meta", ACROSS_TP, "moe_mp2", "moe_mp2pp2sh2_s1v2_meta_ema")


def _case(name: str) -> Path:
    return case_directory(f"moe/{name}")


@cache
def _truth(name: str) -> Mapping[str, np.ndarray]:
    return oracle.read_truth(_case(name) / "truth.safetensors")


def _bits(truth: Mapping[str, np.ndarray]) -> dict[str, bytes]:
    return {key: array.tobytes() for key, array in truth.items()}


def _shapes(name: str) -> dict[str, tuple[int, ...]]:
    return {key: s for key, s in oracle.shapes_of(_truth(name)).items() if not key.endswith(".ema")}


def _lost(name: str, folder: Path) -> Path:
    """A file of the tensors that sharded saving loses, as the job had them in memory."""
    lost = {key: np.array(array) for key, array in _truth(name).items() if key.endswith("_correction_bias")}
    save_file(lost, folder / "lost.safetensors")
    return folder / "lost.safetensors"


# --- reading ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", COMPLETE)
def test_on_one_card_it_equals_the_truth(name: str, tmp_path: Path) -> None:
    if name in DRIFTED:
        with pytest.raises(CheckpointError, match="with --replicas report the first copy is taken"):
            paddle_reshard.convert(_case(name) / "checkpoint-3", tmp_path / "one", to="tp=1")
        assert not list(tmp_path.iterdir())
    report = paddle_reshard.convert(
        _case(name) / "checkpoint-3",
        tmp_path / "one",
        to="tp=1",
        replicas="report" if name in DRIFTED else "compare",
    )
    assert read_one_card(tmp_path / "one") == _bits(_truth(name))
    assert bool(report.moved.replica_drift) == (name in DRIFTED)


# --- tensors that no file holds -----------------------------------------------------------------------


@pytest.mark.parametrize("name", [DSV3, GLM4])
def test_what_no_file_holds_is_refused_filled_or_left_out(name: str, tmp_path: Path) -> None:
    source, truth = _case(name) / "checkpoint-3", _bits(_truth(name))
    with pytest.raises(CoverageError, match=r"e_score_correction_bias.*float32 \[4\].*--fill.*--allow-m"):
        paddle_reshard.convert(source, tmp_path / "refused", to="tp=1")
    paddle_reshard.convert(source, tmp_path / "filled", fill=_lost(name, tmp_path), to="tp=1")
    assert read_one_card(tmp_path / "filled") == truth
    paddle_reshard.convert(source, tmp_path / "without", allow_missing=(BIAS,), to="tp=1")
    lost = {key for key in truth if key.endswith("e_score_correction_bias")}
    assert len(lost) == 2
    assert read_one_card(tmp_path / "without") == {k: v for k, v in truth.items() if k not in lost}


def test_one_pattern_may_be_given_as_a_text(tmp_path: Path) -> None:
    """Taken letter by letter, any pattern with a * would allow every tensor to be lost."""
    source = _case(GLM4) / "checkpoint-3"
    with pytest.raises(CoverageError, match="e_score_correction_bias"):
        paddle_reshard.plan(source, to="tp=1", allow_missing="lm_head.*")
    with pytest.raises(CoverageError, match="e_score_correction_bias"):
        paddle_reshard.verify(source, allow_missing="lm_head.*")
    assert paddle_reshard.plan(source, to="tp=1", allow_missing=BIAS).plan.groups


def test_a_filled_tensor_survives_sharded_saving(tmp_path: Path) -> None:
    source = _case(GLM4) / "checkpoint-3"
    paddle_reshard.convert(source, tmp_path / "there", fill=_lost(GLM4, tmp_path), to="ep=4,sharding=4")
    paddle_reshard.convert(tmp_path / "there", tmp_path / "back", to="tp=1")
    assert read_one_card(tmp_path / "back") == _bits(_truth(GLM4))


def test_an_average_continues_without_tensors_that_no_file_holds(tmp_path: Path) -> None:
    source, allowed = _case(DSV3) / "checkpoint-3", ["*e_score_correction_bias"]
    found = [tensor.key for tensor in paddle_reshard.inspect(source).tensors if tensor.missing]
    assert found == [f"model.layers.{layer}.mlp.gate.e_score_correction_bias" for layer in (1, 2)]
    with pytest.raises(CoverageError, match="e_score_correction_bias"):
        paddle_reshard.average([source, source], tmp_path / "made", uniform=True, to="tp=1")
    paddle_reshard.average(
        [source, source], tmp_path / "made", uniform=True, to="tp=1", allow_missing=allowed
    )
    states = ["param", "master_weight", "moment2"]
    assert paddle_reshard.verify(source, tmp_path / "made", states=states, allow_missing=allowed).equal


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}" * 8)
    with pytest.raises(CheckpointError, match=r"--fill .*config\.json.*expected a safetensors file"):
        paddle_reshard.plan(_case(DSV3) / "checkpoint-3", to="tp=1", fill=tmp_path / "config.json")


@pytest.mark.parametrize("name", ["lost.safetensors", "lost"])
def test_a_base_that_is_not_there_is_named_as_it_was_given(name: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match=f"^{name}: no such file or folder"):
        open_filling(name, Access({}))


def test_a_buffer_that_no_file_holds_counts_in_names_all_the_same(tmp_path: Path) -> None:
    """The bias of the router is a buffer with one card, and with expert parallelism a parameter with a number."""
    lost, single = _case(DSV3) / "checkpoint-3", _case("dsv3_single") / "checkpoint-3"
    paddle_reshard.convert(lost, tmp_path / "without", to="tp=1", allow_missing=BIAS)
    for to in ("ep=2,sharding=2", "sharding=2"):
        with pytest.raises(CoverageError, match="e_score_correction_bias: no file holds it"):
            paddle_reshard.plan(tmp_path / "without", to=to)
        assert paddle_reshard.plan(tmp_path / "without", to=to, allow_missing=BIAS).plan.groups
    assert paddle_reshard.plan(lost, to="ep=2,sharding=2", allow_missing=BIAS).plan.groups
    assert paddle_reshard.plan(single, to="ep=2,sharding=2").plan.groups


# --- writing ------------------------------------------------------------------------------------------

SERIAL = {"sequence_parallel": False}
EXPERT_PARALLEL = (
    *("ep2_mp2", "ep2_mp2sh2_s1v2_meta", "ep2_pp2sh2_s1v2_meta", "ep2_sh2_s1v2"),
    *(QWEN, ACROSS_TP),
)


@pytest.mark.parametrize(
    ("source", "to", "format"),
    [
        ("moe_single", "ep=4,sharding=4", "hybrid"),
        ("moe_mp2pp2sh2_s1v2_meta_ema", "ep=2,sharding=4", "hybrid"),
        ("ep2_mp2sh2_s1v2_meta", "tp=2,ep=4,sharding=4,pp=2", "hybrid"),
        ("ep2_pp2sh2_s1v2_meta", "tp=2,ep=2,sharding=3", "hybrid-plain"),
        ("ep2_mp2", "ep=4,sharding=4,pp=2", "hybrid-plain"),
        (QWEN, "tp=2,ep=4,sharding=2", "hybrid"),
    ],
)
def test_values_are_found_by_a_reader_of_its_own(source: str, to: str, format: str, tmp_path: Path) -> None:
    paddle_reshard.convert(
        _case(source) / "checkpoint-3", tmp_path / "there", to=to, format=format, replicas="report"
    )
    found = read_expert_parallel(tmp_path / "there", _shapes(source))
    assert list(differing(found, _truth(source))) == []
    paddle_reshard.convert(tmp_path / "there", tmp_path / "back", to="tp=1")
    assert read_one_card(tmp_path / "back") == _bits(_truth(source))


STRATEGIES = [
    ("tp=2,sharding=2", "stage1v2"),
    ("sharding=3", "stage1v1"),
    ("sharding=2", "stage3"),
    ("pp=2", None),
]


@pytest.mark.parametrize(
    ("source", "to", "strategy", "format"),
    [
        ("nlp_dsv2_ep_dp2sh2_s1v2_meta", "ep=2,dp=2,sharding=2", "stage1v1", "hybrid"),
        ("nlp_dsv2_ep_dp2sh2_s1v2_meta", "ep=4,dp=4,sharding=2", "stage1v2", "hybrid-plain"),
        ("nlp_dsv2_single", "ep=2,dp=2,tp=2,sharding=3", "stage1v2", "hybrid"),
        ("nlp_dsv2_single", "ep=2,dp=2,pp=2", None, "hybrid"),
        ("nlp_qwen2moe_single", "ep=2,dp=2,tp=2", None, "hybrid"),
        *[(name, *asked, "hybrid") for name in WHOLE_ON_EVERY_RANK for asked in STRATEGIES],
    ],
)
def test_to_other_ranks_and_back(
    source: str, to: str, strategy: str | None, format: str, tmp_path: Path
) -> None:
    paddle_reshard.convert(
        _case(source) / "checkpoint-3",
        tmp_path / "there",
        to=to,
        sharding_strategy=strategy,
        layout={"stage3_segment_size": 512} if strategy == "stage3" else None,
        format=format,
        replicas="report" if source in DRIFTED else "compare",
    )
    paddle_reshard.convert(tmp_path / "there", tmp_path / "back", to="tp=1")
    assert read_one_card(tmp_path / "back") == _bits(_truth(source))


def test_names_of_a_job_of_the_target_topology(tmp_path: Path) -> None:
    """They are taken as they are, cell by cell: here every one is another than the naming rules say."""
    meta = json.loads((_case(QWEN) / "checkpoint-3" / "model_meta.json").read_text())
    for cell in meta["sharding_metas"].values():
        names = cell["structure_name_mapping"]
        cell["structure_name_mapping"] = {key: f"other_{name}" for key, name in names.items()}
    (tmp_path / "names.json").write_text(json.dumps(meta))
    source = _case("moe_single") / "checkpoint-3"
    paddle_reshard.convert(source, tmp_path / "there", to="ep=2,sharding=2", layout=tmp_path / "names.json")
    written = json.loads((tmp_path / "there" / "model_meta.json").read_text())
    for name, cell in meta["sharding_metas"].items():
        found = written["sharding_metas"][name]["structure_name_mapping"]
        assert found == cell["structure_name_mapping"]
    assert (
        list(differing(read_expert_parallel(tmp_path / "there", _shapes("moe_single")), _truth("moe_single")))
        == []
    )


def test_what_names_require_of_a_job_is_said(tmp_path: Path) -> None:
    """Names of sequence and expert parallelism are found by any job of the topology, and are then those of others."""
    source, target = _case("moe_single") / "checkpoint-3", tmp_path / "there"
    report = paddle_reshard.convert(source, target, to="tp=2,sharding=2,ep=4")
    (said,) = [value for name, value in report.facts() if name == "remark"]
    assert "a job with --sequence_parallel true --use_expert_parallel true; a job without" in said
    assert json.loads((target / "paddle_reshard.json").read_text())["remarks"] == [said]
    inspected = dict(paddle_reshard.inspect(target).facts())
    assert inspected["names"] == "of a job with --sequence_parallel true --use_expert_parallel true"
    arguments = paddle_reshard.launch(target).arguments
    assert arguments["sequence_parallel"] and arguments["use_expert_parallel"]
    plain = paddle_reshard.plan(source, to="tp=2", layout=SERIAL)
    assert not [name for name, _ in plain.facts() if name == "remark"]


@pytest.mark.parametrize("name", [*EXPERT_PARALLEL])
def test_the_reader_of_its_own_reads_the_real_ones(name: str) -> None:
    found = read_expert_parallel(_case(name) / "checkpoint-3", _shapes(name))
    assert list(differing(found, _truth(name))) == []


def test_experts_are_padded_for_the_ranks_that_hold_them(tmp_path: Path) -> None:
    """Dense tensors are padded to 128 elements for each of 32 ranks, experts for each of the 16 that share them."""
    paddle_reshard.convert(_case("moe_single") / "checkpoint-3", tmp_path / "there", to="ep=2,sharding=32")
    meta = json.loads((tmp_path / "there" / "model_meta.json").read_text())
    assert meta["parallel_config"]["moe_sharding_degree"] == 16
    for ep in (0, 1):
        names = meta["sharding_metas"][f"tp00_pp00_ep{ep:02}"]["structure_name_mapping"]
        held = slice_lengths(
            tmp_path / "there", names[f"model.layers.0.mlp.experts.{2 * ep}.down_proj.weight"]
        )
        mine = {shard: length for shard, length in held.items() if shard % 2 == ep}
        assert sum(mine.values()) == 32 * 64
    norm = names["model.norm.weight"]
    assert sum(slice_lengths(tmp_path / "there", norm).values()) == 128 * 32


@pytest.mark.parametrize(
    ("source", "asked", "message"),
    [
        ("moe_single", {"to": "ep=2,sharding=2", "sharding_strategy": "stage1v1"}, "only supports ShardingV2"),
        ("moe_single", {"to": "ep=2,sharding=2", "sharding_strategy": "stage3"}, "only considers sharding"),
        ("moe_single", {"to": "ep=2,dp=2"}, "refuses expert parallelism with data parallelism"),
        ("moe_single", {"to": "tp=2,ep=2", "layout": SERIAL}, "router asserts sequence_parallel"),
        ("moe_single", {"to": "ep=2"}, r"ep must divide tp × sharding"),
        ("moe_single", {"to": "tp=4,ep=2,sharding=2"}, "tp must divide ep"),
        ("moe_single", {"to": "ep=8,sharding=8"}, "have 4 experts"),
        ("gptoss_single", {"to": "ep=2,sharding=2"}, "gpt_oss does not distribute experts over ep"),
        ("moe_fused_single", {"to": "ep=2,sharding=2"}, "no tensor of this model is of single experts"),
        ("nlp_dsv2_single", {"to": "ep=2,sharding=2"}, "PaddleNLP distributes experts over data-parallel ranks"),
        ("nlp_dsv2_single", {"to": "ep=2,dp=2"}, "every rank holds all experts; omit ep"),
        ("nlp_dsv2_single", {"to": "dp=2,tp=2"}, "distributes experts over data-parallel ranks.* add ep=2"),
        ("qwen2moe_single", {"to": "ep=2,sharding=2"}, "qwen2_moe does not distribute experts over ep"),
        ("moe_single", {"to": "tp=2", "layout": {"experts_over_tp": True}}, "does not distribute experts over tp"),
    ],
)  # fmt: skip
def test_what_the_trainer_refuses_is_refused_with_its_reason(
    source: str, asked: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises((PlanError, paddle_reshard.ReshardError), match=message):
        paddle_reshard.convert(_case(source) / "checkpoint-3", tmp_path / "x", **asked)
    assert not list(tmp_path.iterdir())


# --- damaged checkpoints ------------------------------------------------------------------------------


def _meta(change: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        data = json.loads((folder / "model_meta.json").read_text())
        change(data)
        (folder / "model_meta.json").write_text(json.dumps(data))

    return edit


def _renumber(data: dict[str, Any]) -> None:
    """Make expert rank 1 claim the experts of rank 0."""
    cell = data["sharding_metas"]["tp00_pp00_ep01"]
    for table in ("structure_name_mapping", "param_meta"):
        cell[table] = {
            re.sub(r"experts\.(\d)", lambda m: f"experts.{int(m[1]) - 2}", key): value
            for key, value in cell[table].items()
        }


def _no_sync(data: dict[str, Any]) -> None:
    data["sharding_metas"]["tp00_pp00_ep00"]["param_meta"]["model.norm.weight"][3] = True


def _fewer(data: dict[str, Any]) -> None:
    cell = data["sharding_metas"]["tp00_pp00_ep01"]
    for table in ("structure_name_mapping", "param_meta"):
        del cell[table]["model.layers.1.mlp.experts.3.down_proj.weight"]


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        (QWEN, lambda f: (f / "optimizer.shard01.pdopt").unlink(), "1 of 2 optimizer files"),
        (
            "ep2_sh2_s1v2",
            lambda f: (f / "model_state.moe_sharding01.pdparams").unlink(),
            "a part moe_sharding00 but no moe_sharding01",
        ),
        ("ep2_mp2sh2_s1v2_meta", lambda f: (f / "model_meta.json").unlink(), "or model_meta.json is missing"),
        (QWEN, _meta(lambda d: d["parallel_config"].update(moe_sharding_degree=2)), "moe_sharding_degree=2"),
        (QWEN, _meta(lambda d: d["parallel_config"].update(ep_degree=1)), "no cell tp00_pp00$"),
        (QWEN, _meta(lambda d: d["sharding_metas"].pop("tp00_pp00_ep01")), "no cell tp00_pp00_ep01"),
        (QWEN, _meta(_renumber), r"layers.0.mlp.experts.2.up_gate_proj.weight: no file holds it"),
        (QWEN, _meta(_no_sync), "model.norm.weight: no_sync is True in one cell"),
        (
            QWEN,
            _meta(_fewer),
            r"shard01\.pdopt: master weight linear_11.w_0 does not belong to any parameter of the cell",
        ),
    ],
)
def test_a_damaged_checkpoint_is_refused(
    name: str, damage: Callable[[Path], None], message: str, tmp_path: Path
) -> None:
    shutil.copytree(_case(name) / "checkpoint-3", tmp_path / "source", copy_function=shutil.copyfile)
    damage(tmp_path / "source")
    with pytest.raises((CheckpointError, RuleError), match=message):
        paddle_reshard.convert(tmp_path / "source", tmp_path / "x", to="tp=1")
    assert not (tmp_path / "x").exists()
