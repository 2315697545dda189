"""Which bytes of a group's parts no move writes: padding, and where literal bytes go.

A part in memory that was used before must hold zeros there. To fill whole parts with zeros takes a tenth of the time
that moving takes, and nearly every byte of a checkpoint is a value.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

import numpy as np

from paddle_reshard.pipeline.core.geometry import MAX_DIMS, Ints
from paddle_reshard.pipeline.planning.ops import MOVE, Ops, itemsizes
from paddle_reshard.pipeline.planning.parts import MADE, Parts, part_sizes
from paddle_reshard.pipeline.planning.ranges import merge
from paddle_reshard.tasks.group import locate

Gaps = Mapping[int, list[tuple[int, int]]]
"""Index of a part → ranges ``[start, stop)`` of its bytes."""

FEWEST_BYTES = 1 << 20
"""Smaller groups are filled with zeros sooner than examined."""
SHORTEST_RUN_BYTES = 2 << 10
"""Shorter runs of a box of many are filled with zeros sooner than listed."""


def unwritten(parts: Parts, ops: Ops, mixed: Collection[int] = ()) -> Gaps | None:
    """Ranges of every made part that include each byte that no move writes; ``None`` for all bytes of all parts.

    Parameters
    ----------
    parts
        Those of the group, sorted by file and start.
    ops
        All ops of the group. Each of its moves will write all elements of its box.
    mixed
        Tensors whose moves are not counted, because they do not write to the part itself, or read what it holds.
    """
    made = np.flatnonzero(parts["source_file"] == MADE)
    if part_sizes(parts[made]).sum() < FEWEST_BYTES:
        return None
    moves = ops[ops["kind"] == MOVE]
    if mixed:
        moves = moves[~np.isin(moves["tensor"], list(mixed))]
    runs = _runs(moves)
    listed = (runs.counts == 1) | (runs.nbytes >= SHORTEST_RUN_BYTES)
    if not listed.all():
        moves, runs = moves[listed], runs.chosen(listed)
    number, start = runs.starts()
    # A range without bytes at each end of a part makes gaps there lie between two ranges too.
    keys, low, high = merge(
        np.concatenate([locate(parts, moves, "target")[number], made, made]),
        np.concatenate([start, parts["start"][made], parts["stop"][made]]),
        np.concatenate([start + runs.nbytes[number], parts["start"][made], parts["stop"][made]]),
    )
    gaps: dict[int, list[tuple[int, int]]] = {part: [] for part in made.tolist()}
    between = np.flatnonzero(keys[1:] == keys[:-1])
    part = keys[between]
    first = parts["start"][part]
    for index, begin, end in zip(
        part.tolist(), (high[between] - first).tolist(), (low[between + 1] - first).tolist(), strict=True
    ):
        gaps[index].append((begin, end))
    return gaps


class _Runs(NamedTuple):
    """Boxes as contiguous runs of bytes."""

    first: Ints
    """First byte of each box."""
    nbytes: Ints
    """Bytes of each run of a box."""
    extents: Ints
    """How many runs a box has along each dim, the innermost first; 1 along dims that lie within a run."""
    strides: Ints

    @property
    def counts(self) -> Ints:
        """Runs of each box."""
        return np.asarray(self.extents.prod(axis=1), dtype=np.int64)

    def chosen(self, rows: Ints) -> _Runs:
        """Some of the boxes."""
        return _Runs(*(column[rows] for column in self))

    def starts(self) -> tuple[Ints, Ints]:
        """Every run: the number of its box, and its first byte."""
        counts = self.counts
        number = np.repeat(np.arange(len(counts)), counts)
        within = np.arange(len(number)) - np.repeat(np.cumsum(counts) - counts, counts)
        start = self.first[number]
        for dim in range(MAX_DIMS):
            extents = self.extents[:, dim]
            if (extents != 1).any():
                within, index = np.divmod(within, extents[number])
                start = start + index * self.strides[number, dim]
        return number, start


def _runs(moves: Ops) -> _Runs:
    """The boxes that moves write."""
    extents, strides = moves["extents"], moves["target_strides"]
    # Dims of one element have no stride. The others are sorted from the innermost to the outermost.
    order = np.argsort(np.where(extents == 1, np.iinfo(np.int64).max, strides), axis=1, kind="stable")
    extents, strides = (np.take_along_axis(rows, order, axis=1) for rows in (extents, strides))
    nbytes = np.zeros(len(moves), dtype=np.int64) + itemsizes(moves, "target_dtype")
    outer = np.ones_like(extents)
    within = np.ones(len(moves), dtype=bool)
    for dim in range(MAX_DIMS):
        within &= (strides[:, dim] == nbytes) | (extents[:, dim] == 1)
        nbytes = np.where(within, nbytes * extents[:, dim], nbytes)
        outer[:, dim] = np.where(within, 1, extents[:, dim])
    return _Runs(np.asarray(moves["target_byte"], dtype=np.int64), nbytes, outer, strides)
