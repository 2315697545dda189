"""Lay out files for ``paddle.load`` around arrays that have not been read yet.

:func:`encode_pickle` returns every byte that is not payload, and the byte range of each payload;
:mod:`~paddle_reshard.storage.files.paddle_pickle` reads such files.
"""

from __future__ import annotations

from array import array as numbers_of
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from typing import Final, NamedTuple, TypeAlias, TypeVar

from paddle_reshard.storage.files.framed_pickle import (
    TUPLE_ENDS,
    FramedPickle,
    batches,
    simple_opcodes,
    sized_opcodes,
)
from paddle_reshard.storage.files.paddle_pickle import (
    ITEM_BYTES,
    MAX_INTEGER_KEY,
    MAX_NESTING,
    MAX_TEXT_BYTES,
    STRUCTURED_NAMES,
    is_shape,
)


class ArraySlot(NamedTuple):
    """A slot for an array whose bytes are written later; a tuple, because very many are made."""

    slot: int
    """The caller's number of the slot."""
    dtype: str
    """numpy code without byte order."""
    shape: tuple[int, ...]
    """Extents, in elements; the payload is in C order."""
    name: str | None
    """Name of the tensor for the pickle route's ``(name, array)``; ``None`` for a bare array of the legacy route."""


@dataclass(frozen=True, slots=True)
class DictEntries:
    """A dict of very many entries, each made when it is written."""

    entries: Iterable[tuple[object, object]]


@dataclass(frozen=True, slots=True)
class EncodedFile:
    """Every byte of a file except the payloads. Literals and slots tile ``[0, size_bytes)``."""

    size_bytes: int
    """Size of the whole file."""
    literals: tuple[tuple[int, bytes], ...]
    """(byte offset, bytes), ascending."""
    slots: tuple[tuple[int, int, int], ...]
    """(slot number, byte offset, length in bytes), in file order; little-endian payloads."""


AddLiterals: TypeAlias = Callable[[Sequence[int], Sequence[int], bytes], None]
"""Takes the byte offsets and sizes of literals, ascending, and the bytes of all of them."""


def encode_pickle(root: Mapping[str, object], protocol: int = 4) -> EncodedFile:
    """Lay out a file that ``paddle.load`` and plain ``pickle.load`` read.

    numpy goes by its old name ``numpy.core``, which numpy 1 and 2 both resolve. Dict order is kept. With protocol 4
    there are no frames (they are optional, PEP 3154); with protocol 5 the file is byte for byte what ``paddle.save``
    writes under Paddle 3.4, each array as a buffer that is loaded without a copy. ``root`` is made of dicts, lists,
    tuples and plain values, with :class:`ArraySlot` leaves.

    Raises
    ------
    TypeError, ValueError
        If ``root`` holds a value that this format, or :func:`~.paddle_pickle.parse_pickle`, does not support.
    """
    literals: list[tuple[int, bytes]] = []

    def add(offsets: Sequence[int], sizes: Sequence[int], content: bytes) -> None:
        ends = accumulate(sizes)
        pieces = (content[end - size : end] for end, size in zip(ends, sizes, strict=True))
        literals.extend(zip(offsets, pieces, strict=True))

    size_bytes, slots = write_pickle(root, add, protocol)
    return EncodedFile(size_bytes, tuple(literals), tuple(zip(*[iter(slots)] * 3, strict=True)))


def write_pickle(
    root: Mapping[str, object] | DictEntries, literals: AddLiterals, protocol: int = 4
) -> tuple[int, numbers_of[int]]:
    """Lay out a file of very many arrays as :func:`encode_pickle` does; dicts in it may be :class:`DictEntries`.

    Returns the size of the file and, one after the other, the three numbers of each of its :attr:`EncodedFile.slots`.
    """
    encoder = _FramedEncoder(literals) if protocol == 5 else _Encoder(literals)
    encoder.value(root, 0)
    return encoder.finish(), encoder.slots


_COLLECTED_BYTES: Final = 1 << 16
"""Literals are handed over once they have so many bytes."""


