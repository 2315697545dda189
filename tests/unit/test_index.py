"""How many files are indexed at a time: one where the store answers at once, many where it lets us wait."""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from paddle_reshard.pipeline.core.errors import CheckpointError
from paddle_reshard.pipeline.core.events import Event
from paddle_reshard.pipeline.layouts.reading import Readable
from paddle_reshard.storage.local.source import LocalSource
from paddle_reshard.storage.store import Read
from paddle_reshard.tasks.index import FILES_IN_FLIGHT, LATE_SECONDS, index_here

SIZES = {f"file-{number:02d}": number for number in range(40)}


class Store:
    """Answers after a while, and knows who asked."""

    def __init__(self, late_seconds: float) -> None:
        self.late_seconds = late_seconds
        self.asked_by: list[int] = []
        self.waiting = self.most_waiting = 0
        self.alone = threading.Lock()

    def read(self, path: str, byte_offset: int, nbytes: int) -> bytes:
        with self.alone:
            self.asked_by.append(threading.get_ident())
            self.waiting += 1
            self.most_waiting = max(self.most_waiting, self.waiting)
        time.sleep(self.late_seconds)
        with self.alone:
            self.waiting -= 1
        return bytes(nbytes)


def length(store: Readable, path: str, size_bytes: int) -> tuple[str, int]:
    return path, len(store.read(path, 0, size_bytes))


def test_a_store_that_answers_at_once_is_read_by_the_thread_that_asks() -> None:
    store, heard = Store(0), list[Event]()
    found = index_here(length, store, SIZES, heard.append)
    assert found == {path: (path, size) for path, size in SIZES.items()}
    assert set(store.asked_by) == {threading.get_ident()}
    assert [event.done for event in heard] == [*range(1, len(SIZES) + 1)]


def test_a_store_that_answers_late_is_asked_for_many_files_at_a_time() -> None:
    store, heard = Store(LATE_SECONDS * 1.5), list[Event]()
    found = index_here(length, store, SIZES, heard.append)
    assert list(found.items()) == [(path, (path, size)) for path, size in SIZES.items()]
    assert store.asked_by.count(threading.get_ident()) == 1
    assert 1 < store.most_waiting <= FILES_IN_FLIGHT
    assert [event.done for event in heard] == [*range(1, len(SIZES) + 1)]


def test_no_files_are_no_error() -> None:
    assert index_here(length, Store(0), {}) == {}


class Counting(LocalSource):
    """A folder that counts how often each file is opened."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.times: Counter[str] = Counter()

    def opened(self, path: str) -> AbstractContextManager[int]:
        self.times[path] += 1
        return super().opened(path)


def test_a_file_on_a_disk_is_opened_once_however_often_it_is_read(tmp_path: Path) -> None:
    places = {f"file-{number:02d}": list(range(10, 400, 10 + number)) for number in range(20)}
    for path, content in Chains(places, dict.fromkeys(places, 500)).files.items():
        (tmp_path / path).write_bytes(content)
    store, before = Counting(tmp_path), len(os.listdir("/proc/self/fd"))
    assert index_here(follow, store, store.sizes()) == places
    assert store.times == Counter(places.keys())
    assert len(os.listdir("/proc/self/fd")) == before


class Chains:
    """Files of linked entries: every eight bytes say where the next entry is. Answers late, and counts reads."""

    reads_together = 8

    def __init__(self, files: dict[str, list[int]], size_bytes: dict[str, int]) -> None:
        self.files = {path: self._written(places, size_bytes[path]) for path, places in files.items()}
        self.entries = {path: len(places) + 1 for path, places in files.items()}
        self.alone_of: Counter[str] = Counter()
        self.together: list[int] = []

    @staticmethod
    def _written(places: list[int], size_bytes: int) -> bytes:
        content = bytearray(size_bytes)
        for here, after in itertools.pairwise([0, *places, 0]):
            content[here : here + 8] = after.to_bytes(8, "little")
        return bytes(content)

    def read(self, path: str, byte_offset: int, nbytes: int) -> bytes:
        time.sleep(1.2 * LATE_SECONDS / self.entries[path])
        self.alone_of[path] += 1
        return self.files[path][byte_offset : byte_offset + nbytes]

    def read_many(self, reads: Sequence[Read]) -> None:
        self.together.append(len(reads))
        for read in reads:
            read.buffer[:] = self.files[read.path][read.byte_offset : read.byte_offset + len(read.buffer)]


def follow(store: Readable, path: str, size_bytes: int) -> list[int]:
    found = [0]
    while after := int.from_bytes(store.read(path, found[-1], 8), "little"):
        found.append(after)
    return found[1:]


def test_files_of_one_size_are_read_in_the_places_of_the_first_and_no_other_file_is_read_wrongly() -> None:
    usual, shifted, shorter = ([x + by for x in range(100, 5000, 100)] for by in (0, 1, 2))
    places = {f"{kind}-{number}": usual for number in range(6) for kind in ("first", "a", "b")}
    places |= {"a-shifted": shifted, "b-shorter": shorter[:20], "a-longer": [*usual, 5500], "c": [9]}
    sizes = {path: {"f": 20_000, "a": 6_000, "b": 7_000, "c": 8_000}[path[0]] for path in places}
    store = Chains(places, sizes)
    assert index_here(follow, store, sizes) == places
    # Read one by one: the file that shows that the store is late, one of each size, and those that differ.
    learnt = {"first-0", "first-1", "a-0", "b-0", "c"}
    assert store.alone_of.keys() == learnt | {"a-shifted", "b-shorter", "a-longer"}
    assert max(store.together) == 8
    assert (
        sum(store.together)
        < 1.1 * sum(len(places[path]) + 1 for path in places.keys() - store.alone_of.keys()) + 100
    )


def test_a_failure_while_reading_ahead_is_that_of_the_file() -> None:
    class Failing(Chains):
        def read_many(self, reads: Sequence[Read]) -> None:
            raise CheckpointError(f"{reads[0].path}: changed while it was read")

    places = {f"file-{number}": list(range(100, 3000, 100)) for number in range(4)}
    sizes = dict.fromkeys(places, 4000)
    with pytest.raises(CheckpointError, match="file-2: changed"):
        index_here(follow, Failing(places, sizes), sizes)
