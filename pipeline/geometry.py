"""Where do boxes of integers lie, and how do they meet?

A *box* is an offset and extents, in elements, half-open. A tensor has at most ``MAX_DIMS`` dims; in the
columnar form every box has exactly ``MAX_DIMS`` of them, the missing ones trailing with extent 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

MAX_DIMS = 4

Ints = npt.NDArray[np.int64]
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


def column_major_strides(shape: Sequence[int], itemsize_bytes: int) -> Shape:
    """Byte strides of a Fortran-ordered array.

    >>> column_major_strides((2, 3, 4), 2)
    (2, 4, 12)
    """
    return tuple(reversed(row_major_strides(tuple(reversed(shape)), itemsize_bytes)))


def boxes_of_flat_range(start: int, stop: int, shape: Shape) -> list[tuple[Shape, Shape]]:
    """Cut ``[start, stop)`` of the row-major flattening of ``shape`` into boxes, in order.

    At most ``2 * rank - 1`` boxes of ``(offset, extents)``: a ragged head per dim, whole rows, a ragged
    tail per dim.

    >>> boxes_of_flat_range(3, 11, (3, 4))
    [((0, 3), (1, 1)), ((1, 0), (1, 4)), ((2, 0), (1, 3))]
    """
    if not 0 <= start <= stop <= prod(shape):
        raise ValueError(f"flat range [{start}, {stop}) does not lie in a tensor of shape {shape}")
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


def intersect(
    offset_a: Ints, extents_a: Ints, offset_b: Ints, extents_b: Ints
) -> tuple[Ints, Ints, npt.NDArray[np.bool_]]:
    """Row-wise intersection of two columns of boxes, all of shape ``(n, MAX_DIMS)``.

    Returns ``(offset, extents, meets)``; rows where ``meets`` is false hold no box.
    """
    low = np.maximum(offset_a, offset_b)
    extents = np.minimum(offset_a + extents_a, offset_b + extents_b) - low
    return low, extents, np.asarray((extents > 0).all(axis=1))


def pairs_within(left: npt.NDArray[Any], right: npt.NDArray[Any], count: int) -> tuple[Ints, Ints]:
    """All pairs ``(i, j)`` with ``left[i] == right[j]``, both sorted columns of ids in ``[0, count)``.

    The pairs are ordered by id, then ``i``, then ``j``.
    """
    right_count = np.bincount(right, minlength=count)
    right_first = np.cumsum(right_count) - right_count
    repeats = right_count[left]
    i = np.repeat(np.arange(len(left)), repeats)
    run_start = np.cumsum(repeats) - repeats
    within = np.arange(int(repeats.sum())) - np.repeat(run_start, repeats)
    j = np.repeat(right_first[left], repeats) + within
    return i.astype(np.int64), j.astype(np.int64)
