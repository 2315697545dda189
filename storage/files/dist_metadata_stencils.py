"""Recognise entries of a ``.metadata`` file that have the layout of an earlier one, without walking over them.

Entries repeat each other: the same opcodes at the same bytes, with other numbers, texts and references between them. A
*stencil* is what entries of one layout share. It is made of an entry that a walk found, and covers it byte for byte, so
that an entry that fits has the same opcodes and the same arguments, except those of its values (in hex, texts quoted)::

    entry of a walk   94 7d 94 28 68 05 │ 8c 03 "a.w" 94 │ 68 06 │ 4b 00 │ 75 62 … 29 81
    mask              ff ff ff ff ff ff   ff ff 00 00 00 ff  ff ff   ff 00   ff ff … ff ff
    fits              94 7d 94 28 68 05 │ 8c 03 "b.w" 94 │ 68 06 │ 4b 07 │ 75 62 … 29 81
    does not          94 7d 94 28 68 05 │ 8c 04 "ab.w …    the length of a text is not masked
    does not          94 7d 94 28 68 05 │ 8c 03 "b.w" 94 │ 68 07 …    nor is an opcode or a name

Entries of one length are compared together, eight bytes at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from paddle_reshard.storage.files.dist_metadata_walk import (
    BYTES_OF,
    LONG,
    LONGEST_REFERENCE_BYTES,
    TEXT,
    WORD_BYTES,
    Flags,
    Words,
)

ROWS_AT_ONCE: Final = 1 << 13
"""Entries that are compared together: they stay in the cache."""
_TILE: Final = 16
"""Entries in a row of a comparison, because NumPy is slow with short rows."""
_FOUR_EQUAL: Final = 0x01010101
"""Four flags that are set."""
_BYTES: Final = ord("C")
_COUNTED: Final = (TEXT, LONG, _BYTES)
_NUMBERS: Final = b"KMJ"


REFERENCE, NUMBER, SPELLED = range(3)
"""What a value is: a reference to the memo, a number of one or two bytes, or any other."""


class Hole(NamedTuple):
    """Where a value is in the entries of a stencil."""

    at: int
    """First byte in the entry."""
    nbytes: int
    """Length of the value."""
    kind: int
    """:data:`REFERENCE`, :data:`NUMBER` or :data:`SPELLED`."""
    code: int | None
    """What all these entries have there, if none of its bytes may differ."""


class Stencil:
    """The bytes that all entries of one layout share, and where the others are."""

    __slots__ = ("_mask", "_shared", "_width", "fits", "holes", "kind", "nbytes")

    def __init__(
        self, entry: bytes, values: Sequence[tuple[int, int]], codes: Sequence[int], kind: int
    ) -> None:
        """``values`` are the first byte and the length of each value of the entry, and ``codes`` what they are.

        A value of no bytes is one that these entries do not have. ``kind`` is that of the tail of the entry.
        """
        mask = bytearray(b"\xff" * len(entry))
        holes = []
        for (at, nbytes), code in zip(values, codes, strict=True):
            value = entry[at : at + nbytes]
            form = _form(value)
            varying = [range(1, nbytes)] if form == REFERENCE else list(_arguments(value))
            for argument in varying:
                mask[at + argument.start : at + argument.stop] = bytes(len(argument))
            holes.append(Hole(at, nbytes, form, None if any(varying) else code))
        self._width = width_of(len(entry))
        self._mask = self._tiled(bytes(mask))
        self._shared = self._tiled(entry) & self._mask
        self.nbytes, self.holes, self.kind = len(entry), tuple(holes), kind
        self.fits = 0

    def fitting(self, rows: Words) -> Flags:
        """Which entries fit. ``rows`` has a row of :func:`width_of` words per entry; a multiple of ``_TILE`` rows."""
        same = (rows.reshape(-1, _TILE * self._width) & self._mask) == self._shared
        parts = same.view(np.uint32).reshape(len(rows), -1).T
        fits = parts[0] == _FOUR_EQUAL
        for part in parts[1:]:
            fits &= part == _FOUR_EQUAL
        return fits

    def _tiled(self, data: bytes) -> Words:
        return np.tile(np.frombuffer(data.ljust(self._width * WORD_BYTES, b"\0"), "<u8"), _TILE)


def width_of(nbytes: int) -> int:
    """Words per row of entries of this length: the eight bytes from each byte onwards are inside the row."""
    return -(-(nbytes + WORD_BYTES - 1) // (4 * WORD_BYTES)) * 4


def rows_at(data: bytes, begins: npt.NDArray[np.int64], nbytes: int) -> Words:
    """The entries of ``nbytes`` bytes that begin at these positions, as rows; the last one is repeated."""
    width_bytes = width_of(nbytes) * WORD_BYTES
    every = np.ndarray(len(data) - width_bytes + 1, f"V{width_bytes}", data, strides=(1,))
    padded = begins.take(np.arange(-(-len(begins) // _TILE) * _TILE), mode="clip")
    return every[padded].view("<u8").reshape(len(padded), -1)


def _form(value: bytes) -> int:
    if value[:1] in (b"h", b"j") and len(value) <= LONGEST_REFERENCE_BYTES:
        return REFERENCE
    return NUMBER if value[:1] in (b"K", b"M") and len(value) == BYTES_OF[value[0]] else SPELLED


def _arguments(value: bytes) -> Iterator[range]:
    """Where the numbers, texts and bytes of a spelled value are, without opcodes, lengths and references."""
    at = 0
    while at < len(value):
        opcode = value[at]
        if opcode in _COUNTED:
            stop = at + 2 + value[at + 1]
            yield range(at + 2, stop)
        else:
            stop = at + max(int(BYTES_OF[opcode]), 1)
            if opcode in _NUMBERS:
                yield range(at + 1, stop)
        at = stop
