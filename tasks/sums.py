"""Add up the checksums of tensors from strided boxes of them, in whatever order and layout the boxes are in memory.

A *run* is a stretch of a box that is contiguous in the tensor. Boxes that continue each other in memory are one box
with longer runs. Long runs are checksummed where they are. Short ones are copied to scratch memory, as they lie in the
tensor: boxes that are next to each other, such as the columns of several ranks, together, with zeros for what is
missing between them, which contribute nothing. So one call covers many runs. Boxes that have another dtype in memory,
or their dims in another order, are brought there in the same way.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import product
from math import prod
from typing import Any, NamedTuple

import numpy as np

from paddle_reshard.pipeline.core.crc import ALL_BITS, Remainders, in_a_row, shifted
from paddle_reshard.pipeline.core.geometry import Shape, row_major_strides
from paddle_reshard.tasks.boxes import Array, blocks, cast_box, copy_box
from paddle_reshard.tasks.device import Buffer, DeviceBox

CALL_BYTES = 4096
"""A call for a run takes as long as copying this many bytes, or as summing as many zeros."""
SCRATCH_BYTES = 1 << 20
"""Bytes that are copied at a time: they fit the processor's cache, and copying them takes much longer than handing
Python's lock to another thread."""


class Sum(NamedTuple):
    """What a group adds to the checksum of a tensor."""

    tensor: int
    dtype: int
    """Index into ``DTYPES``: a tensor may go to several targets in several dtypes."""
    remainder: int
    elements: int
    """Elements that it covers."""


class Whole(NamedTuple):
    """A tensor as a fingerprint sees it."""

    shape: Shape
    dtype: np.dtype[Any]
    strides: Shape
    """In bytes, row-major."""

    @classmethod
    def of(cls, shape: Shape, dtype: np.dtype[Any]) -> Whole:
        """A tensor of this shape and dtype."""
        return cls(shape, dtype, row_major_strides(shape, dtype.itemsize))


class SummedBox(NamedTuple):
    """A box of a tensor in host memory, without the dims that the tensor lacks."""

    offset: tuple[int, ...]
    extents: tuple[int, ...]
    strides: tuple[int, ...]
    """In bytes, in memory."""
    byte_offset: int
    dtype: np.dtype[Any]
    buffer: Buffer

    @classmethod
    def of(cls, box: DeviceBox, offset: Sequence[int], dims: int) -> SummedBox:
        """A box at ``offset`` of a tensor with ``dims`` dims."""
        return cls(
            tuple(offset[:dims]),
            box.extents[:dims],
            box.strides[:dims],
            box.byte_offset,
            box.dtype,
            box.buffer,
        )


@dataclass
class Sums:
    """Boxes of tensors, all in memory until they are added up. Not thread-safe."""

    pieces: dict[tuple[int, int], tuple[Whole, list[SummedBox]]] = field(default_factory=dict)
    """Tensor and dtype → its boxes."""

    def add(self, owner: tuple[int, int], whole: Whole, pieces: Iterable[SummedBox]) -> None:
        """Add boxes of a tensor."""
        self.pieces.setdefault(owner, (whole, []))[1].extend(pieces)

    def totals(self) -> tuple[Sum, ...]:
        """The sums of all tensors."""
        runs = _RunSums()
        owners = sorted(self.pieces)
        elements = []
        for number, owner in enumerate(owners):
            whole, pieces = self.pieces[owner]
            for row in _rows(whole, pieces):
                runs.add(number, whole, row)
            elements.append(sum(prod(piece.extents) for piece in pieces))
        remainders = runs.totals(len(owners))
        totals = zip(owners, remainders, elements, strict=True)
        return tuple(Sum(*owner, remainder, count) for owner, remainder, count in totals)


def added(sums: Iterable[Sum]) -> tuple[Sum, ...]:
    """One sum for each tensor and dtype, of the sums of several groups or passes."""
    total: dict[tuple[int, int], Sum] = {}
    for addend in sums:
        owner = addend.tensor, addend.dtype
        so_far = total.get(owner, Sum(*owner, 0, 0))
        total[owner] = Sum(*owner, so_far.remainder ^ addend.remainder, so_far.elements + addend.elements)
    return tuple(total[owner] for owner in sorted(total))


def _first_inner(whole: Whole, extents: Sequence[int]) -> int:
    """The first dim of the runs of a box; the dims before it are outside of them."""
    nbytes = whole.dtype.itemsize
    for dim in range(len(extents) - 1, -1, -1):
        if extents[dim] != 1:
            if whole.strides[dim] != nbytes:
                return dim + 1
            nbytes *= extents[dim]
    return 0


def _in_order(whole: Whole, piece: SummedBox) -> bool:
    """Whether each run of a box is contiguous in memory."""
    return all(
        piece.extents[dim] == 1
        or piece.strides[dim] * whole.dtype.itemsize == whole.strides[dim] * piece.dtype.itemsize
        for dim in range(_first_inner(whole, piece.extents), len(piece.extents))
    )


