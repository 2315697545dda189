"""Index files in this process, with threads if the store is slow to respond."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

from paddle_reshard.pipeline.checkpoint.reading import Readable
from paddle_reshard.pipeline.core.events import FilesRead, Observer, ignore_events
from paddle_reshard.storage.store import ReadRange

T = TypeVar("T")

FILES_IN_FLIGHT = 64
"""Files indexed at a time if the store is slow to respond: each thread mostly waits."""
LATE_SECONDS = 0.1
"""Total waiting time up to which threads are not worth starting."""


def index_here(
    index: Callable[[Readable, str, int], T],
    store: Readable,
    sizes: Mapping[str, int],
    observe: Observer = ignore_events,
) -> dict[str, T]:
    """Index files in this process: one by one, and in threads once the store proves slow to respond.

    Threads help only while they wait. With a fast disk they compete for the interpreter, and the same files take twice
    as long. ``observe`` receives the number of files read so far.
    """
    entries: dict[str, T] = {}
    for path, entry in _indexed(index, store, sizes):
        entries[path] = entry
        observe(FilesRead(len(entries), len(sizes)))
    return {path: entries[path] for path in sizes}


def _indexed(
    index: Callable[[Readable, str, int], T], store: Readable, sizes: Mapping[str, int]
) -> Iterator[tuple[str, T]]:
    pending = iter(sizes.items())
    waited = worked = 0.0
    with _kept_open(store) as files:
        for path, size_bytes in pending:
            began, began_work = time.perf_counter(), time.thread_time()
            entry = index(files, path, size_bytes)
            work = time.thread_time() - began_work
            worked += work
            waited += time.perf_counter() - began - work
            yield path, entry
            if waited > max(LATE_SECONDS, 2 * worked):
                break
    if rest := dict(pending):

        def index_one(path: str) -> T:
            with _kept_open(store) as files:
                return index(files, path, rest[path])

        with ThreadPoolExecutor(FILES_IN_FLIGHT) as pool:
            yield from zip(rest, pool.map(index_one, rest), strict=True)


def _kept_open(store: Readable) -> AbstractContextManager[Readable]:
    """The same files for many reads by one thread."""
    return store.kept_open() if isinstance(store, ReadRange) else nullcontext(store)
