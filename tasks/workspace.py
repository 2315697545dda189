"""Memory for one group at a time, kept from group to group.

Fresh memory costs a fault for every page, more than the copy into it. So a worker takes memory once, and every group
puts its parts and bands there anew.
"""

from __future__ import annotations

import mmap

import numpy as np

from paddle_reshard.pipeline.core.errors import MemoryBudgetError
from paddle_reshard.pipeline.planning.plan import FOOTPRINT_BYTES
from paddle_reshard.tasks.device import Box, Buffer, HostMover

GRAIN_BYTES = 8 << 20
"""Workspaces are taken in multiples of this, so that groups of about one size can follow each other in one."""


class Stopped(Exception):
    """The run that a group belongs to has ended."""


class Workspace(HostMover):
    """Moves in host memory that is kept. For one thread, but for :meth:`stop`.

    Parts are taken before bands. Buffers are valid until :meth:`clear`, those of bands until :meth:`release`.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.memory: Buffer = np.empty(0, dtype=np.uint8)
        if capacity_bytes:  # not from the heap: what is given back there may stay with the process
            self.memory = np.frombuffer(mmap.mmap(-1, capacity_bytes, mmap.MAP_PRIVATE), dtype=np.uint8)
        self.parts_bytes = self.used_bytes = 0
        self.stopped = False

    def clear(self) -> None:
        """Forget the parts and bands of the group before."""
        self.parts_bytes = self.used_bytes = 0

    def stop(self) -> None:
        """Let the group that is being run fail before its next move or write."""
        self.stopped = True

    def zeros(self, nbytes: int) -> Buffer:
        """A part, all zeros."""
        part = self._take(nbytes)
        part.fill(0)
        self.parts_bytes = self.used_bytes
        return part

    def allocate(self, nbytes: int) -> Buffer:
        """The memory into which a band is read."""
        return self._take(nbytes)

    def release(self) -> None:
        """Forget the bands, so that others take their place."""
        self.used_bytes = self.parts_bytes

    def move(self, source: Box, target: Box) -> None:
        """Copy or cast."""
        self._check()
        super().move(source, target)

    def fetch(self, part: Buffer) -> Buffer:
        """The part itself."""
        self._check()
        return part

    def _take(self, nbytes: int) -> Buffer:
        self._check()
        start, self.used_bytes = self.used_bytes, self.used_bytes + nbytes
        if self.used_bytes > self.capacity_bytes:
            raise MemoryError(f"a group needs {self.used_bytes} bytes, more than its planned peak")
        return self.memory[start : self.used_bytes]

    def _check(self) -> None:
        if self.stopped:
            raise Stopped


class Workspaces:
    """The credits of a run: workspaces that are in use or kept for later, never more than the budget."""

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self.idle: list[Workspace] = []
        self.taken_bytes = 0
        """Total of all workspaces."""

    def take(self, peak_bytes: int, label: str) -> Workspace | None:
        """A workspace for a group; ``None`` if others have to end first. ``label`` is what to call the group by.

        Raises
        ------
        MemoryBudgetError
            If that would not help.
        """
        if peak_bytes > self.budget_bytes:
            raise MemoryBudgetError(label, self.budget_bytes + FOOTPRINT_BYTES, peak_bytes + FOOTPRINT_BYTES)
        if not peak_bytes:  # the storage copies everything
            return Workspace(0)
        fitting = [space for space in self.idle if space.capacity_bytes >= peak_bytes]
        if fitting:
            space = min(fitting, key=lambda space: space.capacity_bytes)
            self.idle.remove(space)
            space.clear()
            return space
        wanted = min(-(-peak_bytes // GRAIN_BYTES) * GRAIN_BYTES, self.budget_bytes)
        if self.idle:  # it was outgrown: there are never more workspaces than groups at a time
            self.taken_bytes -= self.idle.pop().capacity_bytes
        while self.idle and self.taken_bytes + wanted > self.budget_bytes:
            self.taken_bytes -= self.idle.pop().capacity_bytes
        if self.taken_bytes + wanted > self.budget_bytes:
            return None
        self.taken_bytes += wanted
        return Workspace(wanted)

    def give_back(self, space: Workspace) -> None:
        """A group has ended."""
        if space.capacity_bytes:
            self.idle.append(space)

    def clear(self) -> None:
        """Keep none for later."""
        while self.idle:
            self.taken_bytes -= self.idle.pop().capacity_bytes
