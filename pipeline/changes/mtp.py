"""A model without its layers of multi-token prediction (MTP), on request only."""

from __future__ import annotations

from dataclasses import replace

from paddle_reshard.pipeline.checkpoint.checkpoint import DROPPED_MTP, Checkpoint
from paddle_reshard.pipeline.model.rules.entries import config_entry, with_entry
from paddle_reshard.pipeline.model.rules.items import mtp_entry


def without_mtp(checkpoint: Checkpoint) -> Checkpoint:
    """The same checkpoint without what belongs to multi-token prediction; its ``config`` is still the source's."""
    model, tensors = checkpoint.model, checkpoint.catalog.tensors
    items = model.table.mtp_items
    dropped = {tensor.key for tensor in model.tensors if tensor.rule.item in items}
    if not dropped:
        return checkpoint
    kept = [number for number, tensor in enumerate(tensors) if tensor.key not in dropped]
    return replace(
        checkpoint,
        model=replace(model, tensors=tuple(t for t in model.tensors if t.key not in dropped)),
        catalog=checkpoint.catalog.only(kept),
        not_carried=(*checkpoint.not_carried, *((key, DROPPED_MTP) for key in sorted(dropped))),
    )


def configured_without_mtp(checkpoint: Checkpoint) -> Checkpoint:
    """The same with a config by which a job builds no such layers."""
    model = checkpoint.model
    entry = mtp_entry(model.config)
    if not config_entry(model.config, entry):
        return checkpoint
    return replace(checkpoint, model=replace(model, config=with_entry(model.config, entry, 0)))
