"""Which box of the logical tensor is this stored array, and where are its bytes?

One description serves both directions: a source file's arrays become fragments to read, a target file's
slots become fragments to write. Two steps compose: an array is the whole tensor-parallel local tensor or
a slice of its flattening (*pieces*), and the local tensor is one or several boxes of the logical one
(*shards*, several where logical parts are fused).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod

from paddle_reshard.pipeline.catalog import FragmentRow, fragment_row
from paddle_reshard.pipeline.errors import RuleError
from paddle_reshard.pipeline.geometry import (
    MAX_DIMS,
    Shape,
    boxes_of_flat_range,
    column_major_strides,
    row_major_strides,
)
from paddle_reshard.pipeline.tensors import DType


@dataclass(frozen=True, slots=True)
class TensorCut:
    """How tensor parallelism cuts one tensor: ``tp`` ranks along ``dim``, each of ``parts`` fused parts."""

    tp: int
    dim: int | None
    parts: int = 1

    def local_shape(self, key: str, global_shape: Shape) -> Shape:
        """Shape of one rank's piece.

        Raises
        ------
        RuleError
            Where the extent does not divide.
        """
        if self.dim is None or self.tp == 1:
            return global_shape
        extent = global_shape[self.dim] if self.dim < len(global_shape) else 0
        if extent == 0 or extent % (self.tp * self.parts):
            what = f"{self.parts} fused parts × " if self.parts > 1 else ""
            raise RuleError(
                key, f"dim {self.dim} of shape {global_shape} does not divide into {what}tp={self.tp} pieces"
            )
        return (*global_shape[: self.dim], extent // self.tp, *global_shape[self.dim + 1 :])

    def global_shape(self, key: str, local_shape: Shape) -> Shape:
        """Shape of the logical tensor of which every rank holds ``local_shape``."""
        if self.dim is None or self.tp == 1:
            return local_shape
        if self.dim >= len(local_shape) or local_shape[self.dim] % self.parts:
            raise RuleError(
                key,
                f"a rank's shape {local_shape} has no dim {self.dim} of {self.parts} equal parts for tp to cut",
            )
        extent = local_shape[self.dim] * self.tp
        return (*local_shape[: self.dim], extent, *local_shape[self.dim + 1 :])

    def shards(self, rank: int, local_shape: Shape) -> list[tuple[int, int, int]]:
        """``(start in the local dim, start in the logical dim, length)`` of each of the rank's parts."""
        if self.dim is None or self.tp == 1:
            return []
        length = local_shape[self.dim] // self.parts
        return [(part * length, (part * self.tp + rank) * length, length) for part in range(self.parts)]

    def step(self, local_shape: Shape) -> Shape:
        """How much further along each dim (``MAX_DIMS`` of them) the boxes of each next rank lie."""
        if self.dim is None or self.tp == 1:
            return (0,) * MAX_DIMS
        length = local_shape[self.dim] // self.parts
        return tuple(length if dim == self.dim else 0 for dim in range(MAX_DIMS))


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of a tensor-parallel local tensor with a place in a file."""

    file: int
    byte_base: int
    offset: Shape
    extents: Shape
    strides: Shape


def whole_piece(file: int, byte_offset: int, dtype: DType, shape: Shape, fortran: bool = False) -> Piece:
    """The whole local tensor as one array."""
    order = column_major_strides if fortran else row_major_strides
    return Piece(file, byte_offset, (0,) * len(shape), shape, order(shape, dtype.itemsize))


def flat_pieces(
    file: int, byte_offset: int, dtype: DType, local_shape: Shape, start: int, stop: int
) -> Iterator[Piece]:
    """A 1-D array holding ``[start, stop)`` of the flattened local tensor; what lies beyond it is padding."""
    strides = row_major_strides(local_shape, dtype.itemsize)
    elements = prod(local_shape)
    for offset, extents in boxes_of_flat_range(min(start, elements), min(stop, elements), local_shape):
        first_byte = sum(o * s for o, s in zip(offset, strides, strict=True)) - start * dtype.itemsize
        yield Piece(file, byte_offset + first_byte, offset, extents, strides)


def place(
    pieces: Iterable[Piece],
    cut: TensorCut,
    rank: int,
    local_shape: Shape,
    tensor: int,
    dtype: DType,
    replica: int,
) -> Iterator[FragmentRow]:
    """Rows of the catalog for one rank's pieces of one tensor."""
    shards = cut.shards(rank, local_shape)
    for piece in pieces:
        if not shards:
            yield fragment_row(
                tensor,
                piece.file,
                dtype,
                replica,
                piece.byte_base,
                piece.offset,
                piece.extents,
                piece.strides,
            )
        for local_start, logical_start, length in shards:
            dim = cut.dim or 0
            low = max(piece.offset[dim], local_start)
            high = min(piece.offset[dim] + piece.extents[dim], local_start + length)
            if low >= high:
                continue
            skipped_bytes = (low - piece.offset[dim]) * piece.strides[dim]
            yield fragment_row(
                tensor,
                piece.file,
                dtype,
                replica,
                piece.byte_base + skipped_bytes,
                _with(piece.offset, dim, low - local_start + logical_start),
                _with(piece.extents, dim, high - low),
                piece.strides,
            )


def _with(values: Shape, dim: int, value: int) -> Shape:
    return (*values[:dim], value, *values[dim + 1 :])
