"""Check that a model is complete."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from typing import Any

from paddle_reshard.pipeline.core.errors import CheckpointError, CoverageError
from paddle_reshard.pipeline.model.model import Model, ModelTensor
from paddle_reshard.pipeline.model.rules.entries import config_entry, count_entry
from paddle_reshard.pipeline.model.rules.items import LAYERS, Item, mtp_entry
from paddle_reshard.pipeline.model.rules.table import RuleTable


def check_complete(model: Model) -> None:
    """Refuse a model that lacks tensors, for formats whose files do not list them.

    Required are all decoder layers of the config and all tensors outside layers in the rule table. A layer whose
    tensors are a proper subset of those of another layer of its kind is incomplete. An MTP layer that is numbered
    after the decoder layers has the tensors of one of them, and all of its own; one that is numbered apart has all
    tensors that its rows tell of, but where decoder layers differ, only those of one whose every tensor they tell of.

    Raises
    ------
    CoverageError
        Naming a missing tensor.
    CheckpointError
        If the layers differ from those of the config.
    """
    keys = {tensor.key for tensor in model.tensors}
    for rule in model.table.rules:
        everywhere = "{" not in rule.key and not rule.of_stages and rule.applies(model.config)
        if everywhere and rule.key not in keys:
            raise CoverageError(rule.key, "no file holds it, and every model of this family has it")
    if not model.table.counts_layers:
        return
    check_layers(model.tensors, model.table, model.config)
    layers: dict[tuple[str, int], set[str]] = {}
    for tensor in model.tensors:
        if tensor.layer is not None:
            expert = tensor.rule.numbers(tensor.key).get("expert")
            name = tensor.rule.key.format(layer="{layer}", expert=expert)
            layers.setdefault((tensor.rule.item, tensor.layer), set()).add(name)
    for (item, layer), held in sorted(layers.items()):
        for (of_item, other), more in sorted(layers.items()):
            if item == of_item and held < more:
                missing = min(more - held).format(layer=layer)
                raise CoverageError(missing, f"no file holds it, and layer {other} has it")
    _check_mtp_layers(model, layers)


def _check_mtp_layers(model: Model, layers: Mapping[tuple[str, int], set[str]]) -> None:
    items = model.table.mtp_items
    own = {name: _rows(model, item) for name, item in items.items()}
    (repeated,) = (item for item in model.table.items if item.repeated)
    decoders = [held for (item, _), held in layers.items() if item == repeated.name]
    of_decoders = _in_layer(_rows(model, repeated))
    for (name, layer), held in sorted(layers.items()):
        if name not in items:
            continue
        lacking = own[name] - held
        decoder = items[name].continues
        if not lacking and decoder is not None and items[name].there is None:
            rest = {items[name].outside(key) for key in held - own[name]}
            others = [held for (item, _), held in layers.items() if item == decoder]
            lacking = min((other - rest for other in others), key=len, default=set())
            lacking = {items[name].inside(key) for key in lacking}
        elif decoder is None and lacking and _in_layer(lacking) <= of_decoders:
            kinds = [of for of in map(_in_layer, decoders) if of <= _in_layer(own[name])]
            alike = ({key for key in own[name] if _in_layer({key}) <= of} for of in kinds)
            lacking = min((of_kind - held for of_kind in alike), key=len, default=lacking)
        if lacking:
            missing = min(lacking).format(layer=layer)
            raise CoverageError(
                missing, "no file holds it, and every layer of multi-token prediction of this family has it"
            )


def _in_layer(keys: Set[str]) -> set[str]:
    """What keys are called inside their layer."""
    return {key.partition("{layer}.")[2] for key in keys}


def _rows(model: Model, item: Item) -> set[str]:
    """Keys of the rows of an item, but not those of decoder layers that it has too; of every routed expert."""
    experts = model.table.experts
    return {
        rule.key.format(layer="{layer}", expert=expert)
        for rule in model.table.rules
        if rule.item == item.name and rule.applies(model.config) and rule.key == item.outside(rule.key)
        for expert in range(count_entry(model.config, experts) if rule.of_expert and experts else 1)
    }


def check_layers(tensors: Iterable[ModelTensor], table: RuleTable, config: Mapping[str, Any]) -> None:
    """Refuse tensors whose layers are not those of the config.

    Layers of multi-token prediction may be absent: not every class of a family has them, and they can be omitted.
    """
    apart: dict[str, set[int]] = {
        item.name: set() for item in table.items if item.mtp or item.count is not None
    }
    decoders: set[int] = set()
    for tensor in tensors:
        if tensor.layer is not None:
            apart.get(tensor.rule.item, decoders).add(tensor.layer)
    _check_numbers("decoder layers", decoders, 0, config, LAYERS)
    for item in table.items:
        if item.count is not None:
            _check_numbers(f"of the item {item.name} ({item.count})", apart[item.name], 0, config, item.count)
    mtp, entry = table.mtp_items, mtp_entry(config)
    if any(apart[name] for name in mtp):
        for name, item in mtp.items():
            first = table.first_mtp_layer(item, config)
            _check_numbers(f"layers of multi-token prediction ({entry})", apart[name], first, config, entry)


def _check_numbers(what: str, held: set[int], first: int, config: Mapping[str, Any], entry: str) -> None:
    """Refuse layers that are not numbered from ``first`` on, or not as many as an entry of the config says (if any)."""
    expected = config_entry(config, entry, len(held))
    if isinstance(expected, list):
        expected = len(expected)
    if not isinstance(expected, int):
        raise CheckpointError(f"config.json: {entry} is {expected!r}")
    if expected != len(held) or held != set(range(first, first + len(held))):
        # Iterates over what the files hold: the config may say any number.
        numbers = (*range(first, first + len(held) + 1), *sorted(held))
        unmatched = next(n for n in numbers if (first <= n < first + expected) != (n in held))
        raise CheckpointError(
            f"config.json says {expected} {what}; layer {unmatched} is in only one of the config and the files"
        )


def lost(tensor: ModelTensor, given: str = "") -> CoverageError:
    """The error about a tensor that no file holds, nor the location that was ``given``."""
    neither = f"; {given}, given with --fill, has no such tensor either" if given else ""
    return CoverageError(
        f"{tensor.key} (param)",
        "no file holds it, and it has no master weight to cast (sharded saving loses buffers and parameters that are "
        f"not trained){neither}; supply it as {tensor.dtype.name} {list(tensor.global_shape)} with --fill BASE, a "
        "frozen parameter from the model that training began from, a buffer from a checkpoint of the same step; or "
        f"omit it with --allow-missing '{tensor.key}'",
    )
