"""Make the rule table of a model from what the ranks of jobs hold of it: keys, shapes, cuts, ties, names.

A rank's entries are facts (:class:`RankFacts`); ``pipeline/training/describe.py`` takes them from a live model. What
follows from them is the table of a model whose class nobody has described: its rows have this model's own shapes, as
numbers. A table is believed only as far as it gives every fact back (:func:`_faults`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby, pairwise
from math import prod
from typing import Any, Final

from paddle_reshard.pipeline.core.errors import RuleError, UsageError
from paddle_reshard.pipeline.core.geometry import Shape
from paddle_reshard.pipeline.core.tensors import dtype_named
from paddle_reshard.pipeline.model.model import (
    AUTOMATIC,
    EXPERT_NUMBER,
    Model,
    ModelTensor,
    cut_of,
    in_building_order,
    model_order,
    predict_parameter_names,
)
from paddle_reshard.pipeline.model.rules.entries import config_entry, count_entry, ties_words
from paddle_reshard.pipeline.model.rules.items import LAYERS, mtp_entry
from paddle_reshard.pipeline.model.rules.parse import typed_table
from paddle_reshard.pipeline.model.rules.rule import form_of
from paddle_reshard.pipeline.model.rules.table import Described, RuleTable

Fused = Mapping[str, int | Sequence[int]]
"""Key of a row → how many equal parts are fused along the dim that tp cuts, or the extent of each."""
Shares = tuple[int, tuple[int, ...]]
"""A dim, and the extents of the parts that are fused along it, as a ratio; ``(0, (1,))``: one part."""

EXPERTS: Final = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
"""Entries of a config that count the routed experts of a layer."""
_NAME: Final = re.compile(r"(?P<cls>.+)_(?P<number>\d+)\.(?P<kind>[wb])_(?P<index>\d+)")
_COPY: Final = re.compile(r"(?P<of>.+)_deepcopy_\d+")
_UNNAMED: Final = re.compile(r"(?P<cls>_eager_param_base)_(?P<number>\d+)")
_MTP: Final = "mtp"
"""The item of the layers behind the decoder layers, of multi-token prediction."""
TIED: Final = "tied"
"""Layer class of what is never built by itself."""
SOURCE: Final = "described from live parameters"


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry of a rank's ``state_dict``."""

    key: str
    name: str | None
    """Parameter name; ``None`` for a buffer."""
    shape: Shape
    """What the rank holds."""
    distributed: bool = False
    """``is_distributed``."""
    split: int | None = None
    """``split_axis``, or ``None`` if the parameter has none."""
    whole: Shape | None = None
    """The global shape by ``sharded_state_dict()``; ``None`` if that does not run."""
    of_expert: bool = False
    """Whether it is marked as an expert's: ``expert`` or ``no_sync``."""
    same_as: str | None = None
    """An earlier key of the same tensor."""
    trained: bool = True
    color: str | None = None
    """``color``: the communication buffers of sharding stage 1 v2 in which it lies, apart from others."""


@dataclass(frozen=True, slots=True)
class RankFacts:
    """What one rank of a job holds of a model."""

    job: Described
    tp_rank: int
    pp_rank: int
    ep_rank: int
    kind: str
    """The class of the model."""
    library: str
    config: Mapping[str, Any]
    entries: tuple[Entry, ...]
    items: tuple[str, ...] = ()
    """The class of every item of the pipeline, in order; empty without pipeline stages."""
    places: Mapping[str, int] = field(default_factory=dict)
    """Key → number of its pipeline item."""
    segments: tuple[int, ...] = ()
    """The number of the first item of every part of the pipeline, and of the end."""
    maps: Mapping[str, tuple[str, ...] | str] = field(default_factory=dict)
    """Method of the class → the AOA statements that it gives, with which the library reads or writes a Hugging Face
    checkpoint; a text says why it gives none."""
    transposed: tuple[str, ...] = ()
    """``transpose_weight_keys``: regular expressions of the ends of keys, whose weights ``save_to_hf`` transposes."""
    shared: Mapping[str, str] = field(default_factory=dict)
    """Key → name of the weight that items of the pipeline share over stages, where each has a parameter of its own."""


@dataclass(slots=True)
class _Row:
    """What is known of all tensors of one pattern."""

    key: str
    shapes: set[Shape] = field(default_factory=set)
    split: int | None = None
    layers: set[int] = field(default_factory=set)
    name_class: str = ""
    discards: list[str] | None = None
    fields: dict[str, Any] = field(default_factory=dict)


def described_table(
    ranks: Sequence[RankFacts], fused: Fused | None = None, said: Mapping[str, Shares] | None = None
) -> dict[str, Any]:
    """The rule table, as ``--rules`` takes it, of a model that these ranks of a job hold.

    Parameters
    ----------
    ranks
        At least one rank of every cell (tp, pp, ep) of the job.
    fused
        What is fused in tensors that tp cuts. ``None``: nobody has said it, and a conversion that needs it is refused.
    said
        The same as the class says it: form of the keys → shares of the parts; ``fused`` goes before it.

    Raises
    ------
    UsageError
        If ranks are missing or contradict each other, or a table cannot say what they hold.
    """
    job, config, kind = ranks[0].job, ranks[0].config, ranks[0].kind
    _check_whole(ranks)
    prefix = _layer_prefix(ranks)
    rows = _rows(ranks, prefix)
    for key in fused or ():
        if key not in rows:
            raise UsageError(f"fused: {key} is no key of the model; its keys are {', '.join(rows)}")
    axis, local = _expert_axis(ranks, prefix)
    items = _items(ranks, rows)
    table: dict[str, Any] = {
        "family": str(config.get("model_type") or kind),
        "convention": ranks[0].library,
        "model_types": [str(config["model_type"])] if config.get("model_type") else [],
        "comment": f"Described from {kind} with {job.words}.",
        "items": items,
        "expert_axis": axis,
        "local_experts": local or None,
        "experts": _experts_entry(ranks, prefix, job.ep if local else 1),
        "unsupported": _unsupported(ranks),
        "segmentations": _segmentations(ranks),
        "alternatives": _alternatives(rows, config),
        "described": [{**job.entries(), "names": False}],
    }
    table = {name: value for name, value in table.items() if value is not None}
    item_of = _item_of(rows, ranks)
    for row in rows.values():
        row.fields |= {"item": item_of[row.key], **_shape_of(row), **_parts_of(row, fused, said or {})}
    _tie(rows, ranks)
    _mark(rows, ranks, prefix, axis)
    unknown = _name(table, rows, ranks, prefix)
    if unknown is not None:
        table["comment"] += f" Parameter names do not follow from the rows: {unknown}."
    table["described"] = [{**job.entries(), "names": unknown is None}]
    table["rules"] = [_json_of(row) for row in rows.values()]
    made = typed_table(table)
    for rank in ranks:
        for fault in _faults(made, rank):
            raise UsageError(f"{job.words}: a rule table cannot say what the model holds: {fault}")
    return table


