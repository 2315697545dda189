"""The stream of events as JSON objects, one a line: ``--events FILE`` in a file, ``--events -`` on stderr.

docs/schemas/progress-1.json describes them. The last line of a command is the ``ended`` event with its exit status,
whatever else happened.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path
from types import TracebackType
from typing import Any, Final

from paddle_reshard.pipeline.core.events import (
    FilesRead,
    GroupEnded,
    Progress,
    StepEnded,
    StepStarted,
    WorkerAssigned,
)
from paddle_reshard.pipeline.core.outcome import Outcome
from paddle_reshard.pipeline.core.run_state import RunState
from paddle_reshard.pipeline.progress.stream import Checked, Happening

SCHEMA_VERSION: Final = 1
"""It increases when an entry is removed or changes its meaning."""
SECONDS_BETWEEN: Final = 1.0
"""Least time between two ``progress`` events of a step."""
SECONDS_OF_SILENCE: Final = 10.0
"""A step without any event for this time is reported all the same."""

Write = Callable[..., None]
"""Called with the name of an event and its entries."""


class EventLog(logging.Handler):
    """Writes events, and what is logged, to wherever they are wanted while the block runs.

    An output that cannot be written loses its lines, and does not affect the command.
    """

    def __init__(self) -> None:
        super().__init__()
        self._outputs: list[Callable[[str], object]] = []
        self._files: list[Any] = []
        self.replaces_stderr = False
        """Whether events are all that is printed on stderr."""

    def __bool__(self) -> bool:
        return bool(self._outputs)

    def __enter__(self) -> EventLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        root = logging.getLogger()
        for handler in (self, logging.lastResort):
            if self and handler is not None:
                root.removeHandler(handler)
        for file in self._files:
            with suppress(OSError):
                file.close()
        self.close()

    def write_to(self, output: Callable[[str], object]) -> None:
        """Call this with every line."""
        if not self:
            logging.getLogger().addHandler(self)
        self._outputs.append(output)

    def replace_stderr(self, output: Callable[[str], object]) -> None:
        """Call this with every line, in place of all that would be printed on stderr."""
        self.replaces_stderr = True
        self.write_to(output)

    def append_to(self, path: Path) -> None:
        """Append every line to a file; ``OSError`` if it cannot be opened. Warnings are printed as without it."""
        file = path.open("a", encoding="ascii", buffering=1)
        self._files.append(file)
        self.write_to(lambda line: file.write(f"{line}\n"))
        if logging.lastResort is not None and not self.replaces_stderr:
            logging.getLogger().addHandler(logging.lastResort)

    def write(self, event: str, at: float | None = None, **entries: Any) -> None:
        """Write an event. JSON escapes what a terminal would act on."""
        now = datetime.now(timezone.utc) if at is None else datetime.fromtimestamp(at, timezone.utc)
        time = now.isoformat(timespec="milliseconds").replace("+00:00", "Z")
        line = json.dumps({"schema_version": SCHEMA_VERSION, "event": event, "time": time, **entries})
        self.acquire()
        try:
            for output in self._outputs:
                with suppress(OSError):
                    output(line)
        finally:
            self.release()

    def emit(self, record: logging.LogRecord) -> None:
        """Write what is logged."""
        self.write("message", record.created, level=record.levelname.lower(), message=record.getMessage())


class ProgressEvents:
    """An observer that reports the start and end of every step, the progress in between, and every outcome.

    ``state`` adds up the events before this is called with them; ``write`` is called with each name and its entries.
    """

    def __init__(self, state: RunState, write: Write) -> None:
        self.state, self.write = state, write
        self.due = 0.0
        self.silent_since = state.clock()
        self.unreported = False
        """Whether something has happened since the latest event."""

    def __call__(self, event: Happening) -> None:
        """Report an event, unless the one before it was a moment ago."""
        if isinstance(event, StepStarted):
            self.due = 0.0
            self._write("step_started")
        elif isinstance(event, StepEnded):
            self._write("step_ended")
        elif isinstance(event, Outcome):
            entries = event.data()
            self.write(
                "outcome", outcome=entries["event"], **{name: entries[name] for name in _OF_AN_OUTCOME}
            )
        elif isinstance(event, (GroupEnded, WorkerAssigned, Checked)):
            pass  # the progress that is made follows
        elif isinstance(event, (FilesRead, Progress)):
            self.unreported = True
            if self.state.clock() >= self.due:
                self._write_progress()
        elif self.state.in_step:
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

    def tick(self) -> None:
        """Report a step that has been silent for long."""
        if self.state.in_step and self.state.clock() >= self.silent_since + SECONDS_OF_SILENCE:
            self._write_progress()

    def close(self) -> None:
        """Report how far a step came that nothing will end."""
        if self.unreported:
            self._write_progress()


_OF_AN_OUTCOME: Final = ("source", "target", "plan_id", "seconds", "error")
