"""What is moved or compared, as columns.

An *op* is a strided box moved from one place to another (``MOVE``: a copy, or a cast where the dtypes differ), or two
strided boxes that must hold the same values: further copies of a tensor (``COMPARE``), parameters that the target
does not store because they are the cast of their master weight (``CHECK``), and parameters that are stored beside
their master weight (``HOLD``; ``PROBE`` is a few elements of one).

A plan may have millions of ops. Each of their fields is an array of its own, as narrow as its values allow: to sort or
to select by one field touches no other, and while all are sorted, only one field is held twice.
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
Column = tuple[str, int]
"""Field and dim; 0 where the field has only one."""
COLUMNS: tuple[Column, ...] = tuple(
    (name, dim) for name in FIELDS for dim in range(MAX_DIMS if OP[name].shape else 1)
)
_BEGINS = {"source_stop": "source_byte", "target_stop": "target_byte"}
"""Fields of which only the distance from another is held."""
_WIDTHS = tuple(np.dtype(kind) for kind in (np.int8, np.int16, np.int32, np.int64))
_BLOCK_OPS = 1 << 16
"""Ops that become rows in one go."""


class Ops:
    """Ops, an array for each field of ``OP``. A slice shares them, any other selection is a copy.

    They are held narrow: of each field, and of each dim of a box, in the smallest whole numbers that all values fit,
    and where all values are the same, only that one. Experts are alike and a plan has millions of ops: they take 35 to
    70 bytes each instead of 183. A field that is looked at has its full width, and cannot be written to: it is changed
    by assigning all of it. Of ``source_stop`` and ``target_stop`` only the distance from the first byte is held, so
    these move along when it is assigned.
    """

    __slots__ = ("_columns",)

    def __init__(self, columns: dict[Column, npt.NDArray[Any]]) -> None:
        self._columns = columns

    @classmethod
    def empty(cls, count: int = 0) -> Ops:
        """``count`` ops, all zeros."""
        return cls({column: _constant(0, count) for column in COLUMNS})

    @classmethod
    def of_rows(cls, rows: OpRows) -> Ops:
        """The same ops as columns."""
        ops = cls.empty(len(rows))
        for name in FIELDS:
            ops[name] = rows[name]
        return ops

    def __len__(self) -> int:
        return len(self._columns["kind", 0])

    @overload
    def __getitem__(self, key: str) -> npt.NDArray[Any]: ...

    @overload
    def __getitem__(self, key: slice | Ints | Flags) -> Ops: ...

    def __getitem__(self, key: str | slice | Ints | Flags) -> Ops | npt.NDArray[Any]:
        if isinstance(key, str):
            if not OP[key].shape:
                return self.along(key, 0)
            return _read_only(np.stack([self.along(key, dim) for dim in range(MAX_DIMS)], axis=1))
        if isinstance(key, slice):
            return Ops({name: column[key] for name, column in self._columns.items()})
        chosen: Ints = np.flatnonzero(key) if key.dtype == np.bool_ else np.asarray(key, dtype=np.int64)
        return Ops({name: _taken(column, chosen) for name, column in self._columns.items()})

    def along(self, name: str, dim: int) -> npt.NDArray[Any]:
        """A field of several dims along one of them."""
        column = self._columns[name, dim].astype(OP[name].base, copy=False)
        if name in _BEGINS:
            column = column + self._columns[_BEGINS[name], 0]
        return _read_only(column[:])

    def along_each(self, name: str, dims: Ints) -> Ints:
        """A field of several dims, of each op along the dim that ``dims`` has for it."""
        found = np.zeros(len(self), dtype=np.int64)
        for dim in range(MAX_DIMS):
            np.copyto(found, self._columns[name, dim], where=dims == dim)
        return found

    def __setitem__(self, name: str, values: npt.ArrayLike) -> None:
        given = np.asarray(values)
        if name in _BEGINS:
            given = given - self._columns[_BEGINS[name], 0]
        for dim in range(MAX_DIMS if OP[name].shape else 1):
            self._columns[name, dim] = _narrow(given[..., dim] if OP[name].shape else given, len(self))

    def set_along_each(self, name: str, dims: Ints, values: Ints) -> None:
        """Change a field of several dims, of each op along the dim that ``dims`` has for it."""
        for dim in np.unique(dims).tolist():
            column = np.where(dims == dim, values, self._columns[name, dim])
            self._columns[name, dim] = _narrow(column, len(self))

    def rows(self) -> OpRows:
        """The same ops as rows."""
        rows = np.empty(len(self), dtype=OP)
        for name in FIELDS:
            rows[name] = self[name]
        return rows

    def blocks(self, count: int = _BLOCK_OPS) -> Iterator[Ops]:
        """All of them, at most ``count`` at a time."""
        for first in range(0, len(self), count):
            yield self[first : first + count]

    def copy(self) -> Ops:
        """The same ops in arrays of their own."""
        return self[np.arange(len(self))]

    def clear(self) -> None:
        """Forget all of them."""
        self._columns = Ops.empty()._columns

    def reorder(self, order: Ints) -> None:
        """Sort them."""
        for name in COLUMNS:
            self._columns[name] = _taken(self._columns[name], order)

    def split(self, chosen: Flags) -> tuple[Ops, Ops]:
        """Those that are ``chosen``, and the others. Nothing is left here, so that no field is held twice for long."""
        numbers = np.flatnonzero(chosen), np.flatnonzero(~chosen)
        parts: tuple[dict[Column, Any], dict[Column, Any]] = ({}, {})
        for name in COLUMNS:
            column = self._columns.pop(name)
            for part, number in zip(parts, numbers, strict=True):
                part[name] = _taken(column, number)
        return Ops(parts[0]), Ops(parts[1])

    @classmethod
    def joined(cls, chunks: list[Ops]) -> Ops:
        """All ops of several. Nothing is left in these, so that no field is held twice for long."""
        if len(chunks) == 1:
            return chunks.pop()
        columns = {name: _joined([chunk._columns.pop(name) for chunk in chunks]) for name in COLUMNS}
        chunks.clear()
        return cls(columns)


def _read_only(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    values.flags.writeable = False
    return values


def _smallest(low: int, high: int) -> np.dtype[Any]:
    return next(dtype for dtype in _WIDTHS if np.iinfo(dtype).min <= low and high <= np.iinfo(dtype).max)


def _constant(value: int, count: int) -> npt.NDArray[Any]:
    """An array of one value that holds it once."""
    return np.broadcast_to(np.array(value, dtype=_smallest(value, value)), (count,))


def _is_constant(column: npt.NDArray[Any]) -> bool:
    return len(column) > 0 and column.strides == (0,)


def _narrow(values: npt.NDArray[Any], count: int) -> npt.NDArray[Any]:
    """The same values, held as narrow as they can be; a single one is that of all."""
    low, high = (int(values.min()), int(values.max())) if values.size else (0, 0)
    if low == high:
        return _constant(low, count)
    return values.astype(_smallest(low, high))


def _taken(column: npt.NDArray[Any], chosen: Ints) -> npt.NDArray[Any]:
    if _is_constant(column):
        return np.broadcast_to(column[0], (len(chosen),))
    return column.take(chosen)


def _joined(columns: list[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    columns = [column for column in columns if len(column)] or columns[:1]
    first = columns[0][:1]
    if all(_is_constant(column) and column[0] == first[0] for column in columns):
        return np.broadcast_to(first[0], (sum(map(len, columns)),))
    return np.concatenate(columns)


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
