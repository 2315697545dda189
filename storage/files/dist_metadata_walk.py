"""Find where entries of a ``.metadata`` file and their values are, by walking over many of them together.

Nothing is decided here about what a value means, or whether an entry may occur where it is.
"""

from __future__ import annotations

from copy import copy
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

Longs = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]
Words = npt.NDArray[np.uint64]
Flags = npt.NDArray[np.bool_]

WORD_BYTES: Final = 8
_REACH_BYTES: Final = 512
"""More than a step may read from its start: entries that end so near to the end of a window are not walked."""
_SEARCH_BYTES: Final = 1 << 18
"""Searched for entries at a time, so that what is compared stays in the cache."""
_MAX_NUMBERS: Final = 8
"""Largest number of dims of a shape; longer ones are parsed opcode by opcode."""
MASKS: Final = np.array([(1 << 8 * n) - 1 for n in range(WORD_BYTES + 1)], dtype=np.uint64)


def opcode_set(opcodes: bytes) -> Flags:
    """Whether each byte is among these opcodes."""
    flags = np.zeros(256, dtype=bool)
    flags[list(opcodes)] = True
    return flags


BYTES_OF: Final = np.zeros(256, dtype=np.int64)
"""Bytes of an opcode and its argument, for opcodes of fixed length."""
for _opcodes, _nbytes in ((b"N)", 1), (b"hK", 2), (b"M", 3), (b"jJ", 5)):
    BYTES_OF[list(_opcodes)] = _nbytes
NEWOBJ: Final = 0x81
TEXT: Final = 0x8C
LONG: Final = 0x8A
LONGEST_REFERENCE_BYTES: Final = 5
_NUMBERS: Final = opcode_set(b"KMJ\x8a")
_TUPLE_ENDS: Final = opcode_set(b"\x85\x86\x87t")
BATCH: Final = b"u("
"""May occur between two entries: CPython sets the items of a dict in batches of a thousand."""
_NUMPY_NUMBER_TAIL: Final = b"\x94\x86\x94R\x94"


class EntryValue(NamedTuple):
    """A value of each entry: its start in the window, its length, and its first opcode."""

    start: Longs
    nbytes: Longs
    opcode: Bytes
    rows: Longs | None
    """The entries that have it; ``None`` for all."""

    def of(self, row: int, begin: int) -> tuple[int, int]:
        """Its first byte in an entry that begins there, and its length; 0 if this entry does not have it."""
        nth = row if self.rows is None else int(np.searchsorted(self.rows, row))
        if self.rows is not None and (nth == len(self.rows) or self.rows[nth] != row):
            return 0, 0
        return int(self.start[nth]) - begin, int(self.nbytes[nth])


