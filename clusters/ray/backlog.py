"""The groups that wait for a worker. Pure, and independent of Ray.

Most wait in *stretches*, from which batches are cut. The last ones, and those to be tried again, wait as single groups,
which go first.
"""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass, replace

from paddle_reshard.pipeline.core.errors import GroupFailedError, MemoryBudgetError
from paddle_reshard.pipeline.planning.plan import FOOTPRINT_BYTES
from paddle_reshard.pipeline.planning.work import WorkBatch, Works

log = logging.getLogger(__name__)

ATTEMPTS = 4
"""How often a group is tried, and how often a worker is started, before giving up."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """An attempt at a batch, or at a single group."""

    groups: range
    peak_bytes: int
    """Peak of its largest group."""
    number: int = 1


class Backlog:
    """The groups of a run that no worker has."""

    def __init__(self, works: Works) -> None:
        self.works = works
        self.stretches = deque(works.stretches)
        self.left = len(works)
        """Number of groups in stretches."""
        self.singles: deque[Attempt] = deque()

    def __bool__(self) -> bool:
        return bool(self.left or self.singles)

    def check_memory(self, memory_bytes: int) -> None:
        """Refuse a group that does not fit into ``memory_bytes``, the budget of a worker.

        Raises
        ------
        MemoryBudgetError
        """
        peaks = self.works.plan.group_peaks
        largest = max((group for groups in self.stretches for group in groups), key=peaks.__getitem__)
        needed_bytes = int(peaks[largest]) + FOOTPRINT_BYTES
        if needed_bytes > memory_bytes:
            raise MemoryBudgetError(self.works.work(largest).label, memory_bytes, needed_bytes)

    @property
    def next_peak_bytes(self) -> int:
        """Peak of the first group in stretches."""
        return self._peak_bytes(self.stretches[0].start)

    def take_batch(self, most_groups: int) -> tuple[Attempt, WorkBatch]:
        """Take up to ``most_groups`` groups from the first stretch."""
        batch = self.works.batch(self.stretches[0][:most_groups])
        self._drop(len(batch.groups))
        return Attempt(batch.groups, max(batch.peaks)), batch

    def look_ahead(self, count: int) -> None:
        """Have up to ``count`` groups wait as single groups."""
        while self.left and len(self.singles) < count:
            self.singles.append(self._single(self.stretches[0].start))
            self._drop(1)

    def retry(self, attempt: Attempt, cause: str, failure: BaseException | None = None) -> None:
        """Put every group of an attempt that failed first in line.

        Raises
        ------
        GroupFailedError
            If it was the last attempt. ``failure`` becomes its cause.
        """
        groups, number = attempt.groups, attempt.number
        if number >= ATTEMPTS:
            label = self.works.work(groups.start).label
            raise GroupFailedError(label, groups.start, number, cause) from failure
        names = f"group {groups.start}" if len(groups) == 1 else f"groups {groups.start} to {groups[-1]}"
        log.warning("%s: attempt %d failed: %s", names, number, cause)
        self.singles.extendleft(self._single(group, number + 1) for group in reversed(groups))

    def take_back(self, attempt: Attempt, done: int, cause: str) -> None:
        """Take back what a batch did not finish: ``cause`` ended it after ``done`` groups, and no other was begun."""
        rest = attempt.groups[done:]
        if rest:
            self.retry(replace(attempt, groups=rest[:1]), cause)
        if len(rest) > 1:
            self.stretches.appendleft(rest[1:])
            self.left += len(rest) - 1

    def _drop(self, count: int) -> None:
        """Remove the next ``count`` groups, of one stretch."""
        groups = self.stretches.popleft()
        if len(groups) > count:
            self.stretches.appendleft(groups[count:])
        self.left -= count

    def _single(self, group: int, number: int = 1) -> Attempt:
        return Attempt(range(group, group + 1), self._peak_bytes(group), number)

    def _peak_bytes(self, group: int) -> int:
        return int(self.works.plan.group_peaks[group])
