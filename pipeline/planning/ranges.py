"""Columns of half-open byte ranges, each with a key; ranges of different keys are independent."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from paddle_reshard.pipeline.core.columns import BLOCK_ROWS, Flags
from paddle_reshard.pipeline.core.numbers import Ints
from paddle_reshard.pipeline.core.sorting import in_order, places


def merge(keys: Ints, start: Ints, stop: Ints, gap: int = 0) -> tuple[Ints, Ints, Ints]:
    """Union of the ranges of each key, joining those at most ``gap`` apart; sorted by key and start.

    >>> merge(np.array([1, 0, 1]), np.array([4, 0, 0]), np.array([6, 9, 4]))
    (array([0, 1]), array([0, 0]), array([9, 6]))
    """
    if not len(start):
        empty = np.zeros(0, dtype=np.int64)
        return empty, empty, empty
    swept = _sweep(keys, start, stop, gap)
    begin = np.flatnonzero(swept.opens)
    first = swept.order[begin]
    # The union is as long in the line of all keys as in its own.
    nbytes = swept.reach[np.r_[begin[1:], len(start)] - 1] - swept.begin[begin]
    return keys[first].astype(np.int64), start[first], start[first] + nbytes


def by_owner(owners: Ints, rows: int = BLOCK_ROWS) -> Iterator[slice]:
    """Divide rows into blocks of about so many ``rows`` where they are sorted by owner; an owner is never divided.

    Ranges of several owners are merged faster block by block: everything stays in the processor's cache.

    >>> list(by_owner(np.array([0, 0, 1, 1, 1, 2]), 3))
    [slice(0, 5, None), slice(5, 6, None)]
    """
    if len(owners) <= rows or (owners[1:] < owners[:-1]).any():
        yield slice(0, len(owners))
        return
    first = 0
    while first < len(owners):
        last = owners[min(first + rows, len(owners)) - 1]
        stop = int(np.searchsorted(owners, last, side="right"))
        yield slice(first, stop)
        first = stop


class Ranges(NamedTuple):
    """Ranges of bytes that do not overlap, sorted by key and start."""

    keys: Ints
    start: Ints
    stop: Ints

    def holding(self, keys: Ints, byte: Ints) -> Ints:
        """The number of the range with its key that holds each byte; -1 for none.

        >>> Ranges(np.array([0, 0, 2]), np.array([0, 8, 4]), np.array([8, 9, 6])).holding(
        ...     np.array([0, 0, 1, 2]), np.array([7, 8, 9, 3])
        ... ).tolist()
        [0, 1, -1, -1]
        """
        if not len(self.keys):
            return np.full(len(keys), -1)
        both = places(np.concatenate([self.keys, keys]), np.concatenate([self.start, byte]))
        last = np.searchsorted(both[: len(self.keys)], both[len(self.keys) :], side="right") - 1
        holds = (last >= 0) & (self.keys[last] == keys) & (byte < self.stop[last])
        return np.where(holds, last, -1)


def label(keys: Ints, start: Ints, stop: Ints) -> Ints:
    """Number the ranges so that those that overlap, directly or through further ranges, share a number.

    >>> label(np.array([0, 0, 0, 1]), np.array([0, 5, 3, 0]), np.array([5, 9, 4, 9]))
    array([0, 1, 0, 2])
    """
    return unions(keys, start, stop).number


class Unions(NamedTuple):
    """The result of :func:`unions`."""

    number: Ints
    """Numbers of the unions, as :func:`label` gives them."""
    nbytes: Ints
    """Bytes that the ranges of each number cover together."""


def unions(keys: Ints, start: Ints, stop: Ints) -> Unions:
    """Number the ranges as :func:`label` does, and measure what those of each number cover together.

    >>> unions(np.array([0, 0, 0, 1]), np.array([0, 5, 3, 0]), np.array([5, 9, 4, 9])).nbytes
    array([5, 4, 9])
    """
    if not len(start):
        return Unions(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64))
    swept = _sweep(keys, start, stop, -1)
    begin = np.flatnonzero(swept.opens)
    nbytes = swept.reach[np.r_[begin[1:], len(start)] - 1] - swept.begin[begin]
    # The memory of what was swept serves the numbers too: new pages cost more than a pass over known ones.
    number, labels = swept.reach, swept.end
    np.copyto(number, swept.opens)
    np.cumsum(number, out=number)
    number -= 1
    labels[swept.order] = number
    return Unions(labels, nbytes)


def union_bytes(owners: Ints, files: Ints, start: Ints, stop: Ints, count: int) -> Ints:
    """How many bytes the ranges of each of ``count`` owners cover together.

    Overlapping ranges nearly always have one owner; a single sweep along the files then finds the bytes that each adds.

    >>> union_bytes(np.array([0, 0, 1]), np.array([3, 3, 4]), np.array([0, 5, 0]), np.array([7, 9, 2]), 3)
    array([9, 2, 0])
    """
    if not len(start):
        return np.zeros(count, dtype=np.int64)
    order, opens, begin, end, reach = _sweep(files, start, stop, -1)
    # A range adds what lies beyond those before it.
    added = begin
    np.maximum(begin[1:], reach[:-1], out=added[1:])
    np.subtract(end, added, out=added)
    np.maximum(added, 0, out=added)
    del begin, end, reach
    owner = owners[order]
    changes = ~opens[1:] & (owner[1:] != owner[:-1])
    if not changes.any():
        return np.bincount(owner, weights=added, minlength=count).astype(np.int64)
    run = np.cumsum(opens) - 1
    mixed = np.zeros(int(run[-1]) + 1, dtype=bool)
    mixed[run[1:][changes]] = True
    apart = mixed[run]
    total = np.bincount(owner[~apart], weights=added[~apart], minlength=count)
    number = int(files.max()) + 1
    chosen = order[apart]
    keys, low, high = merge(owner[apart] * number + files[chosen], start[chosen], stop[chosen])
    total = total + np.bincount(keys // number, weights=high - low, minlength=count)
    return np.asarray(total, dtype=np.int64)


def dense_numbers(values: Ints) -> Ints:
    """Renumber non-negative integers densely, in order: for each, how many distinct smaller values there are.

    >>> dense_numbers(np.array([7, 2, 7, 9]))
    array([1, 0, 1, 2])
    """
    largest = int(values.max(initial=0))
    if largest > 64 * (len(values) + 1024):  # a table of all numbers would be much larger than the column
        return np.unique(values, return_inverse=True)[1].astype(np.int64)
    occurs = np.zeros(largest + 1, dtype=bool)
    occurs[values] = True
    return (np.cumsum(occurs) - 1)[values]


class _Swept(NamedTuple):
    """Ranges sorted by key and start. The keys lie in one line, each beyond the ranges of the one before."""

    order: Ints
    opens: Flags
    """Whether each range opens a new union."""
    begin: Ints
    """First byte in this line."""
    end: Ints
    """One past the last byte in this line."""
    reach: Ints
    """The furthest end so far."""


def _sweep(keys: Ints, start: Ints, stop: Ints, gap: int) -> _Swept:
    # One sort and one running maximum serve all keys.
    span = int(stop.max()) + 2 + abs(gap)
    fits = (int(keys.max()) + 1) * span < 1 << 63
    shift = (keys if fits else dense_numbers(keys)) * span
    order, begin = in_order(start + shift)
    shift += stop
    end = shift[order]
    reach = np.maximum.accumulate(end, out=shift)
    opens = np.ones(len(order), dtype=bool)
    np.greater(begin[1:] - gap, reach[:-1], out=opens[1:])
    return _Swept(order, opens, begin, end, reach)
