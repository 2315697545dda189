"""Columns of half-open byte ranges, each with a key; ranges of different keys are independent."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from paddle_reshard.pipeline.core.columns import BLOCK_ROWS, Flags
from paddle_reshard.pipeline.core.numbers import Ints
from paddle_reshard.pipeline.core.sorting import in_order


def merge(keys: Ints, start: Ints, stop: Ints, gap: int = 0) -> tuple[Ints, Ints, Ints]:
    """Union of the ranges of each key, joining those at most ``gap`` apart; sorted by key and start.

    >>> merge(np.array([1, 0, 1]), np.array([4, 0, 0]), np.array([6, 9, 4]))
    (array([0, 1]), array([0, 0]), array([9, 6]))
    """
    order, opens, nbytes = _sweep(keys, start, stop, gap)
    first = order[opens]
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
    order, opens, nbytes = _sweep(keys, start, stop, -1)
    number = np.empty(len(order), dtype=np.int64)
    number[order] = np.cumsum(opens) - 1
    return Unions(number, nbytes)


def union_bytes(owners: Ints, files: Ints, start: Ints, stop: Ints, count: int) -> Ints:
    """How many bytes the ranges of each of ``count`` owners cover together.

    >>> union_bytes(np.array([0, 0, 1]), np.array([3, 3, 4]), np.array([0, 5, 0]), np.array([7, 9, 2]), 3)
    array([9, 2, 0])
    """
    number = int(files.max(initial=0)) + 1
    keys, low, high = merge(owners * number + files, start, stop)
    return np.bincount(keys // number, weights=high - low, minlength=count).astype(np.int64)


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


def _sweep(keys: Ints, start: Ints, stop: Ints, gap: int) -> tuple[Ints, Flags, Ints]:
    """The order of ranges by key and start, whether each opens a new union, and the bytes that every union covers."""
    if not len(start):
        none = np.zeros(0, dtype=np.int64)
        return none, none.astype(bool), none
    # The keys lie in one line, each beyond the ranges of the one before: one sort and one running maximum serve all.
    span = int(stop.max()) + 2 + abs(gap)
    fits = (int(keys.max()) + 1) * span < 1 << 63
    shift = (keys if fits else dense_numbers(keys)) * span
    order, begin = in_order(start + shift)
    reach = np.maximum.accumulate((stop + shift)[order])
    opens = np.ones(len(order), dtype=bool)
    np.greater(begin[1:] - gap, reach[:-1], out=opens[1:])
    first = np.flatnonzero(opens)
    return order, opens, reach[np.r_[first[1:], len(order)] - 1] - begin[first]
