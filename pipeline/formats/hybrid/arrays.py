"""The arrays that the files of a cell hold, as columns: there may be hundreds of thousands of them."""

from __future__ import annotations

from array import array as numbers_of
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from paddle_reshard.pipeline.core.geometry import Shape
from paddle_reshard.pipeline.core.tensor_columns import Identities, Identity, Numbered
from paddle_reshard.pipeline.core.tensors import DType, dtype_of_code
from paddle_reshard.storage.files.paddle_pickle import ArrayRef, SplitArray

Array = ArrayRef | SplitArray


class StoredArray(NamedTuple):
    """One array of one rank's file; a tuple, because very many are made."""

    shard: int
    path: str
    array: Array
    copy: int = 0
    """Which of several copies of the tensor it belongs to, each of which has its own shards."""

    def dtype(self) -> DType:
        """What its elements are."""
        return dtype_of_code(self.array.dtype, self.path)


class ArrayColumns:
    """Arrays without their names as columns, and any other values among them."""

    __slots__ = ("_kind", "_kinds", "_offset", "_others")

    def __init__(self) -> None:
        self._kinds: Numbered[tuple[str, Shape, Shape | None]] = Numbered()
        self._kind = numbers_of("i")  # -1: another value
        self._offset = numbers_of("q")  # of the payload, or the index in ``_others``
        self._others: list[Any] = []

    def append(self, value: object) -> None:
        """Add a value; an array is kept without its name."""
        if isinstance(value, ArrayRef):
            self._kind.append(self._kinds.number((value.dtype, value.shape, value.axes)))
            self._offset.append(value.byte_offset)
        else:
            self._kind.append(-1)
            self._offset.append(len(self._others))
            self._others.append(value)

    def get(self, row: int, name: str | None = None) -> Any:
        """The value of a row; an array is given this name."""
        if self._kind[row] < 0:
            return self._others[self._offset[row]]
        return ArrayRef(self._offset[row], *self._kinds.values[self._kind[row]], name)

    def __len__(self) -> int:
        return len(self._kind)


class StoredArrays(Mapping[Identity, list[StoredArray]]):
    """(structured key, state) → arrays, without their names, by ascending copy and shard; made when looked at."""

    __slots__ = ("_arrays", "_before", "_identities", "_last", "_place", "_places")

    def __init__(self) -> None:
        self._identities = Identities()
        self._last = numbers_of("i")  # of each identity: its last array
        self._before = numbers_of("i")  # of each array: the one before it of the same identity, -1 for none
        self._places: Numbered[tuple[int, int, str]] = Numbered()  # (copy, shard, path)
        self._place = numbers_of("i")
        self._arrays = ArrayColumns()

    def add(self, key: str, state: str, stored: StoredArray) -> str | None:
        """Add one more array of a tensor; returns the file of the one that was added before it, if there is one."""
        shard, path, array, copy = stored
        row, before = len(self._place), -1
        number = self._identities.number(key, state)
        if number == len(self._last):
            self._last.append(row)
        else:
            before, self._last[number] = self._last[number], row
        self._before.append(before)
        self._place.append(self._places.number((copy, shard, path)))
        self._arrays.append(array)
        return None if before < 0 else self._places.values[self._place[before]][2]

    def renamed(self, keys: Mapping[str, str], states: Mapping[str, str]) -> StoredArrays:
        """The same arrays under other structured keys, or as other states."""
        renamed = StoredArrays()
        for (key, state), arrays in self.entries():
            for stored in arrays:
                renamed.add(keys.get(key, key), states.get(state, state), stored)
        return renamed

    def __getitem__(self, identity: Identity) -> list[StoredArray]:
        number = self._identities.find(*identity)
        if number is None:
            raise KeyError(identity)
        return self._of(number)

    def entries(self) -> Iterator[tuple[Identity, list[StoredArray]]]:
        """All items; faster than one by one."""
        for number, identity in enumerate(self._identities.identities()):
            yield identity, self._of(number)

    def _of(self, number: int) -> list[StoredArray]:
        arrays = []
        row = self._last[number]
        while row >= 0:
            copy, shard, path = self._places.values[self._place[row]]
            arrays.append(StoredArray(shard, path, self._arrays.get(row), copy))
            row = self._before[row]
        if len(arrays) > 1:
            arrays = sorted(reversed(arrays), key=lambda stored: (stored.copy, stored.shard))
        return arrays

    def __contains__(self, identity: object) -> bool:
        return (
            isinstance(identity, tuple)
            and len(identity) == 2
            and self._identities.find(*identity) is not None
        )

    def __iter__(self) -> Iterator[Identity]:
        return self._identities.identities()

    def __len__(self) -> int:
        return len(self._identities)
