"""What files of ranks hold of a tensor, by slicing it with NumPy, is where its fragments say."""

from __future__ import annotations

from math import prod

import numpy as np
import pytest

from paddle_reshard.pipeline.core.tensors import dtype_named
from paddle_reshard.pipeline.model.placement import ArrayKind, JoinedCut, Placements, TensorCut

FLOAT32 = dtype_named("float32")
HEADER_BYTES = 24


def piece(whole: np.ndarray, cut: TensorCut, rank: int) -> np.ndarray:
    """A rank's share of each fused part, one after the other."""
    if cut.dim is None:
        return whole
    ends = np.cumsum(cut.shares)[:-1] * (whole.shape[cut.dim] // sum(cut.shares))
    parts = np.split(whole, ends, axis=cut.dim)
    return np.concatenate([np.split(part, cut.tp, axis=cut.dim)[rank] for part in parts], axis=cut.dim)


@pytest.mark.parametrize("axes", [None, (1, 0)], ids=["C", "F"])
@pytest.mark.parametrize("slices", [None, ((0, 7), (7, 25), (25, 40))], ids=["whole", "slices"])
@pytest.mark.parametrize(
    ("shape", "cut", "joined"),
    [
        ((6, 6), TensorCut(1, None), False),
        ((12, 3), TensorCut(2, 0), False),
        ((3, 24), TensorCut(2, 1, (2, 1, 1)), False),
        ((24, 2), TensorCut(2, 0, (1, 1)), False),
        ((2, 18), JoinedCut(3, 1, (2, 1)), True),
    ],
    ids=["uncut", "rows", "unequal parts", "equal parts", "joined"],
)
def test_every_element_is_where_its_fragment_says(
    shape: tuple[int, int],
    cut: TensorCut,
    joined: bool,
    slices: tuple[tuple[int, int], ...] | None,
    axes: tuple[int, int] | None,
) -> None:
    """``slices`` of the flattened tensor, of which the last has padding."""
    whole = np.arange(1, prod(shape) + 1, dtype=np.float32).reshape(shape)
    pieces = [piece(whole, cut, rank) for rank in range(cut.tp)]
    ranks = [np.concatenate(pieces, axis=cut.dim)] if joined else pieces
    files: list[bytes] = []
    placements = Placements()
    for rank, local in enumerate(ranks):
        flat = local.T.ravel() if axes else local.ravel()
        for flat_range in slices if slices and not axes else (None,):
            start, stop = flat_range or (0, flat.size)
            stored = np.zeros(stop - start, dtype=np.float32)
            stored[: max(0, flat.size - start)] = flat[start:stop]
            kind = placements.kind(ArrayKind(local.shape, cut, 4, flat_range, axes))
            placements.add(kind, rank, 0, len(files), HEADER_BYTES, FLOAT32, 0)
            files.append(bytes(HEADER_BYTES) + stored.tobytes())
    found = np.zeros(shape, dtype=np.float32)
    for row in placements.fragments().rows():
        offset, extents, strides = (
            tuple(row[name][:2].tolist()) for name in ("offset", "extents", "strides")
        )
        content = files[row["file"]]
        box = np.ndarray(extents, "<f4", content, int(row["byte_base"]), strides)
        found[tuple(slice(o, o + e) for o, e in zip(offset, extents, strict=True))] += box
    assert np.array_equal(found, whole)
