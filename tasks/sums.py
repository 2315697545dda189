"""Add up the checksums of tensors from strided boxes of them, in whatever order and layout the boxes are in memory.

A *run* is a stretch of a box that is contiguous in the tensor. Long runs are checksummed where they are. Boxes that are
next to each other, such as the columns of several ranks, are copied together first, block by block, and so are boxes
whose dims are in another order in memory. Between runs with small gaps, zeros are added, which contribute nothing. So
one call covers many runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, product
from math import prod
from typing import Any, NamedTuple

import numpy as np

from paddle_reshard.pipeline.core.crc import ALL_BITS, Remainders, in_a_row, shifted
from paddle_reshard.pipeline.core.geometry import Shape, row_major_strides
from paddle_reshard.tasks.boxes import Array, blocks, cast_box, copy_box
from paddle_reshard.tasks.device import Box, Buffer

GAP_BYTES = 8192
"""Largest gap that is filled with zeros: a call for each run would take longer."""
SCRATCH_BYTES = 512 << 10
"""Bytes that are copied at a time."""


class Sum(NamedTuple):
    """What a group adds to the checksum of a tensor."""

    tensor: int
    dtype: int
    """Index into ``DTYPES``: a tensor may go to several targets in several dtypes."""
    remainder: int
    elements: int
    """Elements that it covers."""


class _Piece(NamedTuple):
    """A box of a tensor in memory."""

    box: Box
    offset: tuple[int, ...]
    extents: tuple[int, ...]
    """Without the dims that the tensor lacks."""


@dataclass(frozen=True)
class _Whole:
    """A tensor as a fingerprint sees it."""

    shape: Shape
    dtype: np.dtype[Any]

    @property
    def strides(self) -> Shape:
        """Its byte strides."""
        return row_major_strides(self.shape, self.dtype.itemsize)


@dataclass
class Sums:
    """Boxes of tensors, all in memory until they are added up. Not thread-safe."""

    wholes: dict[tuple[int, int], _Whole] = field(default_factory=dict)
    pieces: dict[tuple[int, int], list[_Piece]] = field(default_factory=dict)
    """Tensor and dtype → its boxes."""

    def add(
        self, owner: tuple[int, int], box: Box, offset: Sequence[int], shape: Shape, dtype: np.dtype[Any]
    ) -> None:
        """Add a box at ``offset`` of a tensor of ``shape``, as ``dtype``; its buffer is in host memory."""
        self.wholes[owner] = _Whole(shape, dtype)
        piece = _Piece(box, tuple(offset[: len(shape)]), box.extents[: len(shape)])
        self.pieces.setdefault(owner, []).append(piece)

    def found(self) -> tuple[Sum, ...]:
        """The sums of all tensors."""
        owners = sorted(self.pieces)
        remainders: list[int] = []
        distances: list[int] = []
        ends = [0]
        for owner in owners:
            whole = self.wholes[owner]
            itemsize, logical = whole.dtype.itemsize, whole.strides
            for row in _rows(whole, self.pieces[owner]):
                for stored, first in _in_memory(whole, row):
                    sides = zip(first, stored.extents, logical, strict=True)
                    last = sum((start + extent - 1) * step for start, extent, step in sides)
                    remainders.append(remainder_of_box(stored, logical, itemsize))
                    distances.append(prod(whole.shape) * itemsize - last - itemsize)
            ends.append(len(remainders))
        found = shifted(np.array(remainders, dtype=np.uint64), np.array(distances, dtype=np.int64))
        return tuple(
            Sum(
                *owner,
                int(np.bitwise_xor.reduce(found[low:high])),
                sum(prod(piece.extents) for piece in self.pieces[owner]),
            )
            for owner, (low, high) in zip(owners, pairwise(ends), strict=True)
        )


def is_summed_in_place(box: Box, shape: Shape, dtype: np.dtype[Any]) -> bool:
    """Whether a box needs neither a cast nor another order of its dims."""
    return box.dtype == dtype and _runs_are_whole(box, _Whole(shape, dtype))


def _rows(whole: _Whole, pieces: Sequence[_Piece]) -> list[list[_Piece]]:
    """Pieces in groups: those next to each other, such as the columns of all ranks, are longer runs together."""
    itemsize, logical = whole.dtype.itemsize, whole.strides
    beside: dict[tuple[Any, ...], list[_Piece]] = {}
    for piece in pieces:
        _, outer = _run(piece.extents, logical, itemsize)
        dim = outer[-1] + 1 if outer else 0
        rest = [(*values[:dim], *values[dim + 1 :]) for values in (piece.offset, piece.extents)]
        beside.setdefault((dim, *rest), []).append(piece)
    rows = []
    for (dim, *_), alike in beside.items():
        if not whole.shape or dim == 0:
            rows += [[piece] for piece in alike]
            continue
        alike.sort(key=lambda piece: piece.offset[dim])
        rows.append(alike[:1])
        for before, piece in pairwise(alike):
            if before.offset[dim] + before.extents[dim] == piece.offset[dim]:
                rows[-1].append(piece)
            else:
                rows.append([piece])
    return rows


def _in_memory(whole: _Whole, row: Sequence[_Piece]) -> Iterator[tuple[_Stored, Sequence[int]]]:
    """A group of pieces with whole runs: where they are, or block by block in scratch memory; with its offset."""
    first, dims = row[0], len(whole.shape)
    if len(row) == 1 and is_summed_in_place(first.box, whole.shape, whole.dtype):
        box = first.box
        yield _Stored(box.buffer, box.byte_offset, first.extents, box.strides[:dims]), first.offset
        return
    arrays = [_array(piece, dims) for piece in row]
    dim = next((d for d in range(dims) if first.offset[d] != row[-1].offset[d]), None)
    extents = list(first.extents)
    if dim is not None:
        extents[dim] = row[-1].offset[dim] + row[-1].extents[dim] - first.offset[dim]
    where = [_beside(piece, first, dim) for piece in row]
    plain = all(is_summed_in_place(piece.box, whole.shape, whole.dtype) for piece in row)
    for block in blocks(extents[:dim], max(1, SCRATCH_BYTES // whole.dtype.itemsize // _inner(extents, dim))):
        shape = [part.stop - part.start for part in block] + extents[len(block) :]
        scratch = np.empty(shape, whole.dtype)
        for columns, array in zip(where, arrays, strict=True):
            values, here = array[block], scratch[columns]
            if plain:
                here[...] = values
            elif values.dtype == here.dtype:
                copy_box(values, here)
            else:
                cast_box(values, here, in_range=False)
        starts = [part.start for part in block] + [0] * (dims - len(block))
        offset = [o + s for o, s in zip(first.offset, starts, strict=True)]
        yield _Stored(scratch.reshape(-1).view(np.uint8), 0, shape, scratch.strides), offset


def _beside(piece: _Piece, first: _Piece, dim: int | None) -> tuple[slice, ...]:
    """Where a piece is in a group that begins with ``first`` and extends along ``dim``."""
    if dim is None:
        return ()
    start = piece.offset[dim] - first.offset[dim]
    return *[slice(None)] * dim, slice(start, start + piece.extents[dim])


def _inner(extents: Sequence[int], dim: int | None) -> int:
    """Elements of a block's rows."""
    return 1 if dim is None else max(1, prod(extents[dim:]))


