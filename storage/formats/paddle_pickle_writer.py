"""What does a file that ``paddle.load`` reads look like around arrays that nobody has read yet?

:func:`encode_pickle` returns every byte that is not payload, and the byte range of each payload;
:mod:`~paddle_reshard.storage.formats.paddle_pickle` reads such files.
"""

from __future__ import annotations

import struct
from array import array as numbers_of
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from math import prod
from typing import Final

from paddle_reshard.storage.formats.paddle_pickle import (
    ITEM_BYTES,
    MAX_INTEGER_KEY,
    MAX_NESTING,
    MAX_TEXT_BYTES,
    is_shape,
)


@dataclass(frozen=True, slots=True)
class ArraySlot:
    """A place for an array whose bytes come later."""

    slot: int
    """The caller's number for it."""
    dtype: str
    """numpy code without byte order."""
    shape: tuple[int, ...]
    """Extents, in elements; the payload is in C order."""
    name: str | None
    """Given: written as the pickle route's (name, array). ``None``: a bare array, as the legacy route."""


@dataclass(frozen=True, slots=True)
class Entries:
    """A dict of very many entries, each made when it is written."""

    entries: Iterable[tuple[object, object]]


@dataclass(frozen=True, slots=True)
class EncodedFile:
    """Every byte of a file but the payloads. Literals and slots tile ``[0, size_bytes)``."""

    size_bytes: int
    """Size of the whole file."""
    literals: tuple[tuple[int, bytes], ...]
    """(byte offset, bytes), ascending."""
    slots: tuple[tuple[int, int, int], ...]
    """(slot number, byte offset, length in bytes), in file order; little-endian payloads."""


def encode_pickle(root: Mapping[str, object]) -> EncodedFile:
    """Lay out a protocol-4 file that ``paddle.load`` and plain ``pickle.load`` read.

    No frames (they are optional, PEP 3154), and numpy by its old name ``numpy.core``, which numpy 1 and 2
    both resolve. Dict order is kept.

    Parameters
    ----------
    root
        Nested dict, list, tuple, str, bytes, int, float, bool and None with :class:`ArraySlot` leaves.

    Raises
    ------
    TypeError, ValueError
        ``root`` holds something this format, or :func:`~.paddle_pickle.parse_pickle`, has no place for.
    """
    literals: list[tuple[int, bytes]] = []
    size_bytes, slots = write_pickle(root, lambda byte_offset, data: literals.append((byte_offset, data)))
    return EncodedFile(size_bytes, tuple(literals), tuple(zip(*[iter(slots)] * 3, strict=True)))


def write_pickle(
    root: Mapping[str, object] | Entries, literal: Callable[[int, bytes], None]
) -> tuple[int, numbers_of[int]]:
    """Lay out a file of very many arrays as :func:`encode_pickle` does; dicts in it may be :class:`Entries`.

    ``literal`` is given every byte offset and its bytes, ascending. Returns the size of the file and, one after the
    other, the three numbers of each of its :attr:`EncodedFile.slots`.
    """
    encoder = _Encoder(literal)
    encoder.emit(b"\x80\x04")
    encoder.value(root, 0)
    encoder.emit(b".")
    return encoder.finish(), encoder.slots


_BATCH: Final = 1000
"""Items per MARK..SETITEMS, as CPython: a reader's stack stays small."""


