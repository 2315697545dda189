"""The arrays that the files of a cell hold, as columns: there may be hundreds of thousands of them."""

from __future__ import annotations

from array import array as numbers_of
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from paddle_reshard.pipeline.core.geometry import Shape
from paddle_reshard.pipeline.core.numbers import Ints
from paddle_reshard.pipeline.core.sorting import order_of
from paddle_reshard.pipeline.core.tensor_columns import Identities, Identity, Numbered
from paddle_reshard.pipeline.core.tensors import DType, dtype_of_code
from paddle_reshard.storage.files.paddle_pickle import ArrayRef, SplitArray

Array = ArrayRef | SplitArray
ArrayKind = tuple[str, Shape, Shape | None]
"""NumPy code, shape and order of dims of an array."""
StoredPlace = tuple[int, int, str]
"""Copy, shard and path, as in :class:`StoredArray`."""


def array_of(value: object) -> Array | None:
    """The array in an entry; the entry may be a ``(name, array)`` tuple, which ``paddle.load`` accepts too."""
    if type(value) is ArrayRef:  # as nearly all are
        return value
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], str):
        value = value[1]
    return value if isinstance(value, ArrayRef | SplitArray) else None


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
        self._kinds: Numbered[ArrayKind] = Numbered()
        self._kind = numbers_of("i")  # -1: another value
        self._offset = numbers_of("q")  # of the payload, or the index in ``_others``
        self._others: list[Any] = []

    def append(self, value: object) -> None:
        """Add a value; an array is kept without its name."""
        self.append_all((value,))

    def append_all(self, values: Iterable[object]) -> None:
        """Add values; faster than one by one."""
        number, kinds, offsets = self._kinds.number, self._kind, self._offset
        for value in values:
            if isinstance(value, ArrayRef):
                kinds.append(number((value.dtype, value.shape, value.axes)))
                offsets.append(value.byte_offset)
            else:
                kinds.append(-1)
                offsets.append(len(self._others))
                self._others.append(value)

    def get(self, row: int, name: str | None = None) -> Any:
        """The value of a row; an array is given this name."""
        if self._kind[row] < 0:
            return self._others[self._offset[row]]
        return ArrayRef(self._offset[row], *self._kinds.values[self._kind[row]], name)

    def of_kinds(self) -> tuple[list[ArrayKind], Ints, Ints]:
        """The kinds of arrays, and for each row the number of its kind and its first byte; -1 for another value."""
        return self._kinds.values, np.array(self._kind), np.array(self._offset)

    def shapes(self) -> list[Shape]:
        """The shape of the array of each row; ``()`` of another value."""
        of_kinds = [shape for _, shape, _ in self._kinds.values]
        shapes = [of_kinds[kind] if kind >= 0 else () for kind in self._kind]
        for row, value in self.others():
            array = array_of(value)
            shapes[row] = () if array is None else array.shape
        return shapes

    def others(self) -> list[tuple[int, Any]]:
        """The rows that are no arrays, and their values."""
        return [(row, self.get(row)) for row in np.flatnonzero(np.array(self._kind) < 0).tolist()]

    def only(self, rows: Ints) -> ArrayColumns:
        """Some of the rows."""
        chosen = ArrayColumns()
        chosen._kinds, chosen._others = self._kinds, self._others
        chosen._kind.frombytes(np.array(self._kind)[rows].tobytes())
        chosen._offset.frombytes(np.array(self._offset)[rows].tobytes())
        return chosen

    def extend(self, other: ArrayColumns) -> None:
        """Add all rows of other columns, of which those that are no arrays may have the array in a tuple."""
        kinds, kind, offset = other.of_kinds()
        if (kind < 0).any():
            for row in range(len(kind)):
                self.append(array_of(other.get(row)))
            return
        numbers = np.array(list(map(self._kinds.number, kinds)), dtype=np.int32)
        self._kind.frombytes(numbers[kind].tobytes())
        self._offset.frombytes(offset.tobytes())

    def __len__(self) -> int:
        return len(self._kind)


class Lone(NamedTuple):
    """Columns of some of the tensors that :class:`StoredArrays` holds, and of the last array of each."""

    kinds: list[ArrayKind]
    places: list[StoredPlace]
    key: Ints
    """Numbers of the key and of the state."""
    state: Ints
    kind: Ints
    """-1: more than one array, or an array of another sort."""
    place: Ints
    byte_offset: Ints

    def of(self, rows: slice) -> Lone:
        """Some of the rows."""
        return Lone(*self[:2], *(column[rows] for column in self[2:]))


class StoredArrays(Mapping[Identity, list[StoredArray]]):
    """(structured key, state) → arrays, without their names, by ascending copy and shard; made when looked at."""

    __slots__ = ("_arrays", "_before", "_identities", "_last", "_place", "_places")

    def __init__(self) -> None:
        self._identities = Identities()
        self._last = numbers_of("i")  # of each identity: its last array
        self._before = numbers_of("i")  # of each array: the one before it of the same identity, -1 for none
        self._places: Numbered[StoredPlace] = Numbered()
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

    def add_file(
        self, keys: Iterable[str], states: Iterable[str], place: StoredPlace, arrays: ArrayColumns
    ) -> int | None:
        """Add the arrays of a file, of which each is given the key and the state.

        If a tensor is in the file twice, nothing is added: returned is the index of the key that is the second.
        """
        of_key, of_state = self._identities.numbers_of_names(keys, states)
        pairs = of_state * len(self._identities.names()[0]) + of_key
        numbers = self._identities.numbers_of(of_key, of_state)
        known, here = numbers >= 0, self._places.number(place)
        twice, order = np.zeros(len(pairs), dtype=np.bool_), order_of(pairs)
        twice[order[1:]] = pairs[order[1:]] == pairs[order[:-1]]
        last = np.array(self._last, dtype=np.int64)[numbers[known]]
        twice[known] |= np.array(self._place)[last] == here
        if twice.any():
            return int(np.argmax(twice))
        numbers[~known] = self._identities.add_identities(of_key[~known], of_state[~known])
        before = np.full(len(pairs), -1, dtype=np.int32)
        before[known] = last
        self._last.extend([0] * (len(self._identities) - len(self._last)))
        np.asarray(self._last)[numbers] = np.arange(len(self._before), len(self._before) + len(pairs))
        self._before.frombytes(before.tobytes())
        self._place.frombytes(np.full(len(pairs), here, dtype=np.int32).tobytes())
        self._arrays.extend(arrays)
        return None

    def names(self) -> tuple[list[str], list[str]]:
        """All keys and all states, in the order of their numbers."""
        return self._identities.names()

    def lone(self, first: int, stop: int) -> Lone:
        """The tensors from one number to another as columns."""
        key, state = self._identities.columns(first, stop)
        last = np.array(self._last[first:stop], dtype=np.int64)
        kinds, kind, byte_offset = self._arrays.of_kinds()
        kind = np.where(np.array(self._before)[last] < 0, kind[last], -1)
        place = np.array(self._place)[last]
        return Lone(kinds, self._places.values, key, state, kind, place, byte_offset[last])

    def states_by_key(self) -> dict[str, tuple[str, ...]]:
        """Key → the states of which there are arrays; keys with the same states share one tuple."""
        return self._identities.states_by_key()

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

    def entries(
        self, first: int = 0, stop: int | None = None
    ) -> Iterator[tuple[Identity, list[StoredArray]]]:
        """All items, or some of them; faster than one by one."""
        for number, identity in enumerate(islice(self._identities.identities(), first, stop), first):
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
