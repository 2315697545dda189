"""LoRA: what is trained beside a base model moves between topologies with its optimizer states, bit for bit."""

from __future__ import annotations

import itertools
import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import paddle_reshard
from paddle_reshard.pipeline.core.errors import (
    CheckpointError,
    CoverageError,
    PlanError,
    ReshardError,
    UnsupportedError,
)
from tests import oracle
from tests.conftest import case_directory
from tests.golden.compare_one_card import load, read_flex
from tests.golden.unified_cases import write_safetensors

TOPOLOGIES: dict[str, dict[str, Any]] = {
    "lora_single": {"to": "tp=1"},
    "lora_pp2": {"to": "pp=2"},
    "lora_sh2_s1v1": {"to": "sharding=2", "sharding_strategy": "stage1v1", "format": "hybrid-plain"},
    "lora_sh2_s1v2_meta": {"to": "sharding=2", "sharding_strategy": "stage1v2"},
    "lora_mp2pp2_sp": {"to": "tp=2,pp=2", "layout": {"sequence_parallel": True}},
    "lora_qwen2_full_single": {"to": "tp=1"},
    "lora_qwen2_full_pp2": {"to": "pp=2"},
}
"""Case → how its topology is asked for. With ``full``, biases and two kinds of whole tensors are trained too."""
PAIRS = [
    *itertools.permutations(("lora_single", "lora_pp2", "lora_sh2_s1v1", "lora_sh2_s1v2_meta"), 2),
    ("lora_single", "lora_mp2pp2_sp"),
    ("lora_mp2pp2_sp", "lora_mp2pp2_sp"),
    ("lora_mp2pp2_sp", "lora_sh2_s1v2_meta"),
    ("lora_qwen2_full_single", "lora_qwen2_full_pp2"),
    ("lora_qwen2_full_pp2", "lora_qwen2_full_single"),
]
BEYOND: dict[str, dict[str, Any]] = {
    "tp2pp2": {"to": "tp=2,pp=2", "layout": {"sequence_parallel": False}},
    "tp2pp2sh2_v1": {"to": "tp=2,pp=2,sharding=2", "sharding_strategy": "stage1v1"},
    "tp2pp2sh2_v2": {"to": "tp=2,pp=2,sharding=2", "sharding_strategy": "stage1v2"},
    "sh4_stage2": {"to": "sharding=4", "sharding_strategy": "stage2"},
}
"""Topologies of which there is no real checkpoint."""
FLEX = ("lora_fc_single", "lora_fc_mp2")
OF_ITS_JOB = {"initializer_range", "moe_group_origin", "moe_rank", "moe_world_size"}
"""Entries of config.json that the trainer of lora_pp2 wrote for reasons other than its topology."""


def checkpoint(name: str) -> Path:
    return case_directory(f"states/{name}") / "checkpoint-3"


def config_of(name: str) -> Path:
    return checkpoint("lora_qwen2_single" if "qwen2" in name else "lora_single") / "config.json"


@cache
def truth_of(name: str) -> oracle.Tensors:
    return oracle.read_truth(case_directory(f"states/{name}") / "truth.safetensors")


def assert_equals_truth(folder: Path, name: str) -> None:
    truth = truth_of(name)
    oracle.assert_same_tensors(oracle.read_checkpoint(folder, oracle.shapes_of(truth)), truth)


