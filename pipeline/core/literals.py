"""Literal bytes of target files, as columns: everything whose value is known when a file is laid out.

There are literals between any two arrays of a file, so a target may have hundreds of thousands. They are names and
pickle opcodes, which are repetitive, and therefore stored compressed.
"""

from __future__ import annotations

import zlib
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import accumulate
from operator import add
from typing import Any, NamedTuple

import numpy as np

from paddle_reshard.pipeline.core.numbers import Ints

Literal = tuple[int, int, bytes]
"""``(file, byte offset, bytes)``."""

BLOCK_BYTES = 1 << 18
"""Size of the blocks that are compressed."""
CACHED_BLOCKS = 64
"""Blocks that are kept uncompressed while the literals of many groups are read: each group looks into several files."""
REPEATED_BLOCKS = 16
"""Blocks that are kept uncompressed while all literals are read: the files of several ranks repeat each other."""


class LiteralTemplate(NamedTuple):
    """Literals with the same offsets and contents in several files."""

    offsets: array[int]
    """Byte offset of each literal in a file."""
    starts: array[int]
    """Start of the contents of each literal in the text; ``stops`` are the ends."""
    stops: array[int]


class _Text:
    """An append-only byte string, compressed block by block."""

    __slots__ = ("_blocks", "_open")

    def __init__(self) -> None:
        self._blocks: list[bytes] = []
        self._open = bytearray()  # bytes after the last full block

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
    """Reads a text and keeps the blocks that it read last; not shared between threads."""

    __slots__ = ("_block",)

    def __init__(self, text: _Text, most_blocks: int = 1) -> None:
        self._block = lru_cache(most_blocks)(text.block)

    def read(self, start: int, stop: int) -> bytes:
        content = b""
        while start < stop:
            number, first = divmod(start, BLOCK_BYTES)
            content += self._block(number)[first : first + stop - start]
            start = min(stop, (number + 1) * BLOCK_BYTES)
        return content


class Literals(Iterable[Literal]):
    """Literals in the order in which they were added.

    They are not changed once they belong to a target or a plan; a plan clears them when it has run.
    """

    __slots__ = ("_added", "_content", "_runs")

    def __init__(self, literals: Iterable[Literal] = ()) -> None:
        self._runs: list[tuple[int, LiteralTemplate]] = []  # files and their literals
        self._added: LiteralTemplate | None = None  # the template of the last run, if it may grow
        self._content = _Text()
        for file, offset, content in literals:
            self.add(file, offset, content)

    def add(self, file: int, offset: int, content: bytes) -> None:
        """Add a literal."""
        if self._added is None or self._runs[-1][0] != file:
            self._added = self.template(())
            self._runs.append((file, self._added))
        self.extend_template(self._added, (offset,), (len(content),), content)

    def template(self, literals: Iterable[tuple[int, bytes]]) -> LiteralTemplate:
        """Start a template with literals ``(byte offset, bytes)`` that several files will share."""
        template = LiteralTemplate(array("q"), array("q"), array("q"))
        for offset, content in literals:
            self.extend_template(template, (offset,), (len(content),), content)
        return template

    def extend_template(
        self, template: LiteralTemplate, offsets: Sequence[int], sizes: Sequence[int], content: bytes
    ) -> None:
        """Add literals of these byte offsets and ``sizes`` to a template; ``content`` is all of them, without gaps."""
        bounds = list(accumulate(sizes, initial=len(self._content)))
        self._content.add(content)
        template.offsets.extend(offsets)
        template.starts.extend(bounds[:-1])
        template.stops.extend(bounds[1:])

    def add_file(self, template: LiteralTemplate, file: int) -> None:
        """Add a file with the literals of a template, which must not be extended afterwards."""
        self._added = None
        self._runs.append((file, template))

    def __len__(self) -> int:
        return sum(len(template.offsets) for _, template in self._runs)

    def __iter__(self) -> Iterator[Literal]:
        reader = _Reader(self._content)
        for file, template in self._runs:
            for offset, *bounds in zip(*template, strict=True):
                yield file, offset, reader.read(*bounds)

    def clear(self) -> None:
        """Remove all literals and free their memory."""
        self._runs, self._added, self._content = [], None, _Text()

    def copy(self) -> Literals:
        """A copy that can be extended."""
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
        """Index of the file of each literal."""
        counts = [len(template.offsets) for _, template in self._runs]
        return np.repeat(np.array([file for file, _ in self._runs], dtype=np.int64), counts)

    @property
    def offsets(self) -> Ints:
        """First byte of each literal in its file."""
        offsets = [np.array(template.offsets, dtype=np.int64) for _, template in self._runs]
        return np.concatenate([np.zeros(0, dtype=np.int64), *offsets])

    @property
    def sizes(self) -> Ints:
        """Size of each literal in bytes."""
        sizes = [np.array(template.stops) - np.array(template.starts) for _, template in self._runs]
        return np.concatenate([np.zeros(0, dtype=np.int64), *sizes])

    def contents(self) -> Iterator[bytes]:
        """The bytes of all literals in their order, in pieces of any size."""
        reader = _Reader(self._content, REPEATED_BLOCKS)
        for _, template in self._runs:
            starts, stops = template.starts, template.stops
            if starts and stops[:-1] == starts[1:]:
                for first in range(starts[0], stops[-1], BLOCK_BYTES):
                    yield reader.read(first, min(first + BLOCK_BYTES, stops[-1]))
            else:
                yield from (reader.read(*bounds) for bounds in zip(starts, stops, strict=True))

    def by_file(self) -> LiteralsByFile:
        """The same literals, indexed by file and offset."""
        return LiteralsByFile(self._runs, self._content)


