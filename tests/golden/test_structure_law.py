"""The structure of a target depends on the model and the target's options alone, never on the source.

Real checkpoints of one model, in every topology and format, and conversions of them to others, are planned to the same
target: the plans write the same files, with the same keys in the same order, of the same shapes and dtypes, under the
same parameter names. No real job is needed for this, so it also holds for targets of which there is none.

``config.json`` and ``lora_config.json`` are no part of the structure: they are the source's, with what the target
requires changed in them.
"""

from __future__ import annotations

import itertools
import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

import paddle_reshard
from paddle_reshard.pipeline.core.errors import PlanError
from tests import oracle
from tests.conftest import case_directory
from tests.golden.test_as_the_job_reads import BIAS, MODELS, truth_of

PARALLEL, SERIAL = {"sequence_parallel": True}, {"sequence_parallel": False}
EXPERTS = {"sequence_parallel": True, "use_unified_moe": False}
TARGETS: dict[str, dict[str, Any]] = {
    "every axis": {"to": "tp=2,pp=2,sharding=2", "sharding_strategy": "stage1v2", "layout": PARALLEL},
    "experts across tp": {"to": "tp=2,pp=2,sharding=2,ep=4", "sharding_strategy": "stage1v2", "layout": EXPERTS},
    "one card": {"to": "tp=1"},
    "tensors cut": {"to": "tp=2", "layout": SERIAL},
    "tensors cut in sequence": {"to": "tp=2", "layout": PARALLEL},
    "stages": {"to": "pp=2"},
    "owners": {"to": "sharding=2", "sharding_strategy": "stage1v1"},
    "slices": {"to": "sharding=3", "sharding_strategy": "stage1v2"},
    "slices, plain": {"to": "sharding=3", "sharding_strategy": "stage1v2", "format": "hybrid-plain"},
    "stage 2": {"to": "sharding=2", "sharding_strategy": "stage2"},
    "stage 3": {"to": "sharding=3", "sharding_strategy": "stage3", "layout": {"stage3_segment_size": 512}},
    "experts": {"to": "sharding=2,ep=2", "sharding_strategy": "stage1v2", "layout": {"use_unified_moe": True}},
    "experts, plain": {
        "to": "tp=2,sharding=4,ep=4", "sharding_strategy": "stage1v2", "format": "hybrid-plain",
        "layout": EXPERTS,
    },
    "experts over dp": {"to": "ep=2,dp=2,tp=2,pp=2", "layout": SERIAL},
    "FlexCheckpoint": {"format": "flex", "max_shard_size": "20KB"},
    "unified": {"format": "unified"},
    "auto-parallel": {"format": "auto-parallel"},
    "Hugging Face": {"format": "huggingface"},
}  # fmt: skip
"""Every option that would otherwise be taken from the source is given."""
DERIVED = ("experts across tp", "every axis", "experts over dp", "FlexCheckpoint", "unified", "auto-parallel")
"""Targets that are sources in turn: in topologies of which there is no real checkpoint, and in other formats."""
NOT_OF_TENSORS = ("config.json", "lora_config.json", "scheduler.pdparams")
Structure = dict[str, list[str]]


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("derived")


def given_to(case: str, work: Path) -> dict[str, Any]:
    """Options that complete a source: what sharded saving lost, averages that only some jobs keep, and a config."""
    checkpoint = case_directory(case) / "checkpoint-3"
    given: dict[str, Any] = {"drop": ["ema"]} if case.endswith("ema") else {}
    lost = {key: np.array(array) for key, array in truth_of(case).items() if key.endswith(BIAS)}
    if lost and "_meta" in case:
        given["fill"] = work / f"{case.replace('/', '_')}.safetensors"
        save_file(lost, given["fill"])
    if not (checkpoint / "config.json").exists():
        given["config"] = config_like(case)
    return given


def config_like(case: str) -> Path:
    first = next(cases[0] for cases in MODELS.values() if case in cases)
    return case_directory(first) / "checkpoint-3" / "config.json"


