"""Determine whether the trainer has finished writing a checkpoint, from file names and times alone."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

from paddle_reshard.pipeline.core.file_names import SIGNAL_PREFIX
from paddle_reshard.pipeline.core.trainer_files import is_index, is_of_training, is_tensor_file, kind_of

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
    ranks = {match[1] or match[2] for path in files if (match := _OF_RANK.fullmatch(path))}
    silent = sorted(f"{SIGNAL_PREFIX}{rank}" for rank in ranks if f"{SIGNAL_PREFIX}{rank}" not in files)
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
