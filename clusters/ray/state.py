"""What the driver knows about each worker, and about each attempt in progress."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ray.exceptions import RayError

from paddle_reshard.clusters.ray.backlog import Attempt
from paddle_reshard.pipeline.core.events import WorkerAssigned
from paddle_reshard.tasks.group import GroupReport


@dataclass(eq=False)
class Running:
    """An attempt in progress."""

    attempt: Attempt
    shares: int = 1
    """Workers that have not finished their share yet."""
    object_bytes: int = 0
    """Bytes of its bands in the object store; 0 if it is not exchanged."""
    reports: list[GroupReport] = field(default_factory=list)
    """The reports of the shares of a group."""
    failure: RayError | None = None

    @property
    def alone(self) -> bool:
        """Whether its workers run nothing else at the same time: it is exchanged, or it failed before."""
        return self.attempt.number > 1 or self.object_bytes > 0


@dataclass(eq=False)
class Worker:
    """A worker, whose actor may be replaced."""

    number: int
    actor: Any
    name: str = ""
    """What it is called in events and reports; empty until it is ready for the first time."""
    starts: int = 1
    """Actors started since the last one that was ready."""
    ready: bool = False
    pinged: bool = True
    """Whether it has not answered the last ping yet."""
    running: list[Running] = field(default_factory=list)
    batch_groups: int = 1
    """Number of groups of its next batch."""

    @property
    def idle(self) -> bool:
        """Whether it has nothing to do."""
        return not self.pinged and not self.running

    @property
    def held_bytes(self) -> int:
        """Peaks of what it runs."""
        return sum(running.attempt.peak_bytes for running in self.running)

    @property
    def alone(self) -> bool:
        """Whether it may not run anything else at the same time."""
        return any(running.alone for running in self.running)

    @property
    def assigned(self) -> WorkerAssigned:
        """What it runs."""
        if not self.ready:
            return WorkerAssigned(self.name, None)
        groups = tuple(running.attempt.groups for running in self.running)
        return WorkerAssigned(self.name, groups, self.held_bytes)

    def has_room(self, most_bytes: int, batches_at_a_time: int) -> bool:
        """Whether it may run more, if what it holds already takes at most ``most_bytes``."""
        busy = self.pinged or len(self.running) >= batches_at_a_time or self.alone
        return not busy and self.held_bytes <= most_bytes
