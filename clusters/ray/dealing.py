"""Decide which workers take the next group, and how many groups a batch has. Pure, and independent of Ray."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paddle_reshard.clusters.ray.state import Worker
from paddle_reshard.pipeline.core.errors import MemoryBudgetError
from paddle_reshard.pipeline.planning.plan import FOOTPRINT_BYTES
from paddle_reshard.pipeline.planning.work import GROUPS_AT_A_TIME

SHARED_BYTES = 32 << 20
"""Groups below this peak are not worth sharing; ``exchange="always"`` shares them all the same."""
BATCH_SECONDS = 0.5
"""How long a batch should keep a worker busy; what a killed worker or driver loses is about as much."""
SERVING_SECONDS = 0.004
"""Time in which the driver serves a batch, with some to spare: with many workers, batches take longer."""
MOST_GROUPS = 256
GROWTH = 4
"""A batch has at most ``MOST_GROUPS`` groups, and ``GROWTH`` times as many as the worker's previous batch."""


def next_batch_groups(done_groups: int, seconds: float, slots: int) -> int:
    """Number of groups of a worker's next batch, which should keep it busy for about as long as a batch should.

    ``done_groups`` of its last batch took ``seconds``; all workers together run ``slots`` batches at a time.

    >>> next_batch_groups(10, 0.1, slots=4), next_batch_groups(10, 2.0, slots=4), next_batch_groups(10, 2.0, slots=200)
    (40, 2, 4)
    """
    wanted_seconds = max(BATCH_SECONDS, slots * SERVING_SECONDS)
    enough = int(done_groups * wanted_seconds / max(seconds, 1e-6))
    return max(1, min(enough, GROWTH * done_groups, MOST_GROUPS))


@dataclass(frozen=True, slots=True)
class NextGroup:
    """The next group."""

    label: str
    peak_bytes: int
    bands: int
    parts: int
    object_bytes: int
    """Bytes of its bands, which are in the object store if it is shared."""
    attempt: int = 1


@dataclass(frozen=True, slots=True)
class Table:
    """The state in which a group is dealt."""

    next: NextGroup
    waiting_peaks: tuple[int, ...]
    """Peaks in bytes of all groups in the queue, the next one included."""
    workers: Sequence[Worker]
    exhausted: bool
    """Whether no group waits outside the queue."""
    patient: bool
    """Whether to wait for workers that are still starting if they could share a group."""
    object_bytes: int
    """Bytes of bands in the object store."""


@dataclass(frozen=True, slots=True)
class Dealer:
    """Settings for dealing groups to workers."""

    memory_bytes: int
    """Budget of each worker."""
    exchange: str
    side_by_side: bool
    """Whether a worker runs several groups at a time."""
    most_object_bytes: int
    """Limit for bytes of bands in the object store."""

    def choose(self, table: Table) -> list[Worker]:
        """The workers that take the next group, several if they share it; empty if it must wait.

        Idle ones come first, then those with memory for a further group.

        Raises
        ------
        MemoryBudgetError
            If the group fits no worker.
        """
        idle = [worker for worker in table.workers if worker.idle]
        if idle:
            return idle[: self._shares(table, len(idle))]
        return self._with_room(table)

    def _with_room(self, table: Table) -> list[Worker]:
        """A busy worker that can take a further group; none if so few groups wait that workers will soon be idle."""
        if not self.side_by_side or self.exchange == "always" or table.next.attempt > 1:
            return []
        if table.exhausted and len(table.waiting_peaks) <= len(table.workers):
            return []
        most_bytes = self.memory_bytes - FOOTPRINT_BYTES - table.next.peak_bytes
        free = (worker for worker in table.workers if worker.has_room(most_bytes, GROUPS_AT_A_TIME))
        return sorted(free, key=lambda worker: len(worker.running))[:1]

    def _shares(self, table: Table, idle: int) -> int:
        """How many of the idle workers take a group; 0 if it must wait for more of them."""
        group = table.next
        needed_bytes = group.peak_bytes + FOOTPRINT_BYTES
        if needed_bytes > self.memory_bytes:
            raise MemoryBudgetError(group.label, self.memory_bytes, needed_bytes)
        if (
            self.exchange == "never"
            or group.attempt > 1  # retry in the simplest way
            or group.bands < 2
            or len(table.workers) < 2
            or group.object_bytes > self.most_object_bytes
        ):
            return 1
        fits = table.object_bytes + group.object_bytes <= self.most_object_bytes
        if self.exchange == "always":
            return idle if fits and idle > 1 else 0
        if not fits or not table.exhausted or group.peak_bytes < SHARED_BYTES:
            return 1
        if table.patient and not all(worker.ready for worker in table.workers):
            return 0
        fair = idle * group.peak_bytes // max(1, sum(table.waiting_peaks))
        return max(1, min(fair, idle + 1 - len(table.waiting_peaks), max(group.bands, group.parts)))