class _Encoder:
    """Writes opcodes, and leaves out the payloads."""

    __slots__ = ("_literal", "_memo", "_open", "_start", "slots")

    def __init__(self, literal: Callable[[int, bytes], None]) -> None:
        self._literal = literal
        self.slots = numbers_of("q")
        self._memo: dict[str, bytes] = {}
        self._start, self._open = 0, bytearray()

    def emit(self, data: bytes) -> None:
        self._open += data

    def finish(self) -> int:
        self._literal(self._start, bytes(self._open))
        return self._start + len(self._open)

    def value(self, value: object, depth: int) -> None:
        if depth >= MAX_NESTING and isinstance(value, (Mapping, Entries, list, tuple)):
            raise ValueError(f"containers nested more than {MAX_NESTING} deep")
        if isinstance(value, ArraySlot):
            self._array(value)
        elif isinstance(value, Mapping | Entries):
            entries = value.entries if isinstance(value, Entries) else value.items()
            self._items(b"}", b"u", ((_checked_key(key), item) for key, item in entries), depth)
        elif isinstance(value, list):
            self._items(b"]", b"e", ((item,) for item in value), depth)
        elif isinstance(value, tuple):
            self._tuple(value, depth)
        else:
            self.emit(plain_opcodes(value))

    def _items(self, empty: bytes, add: bytes, items: Iterator[tuple[object, ...]], depth: int) -> None:
        self.emit(empty)
        while batch := tuple(islice(items, _BATCH)):
            self.emit(b"(")
            for item in batch:
                for value in item:
                    self.value(value, depth + 1)
            self.emit(add)

    def _tuple(self, items: tuple[object, ...], depth: int) -> None:
        self.emit(b"(" if len(items) > 3 else b"")
        for item in items:
            self.value(item, depth + 1)
        self.emit((b")", b"\x85", b"\x86", b"\x87")[len(items)] if len(items) <= 3 else b"t")

    def _array(self, slot: ArraySlot) -> None:
        nbytes = _slot_bytes(slot)
        if slot.name is not None:
            self._shared("tuple", _TUPLE)
            self.emit(plain_opcodes(slot.name))
        self._shared("_reconstruct", _RECONSTRUCT)
        self._shared("ndarray", _ARRAY_CLASS)
        self.emit(b"K\x00\x85C\x01b\x87R(K\x01")
        self._tuple(slot.shape, 0)
        self._dtype(slot.dtype)
        self.emit(b"\x89")
        self._payload(slot.slot, nbytes)
        self.emit(b"tb" if slot.name is None else b"tb\x86\x85R")

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

    def _payload(self, slot: int, nbytes: int) -> None:
        small = nbytes < 1 << 32
        self.emit(b"B" + nbytes.to_bytes(4, "little") if small else b"\x8e" + nbytes.to_bytes(8, "little"))
        self._literal(self._start, bytes(self._open))
        byte_offset = self._start + len(self._open)
        self.slots.extend((slot, byte_offset, nbytes))
        self._start, self._open = byte_offset + nbytes, bytearray()


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
    if value is None:
        return b"N"
    if isinstance(value, bool):
        return b"\x88" if value else b"\x89"
    if type(value) is int:
        return _int_opcodes(value)
    if type(value) is float:
        return b"G" + struct.pack(">d", value)
    if type(value) is str:
        return _sized(value.encode("utf-8"), b"\x8c", b"X")
    if type(value) is bytes:
        return _sized(value, b"C", b"B")
    raise TypeError(f"a value of type {type(value).__name__} has no place in a checkpoint file")


def _int_opcodes(value: int) -> bytes:
    if 0 <= value < 1 << 8:
        return b"K" + value.to_bytes(1, "little")
    if 0 <= value < 1 << 16:
        return b"M" + value.to_bytes(2, "little")
    if -(1 << 31) <= value < 1 << 31:
        return b"J" + value.to_bytes(4, "little", signed=True)
    width_bytes = value.bit_length() // 8 + 1
    if width_bytes > 255:
        raise ValueError("an integer of more than 255 bytes")
    return b"\x8a" + bytes((width_bytes,)) + value.to_bytes(width_bytes, "little", signed=True)


def _sized(data: bytes, short: bytes, long: bytes) -> bytes:
    if len(data) > MAX_TEXT_BYTES:
        raise ValueError(f"a text or bytes value of {len(data)} bytes outside an array")
    if len(data) < 256:
        return short + bytes((len(data),)) + data
    return long + len(data).to_bytes(4, "little") + data


_TUPLE: Final = _stack_global_of("builtins", "tuple")
_RECONSTRUCT: Final = _stack_global_of("numpy.core.multiarray", "_reconstruct")
_ARRAY_CLASS: Final = _stack_global_of("numpy", "ndarray")