def _array(piece: _Piece, dims: int) -> Array:
    box = piece.box
    return np.ndarray(piece.extents, box.dtype, box.buffer, box.byte_offset, box.strides[:dims])


def added(sums: Iterable[Sum]) -> tuple[Sum, ...]:
    """One sum for each tensor and dtype, of the sums of several groups or passes."""
    total: dict[tuple[int, int], Sum] = {}
    for one in sums:
        owner = one.tensor, one.dtype
        so_far = total.get(owner, Sum(*owner, 0, 0))
        total[owner] = Sum(*owner, so_far.remainder ^ one.remainder, so_far.elements + one.elements)
    return tuple(total[owner] for owner in sorted(total))


class _Stored(NamedTuple):
    """Bytes in memory: a box of elements, with byte strides."""

    buffer: Buffer
    byte_offset: int
    extents: Sequence[int]
    strides: Sequence[int]


def remainder_of_box(stored: _Stored, logical: Sequence[int], itemsize: int) -> int:
    """What a box contributes to the remainder of a tensor that ends with its last element.

    ``logical`` are the byte strides of its dims in the tensor. Its runs must be contiguous in memory too.
    """
    run_bytes, outer = _run(stored.extents, logical, itemsize)
    if 0 in stored.extents:
        return 0
    steps = [logical[dim] for dim in outer]
    extents = [stored.extents[dim] for dim in outer]
    strides = [stored.strides[dim] for dim in outer]
    if outer and steps[-1] - run_bytes <= GAP_BYTES:
        found = _with_gaps(stored, extents, strides, run_bytes, steps[-1])
        steps.pop()
    else:
        found = _each_run(stored, extents, strides, run_bytes)
    for step in reversed(steps):
        found = in_a_row(found, step)
    return int(found)