def _rows(whole: Whole, pieces: Sequence[SummedBox]) -> list[list[SummedBox]]:
    """Pieces in rows: those with short runs next to each other, such as the columns of ranks, are longer together."""
    beside: dict[tuple[Any, ...], list[SummedBox]] = {}
    for piece in pieces:
        dim = _first_inner(whole, piece.extents)
        rest = [(*values[:dim], *values[dim + 1 :]) for values in (piece.offset, piece.extents)]
        beside.setdefault((dim, *rest), []).append(piece)
    rows = []
    for (dim, _, extents), alike in beside.items():
        if len(alike) == 1 or not whole.shape:
            rows += [[piece] for piece in alike]
            continue
        step, contiguous = prod(extents[dim:]) * whole.dtype.itemsize, extents[dim:] == whole.shape[dim + 1 :]
        row_bytes = stop = 0
        for piece in _merged(alike, dim):
            run_bytes = step * piece.extents[dim]
            short = contiguous and dim > 0 and run_bytes < CALL_BYTES
            if short and stop == piece.offset[dim] and 0 < row_bytes <= SCRATCH_BYTES - run_bytes:
                rows[-1].append(piece)
                row_bytes += run_bytes
            else:
                rows.append([piece])
                row_bytes = run_bytes if short else 0
            stop = piece.offset[dim] + piece.extents[dim]
    return rows


def _merged(pieces: list[SummedBox], dim: int) -> list[SummedBox]:
    """Pieces that differ only along ``dim``, in order; those that continue each other in memory are one."""
    first, *others = sorted(pieces, key=lambda piece: piece.offset[dim])
    merged = [first]
    for piece in others:
        last = merged[-1]
        extent = last.extents[dim]
        if (
            piece.buffer is last.buffer
            and piece.dtype == last.dtype
            and piece.strides == last.strides
            and piece.offset[dim] == last.offset[dim] + extent
            and piece.byte_offset == last.byte_offset + extent * last.strides[dim]
        ):
            extents = (*last.extents[:dim], extent + piece.extents[dim], *last.extents[dim + 1 :])
            merged[-1] = last._replace(extents=extents)
        else:
            merged.append(piece)
    return merged


