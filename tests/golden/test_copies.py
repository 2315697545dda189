"""Stretches that the storage copies by itself hold the truth as those that are moved do."""

from pathlib import Path

import pytest

import paddle_reshard
from paddle_reshard.pipeline.convert.conversion import ConversionReport
from paddle_reshard.pipeline.core.part_limits import CopyLimits
from paddle_reshard.storage.local import target as local
from tests import oracle
from tests.conftest import case_directory

CASES = ("mp2pp2sh2_s1v2_meta_ema", "mp2_tied", "sh2_s1v1_meta_fp32", "nlp_fused_mp2")
TARGETS = (
    {"to": "pp=2"},
    {"to": "tp=2,pp=2"},
    {"to": "sharding=3", "sharding_strategy": "stage1v1"},
    {"to": "tp=2,sharding=3", "sharding_strategy": "stage1v2"},
    {"to": "sharding=2", "sharding_strategy": "stage3"},
)
SMALLEST_BYTES, LARGEST_BYTES = 100, 5_000
"""Stretches of the small checkpoints that are copied: nearly all of them, long ones in several parts."""


def _convert(name: str, target: Path, limits: CopyLimits | None, **request: str) -> ConversionReport:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local, "COPIES", limits)
        return paddle_reshard.convert(case_directory(name) / "checkpoint-3", target, **request)


@pytest.mark.parametrize("request_", TARGETS, ids=lambda r: r["to"].replace(",", "+"))
@pytest.mark.parametrize("name", CASES)
def test_copied_stretches_equal_the_truth(name: str, request_: dict[str, str], tmp_path: Path) -> None:
    truth = oracle.read_truth(case_directory(name) / "truth.safetensors")
    copied, moved = tmp_path / "copied", tmp_path / "moved"
    report = _convert(name, copied, CopyLimits(SMALLEST_BYTES, LARGEST_BYTES), **request_)
    assert report.moved.copied_bytes == report.plan.plan.copied_bytes > 0
    assert report.moved.written_bytes == report.plan.plan.written_bytes
    oracle.assert_same_tensors(oracle.read_checkpoint(copied, oracle.shapes_of(truth)), truth)
    assert _convert(name, moved, None, **request_).moved.copied_bytes == 0
    for path in moved.iterdir():
        if path.name != "paddle_reshard.json":
            assert path.read_bytes() == (copied / path.name).read_bytes(), path.name
