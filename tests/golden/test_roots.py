"""Any way from A over B to C keeps all fingerprints: over every real checkpoint, and every two formats."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

import paddle_reshard
from paddle_reshard import CoverageError, PlanError, UnsupportedError, UsageError
from paddle_reshard.pipeline.request.options import TargetOptions
from tests.conftest import case_directory, case_names
from tests.golden.test_every_format import config_of
from tests.kept import BUFFERS, Lines, check_kept, lines_of
from tests.sampling import exhaustive

WAYS: dict[str, TargetOptions] = {
    "tensor": {"to": "tp=2"},
    "stages": {"to": "pp=2,sharding=2", "sharding_strategy": "stage1v2"},
    "flex": {"format": "flex", "max_shard_size": "200KB"},
    "auto-parallel": {"format": "auto-parallel"},
    "unified": {"format": "unified"},
    "model": {"format": "huggingface"},
}
GROUPS = ("dense", "moe", "states", "small-families", "small-flex", "small-unified", "families")
QUICK = ("small-families/qwen3_single", "small-flex/fc_moe_mp2sh2_s1v2_ema")
"""Cases of ``make test``, the second one with experts and averages; from each B it goes on to one C."""


def converted(
    case: str, source: Path, into: Path, config: Path | None, ways: Iterable[str] = WAYS
) -> dict[str, Path]:
    """The targets in all forms that the checkpoint can have; what is refused is so by name, before anything is made."""
    options: dict[str, Any] = {"config": config, "allow_missing": BUFFERS, "replicas": "report"}
    targets = {}
    for name in ways:
        if name == "model" and "lora" in case:  # an adapter alone is no model
            continue
        drop = ["ema"] if name == "unified" else []
        try:
            paddle_reshard.convert(source, into / name, drop=drop, **options, **WAYS[name])
        except (CoverageError, PlanError, UnsupportedError, UsageError):
            assert not (into / name).exists()
        else:
            targets[name] = into / name
    return targets


def kept(case: str, way: str, source: Path, lines: Lines, target: Path) -> Lines:
    """The tensors of a target, held against those of its source."""
    if way != "model":
        found = lines_of(target)
        check_kept(way, carried(case, way, lines), found)
        return found
    same = paddle_reshard.verify(source, target, states=["param"], allow_missing=BUFFERS, replicas="first")
    assert same, same.verdict
    return {entry: line for entry, line in lines.items() if entry[1] == "param"}


def carried(case: str, way: str, lines: Lines) -> Lines:
    """What a target should have: a hybrid job loads the model below an adapter from the model's own checkpoint."""
    if "lora" not in case or way not in ("tensor", "stages"):
        return lines
    trained = {key for key, state in lines if state != "param"}
    return {(key, state): line for (key, state), line in lines.items() if key in trained}


GIVEN_CONFIG = ("dense/", "moe/", "states/muon_fc_mp2")
"""Cases without ``config.json`` get that of the same model; without one, tensors that were cut are refused."""
NOT_CONVERTED = {
    "dense/auto_dp2mp2",  # no model of any family
    "families/ernie4_5_moe_vl_saved",  # a saved model, not a checkpoint of a trainer
    "small-unified/uc_sh2_s1v1_quant",  # quantised optimizer states are refused
    "states/uc_quantO1_sh2_s1v1",
}
ALL = {name: [*WAYS] for name in WAYS}
ROUND = dict(zip(WAYS, [*WAYS][1:] + [*WAYS][:1], strict=True))


@pytest.mark.parametrize(
    ("case", "onward"),
    [
        *((case, {b: [c] for b, c in ROUND.items()}) for case in QUICK),
        *(exhaustive(case, ALL) for group in GROUPS for case in case_names(group) if case not in NOT_CONVERTED),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_every_way_over_every_form_keeps_the_fingerprints(
    case: str, onward: dict[str, list[str]], tmp_path: Path
) -> None:
    folder = case_directory(case)
    beside = folder / ("final/config.json" if case == "states/lora_fc_mp2" else "config.json")
    config = beside if beside.exists() else config_of(case) if case.startswith(GIVEN_CONFIG) else None
    a = folder / "checkpoint-3"
    first = converted(case, a, tmp_path / "B", config)
    assert first
    of_a = lines_of(a, config=config)
    for name, b in first.items():
        of_b = kept(case, name, a, of_a, b)
        for way, c in converted(case, b, tmp_path / f"C of {name}", None, onward[name]).items():
            if name == "model":  # a job starts from it, with the same parameters
                same = paddle_reshard.verify(b, c, states=["param"], allow_missing=BUFFERS)
                assert same, same.verdict
            else:
                kept(case, way, b, of_b, c)
