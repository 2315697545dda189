"""The catalog: the location of every element of every tensor.

The catalog consists of columns, not objects: a row of ``Fragments`` is a strided box with a location in a file. The
right half of a bfloat16 matrix of 8 rows and 6 columns, stored from byte 128 of its file, is one row::

    tensor 4, file 1, byte_base 128, offset (0, 3), extents (8, 3), strides (6, 2)

The columns are NumPy arrays, because the planner also runs inside training jobs that cannot import pyarrow.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from paddle_reshard.pipeline.core.columns import Columns
from paddle_reshard.pipeline.core.errors import CheckpointError, CoverageError
from paddle_reshard.pipeline.core.geometry import MAX_DIMS, Boxes, Shape, by_tensor, meeting_pairs, padded
from paddle_reshard.pipeline.core.numbers import Ints
from paddle_reshard.pipeline.core.sorting import distinct
from paddle_reshard.pipeline.core.tensors import DTYPES, EMA_PARAM, MASTER_WEIGHT, PARAM, Cast, DType

if TYPE_CHECKING:
    import numpy.typing as npt

    from paddle_reshard.pipeline.core.mixture import Mixture
from paddle_reshard.pipeline.core.tensor_columns import TensorIndex, Tensors

FRAGMENT = np.dtype(
    [
        ("tensor", np.int32),  # index into Catalog.tensors
        ("file", np.int32),  # index into Catalog.files
        ("dtype", np.int8),  # index into DTYPES: how the bytes are stored
        ("replica", np.int16),  # 0: the copy that counts; n: the n-th other copy of the same box
        ("byte_base", np.int64),  # of the box's first element in the file
        ("offset", np.int64, (MAX_DIMS,)),  # of the box in the tensor, in elements
        ("extents", np.int64, (MAX_DIMS,)),  # of the box, in elements
        ("strides", np.int64, (MAX_DIMS,)),  # in bytes, from one element to the next along each dim
    ]
)


ITEMSIZES = np.array([dtype.itemsize for dtype in DTYPES], dtype=np.int64)
"""Bytes of an element of each of ``DTYPES``."""


class Fragments(Columns):
    """Fragments, an array for each field of ``FRAGMENT``. They take 15 to 50 bytes each instead of 115."""

    DTYPE = FRAGMENT

    __slots__ = ()


FragmentRow = tuple[int, int, int, int, int, Shape, Shape, Shape]


@dataclass(frozen=True, slots=True)
class File:
    """An object that holds or will hold fragments. ``path`` is relative to the checkpoint."""

    path: str
    size_bytes: int


@dataclass(frozen=True)
class Catalog:
    """All fragments of a checkpoint.

    ``implied`` maps a tensor without fragments to the tensor that the format defines it as a cast of: a bfloat16
    parameter to its master weight. ``mixtures`` are tensors that are computed from others.
    """

    tensors: Tensors
    files: tuple[File, ...]
    fragments: Fragments
    implied: Mapping[int, int]
    mixtures: Mapping[int, Mixture] = field(default_factory=dict)
    borrowed: int = 0
    """Number of tensors at the end that are only terms of mixtures, and not part of the checkpoint."""

    def __post_init__(self) -> None:
        if not isinstance(self.fragments, Fragments):
            raise TypeError("fragments must be Fragments")
        self.fragments.freeze()

    def index(self) -> TensorIndex:
        """``(key, state)`` → index into ``tensors``; without aliases."""
        return TensorIndex(self.tensors)

    def only(self, chosen: Sequence[int]) -> Catalog:
        """The catalog of the ``chosen`` tensors, in this order; ``implied`` keeps pairs of which both are chosen.

        The terms of a chosen mixture must be chosen too, and borrowed tensors last.
        """
        first_borrowed = len(self.tensors) - self.borrowed
        borrowed = sum(tensor >= first_borrowed for tensor in chosen)
        if any(tensor >= first_borrowed for tensor in chosen[: len(chosen) - borrowed]):
            raise ValueError("borrowed tensors must be chosen last")
        new_index = np.full(len(self.tensors), -1, dtype=np.int32)
        new_index[list(chosen)] = np.arange(len(chosen))
        fragments = self.fragments.copy()
        fragments["tensor"] = new_index[fragments["tensor"]]
        implied = {int(new_index[t]): int(new_index[m]) for t, m in self.implied.items()}
        return Catalog(
            Tensors(self.tensors[tensor] for tensor in chosen),
            self.files,
            fragments[fragments["tensor"] >= 0],
            {tensor: master for tensor, master in implied.items() if min(tensor, master) >= 0},
            {
                int(new_index[mixed]): replace(
                    mixture,
                    terms=tuple(replace(term, tensor=int(new_index[term.tensor])) for term in mixture.terms),
                )
                for mixed, mixture in self.mixtures.items()
                if new_index[mixed] >= 0
            },
            borrowed,
        )

    def casts(self) -> frozenset[Cast]:
        """Pairs of stored dtype and tensor dtype that differ."""
        wanted = self.tensors.dtypes.astype(np.int64)
        stored = self.fragments["dtype"].astype(np.int64)
        pairs = distinct(stored * len(DTYPES) + wanted[self.fragments["tensor"]]).tolist()
        named = ((DTYPES[pair // len(DTYPES)].name, DTYPES[pair % len(DTYPES)].name) for pair in pairs)
        return frozenset((stored_as, becomes) for stored_as, becomes in named if stored_as != becomes)

    def stored(self, tensor: int) -> Fragments:
        """The fragments of a tensor, or of the tensor that it is a cast of."""
        source = self.implied.get(tensor, tensor)
        return self.fragments[self.fragments["tensor"] == source]


def fragment_rows(rows: Sequence[FragmentRow]) -> Fragments:
    """Columns from rows ``(tensor, file, dtype, replica, byte_base, offset, extents, strides)``."""
    return Fragments.of_rows(np.array(list(rows), dtype=FRAGMENT))


def fragment_row(
    tensor: int,
    file: int,
    dtype: DType,
    replica: int,
    byte_base: int,
    offset: Sequence[int],
    extents: Sequence[int],
    strides: Sequence[int],
) -> FragmentRow:
    """One row, its boxes padded to ``MAX_DIMS``."""
    return (
        tensor,
        file,
        DTYPES.index(dtype),
        replica,
        byte_base,
        padded(offset, 0),
        padded(extents, 1),
        padded(strides, 0),
    )


def wide_dims(*boxes: Columns) -> list[int]:
    """The dims along which a box of any of these columns may have more than one element."""
    return [dim for dim in range(MAX_DIMS) if any(rows.single("extents", dim) != 1 for rows in boxes)]


def volumes(boxes: Columns) -> Ints:
    """Elements of each box."""
    elements = np.ones(len(boxes), dtype=np.int64)
    for dim in wide_dims(boxes):
        elements *= boxes.along("extents", dim)
    return elements


def hulls(fragments: Fragments) -> tuple[Ints, Ints]:
    """First byte, and one past the last byte, of each strided box in its file."""
    stop = fragments["byte_base"] + ITEMSIZES[fragments["dtype"]]
    for dim in wide_dims(fragments):
        stop += (fragments.along("extents", dim) - 1) * fragments.along("strides", dim)
    return fragments["byte_base"], stop


def check_catalog(catalog: Catalog) -> None:
    """Check that fragments with replica 0 cover every tensor exactly once, and lie within their files.

    A :class:`CoverageError` names the tensor of the first hole, overlap or box out of bounds, and the files.
    """
    check_bounds(catalog.tensors, catalog.files, catalog.fragments)
    first = catalog.fragments["replica"] == 0
    primary = catalog.fragments if first.all() else catalog.fragments[first]
    check_coverage(catalog.tensors, catalog.files, primary, skip=catalog.implied)


def check_dtypes(tensors: Tensors) -> None:
    """Check that all tensors of an optimizer state have the same dtype, and that master weights are float32.

    Parameters may differ: routers are often float32.
    """
    dtypes = tensors.dtypes
    for state in sorted(tensors.states - {PARAM, EMA_PARAM}):
        of_state = np.array(list(tensors.of_state(state).values()), dtype=np.int64)
        _, first, count = np.unique(dtypes[of_state], return_index=True, return_counts=True)
        rarest, *others = (tensors[int(of_state[index])] for index in first[np.lexsort((first, count))])
        if others:
            raise CheckpointError(
                f"{rarest.label} is {rarest.dtype.name}, {others[-1].label} is {others[-1].dtype.name}: all tensors of "
                "a state must have the same dtype"
            )
        if state == MASTER_WEIGHT and rarest.dtype.name != "float32":
            raise CheckpointError(f"{rarest.label} is {rarest.dtype.name}: master weights must be float32")


def check_bounds(tensors: Tensors, files: Sequence[File], fragments: Fragments) -> None:
    """Check that every box lies within its tensor, and its bytes within its file."""
    shapes, sizes = tensors.shapes, np.array([f.size_bytes for f in files], dtype=np.int64)
    for block in fragments.blocks():
        start, stop = hulls(block)
        outside = (block["offset"] + block["extents"] > shapes[block["tensor"]]).any(axis=1)
        outside |= (block["offset"] < 0).any(axis=1)
        beyond = (start < 0) | (stop > sizes[block["file"]])
        for wrong in filter(np.any, (outside, beyond)):
            at = int(np.argmax(wrong))
            row = block[at : at + 1].rows()[0]
            tensor, file = tensors[row["tensor"]], files[row["file"]]
            detail = (
                f"a piece at {_ints(row['offset'])} of extents {_ints(row['extents'])} lies outside the shape "
                f"{tensor.global_shape}"
                if wrong is outside
                else f"its bytes [{start[at]}, {stop[at]}) lie outside the file of {file.size_bytes} bytes"
            )
            raise CoverageError(tensor.label, detail, (file.path,))


def check_coverage(
    tensors: Tensors,
    files: Sequence[File],
    fragments: Fragments,
    skip: Iterable[int] = (),
) -> None:
    """Check that the boxes of every tensor, except those in ``skip``, are disjoint and cover it."""
    covered = np.bincount(fragments["tensor"], weights=volumes(fragments), minlength=len(tensors))
    wanted = tensors.elements.astype(np.float64)
    wanted[list(skip)] = 0
    number = fragments["tensor"]
    several = fragments[np.bincount(number, minlength=len(tensors))[number] > 1]
    (blocks,) = by_tensor(several["tensor"])
    for alike in map(several.__getitem__, blocks):
        boxes = Boxes(alike["tensor"], alike["offset"], alike["extents"])
        i, j = meeting_pairs(boxes, boxes)
        overlaps = np.flatnonzero(i < j)
        if len(overlaps):
            first, second = alike[np.array([i[overlaps[0]], j[overlaps[0]]])].rows()
            raise CoverageError(
                tensors[first["tensor"]].label,
                f"two pieces overlap: at {_ints(first['offset'])} of extents {_ints(first['extents'])}, and at "
                f"{_ints(second['offset'])} of extents {_ints(second['extents'])}",
                (files[first["file"]].path, files[second["file"]].path),
            )
    wrong = np.flatnonzero(covered != wanted)
    if len(wrong):
        tensor = int(wrong[0])
        paths = sorted({files[f].path for f in fragments[fragments["tensor"] == tensor]["file"]})
        raise CoverageError(
            tensors[tensor].label,
            f"{int(covered[tensor])} of {prod(tensors[tensor].global_shape)} elements are stored",
            tuple(paths),
        )


def _ints(values: npt.NDArray[Any]) -> Shape:
    return tuple(int(v) for v in values)
