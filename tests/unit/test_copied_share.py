"""How much of a large checkpoint an object store can copy by itself, planned for real layouts without a byte."""

import pytest

from benchmarks.synthetic import LLAMA_7B, LLAMA_70B, Dims, catalog_of, files_of
from paddle_reshard.pipeline.core.part_limits import PartLimits
from paddle_reshard.pipeline.core.topology import Topology
from paddle_reshard.pipeline.core.units import SMALLEST_BUDGET_BYTES
from paddle_reshard.pipeline.formats.hybrid.target import HybridTarget
from paddle_reshard.pipeline.planning.plan import plan_conversion
from paddle_reshard.pipeline.planning.settings import PlanSettings
from paddle_reshard.storage.s3 import target as s3

LIMITS = PartLimits(s3.SMALLEST_PART_BYTES, s3.MOST_PARTS, s3.COPIES)
GOAL = 0.9


def _target(topology: str, strategy: str) -> HybridTarget:
    return HybridTarget(topology=Topology.parse(topology), strategy=strategy)


@pytest.mark.parametrize(
    ("dims", "tp", "source", "target", "strategy"),
    [
        pytest.param(dims, tp, *change, id=f"{name} {change[0]} to {change[1]} {change[2]}")
        for name, dims, tp in (("7B", LLAMA_7B, 1), ("70B", LLAMA_70B, 8))
        for change in (
            ("pp=4", "pp=2", "none"),
            ("sharding=8", "sharding=16", "stage1v1"),
            ("pp=4,sharding=8", "pp=2,sharding=4", "stage1v1"),
            ("sharding=8", "sharding=4", "stage1v2"),
        )
    ],
)
def test_what_does_not_change_is_copied(dims: Dims, tp: int, source: str, target: str, strategy: str) -> None:
    here, there = (_target(f"tp={tp},{topology}", strategy) for topology in (source, target))
    plan = plan_conversion(
        catalog_of(dims, here).catalog, files_of(dims, there), [], PlanSettings(SMALLEST_BUDGET_BYTES), LIMITS
    )
    assert plan.copied_share >= GOAL
    assert plan.read_amplification <= 1.05