# ---- keys, shapes, cuts


def _check_whole(ranks: Sequence[RankFacts]) -> None:
    job = ranks[0].job
    if other := next((rank.job for rank in ranks if rank.job != job), None):
        raise UsageError(f"ranks of two jobs: {job.words}, and {other.words}")
    # ep shares out the ranks of tp and sharding of a stage: tp rank 0 may never be ep rank 1
    for axis, degree in (("tp", job.tp), ("ep", job.ep)):
        cells = {(getattr(rank, f"{axis}_rank"), rank.pp_rank) for rank in ranks}
        for cell in ((n, p) for n in range(degree) for p in range(job.pp)):
            if cell not in cells:
                raise UsageError(
                    f"no rank with {axis}, pp = {cell} was described; call describe on every rank"
                )


def _layer_prefix(ranks: Sequence[RankFacts]) -> str:
    """The beginning of the keys of decoder layers: ``model.layers.``."""
    config = ranks[0].config
    numbers: dict[str, set[int]] = {}
    keys: dict[str, list[Entry]] = {}
    for rank in ranks:
        for entry in rank.entries:
            if match := re.match(r"(?P<start>(?:[^.]*[^.\d][^.]*\.)*?)(?P<number>\d+)\.", entry.key):
                numbers.setdefault(match["start"], set()).add(int(match["number"]))
                keys.setdefault(match["start"], []).append(entry)
    count, more = count_entry(config, LAYERS), count_entry(config, mtp_entry(config))
    counts = (set(range(count)), set(range(count + more)))
    fitting = [start for start, found in numbers.items() if found in counts]
    if not fitting:
        found_words = ", ".join(f"{start}0 to {max(n)}" for start, n in numbers.items()) or "none"
        raise UsageError(
            f"no list of modules has as many numbers as the config has {LAYERS} ({count}); found: {found_words}"
        )
    width = config_entry(config, "hidden_size")  # a tower for images can have as many layers
    return max(
        fitting, key=lambda start: (sum(width in entry.shape for entry in keys[start]), len(keys[start]))
    )


def _pattern(key: str, prefix: str) -> tuple[str, int | None]:
    """The row's key of a tensor, and the number of its layer."""
    number = key.removeprefix(prefix).partition(".")[0] if key.startswith(prefix) else ""
    start, layer = (f"{prefix}{number}", int(number)) if number.isdigit() else ("", None)
    rest = key.removeprefix(start)
    rest = EXPERT_NUMBER.sub("{expert}", rest, count=1)
    return rest if layer is None else f"{prefix}{{layer}}{rest}", layer


def _rows(ranks: Sequence[RankFacts], prefix: str) -> dict[str, _Row]:
    """All rows, in an order in which every rank has its own."""
    rows: dict[str, _Row] = {}
    order: list[str] = []
    for rank in ranks:
        for _, run in groupby(
            ((*_pattern(entry.key, prefix), entry) for entry in _in_order(rank)),
            key=lambda found: found[1],
        ):
            found = list(run)
            following = next((key for key, _, _ in found if key in rows), None)
            place = len(order) if following is None else order.index(following)
            for key, layer, entry in found:
                if key in rows:
                    place = order.index(key)
                else:
                    rows[key] = _Row(key)
                    order.insert(place, key)
                place += 1
                _add(rows[key], rank, layer, entry)
    return {key: rows[key] for key in order}


def _in_order(rank: RankFacts) -> list[Entry]:
    """The entries in the order of pipeline items; another key of a parameter is cut as its first (a head that has the
    words of the embedding is often marked as if it were cut by itself)."""
    first = {entry.key: entry for entry in rank.entries}
    entries = [
        entry
        if entry.same_as is None
        else replace(entry, split=first[entry.same_as].split, whole=first[entry.same_as].whole)
        for entry in rank.entries
    ]
    return sorted(entries, key=lambda entry: rank.places.get(entry.key, 0))


def _add(row: _Row, rank: RankFacts, layer: int | None, entry: Entry) -> None:
    split = _cut(entry, rank.job)
    if rank.job.tp > 1:
        if row.shapes and row.split != split:
            raise UsageError(
                f"{entry.key}: tp cuts dim {split}, but dim {row.split} of another tensor of {row.key}"
            )
        row.split = split
    shape = list(entry.shape)
    if split is not None:
        shape[split] *= rank.job.tp
    if rank.job.ep > 1 and entry.of_expert and "{expert}" not in row.key:
        row.fields["shared_out"] = True
        shape[0] *= rank.job.ep
    row.shapes.add(tuple(shape))
    apart = rank.job.ep > 1 and entry.of_expert  # in buffers of their own, whatever their color
    if not apart and row.fields.setdefault("color", entry.color) != entry.color:
        raise UsageError(
            f"{entry.key}: its color is {entry.color!r}, that of another tensor of {row.key} {row.fields['color']!r}"
        )
    if layer is not None:
        row.layers.add(layer)


