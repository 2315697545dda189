"""Newer cases in every strategy and format that they can have, in two topologies each: all equals the truth.

What is written is read by the laboratory's own reader (``tests/lab/reader.py``: NumPy and pickle alone),
which compared the trainers' files with the truth when the corpus was made. What no trainer of the family can have is
refused. ``make exhaustive`` converts all cases. LoRA, Muon and AdamWMini have tests of their own.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import paddle_reshard
from paddle_reshard.pipeline.core.errors import ReshardError
from tests import oracle
from tests.conftest import case_directory
from tests.golden.test_newer_checkpoints import CONVERTED, DRIFTED, checkpoint, config_of, truth_of
from tests.lab import reader
from tests.sampling import exhaustive

BIAS = "*e_score_correction_bias"
V1, V2 = {"sharding_strategy": "stage1v1"}, {"sharding_strategy": "stage1v2"}
TARGETS: dict[str, dict[str, Any]] = {
    "card": {"to": "tp=1"},
    "tp": {"to": "tp=2"},
    "pp": {"to": "pp=2"},
    "v1": {"to": "sharding=2", **V1},
    "pp, v1": {"to": "pp=2,sharding=2", **V1},
    "v2": {"to": "sharding=3", **V2},
    "tp, v2": {"to": "tp=2,sharding=2", **V2},
    "v1, plain": {"to": "sharding=3", "format": "hybrid-plain", **V1},
    "v2, plain": {"to": "pp=2,sharding=2", "format": "hybrid-plain", **V2},
    "stage 2": {"to": "sharding=2", "sharding_strategy": "stage2"},
    "stage 3": {"to": "sharding=2", "sharding_strategy": "stage3"},
    "flex": {"format": "flex"},
    "flex, files": {"format": "flex", "max_shard_size": "20KB"},
    "unified": {"format": "unified"},
    "unified, files": {"format": "unified", "max_shard_size": "20KB"},
}
STAGES, SHARDED = ("pp*", "v2, plain"), ("*v1", "*v2", "v?, plain", "stage*")
REFUSED: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("states/ernie45_mtp*", STAGES, "pipeline class of ernie4_5_moe has no multi-token prediction; omit it with"),
    ("states/noopt_*", ("v1", "v2", "pp, v1", "tp, v2"), "holds parameters only, and a target with model_meta"),
    ("families/ernie4_5_moe_vl*", ("v1", "v2", "pp, v1", "tp, v2"), "holds parameters only, and a target with"),
    ("families/ernie4_5_moe_vl*", ("tp", "pp", "v2, plain", "unified*"), "ernie4_5_moe_vl"),
    ("families/ernie4_5_single", STAGES, "segmentation 'layer:Ernie4_5DecoderLayer.* matches none of"),
    ("families/gemma3_text*", ("tp*",), "paddleformers cannot train gemma3_text with it"),
    ("families/paddleocr_vl*", ("tp*",), "paddleformers cannot train paddleocr_vl with it"),
    ("families/paddleocr_vl_single", SHARDED, "has no optimizer states in the source, as in a job without sharding"),
    ("families/*_vl*", STAGES, "paddleformers has no pipeline class of"),
    ("families/qwen3_moe_fused_single", ("flex*",), "neither saves the states of stacked experts in a FlexCheckpoint"),
    ("families/glm*", STAGES, "paddleformers has no pipeline class of"),
)  # fmt: skip
"""Cases and targets (patterns) → what the error says."""
CASES = [case for case in CONVERTED if "lora" not in case and "opt_mini" not in case]
PAIRS = [
    (case, target)
    for case in CASES
    for target in TARGETS
    if not ("phi3" in case and target.startswith("tp"))  # the reader does not know how it fuses qkv_proj
]
QUICK = (("states/dsv3_mtp_fc_sh2_s1v2_ema", "v1"),)
"""Of ``make test`` besides a sample: buffers with averages, whose ranks ``model_meta.json`` does not name."""


def outcome(case: str, target: str, folder: Path) -> str:
    """``equal``, the reason of the refusal, or what differs."""
    options: dict[str, Any] = {"config": config_of(case), "allow_missing": [BIAS], **TARGETS[target]}
    if "unified" in target and "ema" in case:
        options["drop"] = ["ema"]
    try:
        paddle_reshard.convert(
            checkpoint(case), folder, replicas="report" if case in DRIFTED else "compare", **options
        )
    except ReshardError as error:
        return str(error)
    found: set[str] = set()
    of_model = oracle.read_truth(case_directory(case) / "truth.safetensors")
    for truth in (truth_of(case), of_model):  # qwen2_5_vl has other keys in files without model_meta.json
        wanted = {key: reader.f32(array) for key, array in as_saved(case, truth).items()}
        found = differences(reader.read(folder, wanted), wanted, "unified" in target)
        if not found:
            return "equal"
    return f"{len(found)} differences: {sorted(found)[:4]}"


def as_saved(case: str, truth: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The truth as far as the options of the job let it be saved."""
    parameters = {key: truth[key] for key in oracle.shapes_of(truth)}
    if "noopt" in case:
        return parameters
    if "rmmaster" in case:  # the loader makes master weights of the parameters
        return {**truth, **{f"{key}.w_0": reader.f32(array) for key, array in parameters.items()}}
    return dict(truth)


def differences(found: dict[str, np.ndarray], truth: dict[str, np.ndarray], unified: bool) -> set[str]:
    """Keys that only one of them has, or with other values; buffers that sharded saving loses aside."""
    made = found.keys() - truth.keys()
    if unified:  # no averages, and float32 parameters have a master weight, which is the parameter
        truth = {key: array for key, array in truth.items() if not key.endswith((".ema", ".ema_w_0"))}
        made = {
            key
            for key in made
            if not key.endswith(".w_0") or not np.array_equal(found[key], truth.get(key[:-4], np.empty(0)))
        }
    lacking = {key for key in truth.keys() - found.keys() if not fnmatchcase(key, BIAS)}
    if unified:  # one rank stores the states of tied words under one of their keys
        twins = {key: key.replace("model.embed_tokens", "lm_head") for key in lacking}
        lacking = {key for key, twin in twins.items() if not np.array_equal(truth[key], found.get(twin, ()))}
    other = {key for key in truth.keys() & found.keys() if not np.array_equal(found[key], truth[key])}
    return made | lacking | other


@pytest.mark.parametrize(
    ("case", "target"),
    [pair if number % 101 == 50 or pair in QUICK else exhaustive(*pair) for number, pair in enumerate(PAIRS)],
)
def test_it_equals_the_truth_or_is_refused(case: str, target: str, tmp_path: Path) -> None:
    result = outcome(case, target, tmp_path / "made")
    reasons = [
        reason
        for cases, targets, reason in REFUSED
        if fnmatchcase(case, cases) and any(fnmatchcase(target, one) for one in targets)
    ]
    if reasons:
        assert re.search(reasons[0], result)
        assert not (tmp_path / "made").exists()
    else:
        assert result == "equal"