def sources_of(model: str, derived: Sequence[str], work: Path) -> dict[str, tuple[Path, dict[str, Any]]]:
    """Name of a source → folder and options: real ones, and what one of them becomes."""
    found = {case: (case_directory(case) / "checkpoint-3", given_to(case, work)) for case in MODELS[model]}
    first, given = found[MODELS[model][0]]
    for name in derived:
        folder = work / model / name
        if not folder.exists():
            try:
                paddle_reshard.convert(first, folder, **TARGETS[name], **given)
            except PlanError:
                continue  # the trainer has no such job of this model
        config = {} if (folder / "config.json").exists() else {"config": config_like(MODELS[model][0])}
        found[f"{name} of {MODELS[model][0]}"] = folder, config
    return found


def structure_of(plan: paddle_reshard.ConversionPlan, folder: Path) -> Structure:
    """What the files will be, of the bytes that a plan knows before any value is read."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    contents = [bytearray(file.size_bytes) for file in plan.plan.target_files]
    for file, offset, content in plan.plan.literals:
        contents[file][offset : offset + len(content)] = content
    found: Structure = {}
    for file, content in zip(plan.plan.target_files, contents, strict=True):
        if file.path in NOT_OF_TENSORS:
            continue
        path = folder / Path(file.path).name
        path.write_bytes(content)
        found[file.path] = [_as_read(entry) for entry in _entries(path)]
    for cell, names in plan.targets[0].files.parameter_names.items():
        found[f"names of {cell}"] = [_as_read(pair) for pair in names.items()]
    return found


def _entries(path: Path) -> list[Any]:
    if oracle.is_tensor_file(path.name):
        return [e for e in oracle.structure(path.parent)[path.name] if not e[0].startswith("LR_Scheduler/")]
    content = path.read_bytes()
    if path.suffix == ".safetensors":
        content = content[8 : 8 + int.from_bytes(content[:8], "little")]
    if path.suffix in (".json", ".safetensors"):
        return list(json.loads(content, object_pairs_hook=list))
    return [content]


def _as_read(entry: object) -> str:
    """Without the counter in the name of a nameless buffer, which no reader looks at."""
    return re.sub(r"eager_tmp_\d+", "eager_tmp", repr(entry))


def check(model: str, name: str, derived: Sequence[str], work: Path, tmp_path: Path) -> None:
    found: dict[str, Structure] = {}
    refused: dict[str, str] = {}
    for source, (folder, given) in sources_of(model, derived, work).items():
        try:
            plan = paddle_reshard.plan(folder, replicas="report", **TARGETS[name], **given)
        except PlanError as error:
            refused[source] = str(error)
            continue
        found[source] = structure_of(plan, tmp_path / "files")
    assert not (refused and found), refused
    if not found:
        return  # the trainer has no such job of this model
    first, *others = found.items()
    for source, structure in others:
        where = f"{source} and {first[0]}"
        assert list(structure) == list(first[1]), where
        for path, entries in structure.items():
            assert entries == first[1][path], f"{path} from {where}"


WITH_EXPERTS = [model for model in MODELS if "moe" in model or "deepseek" in model]


@pytest.mark.parametrize("model", sorted(WITH_EXPERTS, key="deepseek_v3".__ne__))
def test_experts_come_from_any_ranks(model: str, work: Path, tmp_path: Path) -> None:
    check(model, "one card", ("experts across tp",), work, tmp_path)


@pytest.mark.parametrize(
    "model", ["LoRA", "llama", "llama, tied", "qwen3_moe", "deepseek_v2 of paddlenlp with MTP"]
)
def test_it_depends_on_the_model_and_the_target_alone(model: str, work: Path, tmp_path: Path) -> None:
    check(model, "every axis", ("FlexCheckpoint",), work, tmp_path)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("model", "name"), list(itertools.product(MODELS, TARGETS)))
def test_every_source_to_every_target(model: str, name: str, work: Path, tmp_path: Path) -> None:
    check(model, name, DERIVED, work, tmp_path)