def _cut(entry: Entry, job: Described) -> int | None:
    """The dim that tp cuts, by all that the parameter says of it."""
    if job.tp == 1 or (entry.of_expert and job.ep > 1):
        return None
    by_whole = None
    if entry.whole is not None and entry.whole != entry.shape and not _is_flat(entry):
        cut = [d for d, (n, of) in enumerate(zip(entry.shape, entry.whole, strict=False)) if n != of]
        if (
            len(entry.shape) != len(entry.whole)
            or len(cut) != 1
            or entry.shape[cut[0]] * job.tp != entry.whole[cut[0]]
        ):
            raise UsageError(
                f"{entry.key}: sharded_state_dict says {entry.shape} of {entry.whole}, no cut of one dim by tp={job.tp}"
            )
        by_whole = cut[0]
    said = {dim for dim in (entry.split, by_whole) if dim is not None}
    if len(said) > 1 or (entry.split is not None and entry.whole == entry.shape):
        raise UsageError(
            f"{entry.key}: split_axis says that tp cuts dim {entry.split}, and sharded_state_dict says {entry.shape} "
            f"of {entry.whole}; have the class say the same in its sharded_state_dict, by which it is saved"
        )
    if not said and entry.distributed and entry.whole is None:
        raise UsageError(
            f"{entry.key}: is_distributed is set, and neither split_axis nor sharded_state_dict says which dim tp cuts"
        )
    return said.pop() if said else None


def _is_flat(entry: Entry) -> bool:
    """Whether the class saves it with two dims, what the first ones count one below the other."""
    return len(entry.shape) > 2 and entry.whole == (prod(entry.shape[:-1]), entry.shape[-1])


def _shape_of(row: _Row) -> dict[str, Any]:
    if len(row.shapes) > 1:
        return {"source": f"{SOURCE}; the layers have different shapes"}
    return {"shape": [str(extent) for extent in min(row.shapes)], "source": SOURCE}


