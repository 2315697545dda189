"""Bytes of target files that are known when these are laid out, as columns.

Between any two arrays of a file lie some, so there are as many of them as arrays: hundreds of thousands. They are
names and pickle opcodes, which repeat themselves: their contents are kept compressed.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, overload

import numpy as np

from paddle_reshard.pipeline.core.geometry import Ints

Literal = tuple[int, int, bytes]
"""``(file, byte offset, bytes)``."""

BLOCK_BYTES = 1 << 18
"""Contents that are compressed together."""


class Kept(NamedTuple):
    """Literals that lie at the same bytes of several files."""

    offsets: array[int]
    """The byte of each file at which they begin."""
    starts: array[int]
    """Offsets of their contents in the text."""
    stops: array[int]


class _Text:
    """Bytes that are only added to, compressed block by block."""

    __slots__ = ("_blocks", "_last", "_open")

    def __init__(self) -> None:
        self._blocks: list[bytes] = []
        self._open = bytearray()  # what follows the blocks
        self._last = (-1, b"")  # the block that was read last, and its bytes: literals are read in order

    def __len__(self) -> int:
        return len(self._blocks) * BLOCK_BYTES + len(self._open)

    def add(self, content: bytes) -> None:
        self._open += content
        while len(self._open) >= BLOCK_BYTES:
            self._blocks.append(zlib.compress(self._open[:BLOCK_BYTES], 1))
            del self._open[:BLOCK_BYTES]

    def read(self, start: int, stop: int) -> bytes:
        number, first = divmod(start, BLOCK_BYTES)
        found = self._block(number)[first : first + stop - start]
        while len(found) < stop - start:
            number += 1
            found += self._block(number)[: stop - start - len(found)]
        return found

    def _block(self, number: int) -> bytes:
        if number == len(self._blocks):
            return bytes(self._open)
        if self._last[0] != number:
            self._last = number, zlib.decompress(self._blocks[number])
        return self._last[1]

    def copy(self) -> _Text:
        copied = _Text()
        copied._blocks, copied._open = self._blocks[:], self._open[:]
        return copied


class Literals(Sequence[Literal]):
    """Literals in the order in which they were added.

    Nothing is added once they are part of a target or a plan. A plan forgets them when it was carried out.
    """

    __slots__ = ("_content", "_files", "_offsets", "_starts", "_stops")

    def __init__(self, literals: Iterable[Literal] = ()) -> None:
        self._files, self._offsets = array("q"), array("q")
        self._starts, self._stops = array("q"), array("q")  # of the contents in the text
        self._content = _Text()
        for file, offset, content in literals:
            self.add(file, offset, content)

    def add(self, file: int, offset: int, content: bytes) -> None:
        """Add one more."""
        self.place(self.keep([(offset, content)]), file)

    def keep(self, literals: Iterable[tuple[int, bytes]]) -> Kept:
        """Take in ``(byte offset, bytes)`` of files that are all alike in these; none of them is known yet."""
        kept = Kept(array("q"), array("q"), array("q"))
        for offset, content in literals:
            self.keep_also(kept, offset, content)
        return kept

    def keep_also(self, kept: Kept, offset: int, content: bytes) -> None:
        """Take in one more of such files."""
        kept.offsets.append(offset)
        kept.starts.append(len(self._content))
        self._content.add(content)
        kept.stops.append(len(self._content))

    def place(self, kept: Kept, file: int) -> None:
        """Add the literals of one such file."""
        self._files.extend(array("q", [file]) * len(kept.offsets))
        self._offsets.extend(kept.offsets)
        self._starts.extend(kept.starts)
        self._stops.extend(kept.stops)

    def __len__(self) -> int:
        return len(self._files)

    @overload
    def __getitem__(self, at: int) -> Literal: ...

    @overload
    def __getitem__(self, at: slice) -> list[Literal]: ...

    def __getitem__(self, at: int | slice) -> Literal | list[Literal]:
        if isinstance(at, slice):
            return [self[number] for number in range(*at.indices(len(self)))]
        return self._files[at], self._offsets[at], self._content.read(self._starts[at], self._stops[at])

    def __iter__(self) -> Iterator[Literal]:
        for file, offset, start, stop in zip(
            self._files, self._offsets, self._starts, self._stops, strict=True
        ):
            yield file, offset, self._content.read(start, stop)

    def clear(self) -> None:
        """Forget all of them."""
        self._files, self._offsets = array("q"), array("q")
        self._starts, self._stops = array("q"), array("q")
        self._content = _Text()

    def copy(self) -> Literals:
        """The same literals, to which others can be added."""
        copied = Literals()
        copied._files, copied._offsets = self._files[:], self._offsets[:]
        copied._starts, copied._stops = self._starts[:], self._stops[:]
        copied._content = self._content.copy()
        return copied

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Literals):
            return NotImplemented
        return len(self) == len(other) and all(a == b for a, b in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]

    @property
    def files(self) -> Ints:
        """The file of each."""
        return np.array(self._files, dtype=np.int64)

    @property
    def offsets(self) -> Ints:
        """The byte of its file at which each begins."""
        return np.array(self._offsets, dtype=np.int64)

    @property
    def sizes(self) -> Ints:
        """Bytes of each."""
        return np.array(self._stops, dtype=np.int64) - np.array(self._starts, dtype=np.int64)
