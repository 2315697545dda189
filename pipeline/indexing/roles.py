"""Check that every file of a source has exactly one role in exactly one save.

A format says which files hold and locate its tensors. What lies beside them must be no other checkpoint: its tensor
files and indexes have no role here, and so have files about states that this checkpoint does not hold. Files of any
other name are a user's own.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from paddle_reshard.pipeline.checkpoint.checkpoint import Checkpoint
from paddle_reshard.pipeline.checkpoint.reading import PLAIN_STATES, SAFETENSORS, TENSOR_SUFFIXES, read_json
from paddle_reshard.pipeline.core.errors import CheckpointError
from paddle_reshard.pipeline.core.file_names import AVERAGE, LORA_CONFIG, SCHEDULER
from paddle_reshard.pipeline.core.tensors import EMA_STATES, PARAM
from paddle_reshard.pipeline.core.trainer_files import is_index, is_of_average, is_tensor_file
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


def check_roles(store: Source, checkpoint: Checkpoint) -> None:
    """Refuse a file that belongs to another save than the tensors of a checkpoint, or has no role."""
    for check in (_other_save, _lacks_its_state, _contradicts):
        for odd in check(store, checkpoint):
            raise CheckpointError(f"{odd}. Move it elsewhere, or take the files of one save")


def holds_tensors(path: str) -> bool:
    """Whether a file has the name of one that holds or locates tensors in any format."""
    named_so = path.endswith(TENSOR_SUFFIXES) and path not in PLAIN_STATES
    return named_so or is_tensor_file(path) or is_index(path) or SAFETENSORS.fullmatch(path) is not None


def _other_save(store: Source, checkpoint: Checkpoint) -> Iterator[str]:
    """Tensor files and indexes that are none of the checkpoint's."""
    own = checkpoint.own_files
    for path in sorted(store.sizes()):
        if path not in own and holds_tensors(path):
            what = "says which files hold tensors" if is_index(path) else "holds tensors"
            of_own = f"{min(own)}, as a {checkpoint.format} checkpoint" if own else "none here"
            yield f"{path}: {what}, but is no part of the checkpoint in this folder, whose tensors lie in {of_own}"


def _lacks_its_state(store: Source, checkpoint: Checkpoint) -> Iterator[str]:
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
            yield f"{path}: describes {what}, and the checkpoint in this folder holds {holds}"


def _contradicts(store: Source, checkpoint: Checkpoint) -> Iterator[str]:
    """Small files and states that the trainer's arguments or its own state rule out."""
    sizes, tensors = store.sizes(), checkpoint.catalog.tensors
    if SCALER in sizes and training_argument(store, "fp16") == FALSE:
        yield f"{SCALER}: is written in fp16 training only, and {TRAINING_ARGS} says that fp16 is False"
    if SCALER in sizes and any(
        tensors.dtype(number).name == "bfloat16" for number in tensors.of_state(PARAM).values()
    ):
        yield f"{SCALER}: is written in fp16 training only, and the parameters are bfloat16"
    kept = training_argument(store, _OWN_AVERAGE)
    if AVERAGE not in sizes:
        if checkpoint.has_ema and kept == NONE:
            average = next((path for path in sorted(checkpoint.own_files) if is_of_average(path)), AVERAGE)
            yield f"{average}: holds a moving average, but {TRAINING_ARGS} says that the trainer kept none"
        return
    facts = read_json(store, AVERAGE, sizes)
    if facts.get("divide_by") == 1:
        return
    if kept == FLOAT:
        yield (
            f"{AVERAGE}: describes an average kept next to training, but {TRAINING_ARGS} says that the trainer kept "
            f"the one in this folder ({_OWN_AVERAGE}), whose values are not to be divided"
        )
    step = facts.get("step")
    for path, state in read_trainer_states(store).items():
        reached = state.get("global_step")
        if type(step) is int and type(reached) is int and step > reached:
            yield f"{AVERAGE}: describes an average of step {step}, and {path} is of step {reached}"
