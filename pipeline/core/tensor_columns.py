"""Very many tensors, stored as columns.

A checkpoint of a mixture of experts has hundreds of thousands of tensors, but few shapes and states. Each tensor takes
four small numbers, and a key is stored once for all its states.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, Generic, TypeVar, overload

import numpy as np

from paddle_reshard.pipeline.core.geometry import MAX_DIMS, Shape, padded
from paddle_reshard.pipeline.core.numbers import Ints
from paddle_reshard.pipeline.core.sorting import distinct
from paddle_reshard.pipeline.core.tensors import DTYPES, DType, Tensor, dtype_number

if TYPE_CHECKING:
    import numpy.typing as npt

Value = TypeVar("Value", bound=Hashable)
Identity = tuple[str, str]
"""Key and state."""


class Numbered(Generic[Value]):
    """Distinct values, numbered in the order in which they are added."""

    __slots__ = ("numbers", "values")

    def __init__(self) -> None:
        self.values: list[Value] = []
        self.numbers: dict[Value, int] = {}

    def number(self, value: Value) -> int:
        """The number of a value, which is added if it is new."""
        number = self.numbers.get(value)
        if number is None:
            number = self.numbers[value] = len(self.values)
            self.values.append(value)
        return number

    def numbers_of(self, values: Iterable[Value]) -> Ints:
        """The numbers of many values; faster than one by one."""
        values = list(values)
        numbers = list(map(self.numbers.get, values))
        if None in numbers:
            new = dict.fromkeys(value for value in values if value not in self.numbers)
            self.numbers.update(zip(new, range(len(self.values), len(self.values) + len(new)), strict=True))
            self.values += new
            numbers = list(map(self.numbers.get, values))
        return np.array(numbers, dtype=np.int64)


class Identities:
    """Pairs of key and state, numbered in the order in which they are added; a key is stored once."""

    __slots__ = ("_key", "_keys", "_numbers", "_state", "_states")

    def __init__(self) -> None:
        self._keys: Numbered[str] = Numbered()
        self._states: Numbered[str] = Numbered()
        self._key, self._state = array("i"), array("h")
        self._numbers: list[array[int]] = []  # by state, then key: number of the pair, or -1

    def number(self, key: str, state: str) -> int:
        """The number of a pair, which is added if it is new: its number is then how many there were."""
        number = self.find(key, state)
        return self.add_identity(key, state) if number is None else number

    def add_identity(self, key: str, state: str) -> int:
        """Add a pair and return its number."""
        number = len(self._key)
        of_key, of_state = self._keys.number(key), self._states.number(state)
        if of_state == len(self._numbers):
            self._numbers.append(array("i"))
        numbers = self._numbers[of_state]
        if of_key < len(numbers):
            numbers[of_key] = number
        else:
            numbers.extend([-1] * (of_key - len(numbers)))
            numbers.append(number)
        self._key.append(of_key)
        self._state.append(of_state)
        return number

    def names(self) -> tuple[list[str], list[str]]:
        """All keys and all states, in the order of their numbers."""
        return self._keys.values, self._states.values

    def columns(self, first: int, stop: int) -> tuple[Ints, Ints]:
        """The numbers of the keys and states of the pairs from one number to another."""
        key, state = self._key[first:stop], self._state[first:stop]
        return np.array(key, dtype=np.int64), np.array(state, dtype=np.int64)

    def numbers_of_names(self, keys: Iterable[str], states: Iterable[str]) -> tuple[Ints, Ints]:
        """The numbers of keys, and of states, each of which is added if it is new."""
        key, state = self._keys.numbers_of(keys), self._states.numbers_of(states)
        self._numbers += (array("i") for _ in range(len(self._states.values) - len(self._numbers)))
        return key, state

    def numbers_of(self, keys: Ints, states: Ints) -> Ints:
        """The numbers of many pairs, given by the numbers of their keys and states; -1 for a pair that is not known."""
        numbers = np.full(len(keys), -1, dtype=np.int64)
        for state in distinct(states).tolist():
            table = np.append(np.array(self._numbers[state], dtype=np.int64), -1)
            of_state = np.flatnonzero(states == state)
            numbers[of_state] = table[np.minimum(keys[of_state], len(table) - 1)]
        return numbers

    def add_identities(self, keys: Ints, states: Ints) -> Ints:
        """Add pairs, none of which may be known, by the numbers of their keys and states; return their own."""
        added = np.arange(len(self._key), len(self._key) + len(keys))
        for state in distinct(states).tolist():
            numbers, of_state = self._numbers[state], states == state
            numbers.extend([-1] * (int(keys[of_state].max()) + 1 - len(numbers)))
            np.asarray(numbers)[keys[of_state]] = added[of_state]
        self._key.frombytes(keys.astype(np.int32).tobytes())
        self._state.frombytes(states.astype(np.int16).tobytes())
        return added

    def states_by_key(self) -> dict[str, tuple[str, ...]]:
        """Key → its states; keys with the same states share one tuple."""
        held = np.zeros(len(self._keys.values), dtype=np.int64)
        np.bitwise_or.at(held, np.array(self._key), 1 << np.array(self._state, dtype=np.int64))
        tuples = {
            bits: tuple(state for number, state in enumerate(self._states.values) if bits >> number & 1)
            for bits in distinct(held).tolist()
        }
        return dict(zip(self._keys.values, map(tuples.__getitem__, held.tolist()), strict=True))

    def __len__(self) -> int:
        return len(self._key)

    def identity(self, number: int) -> Identity:
        """A pair."""
        return self._keys.values[self._key[number]], self._states.values[self._state[number]]

    def identities(self) -> Iterator[Identity]:
        """All pairs; faster than one by one."""
        keys, states = self._keys.values, self._states.values
        return ((keys[key], states[state]) for key, state in zip(self._key, self._state, strict=True))

    def find(self, key: str, state: str) -> int | None:
        """The number of a pair, or ``None``."""
        of_state, of_key = self._states.numbers.get(state), self._keys.numbers.get(key)
        if of_state is None or of_key is None:
            return None
        numbers = self._numbers[of_state]
        if of_key >= len(numbers) or (number := numbers[of_key]) < 0:
            return None
        return number

    def finder(self, state: str) -> Callable[[str], int | None]:
        """The same for one state and many keys; pairs that are added later may be missing."""
        of_state = self._states.numbers.get(state)
        numbers = array("i") if of_state is None else self._numbers[of_state]
        keys, count = self._keys.numbers, len(numbers)

        def find(key: str) -> int | None:
            of_key = keys.get(key, count)
            if of_key >= count or (number := numbers[of_key]) < 0:
                return None
            return number

        return find

    def order(self, numbers: Ints) -> Ints:
        """Indices that sort ``numbers`` by key and then by state."""
        identities = [self.identity(number) for number in numbers.tolist()]
        return np.array(sorted(range(len(identities)), key=identities.__getitem__), dtype=np.int64)

    @property
    def states(self) -> frozenset[str]:
        """All states."""
        return frozenset(self._states.values)

    def numbers_of_state(self, state: str) -> Ints:
        """The numbers of the pairs of a state in their order."""
        return np.flatnonzero(np.array(self._state, dtype=np.int16) == self._states.numbers.get(state, -1))

    def of_state(self, state: str) -> dict[str, int]:
        """Key → number, for the pairs of a state in their order."""
        return {self._keys.values[self._key[pair]]: pair for pair in self.numbers_of_state(state).tolist()}


class Tensors(Identities, Sequence[Tensor]):
    """Tensors in the order in which they were added; each access creates a new object.

    They are not changed once they belong to a catalog.
    """

    __slots__ = ("_aliases", "_dtype", "_shape", "_shapes")

    def __init__(self, tensors: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self._shapes: Numbered[Shape] = Numbered()
        self._shape, self._dtype = array("i"), array("b")
        self._aliases: dict[int, tuple[str, ...]] = {}
        for tensor in tensors:
            self.add(tensor)

    def add(self, tensor: Tensor) -> int:
        """Add a tensor and return its number."""
        return self.add_as(tensor.key, tensor.state, tensor.dtype, tensor.global_shape, tensor.aliases)

    def add_as(self, key: str, state: str, dtype: DType, shape: Shape, aliases: tuple[str, ...] = ()) -> int:
        """Add the tensor with these fields; faster than to make it."""
        of_shape = self._shapes.numbers.get(shape)
        if of_shape is None:
            of_shape = self._shapes.number(Tensor(key, state, dtype, shape).global_shape)
        number = self.add_identity(key, state)
        self._dtype.append(dtype_number(dtype))
        self._shape.append(of_shape)
        if aliases:
            self._aliases[number] = aliases
        return number

    def add_alike(self, keys: Ints, states: Ints, dtypes: Ints, shapes: Ints) -> Ints | None:
        """The numbers of tensors, of which new ones are added, given as the numbers of keys, states, dtypes and shapes.

        ``None``, and nothing is added, if one is known with another dtype or shape. No tensor may be given twice.
        """
        numbers = self.numbers_of(keys, states)
        new = numbers < 0
        known = numbers[~new]
        if (np.array(self._dtype)[known] != dtypes[~new]).any() or (
            np.array(self._shape)[known] != shapes[~new]
        ).any():
            return None
        numbers[new] = self.add_identities(keys[new], states[new])
        self._dtype.frombytes(dtypes[new].astype(np.int8).tobytes())
        self._shape.frombytes(shapes[new].astype(np.int32).tobytes())
        return numbers

    def shape_number(self, shape: Shape) -> int:
        """The number of a global shape."""
        return self._shapes.number(shape)

    @overload
    def __getitem__(self, at: int) -> Tensor: ...

    @overload
    def __getitem__(self, at: slice) -> tuple[Tensor, ...]: ...

    def __getitem__(self, at: int | slice) -> Tensor | tuple[Tensor, ...]:
        if isinstance(at, slice):
            return tuple(self[number] for number in range(*at.indices(len(self))))
        return Tensor(
            *self.identity(at),
            DTYPES[self._dtype[at]],
            self._shapes.values[self._shape[at]],
            self._aliases.get(at % len(self), ()) if self._aliases else (),
        )

    def fields(self) -> Iterator[tuple[str, str, DType, Shape, tuple[str, ...]]]:
        """The fields of every tensor; faster than making the tensors."""
        shapes, aliases = self._shapes.values, self._aliases
        for number, (identity, shape, dtype) in enumerate(
            zip(self.identities(), self._shape, self._dtype, strict=True)
        ):
            yield *identity, DTYPES[dtype], shapes[shape], aliases.get(number, ())

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Tensors):
            return NotImplemented
        return len(self) == len(other) and all(a == b for a, b in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]

    def dtypes_of(self, state: str) -> set[DType]:
        """Dtypes of all tensors of a state."""
        of_state = np.array(self._state, dtype=np.int16) == self._states.numbers.get(state, -1)
        return {DTYPES[number] for number in np.unique(np.array(self._dtype)[of_state]).tolist()}

    def dtype(self, number: int) -> DType:
        """Dtype of a tensor."""
        return DTYPES[self._dtype[number]]

    def shape(self, number: int) -> Shape:
        """Global shape of a tensor."""
        return self._shapes.values[self._shape[number]]

    @property
    def dtypes(self) -> npt.NDArray[np.int8]:
        """Index into ``DTYPES`` of each tensor's dtype."""
        return np.array(self._dtype, dtype=np.int8)

    @property
    def shapes(self) -> Ints:
        """Shape of each tensor, padded to ``MAX_DIMS``."""
        padded_shapes = [padded(shape, 1) for shape in self._shapes.values]
        table = np.array(padded_shapes, dtype=np.int64).reshape(-1, MAX_DIMS)
        return np.asarray(table[np.array(self._shape, dtype=np.int64)])

    @property
    def elements(self) -> Ints:
        """Number of elements of each tensor."""
        table = np.array([prod(shape) for shape in self._shapes.values], dtype=np.int64)
        return np.asarray(table[np.array(self._shape, dtype=np.int64)])


class TensorIndex(Mapping[Identity, int]):
    """``(key, state)`` → number of a tensor."""

    __slots__ = ("_tensors",)

    def __init__(self, tensors: Tensors) -> None:
        self._tensors = tensors

    def __getitem__(self, identity: Identity) -> int:
        number = self._tensors.find(*identity)
        if number is None:
            raise KeyError(identity)
        return number

    def __contains__(self, identity: object) -> bool:
        return (
            isinstance(identity, tuple) and len(identity) == 2 and self._tensors.find(*identity) is not None
        )

    def __iter__(self) -> Iterator[Identity]:
        return self._tensors.identities()

    def __len__(self) -> int:
        return len(self._tensors)