def _run(extents: Sequence[int], logical: Sequence[int], itemsize: int) -> tuple[int, list[int]]:
    """Bytes of the runs of a box, and the dims outside of them that have more than one element."""
    nbytes = itemsize
    for dim in range(len(extents) - 1, -1, -1):
        if extents[dim] != 1:
            if logical[dim] != nbytes:
                return nbytes, [outer for outer in range(dim + 1) if extents[outer] != 1]
            nbytes *= extents[dim]
    return nbytes, []


def _runs_are_whole(box: Box, whole: _Whole) -> bool:
    """Whether each run of a box is contiguous in memory."""
    logical, dims = whole.strides, len(whole.shape)
    _, outer = _run(box.extents[:dims], logical, whole.dtype.itemsize)
    first = outer[-1] + 1 if outer else 0
    return all(box.extents[dim] == 1 or box.strides[dim] == logical[dim] for dim in range(first, dims))


def _each_run(stored: _Stored, extents: Sequence[int], strides: Sequence[int], run_bytes: int) -> Remainders:
    """The remainder of every run, in the shape ``extents``."""
    from awscrt.checksums import crc64nvme

    starts = np.full((), stored.byte_offset, dtype=np.int64)
    for extent, stride in zip(extents, strides, strict=True):
        starts = np.add.outer(starts, np.arange(extent) * stride)
    memory = stored.buffer.data
    found = [crc64nvme(memory[start : start + run_bytes], ALL_BITS) for start in starts.ravel().tolist()]
    return (np.array(found, dtype=np.uint64) ^ np.uint64(ALL_BITS)).reshape(starts.shape)


def _with_gaps(
    stored: _Stored, extents: Sequence[int], strides: Sequence[int], run_bytes: int, step: int
) -> Remainders:
    """The remainders of sequences of runs that begin ``step`` bytes apart, in the shape ``extents[:-1]``."""
    from awscrt.checksums import crc64nvme

    *around, count = extents
    rows = max(1, min(count, SCRATCH_BYTES // step))
    scratch = np.zeros((rows, step), dtype=np.uint8)
    flat = scratch.reshape(-1).data
    found = []
    for index in product(*map(range, around)):
        start = stored.byte_offset + sum(i * stride for i, stride in zip(index, strides, strict=False))
        checksum = ALL_BITS
        for first in range(0, count, rows):
            here = min(rows, count - first)
            at = start + first * strides[-1]
            scratch[:here, :run_bytes] = np.ndarray(
                (here, run_bytes), np.uint8, stored.buffer, at, (strides[-1], 1)
            )
            nbytes = here * step if first + here < count else (here - 1) * step + run_bytes
            checksum = crc64nvme(flat[:nbytes], checksum)
        found.append(checksum)
    return np.asarray((np.array(found, dtype=np.uint64) ^ np.uint64(ALL_BITS)).reshape(around))
