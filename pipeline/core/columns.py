"""Very many rows of whole numbers, each field an array of its own and held as narrow as its values allow."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias, TypeVar, overload

import numpy as np

from paddle_reshard.pipeline.core.numbers import Ints
from paddle_reshard.pipeline.core.sorting import distinct

if TYPE_CHECKING:
    import numpy.typing as npt
    from typing_extensions import Self

AnyColumns = TypeVar("AnyColumns", bound="Columns")
Column = tuple[str, int]
"""Field, and dim of a field of several; 0 where there is one."""
Flags: TypeAlias = "npt.NDArray[np.bool_]"

_WIDTHS = tuple(np.dtype(kind) for kind in (np.int8, np.int16, np.int32, np.int64))
BLOCK_ROWS = 1 << 16
"""Rows that are looked at in one go."""


class Columns:
    """Rows of ``DTYPE``, an array for each field. A slice shares them, any other selection is a copy.

    They are held narrow: of each field, and of each dim of a field of several, in the smallest whole numbers that all
    values fit, and where all values are the same, only that one. A field that is looked at has its full width, and
    cannot be written to: it is changed by assigning all of it.
    """

    DTYPE: ClassVar[np.dtype[Any]]
    COLUMNS: ClassVar[tuple[Column, ...]]

    __slots__ = ("_columns", "_frozen")

    def __init_subclass__(cls) -> None:
        names = cls.DTYPE.names or ()
        cls.COLUMNS = tuple((name, dim) for name in names for dim in range(cls._dims(name)))

    def __init__(self, columns: dict[Column, npt.NDArray[Any]]) -> None:
        self._columns = columns
        self._frozen = False

    @classmethod
    def _dims(cls, name: str) -> int:
        return cls.DTYPE[name].shape[0] if cls.DTYPE[name].shape else 1

    @classmethod
    def empty(cls, count: int = 0) -> Self:
        """``count`` rows, all zeros."""
        return cls({column: _constant(0, count) for column in cls.COLUMNS})

    @classmethod
    def of_rows(cls, rows: npt.NDArray[np.void]) -> Self:
        """Columns of an array of rows."""
        columns = cls.empty(len(rows))
        for name in cls.DTYPE.names or ():
            columns[name] = rows[name]
        return columns

    def narrow(self) -> Iterator[tuple[Column, npt.NDArray[Any]]]:
        """Every column as it is held, in the smallest whole numbers that its values fit.

        Equal rows have equal columns, however they were made. A column of one value has a stride of 0.
        """
        for name in self.COLUMNS:
            column = self._columns[name]
            low, high = _bounds(column)
            same = low == high
            yield name, _constant(low, len(self)) if same else column.astype(_smallest(low, high), copy=False)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as a single string of bytes: hundreds of thousands of small selections are sent to workers."""
        columns = [self._columns[name] for name in self.COLUMNS]
        kept = [column[:1] if _is_constant(column) else column for column in columns]
        layout = "".join(column.dtype.char for column in kept), bytes(map(_is_constant, columns))
        return _unpacked, (type(self), len(self), *layout, b"".join(column.tobytes() for column in kept))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Columns) or type(self) is not type(other):
            return NotImplemented
        return len(self) == len(other) and all(
            np.array_equal(column, there)
            for (_, column), (_, there) in zip(self.narrow(), other.narrow(), strict=True)
        )

    def __len__(self) -> int:
        return len(self._columns[self.COLUMNS[0]])

    def __iter__(self) -> Iterator[np.void]:
        for block in self.blocks():
            yield from block.rows()

    @overload
    def __getitem__(self, key: str) -> npt.NDArray[Any]: ...

    @overload
    def __getitem__(self, key: slice | Ints | Flags) -> Self: ...

    def __getitem__(self, key: str | slice | Ints | Flags) -> Self | npt.NDArray[Any]:
        if isinstance(key, str):
            if not self.DTYPE[key].shape:
                return self.along(key, 0)
            return _read_only(np.stack([self.along(key, dim) for dim in range(self._dims(key))], axis=1))
        if isinstance(key, slice):
            return type(self)({name: column[key] for name, column in self._columns.items()})
        chosen: Ints = np.flatnonzero(key) if key.dtype == np.bool_ else np.asarray(key, dtype=np.int64)
        return type(self)({name: _taken(column, chosen) for name, column in self._columns.items()})

    def along(self, name: str, dim: int) -> npt.NDArray[Any]:
        """A field of several dims along one of them."""
        column, width = self._columns[name, dim], self.DTYPE[name].base
        if _is_constant(column):
            return np.broadcast_to(column[0].astype(width), column.shape)
        return _read_only(column.astype(width, copy=False)[:])

    def single(self, name: str, dim: int = 0) -> int | None:
        """The value of a field, of several dims along one of them, where it is held as that of all rows."""
        column = self._columns[name, dim]
        return int(column[0]) if _is_constant(column) else None

    def along_each(self, name: str, dims: Ints) -> Ints:
        """A field of several dims, of each row along the dim that ``dims`` has for it."""
        values = np.zeros(len(self), dtype=np.int64)
        for dim in range(self._dims(name)):
            np.copyto(values, self._columns[name, dim], where=dims == dim)
        return values

    def __setitem__(self, name: str, values: npt.ArrayLike) -> None:
        given = np.asarray(values)
        several = bool(self.DTYPE[name].shape)
        for dim in range(self._dims(name)):
            self._set(name, dim, given[..., dim] if several else given)

    def set_along_each(self, name: str, dims: Ints, values: Ints) -> None:
        """Change a field of several dims, of each row along the dim that ``dims`` has for it."""
        for dim in distinct(dims).tolist():
            self._set(name, dim, np.where(dims == dim, values, self._columns[name, dim]))

    def set_along(self, name: str, dim: int, values: npt.ArrayLike) -> None:
        """Change a field of several dims along one of them."""
        self._set(name, dim, np.asarray(values))

    def share(self, name: str, other: Columns, its_name: str) -> None:
        """Give a field the values of the field ``its_name`` of as many ``other`` rows; the arrays are shared."""
        self._check_open()
        if len(other) != len(self):
            raise ValueError(f"{its_name} of {len(other)} rows cannot be the {name} of {len(self)}")
        for dim in range(self._dims(name)):
            self._columns[name, dim] = other._columns[its_name, dim]

    def _set(self, name: str, dim: int, values: npt.NDArray[Any]) -> None:
        self._check_open()
        self._columns[name, dim] = narrowed(values, len(self))

    def _check_open(self) -> None:
        if self._frozen:
            raise ValueError("these columns are read-only")

    def freeze(self) -> None:
        """Make the columns read-only; copies can be changed."""
        self._frozen = True

    def rows(self) -> npt.NDArray[np.void]:
        """The columns as an array of rows."""
        rows = np.empty(len(self), dtype=self.DTYPE)
        for name in self.DTYPE.names or ():
            rows[name] = self[name]
        return rows

    def blocks(self, count: int = BLOCK_ROWS) -> Iterator[Self]:
        """The rows in order, at most ``count`` at a time."""
        for first in range(0, len(self), count):
            yield self[first : first + count]

    def copy(self) -> Self:
        """A copy of the rows, in arrays of its own."""
        return self[np.arange(len(self))]

    def clear(self) -> None:
        """Remove all rows."""
        self._columns = self.empty()._columns

    def reorder(self, order: Ints) -> None:
        """Put the rows in an order, given as indices."""
        for name in self.COLUMNS:
            self._columns[name] = _taken(self._columns[name], order)

    def split(self, chosen: Flags) -> tuple[Self, Self]:
        """The ``chosen`` rows, and the others. Empties this value, so that no column is held twice for long."""
        numbers = np.flatnonzero(chosen), np.flatnonzero(~chosen)
        parts: tuple[dict[Column, Any], dict[Column, Any]] = ({}, {})
        for name in self.COLUMNS:
            column = self._columns.pop(name)
            for part, number in zip(parts, numbers, strict=True):
                part[name] = _taken(column, number)
        return type(self)(parts[0]), type(self)(parts[1])

    @classmethod
    def joined(cls, chunks: list[Self]) -> Self:
        """The rows of several values. Empties the ``chunks``, so that no field is held twice for long."""
        if len(chunks) == 1:
            return chunks.pop()
        columns = {name: _joined([chunk._columns.pop(name) for chunk in chunks]) for name in cls.COLUMNS}
        chunks.clear()
        return cls(columns)


def _unpacked(kind: type[AnyColumns], count: int, dtypes: str, constant: bytes, data: bytes) -> AnyColumns:
    columns: dict[Column, npt.NDArray[Any]] = {}
    start = 0
    for name, dtype, single in zip(kind.COLUMNS, dtypes, constant, strict=True):
        column = np.frombuffer(data, dtype, 1 if single else count, start)
        start += column.nbytes
        columns[name] = np.broadcast_to(column[0], (count,)) if single else column
    return kind(columns)


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


def narrowed(values: npt.NDArray[Any], count: int) -> npt.NDArray[Any]:
    """The same values, held as narrow as they can be; a single one is that of all."""
    low, high = _bounds(values)
    if low == high:
        return _constant(low, count)
    return values.astype(_smallest(low, high))


def _bounds(values: npt.NDArray[Any]) -> tuple[int, int]:
    """The smallest and the largest value; 0 if there is none."""
    if not values.size:
        return 0, 0
    if not any(values.strides):
        return (int(values.flat[0]),) * 2
    return int(values.min()), int(values.max())


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