class _Encoder:
    """Writes opcodes of protocol 4, and leaves out the payloads."""

    __slots__ = ("_alike", "_begin", "_literals", "_memo", "_offsets", "_open", "_sizes", "_start", "slots")

    def __init__(self, literals: AddLiterals) -> None:
        self._literals = literals
        self._offsets, self._sizes = numbers_of("q"), numbers_of("q")
        self.slots = numbers_of("q")
        self._memo: dict[str, bytes] = {}
        self._alike: dict[tuple[str, tuple[int, ...]], tuple[bytes, int]] = {}
        """Dtype and shape of arrays written before → their opcodes between name and payload, bytes of the payload."""
        self._open = bytearray(b"\x80\x04")
        """Literals that were not handed over; the last, which is incomplete, begins at index ``_begin``."""
        self._begin = 0
        self._start = 0  # of the last literal in the file

    def emit(self, data: bytes) -> None:
        self._open += data

    def finish(self) -> int:
        self.emit(b".")
        size_bytes = self._literal_ends()
        self._hand_over()
        return size_bytes

    def _literal_ends(self) -> int:
        """End the last literal; returns the byte offset of what follows."""
        size = len(self._open) - self._begin
        self._offsets.append(self._start)
        self._sizes.append(size)
        return self._start + size

    def _hand_over(self) -> None:
        self._literals(self._offsets, self._sizes, bytes(self._open))
        self._offsets, self._sizes, self._open = numbers_of("q"), numbers_of("q"), bytearray()

    def value(self, value: object, depth: int) -> None:
        _check_depth(value, depth)
        if isinstance(value, ArraySlot):
            self._array(value)
        elif isinstance(value, Mapping | DictEntries):
            entries = value.entries if isinstance(value, DictEntries) else value.items()
            self._entries(entries, depth)
        elif isinstance(value, list):
            self._list(value, depth)
        elif isinstance(value, tuple):
            self._tuple(value, depth)
        else:
            self.emit(plain_opcodes(value))

    def _entries(self, entries: Iterable[tuple[object, object]], depth: int) -> None:
        self.emit(b"}")
        for batch in batches(entries):
            self.emit(b"(")
            for key, item in batch:
                opcodes = plain_opcodes(_checked_key(key))
                self._open += opcodes
                if type(item) is ArraySlot:  # as nearly all are
                    self._array(item, opcodes if item.name is key else None)
                else:
                    self.value(item, depth + 1)
            self.emit(b"u")

    def _list(self, items: list[object], depth: int) -> None:
        self.emit(b"]")
        for batch in batches(items):
            self.emit(b"(")
            for item in batch:
                self.value(item, depth + 1)
            self.emit(b"e")

    def _tuple(self, items: tuple[object, ...], depth: int) -> None:
        self.emit(b"(" if len(items) > 3 else b"")
        for item in items:
            self.value(item, depth + 1)
        self.emit(TUPLE_ENDS[len(items)] if len(items) <= 3 else b"t")

    def _array(self, slot: ArraySlot, called: bytes | None = None) -> None:
        """Write an array; ``called`` are the opcodes of its name, if they are known."""
        _, dtype, shape, name = slot
        alike = self._alike.get((dtype, shape))
        if alike is None or (name is not None and "tuple" not in self._memo):
            self._first_array(slot)
            return
        opcodes, nbytes = alike
        if name is not None:
            self._open += self._memo["tuple"]
            self._open += called or plain_opcodes(name)
        self._open += opcodes
        self._payload(slot, nbytes)

    def _first_array(self, slot: ArraySlot) -> None:
        """An array whose dtype and shape are new, or the first with a name."""
        nbytes = _slot_bytes(slot)
        if slot.name is not None:
            self._shared("tuple", _TUPLE)
            self.emit(plain_opcodes(slot.name))
        self._shared("_reconstruct", _RECONSTRUCT)
        self._shared("ndarray", _ARRAY_CLASS)
        self.emit(_STATE)
        first = len(self._open)
        self._tuple(slot.shape, 0)
        shape = bytes(self._open[first:])
        self._dtype(slot.dtype)
        small = nbytes < 1 << 32
        payload = b"\x89" + (
            b"B" + nbytes.to_bytes(4, "little") if small else b"\x8e" + nbytes.to_bytes(8, "little")
        )
        self.emit(payload)
        known = self._memo["_reconstruct"] + self._memo["ndarray"] + _STATE
        self._alike[slot.dtype, slot.shape] = known + shape + self._memo[slot.dtype] + payload, nbytes
        self._payload(slot, nbytes)

    def _dtype(self, code: str) -> None:
        if code in self._memo:
            self.emit(self._memo[code])
            return
        self._shared("dtype", _stack_global_of("numpy", "dtype"))
        order = "<" if ITEM_BYTES[code] > 1 else "|"
        state = b"(K\x03" + plain_opcodes(order) + b"NNN" + plain_opcodes(-1) * 2 + b"K\x00tb"
        self._shared(code, plain_opcodes(code) + b"\x89\x88\x87R" + state)

    def _shared(self, key: str, opcodes: bytes) -> None:
        """Emit a value in full the first time, and a reference to the memo later."""
        if key not in self._memo:
            index = len(self._memo)
            self._memo[key] = b"h" + bytes((index,))
            opcodes += b"\x94"
        else:
            opcodes = self._memo[key]
        self.emit(opcodes)

    def _payload(self, slot: ArraySlot, nbytes: int) -> None:
        """The bytes of an array, which are left out, and the end of the array."""
        number, _, _, name = slot
        byte_offset = self._literal_ends()
        self.slots.extend((number, byte_offset, nbytes))
        self._start = byte_offset + nbytes
        begin = len(self._open)
        if begin >= _COLLECTED_BYTES:
            self._hand_over()
            begin = 0
        self._begin = begin
        self._open += b"tb" if name is None else b"tb\x86\x85R"


