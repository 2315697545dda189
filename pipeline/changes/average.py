"""Divide an average that started at zero by the sum of its weights, as the trainer does where it becomes a model."""

from __future__ import annotations

from dataclasses import replace

from paddle_reshard.pipeline.changes.change import Altered
from paddle_reshard.pipeline.checkpoint.checkpoint import Checkpoint
from paddle_reshard.pipeline.checkpoint.reading import read_json
from paddle_reshard.pipeline.checkpoint.sidecars import average_divisor
from paddle_reshard.pipeline.core.errors import UnsupportedError
from paddle_reshard.pipeline.core.file_names import AVERAGE
from paddle_reshard.pipeline.core.mixture import Mixture, Term
from paddle_reshard.pipeline.core.tensors import EMA_MASTER_WEIGHT, EMA_PARAM


def divided(altered: Altered, targets: int) -> Altered:
    """The checkpoint with its average divided; unchanged if its ``ema.json`` does not ask for it.

    It is for a single target, because others would hold the average as it is.
    """
    sizes = altered.store.sizes()
    if AVERAGE not in sizes:
        return altered
    divide_by = average_divisor(read_json(altered.store, AVERAGE, sizes), AVERAGE)
    if divide_by == 1:
        return altered
    if targets > 1:
        raise UnsupportedError(
            f"{AVERAGE}: the average started at zero and must be divided by {divide_by}, which is supported for a "
            "single target only; convert it to a model separately"
        )
    return altered.each(lambda checkpoint: _divided(checkpoint, divide_by))


def _divided(checkpoint: Checkpoint, divide_by: float) -> Checkpoint:
    catalog = checkpoint.catalog
    mixtures = {
        number: Mixture((Term(number, 0.0, 1.0),), divide_by)
        for number, tensor in enumerate(catalog.tensors)
        if tensor.state in (EMA_MASTER_WEIGHT, EMA_PARAM)
    }
    return replace(checkpoint, catalog=replace(catalog, mixtures=mixtures))
