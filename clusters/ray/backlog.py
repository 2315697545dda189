"""The groups that wait for a worker. Pure, and independent of Ray."""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass

from paddle_reshard.pipeline.core.errors import GroupFailedError, MemoryBudgetError
from paddle_reshard.pipeline.planning.plan import FOOTPRINT_BYTES
from paddle_reshard.pipeline.planning.work import RemainingGroups, WorkBatch

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
    """The groups of a run that no worker has, as a line of ranges of them. What is to be tried again goes first."""

    def __init__(self, remaining: RemainingGroups) -> None:
        self.remaining = remaining
        self.left = len(remaining)
        """Number of groups."""
        self._line = deque((groups, 1) for groups in remaining.stretches)
        """Groups, and the number of their next attempt."""

    def __bool__(self) -> bool:
        return bool(self._line)

    def check_memory(self, memory_bytes: int) -> None:
        """Refuse a group that does not fit into ``memory_bytes``, the budget of a worker."""
        peaks = self.remaining.plan.group_peaks
        largest = max((group for groups, _ in self._line for group in groups), key=peaks.__getitem__)
        needed_bytes = int(peaks[largest]) + FOOTPRINT_BYTES
        if needed_bytes > memory_bytes:
            raise MemoryBudgetError(self.remaining.work(largest).label, memory_bytes, needed_bytes)

    @property
    def next(self) -> Attempt:
        """The first group in line."""
        groups, number = self._line[0]
        return Attempt(groups[:1], int(self.remaining.plan.group_peaks[groups.start]), number)

    @property
    def peak_bytes(self) -> int:
        """Sum of the peaks of all groups."""
        peaks = self.remaining.plan.group_peaks
        return sum(int(peaks[groups.start : groups.stop].sum()) for groups, _ in self._line)

    def take(self, most_groups: int) -> tuple[Attempt, WorkBatch]:
        """Take the first groups in line, up to ``most_groups`` that are tried for the same time."""
        groups, number = self._line.popleft()
        self.left -= len(groups)
        batch = self.remaining.batch(groups[:most_groups])
        self._put_first(groups[len(batch.groups) :], number)
        return Attempt(batch.groups, max(batch.peaks), number), batch

    def retry(self, attempt: Attempt, cause: str, failure: BaseException | None = None) -> None:
        """Put every group of an attempt that failed first in line, to be tried alone.

        Raises
        ------
        GroupFailedError
            If it was the last attempt. ``failure`` becomes its cause.
        """
        groups, number = attempt.groups, attempt.number
        if number >= ATTEMPTS:
            label = self.remaining.work(groups.start).label
            raise GroupFailedError(label, groups.start, number, cause) from failure
        names = f"group {groups.start}" if len(groups) == 1 else f"groups {groups.start} to {groups[-1]}"
        log.warning("%s: attempt %d failed: %s", names, number, cause)
        for group in reversed(groups):
            self._put_first(range(group, group + 1), number + 1)

    def take_back(self, attempt: Attempt, done: int, cause: str) -> None:
        """Take back what a batch did not finish: ``cause`` ended it after ``done`` groups, and no other was begun."""
        rest = attempt.groups[done:]
        self._put_first(rest[1:], 1)
        if rest:
            self.retry(Attempt(rest[:1], attempt.peak_bytes, attempt.number), cause)

    def _put_first(self, groups: range, number: int) -> None:
        if groups:
            self._line.appendleft((groups, number))
            self.left += len(groups)
