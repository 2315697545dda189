"""How much of a large checkpoint would the store move by itself? Planned, without a byte of it.

python -m benchmarks.shares
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass

from benchmarks.measure import Verdict, print_result
from benchmarks.synthetic import LLAMA_7B, LLAMA_70B, Dims, catalog_of
from paddle_reshard.pipeline.core.part_limits import CopyLimits, PartLimits
from paddle_reshard.pipeline.core.topology import Topology
from paddle_reshard.pipeline.formats.hybrid.target import HybridTarget, layout_hybrid
from paddle_reshard.pipeline.planning.plan import plan_conversion
from paddle_reshard.pipeline.planning.settings import PlanSettings

S3 = PartLimits(smallest_bytes=5 << 20, most=10_000, copies=CopyLimits(5 << 20, 256 << 20))
"""Parts of at least 5 MiB, 10,000 of a file at most."""
BUDGET_BYTES = 4 << 30


@dataclass(frozen=True)
class Case:
    """A conversion, and the share that is wanted."""

    model: str
    dims: Dims
    source: str
    target: str
    goal: float | None = None
    limit: float | None = None
    """The best choice of parts, where that is less."""


CASES = (
    Case("7B", LLAMA_7B, "pp=2", "pp=4", 0.9),
    Case("7B", LLAMA_7B, "sharding=4 stage1v2", "sharding=8 stage1v2", 0.9),
    Case("7B", LLAMA_7B, "sharding=4 stage1v1", "sharding=8 stage1v1", 0.9),
    Case("7B", LLAMA_7B, "sharding=4 stage1v2", "sharding=4 stage1v1", 0.9),
    Case("7B", LLAMA_7B, "tp=8", "tp=8,pp=2"),
    Case("7B", LLAMA_7B, "tp=1", "tp=2"),
    Case("70B", LLAMA_70B, "tp=8,pp=4", "tp=8,pp=8", 0.9),
    Case("70B", LLAMA_70B, "tp=8,sharding=4 stage1v2", "tp=8,sharding=8 stage1v2", 0.9, 0.88),
    Case("70B", LLAMA_70B, "tp=8,sharding=4 stage1v2", "tp=8,sharding=4 stage1v1", 0.9),
    Case("70B", LLAMA_70B, "tp=8,pp=4", "tp=4,pp=4"),
)


def job(text: str) -> HybridTarget:
    """``tp=8,sharding=4 stage1v2`` as what the job decides."""
    topology, _, strategy = text.partition(" ")
    return HybridTarget(Topology.parse(topology), strategy or "none")


def row(case: Case, verdicts: list[Verdict]) -> tuple[str, ...]:
    """Plan one conversion as from S3 to S3, and judge it."""
    checkpoint = catalog_of(case.dims, job(case.source))
    start = time.perf_counter()
    files = layout_hybrid(checkpoint, job(case.target))
    plan = plan_conversion(checkpoint.catalog, files, [], PlanSettings(BUDGET_BYTES), S3)
    seconds = time.perf_counter() - start
    share, name = plan.copied_share, f"{case.model}: {case.source} → {case.target}"
    if case.goal is not None:
        what = f"{name}: share that an object store copies"
        verdicts.append(Verdict.at_least(what, case.goal, share, 3, case.limit))
    return (
        name,
        f"{plan.written_bytes / 1e9:.0f}",
        f"{share:.3f}",
        f"{plan.read_amplification:.3f}",
        f"{plan.peak_bytes / (1 << 20):.0f}",
        f"{len(plan.parts):,}",
        f"{seconds:.1f}",
    )


def main() -> None:
    head = (
        "S3 to S3",
        "GB",
        "copied by the store",
        "read amplification",
        "peak MiB",
        "parts",
        "planned in s",
    )
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help=argparse.SUPPRESS)
    verdicts: list[Verdict] = []
    rows = [row(case, verdicts) for case in CASES]
    print_result(head, rows, verdicts, parser.parse_args().json)


if __name__ == "__main__":
    main()
