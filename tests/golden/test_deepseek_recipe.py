"""Checkpoints of the pre-training recipe ``deepseek_v3_pretrain``: read bit for bit, and written as the recipe does.

Several modules have one parameter, some parameters are used by none, and communication buffers have colors.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import paddle_reshard
from paddle_reshard.pipeline.checkpoint.training_job import coordinates_of
from paddle_reshard.pipeline.core.errors import CheckpointError, CoverageError, PlanError, RuleError
from paddle_reshard.pipeline.core.topology import Topology
from tests import oracle
from tests.conftest import REPO, case_directory
from tests.deepseek_names import BIAS, named
from tests.expert_oracle import read_expert_parallel
from tests.golden.test_flex_by_rank import oracle_metadata
from tests.job_memory import differences, places_of

META, AVERAGE = "dsv3_ep2_pp2sh2_s1v2_meta", "dsv3_ep2_pp2sh2_s1v2_meta_mtp_ema"
FLEX, UNIFIED = "dsv3_ep2_fc_pp2sh2_s1v2", "dsv3_ep2_uni_pp2sh2_s1v2"
CASES = (META, AVERAGE, FLEX, UNIFIED)
SAME: dict[str, Any] = {"to": "pp=2,sharding=2,ep=2", "sharding_strategy": "stage1v2"}
TARGETS: dict[str, dict[str, Any]] = {
    "more expert ranks": {"to": "pp=2,sharding=4,ep=4"},
    "flex": {"format": "flex"},
    "flex by rank": {"format": "flex", "to": "pp=2,sharding=4,ep=4"},
}
TABLE = REPO / "pipeline/model/rules/deepseek_v3_pretrain.paddleformers.json"


def _case(name: str) -> Path:
    return case_directory(f"recipes/{name}")


def _config(name: str) -> Path:
    beside = _case(name) / "config.json"
    return beside if beside.exists() else _case(name) / "checkpoint-3/config.json"


@cache
def _truth(name: str) -> oracle.Tensors:
    return oracle.read_truth(_case(name) / "truth.safetensors")


def _shapes(truth: Mapping[str, np.ndarray]) -> dict[str, tuple[int, ...]]:
    return {key: shape for key, shape in oracle.shapes_of(truth).items() if not key.endswith(".ema")}


def _convert(name: str, target: Path, **options: Any) -> Path:
    paddle_reshard.convert(_case(name) / "checkpoint-3", target, config=_config(name), **options)
    return target


def _source(name: str, folder: Path, **entries: Any) -> Path:
    """A copy of a checkpoint with other entries in its config."""
    copy = folder / "source"
    shutil.copytree(_case(name) / "checkpoint-3", copy)
    for path in copy.iterdir():
        path.chmod(0o644)
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | entries))
    return copy


# ------------------------------------------------------------------------------------ names of the recipe


@pytest.mark.parametrize("source", CASES)
def test_files_are_those_of_the_recipe(source: str, tmp_path: Path) -> None:
    """In the order of the recipe too, which makes the master weights of each color before all others."""
    real = source if source == AVERAGE else META
    made = _convert(source, tmp_path / "made", **SAME)
    files = oracle.structure(_case(real) / "checkpoint-3")
    oracle.assert_same_structure(oracle.structure(made), files)
    meta = oracle.ordered_json(_case(real) / "checkpoint-3/model_meta.json")
    assert oracle.ordered_json(made / "model_meta.json") == meta
    assert list(differences(made, places_of(_case(real)), _truth(source))) == []
    found = read_expert_parallel(made, _shapes(_truth(source)))
    oracle.assert_same_tensors(found, _truth(source))


def test_a_flex_checkpoint_without_its_config_is_told_how_its_schedule_can_be_ahead() -> None:
    with pytest.raises(CheckpointError, match=r"last_epoch in scheduler.pdparams is 4.*--config FILE"):
        paddle_reshard.plan(_case(FLEX) / "checkpoint-3", to="pp=2")


@pytest.mark.parametrize("target", ["flex", "flex by rank"])
def test_a_flex_checkpoint_has_the_keys_of_the_recipe(target: str, tmp_path: Path) -> None:
    """The optimizer saves a parameter of several modules under one key, weights have all."""
    made = _convert(META, tmp_path / "made", **TARGETS[target])
    for folder in ("model_state", "master_weight", "optimizer_state"):
        held, real = (
            set(oracle_metadata(of / folder).state_dict_metadata)
            for of in (made, _case(FLEX) / "checkpoint-3")
        )
        assert held == real, folder


def test_a_unified_checkpoint_has_the_keys_of_the_recipe(tmp_path: Path) -> None:
    """Of a parameter that several modules have, states are under one of its keys, which tells the reader its name."""
    made = _convert(META, tmp_path / "made", format="unified")
    for name in ("model", "optimizer", "master_weights"):
        held, real = (
            set(json.loads((of / f"{name}.safetensors.index.json").read_bytes())["weight_map"])
            for of in (made, _case(UNIFIED) / "checkpoint-3")
        )
        assert held <= real, (name, sorted(held - real))


def test_each_rank_has_the_files_of_its_own_number(tmp_path: Path) -> None:
    """Under expert parallelism, ranks of one stage that have other experts have numbers next to each other."""
    made = _convert(META, tmp_path / "made", format="flex", **SAME)
    report = json.loads((_case(META) / "truth_report.json").read_bytes())
    holding: dict[str, set[int]] = {}
    for file in (made / "optimizer_state").glob("*.distcp"):
        for key in oracle.load_with_paddle(file):
            if key.endswith(".moment1_0"):
                holding.setdefault(key.removesuffix(".moment1_0"), set()).add(int(file.name.split("_")[0]))
    assert len(holding) == 85
    for key, ranks in holding.items():
        elements = np.prod(_truth(META)[key].shape)
        assert ranks == {piece[0] for piece in report["slices"][key] if piece[5] < elements}, key


@pytest.mark.parametrize(
    ("case", "topology"),
    [
        (f"recipes/{META}", "pp=2,sharding=2,ep=2"),
        ("moe/ep4_mp2pp2sh2_s1v2_meta", "tp=2,pp=2,sharding=2,ep=4"),
        ("moe/moe_mp2pp2sh2_s1v2_meta_ema", "tp=2,pp=2,sharding=2"),
    ],
)
def test_ranks_are_numbered_as_a_real_job_numbers_them(case: str, topology: str) -> None:
    report = json.loads((case_directory(case) / "truth_report.json").read_bytes())
    job = Topology.parse(topology)
    seen = {tuple(rank[:4]) for ranks in report["holders"].values() for rank in ranks}
    assert len(seen) == job.world_size
    for rank, tp, pp, shard in seen:
        assert coordinates_of(rank, job, "paddleformers") == (tp, pp, shard, 0)


def test_what_a_rank_holds_depends_on_the_colors(tmp_path: Path) -> None:
    table = json.loads(TABLE.read_text())
    for row in table["rules"]:
        row.pop("color", None)
    (tmp_path / "table.json").write_text(json.dumps(table))
    with pytest.raises(CheckpointError, match="a job has one limit, so the files are not those of one job"):
        _convert(META, tmp_path / "made", rules=tmp_path / "table.json", **SAME)


def test_a_schedule_may_be_one_step_ahead_and_no_more(tmp_path: Path) -> None:
    """The recipe begins its schedule at step 1; the trainer has made three steps."""
    source = _source(META, tmp_path)
    assert oracle.unpickle(source / "scheduler.pdparams")["last_epoch"] == 4
    assert paddle_reshard.inspect(source).family == "deepseek_v3_pretrain"
    for path in (source / "scheduler.pdparams", *source.glob("optimizer*")):
        before, name, after = path.read_bytes().partition(b"last_epoch")
        assert name
        path.write_bytes(before + name + after.replace(b"K\x04", b"K\x05", 1))
    with pytest.raises(CheckpointError, match=r"global_step is 3, last_epoch in scheduler\.pdparams is 5"):
        paddle_reshard.inspect(source)


@pytest.mark.parametrize(
    ("topology", "words"),
    [
        ("tp=1", "pp=1: .*rope_parameters"),
        ("sharding=2,ep=2", "pp=1: .*rope_parameters"),
        ("pp=2", "ep=1: .*a group that only jobs with expert parallelism have"),
        ("tp=2,pp=2,sharding=2,ep=2", "tp=2: .*asserts that tp is 1"),
    ],
)
def test_jobs_that_the_recipe_cannot_start_are_refused(topology: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=words):
        _convert(META, tmp_path / "made", to=topology, layout={"sequence_parallel": True})
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("entry", ["use_dualpipev", "tie_word_embeddings"])
def test_options_that_are_not_known_are_refused(entry: str, tmp_path: Path) -> None:
    with pytest.raises(RuleError, match=rf"config.json says {entry}=True.*not supported"):
        paddle_reshard.convert(_source(META, tmp_path, **{entry: True}), tmp_path / "made", **SAME)


def test_formats_that_the_recipe_does_not_write_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RuleError, match="not for auto-parallel: no file of another one was available"):
        _convert(META, tmp_path / "made", format="auto-parallel")


def test_launch_names_the_recipe(tmp_path: Path) -> None:
    found = paddle_reshard.launch(_convert(META, tmp_path / "made", **TARGETS["more expert ranks"]))
    assert found.ranks == 8
    assert "--stage dsv3_pretrain" in found.command_line()
    assert "--pipeline_model_parallel_size 2 --expert_model_parallel_size 4" in found.command_line()


# ------------------------------------------------------------------------------------- names of others


def test_an_export_says_what_it_leaves_out(tmp_path: Path) -> None:
    planned = paddle_reshard.plan(_case(META) / "checkpoint-3", format="huggingface")
    left = dict(planned.targets[0].not_carried)
    for key in ("input_layernorm.weight", "self_attn.input_layernorm.weight"):
        assert "computes nothing with it" in left[f"deepseek_v2.layers.2.{key}"]


@pytest.mark.parametrize("between", [{}, {"to": "pp=2"}, {"format": "flex"}], ids=str)
@pytest.mark.parametrize("source", CASES)
def test_the_library_goes_on_with_all_states(source: str, between: dict[str, Any], tmp_path: Path) -> None:
    """Fine-tuning under the names of PaddleFormers' deepseek_v3: parameters, optimizer and average."""
    mtp = {"drop": ["mtp"]} if source == AVERAGE else {}
    asked = {"to": "sharding=2,ep=2", "sharding_strategy": "stage1v2"}
    made = _convert(source, tmp_path / "made", convention="paddleformers", **(between or asked), **mtp)
    if between:
        config = made / "config.json"
        config = config if config.exists() else _config(META)
        paddle_reshard.convert(made, tmp_path / "shards", config=config, **asked)
        made = tmp_path / "shards"
    truth = named(_truth(source), "lm_head", r"layers\.3\." if mtp else r"$^")
    oracle.assert_same_tensors(read_expert_parallel(made, _shapes(truth)), truth)


def test_the_library_has_a_bias_in_its_mtp_layer_that_the_recipe_lacks(tmp_path: Path) -> None:
    with pytest.raises(CoverageError, match=r"eh_proj\.bias"):
        _convert(AVERAGE, tmp_path / "made", convention="paddleformers", to="sharding=2,ep=2")


def test_names_of_the_library_leave_out_what_it_does_not_train(tmp_path: Path) -> None:
    planned = paddle_reshard.plan(
        _case(META) / "checkpoint-3", convention="paddleformers", to="sharding=2,ep=2"
    )
    left = dict(planned.targets[0].not_carried)
    assert "does not train it" in left[f"model.layers.1.mlp.gate.{BIAS} (moment1)"]
    assert "computes nothing with it" in left["deepseek_v2.layers.0.input_layernorm.weight"]
