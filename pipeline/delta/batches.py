"""Consecutive blocks that are read, worked on and written together, and how many batches are in memory at a time."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol, TypeVar

from paddle_reshard.pipeline.core.errors import MemoryBudgetError
from paddle_reshard.pipeline.delta.coding import BLOCK_BYTES
from paddle_reshard.pipeline.delta.document import BLOCK_MEMORY_BYTES
from paddle_reshard.pipeline.planning.plan import FOOTPRINT_BYTES
from paddle_reshard.storage.store import Read, ReadRange

BATCH_BYTES = BLOCK_BYTES
"""The least that a batch has, unless it is the last of its file."""
_CODING_BLOCKS = 6
"""Memory for writing down one block and compressing it, or the reverse, in blocks: differences, positions, planes."""

Item = TypeVar("Item")
Result = TypeVar("Result")


class Sized(Protocol):
    """Anything with a number of bytes."""

    @property
    def nbytes(self) -> int:
        """How many."""


S = TypeVar("S", bound=Sized)


def batches(blocks: Iterable[S], batch_bytes: int = BATCH_BYTES) -> Iterator[tuple[int, tuple[S, ...]]]:
    """First byte in their file, and the blocks, of each batch of a file."""
    start = size = 0
    batch: list[S] = []
    for block in blocks:
        batch.append(block)
        size += block.nbytes
        if size >= batch_bytes:
            yield start, tuple(batch)
            start, size, batch = start + size, 0, []
    if batch:
        yield start, tuple(batch)


def batches_at_a_time(what: str, blocks: int, batch_bytes: int, budget_bytes: int) -> int:
    """How many batches may be in memory, so that all of it stays below the budget.

    Parameters
    ----------
    what
        Whose memory it is, for the message.
    blocks
        How many of them are known at a time.

    Raises
    ------
    MemoryBudgetError
        If there is no room for one.
    """
    # The new bytes, the old ones and what is stored; a batch is at most a block longer than it has to be.
    batch = 3 * (batch_bytes + BLOCK_BYTES) + _CODING_BLOCKS * BLOCK_BYTES
    held = FOOTPRINT_BYTES + blocks * BLOCK_MEMORY_BYTES
    if held + batch > budget_bytes:
        raise MemoryBudgetError(what, budget_bytes, held + batch)
    return min(2 * len(os.sched_getaffinity(0)), (budget_bytes - held) // batch)


def in_order(do: Callable[[Item], Result], items: Iterable[Item], at_a_time: int) -> Iterator[Result]:
    """Do something with each item on threads; results in the order of the items, no more than these in memory."""
    waiting: deque[Future[Result]] = deque()
    with ThreadPoolExecutor(at_a_time, thread_name_prefix="batch") as pool:
        try:
            for item in items:
                if len(waiting) == at_a_time:
                    yield waiting.popleft().result()
                waiting.append(pool.submit(do, item))
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()


def read_at(source: ReadRange, path: str, start: int, nbytes: int) -> memoryview:
    """Bytes of a file, held once."""
    buffer = memoryview(bytearray(nbytes))
    if nbytes:
        source.read_into(path, start, buffer)
    return buffer


def read_ranges(source: ReadRange, ranges: Sequence[tuple[str, int, int] | None]) -> list[memoryview | None]:
    """The bytes at each ``(path, first byte, number of bytes)``; those that follow each other are one request."""
    merged: list[tuple[str, int, int]] = []
    found: list[tuple[int, int, int] | None] = []
    for wanted in ranges:
        if wanted is None:
            found.append(None)
            continue
        path, start, nbytes = wanted
        last = merged[-1] if merged else None
        if last is not None and (last[0], last[1] + last[2]) == (path, start):
            merged[-1] = (path, last[1], last[2] + nbytes)
        else:
            merged.append(wanted)
        found.append((len(merged) - 1, start - merged[-1][1], nbytes))
    buffers = [memoryview(bytearray(nbytes)) for _, _, nbytes in merged]
    source.read_many([Read(*p[:2], buffer) for p, buffer in zip(merged, buffers, strict=True)])
    return [None if f is None else buffers[f[0]][f[1] : f[1] + f[2]] for f in found]
