"""Determine whether the trainer has finished writing a checkpoint, from file names and times alone.

Every rank signals after it has written its files. So no file of a rank is newer than its own signal, and no tensor file
is newer than the last signal; except averages, which may be saved afterwards, next to training.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from paddle_reshard.pipeline.core.errors import CheckpointError, ReshardError, unfinished
from paddle_reshard.pipeline.core.file_names import SIGNAL_PREFIX
from paddle_reshard.pipeline.core.shown import readable_seconds
from paddle_reshard.pipeline.core.trainer_files import (
    is_index,
    is_of_average,
    is_of_training,
    is_random_state,
    is_tensor_file,
    kind_of,
)
from paddle_reshard.storage.store import Source

COPYING_NS: Final = 60 * 10**9
"""A copy without times gives files the times at which each was copied, in any order; most are made in less time."""
SETTLE_SECONDS: Final = 60.0
"""Time without a change after which nobody is writing or copying a file any more, unless a user knows better."""
MOMENT_NS: Final = 10**9
"""No job saves a step again so soon, but files are copied in any order within it."""
_SIGNAL = re.compile(rf"{SIGNAL_PREFIX}\d+")
_OF_RANK = re.compile(r"rng_state_(\d+)\.pth|(?:.*/)?(\d+)_\d+\.(?:distcp|safetensors)")
"""Files whose names contain the number of the rank that wrote them."""
_TRAINER_STATE = ("trainer_state.bin", "trainer_state.json")
_UNMERGED = re.compile(r"save_signal_TMP_(\d+)")
"""Files that zero-cost checkpoints have in place of ``saved_signal_*`` until the trainer has made a model of the EMA,
elsewhere: they are written last, too."""


@dataclass(frozen=True, slots=True)
class Incomplete:
    """Why a checkpoint is incomplete, and since when it has not changed, in seconds since the epoch."""

    reason: str
    since: float
    damaged: bool = False
    """Whether the trainer has said that it is finished, so that waiting will not help."""

    def is_stale(self, now: float, stale_seconds: float | None) -> bool:
        """Whether it has not changed for too long; ``None``: without a limit."""
        return stale_seconds is not None and now - self.since >= stale_seconds


def merging(files: Collection[str]) -> str | None:
    """That the trainer still makes a model of the EMA, or never will after an interruption; ``None`` if it does not.

    It reads the checkpoint for that, and changes no tensor. A rank that was interrupted at the end leaves both signals.

    >>> merging({"save_signal_TMP_0", "save_signal_TMP_1", "saved_signal_0"})
    'save_signal_TMP_1: the trainer has not finished merging the EMA'
    >>> merging({"save_signal_TMP_0", "saved_signal_0"})
    """
    unmerged = {path: match[1] for path in sorted(files) if (match := _UNMERGED.fullmatch(path))}
    left = next((path for path, rank in unmerged.items() if f"{SIGNAL_PREFIX}{rank}" not in files), None)
    return left and f"{left}: the trainer has not finished merging the EMA"


def lacking(files: Collection[str], before: Collection[str]) -> str | None:
    """What the trainer has yet to write to a checkpoint whose tensors are complete, judging by the previous one.

    ``None`` if every rank has signalled, the trainer's own state is there, and no file is missing. Where the topology
    has changed, names of ranks prove nothing: a kind of file must be missing.

    >>> lacking({"saved_signal_0", "trainer_state.json"}, {"scheduler.pdparams", "notes.txt"})
    'scheduler.pdparams is not there yet'
    >>> now = {"model_state.pdparams", "saved_signal_0", "trainer_state.json"}
    >>> lacking(now, {"model_state.tp00.pdparams", "model_state.tp01.pdparams", "saved_signal_0", "saved_signal_1"})
    """
    if not any(_SIGNAL.fullmatch(path) for path in files):
        return "no saved_signal file marks it as finished"
    if not any(path in _TRAINER_STATE for path in files):
        return "trainer_state is not there yet"
    silent = sorted(filter(None, {_signal_of(path) for path in files} - set(files)))
    gone = {path for path in before if path not in files and is_of_training(path)}
    if any(map(is_tensor_file, gone)):
        kinds = {kind_of(path) for path in files}
        gone = {path for path in gone if kind_of(path) not in kinds and not is_index(path)}
    missing = silent + sorted(gone)
    return f"{missing[0]} is not there yet" if missing else None


def settling(doubt: str, since: float, now: float, settle_seconds: float) -> Incomplete | None:
    """Why a checkpoint whose files do not prove that it is finished must wait; ``None`` if it has waited long enough.

    >>> settling("trainer_state is not there yet", since=100, now=130, settle_seconds=60).reason
    'trainer_state is not there yet; converted if nothing changes for 60 s'
    >>> settling("trainer_state is not there yet", since=100, now=160, settle_seconds=60) is None
    True
    """
    if now - since >= settle_seconds:
        return None
    return Incomplete(f"{doubt}; converted if nothing changes for {settle_seconds:g} s", since)


def is_damage(error: ReshardError, modified: Mapping[str, int], now: float) -> bool:
    """Whether a checkpoint that is marked as finished, and cannot be read, will not be whole by waiting for it.

    ``modified``: file → time in nanoseconds since the epoch; ``now``: in seconds.
    """
    return (
        isinstance(error, CheckpointError)
        and not (error.retryable or error.unfinished)
        and now - max(modified.values(), default=0) / 1e9 >= SETTLE_SECONDS
    )


def check_signals(store: Source) -> None:
    """Refuse to make anything of a checkpoint with completion signals that are older than its tensors."""
    times = store.modified()
    older = older_signal(times, COPYING_NS)
    if older is not None:
        raise unfinished(older.in_words(times))


class Older(NamedTuple):
    """A completion signal, and a file of the tensors that is newer."""

    signal: str
    file: str

    def in_words(self, times: Mapping[str, int]) -> str:
        """The message: which signal is older than which file, what that means, and what to do."""
        older = readable_seconds((times[self.file] - times[self.signal]) / 1e9)
        return (
            f"{self.signal} is {older} older than {self.file}: this step is saved again over an earlier save, and "
            "files of both may be here, or the files were copied without their times. If you know that they were "
            f"copied from one complete save, touch {SIGNAL_PREFIX}*; if not, use another checkpoint"
        )


def older_signal(times: Mapping[str, int], tolerance_ns: int) -> Older | None:
    """A completion signal that is older than what it marks as complete; ``None`` if there is none.

    >>> older_signal({"rng_state_0.pth": 5, "saved_signal_0": 7, "model_state.pdparams": 6}, 0)
    >>> older_signal({"rng_state_0.pth": 5, "saved_signal_0": 7, "model_state.pdparams": 9}, 0)
    Older(signal='saved_signal_0', file='model_state.pdparams')
    """
    signals, saved = _signals(times), _saved_before_signals(times)
    if not signals:
        return None
    for path, time in saved.items():
        signal = _signal_of(path)
        if signal is not None and time - signals.get(signal, time) > tolerance_ns:
            return Older(signal, path)
    newest, last = max(saved, key=saved.__getitem__, default=None), max(signals, key=signals.__getitem__)
    if newest is not None and saved[newest] - signals[last] > tolerance_ns:
        return Older(last, newest)
    return None


def doubtful_signal(times: Mapping[str, int]) -> str | None:
    """Why signals do not prove that a checkpoint is complete, although they may; ``None`` if they do.

    A rank that saves for longer writes files after another rank's signal. So does one that saves the step again, while
    the other has not begun.
    """
    if (older := older_signal(times, MOMENT_NS)) is not None:
        return f"{older.signal} is older than {older.file}"
    signals, saved = _signals(times), _saved_before_signals(times)
    first = min(signals, key=signals.__getitem__, default=None)
    newest = max(saved, key=saved.__getitem__, default=None)
    if first is None or newest is None or saved[newest] - signals[first] <= MOMENT_NS:
        return None
    return f"{first} is older than {newest}, of another rank"


def _signals(times: Mapping[str, int]) -> dict[str, int]:
    return {path: time for path, time in times.items() if _SIGNAL.fullmatch(path)}


def _signal_of(path: str) -> str | None:
    """The signal of the rank that wrote a file; ``None`` if its name does not tell."""
    match = _OF_RANK.fullmatch(path)
    return f"{SIGNAL_PREFIX}{match[1] or match[2]}" if match else None


def _saved_before_signals(times: Mapping[str, int]) -> dict[str, int]:
    """The files that a rank saves before it signals; not averages, which are also saved next to training."""
    return {
        path: time
        for path, time in sorted(times.items())
        if is_random_state(path) or (is_tensor_file(path) and not is_of_average(path))
    }
