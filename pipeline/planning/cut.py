"""Cut ops into smaller ones, along dims where stored bytes stay together.

Ops that belong together are cut along a dim of their tensor at the same indices. The two sides of an op may store
the dims in different orders. Along the *outermost* dim of a side, which has the largest stride, the pieces follow each
other in the file; along any other dim they interleave.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from paddle_reshard.pipeline.core.catalog import volumes, wide_dims
from paddle_reshard.pipeline.core.columns import Flags
from paddle_reshard.pipeline.core.geometry import MAX_DIMS
from paddle_reshard.pipeline.core.numbers import Ints, numbered_within
from paddle_reshard.pipeline.planning.ops import MOVE, Ops, hull, itemsizes, set_lengths


class Pieces(NamedTuple):
    """The result of :func:`cut`."""

    ops: Ops
    origin: Ints
    """Index of the op that each piece was cut from."""
    stretch: Ints
    """Number of the interval of the tensor in which each piece lies."""


def cut(ops: Ops, dim: Ints, low: Ints, step: Ints) -> Pieces:
    """Cut every op along its ``dim`` at ``low``, ``low + step``, …, in elements of the tensor.

    Two ops of one tensor, cut with ``low = 0`` and ``step = 4``::

        element    0   1   2   3 | 4   5   6   7 | 8   9
        op 0      [··············|···············|······)    three pieces, in stretches 0, 1, 2
        op 1                  [··|·······)                   two pieces, in stretches 0, 1
    """
    rows = np.arange(len(ops))
    start = ops.along_each("offset", dim) - low
    stop = start + ops.along_each("extents", dim)
    first, last = start // step, (stop - 1) // step
    origin = np.repeat(rows, last - first + 1)
    # With 3 and 2 pieces: origin 0 0 0 1 1, within 0 1 2 0 1.
    within = numbered_within(last - first + 1)
    stretch = first[origin] + within
    begin = np.maximum(start[origin], stretch * step[origin])
    end = np.minimum(stop[origin], (stretch + 1) * step[origin])
    return Pieces(piece(ops[origin], dim[origin], begin - start[origin], end - begin), origin, stretch)


def piece(ops: Ops, dim: Ints, skipped: Ints, count: Ints) -> Ops:
    """Reduce every op to ``count`` slabs of its ``dim``, after the first ``skipped``, in place.

    With ``skipped=2`` and ``count=3`` a box of rows 8 to 15, row stride 64, becomes rows 10 to 12, 128 bytes on.
    """
    for side in ("source", "target"):
        ops[f"{side}_byte"] = ops[f"{side}_byte"] + skipped * ops.along_each(f"{side}_strides", dim)
    ops.set_along_each("offset", dim, ops.along_each("offset", dim) + skipped)
    ops.set_along_each("extents", dim, count)
    set_lengths(ops)
    return ops


def outermost(ops: Ops, side: str) -> Ints:
    """The dim of each op with the largest stride on a side, among dims with more than one element; else the last."""
    outer = np.full(len(ops), MAX_DIMS - 1)
    largest = np.full(len(ops), -1)
    for dim in wide_dims(ops):
        strides = np.where(ops.along("extents", dim) > 1, ops.along(f"{side}_strides", dim), -1)
        outer[strides > largest] = dim
        np.maximum(largest, strides, out=largest)
    return outer


def dense(ops: Ops) -> Flags:
    """Whether an op is one run of bytes, the same on both sides."""
    alike = ops["source_dtype"] == ops["target_dtype"]
    for dim in wide_dims(ops):
        strides = (ops.along(f"{side}_strides", dim) for side in ("source", "target"))
        alike &= (ops.along("extents", dim) == 1) | np.equal(*strides)
    start, stop = hull(ops, "target")
    whole = stop - start == volumes(ops) * itemsizes(ops, "target_dtype")
    return np.asarray(alike & whole)


def torn(ops: Ops, owner: Ints, count: int, target: bool) -> Flags:
    """For each of ``count`` owners of ops and each dim, whether pieces cut there would interleave in a file.

    With ``target``, in a target file; otherwise in a source file.
    """
    moves = ops["kind"] == MOVE
    interleaved = np.zeros((count, MAX_DIMS), dtype=bool)
    sides = [("target", moves)] if target else [("source", np.ones(len(ops), dtype=bool)), ("target", ~moves)]
    for side, chosen in sides:
        outer = outermost(ops, side)
        for dim in wide_dims(ops):
            interleaved[owner[chosen & (ops.along("extents", dim) > 1) & (outer != dim)], dim] = True
    return interleaved


def reach(ops: Ops, owner: Ints, count: int) -> tuple[Ints, Ints]:
    """First element, and one past the last, along each dim of all ops of each owner; shapes ``(count, MAX_DIMS)``."""
    low = np.full((count, MAX_DIMS), np.iinfo(np.int64).max)
    high = np.zeros((count, MAX_DIMS), dtype=np.int64)
    for dim in range(MAX_DIMS):
        start = ops.along("offset", dim)
        first, last = (np.ascontiguousarray(column[:, dim]) for column in (low, high))
        np.minimum.at(first, owner, start)
        np.maximum.at(last, owner, start + ops.along("extents", dim))
        low[:, dim], high[:, dim] = first, last
    return low, high
