"""Check that a model is complete: that it has all that the class of its config has."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from functools import cache
from typing import Any, Final

from paddle_reshard.pipeline.core.errors import CheckpointError, CoverageError, RuleError
from paddle_reshard.pipeline.core.tensors import MTP, dtype_named
from paddle_reshard.pipeline.model.model import Model, ModelTensor, model_order, spelled_experts
from paddle_reshard.pipeline.model.rules.entries import config_entry, count_entry, derived_sizes
from paddle_reshard.pipeline.model.rules.items import LAYERS, Item, mtp_entry
from paddle_reshard.pipeline.model.rules.rule import Rule, expected_shape
from paddle_reshard.pipeline.model.rules.table import RuleTable

Allows = Callable[[str], bool]
"""Whether the tensor with a structured key may be missing."""
_Layers = Mapping[tuple[str, int], set[str]]
"""Item and number of a layer → the names of its tensors: keys with ``{layer}`` for the number of the layer."""

MAX_LACKING: Final = 1 << 16
"""Experts or layers that a config may say beyond those of the files: more are refused without a list of them."""


def not_allowed(key: str) -> bool:
    """No tensor may be missing."""
    return False


def completed(
    model: Model, allows: Allows = not_allowed, *, mtp: bool = True, layers_counted: bool = True
) -> Model:
    """The model with those tensors of its class that no file holds; without leave they are refused.

    Required are all rows of the table that apply to the config, in every layer of their item: outside layers, in the
    decoder layers (all that the config counts, if ``layers_counted``), and in the layers of multi-token prediction that
    the config announces (unless ``mtp`` is false, as targets omit them). Of the rows in ``alternatives`` a layer has
    those of one alternative. A table that does not say the alternatives only tells that a layer whose tensors are a
    proper subset of another's of its kind is incomplete.

    Raises
    ------
    CoverageError
        Naming the first tensor that is missing, and how to go on.
    CheckpointError
        If the layers differ from those of the config.
    """
    table, config = model.table, model.config
    keys = {tensor.key for tensor in model.tensors}
    lacking = [
        rule.key
        for rule in table.rules
        if "{" not in rule.key and _is_required(rule, config) and rule.key not in keys
    ]
    if table.counts_layers:
        if layers_counted:
            check_layers(model.tensors, table, config)
            check_kinds_of_layers(model)
        layers = _names_of_layers(model.tensors)
        if table.alternatives is None:
            lacking += _lacking_beside_others(model, layers)
        else:
            lacking += _lacking_in_layers(model, layers, mtp)
    wanted = list(dict.fromkeys(lacking))
    for key in wanted:
        if not allows(key):
            raise _refusal(key, wanted, model)
    return _with_missing(model, wanted)


def _is_required(rule: Rule, config: Mapping[str, Any]) -> bool:
    """Whether the class has the row with this config; it leaves out what a count in its shape makes empty."""
    if rule.optional is not None or rule.of_stages or rule.former or rule.unused or not rule.applies(config):
        return False
    try:
        return 0 not in (expected_shape(rule, config) or ())
    except RuleError:  # q_lora_rank or n_shared_experts is null
        return False


def _names_of_layers(tensors: Sequence[ModelTensor]) -> dict[tuple[str, int], set[str]]:
    layers: dict[tuple[str, int], set[str]] = {}
    experts = spelled_experts(tensors)
    name = cache(lambda row, expert: row.format(layer="{layer}", expert=expert))
    for tensor in tensors:
        if tensor.layer is not None:
            held = layers.setdefault((tensor.rule.item, tensor.layer), set())
            held.add(name(tensor.rule.key, experts.get(tensor.key)))
    return layers


def _lacking_in_layers(model: Model, layers: _Layers, mtp: bool) -> Iterator[str]:
    """The keys that layers lack, by the table's alternatives."""
    table, config = model.table, model.config
    experts = _experts(model)
    some_mtp = any(of_item in table.mtp_items for of_item, _ in layers)
    rows_held: dict[tuple[str, int], set[str]] = {}
    for tensor in model.tensors:
        if tensor.layer is not None:
            rows_held.setdefault((tensor.rule.item, tensor.layer), set()).add(tensor.rule.key)
    for item in table.items:
        numbers = {layer for of_item, layer in layers if of_item == item.name}
        if item.mtp:
            # A job whose pipeline has no such layers leaves them out, whatever its config announces.
            announced = mtp and (item.layer_class or some_mtp)
            numbers |= set(_announced(table, item, config)) if announced else set()
            if not mtp:
                continue
        rows = [name for name in _rows(table, item, config) if "{layer}" in name]
        for number in sorted(numbers):
            held = layers.get((item.name, number), set())
            for name in _of_one_kind(rows, item, number, rows_held, table):
                for key in _of_experts(name, experts):
                    if key not in held:
                        yield key.format(layer=number)


