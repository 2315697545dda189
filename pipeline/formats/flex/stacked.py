"""Experts that are one tensor: ``[experts, rows, columns]`` in some files, ``[experts * rows, columns]`` in others.

PaddleFleet's trainer writes the parameters of grouped experts with three dims and their optimizer states with two;
before that, and where it saves asynchronously, all have two (``trainer/trainer.py``,
``restore_fused_expert_3d_layout``). Both are the same bytes, and rules describe two dims.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from paddle_reshard.pipeline.core.errors import CoverageError
from paddle_reshard.pipeline.core.geometry import Shape
from paddle_reshard.storage.files.dist_metadata import DistMetadata
from paddle_reshard.storage.files.paddle_pickle import ArrayRef

SHAPES = ("global_offset", "local_shape", "global_shape")
"""Columns of a piece that hold shapes."""


def with_two_dims(path: str, metadata: DistMetadata, stacked: Collection[str]) -> DistMetadata:
    """The same metadata, with the first two of three dims joined where experts lie along the first.

    ``stacked`` are the keys of tensors that hold several experts. A ``CoverageError`` names a piece that ends within an
    expert, which is no box of the two dims.
    """
    shapes = {shape: number for number, shape in enumerate(metadata.shapes)}
    pieces = metadata.pieces.copy()
    for piece in pieces:
        columns = [int(piece[name]) for name in SHAPES]
        key = metadata.keys[int(piece["key"])]
        if min(columns) < 0 or key not in stacked:
            continue
        offset, local, whole = (metadata.shapes[column] for column in columns)
        if len(whole) != 3:
            continue
        if any(offset[1:]) or local[1:] != whole[1:]:
            raise CoverageError(
                key,
                f"a piece of {local} at {offset} of {whole} cuts the {whole[0]} experts themselves, which is not "
                "supported; save with expert parallelism that distributes whole experts",
                (path,),
            )
        for name, shape in zip(
            SHAPES, (_joined(dims, whole) for dims in (offset, local, whole)), strict=True
        ):
            piece[name] = shapes.setdefault(shape, len(shapes))
    return replace(metadata, shapes=tuple(shapes), pieces=pieces)


def arrays_with_two_dims(arrays: Mapping[str, ArrayRef], stacked: Collection[str]) -> dict[str, ArrayRef]:
    """Key → array of a data file, the same way; those in Fortran order stay as they are, and are refused later."""
    return {
        key: replace(array, shape=_joined(array.shape, array.shape))
        if len(array.shape) == 3 and array.axes is None and key in stacked
        else array
        for key, array in arrays.items()
    }


def _joined(shape: Shape, whole: Shape) -> Shape:
    return shape[0] * whole[1], shape[2]
