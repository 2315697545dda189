"""Check the arrays of a sharding group and locate them in their tensors.

::

    stage 1 v2                  slices of every flattened tensor: all of them make one copy
    stage 3                     slices of large tensors; every rank holds small ones whole: as many copies
    stage 1 v1, stage 2, none   whole tensors, each on one rank: one copy
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from math import prod
from typing import NamedTuple

from paddle_reshard.pipeline.core.errors import CoverageError
from paddle_reshard.pipeline.core.geometry import Shape
from paddle_reshard.pipeline.core.tensors import EMA_PARAM, PARAM
from paddle_reshard.pipeline.formats.hybrid.arrays import StoredArray
from paddle_reshard.pipeline.formats.hybrid.ranks import StoredCell
from paddle_reshard.pipeline.formats.reading import not_a_number
from paddle_reshard.pipeline.formats.sharding import not_of_these_ranks
from paddle_reshard.storage.files.paddle_pickle import ArrayRef


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
    slices: Mapping[str, Mapping[int, tuple[int, int]]]
    """Key of a tensor that sharding cuts → rank → range of the flattened, padded tensor that it must hold."""

    listed_twice: frozenset[str] = frozenset()
    """Keys of parameters that have two places in the list of the optimizer, each of which gives it to a rank."""

    def copies(
        self, cell: StoredCell, key: str, state: str, arrays: list[StoredArray]
    ) -> Iterator[tuple[int, list[LocatedArray]]]:
        """Each copy of a tensor, as its arrays are numbered, and where these lie as the strategy has it."""
        copies = [arrays]
        if len(arrays) > 1:
            copies = [list(of_copy) for _, of_copy in groupby(arrays, key=lambda stored: stored.copy)]
        for of_group in copies:
            if key in self.slices and not whole_in_model_state(state):
                yield of_group[0].copy, list(self._located_slices(key, state, of_group, self.slices[key]))
                continue
            self._check_holders(key, state, of_group)
            for stored in of_group:
                self._check_whole(cell, key, state, stored)
                yield stored.copy, list(_located_array(stored, None))

    def _check_holders(self, key: str, state: str, arrays: list[StoredArray]) -> None:
        """Check how many ranks hold the whole of a tensor; each has a copy."""
        in_model_state = whole_in_model_state(state)
        if self.strategy == "stage3" and not in_model_state:
            problem = (
                f"{len(arrays)} of {self.degree} ranks hold it; stage 3 keeps uncut tensors on every rank"
            )
            fits = len(arrays) == self.degree
        else:
            problem = f"several ranks of a sharding group hold it, under {self.strategy} only one may"
            fits = len(arrays) == 1 or (in_model_state and key in self.listed_twice)
        if not fits:
            raise CoverageError(f"{key} ({state})", problem, tuple(stored.path for stored in arrays))

    def _check_whole(self, cell: StoredCell, key: str, state: str, stored: StoredArray) -> None:
        """Check that an array has the shape of the tensor, and lies on the rank that ``model_meta.json`` names."""
        shape = cell.shapes[key]
        # A buffer has an average as its parameter would, and no optimizer, so that no rank is named.
        unnamed = key not in cell.owners and (state == EMA_PARAM or not cell.owners)
        if state != PARAM and not unnamed and cell.owners.get(key) != stored.shard:
            says = f"says rank {cell.owners[key]}" if key in cell.owners else "says no rank"
            raise CoverageError(
                f"{key} ({state})", f"param2rank {says} holds it, not this file", (stored.path,)
            )
        if stored.array.shape != shape:
            raise CoverageError(
                f"{key} ({state})",
                f"stored with shape {stored.array.shape}, under {self.strategy} a rank's whole tensor has {shape}",
                (stored.path,),
            )

    def _located_slices(
        self, key: str, state: str, arrays: list[StoredArray], expected: Mapping[int, tuple[int, int]]
    ) -> Iterator[LocatedArray]:
        held = {stored.shard: stored.array.shape for stored in arrays}
        wanted = {rank: (stop - start,) for rank, (start, stop) in expected.items()}
        if held != wanted:
            raise CoverageError(
                f"{key} ({state})",
                not_of_these_ranks(held, wanted),
                tuple(stored.path for stored in arrays),
            )
        for stored in arrays:
            start, stop = expected[stored.shard]
            yield from _located_array(stored, (start, stop))


def one_number(key: str, state: str, stored: StoredArray) -> ArrayRef:
    """The array of a state that is a single number per parameter; one with more elements is refused."""
    array = stored.array
    if not isinstance(array, ArrayRef) or prod(array.shape) != 1:
        raise not_a_number(key, state, array.shape, stored.path)
    return array


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
