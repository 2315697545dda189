"""Run a plan in this process, several groups at a time.

A few threads run groups from end to end. Reads, copies and writes release Python's lock, so the reads and writes of
some groups overlap with the moves of others. A group is admitted when its peak fits into the free part of the budget,
so memory is bounded in whatever order groups end. Groups are admitted in the order of the plan, so that files are read
and written from front to back.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Generator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import ClassVar

from paddle_reshard.clusters.container import check_memory_limit
from paddle_reshard.clusters.engine import Batches, Engine
from paddle_reshard.pipeline.core.errors import UsageError
from paddle_reshard.pipeline.core.events import THREAD, Observer, WorkerAssigned, ignore_events
from paddle_reshard.pipeline.planning.metadata import check_metadata, held_bytes
from paddle_reshard.pipeline.planning.plan import FOOTPRINT_BYTES
from paddle_reshard.pipeline.planning.work import GroupWork, RemainingGroups
from paddle_reshard.storage.store import ReadRange, WritePart
from paddle_reshard.tasks.compare_group import compare_group, measure_group
from paddle_reshard.tasks.device import Mover
from paddle_reshard.tasks.group import GroupReport
from paddle_reshard.tasks.statistics import Tolerance
from paddle_reshard.tasks.workspace import Workspace, Workspaces, workspace_bytes

Reports = Generator[GroupReport, None, None]


@dataclass(frozen=True)
class InlineEngine(Engine):
    """Runs groups in this process."""

    in_process: ClassVar[bool] = True

    memory_bytes: int = 1 << 30
    """Budget of this process, including its own footprint."""
    workers: int | None = None
    """Number of groups at a time, as far as memory allows. Default: two per processor, because a group waits for
    storage half of the time."""
    observe: Observer = field(default=ignore_events, compare=False, repr=False)
    """Called with what each worker runs, in the thread that takes the reports."""

    def __post_init__(self) -> None:
        if self.workers is not None and self.workers < 1:
            raise UsageError(f"{self.workers} workers: at least 1 is needed")

    def run(self, remaining: RemainingGroups, source: ReadRange, target: WritePart) -> Batches:
        """Run every group, and report each as it is done. Closing the iterator ends all of them."""
        from paddle_reshard.tasks.run_group import run_group  # comparisons do without

        return _one_by_one(self.each(remaining, lambda work, mover: run_group(work, source, target, mover)))

    def compare(self, remaining: RemainingGroups, source: ReadRange) -> Batches:
        """Run only the comparisons of every group."""
        return _one_by_one(self.each(remaining, lambda work, mover: compare_group(work, source, mover)))

    def measure(self, remaining: RemainingGroups, source: ReadRange, tolerance: Tolerance) -> Reports:
        """Measure how far the sides of every group are apart."""
        return self.each(remaining, lambda work, mover: measure_group(work, source, tolerance, mover))

    def observed(self, observe: Observer) -> InlineEngine:
        """The same engine; ``observe`` is called with what each of its threads runs."""
        return replace(self, observe=observe)

    def reserving_metadata(
        self, tensors: int, pieces: int, peak_bytes: int, spare_bytes: int
    ) -> InlineEngine:
        """The same engine with the memory that remains next to metadata."""
        check_metadata(tensors, pieces, peak_bytes, self.memory_bytes, spare_bytes)
        return replace(self, memory_bytes=self.memory_bytes - held_bytes(tensors, pieces, spare_bytes))

    @property
    def groups_at_a_time(self) -> int:
        """Upper bound of the groups at a time; memory may admit fewer."""
        return self.workers or 2 * len(os.sched_getaffinity(0))

    def each(self, remaining: RemainingGroups, do: Callable[[GroupWork, Mover], GroupReport]) -> Reports:
        """Call ``do`` with every group and a workspace for it."""
        count = self.groups_at_a_time
        peaks = remaining.largest_peaks(count)
        spaces = Workspaces(self.memory_bytes - FOOTPRINT_BYTES, peaks)
        more_bytes = workspace_bytes(peaks, spaces.budget_bytes)
        check_memory_limit(more_bytes, spaces.budget_bytes, remaining.plan.budget_bytes)
        idle = [f"{THREAD}{number}" for number in reversed(range(count))]
        running: dict[Future[GroupReport], tuple[str, Workspace]] = {}

        def finished() -> Reports:
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                worker, space = running.pop(future)
                spaces.give_back(space)
                idle.append(worker)
                self.observe(WorkerAssigned(worker, ()))
                yield future.result()  # its error is raised here

        with ThreadPoolExecutor(count) as pool:
            try:
                for work in remaining:
                    while not idle or (space := spaces.take(work.peak_bytes, work.label)) is None:
                        yield from finished()
                    worker = idle.pop()
                    running[pool.submit(_timed, do, work, space, worker)] = worker, space
                    self.observe(
                        WorkerAssigned(worker, (range(work.group, work.group + 1),), work.peak_bytes)
                    )
                while running:
                    yield from finished()
            finally:
                for future, (_, space) in running.items():
                    space.stop()
                    future.cancel()


def _timed(
    do: Callable[[GroupWork, Mover], GroupReport], work: GroupWork, space: Workspace, worker: str
) -> GroupReport:
    started = time.monotonic()
    report = do(work, space)
    return replace(report, worker=worker, seconds=time.monotonic() - started)


def _one_by_one(reports: Reports) -> Batches:
    with closing(reports):
        for report in reports:
            yield [report]
