"""What happens while a command runs, told to whoever watches as values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepStarted:
    """A step of the workflow begins. ``total_bytes`` is what it will write or read, where that is known."""

    step: str
    total_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Progress:
    """More of the current step is done."""

    done_bytes: int
    before: bool = False
    """An earlier run has done it, so it says nothing about how fast this one is."""


@dataclass(frozen=True, slots=True)
class FilesRead:
    """So many files of all that the current step reads have been read."""

    done: int
    of: int


@dataclass(frozen=True, slots=True)
class Waiting:
    """The current step goes on as soon as something is there."""

    what: str


@dataclass(frozen=True, slots=True)
class StepEnded:
    """A step is done; ``summary`` says what came out, in one line."""

    step: str
    summary: str


Event = StepStarted | Progress | FilesRead | Waiting | StepEnded
Observer = Callable[[Event], None]


def ignore_events(event: Event) -> None:
    """The observer that looks at nothing."""