def _parts_of(row: _Row, fused: Fused | None, said: Mapping[str, Shares]) -> dict[str, Any]:
    if row.split is None:
        return {}
    entries: dict[str, Any] = {"split": row.split}
    extent, form = min(row.shapes)[row.split], form_of(row.key.format(layer=0, expert=0))
    dim, shares = said.get(form, (0, (1,)))
    if dim != row.split:
        shares = (1,)
    parts = (fused or {}).get(row.key, [extent * share // sum(shares) for share in shares])
    if isinstance(parts, int):
        parts = [extent // parts] * parts
    if len(set(parts)) > 1:
        entries["part_widths"] = [str(width) for width in parts]
    elif len(parts) > 1:
        entries["parts"] = len(parts)
    if (
        fused is None and form not in said and row.split == len(min(row.shapes)) - 1
    ):  # a row cut has nothing beside it that is fused
        entries["parts_unknown"] = True
    return entries


# ---- experts, ties, marks


def _expert_axis(ranks: Sequence[RankFacts], prefix: str) -> tuple[str | None, bool]:
    """``ep`` if its ranks have experts of their own, and whether each numbers them from 0 on."""
    config, ep = ranks[0].config, ranks[0].job.ep
    if ep == 1 or not any(entry.of_expert for rank in ranks for entry in rank.entries):
        return None, False
    counts = {count_entry(config, name) for name in EXPERTS}
    shared = _of_every_expert_rank(ranks)
    local = [key for key in shared if "{expert}" in _pattern(key, prefix)[0]]
    numbers = _expert_numbers(map(shared.__getitem__, local), prefix)
    if local and (numbers != {*range(len(numbers))} or len(numbers) * ep not in counts):
        raise UsageError(
            f"{local[0]}: marked as an expert of each rank of ep={ep}, which have the experts {sorted(numbers)}; "
            "experts can be described under their numbers in the model, or from 0 on in each rank, together as many "
            f"as the config counts ({', '.join(EXPERTS)})"
        )
    for key in (entry.key for rank in ranks for entry in rank.entries if entry.of_expert):
        if key not in shared and "{expert}" not in _pattern(key, prefix)[0]:
            raise UsageError(
                f"{key}: marked as an expert that only some ranks of ep={ep} have, and its key does not tell which: "
                "experts can be described under their numbers in a list that is called experts (experts.3.up.weight)"
            )
    for key, entry in shared.items():
        if key not in local and (len(entry.shape) != 3 or entry.shape[0] * ep not in counts):
            raise UsageError(
                f"{key}: each rank of ep={ep} has its own, of the shape {list(entry.shape)}; one tensor of a rank's "
                "experts can be described if it has three dims, the first of which is the rank's share of the experts "
                f"that the config counts ({', '.join(EXPERTS)})"
            )
    return "ep", bool(local)


def _of_every_expert_rank(ranks: Sequence[RankFacts]) -> dict[str, Entry]:
    """The entries of experts that several ranks of ep have under one key."""
    holders: dict[str, dict[int, Entry]] = {}
    for rank in ranks:
        for entry in rank.entries:
            if entry.of_expert:
                holders.setdefault(entry.key, {})[rank.ep_rank] = entry
    return {key: min(of.items())[1] for key, of in holders.items() if len(of) > 1}


def _expert_numbers(entries: Iterable[Entry], prefix: str) -> set[int]:
    found = ((e.key.split("."), _pattern(e.key, prefix)[0].split(".")) for e in entries)
    return {int(key[row.index("{expert}")]) for key, row in found if "{expert}" in row}


def _experts_entry(ranks: Sequence[RankFacts], prefix: str, shares: int) -> str | None:
    """The entry of the config that counts the experts, of which the ranks' numbers are one of so many shares."""
    numbers = _expert_numbers((entry for rank in ranks for entry in rank.entries), prefix)
    if not numbers:
        return None
    count = (max(numbers) + 1) * shares
    return next(
        (n for n in EXPERTS if config_entry(ranks[0].config, n) == len(numbers) * shares == count), None
    )


def _unsupported(ranks: Sequence[RankFacts]) -> list[dict[str, Any]] | None:
    """The formats in which the class does not save its tensors as they are, each with the reason."""
    ep, shared, config = ranks[0].job.ep, _of_every_expert_rank(ranks), ranks[0].config
    why: dict[str, str] = {}
    for entry in (entry for rank in ranks for entry in rank.entries):
        whole = entry.whole
        own = f"each rank of ep={ep} has its own {entry.key}, and such files have one tensor of a key"
        if entry.key in shared:
            why.setdefault("unified", own)
        if whole is not None and len(whole) != len(entry.shape):
            saved = (
                f"sharded_state_dict() gives {entry.key} as {list(whole)}, and a rank has {list(entry.shape)}"
            )
            why.setdefault("flex", saved)
        elif entry.key in shared and whole != (entry.shape[0] * ep, *entry.shape[1:]):
            why.setdefault("flex", own)
    entry_said = next((name for name in EXPERTS if count_entry(config, name)), LAYERS)
    return [
        {"entry": entry_said, "why": f"{said} ({ranks[0].kind})", "formats": [format]}
        for format, said in why.items()
    ] or None


def _tie(rows: Mapping[str, _Row], ranks: Sequence[RankFacts]) -> None:
    """Tie rows whose keys are those of one parameter, or of one that several stages have."""
    ties = {entry.key: entry.same_as for rank in ranks for entry in rank.entries if entry.same_as is not None}
    for key, first in (ties | _shared_over_stages(ranks)).items():
        if key not in rows or first not in rows:
            raise UsageError(f"{key}: the same parameter as {first}; ties of layers cannot be described")
        row, of_first = rows[key], rows[first]
        if (row.shapes, row.split) != (of_first.shapes, of_first.split):
            raise UsageError(
                f"{key}: the same parameter as {first} over stages, and tp cuts the one along dim {row.split}, the "
                f"other along dim {of_first.split}; mark both alike"
            )
        row.fields["tied_to"] = first
        if not ties_words(ranks[0].config):
            row.fields["always_tied"] = True


def _shared_over_stages(ranks: Sequence[RankFacts]) -> dict[str, str]:
    """Key → that of the first item of the pipeline with the same shared weight."""
    found: dict[str, dict[str, int]] = {}
    for rank in ranks:
        for key, name in rank.shared.items():
            place = found.setdefault(name, {}).setdefault(key, rank.places[key])
            if place != rank.places[key]:
                raise UsageError(
                    f"{key}: items {place} and {rank.places[key]} of the pipeline share it under one key; give them "
                    "different prefixes (add_sequential_layer), as their keys do not tell which of them a file means"
                )
    ties: dict[str, str] = {}
    for places in found.values():
        first, *others = sorted(places, key=lambda key: places[key])
        ties |= dict.fromkeys(others, first)
    return ties


def _mark(rows: Mapping[str, _Row], ranks: Sequence[RankFacts], prefix: str, axis: str | None) -> None:
    """Say where ``is_distributed`` is not what the cut tells."""
    job = ranks[0].job
    if job.tp == job.ep == 1:
        return
    for rank in ranks:
        for entry in rank.entries:
            row = rows[_pattern(entry.key, prefix)[0]]
            of_rank = axis is not None and ("{expert}" in row.key or "shared_out" in row.fields)
            told = of_rank or row.split is not None
            if told and not entry.distributed:
                row.fields["is_distributed"] = "never"
            elif entry.distributed and not told:
                row.fields["is_distributed"] = "ep" if job.tp == 1 else "always"


def _alternatives(rows: Mapping[str, _Row], config: Mapping[str, Any]) -> list[list[list[str]]] | None:
    """What layers have instead of what, where the kinds of layers share out all layers."""
    every = set(range(count_entry(config, LAYERS)))
    kinds: dict[frozenset[int], list[str]] = {}
    for row in rows.values():
        layers = row.layers & every
        if layers and layers != every:
            rest = row.key.partition("{layer}.")[2]
            kinds.setdefault(frozenset(layers), []).append(rest)
    if sum(map(len, kinds)) == len(every) and set().union(*kinds) == every:
        return [list(kinds.values())] if kinds else []
    return None


# ---- the pipeline


def _items(ranks: Sequence[RankFacts], rows: Mapping[str, _Row]) -> list[dict[str, Any]]:
    staged = next((rank for rank in ranks if rank.items), None)
    config = ranks[0].config
    fields: dict[str, dict[str, Any]] = {
        "layer": {"repeated": True},
        _MTP: {"mtp": True, "continues": "layer"},
    }
    if staged is None:
        found = [_part(row, rows, config) for row in rows.values()]
        return [
            {"name": name, "layer_class": "", **fields.get(name, {})}
            for name in ("before", "layer", _MTP, "after")
            if name in found
        ]
    layers = _layer_places(ranks)
    items: list[dict[str, Any]] = []
    for number, kind in enumerate(staged.items):
        name = layers.get(number, f"{kind} {number}")
        if name not in fields:
            items.append({"name": name, "layer_class": kind})
        elif name not in [item["name"] for item in items]:
            items.append({"name": name, "layer_class": kind, **fields[name]})
        elif (items[-1]["name"], items[-1]["layer_class"]) != (name, kind):
            raise UsageError(
                f"item {number} of the pipeline ({kind}) is a layer of the model behind {items[-1]['name']} "
                f"({items[-1]['layer_class']}); layers of one kind have to be of one class, one after the other"
            )
    names = [item["name"] for item in items]
    if _MTP in names and (following := names[names.index("layer") + 1]) != _MTP:
        items[names.index(_MTP)]["built_before"] = following  # without stages it is in the list of the layers
    return items


def _layer_places(ranks: Sequence[RankFacts]) -> dict[int, str]:
    """Number of an item of the pipeline that is a layer → ``layer``, or what those behind the decoder layers are."""
    prefix, count = _layer_prefix(ranks), count_entry(ranks[0].config, LAYERS)
    found: dict[int, str] = {}
    for rank in ranks:
        for key, place in rank.places.items():
            if (number := _pattern(key, prefix)[1]) is not None:
                found[place] = "layer" if number < count else _MTP
    return found


def _item_of(rows: Mapping[str, _Row], ranks: Sequence[RankFacts]) -> dict[str, str]:
    places = {key: place for rank in ranks for key, place in rank.places.items()}
    kinds = next((rank.items for rank in ranks if rank.items), ())
    found = {}
    for key, row in rows.items():
        part = _part(row, rows, ranks[0].config)
        if not kinds or row.layers:
            found[key] = part
            continue
        held = _tensors_of(key, places)
        if not held:
            raise UsageError(f"{key}: in no item of the pipeline that was described")
        found[key] = f"{kinds[places[held[0]]]} {places[held[0]]}"
    return found


def _tensors_of(key: str, keys: Iterable[str]) -> list[str]:
    """The keys of a row that has no layers: its own, or those of all experts."""
    pattern = re.compile(re.escape(key).replace(r"\{expert\}", r"\d+"))
    return [other for other in keys if pattern.fullmatch(other)]


def _part(row: _Row, rows: Mapping[str, _Row], config: Mapping[str, Any]) -> str:
    if row.layers:
        return "layer" if min(row.layers) < count_entry(config, LAYERS) else _MTP
    keys = list(rows)
    first = next(n for n, other in enumerate(rows.values()) if other.layers)
    return "before" if keys.index(row.key) < first else "after"


def _segmentations(ranks: Sequence[RankFacts]) -> list[str] | None:
    """All ways to distribute the items of the pipeline that give the parts which the job has."""
    rank = next((rank for rank in ranks if rank.items and rank.segments), None)
    if rank is None:
        return None
    places, parts, pp = _layer_places(ranks), len(rank.segments) - 1, rank.job.pp
    kinds = {name: rank.items[place] for place, name in sorted(places.items())}
    each, more = divmod(len(rank.items), parts)
    evenly = (*(each * part + max(0, part + more - parts) for part in range(parts)), len(rank.items))
    undivided = list(places.values()).count("layer") % pp > 0
    found = []
    for pattern in dict.fromkeys((kinds["layer"], "|".join(kinds.values()))):
        layers = [n for n, kind in enumerate(rank.items) if re.search(pattern, kind, re.IGNORECASE)]
        count, rest = divmod(len(layers), parts)
        by_layer = (0, *(layers[count * part - 1] + 1 for part in range(1, parts)), len(rank.items))
        if rank.segments in ([by_layer] if rest == 0 else []) + ([evenly] if undivided else []):
            found.append(f"layer:{pattern}")
    # With virtual stages PipelineLayer asserts that layers are counted.
    if parts == pp and rank.segments == evenly:
        found.append("uniform")
    if not found:
        raise UsageError(
            f"the pipeline begins its parts at items {', '.join(map(str, rank.segments))} of {len(rank.items)}, "
            f"neither by the layers {' and '.join(kinds.values())} nor evenly; such a pipeline cannot be described"
        )
    return found


# ---- names


@dataclass(frozen=True, slots=True)
class _Name:
    """A parameter name, taken apart."""

    layer_class: str
    number: int
    kind: str
    index: int
    copied: bool = False


def _parsed(name: str) -> _Name | None:
    copied = _COPY.fullmatch(name)
    base = copied["of"] if copied else name
    if match := _NAME.fullmatch(base):
        return _Name(match["cls"], int(match["number"]), match["kind"], int(match["index"]), bool(copied))
    if match := _UNNAMED.fullmatch(base):
        return _Name(match["cls"], int(match["number"]), "", 0, bool(copied))
    return None


def _name(
    table: Mapping[str, Any], rows: Mapping[str, _Row], ranks: Sequence[RankFacts], prefix: str
) -> str | None:
    """Give rows what makes their parameter names; returns why names do not follow from them, if so."""
    _set_whole_names(rows, ranks, prefix)
    for rank in ranks:
        for entry in rank.entries:
            if why := _add_class(rows[_pattern(entry.key, prefix)[0]], entry):
                return why
    for rank in ranks:
        _order(rows, rank, prefix)
    for rank in ranks:
        _discard(table, rows, rank, prefix)
    made = typed_table({**table, "rules": [_json_of(row) for row in rows.values()]})
    return next((why for rank in ranks for why in _name_faults(made, rank)), None)


def _add_class(row: _Row, entry: Entry) -> str | None:
    if entry.name is None:
        row.name_class = AUTOMATIC
        return None
    if entry.same_as is not None:  # its name is that of the other key
        row.name_class = row.name_class or TIED
        return None
    if "parameter_name" in row.fields:
        row.name_class = re.sub(r"_?\{.*", "", row.fields["parameter_name"])
        return None
    parsed = _parsed(entry.name)
    if parsed is None:
        return f"{entry.key} is called {entry.name}"
    if row.name_class not in ("", parsed.layer_class):
        return f"{entry.key} is called {entry.name}, others of its row {row.name_class}"
    row.name_class = parsed.layer_class
    if parsed.copied:
        row.fields["copied"] = True
    if row.key.endswith(".bias") and parsed.kind == "w" and parsed.layer_class != "create_parameter":
        row.fields["created_as_weight"] = True
    return None


def _set_whole_names(rows: Mapping[str, _Row], ranks: Sequence[RankFacts], prefix: str) -> None:
    """Give rows whose names a class sets itself the form of them: ``moe_gate_{n}``, ``mm_layer_{layer}_bias_0``."""
    named: dict[str, list[list[tuple[int | None, str]]]] = {}
    for rank in ranks:
        of_rank: dict[str, list[tuple[int | None, str]]] = {}
        for entry in rank.entries:
            if entry.name is not None and entry.same_as is None and _parsed(entry.name) is None:
                key, layer = _pattern(entry.key, prefix)
                of_rank.setdefault(key, []).append((layer, entry.name))
        for key, names in of_rank.items():
            named.setdefault(key, []).append(names)
    for key, by_rank in named.items():
        texts = re.split(r"(\d+)", by_rank[0][0][1])
        numbers = range(1, len(texts), 2)
        forms = [
            "".join(mark if n == place else text for n, text in enumerate(texts))
            for place in numbers
            for mark in ("{layer}", "{n}")
        ]
        for form in [*forms, by_rank[0][0][1]] if "{layer}" in key else [by_rank[0][0][1]]:
            if all(
                form.format(layer=layer, n=n) == name
                for names in by_rank
                for n, (layer, name) in enumerate(names)
            ):
                rows[key].fields["parameter_name"] = form
                break


def _order(rows: Mapping[str, _Row], rank: RankFacts, prefix: str) -> None:
    """Say which rows are built after which, where counters tell another order than the files."""
    position = {key: n for n, key in enumerate(rows)}
    counted: dict[tuple[int | None, int | None, str], list[tuple[int, int, str]]] = {}
    for entry in rank.entries:
        parsed = _parsed(entry.name) if entry.name is not None and entry.same_as is None else None
        if parsed is None or parsed.copied:
            continue
        key, layer = _pattern(entry.key, prefix)
        expert = int(entry.key.split(".")[key.split(".").index("{expert}")]) if "{expert}" in key else None
        counted.setdefault((layer, expert, parsed.layer_class), []).append(
            (parsed.number, position[key], key)
        )
    for (layer, _, _), found in counted.items():
        if layer is None:
            continue
        found.sort()
        last, before = -1, None
        for _, _, key in found:
            if position[key] < last and before is not None:
                rows[key].fields.setdefault("built_after", before)
            last, before = max(last, position[key]), key


def _discard(table: Mapping[str, Any], rows: Mapping[str, _Row], rank: RankFacts, prefix: str) -> None:
    """Say what is built and given up before a tensor, where a counter leaves numbers out."""
    made = typed_table({**table, "rules": [_json_of(row) for row in rows.values()]})
    entries = {entry.key: entry for entry in rank.entries}
    counters: dict[str, int] = {}
    for tensor in in_building_order(_built(made, rank)):
        entry = entries[tensor.key]
        parsed = _parsed(entry.name) if entry.name is not None and entry.same_as is None else None
        if parsed is None or parsed.copied or not parsed.kind:
            continue
        following = counters.get(parsed.layer_class, 0)
        gap = parsed.number - following
        counters[parsed.layer_class] = max(following, parsed.number + 1)
        if gap > 0:
            row = rows[_pattern(entry.key, prefix)[0]]
            row.discards = row.discards or [parsed.layer_class] * gap


def _json_of(row: _Row) -> dict[str, Any]:
    fields = {"key": row.key, "item": row.fields["item"], "name_class": row.name_class, **row.fields}
    if fields.get("color") is None:
        fields.pop("color", None)
    if row.discards:
        fields["discards"] = [{"name_class": name} for name in row.discards]
    return {**fields, "source": fields.pop("source")}


# ---- several jobs


_OF_NAMES: Final = ("built_after", "discards", "copied", "created_as_weight", "parameter_name")
_OF_CUTS: Final = ("split", "parts", "part_widths", "parts_unknown")
_OF_TIES: Final = ("tied_to", "always_tied", "own_in_stages", "own_without_stages", "of_stages")
_CLASSES: Final = (
    "name_class",
    "name_class_pp",
    "name_class_sp",
    "name_class_tp",
    "name_class_ep",
    "name_class_ep_sp",
)


def joined_tables(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, Any]:
    """One table of two that describe the same model in different jobs.

    Raises
    ------
    UsageError
        If they contradict each other.
    """
    tables = [typed_table(dict(entries)) for entries in (a, b)]
    jobs = [table.described for table in tables]
    if jobs[0] is None or jobs[1] is None:
        raise UsageError(
            "the file holds a rule table that was not described from live parameters; give another FILE"
        )
    kinds = {job.kind for job in jobs[1]}
    earlier = [job for job in jobs[0] if job.kind not in kinds]
    described = sorted([*earlier, *jobs[1]], key=lambda job: job.kind)
    staged = 1 if any(job.pp > 1 for job in jobs[1]) else 0
    base = 0 if staged == 1 and all(job.pp == 1 for job in earlier) and earlier else 1
    whole: dict[str, Any] = {**a, **b}
    whole["items"] = (a, b)[staged]["items"]
    ways = [of.get("segmentations", ()) for of in (a, b)]
    # Of jobs that no way fits both, each keeps its own: a target that they would give different stages is refused.
    if fitting := [way for way in ways[0] if way in ways[1]] or [*dict.fromkeys((*ways[0], *ways[1]))]:
        whole["segmentations"] = fitting
    if unsupported := {str(of["formats"]): of for t in (b, a) for of in t.get("unsupported", ())}:
        whole["unsupported"] = list(unsupported.values())
    rows = [{row["key"]: row for row in entries["rules"]} for entries in (a, b)]
    copies = [_copies_of_stages(rows[n], rows[1 - n], (earlier, jobs[1])[n]) for n in (0, 1)]
    item_of = {key: row["item"] for key, row in rows[staged].items()}
    position = {item["name"]: n for n, item in enumerate(whole["items"])}
    position |= {item["name"]: position[item["continues"]] for item in whole["items"] if "continues" in item}
    if any(item["layer_class"] for item in whole["items"]):
        if (order := list(rows[base])) != sorted(order, key=lambda key: position[item_of[key]]):
            raise UsageError(
                "without stages the model has its tensors in another order than the items of its pipeline; such a "
                "model cannot be described"
            )
        rows = [dict(sorted(of.items(), key=lambda row: position[item_of[row[0]]])) for of in rows]
    rows = [_with_copies(of, rows[1 - n], copies[n]) for n, of in enumerate(rows)]
    same_names = list(rows[0]) == list(rows[1])
    rules = []
    for key in rows[base]:
        joined, alike = _joined_row(rows[0][key], rows[1][key], tables, (earlier, jobs[1]))
        has: dict[bool, Described] = {}
        for of, lacking, table in zip((earlier, jobs[1]), copies, rows, strict=True):
            for job in (job for job in of if job.pp == 1):
                has[key not in lacking and not table[key].get("of_stages")] = job
        if len(has) > 1:
            raise UsageError(f"{key}: {_jobs([has[True]])} has it, and {_jobs([has[False]])} does not")
        joined |= {"of_stages": True} if False in has else {}
        same_names &= alike
        rules.append({**joined, "item": item_of[key]})
    said = [b["comment"]]
    if not same_names and earlier:
        given_up = jobs[1] if base == 0 else earlier
        described = [replace(job, names=job.names and job not in given_up) for job in described]
        words = "; ".join(job.words for job in given_up)
        said.append(f"Names with {words} were given up: the rows are built in another order there.")
    comment = a["comment"] if earlier else ""
    whole["comment"] = " ".join(filter(None, [comment, *(words for words in said if words not in comment)]))
    whole["described"] = [{**job.entries(), "names": job.names} for job in described]
    del whole["rules"]
    if all("huggingface" in row or "tied_to" in row for row in rules):
        whole.pop("without_forms", None)
    whole["rules"] = rules
    typed_table(whole)
    return whole


def _copies_of_stages(
    rows: Mapping[str, Any], others: Mapping[str, Any], jobs: Sequence[Described]
) -> list[str]:
    """The keys that only the other description has: in jobs with stages, of what is tied there to another key."""
    if differing := sorted(key for key in rows if key not in others and not rows[key].get("tied_to")):
        raise UsageError(f"{differing[0]}: only one of the two descriptions has it; they are of other models")
    lacking = [key for key in others if key not in rows]
    for key in lacking:
        if any(job.pp > 1 for job in jobs):
            raise UsageError(
                f"{key}: tied to {others[key].get('tied_to')} in one description, and {_jobs(jobs)} does not have it; "
                "only jobs without stages may lack it"
            )
    return lacking


def _with_copies(rows: dict[str, Any], others: Mapping[str, Any], lacking: Sequence[str]) -> dict[str, Any]:
    """The rows with those that they lack, each behind what it is behind in the other description."""
    keys = list(rows)
    for before, key in pairwise(["", *others]):
        if key in lacking:
            keys.insert(keys.index(before) + 1 if before in keys else 0, key)
    return {key: rows[key] if key in rows else others[key] for key in keys}


def _jobs(jobs: Sequence[Described]) -> str:
    return " and ".join(f"a job with {job.words}" for job in jobs)


def _ties_of(
    key: str, described: Sequence[tuple[Mapping[str, Any], Sequence[Described]]], config_ties: bool
) -> dict[str, Any]:
    """What ties a row, of several descriptions, each with its jobs; refused where a table cannot say it."""
    seen: dict[bool, dict[bool, Described]] = {False: {}, True: {}}
    for row, jobs in described:
        for job in jobs:
            own = row.get("own_in_stages" if job.pp > 1 else "own_without_stages", "tied_to" not in row)
            seen[job.pp > 1][bool(own)] = job
    twins = sorted({row["tied_to"] for row, _ in described if "tied_to" in row})
    if not twins:
        return {}
    for jobs_seen in seen.values():
        if len(jobs_seen) > 1:
            raise UsageError(
                f"{key}: tied to {twins[0]} in {_jobs([jobs_seen[False]])}, and not in {_jobs([jobs_seen[True]])}"
            )
    if len(twins) > 1:
        raise UsageError(f"{key}: tied to {twins[0]} in one description, to {twins[1]} in the other")
    apart = [
        name for name, of in (("own_in_stages", True), ("own_without_stages", False)) if True in seen[of]
    ]
    if apart and not config_ties:
        raise UsageError(
            f"{key}: only some of the jobs tie it to {twins[0]}, and config.json does not say tie_word_embeddings: "
            "such a tie cannot be described"
        )
    return {
        "tied_to": twins[0],
        **({} if config_ties else {"always_tied": True}),
        **dict.fromkeys(apart, True),
    }


def _joined_row(
    a: Mapping[str, Any],
    b: Mapping[str, Any],
    tables: Sequence[RuleTable],
    jobs: tuple[Sequence[Described], Sequence[Described]],
) -> tuple[dict[str, Any], bool]:
    """A row of two descriptions, and whether both have the same of what makes names beside the class."""
    key = b["key"]
    if a.get("shape") != b.get("shape"):
        raise UsageError(
            f"{key}: of the shape {a.get('shape')} in one description, {b.get('shape')} in the other"
        )
    forms = [row["huggingface"] for row in (a, b) if "huggingface" in row]
    if len(forms) > 1 and forms[0] != forms[1]:
        raise UsageError(
            f"{key}: {forms[0]} in a Hugging Face checkpoint by one description, {forms[1]} by the other; describe all "
            "jobs with the same class, into a new file"
        )
    joined = {
        name: value
        for name, value in {**a, **b}.items()
        if name in b or name in ("huggingface", "color", "shared_out")
    }
    if "{expert}" not in key and a.get("color") != b.get("color"):
        raise UsageError(
            f"{key}: its color is {a.get('color')!r} in one description, {b.get('color')!r} in the other"
        )
    joined = {name: of for name, of in joined.items() if name not in (*_CLASSES, *_OF_CUTS, *_OF_TIES)}
    cuts = [{name: row[name] for name in _OF_CUTS if name in row} for row in (a, b)]
    cut_in = [any(job.tp > 1 for job in of) for of in jobs]
    if all(cut_in) and cuts[0] != cuts[1]:
        raise UsageError(f"{key}: tp cuts it as {cuts[0]} in one description, as {cuts[1]} in the other")
    joined |= cuts[1] if cut_in[1] else cuts[0]
    marks = {row["is_distributed"] for row in (a, b) if "is_distributed" in row}
    if marks:
        joined["is_distributed"] = marks.pop() if len(marks) == 1 else "always"
    known = []
    for table, of in zip(tables, jobs, strict=True):
        known += [
            (job, rule.class_for(job.pp, job.tp, job.sequence_parallel, job.ep))
            for rule in table.rules
            for job in of
            if rule.key == key and job.names and rule.name_class != TIED
        ]
    joined |= (
        _class_fields(key, sorted(known, key=lambda of: of[0].kind))
        if known
        else {"name_class": b["name_class"]}
    )
    config_ties = not any(row.get("always_tied") for row in (a, b))
    joined |= _ties_of(key, list(zip((a, b), jobs, strict=True)), config_ties)
    alike = all(a.get(name) == b.get(name) for name in _OF_NAMES)
    return joined, alike


def _class_fields(key: str, known: Sequence[tuple[Described, str]]) -> dict[str, str]:
    """The class and its exceptions, so that each job has the class that was seen in it.

    With ``lm_head`` in jobs without stages and ``lm_head_pipe`` with tp=2, pp=2, the exception is of stages, not of tp.
    """
    fields = {"name_class": known[0][1]}
    for number, (job, name) in enumerate(known):
        if _class_in(fields, job) == name:
            continue
        axes = (
            ("name_class_tp", job.tp > 1 and not job.sequence_parallel),
            ("name_class_sp", job.sequence_parallel),
            ("name_class_ep", job.ep > 1),
            ("name_class_pp", job.pp > 1),
        )
        tried = ({**fields, axis: name} for axis, has in axes if has)
        so_far = known[: number + 1]
        found = next((one for one in tried if all(_class_in(one, of) == seen for of, seen in so_far)), None)
        if found is None:
            raise UsageError(
                f"{key}: named by {name} with {job.words}, which a row cannot say beside the names of the other jobs; "
                "describe fewer topologies in one file"
            )
        fields = found
    return fields


def _class_in(fields: Mapping[str, str], job: Described) -> str:
    """As :meth:`Rule.class_for` has it."""
    axes = (
        ("name_class_pp", job.pp > 1),
        ("name_class_ep", job.ep > 1),
        ("name_class_sp", job.sequence_parallel),
        ("name_class_tp", job.tp > 1),
    )
    return next((fields[axis] for axis, has in axes if has and axis in fields), fields["name_class"])


# ---- what a table gives back


def whole_tensors(table: RuleTable, ranks: Sequence[RankFacts]) -> dict[str, ModelTensor]:
    """Key → the whole tensor, of all that any of the ranks holds; ties over stages are ties."""
    held = {tensor.key: tensor for rank in ranks for tensor in _built(table, rank)}
    config, pp = ranks[0].config, ranks[0].job.pp
    twins = {key: None if of.rule.is_own(pp) else of.rule.twin(config, key) for key, of in held.items()}
    return {key: replace(of, tied_to=twins[key] if twins[key] in held else None) for key, of in held.items()}


def _built(table: RuleTable, rank: RankFacts) -> list[ModelTensor]:
    """The tensors of a rank in the order in which the job builds them, by the table."""
    held = {entry.key: entry for entry in rank.entries}
    job, tensors = rank.job, []
    for key, entry in held.items():
        rule, layer = table.find(key, rank.config)
        axis = table.expert_axis if rule.of_expert_rank and job.ep > 1 else None
        cut = cut_of(rule, rank.config, key, job.tp, axis, job.ep)
        whole = cut.global_shape(key, entry.shape)
        twin = None if rule.is_own(job.pp) else rule.twin(rank.config, key)
        tied_to = twin if twin in held else None
        tensors.append(ModelTensor(key, rule, layer, whole, dtype_named("bfloat16"), (), False, tied_to))
    ordered = sorted(tensors, key=model_order(table))
    return Model(tuple(ordered), table, rank.config).as_built(job.pp)


def _name_faults(table: RuleTable, rank: RankFacts) -> Iterator[str]:
    job = rank.job
    try:
        names = predict_parameter_names(
            _built(table, rank), rank.config, job.pp, job.tp, job.sequence_parallel, job.ep
        )
    except RuleError as error:
        yield str(error)
        return
    for entry in rank.entries:
        if entry.name is not None and names[entry.key] != entry.name:
            yield f"{entry.key} is called {entry.name}, and {names[entry.key]} by the counters"


def _faults(table: RuleTable, rank: RankFacts) -> Iterator[str]:
    """The facts of a rank that a table does not give back, but for names."""
    job, held = rank.job, {entry.key: entry for entry in rank.entries}
    tensors = {tensor.key: tensor for tensor in _built(table, rank)}
    for key, entry in held.items():
        rule = tensors[key].rule
        of_rank = table.expert_axis == "ep" and rule.of_expert_rank and job.ep > 1
        cut = job.tp > 1 and rule.split is not None and not of_rank
        distributed = rule.marked_distributed(cut, job.ep, of_rank=of_rank)
        if (job.tp > 1 or job.ep > 1) and distributed != entry.distributed:
            yield f"{key}: is_distributed is {entry.distributed}"
        if tensors[key].tied_to != entry.same_as:
            yield f"{key}: the same parameter as {entry.same_as}, and by the table as {tensors[key].tied_to}"
    if job.pp == 1 and list(held) != list(tensors):
        yield f"{next(a for a, b in zip(held, tensors, strict=True) if a != b)}: its place among the entries"


def facts_of_job(ranks: Iterable[RankFacts]) -> list[RankFacts]:
    """One rank of every cell; further ranks of a cell, which only share states, must hold the same."""
    cells: dict[tuple[Described, int, int, int], RankFacts] = {}
    for rank in ranks:
        first = cells.setdefault((rank.job, rank.tp_rank, rank.pp_rank, rank.ep_rank), rank)
        if first.entries != rank.entries:
            mine = {e.key: e for e in first.entries}
            other = next((e.key for e in rank.entries if mine.get(e.key) != e), "their keys")
            raise UsageError(f"{other}: two ranks of the same tp, pp and ep hold something else")
    return list(cells.values())
