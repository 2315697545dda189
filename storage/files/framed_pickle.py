"""The opcodes that CPython writes for an object with protocol 5, and the frames that it cuts them into.

A pickler writes an object as its parts, stores every text, container and instance in its memo, and refers to the memo
where the same object (not an equal one) comes again. What it writes is collected in frames: one ends where an object
begins and 64 KiB are collected, and before a text or payload of 64 KiB, which lies outside of frames (CPython 3.11
``Modules/_pickle.c``: ``_Pickler_OpcodeBoundary``, ``_Pickler_write_bytes``). A reader needs none of it, but a file
written so is byte for byte the file that ``pickle`` would write.

The payloads of arrays are omitted: they are not known yet.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Final, TypeVar

from paddle_reshard.pipeline.core.geometry import Shape

FRAME_BYTES: Final = 1 << 16
"""A frame ends as soon as it may, once it holds so many bytes; a payload of as many is in none."""
BATCH: Final = 1000
"""Items per MARK..SETITEMS or MARK..APPENDS."""

_HEADER_BYTES: Final = 9
_SHORTEST_FRAME_BYTES: Final = 4
_MEMOIZE: Final = b"\x94"
_ONE_OBJECT_EACH: Final = 256
"""Texts of one character below this one and bytes objects of one byte are the same object wherever they come."""

T = TypeVar("T")

TUPLE_ENDS: Final = (b")", b"\x85", b"\x86", b"\x87")
"""Opcodes that make a tuple of up to three items; longer ones have a MARK before and ``t`` after them."""


def get_opcode(index: int) -> bytes:
    """The opcode that refers to a memo index, as CPython writes it."""
    return b"h" + bytes((index,)) if index < 256 else b"j" + index.to_bytes(4, "little")


def simple_opcodes(value: object) -> bytes:
    """Opcodes of ``None``, a flag, an integer or a float, as CPython writes them."""
    if value is None:
        return b"N"
    if isinstance(value, bool):
        return b"\x88" if value else b"\x89"
    if type(value) is float:
        return b"G" + struct.pack(">d", value)
    if type(value) is not int:
        raise TypeError(f"a value of type {type(value).__name__} has no place in a checkpoint file")
    if 0 <= value < 1 << 8:
        return b"K" + value.to_bytes(1, "little")
    if 0 <= value < 1 << 16:
        return b"M" + value.to_bytes(2, "little")
    if -(1 << 31) <= value < 1 << 31:
        return b"J" + value.to_bytes(4, "little", signed=True)
    width_bytes = (value if value >= 0 else ~value).bit_length() // 8 + 1
    if width_bytes > 255:
        raise ValueError("an integer of more than 255 bytes")
    return b"\x8a" + bytes((width_bytes,)) + value.to_bytes(width_bytes, "little", signed=True)


def sized_opcodes(data: bytes, short: bytes, long: bytes) -> bytes:
    """Opcode, length and data; ``long`` is the opcode for 256 bytes and more."""
    nbytes = len(data)
    return (short + bytes((nbytes,)) if nbytes < 256 else long + nbytes.to_bytes(4, "little")) + data


def batches(items: Iterable[T]) -> Iterator[tuple[T, ...]]:
    """The items in the pickler's batches of :data:`BATCH`."""
    remaining = iter(items)
    while batch := tuple(islice(remaining, BATCH)):
        yield batch


