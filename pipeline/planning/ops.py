"""Moves and comparisons of boxes, as columns.

An *op* moves a strided box from a source file to a target file (``MOVE``: a copy, or a cast if the dtypes differ), or
compares two strided boxes: further copies of a tensor (``COMPARE``), parameters that the target omits because they are
the cast of their master weight (``CHECK``), and parameters that are stored along with their master weight (``HOLD``,
or ``PROBE`` for a few elements). ``SUM`` only reads a box, given as both sides, for the fingerprint of its tensor.
``DIFFER`` measures how far two boxes are apart.

A plan may have millions of ops. Each field is an array of its own, as narrow as its values allow: selecting by one
field touches no other, and sorting copies one field at a time.
"""

from __future__ import annotations

import numpy as np

from paddle_reshard.pipeline.core.catalog import ITEMSIZES, wide_dims
from paddle_reshard.pipeline.core.columns import Columns
from paddle_reshard.pipeline.core.geometry import MAX_DIMS
from paddle_reshard.pipeline.core.numbers import Ints

MOVE, COMPARE, CHECK, HOLD, PROBE, SUM, DIFFER = 0, 1, 2, 3, 4, 5, 6

OP = np.dtype(
    [
        ("kind", np.int8),  # MOVE, COMPARE, CHECK, HOLD, PROBE, SUM or DIFFER
        ("tensor", np.int32),  # the tensor whose values these are
        ("source_tensor", np.int32),  # the one they are read from: another if ``tensor`` is implied or mixed
        ("pass", np.int32),  # within its group
        ("source_file", np.int32),
        ("source_dtype", np.int8),
        ("target_file", np.int32),  # for a comparison, a source file too
        ("target_dtype", np.int8),
        ("source_byte", np.int64),  # of the first element
        ("target_byte", np.int64),
        ("source_length", np.int64),  # bytes from the first element to the end of the last
        ("target_length", np.int64),
        ("offset", np.int64, (MAX_DIMS,)),  # of the box in the tensor
        ("extents", np.int64, (MAX_DIMS,)),
        ("source_strides", np.int64, (MAX_DIMS,)),
        ("target_strides", np.int64, (MAX_DIMS,)),
    ]
)


class Ops(Columns):
    """Ops, with one array for each field of ``OP``. An op takes 35 to 70 bytes, instead of 183 as a row."""

    DTYPE = OP

    __slots__ = ()


def itemsizes(rows: Columns, field: str) -> Ints | np.int64:
    """Bytes of an element of each row, or of all, by a field of dtypes."""
    dtype = rows.single(field)
    return ITEMSIZES[rows[field]] if dtype is None else np.int64(ITEMSIZES[dtype])


def set_lengths(ops: Ops) -> None:
    """Recompute the ``_length`` fields from the boxes."""
    steps = [(dim, ops.along("extents", dim) - 1) for dim in wide_dims(ops)]
    for side in ("source", "target"):
        length = np.zeros(len(ops), dtype=np.int64)
        length += itemsizes(ops, f"{side}_dtype")
        for dim, further in steps:
            length += further * ops.along(f"{side}_strides", dim)
        ops[f"{side}_length"] = length


def hull(ops: Ops, side: str) -> tuple[Ints, Ints]:
    """First byte, and one past the last byte, of each op's box on one ``side``."""
    start = ops[f"{side}_byte"]
    return start, start + ops[f"{side}_length"]
