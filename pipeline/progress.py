"""Events as lines of text, for a log that somebody reads later or from afar."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from paddle_reshard.pipeline.shown import readable_bytes

if TYPE_CHECKING:
    from paddle_reshard.pipeline.workflow import Event

PROGRESS_SECONDS = 10.0


class ProgressLines:
    """An observer that tells the end of every step, and of a long one from time to time how far it is."""

    def __init__(self, tell: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self.tell, self.clock = tell, clock
        self.total_bytes: int | None = None
        self.done_bytes = 0
        self.begun = self.told = 0.0

    def __call__(self, event: Event) -> None:
        """Take note of an event."""
        from paddle_reshard.pipeline.workflow import Progress, StepEnded, StepStarted

        if isinstance(event, StepStarted):
            self.total_bytes, self.done_bytes = event.total_bytes, 0
            self.begun = self.told = self.clock()
        elif isinstance(event, Progress):
            self.done_bytes += event.done_bytes
            if self.total_bytes and self.done_bytes and self.clock() - self.told >= PROGRESS_SECONDS:
                self.told = self.clock()
                self.tell(progress_line(self.done_bytes, self.total_bytes, self.told - self.begun))
        elif isinstance(event, StepEnded):
            self.tell(f"{event.step}: {event.summary}")


def progress_line(done_bytes: int, total_bytes: int, seconds: float) -> str:
    """How far, how fast, and how long it will take if it goes on like that.

    >>> progress_line(1 << 30, 4 << 30, 10.0)
    'move: 1.0 GiB of 4.0 GiB, 25 %, 102.4 MiB/s, 30 s left'
    """
    rate = done_bytes / seconds
    left = (total_bytes - done_bytes) / rate
    return (
        f"move: {readable_bytes(done_bytes)} of {readable_bytes(total_bytes)}, "
        f"{100 * done_bytes / total_bytes:.0f} %, {readable_bytes(int(rate))}/s, {left:.0f} s left"
    )
