"""Bytes of target files that are known when these are laid out, as columns.

Between any two arrays of a file lie some, so there are as many of them as arrays: hundreds of thousands. They are
names and pickle opcodes, which repeat themselves: their contents are kept compressed.
"""

from __future__ import annotations

import zlib
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple, overload

import numpy as np

from paddle_reshard.pipeline.core.geometry import Ints

Literal = tuple[int, int, bytes]
"""``(file, byte offset, bytes)``."""

BLOCK_BYTES = 1 << 18
"""Contents that are compressed together."""


class LiteralTemplate(NamedTuple):
    """Literals that lie at the same bytes of several files."""

    offsets: array[int]
    """The byte of each file at which they begin."""
    starts: array[int]
    """Offsets of their contents in the text."""
    stops: array[int]


class _Text:
    """Bytes that are only added to, compressed block by block."""

    __slots__ = ("_blocks", "_open")

    def __init__(self) -> None:
        self._blocks: list[bytes] = []
        self._open = bytearray()  # what follows the blocks

    def __len__(self) -> int:
        return len(self._blocks) * BLOCK_BYTES + len(self._open)

    def add(self, content: bytes) -> None:
        self._open += content
        while len(self._open) >= BLOCK_BYTES:
            self._blocks.append(zlib.compress(self._open[:BLOCK_BYTES], 1))
            del self._open[:BLOCK_BYTES]

    def block(self, number: int) -> bytes | bytearray:
        return self._open if number == len(self._blocks) else zlib.decompress(self._blocks[number])

    def copy(self) -> _Text:
        copied = _Text()
        copied._blocks, copied._open = self._blocks[:], self._open[:]
        return copied


class _Reader:
    """Reads a text in order: it keeps the block that it read last. Several threads have one each."""

    __slots__ = ("_block", "_number", "_text")

    def __init__(self, text: _Text) -> None:
        self._text = text
        self._number = -1
        self._block: bytes | bytearray = b""

    def read(self, start: int, stop: int) -> bytes:
        found = b""
        while len(found) < stop - start:
            number, first = divmod(start + len(found), BLOCK_BYTES)
            found += self._of(number)[first : first + stop - start - len(found)]
        return found

    def _of(self, number: int) -> bytes | bytearray:
        if number != self._number:
            self._number, self._block = number, self._text.block(number)
        return self._block


class Literals(Sequence[Literal]):
    """Literals in the order in which they were added.

    Nothing is added once they are part of a target or a plan. A plan forgets them when it was carried out.
    """

    __slots__ = ("_added", "_content", "_runs")

    def __init__(self, literals: Iterable[Literal] = ()) -> None:
        self._runs: list[tuple[int, LiteralTemplate]] = []  # files, and what lies in them
        self._added: LiteralTemplate | None = None  # of the last run, if more may be added to it
        self._content = _Text()
        for file, offset, content in literals:
            self.add(file, offset, content)

    def add(self, file: int, offset: int, content: bytes) -> None:
        """Add one more."""
        if self._added is None or self._runs[-1][0] != file:
            self._added = self.template(())
            self._runs.append((file, self._added))
        self.extend_template(self._added, offset, content)

    def template(self, literals: Iterable[tuple[int, bytes]]) -> LiteralTemplate:
        """Take in ``(byte offset, bytes)`` of files that are all alike in these; none of them is known yet."""
        kept = LiteralTemplate(array("q"), array("q"), array("q"))
        for offset, content in literals:
            self.extend_template(kept, offset, content)
        return kept

    def extend_template(self, kept: LiteralTemplate, offset: int, content: bytes) -> None:
        """Take in one more of such files."""
        kept.offsets.append(offset)
        kept.starts.append(len(self._content))
        self._content.add(content)
        kept.stops.append(len(self._content))

    def add_file(self, kept: LiteralTemplate, file: int) -> None:
        """Add the literals of one such file; nothing more is taken in then."""
        self._added = None
        self._runs.append((file, kept))

    def __len__(self) -> int:
        return sum(len(kept.offsets) for _, kept in self._runs)

    @overload
    def __getitem__(self, at: int) -> Literal: ...

    @overload
    def __getitem__(self, at: slice) -> list[Literal]: ...

    def __getitem__(self, at: int | slice) -> Literal | list[Literal]:
        if isinstance(at, slice):
            first, stop, step = at.indices(len(self))
            if step != 1:
                return [self[number] for number in range(first, stop, step)]
            return list(islice(self._from(first), max(stop - first, 0)))
        return next(self._from(range(len(self))[at]))

    def __iter__(self) -> Iterator[Literal]:
        return self._from(0)

    def _from(self, first: int) -> Iterator[Literal]:
        reader = _Reader(self._content)
        for file, kept in self._runs:
            for place in range(first, len(kept.offsets)):
                yield file, kept.offsets[place], reader.read(kept.starts[place], kept.stops[place])
            first = max(0, first - len(kept.offsets))

    def clear(self) -> None:
        """Forget all of them."""
        self._runs, self._added, self._content = [], None, _Text()

    def copy(self) -> Literals:
        """The same literals, to which others can be added."""
        copied = Literals()
        self._added = None
        copied._runs = self._runs[:]
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
        counts = [len(kept.offsets) for _, kept in self._runs]
        return np.repeat(np.array([file for file, _ in self._runs], dtype=np.int64), counts)

    @property
    def sizes(self) -> Ints:
        """Bytes of each."""
        found = [np.array(kept.stops) - np.array(kept.starts) for _, kept in self._runs]
        return np.concatenate([np.zeros(0, dtype=np.int64), *found])

    def by_file(self) -> LiteralsByFile:
        """The same, to be looked up by where they lie."""
        return LiteralsByFile(self._runs, self._content)


