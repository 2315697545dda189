"""Every real checkpoint becomes every format, and from each of them the very files that it becomes directly.

That these hold the truth is what the tests of each family show, with readers of their own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open

import paddle_reshard
from paddle_reshard.pipeline.request.options import TargetOptions
from tests import oracle
from tests.conftest import case_directory, case_names
from tests.golden.test_flex import LOAD, by_folder
from tests.kept import BUFFERS, check_kept, lines_of
from tests.paddle_processes import run_paddle
from tests.sampling import exhaustive

TOPOLOGIES: dict[str, TargetOptions] = {
    "tensor": {"to": "tp=2"},
    # By default the trainer starts no pipeline of gpt_oss, and none of two stages with three layers of glm4_moe.
    "stages": {
        "to": "pp=2,sharding=2",
        "sharding_strategy": "stage1v2",
        "layout": {"segmentation": "uniform"},
    },
}
FORMATS: dict[str, TargetOptions] = {
    "flex": {"format": "flex", "max_shard_size": "200KB"},
    "unified": {"format": "unified"},
    "auto-parallel": {"format": "auto-parallel"},
    "model": {"format": "huggingface"},
}
NAMELESS = ("moe/dsv3_single", "moe/glm4moe_single")
"""Buffers that nobody named have a number in their files, which no other format keeps and no loader looks at."""
STACKED = "moe_fused"
"""In the names of cases whose experts are one tensor."""
TOY = ("auto_dp2mp2",)
"""No model of any family; its own test has the rules for it."""
MODELS = (
    *("dense/fc_mp2pp2sh2_s1v2", "dense/mp2_tied", "dense/mp2pp2sh2_s1v2_meta_ema", "dense/nlp_fused_mp2"),
    *("dense/sh2_s1v1_meta_fp32", "dense/uc_sh2_s1v2", "moe/dsv3_single", "moe/ernie45moe_single"),
    *("moe/glm4moe_single", "moe/gptoss_single", "moe/moe_fused_sh2_s1v2_meta"),
    *("moe/moe_mp2pp2sh2_s1v2_meta_ema", "moe/nlp_dsv2_ep_dp2sh2_s1v2_meta", "moe/nlp_qwen2moe_single"),
    "moe/qwen2moe_single",
)
"""A case of every model. The others, in further topologies, are the same to every format once they are read, which
other tests show of each of them; ``make exhaustive`` converts them too."""


def cases() -> list[str]:
    return [name for name in (*case_names("dense"), *case_names("moe")) if name.partition("/")[2] not in TOY]


def folder_of(case: str) -> Path:
    return case_directory(case) / "checkpoint-3"


def config_of(case: str) -> Path | None:
    """FlexCheckpoints come without it; that of the same model on one card."""
    folder = folder_of(case)
    siblings = {"dense": "single", "moe": "moe_single", "states": "fp16_single"}
    group = case.partition("/")[0]
    return (
        None if (folder / "config.json").exists() else folder_of(f"{group}/{siblings[group]}") / "config.json"
    )


def formats_of(case: str) -> dict[str, TargetOptions]:
    """Auto-parallel training knows no average and no PaddleNLP heads; stacked experts no FlexCheckpoint, no export."""
    without = set()
    if "ema" in case or case.endswith("_mid") or "nlp" in case:
        without.add("auto-parallel")
    if STACKED in case:
        without |= {"flex", "model"}
    return {name: options for name, options in FORMATS.items() if name not in without}


def tensor_files(folder: Path) -> dict[str, bytes]:
    return {
        path.name: path.read_bytes()
        for path in folder.iterdir()
        if path.suffix in (".pdparams", ".pdopt") and path.name != "scheduler.pdparams"
    }


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=() if case in MODELS else pytest.mark.exhaustive) for case in cases()]
)
def test_there_and_on_is_the_straight_way(case: str, tmp_path: Path) -> None:
    source, formats = folder_of(case), formats_of(case)
    asked: dict[Any, TargetOptions] = {tmp_path / "card": {"to": "tp=1"}}
    asked |= {tmp_path / name: options for name, options in (TOPOLOGIES | formats).items()}
    paddle_reshard.convert(source, asked, replicas="report", config=config_of(case), allow_missing=BUFFERS)
    straight = tensor_files(tmp_path / "card")
    assert straight
    for name in (TOPOLOGIES | formats).keys() - {"model"}:
        onward = tmp_path / f"{name} card"
        paddle_reshard.convert(tmp_path / name, onward, to="tp=1", allow_missing=BUFFERS)
        found = tensor_files(onward)
        if name == "unified":
            check_kept("unified", lines_of(tmp_path / "card"), lines_of(onward))
        elif name in TOPOLOGIES or case not in NAMELESS:
            assert found == straight, name
        else:
            assert found.pop("optimizer.pdopt") == straight["optimizer.pdopt"], name
            assert paddle_reshard.verify(onward, tmp_path / "card").equal, name
    for path in [*(tmp_path / "unified").glob("*.safetensors"), *(tmp_path / "model").glob("*.safetensors")]:
        with safe_open(path, "numpy") as opened:  # the library checks every offset and size
            assert opened.keys()
    if "model" in formats:
        assert paddle_reshard.verify(
            tmp_path / "card", tmp_path / "model", states=["param"], allow_missing=BUFFERS
        ).equal


DRIFTED = "moe/ep2_fc_mp2"
"""A FlexCheckpoint keeps any rank's copy of what has drifted apart, the truth the first one's."""
MUON = "states/muon_fc_sh2_split"
"""A FlexCheckpoint in which tensors have different states."""


LOADABLE = [case for case in cases() if STACKED not in case and case != DRIFTED]
LOADED = {
    "few": [
        *[case for case in MODELS if case in LOADABLE][::4],
        MUON,
    ],  # its loader knows tensors, not models
    "other models": [case for number, case in enumerate(c for c in MODELS if c in LOADABLE) if number % 4],
    "the others": [case for case in LOADABLE if case not in MODELS],
}


@pytest.mark.parametrize(
    "chosen", ["few", pytest.param("other models", marks=pytest.mark.full), exhaustive("the others")]
)
def test_paddle_loads_every_dist_checkpoint(chosen: str, tmp_path: Path) -> None:
    """All of them by one process, against what each training run held in memory."""
    pairs, count = [], 0
    for number, case in enumerate(LOADED[chosen]):
        made = tmp_path / str(number)
        paddle_reshard.convert(
            folder_of(case),
            made,
            format="flex",
            max_shard_size="200KB",
            config=config_of(case),
            allow_missing=BUFFERS,
            replicas="report",
        )
        truth = oracle.read_truth(folder_of(case).parent / "truth.safetensors")
        held = {key: value for key, value in truth.items() if not key.endswith("e_score_correction_bias")}
        for folder, tensors in by_folder(held).items():
            np.savez(made / f"{folder}.npz", **tensors)
            pairs += [made / folder, made / f"{folder}.npz"]
            count += len(tensors)
    assert run_paddle(LOAD, *pairs).strip().endswith(f"equal {count}")
