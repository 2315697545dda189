"""Groups that are run in memory full of another group's bytes have the bytes of groups in new memory."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from paddle_reshard.pipeline.convert.plan import ConversionPlan
from paddle_reshard.pipeline.planning.work import RemainingGroups
from paddle_reshard.tasks.run_group import run_group
from paddle_reshard.tasks.workspace import Workspace
from tests.cluster.test_exchange import Written
from tests.conftest import case_directory
from tests.sized import in_groups

GARBAGE = 0xA5

PLANS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "tp joined": ("mp2pp2sh2_s1v2_meta_ema", {"to": "tp=1,pp=2"}),
    "padding of fused buffers": ("mp2pp2sh2_s1v2_meta_ema", {"to": "tp=2,sharding=3"}),
    "tp cut": ("sh2_s1v1_meta_fp32", {"to": "tp=2,sharding=2", "sharding_strategy": "stage1v1"}),
    "flex": ("mp2pp2sh2_s1v2_meta_ema", {"format": "flex"}),
    "cast and transposed": ("mp2_tied", {"format": "huggingface", "dtype": "float32"}),
}


@pytest.mark.parametrize("name", PLANS)
def test_memory_full_of_garbage_gives_the_bytes_of_new_memory(name: str, tmp_path: Path) -> None:
    case, options = PLANS[name]
    source = case_directory(case) / "checkpoint-3"
    check_same(in_groups(300_000).plan(source, tmp_path / "T", **options))


def test_averages_too(tmp_path: Path) -> None:
    """They are added up in the part, or cast to it from other memory."""
    source = case_directory("mp2pp2sh2_s1v2_meta_ema") / "checkpoint-3"
    check_same(in_groups(300_000).plan_average([source, source], tmp_path / "T", to="tp=2", uniform=True))


def check_same(conversion: ConversionPlan) -> None:
    for work in RemainingGroups(conversion.plan):
        used = Workspace(work.peak_bytes)
        used.memory.fill(GARBAGE)
        new, reused = Written(), Written()
        assert run_group(work, conversion.store, new) == run_group(work, conversion.store, reused, used)
        assert reused.parts == new.parts
