"""What is moved or compared, as columns.

An *op* is a strided box moved from one place to another (``MOVE``: a copy, or a cast where the dtypes differ), or two
strided boxes that must hold the same values: further copies of a tensor (``COMPARE``), parameters that the target
does not store because they are the cast of their master weight (``CHECK``), and parameters that are stored beside
their master weight (``HOLD``; ``PROBE`` is a few elements of one).

A plan may have millions of ops. Each of their fields is an array of its own, as narrow as its values allow: to sort or
to select by one field touches no other, and while all are sorted, only one field is held twice.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import numpy.typing as npt

from paddle_reshard.pipeline.core.columns import Columns
from paddle_reshard.pipeline.core.geometry import MAX_DIMS, Ints
from paddle_reshard.pipeline.core.tensors import DTYPES

MOVE, COMPARE, CHECK, HOLD, PROBE = 0, 1, 2, 3, 4

OP = np.dtype(
    [
        ("kind", np.int8),  # MOVE, or what is compared: COMPARE, CHECK, HOLD or PROBE
        ("tensor", np.int32),  # whose values these are
        ("source_tensor", np.int32),  # the tensor they are read from: another one where it is implied
        ("pass", np.int32),  # of its group, in which it is done
        ("source_file", np.int32),
        ("source_dtype", np.int8),
        ("target_file", np.int32),  # of all but a MOVE: a source file too
        ("target_dtype", np.int8),
        ("source_byte", np.int64),  # of the first element
        ("target_byte", np.int64),
        ("source_stop", np.int64),  # one past the last byte that is touched
        ("target_stop", np.int64),
        ("offset", np.int64, (MAX_DIMS,)),  # of the box in the tensor
        ("extents", np.int64, (MAX_DIMS,)),
        ("source_strides", np.int64, (MAX_DIMS,)),
        ("target_strides", np.int64, (MAX_DIMS,)),
    ]
)
OpRows = npt.NDArray[np.void]
"""A few ops, one after the other."""

FIELDS = tuple(OP.names or ())
ITEMSIZES = np.array([dtype.itemsize for dtype in DTYPES], dtype=np.int64)


class Ops(Columns):
    """Ops, an array for each field of ``OP``. Experts are alike: ops take 35 to 70 bytes each instead of 183."""

    DTYPE = OP
    DISTANCES: ClassVar = {"source_stop": "source_byte", "target_stop": "target_byte"}

    __slots__ = ()


def set_stops(ops: Ops) -> None:
    """Work out anew where the bytes of ops end, from their boxes."""
    for side in ("source", "target"):
        stop = ops[f"{side}_byte"] + ITEMSIZES[ops[f"{side}_dtype"]]
        for dim in range(MAX_DIMS):
            stop += (ops.along("extents", dim) - 1) * ops.along(f"{side}_strides", dim)
        ops[f"{side}_stop"] = stop


def op_volumes(ops: Ops) -> Ints:
    """Elements of each op."""
    elements = ops.along("extents", 0).copy()
    for dim in range(1, MAX_DIMS):
        elements *= ops.along("extents", dim)
    return np.asarray(elements, dtype=np.int64)


def hull(ops: Ops, side: str) -> tuple[Ints, Ints]:
    """First byte and one past the last byte that each op touches on one ``side``."""
    return ops[f"{side}_byte"], ops[f"{side}_stop"]