class _FramedEncoder:
    """Writes opcodes of protocol 5 as CPython does, and leaves out the payloads."""

    __slots__ = ("_dtypes", "_file", "_keys", "slots")

    def __init__(self, literals: AddLiterals) -> None:
        self.slots = numbers_of("q")
        self._file = FramedPickle(lambda offset, data: literals((offset,), (len(data),), data))
        self._dtypes: dict[str, int] = {}
        self._keys: dict[str, int] = {}
        """Keys of bare arrays: the table of names has the same objects for keys."""

    def finish(self) -> int:
        return self._file.finish()

    def value(self, value: object, depth: int) -> None:
        _check_depth(value, depth)
        file = self._file
        if isinstance(value, ArraySlot):
            self._array(value)
        elif isinstance(value, Mapping | DictEntries):
            entries = value.entries if isinstance(value, DictEntries) else value.items()
            file.dict_of(entries, lambda entry: self._entry(*entry, depth))
        elif isinstance(value, list):
            file.list_of(value, lambda item: self.value(item, depth + 1))
        elif isinstance(value, tuple):
            file.tuple_of(value, lambda item: self.value(item, depth + 1))
        else:
            self._plain(value)

    def _plain(self, value: object) -> None:
        if type(value) is str:
            self._file.text(_of_length(value))
        elif type(value) is bytes:
            self._file.data(_of_length(value))
        else:
            self._file.simple(value)

    def _entry(self, key: object, value: object, depth: int) -> None:
        key = _checked_key(key)
        if isinstance(key, int):
            self._file.simple(key)
        else:
            number = self._file.text(_of_length(key))
            if isinstance(value, ArraySlot) and value.name is None and depth == 0:
                self._keys[key] = number
        if key == STRUCTURED_NAMES and isinstance(value, Mapping) and depth == 0:
            self._file.dict_of(value.items(), self._name)
        else:
            self.value(value, depth + 1)

    def _name(self, entry: tuple[object, object]) -> None:
        """A line of the table of names."""
        key, name = entry
        if isinstance(key, str) and key in self._keys:
            self._file.recall(self._keys[key])
            self._plain(name)
        else:
            self._entry(key, name, 1)

    def _array(self, slot: ArraySlot) -> None:
        file = self._file
        if slot.name is None:
            self._bare_array(slot)
            return
        file.named("builtins", "tuple")
        file.tuple_of([slot], lambda _: file.tuple_of([slot.name, slot], self._name_or_array))
        self._called()

    def _name_or_array(self, part: str | ArraySlot | None) -> None:
        if isinstance(part, ArraySlot):
            self._bare_array(part)
        else:
            self._plain(part)

    def _bare_array(self, slot: ArraySlot) -> None:
        nbytes = _slot_bytes(slot)
        steps: tuple[Callable[[], object], ...] = (
            lambda: self._payload(slot.slot, nbytes),
            lambda: self._dtype(slot.dtype),
            lambda: self._file.numbers(slot.shape),
            lambda: self._file.text("C"),
        )
        self._file.named("numpy.core.numeric", "_frombuffer")
        self._file.tuple_of(steps, lambda step: step())
        self._called()

    def _payload(self, slot: int, nbytes: int) -> None:
        byte_offset = self._file.payload(b"\x96" + nbytes.to_bytes(8, "little"), nbytes)
        self.slots.extend((slot, byte_offset, nbytes))
        self._file.memoize()

    def _dtype(self, code: str) -> None:
        """Write a dtype: in full the first time, later as a reference to the memo."""
        file = self._file
        if code in self._dtypes:
            file.recall(self._dtypes[code])
            return
        file.named("numpy", "dtype")
        file.tuple_of((code, False, True), self._plain)
        file.emit(b"R")
        self._dtypes[code] = file.memoize()
        order = "<" if ITEM_BYTES[code] > 1 else "|"
        file.tuple_of((3, order, None, None, None, -1, -1, 0), self._plain)
        file.emit(b"b")

    def _called(self) -> None:
        """Write the call of the function just named with the tuple of arguments, and store its result in the memo."""
        self._file.emit(b"R")
        self._file.memoize()


