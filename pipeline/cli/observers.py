"""The progress of a command: a live view on a terminal, lines elsewhere, or events."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

import click

from paddle_reshard.pipeline.cli.terminal import console, log_to_terminal, printable, say

if TYPE_CHECKING:
    from rich.console import Console, OverflowMethod

    from paddle_reshard.pipeline.core.events import Event
    from paddle_reshard.pipeline.core.run_state import RunState

DRAWN_PER_SECOND = 2
"""Often enough to see that something moves; to draw takes a few milliseconds."""


@contextmanager
def observing(silent: bool) -> Iterator[Callable[[Event], None]]:
    """An observer for the current command: what its options ask for, together.

    It draws on a terminal and prints lines elsewhere, unless it is to be ``silent``. With ``--progress lines`` it
    prints lines in any case, and with ``--progress json`` events. ``--log-file`` adds lines to a file, and
    ``--metrics-port`` serves figures.
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
        elif options.get("progress") == "lines":
            observers.append(stack.enter_context(_lines()))
        elif not silent:
            observers.append(stack.enter_context(_shown()))

        def observe(event: Event) -> None:
            for each in observers:
                each(event)

        yield observe


@contextmanager
def _shown() -> Iterator[Callable[[Event], None]]:
    """A live view on a terminal, lines elsewhere."""
    if sys.stderr and sys.stderr.isatty():
        screen = console(err=True)
        if screen.is_interactive:
            with _live(screen) as view:
                yield view
            return
    with _lines() as lines:
        yield lines


@contextmanager
def _lines() -> Iterator[Callable[[Event], None]]:
    from paddle_reshard.pipeline.cli.progress import ProgressLines

    lines = ProgressLines(lambda line: say(line, err=True))
    with lines.ticking():
        yield lines


@contextmanager
def _live(screen: Console) -> Iterator[Callable[[Event], None]]:
    """A view that is drawn again and again, below what else is printed, and is gone at the end."""
    from rich.live import Live
    from rich.text import Text

    from paddle_reshard.pipeline.cli.live_view import ASCII, UNICODE, LiveView
    from paddle_reshard.pipeline.core.heap import private_bytes

    view = LiveView(_state(), private_bytes, ASCII if screen.options.ascii_only else UNICODE)
    overflow: OverflowMethod = "crop" if screen.options.ascii_only else "ellipsis"

    def draw() -> Text:
        lines = (
            Text.assemble(*((printable(text), style) for text, style in line))
            for line in view.lines(*screen.size)
        )
        drawn = Text("\n").join(lines)
        drawn.no_wrap, drawn.overflow = True, overflow
        return drawn

    with Live(
        get_renderable=draw,
        console=screen,
        refresh_per_second=DRAWN_PER_SECOND,
        transient=True,
        redirect_stdout=bool(sys.stdout and sys.stdout.isatty()),  # else it would end up on the terminal
    ):
        yield view


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
