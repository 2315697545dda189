"""Merge LoRA into its base model while the base is read: its files appear with the merged weights in them.

Planning and moving then work as with any source, range by range.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from threading import Lock
from typing import Any

import numpy as np
import numpy.typing as npt

from paddle_reshard.pipeline.core.catalog import Fragments, hulls
from paddle_reshard.pipeline.core.errors import CheckpointError
from paddle_reshard.pipeline.core.geometry import Shape
from paddle_reshard.storage.store import Read, ReadRange, Source
from paddle_reshard.storage.views import ComputedSource
from paddle_reshard.tasks.cast import Floats, bfloat16_bits, widened

BLOCK_ELEMENTS = 1 << 16
"""Elements of a weight merged at a time: they fit the processor's cache."""
CACHE_BYTES = 32 << 20
"""Size of a worker's cache of adapter matrices, in float32; those of the last weight are always kept."""


@dataclass(frozen=True, slots=True)
class Matrix:
    """A bfloat16 matrix of an adapter, and the files that store it."""

    key: str
    shape: Shape
    fragments: Fragments
    paths: tuple[str, ...]
    """Paths of the files that ``fragments`` refers to by number."""

    def read(self, source: ReadRange) -> Floats:
        """The whole matrix.

        Raises
        ------
        CheckpointError
            If copies differ.
        """
        values = np.zeros(self.shape, dtype=np.uint16)
        rows, (starts, stops) = self.fragments.rows(), hulls(self.fragments)
        for number in np.argsort(rows["replica"], kind="stable").tolist():
            row, first, last = rows[number], int(starts[number]), int(stops[number])
            path = self.paths[row["file"]]
            buffer = bytearray(last - first)
            source.read_into(path, first, memoryview(buffer))
            extents, strides = row["extents"][:2].tolist(), row["strides"][:2].tolist()
            stored: npt.NDArray[Any] = np.ndarray(extents, "<u2", buffer, 0, strides)
            box = tuple(slice(o, o + n) for o, n in zip(row["offset"].tolist(), extents, strict=False))
            if not row["replica"]:
                values[box] = stored
            elif not np.array_equal(values[box], stored):
                raise CheckpointError(
                    f"{self.key}: the copy in {path} differs from the first; cannot tell which to merge"
                )
        return widened(values)


@dataclass(frozen=True, slots=True)
class Addend:
    """What is added to a weight ``[in, out]``: the product ``a @ b`` times ``scaling``."""

    a: Matrix
    b: Matrix
    scaling: float


def merge_block(weight: npt.NDArray[np.uint16], a: Floats, b: Floats, scaling: float) -> None:
    """Replace a block of ``weight`` with ``weight + (a @ b) · scaling``.

    Computed in float32 and rounded once, to bfloat16, as PaddleFormers' export does (1.2 ``mergekit/merge_model.py``).
    The sum over the rank runs from first to last. Products of bfloat16 values are exact in float32, so the result does
    not depend on whether a processor rounds them before adding.
    """
    product = np.zeros(weight.shape, dtype=np.float32)
    term = np.empty_like(product)
    for number in range(a.shape[1]):
        np.multiply(a[:, number, None], b[None, number], out=term)
        np.add(product, term, out=product)
    np.multiply(product, np.float32(scaling), out=product)
    np.add(widened(weight), product, out=product)
    weight[...] = bfloat16_bits(product)


class _MatrixCache:
    """Recently read matrices; pickled empty."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._pairs: OrderedDict[int, tuple[Floats, Floats]] = OrderedDict()

    def __reduce__(self) -> tuple[type[_MatrixCache], tuple[()]]:
        return _MatrixCache, ()

    def get(self, tensor: int, addend: Addend, source: ReadRange) -> tuple[Floats, Floats]:
        """Both matrices of a weight."""
        with self._lock:
            pair = self._pairs.get(tensor)
        if pair is None:
            pair = addend.a.read(source), addend.b.read(source)
        with self._lock:
            self._pairs[tensor] = pair
            self._pairs.move_to_end(tensor)
            while (
                len(self._pairs) > 1
                and sum(a.nbytes + b.nbytes for a, b in self._pairs.values()) > CACHE_BYTES
            ):
                self._pairs.popitem(last=False)
        return pair


@dataclass(frozen=True)
class MergedSource(ComputedSource):
    """A base model that reads as if its adapter were merged into it."""

    inner: Source
    """Files of the base and of the adapter."""
    addends: Mapping[int, Addend]
    """Number of a weight → what is added to it."""
    fragments: Mapping[str, Fragments]
    """Path of a file of the base → fragments of the changed weights in it, all two-dimensional bfloat16."""
    cache: _MatrixCache = field(default_factory=_MatrixCache, compare=False, repr=False)

    def read_many(self, reads: Sequence[Read]) -> None:
        """Fill several buffers, merged, with one call to the store."""
        self.inner.read_many(reads)
        for read in reads:
            self._merge(read.path, read.byte_offset, read.buffer)

    def _merge(self, path: str, byte_offset: int, buffer: memoryview) -> None:
        fragments = self.fragments.get(path)
        if fragments is None:
            return
        first, last = hulls(fragments)
        met = (first < byte_offset + buffer.nbytes) & (last > byte_offset)
        for row in fragments[met]:
            self._merge_box(path, byte_offset, buffer, row)

    def _merge_box(self, path: str, byte_offset: int, buffer: memoryview, row: np.void) -> None:
        """Merge the part of a box that lies in a range of bytes, line by line along the dim with the smaller stride."""
        base, addend = int(row["byte_base"]), self.addends[int(row["tensor"])]
        offset, extents, strides = (row[name][:2].tolist() for name in ("offset", "extents", "strides"))
        a, b = self.cache.get(int(row["tensor"]), addend, self.inner)
        a, b = a[offset[0] : offset[0] + extents[0]], b[:, offset[1] : offset[1] + extents[1]]
        if strides[0] < strides[1]:  # its columns are lines, which are the rows of the transposed product
            a, b, extents, strides = b.T, a.T, extents[::-1], strides[::-1]
        step, line = strides[0], (extents[1] - 1) * strides[1] + 2
        stop = byte_offset + buffer.nbytes
        start = max(0, -(-(byte_offset - base - line + 1) // step)) if step else 0
        end = min(extents[0], -(-(stop - base) // step)) if step else 1
        whole = [n for n in range(start, end) if byte_offset <= base + n * step <= stop - line]
        for number in range(start, end):
            if whole and whole[0] <= number <= whole[-1]:
                continue
            # The range contains only part of this line; merging needs whole elements, so the line is read again.
            at = base + number * step
            piece = bytearray(line)
            self.inner.read_into(path, at, memoryview(piece))
            weight = np.ndarray((1, extents[1]), "<u2", piece, 0, strides)
            _merge_lines(weight, a[number : number + 1], b, addend.scaling)
            low, high = max(at, byte_offset), min(at + line, stop)
            buffer[low - byte_offset : high - byte_offset] = piece[low - at : high - at]
        if whole:
            at = base + whole[0] * step - byte_offset
            weight = np.ndarray((len(whole), extents[1]), "<u2", buffer, at, strides)
            _merge_lines(weight, a[whole[0] : whole[-1] + 1], b, addend.scaling)


def _merge_lines(weight: npt.NDArray[np.uint16], a: Floats, b: Floats, scaling: float) -> None:
    """:func:`merge_block` of several rows at a time."""
    each = max(1, BLOCK_ELEMENTS // max(1, weight.shape[1]))
    for first in range(0, len(weight), each):
        rows = slice(first, first + each)
        merge_block(weight[rows], a[rows], b, scaling)