def _announced(table: RuleTable, item: Item, config: Mapping[str, Any]) -> range:
    first, count = table.first_mtp_layer(item, config), count_entry(config, mtp_entry(config))
    if count > MAX_LACKING or item.there is not None:  # the latter are told by no number
        return range(first, first)
    return range(first, first + count)


def _rows(table: RuleTable, item: Item, config: Mapping[str, Any]) -> list[str]:
    """Names of the required rows of an item, ``{expert}`` left open; with those of the layers that it continues."""
    own = [rule.key for rule in table.rules if rule.item == item.name and _is_required(rule, config)]
    if item.continues is None or item.there is not None:
        return own
    continued = [
        rule.key for rule in table.rules if rule.item == item.continues and _is_required(rule, config)
    ]
    return list(dict.fromkeys([*own, *map(item.inside, continued)]))


def _of_one_kind(
    rows: Sequence[str], item: Item, layer: int, rows_held: _Layers, table: RuleTable
) -> Iterator[str]:
    """Of the rows of an item, those that a layer has, which holds tensors of some of them."""
    inside = {name: item.outside(name).partition("{layer}")[2].partition(".")[2] for name in rows}
    left_out: set[str] = set()
    for choice in table.alternatives or ():
        kinds = [{name for name in rows if _begins(inside[name], beginnings)} for beginnings in choice]
        kinds = [kind for kind in kinds if kind]
        if len(kinds) > 1:
            left_out |= set.union(*kinds) - _likeliest(kinds, item, layer, rows_held)
    return (name for name in rows if name not in left_out)


def _begins(name: str, beginnings: Iterable[str]) -> bool:
    return any(name == beginning or name.startswith(f"{beginning}.") for beginning in beginnings)


def _likeliest(kinds: Sequence[set[str]], item: Item, layer: int, rows_held: _Layers) -> set[str]:
    """The alternative of which a layer holds most; if several, the one that the last of the other layers holds."""
    held = rows_held.get((item.name, layer), set())
    best = max(len(kind & held) for kind in kinds)
    alike = [kind for kind in kinds if len(kind & held) == best]
    if len(alike) > 1:
        for (of_item, _), names in sorted(rows_held.items(), reverse=True):
            there = {item.inside(name) for name in names} if of_item == item.continues else names
            whole = [kind for kind in alike if kind <= there]
            if of_item in (item.name, item.continues) and whole:
                return whole[0]
    return alike[0]


def _experts(model: Model) -> Sequence[int]:
    """The numbers of the routed experts of a layer: those of the config, or else of any layer."""
    entry = model.table.experts
    count = derived_sizes(model.config).get(entry) if entry is not None else None
    held = model.expert_numbers
    if count is None:
        return sorted(held)
    if count - len(held) > MAX_LACKING:
        raise CheckpointError(
            f"config.json says {entry} {count}, and the files hold {len(held)} of the experts"
        )
    return range(count)


def _of_experts(name: str, experts: Iterable[int]) -> Iterator[str]:
    """The names of a row for all experts, with ``{layer}`` left open."""
    if "{expert}" not in name:
        yield name
    else:
        yield from (name.replace("{expert}", str(expert)) for expert in experts)


def _with_missing(model: Model, keys: Sequence[str]) -> Model:
    """The model with tensors that no file holds, each before the first that follows it in the table's order."""
    if not keys:
        return model
    order = model_order(model.table)
    tensors = list(model.tensors)
    places = [order(tensor) for tensor in tensors]
    added = [_missing(key, model) for key in keys]
    if places == sorted(places):
        return replace(model, tensors=tuple(sorted([*tensors, *added], key=order)))
    for tensor in added:  # the order of the files decides where it is another
        place = order(tensor)
        position = next((n for n, other in enumerate(places) if other > place), len(places))
        tensors.insert(position, tensor)
        places.insert(position, place)
    return replace(model, tensors=tuple(tensors))


