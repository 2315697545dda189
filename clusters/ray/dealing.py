"""Decide which workers take the next group, and how many groups a batch has. Pure, and independent of Ray."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice

from paddle_reshard.clusters.ray.backlog import Attempt
from paddle_reshard.clusters.ray.state import Worker
from paddle_reshard.pipeline.planning.plan import FOOTPRINT_BYTES

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
class Table:
    """The state in which a group is dealt."""

    attempt: Attempt
    """That of the group."""
    waiting: int
    """Groups that no worker has, this one included."""
    workers: Sequence[Worker]

    @property
    def few(self) -> bool:
        """Whether workers will soon be idle."""
        return self.waiting <= len(self.workers)


@dataclass(frozen=True, slots=True)
class Shareable:
    """What decides how many workers share a group."""

    bands: int
    parts: int
    object_bytes: int
    """Bytes of its bands, which are in the object store if it is shared."""
    used_bytes: int
    """Bytes of the bands of other groups in the object store."""
    most_bytes: int
    """Limit for all of them."""
    waiting_bytes: int
    """Peaks of all groups that no worker has."""
    patient: bool
    """Whether to wait for workers that are still starting if they could share it."""


@dataclass(frozen=True, slots=True)
class Dealer:
    """Settings for dealing groups to workers."""

    memory_bytes: int
    """Budget of each worker."""
    exchange: str
    batches_at_a_time: int
    """How many batches a worker runs at a time."""

    def choose(self, table: Table, look: Callable[[], Shareable]) -> list[Worker]:
        """The workers that take a group, several if they share it; none if it must wait.

        Idle ones come first, then those with memory for more. ``look`` is called if the group may be shared.
        """
        free = self._free(table)
        if not free or not self._may_share(table):
            return free[:1]
        return free[: self._shares(table, look())]

    def _free(self, table: Table) -> list[Worker]:
        """All idle workers, else a busy one with memory for more."""
        idle = [worker for worker in table.workers if worker.idle]
        if idle or table.few or table.attempt.number > 1 or self.exchange == "always":
            return idle
        most_bytes = self.memory_bytes - FOOTPRINT_BYTES - table.attempt.peak_bytes
        roomy = (worker for worker in table.workers if worker.has_room(most_bytes, self.batches_at_a_time))
        return [*islice(roomy, 1)]

    def _may_share(self, table: Table) -> bool:
        """Whether idle workers may share a group, which is retried in the simplest way."""
        if self.exchange == "never" or table.attempt.number > 1 or len(table.workers) < 2:
            return False
        return self.exchange == "always" or (table.few and table.attempt.peak_bytes >= SHARED_BYTES)

    def _shares(self, table: Table, group: Shareable) -> int:
        """How many of the idle workers take a group that they may share; 0 if it must wait for more of them."""
        if group.bands < 2 or group.object_bytes > group.most_bytes:
            return 1
        idle = sum(worker.idle for worker in table.workers)
        fits = group.used_bytes + group.object_bytes <= group.most_bytes
        if self.exchange == "always":
            return idle if fits and idle > 1 else 0
        if not fits:
            return 1
        starting = sum(not worker.ready for worker in table.workers)
        if group.patient and starting and table.waiting < idle + starting:
            return 0
        fair = idle * table.attempt.peak_bytes // max(1, group.waiting_bytes)
        return max(1, min(fair, idle + 1 - table.waiting, max(group.bands, group.parts)))
