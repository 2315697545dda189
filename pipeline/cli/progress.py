"""Progress events as lines of text, for logs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from paddle_reshard.pipeline.cli.ticking import every_second
from paddle_reshard.pipeline.core.shown import readable_bytes, readable_seconds

if TYPE_CHECKING:
    from paddle_reshard.pipeline.core.events import Event

PROGRESS_SECONDS = 10.0
"""Time between two lines about a step, in seconds."""
PATIENCE_SECONDS = 2.0
"""Time until the first line about a step, in seconds."""


class ProgressLines:
    """An observer that reports the end of every step, and the progress of long steps.

    While :meth:`ticking`, steps without events are reported too.
    """

    def __init__(self, write: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self.write, self.clock = write, clock
        self.step: str | None = None
        self.total_bytes: int | None = None
        self.done_bytes = self.earlier_bytes = 0
        self.detail = ""
        """The latest detail of a step that moves no bytes."""
        self.started = 0.0
        self.due = 0.0
        self._lock = threading.Lock()

    def __call__(self, event: Event) -> None:
        """Record an event."""
        from paddle_reshard.pipeline.core.events import FilesRead, Progress, StepEnded, StepStarted, Waiting

        with self._lock:
            if isinstance(event, StepStarted):
                self.step, self.total_bytes, self.detail = event.step, event.total_bytes, ""
                self.done_bytes = self.earlier_bytes = 0
                self.started = self.clock()
                self.due = self.started + PATIENCE_SECONDS
            elif isinstance(event, Progress):
                self.done_bytes += event.done_bytes
                self.earlier_bytes += event.done_bytes if event.before else 0
                self._write_if_due()
            elif isinstance(event, FilesRead):
                self.detail = f"{event.done} of {event.of} files read, "
                self._write_if_due()
            elif isinstance(event, Waiting):
                self.detail = f"waiting for {event.what}, "
            elif isinstance(event, StepEnded):
                self.write(f"{event.step}: {event.summary}{self._timing()}")
                self.step = None

    @contextmanager
    def ticking(self) -> Iterator[None]:
        """Check the clock once a second, in a thread, until the block ends."""
        with every_second(self._tick):
            yield

    def _tick(self) -> None:
        with self._lock:
            self._write_if_due()

    def _write_if_due(self) -> None:
        now = self.clock()
        if self.step is None or now < self.due:
            return
        self.due = now + PROGRESS_SECONDS
        if self.total_bytes and self.done_bytes > self.earlier_bytes:
            seconds = now - self.started
            self.write(
                progress_line(self.step, self.done_bytes, self.total_bytes, seconds, self.earlier_bytes)
            )
        else:
            self.write(f"{self.step}: {self.detail}{readable_seconds(now - self.started)} so far")

    def _timing(self) -> str:
        """Duration and rate of a step, unless it was short."""
        seconds = self.clock() - self.started
        if seconds < PATIENCE_SECONDS:
            return ""
        moved = self.done_bytes - self.earlier_bytes
        rate = f", {readable_bytes(int(moved / seconds))}/s" if moved else ""
        return f"; {readable_seconds(seconds)}{rate}"


def progress_line(
    step: str, done_bytes: int, total_bytes: int, seconds: float, earlier_bytes: int = 0
) -> str:
    """Progress, rate and remaining time of a step. ``earlier_bytes`` were done by an earlier run.

    >>> progress_line("move", 1 << 30, 4 << 30, 10.0)
    'move: 1.0 GiB of 4.0 GiB, 25 %, 102.4 MiB/s, 30 s left'
    """
    rate = (done_bytes - earlier_bytes) / seconds
    remaining = (total_bytes - done_bytes) / rate
    return (
        f"{step}: {readable_bytes(done_bytes)} of {readable_bytes(total_bytes)}, "
        f"{100 * done_bytes / total_bytes:.0f} %, {readable_bytes(int(rate))}/s, {remaining:.0f} s left"
    )