class LiteralsByFile:
    """Literals by file and byte."""

    def __init__(self, runs: Iterable[tuple[int, LiteralTemplate]], content: _Text) -> None:
        self._content = content
        self._reader = _Reader(content, CACHED_BLOCKS)
        self._kept: dict[int, LiteralTemplate] = {}
        for file, template in runs:
            if file in self._kept:
                template = LiteralTemplate(*map(add, self._kept[file], template))
            self._kept[file] = _in_order(template)

    def of_ranges(self, ranges: Iterable[tuple[int, int, int]]) -> LiteralSlices:
        """The parts of literals within ranges ``(file, first byte, one past the last)``; a literal may span several.

        A literal of 10 bytes at offset 100 and the ranges [96, 104) and [104, 112) give two slices: bytes 0:4 at offset
        4 of the first range, and bytes 4:10 at offset 0 of the second.
        """
        slices: list[_Slice] = []
        for number, (file, start, stop) in enumerate(ranges):
            if file not in self._kept:
                continue
            offsets, starts, stops = self._kept[file]
            first = bisect_right(offsets, start)
            while first and offsets[first - 1] + stops[first - 1] - starts[first - 1] > start:
                first -= 1
            for index in range(first, bisect_left(offsets, stop)):
                offset, begin = offsets[index], starts[index]
                low, high = max(offset, start), min(offset + stops[index] - begin, stop)
                slices.append((number, low - start, begin + low - offset, begin + high - offset))
        return LiteralSlices(self._content, slices)

    def read(self, slices: LiteralSlices) -> Iterator[Literal]:
        """The contents of ``slices``, from blocks that are shared by all such calls of one thread."""
        return slices.read_by(self._reader)


def _in_order(template: LiteralTemplate) -> LiteralTemplate:
    offsets = np.array(template.offsets, dtype=np.int64)
    if (offsets[1:] >= offsets[:-1]).all():
        return template
    order = np.argsort(offsets, kind="stable")
    return LiteralTemplate(*(array("q", np.array(column)[order].tobytes()) for column in template))


_Slice = tuple[int, int, int, int]
"""Number of a range, byte offset in it, and the first byte of the text and one past the last."""


class LiteralSlices(Iterable[Literal]):
    """Parts of literals: number of a range, byte offset in it, and bytes; in the order of the ranges.

    They share the text of the original literals; only their own bytes are pickled.
    """

    __slots__ = ("_content", "_slices")

    def __init__(self, content: _Text, slices: Sequence[_Slice]) -> None:
        self._content, self._slices = content, slices

    def __len__(self) -> int:
        return len(self._slices)

    def __iter__(self) -> Iterator[Literal]:
        return self.read_by(_Reader(self._content))

    def read_by(self, reader: _Reader) -> Iterator[Literal]:
        """Number of the range, offset in it and content of each slice, by a reader that may have blocks already."""
        return ((number, offset, reader.read(start, stop)) for number, offset, start, stop in self._slices)

    def __reduce__(self) -> tuple[Any, ...]:
        return tuple, (tuple(self),)
