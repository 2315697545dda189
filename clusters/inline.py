"""Run a plan in this process, one group after another: the definition of what running a plan means."""

from __future__ import annotations

from collections.abc import Generator, Iterable

from paddle_reshard.pipeline.planning.work import GroupWork
from paddle_reshard.storage.store import ReadRange, WritePart
from paddle_reshard.tasks.run_group import GroupReport, run_group


def run_inline(
    works: Iterable[GroupWork], source: ReadRange, target: WritePart
) -> Generator[GroupReport, None, None]:
    """Run every group; memory is one group's peak at a time."""
    for work in works:
        yield run_group(work, source, target)