class LiteralsByFile:
    """Literals by file and byte."""

    def __init__(self, runs: Iterable[tuple[int, LiteralTemplate]], content: _Text) -> None:
        self._content = content
        self._kept: dict[int, LiteralTemplate] = {}
        for file, kept in runs:
            known = self._kept.get(file)
            self._kept[file] = _in_order(kept if known is None else _both(known, kept))

    def of_ranges(self, ranges: Iterable[tuple[int, int, int]]) -> LiteralSlices:
        """What lies in ranges ``(file, first byte, one past the last)``; a literal may reach over several of them."""
        found = LiteralSlices(self._content)
        for number, (file, start, stop) in enumerate(ranges):
            kept = self._kept.get(file)
            if kept is None:
                continue
            first = bisect_right(kept.offsets, start)
            while first and kept.offsets[first - 1] + _length(kept, first - 1) > start:
                first -= 1
            for place in range(first, bisect_left(kept.offsets, stop)):
                offset, begin = kept.offsets[place], kept.starts[place]
                low, high = max(offset, start), min(offset + _length(kept, place), stop)
                found.add(number, low - start, begin + low - offset, begin + high - offset)
        return found


def _length(kept: LiteralTemplate, place: int) -> int:
    return kept.stops[place] - kept.starts[place]


def _both(one: LiteralTemplate, other: LiteralTemplate) -> LiteralTemplate:
    return LiteralTemplate(*(a + b for a, b in zip(one, other, strict=True)))


def _in_order(kept: LiteralTemplate) -> LiteralTemplate:
    offsets = np.array(kept.offsets, dtype=np.int64)
    if (offsets[1:] >= offsets[:-1]).all():
        return kept
    order = np.argsort(offsets, kind="stable")
    return LiteralTemplate(*(array("q", np.array(column)[order].tobytes()) for column in kept))


class LiteralSlices(Sequence[Literal]):
    """LiteralSlices of literals: number of a range, byte offset in it, and bytes; in the order of the ranges.

    They share the text of the literals that they were taken of. Only their own bytes are sent to another process.
    """

    __slots__ = ("_content", "_numbers", "_offsets", "_starts", "_stops")

    def __init__(self, content: _Text) -> None:
        self._content = content
        self._numbers, self._offsets = array("q"), array("q")
        self._starts, self._stops = array("q"), array("q")

    def add(self, number: int, offset: int, start: int, stop: int) -> None:
        """Add what lies at ``[start, stop)`` of the text."""
        self._numbers.append(number)
        self._offsets.append(offset)
        self._starts.append(start)
        self._stops.append(stop)

    def __len__(self) -> int:
        return len(self._numbers)

    @overload
    def __getitem__(self, at: int) -> Literal: ...

    @overload
    def __getitem__(self, at: slice) -> list[Literal]: ...

    def __getitem__(self, at: int | slice) -> Literal | list[Literal]:
        return list(self)[at]

    def __iter__(self) -> Iterator[Literal]:
        reader = _Reader(self._content)
        for number, offset, start, stop in zip(
            self._numbers, self._offsets, self._starts, self._stops, strict=True
        ):
            yield number, offset, reader.read(start, stop)

    def __reduce__(self) -> tuple[Any, ...]:
        return Literals, (tuple(self),)