class FramedPickle:
    """A file that is being written, opcode by opcode."""

    __slots__ = (
        "_at",
        "_frame",
        "_globals",
        "_literal",
        "_memo",
        "_modules",
        "_open",
        "_pending",
        "_singletons",
    )

    def __init__(self, literal: Callable[[int, bytes], None]) -> None:
        """``literal`` is given every byte offset and its bytes, ascending, once they are final."""
        self._literal = literal
        self._at = 0  # of the first byte of ``_open``
        self._open = bytearray(b"\x80\x05")
        self._pending: list[tuple[int, bytearray]] = []
        """Complete but for the length of the frame they are in."""
        self._frame: tuple[bytearray, int, int] | None = None
        """Where its header is: in which bytes, where in them, and where in the file."""
        self._memo = 0
        self._singletons: dict[str | bytes, int] = {}
        self._modules: dict[str, int] = {}
        self._globals: dict[tuple[str, str], int] = {}

    # -- opcodes

    def emit(self, opcodes: bytes) -> None:
        """Write opcodes that store nothing in the memo."""
        if self._frame is None:
            self._frame = self._open, len(self._open), self._position
            self._open += b"\x95" + bytes(_HEADER_BYTES - 1)
        self._open += opcodes

    def memoize(self) -> int:
        """Store the last object in the memo; returns the number by which it is referred to."""
        self.emit(_MEMOIZE)
        self._memo += 1
        return self._memo - 1

    def recall(self, number: int) -> None:
        """An object of the memo again."""
        self._begin()
        self.emit(get_opcode(number))

    def payload(self, header: bytes, nbytes: int) -> int:
        """Reserve the payload of an array after its opcode and length. Returns its byte offset."""
        self._begin()
        if nbytes < FRAME_BYTES:
            self.emit(header)
        else:
            self._close()
            self._open += header
        byte_offset = self._position
        self._pending.append((self._at, self._open))
        self._at, self._open = byte_offset + nbytes, bytearray()
        if self._frame is None:
            self._hand_over()
        return byte_offset

    def finish(self) -> int:
        """End the file; returns its size in bytes."""
        self.emit(b".")
        self._close()
        self._pending.append((self._at, self._open))
        self._hand_over()
        return self._position

    # -- objects

    def text(self, value: str) -> int:
        """Write a text, as a new object unless CPython has one object for all equal ones; returns its number."""
        return self._text_or_data(value, value.encode(), b"\x8c", b"X")

    def data(self, value: bytes) -> None:
        """Write a bytes object; which are one object follows the rule of :meth:`text`."""
        self._text_or_data(value, value, b"C", b"B")

    def simple(self, value: object) -> None:
        """``None``, a flag, an integer or a float, which no memo stores."""
        self._begin()
        self.emit(simple_opcodes(value))

    def named(self, module: str, name: str) -> None:
        """A class or function; the names of modules are one object each."""
        if (module, name) in self._globals:
            self.recall(self._globals[module, name])
            return
        self._begin()
        if module in self._modules:
            self.recall(self._modules[module])
        else:
            self._modules[module] = self.text(module)
        self.text(name)
        self.emit(b"\x93")
        self._globals[module, name] = self.memoize()

    def tuple_of(self, items: Iterable[T], save: Callable[[T], object]) -> int | None:
        """A tuple, each item of which ``save`` writes; returns its number, ``None`` for an empty one."""
        items = tuple(items)
        self._begin()
        if len(items) > 3:
            self.emit(b"(")
        for item in items:
            save(item)
        self.emit(TUPLE_ENDS[len(items)] if len(items) < 4 else b"t")
        return self.memoize() if items else None

    def numbers(self, items: Shape) -> int | None:
        """A tuple of integers."""
        return self.tuple_of(items, self.simple)

    def dict_of(self, items: Iterable[T], save: Callable[[T], object]) -> None:
        """A dict, of which ``save`` writes each key and its value."""
        self._container(b"}")
        remaining = batches(items)
        batch: tuple[T, ...] | None = next(remaining, None)
        if batch is not None and len(batch) == 1:
            save(batch[0])
            self.emit(b"s")
            return
        while batch is not None:
            self._batch(batch, save, b"u")
            # After a full batch comes another one, even if it is empty.
            batch = next(remaining, ()) if len(batch) == BATCH else None

    def list_of(self, items: Iterable[T], save: Callable[[T], object]) -> None:
        """A list, each item of which ``save`` writes."""
        self._container(b"]")
        for index, batch in enumerate(batches(items)):
            if index == 0 and len(batch) == 1:
                save(batch[0])
                self.emit(b"a")
            else:
                self._batch(batch, save, b"e")

    # -- frames

    @property
    def _position(self) -> int:
        return self._at + len(self._open)

    def _begin(self) -> None:
        """An object begins: here a frame may end."""
        if self._frame is not None and self._position - self._frame[2] - _HEADER_BYTES >= FRAME_BYTES:
            self._close()

    def _container(self, empty: bytes) -> None:
        self._begin()
        self.emit(empty)
        self.memoize()

    def _batch(self, batch: Iterable[T], save: Callable[[T], object], end: bytes) -> None:
        self.emit(b"(")
        for item in batch:
            save(item)
        self.emit(end)

    def _text_or_data(self, value: str | bytes, data: bytes, short: bytes, long: bytes) -> int:
        if value in self._singletons:
            self.recall(self._singletons[value])
            return self._singletons[value]
        self._begin()
        opcodes = sized_opcodes(data, short, long)
        if len(data) < FRAME_BYTES:
            self.emit(opcodes)
        else:
            self._close()
            self._open += opcodes
        number = self.memoize()
        if len(value) == 0 or (len(value) == 1 and ord(value) < _ONE_OBJECT_EACH):
            self._singletons[value] = number
        return number

    def _close(self) -> None:
        """End the frame, and write its length where it began; a very short one is none."""
        if self._frame is None:
            return
        header, start, byte_offset = self._frame
        self._frame = None
        nbytes = self._position - byte_offset - _HEADER_BYTES
        if nbytes < _SHORTEST_FRAME_BYTES:
            del header[start : start + _HEADER_BYTES]
        else:
            header[start + 1 : start + _HEADER_BYTES] = nbytes.to_bytes(8, "little")
        self._hand_over()

    def _hand_over(self) -> None:
        for byte_offset, data in self._pending:
            self._literal(byte_offset, bytes(data))
        self._pending.clear()


