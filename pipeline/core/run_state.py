"""How far a run has come, from its events."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from paddle_reshard.pipeline.core.events import (
    Event,
    FilesRead,
    GroupEnded,
    Planned,
    Progress,
    StepEnded,
    StepStarted,
    Waiting,
)


@dataclass(frozen=True, slots=True)
class WorkerState:
    """What a worker has done so far."""

    groups: int = 0
    read_bytes: int = 0
    written_bytes: int = 0
    """Bytes of all parts, including those that the storage copied."""
    busy_seconds: float = 0.0

    def after(self, event: GroupEnded) -> WorkerState:
        """Its state after a further group."""
        return WorkerState(
            self.groups + 1,
            self.read_bytes + event.read_bytes,
            self.written_bytes + event.written_bytes,
            self.busy_seconds + event.seconds,
        )


def no_retries() -> Mapping[str, int]:
    """The retries of a process that has none."""
    return {}


@dataclass
class RunState:
    """An observer that adds up events.

    Parameters
    ----------
    count_retries
        Failure of a store → retries after it in this process, since it began.
    clock
        Seconds, from any start.
    """

    count_retries: Callable[[], Mapping[str, int]] = no_retries
    clock: Callable[[], float] = time.monotonic
    step: str = ""
    """The current step; empty between two steps."""
    detail: str = ""
    """What the step is doing, or its result at its end."""
    done_bytes: int = 0
    """Bytes of the current step."""
    total_bytes: int | None = None
    done_groups: int = 0
    """Groups of the conversion, including those of an earlier run."""
    total_groups: int | None = None
    """``None`` before a conversion is planned, and for commands without groups."""
    budget_bytes: int | None = None
    """Memory budget of each worker."""
    worker: str = ""
    """The worker that ended a group last; empty if several ran it."""
    workers: dict[str, WorkerState] = field(default_factory=dict)
    _earlier_bytes: int = 0
    _on_workers: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.started = self.step_started = self.clock()
        self._counted = Counter(self.count_retries())

    def __call__(self, event: Event) -> None:
        """Add an event."""
        if isinstance(event, StepStarted):
            self.step, self.detail, self.total_bytes = event.step, "", event.total_bytes
            self.done_bytes = self._earlier_bytes = 0
            self.step_started = self.clock()
        elif isinstance(event, Progress):
            self.done_bytes += event.done_bytes
            self._earlier_bytes += event.done_bytes if event.before else 0
            self.done_groups += event.groups
            self.detail = ""
        elif isinstance(event, GroupEnded):
            self.done_groups += 1
            self.worker = event.worker
            self.workers[event.worker] = self.workers.get(event.worker, WorkerState()).after(event)
            self._on_workers.update(event.retries)
        elif isinstance(event, FilesRead):
            self.detail = f"{event.done} of {event.of} files read"
        elif isinstance(event, Waiting):
            self.detail = f"waiting for {event.what}"
        elif isinstance(event, StepEnded):
            self.step, self.detail = event.step, event.summary
        elif isinstance(event, Planned):
            plan = getattr(event.conversion, "plan", None)
            self.done_groups, self.total_groups = 0, getattr(plan, "groups", None)
            self.budget_bytes = getattr(plan, "budget_bytes", None)

    def bytes_per_second(self) -> float | None:
        """Rate of the current step in this run; ``None`` before it has done anything."""
        seconds = self.clock() - self.step_started
        moved = self.done_bytes - self._earlier_bytes
        return moved / seconds if moved and seconds > 0 else None

    def seconds_left(self) -> float | None:
        """Time until the end of the current step at this rate; ``None`` if there is nothing to tell it by."""
        rate = self.bytes_per_second()
        if rate is None or self.total_bytes is None:
            return None
        return max(0, self.total_bytes - self.done_bytes) / rate

    def retries(self) -> Mapping[str, int]:
        """Failure of a store → retries after it during this run, in this process and on workers."""
        return {**(Counter(self.count_retries()) - self._counted + self._on_workers)}