def _check_depth(value: object, depth: int) -> None:
    if depth >= MAX_NESTING and type(value) is not ArraySlot and isinstance(value, _CONTAINERS):
        raise ValueError(f"containers nested more than {MAX_NESTING} deep")


Texts = TypeVar("Texts", str, bytes)


def _of_length(value: Texts) -> Texts:
    """The text or bytes value, which may not be longer than what is read."""
    nbytes = len(value if isinstance(value, bytes) else value.encode())
    if nbytes > MAX_TEXT_BYTES:
        raise ValueError(f"a text or bytes value of {nbytes} bytes outside an array")
    return value


def _checked_key(key: object) -> str | int:
    if isinstance(key, str) or (type(key) is int and -MAX_INTEGER_KEY <= key < MAX_INTEGER_KEY):
        return key
    raise TypeError(f"a dict key of type {type(key).__name__} that is neither text nor a small integer")


def _slot_bytes(slot: ArraySlot) -> int:
    if slot.dtype not in ITEM_BYTES:
        raise ValueError(f"slot {slot.slot}: dtype {slot.dtype!r} is not a plain number type")
    if not is_shape(slot.shape):
        raise ValueError(f"slot {slot.slot}: {slot.shape!r} is not a shape")
    return prod(slot.shape) * ITEM_BYTES[slot.dtype]


def _stack_global_of(module: str, name: str) -> bytes:
    return plain_opcodes(module) + plain_opcodes(name) + b"\x93"


def plain_opcodes(value: object) -> bytes:
    """Opcodes of one plain value: None, a bool, int, float, text or bytes."""
    if type(value) is str:
        data = value.encode()
        return (
            _SHORT_TEXT[len(data)] + data
            if len(data) < 256
            else sized_opcodes(_of_length(data), b"\x8c", b"X")
        )
    return sized_opcodes(_of_length(value), b"C", b"B") if type(value) is bytes else simple_opcodes(value)


_SHORT_TEXT: Final = tuple(b"\x8c" + bytes((length,)) for length in range(256))
_CONTAINERS: Final = (Mapping, DictEntries, list, tuple)
_STATE: Final = b"K\x00\x85C\x01b\x87R(K\x01"
"""Arguments of ``_reconstruct``, its call, and the first item of the array's state."""
_TUPLE: Final = _stack_global_of("builtins", "tuple")
_RECONSTRUCT: Final = _stack_global_of("numpy.core.multiarray", "_reconstruct")
_ARRAY_CLASS: Final = _stack_global_of("numpy", "ndarray")