def _missing(key: str, model: Model) -> ModelTensor:
    """A tensor that no file holds, in the dtype of its row in other layers, or else of most tensors."""
    rule, layer = model.table.find(key, model.config)
    alike = [tensor for tensor in model.tensors if tensor.rule.key == rule.key]
    shape = expected_shape(rule, model.config, key) or next((t.global_shape for t in alike), None)
    if shape is None:
        raise CoverageError(key, "no file holds it, and neither the config nor another layer tells its shape")
    dtypes = Counter(tensor.dtype.name for tensor in alike or model.tensors)
    return ModelTensor(
        key=key,
        rule=rule,
        layer=layer,
        global_shape=shape,
        dtype=dtype_named(max(dtypes, key=lambda name: dtypes[name], default="bfloat16")),
        accumulators=(),
        master=False,
        tied_to=None,
        missing=True,
    )


def _refusal(key: str, lacking: Sequence[str], model: Model) -> CheckpointError:
    """Why a model without a tensor is refused, and how to go on."""
    rule, layer = model.table.find(key, model.config)
    pattern = key if layer is None else rule.key.replace("{layer}", "*").replace("{expert}", "*")
    others = len(lacking) - 1
    also = f" ({others} more are missing)" if others else ""
    supply = "supply what is missing with --fill BASE, from a checkpoint of the same model"
    mtp = [item.name for item in model.table.mtp_items.values()]
    if rule.item in mtp and not any(tensor.rule.item in mtp for tensor in model.tensors):
        entry = mtp_entry(model.config)
        return CoverageError(
            key,
            f"no file holds it{also}, and config.json announces layers of multi-token prediction ({entry}: "
            f"{config_entry(model.config, entry)}); convert without them with --drop {MTP}, which writes {entry} 0, or "
            f"{supply}",
        )
    where = "" if layer is None else " in every layer of its kind"
    because = ", ".join(_reasons(rule, model))
    return CoverageError(
        key,
        f"no file holds it, and every model of {model.table.named} with this config.json has it{where}"
        f"{f' (config.json {because})' if because else ''}{also}; {supply}, or leave it out with --allow-missing "
        f"'{pattern}'",
    )


def _reasons(rule: Rule, model: Model) -> Iterator[str]:
    """What the config says, or does not say, that makes a model have a row: ``says attention_bias true``."""
    table, config = model.table, model.config
    names = [*rule.where, *rule.unless]
    if rule.item in table.mtp_items or rule.with_mtp:
        names.append(mtp_entry(config))
    if rule.of_expert and table.experts is not None:
        names.append(table.experts)
    # Shared experts are there by their number or width alone.
    names += [name for name in rule.sizes if "shared" in name]
    for name in dict.fromkeys(names):
        if (value := config_entry(config, name)) is not None:
            yield f"says {name} {json.dumps(value)}"
        elif name in rule.unless:
            yield f"does not say {name} {json.dumps(rule.unless[name])}"


def _lacking_beside_others(model: Model, layers: _Layers) -> Iterator[str]:
    """What a layer lacks of another of its kind, for a table that does not tell what each layer has."""
    for (item, layer), held in sorted(layers.items()):
        for (of_item, _), more in sorted(layers.items()):
            if item == of_item and held < more:
                yield from (name.format(layer=layer) for name in sorted(more - held))
                break
    yield from _lacking_in_mtp_layers(model, layers)


def _lacking_in_mtp_layers(model: Model, layers: _Layers) -> Iterator[str]:
    items = model.table.mtp_items
    own = {name: _rows_of_experts(model, item) for name, item in items.items()}
    (repeated,) = (item for item in model.table.items if item.repeated)
    decoders = [held for (item, _), held in layers.items() if item == repeated.name]
    of_decoders = _in_layer(_rows_of_experts(model, repeated))
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
        yield from (name.format(layer=layer) for name in sorted(lacking))


def _in_layer(keys: Set[str]) -> set[str]:
    """What keys are called inside their layer."""
    return {key.partition("{layer}.")[2] for key in keys}


