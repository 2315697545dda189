"""Add up the checksums of tensors from strided boxes of them, in whatever order and layout the boxes are in memory.

A *run* is a stretch of a box that is contiguous in the tensor. Long runs are checksummed where they are. Runs with
small gaps between them are copied together with zeros in the gaps, which contribute nothing, and so are boxes whose
dims are in another order in memory; one call then covers many runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import product
from math import prod
from typing import Any, NamedTuple

import numpy as np

from paddle_reshard.pipeline.core.crc import ALL_BITS, Remainders, in_a_row, shifted
from paddle_reshard.pipeline.core.geometry import Shape, row_major_strides
from paddle_reshard.tasks.boxes import blocks, cast_box, copy_box
from paddle_reshard.tasks.device import Box, Buffer

GAP_BYTES = 2048
"""Largest gap that is filled with zeros: a call for each run would take longer."""
SCRATCH_BYTES = 1 << 20
"""Bytes that are copied at a time."""


class Sum(NamedTuple):
    """What a group adds to the checksum of a tensor."""

    tensor: int
    dtype: int
    """Index into ``DTYPES``: a tensor may go to several targets in several dtypes."""
    remainder: int
    elements: int
    """Elements that it covers."""


@dataclass
class Sums:
    """The sums of one group. Not thread-safe."""

    remainders: list[int] = field(default_factory=list)
    distances: list[int] = field(default_factory=list)
    owners: list[tuple[int, int]] = field(default_factory=list)
    """Tensor and dtype of each box."""
    elements: dict[tuple[int, int], int] = field(default_factory=dict)

    def add(
        self,
        owner: tuple[int, int],
        boxes: Sequence[Box],
        offset: Sequence[int],
        shape: Shape,
        dtype: np.dtype[Any],
    ) -> None:
        """Add values at ``offset`` of a tensor of ``shape``, as ``dtype``. All ``boxes`` hold them, in host memory.

        Raises
        ------
        OverflowError
            If a finite value is too large for ``dtype``.
        """
        dims = len(shape)
        logical = row_major_strides(shape, dtype.itemsize)
        whole = (box for box in boxes if box.dtype == dtype and _runs_are_whole(box, logical, dtype.itemsize))
        box = next(whole, None)
        as_stored, box = box is not None, box or boxes[0]
        extents, strides = box.extents[:dims], box.strides[:dims]
        nbytes = prod(shape) * dtype.itemsize

        def note(remainder: int, first: Sequence[int], of: Sequence[int]) -> None:
            last = sum((f + e - 1) * step for f, e, step in zip(first, of, logical, strict=True))
            self.remainders.append(remainder)
            self.distances.append(nbytes - last - dtype.itemsize)
            self.owners.append(owner)

        self.elements[owner] = self.elements.get(owner, 0) + prod(extents)
        if as_stored:
            stored = _Stored(box.buffer, box.byte_offset, extents, strides)
            note(remainder_of_box(stored, logical, dtype.itemsize), offset[:dims], extents)
            return
        stored_values = np.ndarray(extents, box.dtype, box.buffer, box.byte_offset, strides)
        move = copy_box if box.dtype == dtype else cast_box
        for piece in blocks(extents, SCRATCH_BYTES // dtype.itemsize):
            values = stored_values[piece]
            scratch = np.empty(values.shape, dtype)
            move(values, scratch)
            stored = _Stored(scratch.reshape(-1).view(np.uint8), 0, values.shape, scratch.strides)
            starts = [part.start or 0 for part in piece] + [0] * (dims - len(piece))
            first = [o + s for o, s in zip(offset, starts, strict=False)]
            note(remainder_of_box(stored, logical, dtype.itemsize), first, values.shape)

    def found(self) -> tuple[Sum, ...]:
        """The sums of all tensors."""
        of_boxes = shifted(
            np.array(self.remainders, dtype=np.uint64), np.array(self.distances, dtype=np.int64)
        )
        total = dict.fromkeys(self.elements, 0)
        for owner, remainder in zip(self.owners, of_boxes.tolist(), strict=True):
            total[owner] ^= remainder
        return tuple(Sum(*owner, total[owner], self.elements[owner]) for owner in sorted(total))


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


def _runs_are_whole(box: Box, logical: Sequence[int], itemsize: int) -> bool:
    """Whether each run of a box is contiguous in memory."""
    _, outer = _run(box.extents[: len(logical)], logical, itemsize)
    first = outer[-1] + 1 if outer else 0
    return all(
        box.extents[dim] == 1 or box.strides[dim] == logical[dim] for dim in range(first, len(logical))
    )


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
    found, distances = [], []
    for index in product(*map(range, around)):
        start = stored.byte_offset + sum(i * stride for i, stride in zip(index, strides, strict=False))
        for first in range(0, count, rows):
            here = min(rows, count - first)
            at = start + first * strides[-1]
            scratch[:here, :run_bytes] = np.ndarray(
                (here, run_bytes), np.uint8, stored.buffer, at, (strides[-1], 1)
            )
            found.append(crc64nvme(flat[: (here - 1) * step + run_bytes], ALL_BITS))
            distances.append((count - first - here) * step)
    values = np.array(found, dtype=np.uint64) ^ np.uint64(ALL_BITS)
    values = shifted(values, np.array(distances, dtype=np.int64)).reshape(*around, -1)
    return np.asarray(np.bitwise_xor.reduce(values, axis=-1))
