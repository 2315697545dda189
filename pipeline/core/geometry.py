"""Boxes of integers and their intersections.

A *box* is an offset and extents, in elements, half-open. A tensor has at most ``MAX_DIMS`` dims; in the
columnar form every box has exactly ``MAX_DIMS`` of them, the missing ones trailing with extent 1.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from paddle_reshard.pipeline.core.columns import Flags
from paddle_reshard.pipeline.core.numbers import Ints, numbered_within
from paddle_reshard.pipeline.core.sorting import order_by, order_of, places

if TYPE_CHECKING:
    import numpy.typing as npt

MAX_DIMS = 5

Shape = tuple[int, ...]


def row_major_strides(shape: Sequence[int], itemsize_bytes: int) -> Shape:
    """Byte strides of a C-ordered array.

    >>> row_major_strides((2, 3, 4), 2)
    (24, 8, 2)
    """
    strides: list[int] = []
    step_bytes = itemsize_bytes
    for extent in reversed(shape):
        strides.append(step_bytes)
        step_bytes *= extent
    return tuple(reversed(strides))


def strides_in_order(shape: Sequence[int], itemsize_bytes: int, axes: Sequence[int] | None) -> Shape:
    """Byte strides of an array whose dims are stored in the order ``axes``, slowest first; ``None``: C order.

    >>> strides_in_order((2, 3, 4), 2, (2, 1, 0))
    (2, 4, 12)
    >>> strides_in_order((2, 3, 4), 2, (1, 0, 2))
    (8, 16, 2)
    """
    if axes is None:
        return row_major_strides(shape, itemsize_bytes)
    stored = row_major_strides([shape[dim] for dim in axes], itemsize_bytes)
    return tuple(stored[axes.index(dim)] for dim in range(len(shape)))


def boxes_of_flat_range(start: int, stop: int, shape: Shape) -> list[tuple[Shape, Shape]]:
    """Cut ``[start, stop)`` of the row-major flattening of ``shape`` into boxes, in order.

    At most ``2 * dims - 1`` boxes of ``(offset, extents)``: a ragged head per dim, whole rows, a ragged tail per dim.

    >>> boxes_of_flat_range(3, 11, (3, 4))
    [((0, 3), (1, 1)), ((1, 0), (1, 4)), ((2, 0), (1, 3))]
    """
    if not 0 <= start <= stop <= prod(shape):
        raise ValueError(f"flat range [{start}, {stop}) is outside a tensor of shape {shape}")
    if start == stop:
        return []
    if not shape:
        return [((), ())]
    row_elements = prod(shape[1:])
    first_row, head = divmod(start, row_elements)
    last_row, tail = divmod(stop, row_elements)
    if first_row == last_row:
        return _within_row(first_row, head, tail, shape)
    boxes: list[tuple[Shape, Shape]] = []
    if head:
        boxes += _within_row(first_row, head, row_elements, shape)
        first_row += 1
    if first_row < last_row:
        boxes.append(((first_row, *(0,) * (len(shape) - 1)), (last_row - first_row, *shape[1:])))
    if tail:
        boxes += _within_row(last_row, 0, tail, shape)
    return boxes


def _within_row(row: int, start: int, stop: int, shape: Shape) -> list[tuple[Shape, Shape]]:
    inner = boxes_of_flat_range(start, stop, shape[1:])
    return [((row, *offset), (1, *extents)) for offset, extents in inner]


def padded(values: Sequence[int], fill: int) -> Shape:
    """``values`` with trailing ``fill`` up to ``MAX_DIMS``."""
    if len(values) > MAX_DIMS:
        raise ValueError(f"{len(values)} dims, at most {MAX_DIMS} are supported")
    return (*values, *(fill,) * (MAX_DIMS - len(values)))


def intersect(offset_a: Ints, extents_a: Ints, offset_b: Ints, extents_b: Ints) -> tuple[Ints, Ints]:
    """Row-wise intersection of two columns of intersecting boxes, all of shape ``(n, MAX_DIMS)``."""
    low = np.maximum(offset_a, offset_b)
    return low, np.minimum(offset_a + extents_a, offset_b + extents_b) - low


class Boxes(NamedTuple):
    """Columns of boxes, and the tensor of each."""

    tensor: npt.NDArray[Any]
    """Indices from 0."""
    offset: Ints
    extents: Ints


_BLOCK_BOXES = 1 << 17
"""Approximate number of boxes in a block; a tensor is never divided."""


def by_tensor(*sides: npt.NDArray[Any]) -> list[list[Ints]]:
    """Divide rows into blocks of consecutive tensors, with about ``_BLOCK_BOXES`` rows of all sides in a block.

    Each side gives the tensor of every row. Rows of a tensor are in the same block of every side, so pairs can be
    searched block by block, and stay ordered by tensor.

    >>> [[rows.tolist() for rows in side] for side in by_tensor(np.array([1, 0, 1]), np.array([0, 1]))]
    [[[0, 1, 2]], [[0, 1]]]
    """
    if sum(map(len, sides)) <= _BLOCK_BOXES:
        return [[np.arange(len(side))] for side in sides]
    count = 1 + max(int(side.max(initial=-1)) for side in sides)
    each = [np.bincount(side, minlength=count) for side in sides]
    block = np.cumsum(np.sum(each, axis=0)) // _BLOCK_BOXES
    opens = np.flatnonzero(block[1:] != block[:-1]) + 1
    blocks = []
    for side, counts in zip(sides, each, strict=True):
        before = np.cumsum(counts) - counts
        blocks.append([np.sort(rows) for rows in np.split(order_of(side), before[opens])])
    return blocks


_BLOCK_PAIRS = 1 << 18
"""Number of candidate pairs checked at a time, which bounds memory."""


def meeting_pairs(left: Boxes, right: Boxes) -> tuple[Ints, Ints]:
    """All pairs ``(i, j)`` of a ``left`` and a ``right`` box of the same tensor that share an element.

    Ordered by tensor, then ``i``, then ``j``. Boxes are swept along a single dim, for each tensor the dim with fewest
    candidates. With slices on both sides there are hardly more candidates than pairs::

        left   [0, 4) [4, 8)        sorted by start, with running maximum of ends 4, 8
        right  [3, 5)               first: ends above 3 begin at index 0; last: starts below 5 end at index 2
        pairs  (0, 0) (1, 0)
    """
    dims = [d for d in range(MAX_DIMS) if _tells_apart(left, d) or _tells_apart(right, d)] or [0]
    sides = [Intervals(boxes.tensor, {d: _interval(boxes, d) for d in dims}) for boxes in (left, right)]
    return meeting_intervals(*sides)


class Intervals(NamedTuple):
    """Columns of boxes as intervals along some dims, the same on both sides; along the others all boxes meet."""

    tensor: npt.NDArray[Any]
    along: dict[int, tuple[Ints, Ints]]
    """Dim → start and stop of every box."""


def meeting_intervals(left: Intervals, right: Intervals) -> tuple[Ints, Ints]:
    """As :func:`meeting_pairs`, of boxes with at least one dim."""
    if not len(left.tensor) or not len(right.tensor):
        return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
    sweeps = [_sweep(left, right, dim) for dim in left.along]
    best = np.zeros(len(right.tensor), dtype=np.int64)
    if len(sweeps) > 1:
        count = 1 + int(max(left.tensor.max(), right.tensor.max()))
        candidates = [np.bincount(right.tensor, weights=s.last - s.first, minlength=count) for s in sweeps]
        best = np.argmin(candidates, axis=0)[right.tensor]
    meeting = [
        _kept(block, left, right)
        for number, sweep in enumerate(sweeps)
        for block in candidate_pairs(*sweep, np.flatnonzero(best == number))
    ]
    i, j = (np.concatenate([pairs[side] for pairs in meeting]) for side in (0, 1))
    sorted_by_tensor = (left.tensor[1:] >= left.tensor[:-1]).all()
    order = order_by(i, j) if sorted_by_tensor else np.lexsort((j, i, left.tensor[i]))
    return i[order], j[order]


def _tells_apart(boxes: Boxes, dim: int) -> bool:
    return bool((boxes.offset[:, dim] != 0).any() or (boxes.extents[:, dim] != 1).any())


def _interval(boxes: Boxes, dim: int) -> tuple[Ints, Ints]:
    start = np.ascontiguousarray(boxes.offset[:, dim])
    return start, start + boxes.extents[:, dim]


class _Sweep(NamedTuple):
    """For every right box the candidates ``order[first:last]`` among the left boxes."""

    order: Ints
    first: Ints
    last: Ints


def _sweep(left: Intervals, right: Intervals, dim: int) -> _Sweep:
    """Sort left boxes by their start along ``dim``; candidates begin with the first box that ends after the start of
    the right box, and stop before the first box that starts at or after its end."""
    (start, stop), (from_, to) = left.along[dim], right.along[dim]
    # The tensors lie in one line, each beyond the boxes of the one before.
    line = places(np.r_[left.tensor, left.tensor, right.tensor, right.tensor], np.r_[start, stop, from_, to])
    begin, end, from_, to = np.split(line, np.cumsum([len(start), len(stop), len(from_)]))
    order = order_of(begin)
    reach = np.maximum.accumulate(end[order])
    first = np.searchsorted(reach, from_, side="right")
    last = np.searchsorted(begin[order], to, side="left")
    return _Sweep(order, first, np.maximum(first, last))


def candidate_pairs(order: Ints, first: Ints, last: Ints, rows: Ints) -> Iterator[tuple[Ints, Ints]]:
    """Pairs ``(i, j)`` of each ``j`` of ``rows`` and the numbers ``order[first[j]:last[j]]``, some at a time."""
    lengths = (last - first)[rows]
    ends = np.cumsum(lengths)
    start = 0
    while start < len(rows):
        done = int(ends[start - 1]) if start else 0
        stop = max(start + 1, int(np.searchsorted(ends, done + _BLOCK_PAIRS, side="right")))
        length = lengths[start:stop]
        within = numbered_within(length)
        j = np.repeat(rows[start:stop], length)
        yield order[first[j] + within], j
        start = stop


def _kept(pairs: tuple[Ints, Ints], left: Intervals, right: Intervals) -> tuple[Ints, Ints]:
    """The candidates that share an element."""
    i, j = pairs
    for (start, stop), (from_, to) in zip(left.along.values(), right.along.values(), strict=True):
        meets = np.maximum(start[i], from_[j]) < np.minimum(stop[i], to[j])
        if not meets.all():
            i, j = i[meets], j[meets]
    return i, j


class Ranges(NamedTuple):
    """Ranges of bytes that do not overlap, sorted by key and start."""

    keys: Ints
    start: Ints
    stop: Ints

    def holding(self, keys: Ints, byte: Ints) -> Ints:
        """The number of the range with its key that holds each byte; -1 for none.

        >>> Ranges(np.array([0, 0, 2]), np.array([0, 8, 4]), np.array([8, 9, 6])).holding(
        ...     np.array([0, 0, 1, 2]), np.array([7, 8, 9, 3])
        ... ).tolist()
        [0, 1, -1, -1]
        """
        if not len(self.keys):
            return np.full(len(keys), -1)
        both = places(np.concatenate([self.keys, keys]), np.concatenate([self.start, byte]))
        last = np.searchsorted(both[: len(self.keys)], both[len(self.keys) :], side="right") - 1
        holds = (last >= 0) & (self.keys[last] == keys) & (byte < self.stop[last])
        return np.where(holds, last, -1)

    def cover(self, keys: Ints, start: Ints, stop: Ints) -> Flags:
        """Whether one of the ranges holds each of some other ranges as a whole."""
        at = self.holding(keys, start)
        return (at >= 0) & (stop <= np.append(self.stop, 0)[at])
