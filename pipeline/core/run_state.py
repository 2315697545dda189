"""The progress of a run, added up from its events."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from paddle_reshard.pipeline.core.events import (
    THREAD,
    Event,
    FilesRead,
    GroupEnded,
    Progress,
    StepEnded,
    StepStarted,
    Waiting,
    WorkerAssigned,
)

MOST_STEPS = 64
"""Steps that are kept after their end."""


@dataclass(frozen=True, slots=True)
class EndedStep:
    """A step that is done."""

    name: str
    seconds: float
    summary: str


@dataclass(frozen=True, slots=True)
class WorkerState:
    """The work that a worker has done so far, and the group that it runs."""

    groups: int = 0
    read_bytes: int = 0
    written_bytes: int = 0
    """Bytes of all parts, including those that the storage copied."""
    copied_bytes: int = 0
    busy_seconds: float = 0.0
    running: tuple[range, ...] | None = None
    """Groups that it runs; ``None`` if it was lost, or has not said."""
    held_bytes: int = 0
    """Memory that they are given together."""
    since: float = 0.0
    """When it was assigned them, by the clock of the run."""

    def after(self, event: GroupEnded) -> WorkerState:
        """The worker after a further group."""
        return replace(
            self,
            groups=self.groups + 1,
            read_bytes=self.read_bytes + event.read_bytes,
            written_bytes=self.written_bytes + event.written_bytes,
            copied_bytes=self.copied_bytes + event.copied_bytes,
            busy_seconds=self.busy_seconds + event.seconds,
        )


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

    count_retries: Callable[[], Mapping[str, int]] = dict
    clock: Callable[[], float] = time.monotonic
    step: str = ""
    """The current step; empty between two steps."""
    detail: str = ""
    """What the step is doing, or its result at its end."""
    done_bytes: int = 0
    """Bytes of the current step."""
    total_bytes: int | None = None
    done_files: int = 0
    """Files that the current step has read."""
    total_files: int | None = None
    done_groups: int = 0
    """Groups of the current step, or of the last one that ran any, including those of an earlier run."""
    total_groups: int | None = None
    """``None`` before the first step that runs groups."""
    budget_bytes: int | None = None
    """Memory budget of each worker."""
    worker: str = ""
    """The worker that ended a group last; empty if several ran it."""
    workers: dict[str, WorkerState] = field(default_factory=dict)
    ended_steps: list[EndedStep] = field(default_factory=list)
    _earlier_bytes: int = 0
    _on_workers: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.started = self.step_started = self.clock()
        self.in_step = False
        self._rate_started = self.started
        """When work of the current step began: a cluster may have to start first."""
        self._waiting = False
        self._counted = Counter(self.count_retries())

    def __call__(self, event: Event) -> None:
        """Add an event."""
        if isinstance(event, StepStarted):
            self._start_step(event)
        elif isinstance(event, Progress):
            self.done_bytes += event.done_bytes
            self._earlier_bytes += event.done_bytes if event.before else 0
            self.done_groups += event.groups
            if event.done_bytes and not event.before:
                self.detail = ""
        elif isinstance(event, WorkerAssigned):
            self._assign(event)
        elif isinstance(event, GroupEnded):
            self.done_groups += 1
            self.worker = event.worker
            self.workers[event.worker] = self.workers.get(event.worker, WorkerState()).after(event)
            self._on_workers.update(event.retries)
        elif isinstance(event, FilesRead):
            self.done_files, self.total_files = event.done, event.of
            self.detail = f"{event.done} of {event.of} files read"
        elif isinstance(event, Waiting):
            self.detail = f"waiting for {event.what}"
            self._waiting = self.done_bytes == self._earlier_bytes
        elif isinstance(event, StepEnded):
            self._end_step(event.summary)
            self.step, self.detail = event.step, event.summary

    def _start_step(self, event: StepStarted) -> None:
        self._end_step("")
        self.step, self.detail, self.total_bytes = event.step, "", event.total_bytes
        self.done_bytes = self._earlier_bytes = self.done_files = 0
        self.total_files = None
        self.step_started = self._rate_started = self.clock()
        self.in_step, self._waiting = True, False
        if event.total_groups is not None:
            self.done_groups, self.total_groups = 0, event.total_groups
            self.budget_bytes = event.budget_bytes

    def _end_step(self, summary: str) -> None:
        if self.in_step:
            ended = EndedStep(self.step, self.clock() - self.step_started, summary)
            self.ended_steps = [*self.ended_steps[-MOST_STEPS:], ended]
        self.in_step = False

    def _assign(self, event: WorkerAssigned) -> None:
        if event.groups and self._waiting:
            self._rate_started, self._waiting, self.detail = self.clock(), False, ""
        before = self.workers.get(event.worker, WorkerState())
        self.workers[event.worker] = replace(
            before, running=event.groups, held_bytes=event.peak_bytes, since=self.clock()
        )

    def bytes_per_second(self) -> float | None:
        """Rate of the current step in this run, since a worker began; ``None`` before it has done anything."""
        seconds = self.clock() - self._rate_started
        moved = self.done_bytes - self._earlier_bytes
        return moved / seconds if moved and seconds > 0 else None

    def seconds_left(self) -> float | None:
        """Time until the end of the current step at this rate; ``None`` before a rate is known."""
        rate = self.bytes_per_second()
        if rate is None or self.total_bytes is None:
            return None
        return max(0, self.total_bytes - self.done_bytes) / rate

    def held_bytes(self) -> int:
        """Memory that the groups of the fullest process are given; threads of this process share it."""
        shared = sum(worker.held_bytes for name, worker in self.workers.items() if name.startswith(THREAD))
        return max((shared, *(worker.held_bytes for worker in self.workers.values())))

    def retries(self) -> Mapping[str, int]:
        """Failure of a store → retries after it during this run, in this process and on workers."""
        on_workers = self._on_workers.copy()  # at once: figures are served by a thread while events arrive
        return {**(Counter(self.count_retries()) - self._counted + on_workers)}
