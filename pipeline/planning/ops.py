"""What is moved or compared, as columns.

An *op* is a strided box moved from one place to another (``MOVE``: a copy, or a cast where the dtypes differ), or two
strided boxes that must hold the same values: further copies of a tensor (``COMPARE``), parameters that the target
does not store because they are the cast of their master weight (``CHECK``), and parameters that are stored beside
their master weight (``HOLD``; ``PROBE`` is a few elements of one).

A plan may have millions of ops. Each of their fields is an array of its own: to sort or to select by one field touches
no other, and while all are sorted, only one field is held twice.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, overload

import numpy as np
import numpy.typing as npt

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
Flags = npt.NDArray[np.bool_]

FIELDS = tuple(OP.names or ())
ITEMSIZES = np.array([dtype.itemsize for dtype in DTYPES], dtype=np.int64)
_BLOCK_OPS = 1 << 16
"""Ops that become rows in one go."""


class Ops:
    """Ops, an array for each field of ``OP``. A slice shares them, any other selection is a copy."""

    __slots__ = ("_columns",)

    def __init__(self, columns: dict[str, npt.NDArray[Any]]) -> None:
        self._columns = columns

    @classmethod
    def empty(cls, count: int = 0) -> Ops:
        """Room for ``count`` ops that say nothing yet."""
        return cls(
            {name: np.empty((count, *OP[name].shape), dtype=OP[name].base) for name in FIELDS},
        )

    @classmethod
    def of_rows(cls, rows: OpRows) -> Ops:
        """The same ops as columns."""
        return cls({name: np.ascontiguousarray(rows[name]) for name in FIELDS})

    def __len__(self) -> int:
        return len(self._columns["kind"])

    @overload
    def __getitem__(self, key: str) -> npt.NDArray[Any]: ...

    @overload
    def __getitem__(self, key: slice | Ints | Flags) -> Ops: ...

    def __getitem__(self, key: str | slice | Ints | Flags) -> Ops | npt.NDArray[Any]:
        if isinstance(key, str):
            return self._columns[key]
        if isinstance(key, slice):
            return Ops({name: column[key] for name, column in self._columns.items()})
        chosen = np.flatnonzero(key) if key.dtype == np.bool_ else key
        return Ops({name: column.take(chosen, axis=0) for name, column in self._columns.items()})

    def __setitem__(self, name: str, values: npt.ArrayLike) -> None:
        self._columns[name][...] = values

    def rows(self) -> OpRows:
        """The same ops as rows."""
        rows = np.empty(len(self), dtype=OP)
        for name, column in self._columns.items():
            rows[name] = column
        return rows

    def blocks(self) -> Iterator[Ops]:
        """All of them, a bounded number at a time."""
        for first in range(0, len(self), _BLOCK_OPS):
            yield self[first : first + _BLOCK_OPS]

    def copy(self) -> Ops:
        """The same ops in arrays of their own."""
        return Ops({name: column.copy() for name, column in self._columns.items()})

    def clear(self) -> None:
        """Forget all of them."""
        self._columns = Ops.empty()._columns

    def reorder(self, order: Ints) -> None:
        """Sort them."""
        for name in FIELDS:
            self._columns[name] = self._columns[name].take(order, axis=0)

    def split(self, chosen: Flags) -> tuple[Ops, Ops]:
        """Those that are ``chosen``, and the others. Nothing is left here, so that no field is held twice for long."""
        numbers = np.flatnonzero(chosen), np.flatnonzero(~chosen)
        parts: tuple[dict[str, Any], dict[str, Any]] = ({}, {})
        for name in FIELDS:
            column = self._columns.pop(name)
            for part, number in zip(parts, numbers, strict=True):
                part[name] = column.take(number, axis=0)
        return Ops(parts[0]), Ops(parts[1])

    @classmethod
    def joined(cls, chunks: list[Ops]) -> Ops:
        """All ops of several. Nothing is left in these, so that no field is held twice for long."""
        if len(chunks) == 1:
            return chunks.pop()
        columns = {name: np.concatenate([chunk._columns.pop(name) for chunk in chunks]) for name in FIELDS}
        chunks.clear()
        return cls(columns)


def set_stops(ops: Ops) -> None:
    """Work out anew where the bytes of ops end, from their boxes."""
    for side in ("source", "target"):
        stop = ops[f"{side}_byte"] + ITEMSIZES[ops[f"{side}_dtype"]]
        for dim in range(MAX_DIMS):
            stop += (ops["extents"][:, dim] - 1) * ops[f"{side}_strides"][:, dim]
        ops[f"{side}_stop"] = stop


def op_volumes(ops: Ops) -> Ints:
    """Elements of each op."""
    elements = ops["extents"][:, 0].copy()
    for dim in range(1, MAX_DIMS):
        elements *= ops["extents"][:, dim]
    return np.asarray(elements, dtype=np.int64)


def hull(ops: Ops, side: str) -> tuple[Ints, Ints]:
    """First byte and one past the last byte that each op touches on one ``side``."""
    return ops[f"{side}_byte"], ops[f"{side}_stop"]
