"""Which workers take the next group? Decided by what is known of groups and workers; nothing here knows Ray."""

from __future__ import annotations

from dataclasses import dataclass

from paddle_reshard.pipeline.core.errors import MemoryBudgetError
from paddle_reshard.pipeline.planning.plan import FOOTPRINT_BYTES
from paddle_reshard.pipeline.planning.work import GROUPS_AT_A_TIME

SHARED_BYTES = 32 << 20
"""Groups below this peak are not worth sharing; ``exchange="always"`` shares them all the same."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """The group that is next."""

    label: str
    peak_bytes: int
    bands: int
    parts: int
    object_bytes: int
    """Its bands, in the object store if it is shared."""
    attempt: int = 1


@dataclass(frozen=True, slots=True)
class Member:
    """A worker, as far as it matters who gets what."""

    ready: bool
    """Whether it has ever answered."""
    there: bool
    """Whether it has answered the last ping."""
    peaks: tuple[int, ...] = ()
    """Peaks in bytes of the groups that it is working on."""
    alone: bool = False
    """Whether nothing may run beside one of them."""

    @property
    def idle(self) -> bool:
        """Whether it has nothing to do."""
        return self.there and not self.peaks


@dataclass(frozen=True, slots=True)
class Table:
    """All that is known when a group is dealt."""

    next: Waiting
    waiting_peaks: tuple[int, ...]
    """Peaks in bytes of all groups in the queue, the next one included."""
    members: tuple[Member, ...]
    exhausted: bool
    """Whether no group waits outside the queue."""
    patient: bool
    """Whether to wait for workers that are still starting, where they could share a group."""
    object_bytes: int
    """Bands in the object store."""


@dataclass(frozen=True, slots=True)
class Dealer:
    """Settings by which groups are dealt to workers."""

    memory_bytes: int
    """Of each worker."""
    exchange: str
    side_by_side: bool
    """Whether a worker runs several groups at a time."""
    most_object_bytes: int
    """Limit for bands in the object store."""

    def choose(self, table: Table) -> list[int]:
        """Numbers of the members that take the next group, several if they share it; none: it waits.

        Idle ones come first, then those that have room for one more.

        Raises
        ------
        MemoryBudgetError
            If no worker can ever hold it.
        """
        idle = [number for number, member in enumerate(table.members) if member.idle]
        if idle:
            return idle[: self._shares(table, len(idle))]
        return self._with_room(table)

    def _with_room(self, table: Table) -> list[int]:
        """A busy worker that can take another group; none where so few wait that others will soon be idle."""
        if not self.side_by_side or self.exchange == "always" or table.next.attempt > 1:
            return []
        if table.exhausted and len(table.waiting_peaks) <= len(table.members):
            return []
        most_bytes = self.memory_bytes - FOOTPRINT_BYTES - table.next.peak_bytes
        free = (
            (len(member.peaks), number)
            for number, member in enumerate(table.members)
            if member.there
            and len(member.peaks) < GROUPS_AT_A_TIME
            and not member.alone
            and sum(member.peaks) <= most_bytes
        )
        return [number for _, number in sorted(free)[:1]]

    def _shares(self, table: Table, idle: int) -> int:
        """How many of the idle workers take a group; 0 where it has to wait for more of them."""
        group = table.next
        needed_bytes = group.peak_bytes + FOOTPRINT_BYTES
        if needed_bytes > self.memory_bytes:
            raise MemoryBudgetError(group.label, self.memory_bytes, needed_bytes)
        if (
            self.exchange == "never"
            or group.attempt > 1  # what failed shared is tried in the simplest way
            or group.bands < 2
            or len(table.members) < 2
            or group.object_bytes > self.most_object_bytes
        ):
            return 1
        fits = table.object_bytes + group.object_bytes <= self.most_object_bytes
        if self.exchange == "always":
            return idle if fits and idle > 1 else 0
        if not fits or not table.exhausted or group.peak_bytes < SHARED_BYTES:
            return 1
        if table.patient and not all(member.ready for member in table.members):
            return 0
        fair = idle * group.peak_bytes // max(1, sum(table.waiting_peaks))
        return max(1, min(fair, idle + 1 - len(table.waiting_peaks), max(group.bands, group.parts)))
