"""Index files of one checkpoint with few waits: files of one size are usually read in the same places.

Ranks of one pipeline stage hold the same arrays, only with other values. So of every size, one file is indexed read by
read, and the others ask for the same ranges, many at a time. What an index sees is always what the file holds there:
a range that is not foreseen ends the attempt, and the file is indexed read by read too.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, TypeVar, runtime_checkable

from paddle_reshard.pipeline.layouts.reading import Readable
from paddle_reshard.storage.store import Read

T = TypeVar("T")
Range = tuple[int, int]
"""Byte offset and length."""

LONGEST_BYTES = 1 << 20
"""Ranges of at most this length together are requested at a time, if there are several."""


@runtime_checkable
class ReadsTogether(Protocol):
    """A store that answers several small reads for little more than the waiting time of one."""

    @property
    def reads_together(self) -> int:
        """How many; 1 if there is nothing to gain."""

    def read_many(self, reads: Sequence[Read]) -> None:
        """Fill several buffers, or raise."""


class NotForeseen(Exception):
    """A file is not read in the places in which another one of its size was read."""


class _Noted:
    """Passes reads on, and notes their ranges."""

    def __init__(self, store: Readable) -> None:
        self.store = store
        self.ranges: list[Range] = []

    def read(self, path: str, byte_offset: int, nbytes: int) -> bytes:
        """Exactly ``nbytes`` bytes of a file."""
        self.ranges.append((byte_offset, nbytes))
        return self.store.read(path, byte_offset, nbytes)


class _Ahead:
    """Answers reads in the foreseen order, from ranges that are requested together."""

    def __init__(self, store: ReadsTogether, ranges: Sequence[Range], memory: bytearray) -> None:
        self.store, self.ranges, self.memory = store, ranges, memoryview(memory)
        self.at = 0
        self.arrived: list[memoryview] = []

    def read(self, path: str, byte_offset: int, nbytes: int) -> bytes:
        """Exactly ``nbytes`` bytes of a file."""
        if self.at == len(self.ranges) or self.ranges[self.at] != (byte_offset, nbytes):
            raise NotForeseen
        self.at += 1
        if not self.arrived:
            self._request(path)
        return bytes(self.arrived.pop())

    def _request(self, path: str) -> None:
        reads: list[Read] = []
        used = 0
        for byte_offset, nbytes in self.ranges[self.at - 1 : self.at - 1 + self.store.reads_together]:
            if reads and used + nbytes > len(self.memory):
                break
            if nbytes > len(self.memory):
                self.memory = memoryview(bytearray(nbytes))
            reads.append(Read(path, byte_offset, self.memory[used : used + nbytes]))
            used += nbytes
        self.store.read_many(reads)
        self.arrived = [read.buffer for read in reversed(reads)]


def index_foreseen(
    index: Callable[[Readable, str, int], T],
    store: Readable,
    sizes: Mapping[str, int],
    files_in_flight: int,
) -> Iterator[tuple[str, T]]:
    """``index(store, path, size_bytes)`` of every file, as it is done.

    Parameters
    ----------
    index
        A function of the bytes that it reads: it may be called twice for a file.
    store
        If it :class:`ReadsTogether`, ranges are foreseen.
    files_in_flight
        How many files are indexed read by read at a time. Foreseen ranges are about as many at a time.
    """
    first: dict[int, str] = {}
    for path, size_bytes in sizes.items():
        first.setdefault(size_bytes, path)
    if not isinstance(store, ReadsTogether) or store.reads_together == 1 or len(first) == len(sizes):
        with ThreadPoolExecutor(files_in_flight) as pool:
            yield from zip(sizes, pool.map(index, [store] * len(sizes), sizes, sizes.values()), strict=True)
        return
    together: ReadsTogether = store
    ranges: dict[int, list[Range]] = {}
    of_thread = threading.local()

    def learn(path: str) -> T:
        noted = _Noted(store)
        found = index(noted, path, sizes[path])
        ranges[sizes[path]] = noted.ranges
        return found

    def repeat(path: str) -> list[T]:
        if not hasattr(of_thread, "memory"):
            of_thread.memory = bytearray(LONGEST_BYTES)
        try:
            return [index(_Ahead(together, ranges[sizes[path]], of_thread.memory), path, sizes[path])]
        except NotForeseen:
            return []

    with ThreadPoolExecutor(files_in_flight) as pool:
        yield from zip(first.values(), pool.map(learn, first.values()), strict=True)
        others = [path for path in sizes if first[sizes[path]] != path]
        different = []
        with ThreadPoolExecutor(max(1, files_in_flight // together.reads_together)) as few:
            for path, found in zip(others, few.map(repeat, others), strict=True):
                if found:
                    yield path, found[0]
                else:
                    different.append(path)
        yield from zip(different, pool.map(learn, different), strict=True)
