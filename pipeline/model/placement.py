"""Map stored arrays to boxes of logical tensors and to their bytes.

The same description serves both directions: arrays of source files become fragments to read, slots of target files
become fragments to write. Two steps compose: an array is the whole tensor-parallel local tensor or
a slice of its flattening, and the local tensor is one or several boxes of the logical one (*shards*, several
where logical parts are fused).
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod

import numpy as np

from paddle_reshard.pipeline.core.catalog import FRAGMENT, FragmentRow, Fragments
from paddle_reshard.pipeline.core.errors import RuleError
from paddle_reshard.pipeline.core.geometry import (
    MAX_DIMS,
    Shape,
    boxes_of_flat_range,
    padded,
    strides_in_order,
)
from paddle_reshard.pipeline.core.numbers import Ints, numbered_within
from paddle_reshard.pipeline.core.tensors import DType, dtype_number


@dataclass(frozen=True, slots=True)
class TensorCut:
    """How tensor parallelism cuts a tensor: each fused part into ``tp`` pieces along ``dim``.

    Two ranks and parts in the ratio 2:1 cut a dim of 12 elements, parts [0, 8) and [8, 12), as follows: rank 0 holds
    [0, 4) and [8, 10), rank 1 holds [4, 8) and [10, 12).
    """

    tp: int
    dim: int | None
    shares: tuple[int, ...] = (1,)
    """The extents of the parts fused along ``dim``, as a ratio in lowest terms: ``(1, 1)`` is two equal parts."""

    @property
    def units(self) -> int:
        """Number of units in a rank's extent; each part is a multiple of a unit."""
        return sum(self.shares)

    def local_shape(self, key: str, global_shape: Shape) -> Shape:
        """Shape of a rank's piece."""
        if self.dim is None or self.tp == 1:
            return global_shape
        extent = global_shape[self.dim] if self.dim < len(global_shape) else 0
        if extent == 0 or extent % (self.tp * self.units):
            what = f"{in_words(self.shares)} × " if len(self.shares) > 1 else ""
            raise RuleError(
                key, f"dim {self.dim} of shape {global_shape} does not divide into {what}tp={self.tp} pieces"
            )
        return with_dim(global_shape, self.dim, extent // self.tp)

    def global_shape(self, key: str, local_shape: Shape) -> Shape:
        """Shape of the logical tensor if every rank holds ``local_shape``."""
        if self.dim is None or self.tp == 1:
            return local_shape
        if self.dim >= len(local_shape) or local_shape[self.dim] % self.units:
            parts = f"of {in_words(self.shares)} " if len(self.shares) > 1 else ""
            raise RuleError(key, f"a rank's shape {local_shape} has no dim {self.dim} {parts}for tp to cut")
        return with_dim(local_shape, self.dim, local_shape[self.dim] * self.tp)

    def shards(self, rank: int, local_shape: Shape) -> list[tuple[int, int, int]]:
        """``(start in the local dim, start in the logical dim, length)`` of each of the rank's parts."""
        if self.dim is None or self.tp == 1:
            return []
        unit = local_shape[self.dim] // self.units
        ends = [end * unit for end in accumulate(self.shares)]
        lengths = [share * unit for share in self.shares]
        return [
            (end - length, (end - length) * self.tp + rank * length, length)
            for end, length in zip(ends, lengths, strict=True)
        ]


class JoinedCut(TensorCut):
    """The cut of one array with the pieces of all ranks in a row along ``dim``: ``[gate_0|up_0|gate_1|up_1]``."""

    def shards(self, rank: int, local_shape: Shape) -> list[tuple[int, int, int]]:
        """``(start in the array, start in the logical dim, length)`` of each part of each rank."""
        dim = self.dim or 0
        piece = with_dim(local_shape, dim, local_shape[dim] // self.tp)
        return [
            (rank * piece[dim] + start, logical, length)
            for rank in range(self.tp)
            for start, logical, length in super(JoinedCut, self).shards(rank, piece)
        ]


def in_words(shares: Sequence[int]) -> str:
    """The number of fused parts and their ratio, for messages."""
    ratio = "" if len(set(shares)) == 1 else f" in the ratio {':'.join(map(str, shares))}"
    return f"{len(shares)} fused parts{ratio}"


@dataclass(frozen=True, slots=True)
class ArrayKind:
    """The properties of an array that determine its boxes, independent of its location."""

    local_shape: Shape
    """Shape of the tensor-parallel local tensor."""
    cut: TensorCut
    itemsize: int
    flat: tuple[int, int] | None = None
    """Range ``[start, stop)`` of the flattened local tensor that a 1-D array holds; what exceeds it is padding.
    ``None``: the whole local tensor."""
    axes: Shape | None = None
    """Dims in storage order, slowest first; ``None``: C order."""


_COLUMNS = 7
_BLOCK_ARRAYS = 1 << 14
"""Number of arrays processed at a time."""


class Placements:
    """Collects the fragments of many arrays. The boxes of a kind of arrays are computed once."""

    def __init__(self) -> None:
        self._kinds: dict[ArrayKind, int] = {}
        self._boxes: list[list[tuple[FragmentRow, Shape]]] = []
        """For each kind: the boxes of rank 0, and their step from one rank to the next."""
        self._arrays = array("q")  # seven numbers each; objects would take six times the memory
        self._files: list[tuple[int, Ints, int, int]] = []
        """Arguments of :meth:`add_file`, and the number of single arrays added before."""

    def kind(self, kind: ArrayKind) -> int:
        """Number of a kind, which is added if it is new."""
        number = self._kinds.setdefault(kind, len(self._kinds))
        if number == len(self._boxes):
            self._boxes.append(list(_boxes_of(kind)))
        return number

    def add(
        self, kind: int, rank: int, tensor: int, file: int, byte_offset: int, dtype: DType, replica: int
    ) -> None:
        """Add an array of a kind, stored by tp rank ``rank`` at ``byte_offset``."""
        self._arrays.extend((kind, rank, tensor, file, byte_offset, dtype_number(dtype), replica))

    def add_all(self, columns: Sequence[Ints | int], count: int) -> None:
        """The same for so many arrays; each of the seven arguments is a column, or a number for all of them."""
        rows = np.empty((count, _COLUMNS), dtype=np.int64)
        for number, column in enumerate(columns):
            rows[:, number] = column
        self._arrays.frombytes(rows.tobytes())

    def add_file(self, arrays: Ints, rank: int, file: int) -> None:
        """Add all arrays of a file of tp rank ``rank``; rows are (kind, tensor, byte offset, index of the dtype).

        Rows are not copied, so files of several ranks can share them.
        """
        self._files.append((len(self._arrays) // _COLUMNS, arrays, rank, file))

    def box_counts(self) -> Ints:
        """Number of boxes of each array, in the order in which they were added."""
        counts = self._counts()
        counts_of_blocks = [counts[kind] for kind, *_ in self._blocks()]
        return np.concatenate([np.zeros(0, dtype=np.int64), *counts_of_blocks])

    def _counts(self) -> Ints:
        return np.array([len(of_kind) for of_kind in self._boxes], dtype=np.int64)

    def _blocks(self) -> Iterator[Ints]:
        """The seven columns of all arrays in the order in which they were added, in blocks."""
        gathered: list[Ints] = []
        count = 0
        for columns in self._pieces():
            gathered.append(columns)
            count += columns.shape[1]
            if count >= _BLOCK_ARRAYS:
                yield np.concatenate(gathered, axis=1)
                gathered, count = [], 0
        if gathered:
            yield np.concatenate(gathered, axis=1)

    def _pieces(self) -> Iterator[Ints]:
        done = 0
        for single, arrays, rank, file in self._files:
            yield from self._single(done, single)
            done = single
            for first in range(0, len(arrays), _BLOCK_ARRAYS):
                rows = arrays[first : first + _BLOCK_ARRAYS]
                columns = np.zeros((_COLUMNS, len(rows)), dtype=np.int64)
                columns[[0, 2, 4, 5]], columns[1], columns[3] = rows.T, rank, file
                yield columns
        yield from self._single(done, len(self._arrays) // _COLUMNS)

    def _single(self, start: int, stop: int) -> Iterator[Ints]:
        """Columns of the single arrays ``[start, stop)``, in blocks."""
        for first in range(start, stop, _BLOCK_ARRAYS):
            rows = self._arrays[first * _COLUMNS : min(first + _BLOCK_ARRAYS, stop) * _COLUMNS]
            yield np.frombuffer(rows, dtype=np.int64).reshape(-1, _COLUMNS).T

    def fragments(self) -> Fragments:
        """The boxes of all arrays, in the order in which they were added."""
        boxes = Fragments.of_rows(
            np.array([box for of_kind in self._boxes for box, _ in of_kind], dtype=FRAGMENT)
        )
        steps = np.array([step for of_kind in self._boxes for _, step in of_kind], dtype=np.int64)
        steps = steps.reshape(-1, MAX_DIMS)
        stepped = np.flatnonzero(steps.any(axis=0)).tolist()
        counts = self._counts()
        before = np.cumsum(counts) - counts
        fragments = [Fragments.empty()]
        for kind, rank, tensor, file, byte_offset, dtype, replica in self._blocks():
            count = counts[kind]
            number = np.repeat(np.arange(len(kind)), count)
            within = numbered_within(count)
            box = before[kind][number] + within
            rows = boxes[box]
            for name, values in (("tensor", tensor), ("file", file), ("dtype", dtype), ("replica", replica)):
                rows[name] = values[number]
            rows["byte_base"] = rows["byte_base"] + byte_offset[number]
            for dim in stepped:
                rows.set_along("offset", dim, rows.along("offset", dim) + steps[box, dim] * rank[number])
            fragments.append(rows)
        return Fragments.joined(fragments)


def _boxes_of(kind: ArrayKind) -> Iterator[tuple[FragmentRow, Shape]]:
    """The boxes of an array of tp rank 0 at byte 0, and their step from one rank to the next."""
    shape, itemsize = kind.local_shape, kind.itemsize
    strides = strides_in_order(shape, itemsize, kind.axes)
    if kind.flat is None:
        yield from _shards(kind, 0, (0,) * len(shape), shape, strides)
        return
    start, stop = kind.flat
    elements = prod(shape)
    for offset, extents in boxes_of_flat_range(min(start, elements), min(stop, elements), shape):
        first_byte = sum(o * s for o, s in zip(offset, strides, strict=True)) - start * itemsize
        yield from _shards(kind, first_byte, offset, extents, strides)


def _shards(
    kind: ArrayKind, byte_base: int, offset: Shape, extents: Shape, strides: Shape
) -> Iterator[tuple[FragmentRow, Shape]]:
    """The boxes of the logical tensor for a box of the local tensor, and their steps."""
    shards = kind.cut.shards(0, kind.local_shape)
    if not shards:
        yield _row(byte_base, offset, extents, strides), (0,) * MAX_DIMS
    for local_start, logical_start, length in shards:
        dim = kind.cut.dim or 0
        low = max(offset[dim], local_start)
        high = min(offset[dim] + extents[dim], local_start + length)
        if low < high:
            row = _row(
                byte_base + (low - offset[dim]) * strides[dim],
                with_dim(offset, dim, low - local_start + logical_start),
                with_dim(extents, dim, high - low),
                strides,
            )
            yield row, with_dim((0,) * MAX_DIMS, dim, length)


def _row(byte_base: int, offset: Shape, extents: Shape, strides: Shape) -> FragmentRow:
    return (0, 0, 0, 0, byte_base, padded(offset, 0), padded(extents, 1), padded(strides, 0))


def with_dim(values: Shape, dim: int, value: int) -> Shape:
    """A shape or an offset with another value along a dim."""
    return (*values[:dim], value, *values[dim + 1 :])
