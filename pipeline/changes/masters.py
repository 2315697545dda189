"""Make master weights from parameters, for a job that starts from them with a new optimizer."""

from __future__ import annotations

from dataclasses import replace

from paddle_reshard.pipeline.checkpoint.checkpoint import Checkpoint
from paddle_reshard.pipeline.core.errors import PlanError, UnsupportedError
from paddle_reshard.pipeline.core.tensor_columns import Tensors
from paddle_reshard.pipeline.core.tensors import MASTER_WEIGHT, PARAM, Tensor, dtype_named
from paddle_reshard.pipeline.model.model import AUTOMATIC, ModelTensor

_LIBRARY = "paddleformers"
_HALF = ("bfloat16", "float16")


def with_master_weights(checkpoint: Checkpoint) -> Checkpoint:
    """Add a master weight for every parameter for which the trainer keeps one.

    The values are those of the parameters, as float32. There are no other optimizer states.
    """
    model = checkpoint.model
    trained = next((tensor for tensor in model.tensors if tensor.trained), None)
    if trained is not None or model.has_lora:
        kept = "LoRA" if trained is None else f"optimizer states, such as those of {trained.key}"
        raise PlanError(
            "--master-weights from-parameters is for checkpoints that hold a model's parameters only; the source "
            f"holds {kept}"
        )
    tensors = tuple(replace(tensor, master=_has_master(tensor)) for tensor in model.tensors)
    if model.table.convention != _LIBRARY:
        raise UnsupportedError(
            f"--master-weights from-parameters: how a job of {model.table.convention} starts from master weights alone "
            "is not known"
        )
    keys = [tensor.key for tensor in tensors if tensor.master and tensor.tied_to is None]
    if not keys:
        raise PlanError(
            "--master-weights from-parameters: no parameter is bfloat16 or float16; only these have master weights"
        )
    catalog = checkpoint.catalog
    index, dtype = catalog.index(), dtype_named("float32")
    parameters = [index[key, PARAM] for key in keys]
    shapes = [catalog.tensors.shape(number) for number in parameters]
    made = [Tensor(key, MASTER_WEIGHT, dtype, shape) for key, shape in zip(keys, shapes, strict=True)]
    first = len(catalog.tensors)
    implied = {**catalog.implied, **{first + offset: number for offset, number in enumerate(parameters)}}
    return replace(
        checkpoint,
        catalog=replace(catalog, tensors=Tensors([*catalog.tensors, *made]), implied=implied),
        model=replace(model, tensors=tensors),
        has_optimizer=True,
        history=replace(checkpoint.history, masters_made=True),
    )


def _has_master(tensor: ModelTensor) -> bool:
    """Whether it is a parameter in half precision, and stays so in the trainer."""
    form = tensor.rule.huggingface
    kept = form is not None and form.keep_float32
    return (
        tensor.dtype.name in _HALF and not tensor.missing and not kept and tensor.rule.name_class != AUTOMATIC
    )
