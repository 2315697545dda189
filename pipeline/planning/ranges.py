"""Columns of half-open byte ranges, each with a key; ranges of different keys are independent."""

from __future__ import annotations

import numpy as np

from paddle_reshard.pipeline.core.geometry import Ints


def merge(keys: Ints, start: Ints, stop: Ints, gap: int = 0) -> tuple[Ints, Ints, Ints]:
    """Union of the ranges of each key, joining those at most ``gap`` apart; sorted by key and start.

    >>> merge(np.array([1, 0, 1]), np.array([4, 0, 0]), np.array([6, 9, 4]))
    (array([0, 1]), array([0, 0]), array([9, 6]))
    """
    if not len(start):
        empty = np.zeros(0, dtype=np.int64)
        return empty, empty, empty
    order, opens, reach = _sweep(keys, start, stop, gap)
    begin = np.flatnonzero(opens)
    end = np.r_[begin[1:], len(start)] - 1
    return keys[order[begin]].astype(np.int64), start[order[begin]], reach[end]


def label(keys: Ints, start: Ints, stop: Ints) -> Ints:
    """Number the ranges so that those that overlap, directly or through further ranges, share a number.

    >>> label(np.array([0, 0, 0, 1]), np.array([0, 5, 3, 0]), np.array([5, 9, 4, 9]))
    array([0, 1, 0, 2])
    """
    found = np.zeros(len(start), dtype=np.int64)
    if len(start):
        order, opens, _ = _sweep(keys, start, stop, -1)
        found[order] = np.cumsum(opens) - 1
    return found


def union_bytes(owners: Ints, files: Ints, start: Ints, stop: Ints, count: int) -> Ints:
    """How many bytes the ranges of each of ``count`` owners cover together.

    Overlapping ranges nearly always have one owner; a single sweep along the files then finds the bytes that each adds.

    >>> union_bytes(np.array([0, 0, 1]), np.array([3, 3, 4]), np.array([0, 5, 0]), np.array([7, 9, 2]), 3)
    array([9, 2, 0])
    """
    if not len(start):
        return np.zeros(count, dtype=np.int64)
    order, opens, reach = _sweep(files, start, stop, -1)
    owner, low, high = owners[order], start[order], stop[order]
    known = np.r_[0, reach[:-1]]
    del reach
    np.copyto(known, low, where=opens)
    np.maximum(known, low, out=known)
    added = np.maximum(high - known, 0)
    del known
    run = np.cumsum(opens) - 1
    mixed = np.zeros(int(run[-1]) + 1, dtype=bool)
    mixed[run[1:][~opens[1:] & (owner[1:] != owner[:-1])]] = True
    apart = mixed[run]
    total = np.bincount(owner[~apart], weights=added[~apart], minlength=count)
    number = int(files.max()) + 1
    keys, low, high = merge(owner[apart] * number + files[order][apart], low[apart], high[apart])
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


def _sweep(keys: Ints, start: Ints, stop: Ints, gap: int) -> tuple[Ints, Ints, Ints]:
    """Ranges sorted by key and start: their order, whether each opens a new union, and the union's stop so far."""
    # Every key's ranges are shifted beyond those of the previous key: one sort and one running maximum serve all keys.
    shift = dense_numbers(keys)
    shift *= int(stop.max()) + 2 + abs(gap)
    begin = start + shift
    order = np.argsort(begin)
    begin = begin[order]
    reach = (stop + shift)[order]
    np.maximum.accumulate(reach, out=reach)
    opens = np.ones(len(order), dtype=bool)
    begin -= gap
    np.greater(begin[1:], reach[:-1], out=opens[1:])
    del begin
    reach -= shift[order]
    return order, opens, reach
