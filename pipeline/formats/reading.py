"""What the sources of several formats share: arrays in files become the tensors of a catalog."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np

from paddle_reshard.pipeline.core.catalog import Catalog, File
from paddle_reshard.pipeline.core.errors import CoverageError
from paddle_reshard.pipeline.core.geometry import Shape
from paddle_reshard.pipeline.core.numbers import Ints
from paddle_reshard.pipeline.core.tensor_columns import Tensors
from paddle_reshard.pipeline.core.tensors import EMA_PARAM, PARAM, DType
from paddle_reshard.pipeline.model.placement import ArrayKind, Placements


class Alike(NamedTuple):
    """Columns of many arrays, each a rank's whole piece of a tensor; dtypes and shapes of the tensors are numbers."""

    dtype: Ints
    shape: Ints
    kind: Ints
    rank: Ints
    file: Ints
    byte_offset: Ints

    def of(self, rows: slice) -> Alike:
        """Some of the rows."""
        return Alike(*(column[rows] for column in self))


class TensorCollector:
    """Collects tensors and the arrays that hold them, numbering the copies of each tensor."""

    def __init__(
        self, files: Iterable[File], aliases: Mapping[str, tuple[str, ...]] | None = None, ranks: int = 1
    ) -> None:
        """``aliases`` are those of parameters; ``ranks`` is the number of those that can hold pieces of one tensor."""
        self.files = tuple(files)
        self.tensors = Tensors()
        self.placements = Placements()
        self._file = {file.path: number for number, file in enumerate(self.files)}
        self._aliases = aliases or {}
        self._ranks, self._none = ranks, array("i", [0] * ranks)
        self._copies = array("i")  # that a rank has contributed to, at index ``tensor * ranks + rank``

    def tensor(self, key: str, state: str, dtype: DType, shape: Shape, where: str = "") -> int:
        """The number of a tensor, which is added if it is new.

        A ``CoverageError`` if it is known with another dtype or shape; ``where`` is the file that says so.
        """
        number = self.tensors.find(key, state)
        if number is None:
            aliases = self._aliases.get(key, ()) if state in (PARAM, EMA_PARAM) else ()
            self._copies.extend(self._none)
            return self.tensors.add_as(key, state, dtype, shape, aliases)
        if self.tensors.dtype(number) != dtype or self.tensors.shape(number) != shape:
            tensor = self.tensors[number]
            raise CoverageError(
                tensor.label,
                f"{tensor.dtype.name} {tensor.global_shape} in one place, {dtype.name} {shape} in another",
                (where,),
            )
        return number

    def copy(self, tensor: int, rank: int) -> int:
        """Number of the copy that the next piece of a rank belongs to; 0 is the first.

        A copy is complete once every rank has contributed its piece.
        """
        index = tensor * self._ranks + rank
        self._copies[index] += 1
        return self._copies[index] - 1

    def file(self, path: str) -> int:
        """The number of a file."""
        return self._file[path]

    def place_alike(self, keys: Ints, states: Ints, arrays: Alike) -> bool:
        """Add arrays of tensors, given by the numbers that ``tensors`` has for their keys and states.

        Whether they were added: not if a tensor is known with another dtype or shape. No tensor may be given twice, nor
        one that has aliases.
        """
        tensors = self.tensors.add_alike(keys, states, arrays.dtype, arrays.shape)
        if tensors is None:
            return False
        self._copies.extend(self._none * (len(self.tensors) - len(self._copies) // self._ranks))
        copies, index = np.asarray(self._copies), tensors * self._ranks + arrays.rank
        columns = (
            arrays.kind,
            arrays.rank,
            tensors,
            arrays.file,
            arrays.byte_offset,
            arrays.dtype,
            copies[index],
        )
        self.placements.add_all(columns, len(keys))
        copies[index] += 1
        return True

    def place(
        self, tensor: int, kind: ArrayKind, dtype: DType, rank: int, copy: int, path: str, byte_offset: int
    ) -> None:
        """Add an array of a rank's piece of a tensor."""
        self.place_as(tensor, self.placements.kind(kind), dtype, rank, copy, path, byte_offset)

    def place_as(
        self, tensor: int, kind: int, dtype: DType, rank: int, copy: int, path: str, byte_offset: int
    ) -> None:
        """The same, by the number that ``placements`` has for the kind."""
        self.placements.add(kind, rank, tensor, self._file[path], byte_offset, dtype, copy)

    def catalog(self, implied: Mapping[int, int] | None = None) -> Catalog:
        """All that was added."""
        return Catalog(self.tensors, self.files, self.placements.fragments(), implied or {})


def not_held(key: str, state: str) -> CoverageError:
    """The error for a state that a checkpoint has of other parameters only."""
    return CoverageError(f"{key} ({state})", "no file holds it, but other parameters have it")


def common_dtype(key: str, state: str, arrays: Iterable[tuple[DType, str]]) -> DType:
    """The dtype of all arrays of a tensor, which are given with their files; there is at least one.

    A ``CoverageError`` names two files if their dtypes differ.
    """
    (first, path), *others = arrays
    for dtype, other in others:
        if dtype != first:
            raise CoverageError(
                f"{key} ({state})", f"stored as {first.name} and as {dtype.name}", (path, other)
            )
    return first


def not_a_number(key: str, state: str, shape: Shape, path: str) -> CoverageError:
    """The error for an array of several elements, of a state that is one number for each parameter."""
    return CoverageError(f"{key} ({state})", f"shape {shape}, one number per parameter is expected", (path,))