class UnframedPickle:
    """A file of protocol 4, without frames: equal texts and classes are one object, and nothing else is in the memo."""

    def __init__(self, literal: Callable[[int, bytes], None]) -> None:
        self._literal = literal
        self._out = bytearray(b"\x80\x04")
        self._memo: dict[object, int] = {}
        self._numbers: dict[Shape, bytes] = {}

    def emit(self, opcodes: bytes) -> None:
        """Write opcodes that store nothing in the memo."""
        self._out += opcodes

    def memoize(self) -> None:
        """Containers and instances are in no memo."""

    def recall(self, number: int) -> None:
        """An object of the memo again."""
        self._out += get_opcode(number)

    def finish(self) -> int:
        """End the file; returns its size in bytes."""
        self._out += b"."
        self._literal(0, bytes(self._out))
        return len(self._out)

    def text(self, value: str) -> int:
        """Write a text; returns its number."""
        return self._once(value, (value,), b"")

    def simple(self, value: object) -> None:
        """``None``, a flag, an integer or a float."""
        self._out += simple_opcodes(value)

    def named(self, module: str, name: str) -> None:
        """A class or function."""
        self._once((module, name), (module, name), b"\x93")

    def tuple_of(self, items: Iterable[T], save: Callable[[T], object]) -> None:
        """A tuple, each item of which ``save`` writes."""
        self._out += b"("
        for item in items:
            save(item)
        self._out += b"t"

    def numbers(self, items: Shape) -> None:
        """A tuple of integers."""
        if items not in self._numbers:
            opcodes = b"".join(map(simple_opcodes, items))
            few = len(items) < len(TUPLE_ENDS)
            self._numbers[items] = opcodes + TUPLE_ENDS[len(items)] if few else b"(" + opcodes + b"t"
        self._out += self._numbers[items]

    def dict_of(self, items: Iterable[T], save: Callable[[T], object]) -> None:
        """A dict, of which ``save`` writes each key and its value."""
        self._out += b"}("
        for number, item in enumerate(items, start=1):
            save(item)
            if number % BATCH == 0:
                self._out += b"u("
        self._out += b"u"

    def list_of(self, items: Iterable[T], save: Callable[[T], object]) -> None:
        """A list, each item of which ``save`` writes."""
        self._out += b"]("
        for item in items:
            save(item)
        self._out += b"e"

    def _once(self, value: object, texts: Iterable[str], end: bytes) -> int:
        if value in self._memo:
            self.recall(self._memo[value])
        else:
            self._memo[value] = len(self._memo)
            opcodes = (sized_opcodes(text.encode(), b"\x8c", b"X") for text in texts)
            self._out += b"".join(opcodes) + end + _MEMOIZE
        return self._memo[value]
