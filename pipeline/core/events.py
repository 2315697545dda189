"""What happens while a command runs, as values for an observer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

THREAD = "thread_"
"""How the names of workers in this process begin; they share its memory."""


@dataclass(frozen=True, slots=True)
class StepStarted:
    """A step of the workflow begins."""

    step: str
    total_bytes: int | None = None
    """What it will write or read, where that is known."""
    total_groups: int | None = None
    """Groups that it will run, including those of an earlier run; ``None`` if it runs none."""
    budget_bytes: int | None = None
    """Memory budget of each worker that runs them."""


@dataclass(frozen=True, slots=True)
class Progress:
    """More of the current step is done."""

    done_bytes: int
    before: bool = False
    """Done by an earlier run, so it does not count for the rate of this run."""
    groups: int = 0
    """Groups that an earlier run had done; those of this run end with :class:`GroupEnded`."""


@dataclass(frozen=True, slots=True)
class Planned:
    """A conversion is planned, and its groups are run next."""

    conversion: object
    """The :class:`~paddle_reshard.ConversionPlan`."""


@dataclass(frozen=True, slots=True)
class WorkerAssigned:
    """What a worker runs from this moment on."""

    worker: str
    groups: tuple[range, ...] | None
    """Empty while it waits for groups; ``None`` if it was lost."""
    peak_bytes: int = 0
    """Memory that they are given together."""


@dataclass(frozen=True, slots=True)
class GroupEnded:
    """A worker has run a group: it has written its parts, or has compared or added up its tensors."""

    group: int
    worker: str
    """The worker that ran it; empty if several did."""
    seconds: float
    """How long it ran."""
    seconds_ago: float
    """Time since its end: workers of a cluster report several groups at once."""
    peak_bytes: int
    """Memory that it was given."""
    read_bytes: int
    written_bytes: int
    """Bytes of all its parts, including those that the storage copied."""
    copied_bytes: int
    retries: Mapping[str, int] = field(default_factory=dict)
    """Failure of a store → how often workers on a cluster have repeated a request because of it, since their previous
    report."""


@dataclass(frozen=True, slots=True)
class FilesRead:
    """Number of files that the current step has read so far, of all that it reads."""

    done: int
    of: int


@dataclass(frozen=True, slots=True)
class Waiting:
    """The current step is waiting for something."""

    what: str


@dataclass(frozen=True, slots=True)
class StepEnded:
    """A step is done; ``summary`` is its result in one line."""

    step: str
    summary: str


Event = StepStarted | Planned | WorkerAssigned | GroupEnded | Progress | FilesRead | Waiting | StepEnded
Observer = Callable[[Event], None]


def ignore_events(event: Event) -> None:
    """An observer that ignores everything."""
