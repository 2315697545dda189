"""How many files are indexed at a time: one where the store answers at once, many where it lets us wait."""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections import Counter
from contextlib import AbstractContextManager
from pathlib import Path

from paddle_reshard.pipeline.checkpoint.reading import Readable
from paddle_reshard.pipeline.core.events import Event
from paddle_reshard.storage.local.source import LocalSource
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
    for path in places:
        (tmp_path / path).write_bytes(chained(places[path], 500))
    store, before = Counting(tmp_path), len(os.listdir("/proc/self/fd"))
    assert index_here(follow, store, store.sizes()) == places
    assert store.times == Counter(places.keys())
    assert len(os.listdir("/proc/self/fd")) == before


def chained(places: list[int], size_bytes: int) -> bytes:
    """Linked entries: every eight bytes say where the next entry is."""
    content = bytearray(size_bytes)
    for here, after in itertools.pairwise([0, *places, 0]):
        content[here : here + 8] = after.to_bytes(8, "little")
    return bytes(content)


def follow(store: Readable, path: str, size_bytes: int) -> list[int]:
    found = [0]
    while after := int.from_bytes(store.read(path, found[-1], 8), "little"):
        found.append(after)
    return found[1:]
