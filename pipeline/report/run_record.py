"""The record of a run that an observer keeps for a report: of bounded size, however long the run."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from typing import NamedTuple

import numpy as np

from paddle_reshard.pipeline.core.events import (
    THREAD,
    Event,
    GroupEnded,
    Progress,
    StepEnded,
    StepStarted,
    Waiting,
)

MOST_STRETCHES = 4096
MOST_SAMPLES = 1024
MOST_STEPS = 256
BINS = 160
"""Points of a curve over time."""


class BusyTime(NamedTuple):
    """Time in which a worker ran a group, or several one after the other. Seconds are since the start of the record."""

    worker: str
    start: float
    stop: float
    groups: int
    peak_bytes: int
    """The largest memory that any of them was given."""
    read_bytes: int
    written_bytes: int
    copied_bytes: int


@dataclass(frozen=True, slots=True)
class Step:
    """A step of a run."""

    name: str
    start: float
    stop: float | None
    """``None`` if the run ended before the step."""
    summary: str = ""
    done_bytes: int = 0
    """With those of an earlier run."""
    total_bytes: int | None = None
    done_groups: int = 0
    """With those of an earlier run."""
    total_groups: int | None = None


@dataclass(frozen=True, slots=True)
class Curves:
    """The curves that are drawn over time; ``seconds`` are the middles of equal intervals."""

    seconds: tuple[float, ...]
    read: tuple[float, ...]
    """Bytes per second."""
    written: tuple[float, ...]
    """Bytes per second, including those that the storage copied."""
    copied: tuple[float, ...]
    memory: tuple[int, ...]
    """Largest memory that the groups of a process were given together, in the interval."""


@dataclass(frozen=True, slots=True)
class RunData:
    """A finished record."""

    seconds: float
    steps: tuple[Step, ...]
    stretches: tuple[BusyTime, ...]
    """Sorted by worker and start."""
    curves: Curves
    resident: tuple[tuple[float, int], ...]
    """Seconds, and the memory that this process had then."""
    waited_for: tuple[str, ...] = ()
    budget_bytes: int | None = None
    """Memory budget of each worker, if groups were run."""
    peak_bytes: int = 0
    """The most memory that this process had at any event; 0 if that is not known."""

    @property
    def in_this_process(self) -> bool:
        """Whether all groups ran here, and not on workers of a cluster."""
        return all(stretch.worker.startswith(THREAD) for stretch in self.stretches)


class RunRecord:
    """An observer that keeps what a report shows of a run.

    It takes at most a few megabytes: neighbouring groups of a worker are joined when there are many.

    Parameters
    ----------
    private_bytes
        Returns the memory of this process; ``None`` to leave it out.
    clock
        Seconds, from any start.
    """

    def __init__(
        self, private_bytes: Callable[[], int] | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._private_bytes, self._clock = private_bytes, clock
        self._started = clock()
        self._steps: list[Step] = []
        self._stretches: list[BusyTime] = []
        self._resident: list[tuple[float, int]] = []
        self._peak_bytes = 0
        self._progress: list[tuple[float, int]] = []
        self._stride_seconds = 0.0
        self._done_bytes = 0
        self._waited_for: dict[str, None] = {}
        self._budget_bytes: int | None = None

    def __call__(self, event: Event) -> None:
        """Keep an event."""
        now = self._clock() - self._started
        if isinstance(event, StepStarted):
            self._end_step(now, "")
            self._budget_bytes = event.budget_bytes or self._budget_bytes
            step = Step(event.step, now, None, total_bytes=event.total_bytes, total_groups=event.total_groups)
            self._steps = [*self._steps[-MOST_STEPS:], step]
        elif isinstance(event, StepEnded):
            self._end_step(now, event.summary)
        elif isinstance(event, GroupEnded):
            self._add(event, now)
            self._advance(0, 1)
        elif isinstance(event, Progress):
            self._done_bytes += 0 if event.before else event.done_bytes
            self._advance(event.done_bytes, event.groups)
        elif isinstance(event, Waiting) and len(self._waited_for) < MOST_STEPS:
            self._waited_for[event.what] = None
        self._sample(now)

    def data(self, finished: bool = False) -> RunData:
        """The record so far. If the run has ``finished``, so has its last step."""
        seconds = self._clock() - self._started
        if finished:
            self._end_step(seconds, "")
        stretches = tuple(sorted(self._stretches))
        curves = _curves(stretches, seconds) if stretches else _curve_of_progress(self._progress, seconds)
        return RunData(
            seconds,
            tuple(self._steps),
            stretches,
            curves,
            tuple(self._resident),
            tuple(self._waited_for),
            self._budget_bytes,
            self._peak_bytes,
        )

    def _end_step(self, now: float, summary: str) -> None:
        if self._steps and self._steps[-1].stop is None:
            self._steps[-1] = replace(self._steps[-1], stop=now, summary=summary)

    def _advance(self, done_bytes: int, groups: int) -> None:
        if self._steps:
            step = self._steps[-1]
            self._steps[-1] = replace(
                step, done_bytes=step.done_bytes + done_bytes, done_groups=step.done_groups + groups
            )

    def _add(self, event: GroupEnded, now: float) -> None:
        stop = max(0.0, now - event.seconds_ago)
        figures = event.peak_bytes, event.read_bytes, event.written_bytes, event.copied_bytes
        self._stretches.append(BusyTime(event.worker, max(0.0, stop - event.seconds), stop, 1, *figures))
        if len(self._stretches) > MOST_STRETCHES:
            self._stretches = joined_in_pairs(self._stretches)

    def _sample(self, now: float) -> None:
        held = 0 if self._private_bytes is None else self._private_bytes()
        self._peak_bytes = max(self._peak_bytes, held)
        if self._progress and now < self._progress[-1][0] + self._stride_seconds:
            return
        self._progress.append((now, self._done_bytes))
        if self._private_bytes is not None:
            self._resident.append((now, held))
        if len(self._progress) > MOST_SAMPLES:
            self._progress, self._resident = self._progress[::2], self._resident[::2]
            self._stride_seconds = 2 * now / MOST_SAMPLES


def joined_in_pairs(stretches: Iterable[BusyTime]) -> list[BusyTime]:
    """Half as many stretches: neighbours of the same worker become one."""
    joined = []
    for _, group in groupby(sorted(stretches), key=lambda stretch: stretch.worker):
        own = list(group)
        joined += [_joined(own[index : index + 2]) for index in range(0, len(own), 2)]
    return joined[:MOST_STRETCHES]  # there may be more workers than that


def _joined(stretches: Sequence[BusyTime]) -> BusyTime:
    return BusyTime(
        stretches[0].worker,
        stretches[0].start,
        max(stretch.stop for stretch in stretches),
        sum(stretch.groups for stretch in stretches),
        max(stretch.peak_bytes for stretch in stretches),
        sum(stretch.read_bytes for stretch in stretches),
        sum(stretch.written_bytes for stretch in stretches),
        sum(stretch.copied_bytes for stretch in stretches),
    )


# --------------------------------------------------------------------------------------------------- curves


def _curves(stretches: Sequence[BusyTime], seconds: float) -> Curves:
    """Rates, as if every stretch had moved its bytes evenly, and memory."""
    start = np.array([stretch.start for stretch in stretches])
    first = float(start.min())
    width = max(seconds - first, 1e-6) / BINS
    edges = first + width * np.arange(BINS + 1)
    edges[-1] = np.inf
    length = np.array([max(stretch.stop - stretch.start, 1e-9) for stretch in stretches])
    done = np.clip((edges[:, None] - start) / length, 0, 1)  # of each stretch at each edge
    moved = [(one.read_bytes, one.written_bytes, one.copied_bytes) for one in stretches]
    read, written, copied = map(tuple, (np.diff(done @ np.array(moved), axis=0) / width).T.tolist())
    return Curves(_middles(first, width), read, written, copied, tuple(_memory(stretches, first, width)))


def _middles(first: float, width: float) -> tuple[float, ...]:
    return tuple(first + (index + 0.5) * width for index in range(BINS))


def _memory(stretches: Sequence[BusyTime], first: float, width: float) -> list[int]:
    """Memory of the fullest process in each interval. Groups that run in one process share its memory."""
    most, starts = np.zeros(BINS, dtype=np.int64), first + width * np.arange(BINS)
    for _, group in groupby(sorted(stretches, key=_process), key=_process):
        own = list(group)
        begun = [(stretch.start, 1, stretch.peak_bytes) for stretch in own]
        ended = [(stretch.stop, 0, -stretch.peak_bytes) for stretch in own]
        times, _, changes = zip(*sorted(begun + ended), strict=True)
        held = np.cumsum(changes)
        intervals = np.minimum((np.array(times) - first) / width, BINS - 1).astype(np.int64)
        np.maximum.at(most, intervals, held)
        most = np.maximum(most, np.r_[0, held][np.searchsorted(times, starts)])
    return most.tolist()


def _process(stretch: BusyTime) -> str:
    return "" if stretch.worker.startswith(THREAD) else stretch.worker


def _curve_of_progress(samples: Sequence[tuple[float, int]], seconds: float) -> Curves:
    """The rate of a run that reports bytes only."""
    width = max(seconds, 1e-6) / BINS
    done = [0.0] * BINS
    for (before, had), (now, has) in pairwise(samples):
        if has > had:
            low, high = (min(int(at / width), BINS - 1) for at in (before, now))
            for index in range(low, high + 1):
                done[index] += (has - had) / (high - low + 1) / width
    nothing = (0.0,) * BINS
    return Curves(_middles(0.0, width), tuple(done), nothing, nothing, (0,) * BINS)