def json_of(path: Path) -> dict[str, Any]:
    return json.loads(path.read_bytes())


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_a_target_is_what_the_trainer_writes_there(source: str, target: str, tmp_path: Path) -> None:
    """Values are those of the source; files, keys, names, model_meta.json and lora_config.json those of the target."""
    made, real = tmp_path / "made", checkpoint(target)
    paddle_reshard.convert(checkpoint(source), made, **TOPOLOGIES[target])
    assert_equals_truth(made, source)
    ours, theirs = oracle.structure(made), oracle.structure(real)
    assert ours == theirs
    for name in ("model_meta.json", "lora_config.json"):
        assert (made / name).exists() == (real / name).exists()
        if (real / name).exists():
            assert (made / name).read_bytes() == (real / name).read_bytes()
    ours, theirs = json_of(made / "config.json"), json_of(real / "config.json")
    assert {k: v for k, v in ours.items() if k not in OF_ITS_JOB} == {
        k: v for k, v in theirs.items() if k not in OF_ITS_JOB
    }


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("lora_qwen2_full_single", "tp2pp2"),
        ("lora_single", "tp2pp2sh2_v1"),
        ("lora_qwen2_single", "tp2pp2sh2_v2"),
        ("lora_qwen2_single", "sh4_stage2"),
    ],
)
def test_a_topology_and_back(source: str, target: str, tmp_path: Path) -> None:
    """Fused projections of Qwen2 too: a tp rank holds its columns of the gate and of the up part of lora_B."""
    there, back = tmp_path / "there", tmp_path / "back"
    paddle_reshard.convert(checkpoint(source), there, **BEYOND[target])
    assert_equals_truth(there, source)
    tp = 2 if "tp2" in target else 1
    assert json_of(there / "lora_config.json")["tensor_model_parallel_size"] == tp
    paddle_reshard.convert(there, back, to="tp=1")
    assert_equals_truth(back, source)
    assert (back / "lora_config.json").read_bytes() == (checkpoint(source) / "lora_config.json").read_bytes()


def test_names_under_tensor_parallelism_are_those_of_the_parallel_layers(tmp_path: Path) -> None:
    """As in the FlexCheckpoint of a real tp=2 job, which tells the names of its master weights."""
    made = tmp_path / "made"
    paddle_reshard.convert(checkpoint("lora_single"), made, **BEYOND["tp2pp2"])
    told = {}
    for rank in (0, 1):
        told |= load(checkpoint("lora_fc_mp2") / f"master_weight/{rank}_0.distcp")[oracle.NAME_TABLE]
    names = oracle.unpickle(made / "lora_model_state.tp00_pp00.pdparams")[oracle.NAME_TABLE]
    assert names
    for key, name in names.items():
        assert told[f"{key}.w_0"] == f"{name}_fp32_master_0"


@pytest.mark.parametrize("target", ["tp2pp2", "tp2pp2sh2_v2"])
def test_a_flexcheckpoint_becomes_the_files_of_ranks(target: str, tmp_path: Path) -> None:
    """The base, which it holds too, stays where the job has it from, and the report says so."""
    source = "lora_fc_mp2"
    report = paddle_reshard.convert(
        checkpoint(source), tmp_path / "made", config=config_of(source), **BEYOND[target]
    )
    assert_equals_truth(tmp_path / "made", source)
    told = [value for name, value in report.plan.facts() if name == "not carried"]
    assert any("(21): belongs to the base model" in value for value in told)


@pytest.mark.parametrize("source", ["lora_single", "lora_pp2", "lora_sh2_s1v2_meta", "lora_qwen2_full_pp2"])
def test_matrices_become_a_flexcheckpoint_with_the_base_that_is_given(source: str, tmp_path: Path) -> None:
    base = case_directory(f"states/{source}") / "truth_base.safetensors"
    held = oracle.read_truth(base)
    given, trained = tmp_path / "base.safetensors", truth_of(source)
    write_safetensors(
        given, {k: ("BF16", a.shape, a.tobytes()) for k, a in held.items() if k not in trained}, "np"
    )
    paddle_reshard.convert(checkpoint(source), tmp_path / "made", format="flex", fill=given)
    assert read_flex(tmp_path / "made") == {k: a.tobytes() for k, a in {**held, **trained}.items()}


def test_the_base_of_a_unified_checkpoint_makes_the_trainers_own_flexcheckpoint(tmp_path: Path) -> None:
    """It trained the same adapter on the same base."""
    base = case_directory("states/lora_single") / "base"
    paddle_reshard.convert(base, tmp_path / "base", format="unified")
    (given,) = (tmp_path / "base").glob("model-*.safetensors")
    paddle_reshard.convert(checkpoint("lora_single"), tmp_path / "made", format="flex", fill=given)
    assert read_flex(tmp_path / "made") == read_flex(checkpoint("lora_fc_single"))
    paddle_reshard.convert(checkpoint("lora_single"), tmp_path / "again", format="flex", fill=base)
    assert read_flex(tmp_path / "again") == read_flex(tmp_path / "made")


