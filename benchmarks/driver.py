"""How much processor time does the driver of a conversion on Ray take for each group?

    python -m benchmarks.driver [--workers 2 16 64] [--groups 20000] [--quick]

The plan is that of a real conversion, of 671 billion parameters on 2,048 ranks. With ``--quick`` it is the beginning
of one of 70 billion on 512, with 2 workers: too short for many, whose batches begin with single groups. Only its
workers do nothing: they receive every group, unpack it, and answer with the receipts that it would have. So the
driver's work is complete: groups are handed out, receipts collected, and the ledger is written to a disk. Its time is
processor time of its own process, threads of Ray in it included, because the workers share the machine's cores with
it; that also bounds the groups per second where there are few cores. The clocks start when all workers have.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from benchmarks.measure import Verdict, print_result
from benchmarks.planning import BUDGET_BYTES, MIB, ROWS
from benchmarks.synthetic import Unstored, catalog_of
from paddle_reshard.clusters.engine import Batches
from paddle_reshard.clusters.private_ray import prepare
from paddle_reshard.pipeline.checkpoint.checkpoint import Checkpoint
from paddle_reshard.pipeline.convert import run
from paddle_reshard.pipeline.convert.plan import ConversionPlan
from paddle_reshard.pipeline.core.events import ignore_events
from paddle_reshard.pipeline.formats.hybrid.target import layout_hybrid
from paddle_reshard.pipeline.planning.plan import Plan, plan_conversion
from paddle_reshard.pipeline.planning.settings import PlanSettings
from paddle_reshard.pipeline.planning.work import GroupWork, RemainingGroups, WorkBatch
from paddle_reshard.storage.local.target import LocalTarget
from paddle_reshard.storage.outputs import Outputs
from paddle_reshard.storage.store import ReadRange, Receipt, WritePart
from paddle_reshard.tasks.group import GroupReport

prepare()  # Ray reads its settings when it is imported

import ray  # noqa: E402

from paddle_reshard.clusters.ray import actors  # noqa: E402
from paddle_reshard.clusters.ray.engine import RayEngine  # noqa: E402
from paddle_reshard.clusters.ray.worker import BatchAnswer, ReshardWorker  # noqa: E402

REPO = Path(__file__).parents[1]
SMALL, FULL = 2, 3
"""Rows of ``benchmarks.planning``."""
QUICK_GROUPS = 20_000
START_SECONDS = 600


@dataclass(frozen=True)
class Nothing(Unstored):
    """A source of files full of zeros. Only the last group is read, in which idle workers share."""

    files: Mapping[str, int]
    gate: Path
    """A folder in which each worker notes that it is there."""
    workers: int

    def sizes(self) -> Mapping[str, int]:
        return self.files

    def read_into(self, path: str, byte_offset: int, buffer: memoryview) -> None:
        """Leave new memory as it is."""


class IdleWorker(ReshardWorker):
    """Says that each group is done, as soon as all workers are there."""

    def run(self, batch: WorkBatch) -> BatchAnswer:
        source: Any = self.source
        (source.gate / str(os.getpid())).touch()
        deadline = time.monotonic() + START_SECONDS
        while len(os.listdir(source.gate)) < source.workers:
            if time.monotonic() > deadline:
                raise SystemExit("some workers do not start")
            time.sleep(0.05)
        return super().run(batch)

    def _run(self, work: GroupWork) -> GroupReport:
        receipts = tuple(
            Receipt(
                work.target_paths[int(part["file"])],
                int(part["start"]),
                int(part["stop"] - part["start"]),
                checksum=f"{work.group:016x}",
            )
            for part in work.parts
        )
        written = sum(receipt.nbytes for receipt in receipts)
        return GroupReport(work.group, work.peak_bytes, written, receipts)


def planned(number: int, groups: int | None) -> tuple[Checkpoint, Plan]:
    """A plan of ``benchmarks.planning``, of which the first ``groups`` are run, or all."""
    row = ROWS[number]
    checkpoint = catalog_of(row.dims, row.source)
    laid_out = layout_hybrid(checkpoint, row.target)
    plan = plan_conversion(checkpoint.catalog, laid_out, [], PlanSettings(BUDGET_BYTES))
    object.__setattr__(plan, "group_peaks", plan.group_peaks[:groups])
    plan.plan_id  # noqa: B018 -- not part of what is measured
    return checkpoint, plan


CPU_MS_GOAL, RATE_GOAL = 0.1, 4_000
"""Processor time of a group, and groups per second: 64 workers share two cores with the driver here."""


def measure(checkpoint: Checkpoint, plan: Plan, workers: int, verdicts: list[Verdict]) -> tuple[str, ...]:
    """Run all groups, say what the driver took, and judge it."""
    marks: list[tuple[float, float]] = []

    class Clocked(RayEngine):
        """The clocks start with the first answer, when all workers have started."""

        def run(self, remaining: RemainingGroups, source: ReadRange, target: WritePart | None) -> Batches:
            for reports in super().run(remaining, source, target):
                if not marks:
                    marks.append((time.process_time(), time.perf_counter()))
                yield reports

    with tempfile.TemporaryDirectory(prefix="driver-") as folder, tempfile.TemporaryDirectory() as gate:
        files = {file.path: file.size_bytes for file in plan.source_files}
        conversion = ConversionPlan(Nothing(files, Path(gate), workers), checkpoint, (), plan, pieces=0)
        engine = Clocked(workers=workers, memory_bytes=1 << 30)
        with LocalTarget(Path(folder) / "T") as target:
            _, receipts = run._move(conversion, Outputs([target]), engine, ignore_events)
            cpu, wall = (
                now - then
                for now, then in zip((time.process_time(), time.perf_counter()), marks[0], strict=True)
            )
            ledger = (Path(folder) / ".T.reshard" / "ledger").stat().st_size
    if len(receipts) < plan.groups:
        raise SystemExit("some groups were not run")
    each_ms, rate = 1000 * cpu / plan.groups, plan.groups / wall
    verdicts += [
        Verdict.at_most(f"driver with {workers} workers: CPU ms per group", CPU_MS_GOAL, each_ms, 3),
        Verdict.at_least(f"driver with {workers} workers: groups per second", RATE_GOAL, rate, 0),
    ]
    return (
        str(workers),
        f"{plan.groups:,}",
        f"{each_ms:.3f}",
        f"{rate:,.0f}",
        f"{cpu / wall:.2f}",
        f"{ledger / MIB:.1f}",
    )


@contextmanager
def private_ray(workers: int) -> Iterator[None]:
    """A Ray with so many workers' processors and memory, whatever the machine has."""
    ray.init(
        "local",
        num_cpus=workers,
        _memory=workers << 30,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.WARNING,
    )
    try:
        yield
    finally:
        ray.shutdown()


HEAD = ("workers", "groups", "driver CPU per group (ms)", "groups per second", "of one core", "ledger (MiB)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 16, 64])
    parser.add_argument("--groups", type=int, help="run only the first of them")
    parser.add_argument("--quick", action="store_true", help="a small plan and 2 workers only")
    parser.add_argument("--json", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    checkpoint, plan = planned(
        *(SMALL, given.groups or QUICK_GROUPS) if given.quick else (FULL, given.groups)
    )
    print(f"planned, {np.count_nonzero(plan.parts['group'] < plan.groups):,} parts", file=sys.stderr)
    os.environ["PYTHONPATH"] = os.pathsep.join([str(REPO), os.environ.get("PYTHONPATH", "")])
    rows, verdicts = [], list[Verdict]()
    for workers in [2] if given.quick else given.workers:
        with patch.object(actors, "ReshardWorker", IdleWorker), private_ray(workers):
            rows.append(measure(checkpoint, plan, workers, verdicts))
    print_result(HEAD, rows, verdicts, given.json)


if __name__ == "__main__":
    main()
