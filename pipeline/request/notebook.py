"""Progress of a call in Python: in a notebook a line below the cell, which changes while a call lasts and is gone at
its end; elsewhere lines on stderr, as the command prints them.

rich draws in notebooks only with ipywidgets; the kernel itself can update what it has displayed.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any, cast

from paddle_reshard.pipeline.core.events import Event
from paddle_reshard.pipeline.core.run_state import RunState
from paddle_reshard.pipeline.core.shown import readable_bytes, readable_seconds

PATIENCE_SECONDS = 1.0
"""A call that is shorter shows nothing."""
EVERY_SECONDS = 0.5
BAR = 30


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return getattr(shell, "kernel", None) is not None


@contextmanager
def drawn(clock: Callable[[], float] = time.monotonic) -> Iterator[Callable[[Event], None]]:
    """An observer that draws below the cell that is running."""
    display = cast(Any, import_module("IPython.display")).display
    state = RunState(clock=clock)
    due = clock() + PATIENCE_SECONDS
    handle: Any = None

    def observe(event: Event) -> None:
        nonlocal due, handle
        state(event)
        if clock() < due or not state.step:
            return
        due = clock() + EVERY_SECONDS
        shown = {"text/plain": line(state)}
        if handle is None:
            handle = display(shown, raw=True, display_id=True)
        else:
            handle.update(shown, raw=True)

    try:
        yield observe
    finally:
        if handle is not None:
            handle.update({"text/plain": ""}, raw=True)


@contextmanager
def printed() -> Iterator[Callable[[Event], None]]:
    """An observer that prints lines on stderr."""
    from paddle_reshard.pipeline.request.progress_lines import ProgressLines

    def write(text: str) -> None:
        print("".join(c if c.isprintable() else ascii(c)[1:-1] for c in text), file=sys.stderr)  # noqa: T201

    state = RunState()
    lines = ProgressLines(state, write)

    def observe(event: Event) -> None:
        state(event)
        lines(event)

    yield observe


def line(state: RunState) -> str:
    """The progress of a run in one line."""
    parts = [state.step]
    if state.total_bytes:
        share = min(1.0, state.done_bytes / state.total_bytes)
        full = round(share * BAR)
        parts.append(f"{'━' * full}{'─' * (BAR - full)} {share:.0%}")
        parts.append(f"{readable_bytes(state.done_bytes)} of {readable_bytes(state.total_bytes)}")
    elif state.total_files:
        parts.append(f"{state.done_files} of {state.total_files} files")
    elif state.detail:
        parts.append(state.detail)
    if rate := state.bytes_per_second():
        parts.append(f"{readable_bytes(int(rate))}/s")
    if (left := state.seconds_left()) is not None:
        parts.append(f"{readable_seconds(left)} left")
    return "  ".join(parts)
