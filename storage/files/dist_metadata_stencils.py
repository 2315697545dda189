"""Recognise entries of a ``.metadata`` file that have the layout of an earlier one, many at a time.

Entries repeat each other: the same opcodes at the same bytes, with other numbers, texts and references between them. A
*stencil* is what entries of one layout share. It is made of one entry and covers it byte for byte, so that an entry
that fits has the same opcodes and the same arguments, except those of its values (in hex, texts quoted)::

    an entry          94 7d 94 28 68 05 │ 8c 03 "a.w" 94 │ 68 06 │ 4b 00 │ 75 62 … 29 81
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

Longs = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]
Flags = npt.NDArray[np.bool_]

WORD_BYTES: Final = 8
MASKS: Final = np.array([(1 << 8 * n) - 1 for n in range(WORD_BYTES + 1)], dtype=np.uint64)
"""By number of bytes: the first of a word."""
TEXT: Final = 0x8C
_COUNTED: Final = (TEXT, 0x8A, ord("C"))
"""Opcodes whose argument follows its length of one byte."""
_NUMBERS: Final = b"KMJ"
_NBYTES: Final = {ord("h"): 2, ord("K"): 2, ord("M"): 3, ord("j"): 5, ord("J"): 5}
"""Bytes of an opcode and its argument; others have no argument."""


class Hole(NamedTuple):
    """Where a value is in the entries of a stencil."""

    at: int
    """First byte in the entry."""
    nbytes: int
    """Length of the value."""
    refers: bool
    """It is a reference to the memo."""
    code: int | None
    """What all these entries have there, if none of its bytes may differ."""


class Stencil:
    """The bytes that all entries of one layout share, and where the others are."""

    __slots__ = ("_mask", "_shared", "fits", "holes", "kind", "nbytes")

    def __init__(
        self, entry: bytes, values: Sequence[tuple[int, int]], codes: Sequence[int], kind: int
    ) -> None:
        """``values`` are the first byte and the length of each value of the entry, and ``codes`` what they are.

        A value of no bytes is one that these entries do not have. ``kind`` says how the entry ends.
        """
        mask = bytearray(b"\xff" * len(entry))
        holes = []
        for (at, nbytes), code in zip(values, codes, strict=True):
            refers = is_reference(entry[at : at + nbytes])
            varying = [range(at + 1, at + nbytes)] if refers else list(_arguments(entry, at, at + nbytes))
            for argument in varying:
                mask[argument.start : argument.stop] = bytes(len(argument))
            holes.append(Hole(at, nbytes, refers, None if any(varying) else code))
        padded_bytes = -(-len(entry) // WORD_BYTES) * WORD_BYTES
        self._mask = np.frombuffer(mask.ljust(padded_bytes, b"\0"), "<u8")
        self._shared = np.frombuffer(entry.ljust(padded_bytes, b"\0"), "<u8") & self._mask
        self.nbytes, self.holes, self.kind = len(entry), tuple(holes), kind
        self.fits = 0
        """Entries that fitted."""

    def fitting(self, rows: Words) -> Flags:
        """Which entries fit; ``rows`` are those of :func:`rows_at`."""
        fits = np.ones(len(rows), dtype=bool)
        for column, mask, shared in zip(rows.T, self._mask, self._shared, strict=False):
            fits &= (column & mask) == shared
        return fits


def rows_at(data: bytes, begins: Longs, nbytes: int) -> Words:
    """The ``nbytes`` bytes from each position on, in words; those from each byte on are inside the row."""
    width_bytes = (nbytes // WORD_BYTES + 2) * WORD_BYTES
    every = np.ndarray(len(data) - width_bytes + 1, f"V{width_bytes}", data, strides=(1,))
    return every[begins].view("<u8").reshape(len(begins), -1)


def is_reference(value: bytes) -> bool:
    """Whether this value is only a reference to the memo."""
    return value[:1] in (b"h", b"j") and len(value) == _NBYTES[value[0]]


def _arguments(entry: bytes, at: int, stop: int) -> Iterator[range]:
    """Where the numbers, texts and bytes of a value are, without opcodes, lengths and references."""
    while at < stop:
        opcode = entry[at]
        if opcode in _COUNTED:
            begin, at = at + 2, at + 2 + entry[at + 1]
            yield range(begin, at)
        else:
            begin, at = at + 1, at + _NBYTES.get(opcode, 1)
            if opcode in _NUMBERS:
                yield range(begin, at)
