"""The progress of a command: a bar on a terminal, lines elsewhere, or events."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

import click

from paddle_reshard.pipeline.cli.terminal import console, log_to_terminal, say

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from paddle_reshard.pipeline.core.events import Event
    from paddle_reshard.pipeline.core.run_state import RunState


@contextmanager
def observing(silent: bool) -> Iterator[Callable[[Event], None]]:
    """An observer for the current command: what its options ask for, together.

    It draws a progress bar on a terminal and prints lines otherwise, unless it is to be ``silent``; with
    ``--progress json`` it prints events. ``--log-file`` adds lines to a file, and ``--metrics-port`` serves figures.
    """
    from paddle_reshard.pipeline.cli.log_file import log_line
    from paddle_reshard.pipeline.cli.progress import ProgressLines

    options = click.get_current_context().params
    observers: list[Callable[[Event], None]] = []
    with ExitStack() as stack:
        if options.get("log_file") is not None:
            lines = ProgressLines(log_line)
            stack.enter_context(lines.ticking())
            observers.append(lines)
        observers.append(stack.enter_context(measuring()))
        if options.get("progress") == "json":
            observers.append(stack.enter_context(_events()))
        elif not silent:
            observers.append(stack.enter_context(_shown()))

        def observe(event: Event) -> None:
            for each in observers:
                each(event)

        yield observe


@contextmanager
def _shown() -> Iterator[Callable[[Event], None]]:
    """A bar on a terminal, lines elsewhere."""
    from paddle_reshard.pipeline.cli.progress import ProgressLines

    if not sys.stderr or not sys.stderr.isatty():
        lines = ProgressLines(lambda line: say(line, err=True))
        with lines.ticking():
            yield lines
        return
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=console(err=True),
        transient=True,
    ) as bar:
        yield _Bar(bar)


@contextmanager
def measuring() -> Iterator[Callable[[Event], None]]:
    """An observer behind ``--metrics-port`` of the current command."""
    from paddle_reshard.pipeline.core.events import ignore_events

    address = click.get_current_context().params.get("metrics_port")
    if address is None:
        yield ignore_events
        return
    from paddle_reshard.pipeline.cli.metrics import serving

    state = _state()
    with serving(state, address):
        yield state


@contextmanager
def _events() -> Iterator[Callable[[Event], None]]:
    from paddle_reshard.pipeline.cli.progress_events import EventFormatter, ProgressEvents

    log_to_terminal(EventFormatter())
    state = _state()
    events = ProgressEvents(state)

    def observe(event: Event) -> None:
        state(event)
        events(event)

    with events.ticking():
        yield observe


def _state() -> RunState:
    from paddle_reshard.pipeline.core.run_state import RunState
    from paddle_reshard.storage.remote.retry_counts import count_retries

    return RunState(count_retries)


@contextmanager
def waiting(step: str, silent: bool) -> Iterator[Callable[[Event], None]]:
    """An observer for a command that begins with this step. Short steps are not shown."""
    from paddle_reshard.pipeline.core.events import StepStarted

    with observing(silent) as observe:
        observe(StepStarted(step))
        yield observe


class _Bar:
    """An observer that draws a progress bar."""

    def __init__(self, bar: Progress) -> None:
        self.bar = bar
        self.step = ""
        self.task: TaskID | None = None

    def __call__(self, event: Event) -> None:
        from paddle_reshard.pipeline.core.events import FilesRead, StepStarted, Waiting
        from paddle_reshard.pipeline.core.events import Progress as Moved

        if isinstance(event, StepStarted):
            if self.task is not None:
                self.bar.remove_task(self.task)
            self.step = event.step
            self.task = self.bar.add_task(event.step, total=event.total_bytes)
        elif isinstance(event, Moved) and self.task is not None:
            self.bar.update(self.task, description=self.step, advance=event.done_bytes)
        elif isinstance(event, FilesRead):
            self._describe(f"{event.done} of {event.of} files read")
        elif isinstance(event, Waiting):
            self._describe(f"waiting for {event.what}")

    def _describe(self, detail: str) -> None:
        if self.task is not None:
            self.bar.update(self.task, description=f"{self.step}: {detail}")