def test_a_part_of_the_base_is_refused(tmp_path: Path) -> None:
    held = oracle.read_truth(case_directory("states/lora_single") / "truth_base.safetensors")
    held.pop("model.norm.weight")
    write_safetensors(tmp_path / "part", {k: ("BF16", a.shape, a.tobytes()) for k, a in held.items()}, "np")
    with pytest.raises(CoverageError, match=r"model\.norm\.weight: belongs to the base .* give the"):
        paddle_reshard.plan(checkpoint("lora_single"), format="flex", fill=tmp_path / "part")


@pytest.mark.parametrize("source", FLEX)
def test_a_flexcheckpoint_keeps_its_base(source: str, tmp_path: Path) -> None:
    paddle_reshard.convert(checkpoint(source), tmp_path / "made", format="flex", config=config_of(source))
    truth = {
        **truth_of(source),
        **oracle.read_truth(case_directory(f"states/{source}") / "truth_base.safetensors"),
    }
    assert read_flex(tmp_path / "made") == {key: array.tobytes() for key, array in truth.items()}


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        (
            {"to": "tp=2"},
            PlanError,
            "without pipeline parallelism the trainer merges .* pp=2 or more; or use --format huggingface or flex",
        ),
        (
            {"format": "flex"},
            PlanError,
            "also holds the base model, .* or use --format hybrid, hybrid-plain or huggingface",
        ),
        ({"format": "unified"}, UnsupportedError, "the format unified cannot hold LoRA; use --format hybrid"),
        ({"format": "auto-parallel"}, UnsupportedError, "the format auto-parallel cannot hold LoRA"),
    ],
)
def test_what_it_cannot_become_is_refused(
    options: dict[str, Any], error: type[Exception], words: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=words):
        paddle_reshard.convert(checkpoint("lora_single"), tmp_path / "made", **options)
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        (
            {"r": 5, "scaling": 1.6},
            r"shape \(32, 4\), that of lora_B is \(4, 32\), lora_config.json says r=5",
        ),
        ({"r": 0}, "r is 0; a rank of 1 or more is expected"),
        ({"loraga": True}, "loraga is set"),
        (
            {"pissa": True},
            r"pissa is set: .* remove the entry$",
        ),  # its base is no longer the one that it names
        ({"init_lora_weights": "olora"}, "init_lora_weights is set"),
        ({"do_qat": True}, "do_qat is set"),
        ({"scaling": 4.0}, "scaling is 4.0, but lora_alpha=8 and r=4 give 2.0"),
        ({"rslora": True}, "scaling is 2.0, but lora_alpha=8 and r=4 with rslora give 4.0"),
    ],
)
def test_a_lora_config_of_another_adapter_is_refused(
    entries: dict[str, Any], words: str, tmp_path: Path
) -> None:
    source = copied(checkpoint("lora_single"), tmp_path / "source")
    edit_json(source / "lora_config.json", entries)
    with pytest.raises(ReshardError, match=words):
        paddle_reshard.inspect(source)


def test_matrices_of_another_model_are_refused(tmp_path: Path) -> None:
    source = copied(checkpoint("lora_single"), tmp_path / "source")
    edit_json(source / "config.json", {"intermediate_size": 64})
    with pytest.raises(
        ReshardError, match=r"gate_proj.lora_B: shape \(4, 48\) does not fit the shape \(32, 64\)"
    ):
        paddle_reshard.inspect(source)


def test_one_folder_holds_one_checkpoint(tmp_path: Path) -> None:
    source = copied(checkpoint("lora_single"), tmp_path / "source")
    shutil.copy(source / "lora_model_state.pdparams", source / "model_state.pdparams")
    with pytest.raises(CheckpointError, match="belongs to full training and lora_model_state"):
        paddle_reshard.inspect(source)


def test_inspect_shows_rank_scaling_and_base() -> None:
    found = paddle_reshard.inspect(checkpoint("lora_pp2"))
    assert ("LoRA", "rank 4, scaling 2, base model base") in found.facts()
    assert {tensor.key.rpartition(".")[2] for tensor in found.tensors} == {"lora_A", "lora_B"}


def copied(folder: Path, to: Path) -> Path:
    return Path(shutil.copytree(folder, to, copy_function=shutil.copyfile))


def edit_json(path: Path, entries: dict[str, Any]) -> None:
    path.write_text(json.dumps({**json_of(path), **entries}))
