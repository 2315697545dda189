"""Boxes of logical tensors as FlexCheckpoint describes them, and their metadata."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, TypeVar

import numpy as np

from paddle_reshard.pipeline.core.geometry import Shape
from paddle_reshard.pipeline.model.placement import ArrayKind, TensorCut
from paddle_reshard.storage.files.dist_metadata import LOCATION_COLUMNS, PIECE_COLUMNS, DistMetadata

_T = TypeVar("_T", bound=Any)


@dataclass(frozen=True, slots=True)
class Box:
    """A box of a logical tensor, or a range of its flattening."""

    key: str
    """``model.norm.weight.w_0`` for a master weight, ``model.norm.weight`` for a parameter."""
    global_shape: Shape | None
    """``None``: unknown."""
    global_offset: Shape
    local_shape: Shape
    flattened_range: tuple[int, int] | None = None
    """``[start, stop)`` of the flattened local tensor, without padding; ``None``: all of it, in its own shape."""
    dtype: str = "float32"
    """Paddle's name, without ``paddle.``; averages are float32."""

    @classmethod
    def of(cls, metadata: DistMetadata, piece: Sequence[int]) -> Box:
        """The box that a row of ``metadata.pieces`` describes, whatever its dtype."""
        key, _, offset, local, whole, flat = piece
        shapes = metadata.shapes
        start_stop = None if flat < 0 else (shapes[flat][0], shapes[flat][1])
        return cls(
            key=metadata.keys[key],
            global_shape=None if whole < 0 else shapes[whole],
            global_offset=shapes[offset],
            local_shape=shapes[local],
            flattened_range=start_stop,
        )

    @property
    def shape(self) -> Shape:
        """Shape of the stored array."""
        return self.local_shape if self.flattened_range is None else (self.elements,)

    @property
    def elements(self) -> int:
        """Number of values."""
        if self.flattened_range is None:
            return prod(self.local_shape)
        start, stop = self.flattened_range
        return stop - start

    def kind(self, cut: TensorCut, itemsize: int, axes: Shape | None = None) -> ArrayKind:
        """The kind of the stored array, if tensor parallelism cuts the tensor like this."""
        return ArrayKind(self.local_shape, cut, itemsize, self.flattened_range, axes)


def describe_boxes(
    files_of: Mapping[Box, Collection[str]],
    paths: Mapping[str, tuple[str, ...]] | None = None,
    numbered: bool = False,
) -> DistMetadata:
    """Metadata that describe boxes.

    ``files_of`` maps a box to the names of the files that hold it, ``paths`` a key to its path in the nested dict, by
    default ``(key,)``. If ``numbered``, the copies of a box are numbered, from 0 in the order of their files. Paddle's
    loader needs the numbers to tell copies apart, and needs the 0: at another topology it reads no copy with another
    number.
    """
    in_order = sorted(files_of, key=lambda box: (box.key, box.global_offset, box.flattened_range or ()))
    keys, dtypes = _numbers(box.key for box in in_order), _numbers(box.dtype for box in in_order)
    files = _numbers(file for names in files_of.values() for file in names)
    shapes = _numbers(shape for box in in_order for shape in _shapes(box) if shape is not None)
    pieces = [
        (keys[box.key], dtypes[box.dtype], *(-1 if s is None else shapes[s] for s in _shapes(box)))
        for box in in_order
    ]
    locations = [
        (piece, files[file], copy if numbered else -1)
        for piece, box in enumerate(in_order)
        for file, copy in sorted((file, copy) for copy, file in enumerate(files_of[box]))
    ]
    return DistMetadata(
        tuple(keys),
        tuple(dtypes),
        tuple(shapes),
        tuple(files),
        np.array(pieces, dtype=PIECE_COLUMNS),
        np.array(locations, dtype=LOCATION_COLUMNS),
        {key: (key,) if paths is None else paths[key] for key in keys},
    )


def _shapes(box: Box) -> tuple[Shape | None, ...]:
    """Shapes in the order of ``PIECE_COLUMNS``."""
    return box.global_offset, box.local_shape, box.global_shape, box.flattened_range


def _numbers(values: Iterable[_T]) -> dict[_T, int]:
    """Each distinct value, ascending, and its number."""
    return {value: number for number, value in enumerate(sorted(set(values)))}
