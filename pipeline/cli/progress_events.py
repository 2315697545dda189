"""``--progress json``: what happens as JSON objects, one a line on stderr.

docs/schemas/progress-1.json describes them. The last line is the ``ended`` event with the exit status, whatever else
happened.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime, timezone
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

import click

from paddle_reshard.pipeline.cli.ticking import every_second
from paddle_reshard.pipeline.core.events import (
    Event,
    FilesRead,
    GroupEnded,
    Progress,
    StepEnded,
    StepStarted,
    WorkerAssigned,
)
from paddle_reshard.pipeline.core.run_state import RunState

if TYPE_CHECKING:
    from paddle_reshard.pipeline.cli.ends import End

SCHEMA_VERSION: Final = 1
"""It increases when an entry is removed or changes its meaning."""
SECONDS_BETWEEN: Final = 1.0
"""Least time between two ``progress`` events of a step."""
SECONDS_OF_SILENCE: Final = 10.0
"""A step without any event for this time is reported all the same."""


def are_wanted(arguments: Sequence[str]) -> bool:
    """Whether a command line asks for events; also one with mistakes, which are reported as an event.

    >>> are_wanted(["convert", "a", "b", "--progress", "json"]), are_wanted(["convert", "--progress=auto"])
    (True, False)
    """
    return "--progress=json" in arguments or any(
        pair == ("--progress", "json") for pair in pairwise(arguments)
    )


def print_event(event: str, **entries: Any) -> None:
    """Print an event. JSON escapes what a terminal would act on."""
    now = datetime.now(timezone.utc).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    line = {"schema_version": SCHEMA_VERSION, "event": event, "time": now, **entries}
    click.echo(json.dumps(line), err=True)


def print_ended(status: int, end: End | None) -> None:
    """Print the last event of a command."""
    failure = (None, None, False) if end is None else (end.message, end.kind, end.retryable)
    print_event("ended", status=status, **dict(zip(("error", "kind", "retryable"), failure, strict=True)))


class EventFormatter(logging.Formatter):
    """Formats log records as events."""

    def format(self, record: logging.LogRecord) -> str:
        """A record as a line of JSON."""
        now = datetime.fromtimestamp(record.created, timezone.utc).isoformat(timespec="milliseconds")
        entries = {"level": record.levelname.lower(), "message": record.getMessage()}
        line = {"schema_version": SCHEMA_VERSION, "event": "message", "time": now.replace("+00:00", "Z")}
        return json.dumps({**line, **entries})


class ProgressEvents:
    """An observer that reports the start and end of every step, and the progress in between.

    Parameters
    ----------
    state
        Adds up the events, before this is called with them.
    write
        Called with the name of an event and its entries.
    """

    def __init__(self, state: RunState, write: Callable[..., None] = print_event) -> None:
        self.state, self.write = state, write
        self.due = 0.0
        self.silent_since = state.clock()
        self.running = False
        self.unreported = False
        """Whether something has happened since the latest event."""
        self._lock = threading.Lock()

    def __call__(self, event: Event) -> None:
        """Report an event, unless the one before it was a moment ago."""
        with self._lock:
            if isinstance(event, StepStarted):
                self.running, self.due = True, 0.0
                self._write("step_started")
            elif isinstance(event, StepEnded):
                self.running = False
                self._write("step_ended")
            elif isinstance(event, (GroupEnded, WorkerAssigned)):
                pass  # the progress that is made follows
            elif isinstance(event, (FilesRead, Progress)):
                self.unreported = True
                if self.state.clock() >= self.due:
                    self._write_progress()
            elif self.running:
                self._write_progress()

    def _write_progress(self) -> None:
        self.due = self.state.clock() + SECONDS_BETWEEN
        self._write("progress")

    def _write(self, event: str) -> None:
        state = self.state
        self.unreported = False
        self.silent_since = now = state.clock()
        rate, left = state.bytes_per_second(), state.seconds_left()
        self.write(
            event,
            step=state.step,
            detail=state.detail or None,
            seconds=round(now - state.started, 3),
            done_bytes=state.done_bytes,
            total_bytes=state.total_bytes,
            done_groups=state.done_groups,
            total_groups=state.total_groups,
            bytes_per_second=None if rate is None else round(rate),
            seconds_left=None if left is None else round(left, 1),
            worker=state.worker or None,
            retries=sum(state.retries().values()),
        )

    @contextmanager
    def ticking(self) -> Iterator[None]:
        """Check the clock once a second, in a thread, until the block ends; then report how far it came."""
        try:
            with every_second(self._tick):
                yield
        finally:
            if self.unreported:
                self._write_progress()

    def _tick(self) -> None:
        with self._lock:
            if self.running and self.state.clock() >= self.silent_since + SECONDS_OF_SILENCE:
                self._write_progress()
