"""What a terminal shows of a run while it lasts: lines for a terminal of any size, from the state of the run.

How they reach the terminal is decided elsewhere. Colours repeat what the text says: without them nothing is lost.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from paddle_reshard.pipeline.core.events import THREAD
from paddle_reshard.pipeline.core.run_state import EndedStep, RunState, WorkerState
from paddle_reshard.pipeline.core.shown import readable_bytes, readable_seconds

MOST_COLUMNS: Final = 100
MOST_LINES: Final = 24
MOST_WORKERS: Final = 12
"""Rows of the table of workers: those that have run the same groups for the longest time."""
MOST_ENDED: Final = 6
"""Steps that are shown after their end."""
RECENT_SECONDS: Final = 10.0
"""Time over which the recent rate is taken."""
BAR_COLUMNS: Final = 30

HEADINGS: Final = ("runs", "for", "memory", "groups", "read", "written")
"""Headings of the table of workers, after the column with their names."""

Span = tuple[str, str]
"""Text and its style; an empty style is that of the terminal."""
Line = Sequence[Span]

STRONG, WEAK, FILLED, ALARM = "bold", "dim", "cyan", "bold yellow"


@dataclass(frozen=True, slots=True)
class Signs:
    """Characters that lines are made of."""

    done: str
    current: str
    full: str
    empty: str
    between: str
    times: str
    more: str


UNICODE: Final = Signs("✓", "▸", "━", "─", " · ", "×", "…")
ASCII: Final = Signs("+", ">", "#", "-", " | ", "x", "...")


class LiveView:
    """Draws the progress of a run.

    Parameters
    ----------
    state
        Adds up the events. It must not change while lines are taken.
    private_bytes
        Returns the memory of this process.
    signs
        Characters that the terminal can show.
    """

    def __init__(self, state: RunState, private_bytes: Callable[[], int], signs: Signs = UNICODE) -> None:
        self.state, self.private_bytes, self.signs = state, private_bytes, signs
        self._samples: deque[tuple[float, int]] = deque()

    def lines(self, columns: int, rows: int) -> list[Line]:
        """The lines for a terminal of this size, at most ``rows - 1``. They may be longer than ``columns``."""
        columns, rows = min(columns, MOST_COLUMNS), max(1, min(rows - 1, MOST_LINES))
        names = [step.name for step in self.state.ended_steps[-MOST_ENDED:]]
        width = min(max(map(len, [*names, self.state.step])), columns // 2)
        current = self._current(width, columns) if self.state.in_step else []
        memory = [self._memory(columns)]
        present = (current + memory)[:rows]
        workers = self._workers(columns, min(rows - len(present), MOST_WORKERS + 1))
        room = min(MOST_ENDED, rows - len(present) - len(workers))
        ended = self.state.ended_steps[-room:] if room > 0 else []
        return [*(self._ended(width, step) for step in ended), *present, *workers]

    # ---------------------------------------------------------------------------------------------- steps

    def _ended(self, width: int, step: EndedStep) -> Line:
        seconds = readable_seconds(step.seconds)
        return [(f"{self.signs.done} {step.name:<{width}}  {seconds:>8}  ", ""), (step.summary, WEAK)]

    def _current(self, width: int, columns: int) -> list[Line]:
        """The present step: its name, time and bar, then its figures."""
        state = self.state
        seconds = readable_seconds(state.clock() - state.step_started)
        name = f"{self.signs.current} {state.step:<{width}}  {seconds:>8}  "
        share = self._share()
        first: list[Span] = [(name, STRONG)]
        if share is not None:
            first += self._bar(share, columns - len(name) - 6)
            first.append((f" {share:>4.0%}", STRONG))
        return [first, *self._flowing(self._figures(), columns)]

    def _share(self) -> float | None:
        state = self.state
        for done, total in ((state.done_bytes, state.total_bytes), (state.done_files, state.total_files)):
            if total:
                return min(1.0, done / total)
        return None

    def _figures(self) -> list[Span]:
        state = self.state
        figures: list[Span] = []
        if state.detail:
            figures.append((state.detail, STRONG))
        if state.total_bytes:
            figures.append((f"{readable_bytes(state.done_bytes)} of {readable_bytes(state.total_bytes)}", ""))
            if copied := sum(worker.copied_bytes for worker in state.workers.values()):
                figures.append((f"{readable_bytes(copied)} copied by the store", ""))
        rate, left = state.bytes_per_second(), state.seconds_left()
        if rate is not None:
            figures.append((f"{readable_bytes(int(rate))}/s", ""))
            recent = self._recent_rate()
            if recent is not None and not rate / 2 <= recent <= 2 * rate:
                figures.append((f"lately {readable_bytes(int(recent))}/s", ALARM))
        if left is not None:
            figures.append((f"{readable_seconds(left)} left", ""))
        if state.total_groups and state.total_bytes:
            figures.append((f"{state.done_groups:,} of {state.total_groups:,} groups", ""))
        figures += (
            (f"{times} {self.signs.times} {failure} retried", ALARM)
            for failure, times in state.retries().items()
        )
        return figures

    def _recent_rate(self) -> float | None:
        """Rate over the last seconds; ``None`` before they have passed."""
        now, done = self.state.clock(), self.state.done_bytes
        if self._samples and (self._samples[0][0] < self.state.step_started or self._samples[-1][1] > done):
            self._samples.clear()
        self._samples.append((now, done))
        while len(self._samples) > 1 and self._samples[1][0] <= now - RECENT_SECONDS:
            self._samples.popleft()
        then, before = self._samples[0]
        return (done - before) / (now - then) if now >= then + RECENT_SECONDS else None

    # --------------------------------------------------------------------------------------------- memory

    def _memory(self, columns: int) -> Line:
        """The memory in use: of this process, or on a cluster of the worker whose groups hold the most."""
        budget = self.state.budget_bytes
        here = all(name.startswith(THREAD) for name in self.state.workers if name)
        used = self.private_bytes() if here else self.state.held_bytes()
        words = readable_bytes(used)
        if budget:
            words += f" of {readable_bytes(budget)}"
        label = "  memory  " if here else "  fullest worker  "
        line: list[Span] = [(label, WEAK), (words, "")]
        if budget:
            line.append(("  ", ""))
            line += self._bar(min(1.0, used / budget), columns - len(label) - len(words) - 2)
        return line

    # -------------------------------------------------------------------------------------------- workers

    def _workers(self, columns: int, rows: int) -> list[Line]:
        """A table of the workers; if there is too little room, of those that have run the same groups the longest."""
        workers = {name: one for name, one in self.state.workers.items() if name}
        if not workers or rows < 1:
            return []
        shown = sorted(workers.items(), key=lambda entry: _natural(entry[0]))
        if len(shown) > rows - 1:
            busy = [entry for entry in shown if entry[1].running]
            shown = sorted(busy, key=lambda entry: entry[1].since)[: max(1, rows - 2)]
        table = [(_summary(workers.values()), *HEADINGS), *(self._row(name, one) for name, one in shown)]
        lines: list[Line] = [
            [("  " + line, WEAK if number == 0 else "")]
            for number, line in enumerate(_aligned(table, columns - 2))
        ]
        if left := len(workers) - len(shown):
            lines.append([(f"  {self.signs.more} {left:,} more, idle or busy for less long", WEAK)])
        return lines[:rows]

    def _row(self, name: str, worker: WorkerState) -> tuple[str, ...]:
        read, written = readable_bytes(worker.read_bytes), readable_bytes(worker.written_bytes)
        done = f"{worker.groups:,}", read, written
        if not worker.running:
            return name, "idle" if worker.running is not None else "lost", "", "", *done
        since = readable_seconds(self.state.clock() - worker.since)
        return name, _in_words(worker.running), since, readable_bytes(worker.held_bytes), *done

    # --------------------------------------------------------------------------------------------- pieces

    def _bar(self, share: float, columns: int) -> list[Span]:
        """A bar, unless there is too little room to tell anything by it."""
        columns = min(columns, BAR_COLUMNS)
        if columns < 8:
            return []
        full = int(share * columns)
        return [(self.signs.full * full, FILLED), (self.signs.empty * (columns - full), WEAK)]

    def _flowing(self, spans: Iterable[Span], columns: int) -> list[Line]:
        """Spans side by side, in as many lines as they need."""
        lines: list[list[Span]] = []
        room = 0
        for text, style in spans:
            needed = len(text) + len(self.signs.between)
            if not lines or needed > room:
                lines.append([("  ", ""), (text, style)])
                room = columns - 2 - len(text)
            else:
                lines[-1] += [(self.signs.between, WEAK), (text, style)]
                room -= needed
        return [*lines]


def _aligned(table: Sequence[Sequence[str]], columns: int) -> list[str]:
    """The rows with as many of their first columns as there is room for; all but two are aligned to the right.

    >>> _aligned([("a", "b", "c"), ("1", "2", "33"), ("1", "2", "3")], 8)
    ['a  b   c', '1  2  33', '1  2   3']
    >>> _aligned([("a", "b", "c"), ("1", "2", "33")], 7)
    ['a  b', '1  2']
    """
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    while len(widths) > 2 and sum(widths) + 2 * (len(widths) - 1) > columns:
        widths.pop()
    return [
        "  ".join(
            cell.ljust(width) if number < 2 else cell.rjust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=False))
        ).rstrip()
        for row in table
    ]


def _summary(workers: Iterable[WorkerState]) -> str:
    """The number of workers in each state.

    >>> _summary([WorkerState(running=(range(3, 4),)), WorkerState(running=())])
    '1 busy, 1 idle'
    """
    states = ["lost" if one.running is None else "busy" if one.running else "idle" for one in workers]
    counts = ((name, states.count(name)) for name in ("busy", "idle", "lost"))
    return ", ".join(f"{count:,} {name}" for name, count in counts if count)


def _in_words(groups: tuple[range, ...]) -> str:
    """Which groups a worker runs.

    >>> _in_words((range(7, 8),)), _in_words((range(8, 40), range(90, 93)))
    ('group 7', '35 groups from 8')
    """
    count = sum(map(len, groups))
    first = min(one.start for one in groups)
    return f"group {first}" if count == 1 else f"{count} groups from {first}"


def _natural(name: str) -> list[tuple[int, str]]:
    """Sorts numbers in names by their values."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]
