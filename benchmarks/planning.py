"""How long does planning take, and how much memory, from a thousand fragments to a million and more?

    python -m benchmarks.planning [--quick]

Every row is measured in a process of its own, on one core: the target's files are laid out byte for byte, boxes are
matched, groups, bands and parts made, and the plan is saved. Seconds are of the processor, because other work on the
machine is nobody's business here; memory is the largest resident set while planning, beyond what a process that
imports the package has. Reading the source's metadata is measured apart, where the row is small enough to make its
files.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.measure import Verdict, print_result
from benchmarks.synthetic import LLAMA_7B, LLAMA_70B, MOE_671B, Dims, EmptySource, catalog_of, files_of
from paddle_reshard.pipeline.convert.plan_file import save_plan
from paddle_reshard.pipeline.core.topology import Topology
from paddle_reshard.pipeline.formats.hybrid.target import HybridTarget, layout_hybrid
from paddle_reshard.pipeline.formats.sharding import ShardingOptions
from paddle_reshard.pipeline.indexing.detect import index_checkpoint
from paddle_reshard.pipeline.model.rules.tables import shipped_tables
from paddle_reshard.pipeline.planning.plan import plan_conversion
from paddle_reshard.pipeline.planning.settings import PlanSettings

T = TypeVar("T")
BUDGET_BYTES = 1 << 30
MIB = 1 << 20


@dataclass(frozen=True)
class Row:
    """A conversion to plan."""

    name: str
    dims: Dims
    source: HybridTarget
    target: HybridTarget
    quick: bool = False
    indexed: bool = False
    """Whether the source's files are made and read."""
    goal: tuple[float, int] | None = None
    """Largest wanted seconds from layout to saved plan, and MiB."""
    limit_seconds: float | None = None
    """The most seconds that have been measured, beside other work."""


def job(strategy: str = "stage1v2", buffer_mb: int = 256, **degrees: int) -> HybridTarget:
    topology = Topology(**degrees)
    return HybridTarget(topology, strategy, sharding=ShardingOptions(buffer_bytes=buffer_mb * MIB))


ROWS = (
    Row(
        "7B, 4 layers",
        replace(LLAMA_7B, layers=4),
        job(tp=8, sharding=2),
        job(tp=4, sharding=4),
        quick=True,
        indexed=True,
    ),
    Row("7B", LLAMA_7B, job(tp=8, sharding=4), job(tp=4, sharding=2), quick=True, indexed=True),
    Row(
        "70B",
        LLAMA_70B,
        job(tp=8, pp=4, sharding=16),
        job(tp=4, pp=8, sharding=8),
        indexed=True,
    ),
    Row(
        "671B MoE, buffers of 1 GiB",
        MOE_671B,
        job(tp=8, pp=4, sharding=64, buffer_mb=1024),
        job(tp=4, pp=4, sharding=32, buffer_mb=1024),
        goal=(3, 700),
        limit_seconds=4.7,
    ),
    Row(
        "671B MoE, buffers of 256 MiB",
        MOE_671B,
        job(tp=8, pp=4, sharding=64),
        job(tp=4, pp=4, sharding=32),
    ),
    Row(
        "671B MoE, shards of 96, buffers of 32 MiB",
        MOE_671B,
        job(tp=8, pp=4, sharding=96, buffer_mb=32),
        job(tp=4, pp=4, sharding=32, buffer_mb=32),
        goal=(60, 4096),
    ),
)


def measure(row: Row) -> dict[str, Any]:
    """Plan one row in this process."""
    seconds: dict[str, float] = {}

    def timed(step: str, function: Callable[[], T]) -> T:
        start = time.process_time()
        result = function()
        seconds[step] = time.process_time() - start
        return result

    if row.indexed:
        files = EmptySource(files_of(row.dims, row.source), json.dumps(row.dims.config).encode())
        checkpoint = timed("read", lambda: index_checkpoint(files, shipped_tables()))
    else:
        checkpoint = catalog_of(row.dims, row.source)
    _forget_peak()
    laid_out = timed("lay out", lambda: layout_hybrid(checkpoint, row.target))
    plan = timed(
        "plan", lambda: plan_conversion(checkpoint.catalog, laid_out, [], PlanSettings(BUDGET_BYTES))
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.arrow"
        timed("save", lambda: save_plan(plan, path))
        saved_bytes = path.stat().st_size
    peak = peak_bytes()
    return {
        "name": row.name,
        "ranks": [row.source.topology.world_size, row.target.topology.world_size],
        "parameters": row.dims.parameters,
        "fragments": len(checkpoint.catalog.fragments),
        "ops": len(plan.ops),
        "groups": plan.groups,
        "seconds": seconds,
        "peak_bytes": peak,
        "saved_bytes": saved_bytes,
    }


def _forget_peak() -> None:
    """Start the kernel's record of the largest resident set anew."""
    Path("/proc/self/clear_refs").write_text("5")


def peak_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def laid_out_to_saved(found: dict[str, Any]) -> float:
    """Seconds from the start of the layout to the saved plan."""
    return float(sum(found["seconds"][step] for step in ("lay out", "plan", "save")))


def judged(row: Row, found: dict[str, Any]) -> list[Verdict]:
    """A row's goals."""
    if row.goal is None:
        return []
    what, (seconds, mib) = f"planning {found['fragments']:,} fragments", row.goal
    return [
        Verdict.at_most(
            f"{what}: seconds from layout to saved plan",
            seconds,
            laid_out_to_saved(found),
            limit=row.limit_seconds,
        ),
        Verdict.at_most(f"{what}: peak RSS, MiB", mib, found["peak_bytes"] / MIB, 0),
    ]


HEAD = (
    "conversion",
    "ranks",
    "fragments",
    "ops",
    "groups",
    "read (s)",
    "lay out (s)",
    "plan (s)",
    "save (s)",
    "lay out to saved (s)",
    "peak RSS (MiB)",
    "saved (MiB)",
)


def line(found: dict[str, Any]) -> tuple[str, ...]:
    """What :func:`measure` found, as a row of the table."""
    seconds = found["seconds"]
    return (
        found["name"],
        " → ".join(f"{count:,}" for count in found["ranks"]),
        *(f"{found[what]:,}" for what in ("fragments", "ops", "groups")),
        *(f"{seconds[step]:.2f}" if step in seconds else "–" for step in ("read", "lay out", "plan", "save")),
        f"**{laid_out_to_saved(found):.2f}**",
        f"{found['peak_bytes'] / MIB:,.0f}",
        f"{found['saved_bytes'] / MIB:,.1f}",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="Only the small rows.")
    parser.add_argument("--json", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--row", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.row is not None:
        print(json.dumps(measure(ROWS[arguments.row])))
        return
    rows, verdicts = list[tuple[str, ...]](), list[Verdict]()
    for number, row in enumerate(ROWS):
        if row.quick or not arguments.quick:
            command = [sys.executable, "-m", "benchmarks.planning", "--row", str(number)]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            found = json.loads(done.stdout)
            rows.append(line(found))
            verdicts += judged(row, found)
            print(f"{row.name}: done", file=sys.stderr)
    print_result(HEAD, rows, verdicts, arguments.json)


if __name__ == "__main__":
    main()