class _RunSums:
    """Adds up rows of pieces. Remainders of runs are kept until there are those of all rows of the same form."""

    def __init__(self) -> None:
        self._rows: dict[tuple[Shape, Shape], list[tuple[int, int, Remainders]]] = defaultdict(list)
        """How many runs there are along each dim and the bytes from run to run → number of the tensor, bytes behind
        the last run, remainders of the runs."""
        self._scratch: Buffer = np.empty(0, np.uint8)
        self._zeros: tuple[int, int] | None = None
        """Bytes of runs and from run to run, if scratch memory is zero between them."""

    def totals(self, count: int) -> list[int]:
        """The sum of each of ``count`` tensors."""
        totals = np.zeros(count, dtype=np.uint64)
        for (_, steps), rows in self._rows.items():
            numbers, distances, of_rows = zip(*rows, strict=True)
            remainders = np.stack(of_rows)
            for step in reversed(steps):
                remainders = in_a_row(remainders, step)
            np.bitwise_xor.at(totals, np.array(numbers), shifted(remainders, np.array(distances)))
        return [int(total) for total in totals]

    def add(self, number: int, whole: Whole, row: Sequence[SummedBox]) -> None:
        """Add pieces next to each other, of the tensor with this number."""
        first, last = row[0], row[-1]
        dims = range(len(whole.shape))
        along = next((dim for dim in dims if first.offset[dim] != last.offset[dim]), None)
        extents = list(first.extents)
        if along is not None:
            extents[along] = last.offset[along] + last.extents[along] - first.offset[along]
        if 0 in extents:
            return
        inner = _first_inner(whole, first.extents)
        outer = [dim for dim in range(inner) if first.extents[dim] != 1]
        run_bytes = prod(extents[inner:]) * whole.dtype.itemsize
        steps = [whole.strides[dim] for dim in outer]
        counts = [extents[dim] for dim in outer]
        in_place = along is None and first.dtype == whole.dtype and _in_order(whole, first)
        if in_place and (not outer or steps[-1] > CALL_BYTES):
            remainders = _each_run(first, [first.strides[dim] for dim in outer], counts, run_bytes)
        elif outer and run_bytes <= SCRATCH_BYTES:
            remainders = self._through_scratch(whole, row, along, extents, outer, run_bytes)
        else:
            remainders = self._long_runs(whole, first, outer)
        steps, counts = steps[: remainders.ndim], counts[: remainders.ndim]
        end = sum((first.offset[dim] + extents[dim] - 1) * whole.strides[dim] for dim in dims)
        behind = (prod(whole.shape) - 1) * whole.dtype.itemsize - end
        self._rows[tuple(counts), tuple(steps)].append((number, behind, remainders))

    def _room(self, nbytes: int) -> Buffer:
        if len(self._scratch) < nbytes:
            self._scratch = np.empty(max(nbytes, SCRATCH_BYTES), np.uint8)
            self._zeros = None
        return self._scratch

    def _room_for_runs(self, rows: int, run_bytes: int, pitch: int) -> Buffer:
        """Scratch memory for runs that begin every ``pitch`` bytes; zeros between them."""
        scratch = self._room(rows * pitch)
        if pitch != run_bytes and self._zeros != (run_bytes, pitch):
            scratch.fill(0)
        self._zeros = run_bytes, pitch
        return scratch

    def _through_scratch(
        self,
        whole: Whole,
        row: Sequence[SummedBox],
        along: int | None,
        extents: Sequence[int],
        outer: Sequence[int],
        run_bytes: int,
    ) -> Remainders:
        """Copy runs to scratch memory, many at a time, with zeros between them if these are few."""
        from awscrt.checksums import crc64nvme

        *around, last = outer
        count, step = extents[last], whole.strides[last]
        filled = step - run_bytes <= CALL_BYTES and step <= SCRATCH_BYTES
        pitch = step if filled else run_bytes
        rows = min(count, max(1, SCRATCH_BYTES // pitch))
        scratch = self._room_for_runs(rows, run_bytes, pitch)
        strides = [*whole.strides[:last], pitch, *whole.strides[last + 1 :]]
        shape = [1 if dim in around else extent for dim, extent in enumerate(extents)]
        sources = [(_array(piece), _columns(piece, row[0], along)) for piece in row]
        where = [slice(None)] * len(extents)
        memory, checksums = scratch.data, []
        for index in product(*(range(extents[dim]) for dim in around)):
            for dim, at in zip(around, index, strict=True):
                where[dim] = slice(at, at + 1)
            checksum = ALL_BITS
            for start in range(0, count, rows):
                shape[last] = here = min(rows, count - start)
                where[last] = slice(start, start + here)
                view = np.ndarray(shape, whole.dtype, scratch, 0, strides)
                for array, columns in sources:
                    _copy(array[tuple(where)], view[columns])
                if filled:
                    nbytes = here * pitch if start + here < count else (here - 1) * pitch + run_bytes
                    checksum = crc64nvme(memory[:nbytes], checksum)
                else:
                    runs = (memory[at : at + run_bytes] for at in range(0, here * pitch, pitch))
                    checksums += [crc64nvme(run, ALL_BITS) for run in runs]
            if filled:
                checksums.append(checksum)
        return _remainders(checksums, [extents[dim] for dim in (around if filled else outer)])

    def _long_runs(self, whole: Whole, piece: SummedBox, outer: Sequence[int]) -> Remainders:
        """Copy each run to scratch memory, block by block."""
        from awscrt.checksums import crc64nvme

        self._zeros = None
        inner = outer[-1] + 1 if outer else 0
        array, checksums = _array(piece), []
        for index in product(*map(range, piece.extents[:inner])):
            checksum, run = ALL_BITS, array[index] if index else array
            for block in blocks(piece.extents[inner:], max(1, SCRATCH_BYTES // whole.dtype.itemsize)):
                values = run[block]
                view = np.ndarray(values.shape, whole.dtype, self._room(values.size * whole.dtype.itemsize))
                _copy(values, view)
                checksum = crc64nvme(view.reshape(-1).view(np.uint8).data, checksum)
            checksums.append(checksum)
        return _remainders(checksums, [piece.extents[dim] for dim in outer])


def _each_run(piece: SummedBox, strides: Sequence[int], counts: Sequence[int], run_bytes: int) -> Remainders:
    """The remainder of every run, where it is."""
    from awscrt.checksums import crc64nvme

    starts = [piece.byte_offset]
    for count, stride in zip(counts, strides, strict=True):
        starts = [start + number * stride for start in starts for number in range(count)]
    memory = piece.buffer.data
    return _remainders([crc64nvme(memory[at : at + run_bytes], ALL_BITS) for at in starts], counts)


def _remainders(checksums: Sequence[int], shape: Sequence[int]) -> Remainders:
    """Remainders of messages whose checksums began with all bits set."""
    return (np.array(checksums, dtype=np.uint64) ^ np.uint64(ALL_BITS)).reshape(shape)


def _columns(piece: SummedBox, first: SummedBox, along: int | None) -> tuple[slice, ...]:
    """Where a piece is in a row that begins with ``first``."""
    if along is None:
        return ()
    start = piece.offset[along] - first.offset[along]
    return *[slice(None)] * along, slice(start, start + piece.extents[along])


def _array(piece: SummedBox) -> Array:
    return np.ndarray(piece.extents, piece.dtype, piece.buffer, piece.byte_offset, piece.strides)


def _copy(values: Array, target: Array) -> None:
    """Copy a box to one of the same shape, and cast it if the dtypes differ."""
    if values.dtype == target.dtype:
        copy_box(values, target)
    else:
        cast_box(values, target, in_range=False)