class Scan:
    """Walks over many entries of a window together, one step per opcode.

    It finds the bounds of values. Whether these are valid is determined by the pickle machine.

    Two entries as bytes (in hex, texts quoted). Opcodes between the values are equal, the values are not::

        entry 0    … 29 81 │ 94 7d 94 28 68 05 │ 8c 03 "a.w"   │ 68 06 │ 4b 00 …
        entry 1    … 29 81 │ 94 7d 94 28 68 05 │ 8c 05 "lm.wb" │ 68 06 │ 4b 07 …
                           ↑ at              6             5, 7      2            bytes that each advances

    First :meth:`literal` compares six bytes, then :meth:`simple` takes a string of five bytes in entry 0 and of seven
    in entry 1, then ``literal`` compares two. An entry with different bytes there is not ``good``.
    """

    def __init__(self, data: bytes, prefix: bytes) -> None:
        """``prefix`` is what an entry begins with."""
        self.data, self.limit = data, max(len(data) - _REACH_BYTES, 0)
        self.bytes = np.frombuffer(data, dtype=np.uint8)
        self.words: Words = np.ndarray(max(len(data) - WORD_BYTES + 1, 0), "<u8", data, strides=(1,))
        """The eight bytes from each byte onwards."""
        self.begins = self._positions(prefix)
        """All positions at which an entry may begin, ascending."""
        self.at = self.begins
        """Current position in each entry."""
        self.good = np.ones(len(self.at), dtype=bool)
        """Whether each position has led through an entry so far."""
        self.rows: Longs | None = None
        self.values: list[EntryValue] = []

    def _positions(self, prefix: bytes) -> Longs:
        after = [
            np.flatnonzero(self.bytes[first : min(first + _SEARCH_BYTES, self.limit)] == NEWOBJ) + (first + 1)
            for first in range(0, self.limit, _SEARCH_BYTES)
        ]
        newobj_ends = np.concatenate(after) if after else np.zeros(0, dtype=np.int64)
        return newobj_ends[self._begins(newobj_ends, prefix)]

    def of(self, begins: Longs) -> Scan:
        """A walk that begins at these positions."""
        part = copy(self)
        part.at, part.good, part.rows, part.values = begins, np.ones(len(begins), dtype=bool), None, []
        return part

    def among(self, rows: Longs) -> Scan:
        """A walk over some of the entries."""
        part = copy(self)
        part.rows, part.at, part.good = rows, self.at[rows], self.good[rows]
        return part

    def join(self, part: Scan) -> None:
        """Continue from the positions of a walk over some entries."""
        self.at[part.rows], self.good[part.rows] = part.at, part.good

    def literal(self, opcodes: bytes) -> None:
        """Step over exactly these opcodes."""
        self.good &= self._begins(self.at, opcodes)
        self._go(np.int64(len(opcodes)))

    def optional(self, opcodes: bytes) -> Flags:
        """Step over these opcodes if present. Returns which entries have them."""
        there = self._begins(self.at, opcodes)
        self._go(there * np.int64(len(opcodes)))
        return there

    def one_of(self, opcodes: bytes) -> Bytes:
        """Step over any of these opcodes, which have no argument. Returns which one."""
        opcode = self.bytes[self.at]
        self.good &= opcode_set(opcodes)[opcode]
        self._go(np.int64(1))
        return opcode

    def simple(self, opcodes: bytes) -> None:
        """Step over a value of any of these opcodes; ``\\x8c`` is a string that is stored in the memo."""
        opcode = self.bytes[self.at]
        nbytes = BYTES_OF[opcode]
        for counted, more_bytes in ((TEXT, 3), (LONG, 2)):
            rows = np.flatnonzero(opcode == counted)
            nbytes[rows] = more_bytes + self.bytes[self.at[rows] + 1]
        self.good &= opcode_set(opcodes)[opcode]
        self._value(nbytes, opcode)

    def shape(self, number: bytes | None) -> Flags:
        """``None``, a reference, or a tuple of numbers that is stored in the memo; says where it is not ``None``.

        ``number`` is how a numpy number begins, up to its eight bytes.
        """
        opcode = self.bytes[self.at]
        nbytes = BYTES_OF[opcode]
        spelled = _NUMBERS[opcode] | (opcode == ord("("))
        if number is not None:
            spelled |= self._begins(self.at, number)
        rows = np.flatnonzero(spelled)
        nbytes[rows] = self._tuple_bytes(self.at[rows], number)
        self.good &= (nbytes > 0) & opcode_set(b"N)hj(KMJ\x8a")[opcode]
        self._value(nbytes, opcode)
        return opcode != ord("N")

    def _tuple_bytes(self, start: Longs, number: bytes | None) -> Longs:
        """Lengths of the tuples that begin at ``start``; 0 if there is none that can be walked."""
        lengths = np.zeros(len(start), dtype=np.int64)
        at = start + (self.bytes[start] == ord("("))
        rows = np.arange(len(start))
        for _ in range(_MAX_NUMBERS + 1):
            opcode = self.bytes[at]
            ends = np.flatnonzero(_TUPLE_ENDS[opcode])
            lengths[rows[ends]] = at[ends] + 2 - start[rows[ends]]
            nbytes = np.where(_NUMBERS[opcode], BYTES_OF[opcode], 0)
            longs = np.flatnonzero(opcode == LONG)
            nbytes[longs] = 2 + self.bytes[at[longs] + 1]
            if number is not None:
                nbytes[self._begins(at, number)] = len(number) + 8 + len(_NUMPY_NUMBER_TAIL)
            on = np.flatnonzero(nbytes)
            if not len(on):
                break
            at, rows = np.minimum(at[on] + nbytes[on], self.limit), rows[on]
        return lengths

    def _begins(self, at: Longs, opcodes: bytes) -> Flags:
        there = np.ones(len(at), dtype=bool)
        for first in range(0, len(opcodes), WORD_BYTES):
            word = opcodes[first : first + WORD_BYTES]
            there &= self.words[at + first] & MASKS[len(word)] == np.uint64(int.from_bytes(word, "little"))
        return there

    def words_of(self, start: Longs, nbytes: Longs) -> list[Words]:
        """Byte strings as words, padded with zeros."""
        return [
            self.words[start + first] & MASKS[np.clip(nbytes - first, 0, WORD_BYTES)]
            for first in range(0, int(nbytes.max()), WORD_BYTES)
        ]

    def raw(self, start: Longs, nbytes: Longs) -> list[bytes]:
        """Byte strings."""
        return [self.data[at : at + size] for at, size in zip(start.tolist(), nbytes.tolist(), strict=True)]

    def _value(self, nbytes: Longs, opcode: Bytes) -> None:
        self.values.append(EntryValue(self.at, nbytes, opcode, self.rows))
        self._go(nbytes)

    def _go(self, nbytes: Longs | np.int64) -> None:
        self.at = np.minimum(self.at + nbytes, self.limit)
