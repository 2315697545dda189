"""A checkpoint without what a user excludes: states, the layers of multi-token prediction (MTP), a head of its own."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace

from paddle_reshard.pipeline.changes.change import Altered, LeftOut
from paddle_reshard.pipeline.checkpoint.checkpoint import DROPPED_MTP, Checkpoint
from paddle_reshard.pipeline.checkpoint.stages import without_head
from paddle_reshard.pipeline.core.errors import PlanError
from paddle_reshard.pipeline.core.tensor_columns import Tensors
from paddle_reshard.pipeline.core.tensors import DROPPABLE, HEAD, MTP
from paddle_reshard.pipeline.model.rules.entries import config_entry, with_entry
from paddle_reshard.pipeline.model.rules.items import mtp_entry


def without(altered: Altered, names: Collection[str]) -> Altered:
    """The checkpoint without these (of ``core.tensors.DROPPABLE``), and what that excludes."""
    before = altered.source.catalog.tensors
    states = before.states & {state for name in names for state in DROPPABLE[name]}
    remaining = altered.each(lambda checkpoint: checkpoint.without(states))
    if MTP in names:
        remaining = remaining.each(without_mtp)
        remaining = replace(remaining, wanted=configured_without_mtp(remaining.wanted))
    if HEAD in names:
        remaining = remaining.each(without_head)
    excluded = tuple(_excluded(before, remaining.source.catalog.tensors))
    return replace(remaining, dropped=tuple(sorted(states)), excluded=excluded)


def _excluded(before: Tensors, after: Tensors) -> Iterator[LeftOut]:
    """The tensors that are dropped, counted by state."""
    for state in sorted(before.states):
        kept = after.of_state(state)
        gone = [number for key, number in before.of_state(state).items() if key not in kept]
        if gone:
            elements = int(before.elements[gone].sum())
            yield LeftOut(state, "dropped, as requested", len(gone), elements)


def without_mtp(checkpoint: Checkpoint) -> Checkpoint:
    """The same checkpoint without what belongs to multi-token prediction; its ``config`` is still the source's."""
    model, tensors = checkpoint.model, checkpoint.catalog.tensors
    items, entry = model.table.mtp_items, mtp_entry(model.config)
    if model.table.described and not items and config_entry(model.config, entry):
        raise PlanError(
            f"--drop {MTP}: the description of {model.table.family} does not tell which tensors are of the layers of "
            f"multi-token prediction that config.json announces ({entry}: {config_entry(model.config, entry)}), as "
            "their numbers do not follow those of the decoder layers. Say it in a copy of the table, by an item with "
            '"mtp": true to which their rows belong, each with "with_mtp": true, and pass that with --rules FILE'
        )
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
