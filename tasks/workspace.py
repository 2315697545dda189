"""Memory for one group at a time, reused from group to group.

New memory costs a page fault for every page, which takes longer than copying into it. A worker therefore allocates
memory once and reuses it for the parts and bands of every group.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from paddle_reshard.pipeline.core.errors import MemoryBudgetError
from paddle_reshard.pipeline.planning.plan import FOOTPRINT_BYTES
from paddle_reshard.storage.aligned import LINE_BYTES, padding, private_memory
from paddle_reshard.tasks.device import Buffer, DeviceBox, Mover

GRAIN_BYTES = 8 << 20
"""Workspace sizes are multiples of this, so that groups of about one size can reuse a workspace."""
PADDING_BYTES = LINE_BYTES << 13
"""What a workspace has in addition, so that its buffers can begin where the processor copies fast."""


class Stopped(Exception):
    """The run that a group belongs to has ended."""


class Workspace(Mover):
    """Moves in host memory that is reused. Not thread-safe, except :meth:`stop`.

    Parts are allocated before bands. Buffers are valid until :meth:`clear`, those of bands until :meth:`release`.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.memory: Buffer = np.empty(0, dtype=np.uint8)
        if capacity_bytes:
            self.memory = np.frombuffer(private_memory(capacity_bytes), dtype=np.uint8)[:capacity_bytes]
        self.stopped = False
        self.clear(capacity_bytes)

    def clear(self, peak_bytes: int) -> None:
        """Discard the parts and bands of the previous group. The next one takes at most ``peak_bytes``."""
        self.parts_bytes = self.used_bytes = 0
        self.parts_spare = self.spare_bytes = self.capacity_bytes - peak_bytes

    def stop(self) -> None:
        """Make the running group fail before its next move or write."""
        self.stopped = True

    def zeros(self, nbytes: int, byte_offset: int = 0) -> Buffer:
        """A part, all zeros."""
        part = self._take(nbytes, byte_offset)
        part.fill(0)
        self.parts_bytes, self.parts_spare = self.used_bytes, self.spare_bytes
        return part

    def allocate(self, nbytes: int, byte_offset: int = 0) -> Buffer:
        """Memory to read a band into."""
        return self._take(nbytes, byte_offset)

    def release(self) -> None:
        """Discard the bands, so that their memory is reused."""
        self.used_bytes, self.spare_bytes = self.parts_bytes, self.parts_spare

    def move(self, source: DeviceBox, target: DeviceBox) -> None:
        """Copy or cast."""
        self._check()
        super().move(source, target)

    def fetch(self, part: Any) -> Buffer:
        """The part itself."""
        self._check()
        return super().fetch(part)

    def _take(self, nbytes: int, byte_offset: int) -> Buffer:
        self._check()
        if (skipped := padding(self.used_bytes, byte_offset)) <= self.spare_bytes:
            self.used_bytes += skipped
            self.spare_bytes -= skipped
        start, self.used_bytes = self.used_bytes, self.used_bytes + nbytes
        if self.used_bytes > self.capacity_bytes:
            raise MemoryError(f"a group needs {self.used_bytes} bytes, more than its planned peak")
        return self.memory[start : self.used_bytes]

    def _check(self) -> None:
        if self.stopped:
            raise Stopped


class Workspaces:
    """A pool of workspaces whose total size never exceeds the budget.

    Parameters
    ----------
    largest_peaks
        Of as many groups as run at a time, if known. Where these are alike, workspaces are made for them at once, so
        that none is replaced by a larger one, whose pages would be new.
    """

    def __init__(self, budget_bytes: int, largest_peaks: Sequence[int] = ()) -> None:
        self.budget_bytes = budget_bytes
        sizes = list(map(_capacity, largest_peaks))
        alike = sum(sizes) <= budget_bytes and len(set(sizes)) == 1
        self.usual_bytes = sizes[0] if alike else 0
        self.idle: list[Workspace] = []
        self.taken_bytes = 0
        """Total size of all workspaces, in use and idle."""

    def take(self, peak_bytes: int, label: str) -> Workspace | None:
        """A workspace for a group named ``label`` in messages; ``None`` if running groups must end first.

        Raises
        ------
        MemoryBudgetError
            If the group does not fit the budget even alone.
        """
        if peak_bytes > self.budget_bytes:
            raise MemoryBudgetError(label, self.budget_bytes + FOOTPRINT_BYTES, peak_bytes + FOOTPRINT_BYTES)
        if not peak_bytes:  # the storage copies everything
            return Workspace(0)
        fitting = [space for space in self.idle if space.capacity_bytes >= peak_bytes]
        if fitting:
            space = min(fitting, key=lambda space: space.capacity_bytes)
            self.idle.remove(space)
            space.clear(peak_bytes)
            return space
        wanted = min(max(_capacity(peak_bytes), self.usual_bytes), self.budget_bytes)
        if self.idle:  # replace a workspace that is too small: there are never more than groups at a time
            self.taken_bytes -= self.idle.pop().capacity_bytes
        while self.idle and self.taken_bytes + wanted > self.budget_bytes:
            self.taken_bytes -= self.idle.pop().capacity_bytes
        if self.taken_bytes + wanted > self.budget_bytes:
            return None
        self.taken_bytes += wanted
        space = Workspace(wanted)
        space.clear(peak_bytes)
        return space

    def give_back(self, space: Workspace) -> None:
        """Return a workspace to the pool."""
        if space.capacity_bytes:
            self.idle.append(space)

    def clear(self) -> None:
        """Free all idle workspaces."""
        while self.idle:
            self.taken_bytes -= self.idle.pop().capacity_bytes


def workspace_bytes(peaks: Sequence[int], budget_bytes: int) -> int:
    """Total size of workspaces for groups with these peaks, at most the budget."""
    return min(sum(map(_capacity, peaks)), budget_bytes)


def _capacity(peak_bytes: int) -> int:
    """The size of a workspace for groups of about a peak; none for those that the storage copies."""
    return -(-peak_bytes // GRAIN_BYTES) * GRAIN_BYTES + (PADDING_BYTES if peak_bytes else 0)
