"""Where can ops be cut without scattering bytes that are stored together?

An op is cut along a dim of its tensor, all ops that belong together at the same places. The two sides of an op may
be stored in different orders: cut along the *outermost* dim of a side, the one with the largest stride, the pieces
lie one after the other there; cut along another dim, they interleave.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from paddle_reshard.pipeline.core.columns import Flags
from paddle_reshard.pipeline.core.geometry import MAX_DIMS, Ints
from paddle_reshard.pipeline.planning.ops import ITEMSIZES, MOVE, Ops, hull, op_volumes, set_stops


class Pieces(NamedTuple):
    """Ops that were cut."""

    ops: Ops
    origin: Ints
    """Index of the op that each is a piece of."""
    stretch: Ints
    """The stretch of the tensor in which each piece lies."""


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
    within = np.arange(len(origin)) - np.repeat(
        np.cumsum(last - first + 1) - (last - first + 1), last - first + 1
    )
    stretch = first[origin] + within
    begin = np.maximum(start[origin], stretch * step[origin])
    end = np.minimum(stop[origin], (stretch + 1) * step[origin])
    return Pieces(piece(ops[origin], dim[origin], begin - start[origin], end - begin), origin, stretch)


def piece(ops: Ops, dim: Ints, skipped: Ints, count: Ints) -> Ops:
    """Reduce every op to ``count`` slabs of its ``dim``, after the first ``skipped``; ``ops`` is changed."""
    for side in ("source", "target"):
        ops[f"{side}_byte"] = ops[f"{side}_byte"] + skipped * ops.along_each(f"{side}_strides", dim)
    ops.set_along_each("offset", dim, ops.along_each("offset", dim) + skipped)
    ops.set_along_each("extents", dim, count)
    set_stops(ops)
    return ops


def outermost(ops: Ops, side: str) -> Ints:
    """The dim of each op with the largest stride on a side, of those along which it extends; else the last."""
    outer = np.full(len(ops), MAX_DIMS - 1)
    largest = np.full(len(ops), -1)
    for dim in range(MAX_DIMS):
        strides = np.where(ops.along("extents", dim) > 1, ops.along(f"{side}_strides", dim), -1)
        outer[strides > largest] = dim
        np.maximum(largest, strides, out=largest)
    return outer


def dense(ops: Ops) -> Flags:
    """Whether an op is one run of bytes, the same on both sides."""
    alike = ops["source_dtype"] == ops["target_dtype"]
    for dim in range(MAX_DIMS):
        strides = (ops.along(f"{side}_strides", dim) for side in ("source", "target"))
        alike &= (ops.along("extents", dim) == 1) | np.equal(*strides)
    start, stop = hull(ops, "target")
    whole = stop - start == op_volumes(ops) * ITEMSIZES[ops["target_dtype"]]
    return np.asarray(alike & whole)


def torn(ops: Ops, owner: Ints, count: int, target: bool) -> Flags:
    """For each of ``count`` owners of ops and each dim, whether a cut there would tear a box apart.

    That is a box of the target files if ``target``, else of the source files.
    """
    moves = ops["kind"] == MOVE
    found = np.zeros((count, MAX_DIMS), dtype=bool)
    sides = [("target", moves)] if target else [("source", np.ones(len(ops), dtype=bool)), ("target", ~moves)]
    for side, chosen in sides:
        outer = outermost(ops, side)
        for dim in range(MAX_DIMS):
            found[owner[chosen & (ops.along("extents", dim) > 1) & (outer != dim)], dim] = True
    return found


def reach(ops: Ops, owner: Ints, count: int) -> tuple[Ints, Ints]:
    """First element and one past the last along each dim, of all ops of each owner; shapes ``(count, dims)``."""
    low = np.full((count, MAX_DIMS), np.iinfo(np.int64).max)
    high = np.zeros((count, MAX_DIMS), dtype=np.int64)
    np.minimum.at(low, owner, ops["offset"])
    np.maximum.at(high, owner, ops["offset"] + ops["extents"])
    return low, high
