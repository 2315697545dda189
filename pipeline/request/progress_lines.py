"""Progress as lines of text, for people who read them later."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from paddle_reshard.pipeline.core.events import Event, FilesRead, Progress, StepEnded, StepStarted
from paddle_reshard.pipeline.core.run_state import RunState
from paddle_reshard.pipeline.core.shown import readable_bytes, readable_seconds

PROGRESS_SECONDS = 10.0
"""Time between two lines about a step, in seconds."""
PATIENCE_SECONDS = 2.0
"""Time until the first line about a step, in seconds."""


class ProgressLines:
    """An observer that reports the end of every step, and the progress of long steps.

    ``state`` adds up the events before this is called with them; ``write`` is called with each line.
    """

    def __init__(self, state: RunState, write: Callable[[str], None]) -> None:
        self.state, self.write = state, write
        self.due = 0.0

    def __call__(self, event: Any) -> None:
        """Report an event, if it is time to; of a kind that has nothing to report, never."""
        if isinstance(event, StepStarted):
            self.due = self.state.clock() + PATIENCE_SECONDS
        elif isinstance(event, (Progress, FilesRead)):
            self.tick()
        elif isinstance(event, StepEnded):
            self.write(f"{event.step}: {event.summary}{self._timing()}")

    def tick(self) -> None:
        """Report the progress of the current step, if it is time to."""
        state, now = self.state, self.state.clock()
        if not state.in_step or now < self.due:
            return
        self.due = now + PROGRESS_SECONDS
        rate, left = state.bytes_per_second(), state.seconds_left()
        if state.total_bytes and rate is not None:
            self.write(
                f"{state.step}: {readable_bytes(state.done_bytes)} of {readable_bytes(state.total_bytes)}, "
                f"{100 * state.done_bytes / state.total_bytes:.0f} %, {readable_bytes(int(rate))}/s, {left:.0f} s left"
            )
        else:
            detail = f"{state.detail}, " if state.detail else ""
            self.write(f"{state.step}: {detail}{readable_seconds(now - state.step_started)} so far")

    def _timing(self) -> str:
        """Duration and rate of a step that has ended, unless it was short."""
        seconds = self.state.clock() - self.state.step_started
        if seconds < PATIENCE_SECONDS:
            return ""
        rate = self.state.bytes_per_second()
        return f"; {readable_seconds(seconds)}" + ("" if rate is None else f", {readable_bytes(int(rate))}/s")


def printed() -> Callable[[Event], None]:
    """An observer that prints lines on stderr."""

    def write(text: str) -> None:
        print("".join(c if c.isprintable() else ascii(c)[1:-1] for c in text), file=sys.stderr)  # noqa: T201

    state = RunState()
    lines = ProgressLines(state, write)

    def observe(event: Event) -> None:
        state(event)
        lines(event)

    return observe
