"""The picture of a conversion: which tensors lie where on both sides, and which bytes move between them.

Its columns are small, however large the conversion.

A picture has at most ``MOST_ENTRIES`` entries of each kind. If there are more, states of a tensor are joined, then
experts, then the tensors of a layer; and neighbouring places, ``fold`` of them at a time.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from paddle_reshard.pipeline.core.catalog import ITEMSIZES, Fragments, volumes
from paddle_reshard.pipeline.core.numbers import Ints
from paddle_reshard.pipeline.core.tensor_columns import Tensors
from paddle_reshard.pipeline.core.tensors import MASTER_WEIGHT, PARAM
from paddle_reshard.pipeline.planning.ops import MOVE
from paddle_reshard.pipeline.planning.parts import MADE, part_sizes
from paddle_reshard.pipeline.planning.plan import Plan
from paddle_reshard.pipeline.report.places import Side

MOST_ENTRIES = 60_000
MOST_KEY_CHARACTERS = 600_000
MOST_ROWS = 20_000
OTHERS = "… further tensors"
"""The row that stands for tensors beyond ``MOST_ROWS``."""
ANY_STATE = "all states"

_EXPERT = re.compile(r"\bexperts\.\d+\.")
_BELOW_LAYER = re.compile(r"(\blayers\.\d+)\..*")
_NUMBER = re.compile(r"\d+")


@dataclass(frozen=True, slots=True)
class Moves:
    """Bytes of values from each source place to each target place; only pairs with any."""

    fold_source: int
    """Neighbouring places that are one row."""
    fold_target: int
    source: tuple[int, ...]
    target: tuple[int, ...]
    memory: tuple[int, ...]
    """Bytes that pass through the memory of a worker, as the target stores them."""
    copied: tuple[int, ...]
    """Bytes that the storage copied."""


@dataclass(frozen=True, slots=True)
class Held:
    """Where tensors lie on one side: an entry for each row and place."""

    fold: int
    row: tuple[int, ...]
    place: tuple[int, ...]
    nbytes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Picture:
    """Both sides of a conversion, and the bytes that move between them."""

    source: Side
    target: Side
    states: tuple[str, ...]
    source_bytes: tuple[tuple[int, ...], ...]
    """State → bytes in each place."""
    target_bytes: tuple[tuple[int, ...], ...]
    keys: tuple[str, ...]
    """Key of each row; rows of one key follow each other."""
    row_states: tuple[int, ...]
    """Number of the state of each row, or −1 for all states."""
    source_held: Held
    target_held: Held
    moves: Moves
    joined: str
    """What was joined to keep the picture small; empty if nothing."""


@dataclass(frozen=True, slots=True)
class Located:
    """Bytes of each tensor in each place of a side: a row for each pair that has any."""

    side: Side
    tensors: Sequence[tuple[str, str]]
    """Key and state."""
    tensor: Ints
    place: Ints
    nbytes: Ints


def locate(tensors: Tensors, fragments: Fragments, side: Side, first_file: int = 0) -> Located:
    """Where tensors lie, by fragments whose files are those of the ``side`` from ``first_file`` on."""
    places = np.array(side.places, dtype=np.int64)
    place = places[fragments["file"].astype(np.int64) + first_file]
    nbytes = volumes(fragments) * ITEMSIZES[fragments["dtype"]]
    tensor, place, nbytes = _summed(fragments["tensor"].astype(np.int64), place, nbytes)
    return Located(side, [tensors.identity(number) for number in range(len(tensors))], tensor, place, nbytes)


def make_picture(
    source: Located, targets: Sequence[Located], plan: Plan, sides: tuple[Side, Side]
) -> Picture:
    """The picture of a plan: where the tensors of its source and its targets lie, and which bytes move."""
    located = [source, *targets]
    held_states = {state for contents in located for _, state in contents.tensors}
    states = tuple(sorted(held_states, key=_in_order))
    state_numbers = {state: number for number, state in enumerate(states)}
    rows, joined = _rows([identity for contents in located for identity in contents.tensors])
    names = list(dict.fromkeys(rows.values()))
    names.sort(key=lambda row: (_natural(row[0]), state_numbers.get(row[1], -1)))
    numbers = {name: number for number, name in enumerate(names)}
    of_row = {identity: numbers[row] for identity, row in rows.items()}
    return Picture(
        *sides,
        states,
        _by_state([source], states, sides[0]),
        _by_state(targets, states, sides[1]),
        tuple(key for key, _ in names),
        tuple(state_numbers.get(state, -1) for _, state in names),
        _held([source], of_row),
        _held(targets, of_row),
        _moves(plan, *sides),
        joined,
    )


def _in_order(state: str) -> tuple[bool, bool, bool, str]:
    """Sorts parameters first, then master weights, and averages last."""
    return state != PARAM, state != MASTER_WEIGHT, state.startswith("ema"), state


def _natural(key: str) -> list[tuple[int, int, str]]:
    """A key to sort by in which numbers count as numbers."""
    parts = re.split(r"(\d+)", key)
    return [(0, int(part[:18]), "") if part.isdigit() and part.isascii() else (1, 0, part) for part in parts]


def _summed(first: Ints, second: Ints, weights: Ints) -> tuple[Ints, Ints, Ints]:
    """Sums of ``weights`` by pairs, sorted."""
    width = int(second.max(initial=0)) + 1
    pairs, index = np.unique(first * width + second, return_inverse=True)
    sums = np.zeros(len(pairs), dtype=np.int64)
    np.add.at(sums, index, weights)
    return pairs // width, pairs % width, sums


def _by_state(located: Sequence[Located], states: Sequence[str], side: Side) -> tuple[tuple[int, ...], ...]:
    table = np.zeros((len(states), side.count), dtype=np.int64)
    number = {state: index for index, state in enumerate(states)}
    for contents in located:
        of_tensor = np.array([number[state] for _, state in contents.tensors], dtype=np.int64)
        np.add.at(table, (of_tensor[contents.tensor], contents.place), contents.nbytes)
    return tuple(tuple(row) for row in table.tolist())


# ----------------------------------------------------------------------------------------------------- rows


def _rows(identities: Sequence[tuple[str, str]]) -> tuple[Mapping[tuple[str, str], tuple[str, str]], str]:
    """Key and state of every tensor → key and state of its row; and in words which tensors share a row."""
    wanted = list(dict.fromkeys(identities))
    steps: tuple[tuple[str, Callable[[str], str], bool], ...] = (
        ("", lambda key: key, False),
        ("the states of a tensor", lambda key: key, True),
        ("states and experts", lambda key: _EXPERT.sub("experts.*.", key), True),
        ("the tensors of a layer", lambda key: _BELOW_LAYER.sub(r"\1", key), True),
        ("tensors whose keys differ in numbers only", lambda key: _NUMBER.sub("*", key), True),
    )
    rows: dict[tuple[str, str], tuple[str, str]] = {}
    for joined, rename, all_states in steps:
        rows = {(key, state): (rename(key), ANY_STATE if all_states else state) for key, state in wanted}
        if _few(rows):
            return rows, joined
    kept = set(list(dict.fromkeys(rows.values()))[: MOST_ROWS // 20])
    few = {identity: row if row in kept else (OTHERS, ANY_STATE) for identity, row in rows.items()}
    return few, "most tensors, because there are very many"


def _few(rows: Mapping[tuple[str, str], tuple[str, str]]) -> bool:
    names = set(rows.values())
    return len(names) <= MOST_ROWS and sum(map(len, {key for key, _ in names})) <= MOST_KEY_CHARACTERS


def _held(located: Sequence[Located], of_row: Mapping[tuple[str, str], int]) -> Held:
    columns = [
        (
            np.array([of_row[identity] for identity in contents.tensors], dtype=np.int64)[contents.tensor],
            contents.place,
            contents.nbytes,
        )
        for contents in located
    ]
    row, place, nbytes = (np.concatenate(column) for column in zip(*columns, strict=True))
    fold = 1
    while True:
        entries = _summed(row, place // fold, nbytes)
        if len(entries[0]) <= MOST_ENTRIES or fold > located[0].side.count:
            return Held(fold, *(tuple(column.tolist()) for column in entries))
        fold *= 2


# ---------------------------------------------------------------------------------------------------- moves


def _moves(plan: Plan, source: Side, target: Side) -> Moves:
    """The bytes that each pair of places exchanges; the target's files are the first of its places."""
    from_place, to_place = (np.array(side.places, dtype=np.int64) for side in (source, target))
    moved_bytes = [(np.zeros(0, dtype=np.int64),) * 3]
    for ops in plan.ops.blocks():
        moved = ops[ops["kind"] == MOVE]
        source_places = from_place[moved["source_file"].astype(np.int64)]
        target_places = to_place[moved["target_file"].astype(np.int64)]
        nbytes = volumes(moved) * ITEMSIZES[moved["target_dtype"]]
        moved_bytes.append(_summed(source_places, target_places, nbytes))
    memory = [np.concatenate(column) for column in zip(*moved_bytes, strict=True)]
    parts = plan.parts[plan.parts["source_file"] != MADE]
    copied = [from_place[parts["source_file"]], to_place[parts["file"]], part_sizes(parts)]
    fold_source = fold_target = 1
    while True:
        pairs, sums = _paired(memory, copied, fold_source, fold_target)
        if len(pairs[0]) <= MOST_ENTRIES:
            columns = (*pairs, *sums)
            return Moves(fold_source, fold_target, *(tuple(column.tolist()) for column in columns))
        if source.count // fold_source >= target.count // fold_target:
            fold_source *= 2
        else:
            fold_target *= 2


def _paired(
    memory: Sequence[Ints], copied: Sequence[Ints], fold_source: int, fold_target: int
) -> tuple[tuple[Ints, Ints], tuple[Ints, Ints]]:
    first = np.concatenate([memory[0], copied[0]]) // fold_source
    second = np.concatenate([memory[1], copied[1]]) // fold_target
    through = np.concatenate([memory[2], np.zeros_like(copied[2])])
    by_store = np.concatenate([np.zeros_like(memory[2]), copied[2]])
    rows, columns, moved = _summed(first, second, through)
    _, _, stored = _summed(first, second, by_store)
    return (rows, columns), (moved, stored)
