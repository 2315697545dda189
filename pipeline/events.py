"""What happens while a command runs, told to whoever watches as values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepStarted:
    """A step of the workflow begins. ``total_bytes`` is what it will write, where that is known."""

    step: str
    total_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Progress:
    """More of the current step is done."""

    done_bytes: int


@dataclass(frozen=True, slots=True)
class StepEnded:
    """A step is done; ``summary`` says what came out, in one line."""

    step: str
    summary: str


Event = StepStarted | Progress | StepEnded
Observer = Callable[[Event], None]


def ignore_events(event: Event) -> None:
    """The observer that looks at nothing."""
