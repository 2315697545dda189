"""Check that every file of a source has exactly one role in exactly one save.

A format says which files hold and locate its tensors. What lies beside them must be no other checkpoint: its tensor
files and indexes have no role here, and so have files about states that this checkpoint does not hold. Files of any
other name are a user's own.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Final, NamedTuple

from paddle_reshard.pipeline.checkpoint.checkpoint import Checkpoint
from paddle_reshard.pipeline.checkpoint.reading import PLAIN_STATES, SAFETENSORS, TENSOR_SUFFIXES, read_json
from paddle_reshard.pipeline.core.errors import CheckpointError
from paddle_reshard.pipeline.core.file_names import AVERAGE, LORA_CONFIG, SCHEDULER, SIGNAL_PREFIX
from paddle_reshard.pipeline.core.shown import readable_seconds
from paddle_reshard.pipeline.core.tensors import EMA_STATES, PARAM
from paddle_reshard.pipeline.core.trainer_files import is_index, is_random_state, is_tensor_file
from paddle_reshard.pipeline.indexing.small_files import (
    FALSE,
    FLOAT,
    NONE,
    SCALER,
    TRAINING_ARGS,
    read_trainer_states,
    training_argument,
)
from paddle_reshard.storage.store import Source

_OWN_AVERAGE: Final = "zcc_save_ema_coef"
"""The argument with which PaddleFormers' trainer keeps an average itself (``trainer/training_args.py``)."""
_OF_RANK: Final = re.compile(r"rng_state_(\d+)\.pth|(?:.*/)?(\d+)_\d+\.(?:distcp|safetensors)")
"""Files whose names contain the number of the rank that wrote them."""
COPYING_NS: Final = 60 * 10**9
"""A copy without times gives files the times at which each was copied, in any order; most are made in less time."""
MOMENT_NS: Final = 10**9
"""No job saves a step again so soon, but files are copied in any order within it."""


def check_roles(store: Source, checkpoint: Checkpoint) -> None:
    """Refuse a file that belongs to another save than the tensors of a checkpoint, or has no role.

    Raises
    ------
    CheckpointError
        Naming the file, and what contradicts it.
    """
    reasons = (
        _other_save(store, checkpoint),
        _lacks_its_state(store, checkpoint),
        _contradicts(store, checkpoint),
    )
    for path, reason in (contradiction for of_kind in reasons for contradiction in of_kind):
        raise CheckpointError(f"{path}: {reason}. Move it elsewhere, or take the files of one save")


def holds_tensors(path: str) -> bool:
    """Whether a file has the name of one that holds or locates tensors in any format."""
    named_so = path.endswith(TENSOR_SUFFIXES) and path not in PLAIN_STATES
    return named_so or is_tensor_file(path) or is_index(path) or SAFETENSORS.fullmatch(path) is not None


def _other_save(store: Source, checkpoint: Checkpoint) -> Iterator[tuple[str, str]]:
    """Tensor files and indexes that are none of the checkpoint's."""
    own = checkpoint.own_files
    for path in sorted(store.sizes()):
        if path not in own and holds_tensors(path):
            what = "says which files hold tensors" if is_index(path) else "holds tensors"
            of_own = f"{min(own)}, as a {checkpoint.format} checkpoint" if own else "none here"
            yield (
                path,
                f"{what}, but is no part of the checkpoint in this folder, whose tensors lie in {of_own}",
            )


def _lacks_its_state(store: Source, checkpoint: Checkpoint) -> Iterator[tuple[str, str]]:
    """Small files about something that the checkpoint does not hold."""
    sizes, states = store.sizes(), checkpoint.catalog.tensors.states
    has_optimizer = any(path.startswith("optimizer") for path in checkpoint.own_files)
    trained = has_optimizer or bool(states.difference(EMA_STATES, (PARAM,)))
    described = (
        (SCHEDULER, trained, "the schedule of an optimizer", "no optimizer states"),
        (SCALER, trained, "the gradient scaler of an optimizer", "no optimizer states"),
        (AVERAGE, checkpoint.has_ema, "a moving average", "none"),
        (LORA_CONFIG, checkpoint.model.has_lora, "an adapter (LoRA)", "none"),
    )
    for path, held, what, holds in described:
        if path in sizes and not held:
            yield path, f"describes {what}, and the checkpoint in this folder holds {holds}"


def _contradicts(store: Source, checkpoint: Checkpoint) -> Iterator[tuple[str, str]]:
    """Small files and states that the trainer's arguments or its own state rule out."""
    sizes, tensors = store.sizes(), checkpoint.catalog.tensors
    if SCALER in sizes and training_argument(store, "fp16") == FALSE:
        yield SCALER, f"is written in fp16 training only, and {TRAINING_ARGS} says that fp16 is False"
    if SCALER in sizes and any(
        tensors.dtype(number).name == "bfloat16" for number in tensors.of_state(PARAM).values()
    ):
        yield SCALER, "is written in fp16 training only, and the parameters are bfloat16"
    kept = training_argument(store, _OWN_AVERAGE)
    if AVERAGE not in sizes:
        if checkpoint.has_ema and kept == NONE:
            average = next((path for path in sorted(checkpoint.own_files) if path.startswith("ema")), AVERAGE)
            yield average, f"holds a moving average, but {TRAINING_ARGS} says that the trainer kept none"
        return
    facts = read_json(store, AVERAGE, sizes)
    if facts.get("divide_by") == 1:
        return
    if kept == FLOAT:
        yield (
            AVERAGE,
            (
                f"describes an average kept next to training, but {TRAINING_ARGS} says that the trainer kept the one "
                f"in this folder ({_OWN_AVERAGE}), whose values are not to be divided"
            ),
        )
    step = facts.get("step")
    for path, state in read_trainer_states(store).items():
        reached = state.get("global_step")
        if type(step) is int and type(reached) is int and step > reached:
            yield AVERAGE, f"describes an average of step {step}, and {path} is of step {reached}"


def check_signals(store: Source) -> None:
    """Refuse to make anything of a checkpoint with completion signals that are older than its tensors.

    Raises
    ------
    CheckpointError
        Naming a signal and a newer file.
    """
    times = store.modified()
    older = older_signal(times, COPYING_NS)
    if older is not None:
        raise CheckpointError(older.in_words(times))


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

    Every rank signals after it has written its files. So no file of a rank is newer than its own signal, and no tensor
    file is newer than the last signal; except averages, which may be saved afterwards, next to training.

    >>> older_signal({"rng_state_0.pth": 5, "saved_signal_0": 7, "model_state.pdparams": 6}, 0)
    >>> older_signal({"rng_state_0.pth": 5, "saved_signal_0": 7, "model_state.pdparams": 9}, 0)
    Older(signal='saved_signal_0', file='model_state.pdparams')
    """
    signals, saved = _signals(times), _saved_before_signals(times)
    if not signals:
        return None
    for path, time in saved.items():
        match = _OF_RANK.fullmatch(path)
        signal = f"{SIGNAL_PREFIX}{match[1] or match[2]}" if match else ""
        if time - signals.get(signal, time) > tolerance_ns:
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
    return {path: time for path, time in times.items() if re.fullmatch(rf"{SIGNAL_PREFIX}\d+", path)}


def _saved_before_signals(times: Mapping[str, int]) -> dict[str, int]:
    """The files that a rank saves before it signals; not averages, which are also saved next to training."""
    return {
        path: time
        for path, time in sorted(times.items())
        if is_random_state(path) or (is_tensor_file(path) and not path.startswith("ema"))
    }
