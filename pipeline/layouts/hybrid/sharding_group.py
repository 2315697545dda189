"""Check the arrays of a sharding group and locate them in their tensors.

::

    stage 1 v2                  slices of every flattened tensor: all of them make one copy
    stage 3                     slices of large tensors; every rank holds small ones whole: as many copies
    stage 1 v1, stage 2, none   whole tensors, each on one rank: one copy

Everything is a function of the arrays' shapes and files.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from math import prod
from typing import NamedTuple

from paddle_reshard.pipeline.core.errors import CoverageError
from paddle_reshard.pipeline.core.geometry import Shape
from paddle_reshard.pipeline.core.tensors import EMA_PARAM, PARAM, DType
from paddle_reshard.pipeline.layouts.hybrid.arrays import StoredArray
from paddle_reshard.pipeline.layouts.hybrid.ranks import Cell
from paddle_reshard.pipeline.layouts.padding import padded_elements, stage3_slice_elements
from paddle_reshard.storage.formats.paddle_pickle import ArrayRef


class LocatedArray(NamedTuple):
    """An array in a file."""

    path: str
    byte_offset: int
    flat: tuple[int, int] | None
    """Range of elements of the flattened tensor; ``None``: the whole tensor."""
    axes: Shape | None
    """Dims in the order of the payload, slowest first, as :attr:`ArrayRef.axes`."""


@dataclass(frozen=True, slots=True)
class ShardingGroup:
    """A sharding group, whose ranks share the tensors of a cell."""

    strategy: str
    degree: int
    """Number of ranks."""

    def copies(
        self, cell: Cell, key: str, state: str, arrays: list[StoredArray]
    ) -> Iterator[list[LocatedArray]]:
        """The located arrays of each copy of a tensor.

        Raises
        ------
        CoverageError
            If the arrays are not those of a group with this strategy.
        """
        for _, of_copy in groupby(arrays, key=lambda stored: stored.copy):
            for copy in self._copies_of_group(cell, key, state, list(of_copy)):
                yield list(self._located(cell, key, state, copy))

    def _flat(self, cell: Cell, key: str, state: str) -> bool:
        """Whether the ranks of a sharding group hold slices of the flattened tensor."""
        if whole_in_model_state(state):
            return False
        return self.strategy == "stage1v2" or (self.strategy == "stage3" and key in cell.sliced)

    def _copies_of_group(
        self, cell: Cell, key: str, state: str, arrays: list[StoredArray]
    ) -> list[list[StoredArray]]:
        if self._flat(cell, key, state):
            return [arrays]
        if self.strategy == "stage3" and not whole_in_model_state(state):
            if len(arrays) != self.degree:
                raise CoverageError(
                    f"{key} ({state})",
                    f"{len(arrays)} of {self.degree} ranks hold it; stage 3 keeps uncut tensors on every rank",
                    tuple(stored.path for stored in arrays),
                )
            return [[stored] for stored in arrays]
        if len(arrays) > 1:
            raise CoverageError(
                f"{key} ({state})",
                f"several ranks of a sharding group hold it, under {self.strategy} only one may",
                tuple(stored.path for stored in arrays),
            )
        return [arrays]

    def _located(self, cell: Cell, key: str, state: str, arrays: list[StoredArray]) -> Iterator[LocatedArray]:
        """The located arrays of a single copy."""
        shape = cell.shapes[key]
        if self._flat(cell, key, state):
            yield from self._located_slices(cell, key, state, arrays)
            return
        (stored,) = arrays
        if state != PARAM and cell.owners.get(key, stored.shard) != stored.shard:
            raise CoverageError(
                f"{key} ({state})",
                f"param2rank says rank {cell.owners[key]} holds it, not this file",
                (stored.path,),
            )
        if stored.array.shape != shape:
            raise CoverageError(
                f"{key} ({state})",
                f"stored with shape {stored.array.shape}, under {self.strategy} a rank's whole tensor has {shape}",
                (stored.path,),
            )
        yield from _located_array(stored, None)

    def _located_slices(
        self, cell: Cell, key: str, state: str, arrays: list[StoredArray]
    ) -> Iterator[LocatedArray]:
        shape = cell.shapes[key]
        label = f"{key} ({state})"
        degree = cell.degrees.get(key, self.degree)
        total = self._padded(prod(shape), cell.dtypes[key], degree)
        first = 0
        for rank, stored in enumerate(arrays, start=arrays[0].shard):
            if len(stored.array.shape) != 1:
                raise CoverageError(
                    label,
                    f"a slice has one dim, this has shape {stored.array.shape}",
                    (stored.path,),
                )
            if stored.shard != rank:
                raise CoverageError(
                    label,
                    f"shards {rank - 1} and {stored.shard} hold slices, shard {rank} does not",
                    (stored.path,),
                )
            first += stored.array.shape[0]
        if first != total:
            raise CoverageError(
                label,
                f"its slices have {first} elements together, {prod(shape)} elements padded for {degree} "
                f"ranks are {total}",
                tuple(stored.path for stored in arrays),
            )
        lengths = {stored.array.shape[0] for stored in arrays}
        if self.strategy == "stage3" and (len(arrays) != self.degree or len(lengths) > 1):
            raise CoverageError(
                label,
                f"{len(arrays)} slices of {sorted(lengths)} elements, stage 3 makes {self.degree} equal ones",
                tuple(stored.path for stored in arrays),
            )
        first = 0
        for stored in arrays:
            yield from _located_array(stored, (first, first + stored.array.shape[0]))
            first += stored.array.shape[0]

    def _padded(self, elements: int, dtype: DType, degree: int) -> int:
        """Total number of elements in the slices of a tensor, padding included."""
        if self.strategy == "stage3":
            return stage3_slice_elements(elements, dtype, degree) * degree
        return padded_elements(elements, dtype, degree)


def one_number(key: str, state: str, stored: StoredArray) -> ArrayRef:
    """The array of a state that is a single number per parameter.

    Raises
    ------
    CoverageError
        If it has more elements.
    """
    array = stored.array
    if not isinstance(array, ArrayRef) or prod(array.shape) != 1:
        raise CoverageError(
            f"{key} ({state})", f"shape {array.shape}, one number per parameter is expected", (stored.path,)
        )
    return array


def common_dtype(key: str, state: str, arrays: list[StoredArray]) -> DType:
    """The dtype of all arrays of a tensor.

    Raises
    ------
    CoverageError
        If their dtypes differ.
    """
    dtype = arrays[0].dtype()
    for stored in arrays[1:]:
        if stored.dtype() != dtype:
            raise CoverageError(
                f"{key} ({state})",
                f"stored as {dtype.name} and as {stored.dtype().name}",
                (arrays[0].path, stored.path),
            )
    return dtype


def _located_array(stored: StoredArray, flat: tuple[int, int] | None) -> Iterator[LocatedArray]:
    path, array = stored.path, stored.array
    if isinstance(array, ArrayRef):
        yield LocatedArray(path, array.byte_offset, flat, array.axes if flat is None else None)
        return
    start = 0 if flat is None else flat[0]
    for part in array.parts:
        stop = start + part.shape[0]
        yield LocatedArray(path, part.byte_offset, (start, stop), None)
        start = stop


def whole_in_model_state(state: str) -> bool:
    """Whether a state is stored in model_state files, which sharding does not cut."""
    return state in (PARAM, EMA_PARAM)