def _rows_of_experts(model: Model, item: Item) -> set[str]:
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
    mtp, entry = table.mtp_items, mtp_entry(config)
    behind = {number for name, item in mtp.items() if item.continues for number in apart[name] & decoders}
    if len(behind) > count_entry(config, entry):
        raise _not_announced(sorted(behind), entry, config)
    _check_numbers("decoder layers", decoders, 0, config, LAYERS)
    for item in table.items:
        if item.count is not None:
            _check_numbers(f"of the item {item.name} ({item.count})", apart[item.name], 0, config, item.count)
    if any(apart[name] for name in mtp):
        for name, item in mtp.items():
            if not apart[name] and table.alternatives is not None:
                continue  # all that it has is missed by key
            first = table.first_mtp_layer(item, config)
            _check_numbers(f"layers of multi-token prediction ({entry})", apart[name], first, config, entry)


_BY_STEP: Final = frozenset(("qwen3_moe", "qwen3_next", "qwen3_vl_moe"))
_FROM_A_LAYER_ON: Final = frozenset(("deepseek_v3", "glm4_moe", "glm4v_moe"))
_Kind = tuple[str, str]
"""What a layer has, in words, and the end of the key of a tensor that tells it."""
_EXPERTS: Final[_Kind] = "experts", "mlp.gate.weight"
_DENSE: Final[_Kind] = "one dense MLP", "mlp.down_proj.weight"
_LINEAR: Final[_Kind] = "linear attention", "linear_attn.out_proj.weight"
_FULL: Final[_Kind] = "full attention", "self_attn.o_proj.weight"


def check_kinds_of_layers(model: Model) -> None:
    """Refuse layers with experts that the config makes dense, and other layers of another kind than it says.

    A job builds the layers by its config, and transformers too: they would begin with other values there, which the
    latter only warns of. Of families whose classes say it by these entries, in PaddleFormers 1.2 and in transformers.
    """
    counted = {item.name for item in model.table.items if not item.mtp and item.count is None}
    for yes, no, entries, is_yes in _said_of_layers(model):
        held: dict[_Kind, set[int]] = {yes: set(), no: set()}
        for tensor in model.tensors:
            for kind, layers in held.items():
                if tensor.layer is not None and tensor.rule.key.endswith(f"layers.{{layer}}.{kind[1]}"):
                    layers.update([tensor.layer] if tensor.rule.item in counted else [])
        for layer in sorted(held[yes] ^ held[no]):
            here, said = (yes if layer in held[yes] else no), (yes if is_yes(layer) else no)
            if here != said:
                raise CheckpointError(
                    f"config.json says {entries}, by which layer {layer} has {said[0]}, and the files hold {here[0]}: "
                    "it is not the config of this model"
                )


def _said_of_layers(model: Model) -> Iterator[tuple[_Kind, _Kind, str, Callable[[int], bool]]]:
    """Two kinds of layers, the entries that say which is which, and whether a layer is of the first; as far as the
    config says it."""
    family, config = model.table.family, model.config
    step, only = config_entry(config, "decoder_sparse_step"), config_entry(config, "mlp_only_layers") or []
    if family in _BY_STEP and type(step) is int and step > 0 and isinstance(only, list):
        some = config_entry(config, model.table.experts or "", 1) != 0
        entries = (
            f"decoder_sparse_step {step}, mlp_only_layers {only}" if some else f"{model.table.experts} 0"
        )
        yield _EXPERTS, _DENSE, entries, lambda layer: some and layer not in only and (layer + 1) % step == 0
    first, every = config_entry(config, "first_k_dense_replace"), config_entry(config, "moe_layer_freq", 1)
    has_experts = config_entry(config, "n_routed_experts", 1) is not None  # deepseek_v3 may have none
    if family in _FROM_A_LAYER_ON and type(first) is int and every == 1 and has_experts:
        yield _EXPERTS, _DENSE, f"first_k_dense_replace {first}", lambda layer: layer >= first
    types = config_entry(config, "layer_types")
    if family == "qwen3_next" and isinstance(types, list):
        linear = {layer for layer, of in enumerate(types) if of == "linear_attention"}
        yield _LINEAR, _FULL, "layer_types", linear.__contains__


def _not_announced(layers: Sequence[int], entry: str, config: Mapping[str, Any]) -> CheckpointError:
    """The refusal of layers that have what only those of MTP have, and that the config does not count."""
    held = f"layer {layers[0]} is" if len(layers) == 1 else f"layers {layers[0]} to {layers[-1]} are"
    error = CheckpointError(
        f"{held} of multi-token prediction, of which config.json announces {count_entry(config, entry)} ({entry}); "
        f"convert without them, with --drop {MTP}, or correct the entry in a copy of the checkpoint: {len(layers)}"
    )
    error.unannounced_mtp = len(layers)
    return error


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
