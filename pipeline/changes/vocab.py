"""Add rows to the vocabulary of a model or remove some, on request.

New rows are zero in every state. Everything else keeps its bits.
"""

from __future__ import annotations

from dataclasses import replace

from paddle_reshard.pipeline.checkpoint.checkpoint import Checkpoint
from paddle_reshard.pipeline.core.errors import PlanError
from paddle_reshard.pipeline.core.geometry import Shape
from paddle_reshard.pipeline.core.tensor_columns import Tensors
from paddle_reshard.pipeline.core.tensors import MEAN_MOMENT2
from paddle_reshard.pipeline.model.model import ModelTensor
from paddle_reshard.pipeline.model.rules.entries import config_entry, with_entry

VOCAB_SIZE = "vocab_size"


def resize_vocabulary(checkpoint: Checkpoint, size: int) -> Checkpoint:
    """Describe a checkpoint with a vocabulary of ``size`` rows; its fragments stay those of the source."""
    model = checkpoint.model
    present = config_entry(model.config, VOCAB_SIZE)
    if not isinstance(present, int):
        raise PlanError(f"config.json has no {VOCAB_SIZE}, so the vocabulary cannot be resized")
    if size == present:
        return checkpoint
    resized = tuple(replace(t, global_shape=_resized(t, present, size)) for t in model.tensors)
    if resized == model.tensors:
        raise PlanError(f"no rule has a dim of {VOCAB_SIZE}, so the vocabulary cannot be resized")
    for old, tensor in zip(model.tensors, resized, strict=True):
        if old != tensor and MEAN_MOMENT2 in tensor.accumulators:
            raise PlanError(
                f"{tensor.key}: the optimizer is AdamWMini, whose moment2 is one number computed from all elements, so "
                "the vocabulary cannot be resized"
            )
    shapes = {
        t.key: (old.global_shape, t.global_shape) for old, t in zip(model.tensors, resized, strict=True)
    }
    tensors = tuple(
        replace(tensor, global_shape=shapes[tensor.key][1])
        if shapes[tensor.key][0] == tensor.global_shape
        else tensor
        for tensor in checkpoint.catalog.tensors
    )
    return replace(
        checkpoint,
        model=replace(model, tensors=resized, config=with_entry(model.config, VOCAB_SIZE, size)),
        catalog=replace(checkpoint.catalog, tensors=Tensors(tensors)),
    )


def _resized(tensor: ModelTensor, present: int, size: int) -> Shape:
    dims = tensor.rule.shape or ()
    return tuple(
        size if dim < len(dims) and dims[dim].strip() == VOCAB_SIZE and extent == present else extent
        for dim, extent in enumerate(tensor.global_shape)
    )
