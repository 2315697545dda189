"""Columns of half-open byte ranges, each with a key: ranges of different keys have nothing to do with each other."""

from __future__ import annotations

import numpy as np

from paddle_reshard.pipeline.geometry import Ints


def merge(keys: Ints, start: Ints, stop: Ints, gap: int = 0) -> tuple[Ints, Ints, Ints]:
    """Union of the ranges of each key; those at most ``gap`` apart are joined. Sorted by key and start.

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
    """For each range a number that it shares with all ranges that it overlaps, directly or through others.

    >>> label(np.array([0, 0, 0, 1]), np.array([0, 5, 3, 0]), np.array([5, 9, 4, 9]))
    array([0, 1, 0, 2])
    """
    found = np.zeros(len(start), dtype=np.int64)
    if len(start):
        order, opens, _ = _sweep(keys, start, stop, -1)
        found[order] = np.cumsum(opens) - 1
    return found


def _sweep(keys: Ints, start: Ints, stop: Ints, gap: int) -> tuple[Ints, Ints, Ints]:
    """The ranges by key and start: their order, where a new union opens, and how far it reaches by then."""
    order = np.lexsort((start, keys))
    keys, start, stop = keys[order], start[order], stop[order]
    # A running maximum within each key: shift every key's ranges beyond those of the key before.
    shift = np.cumsum(np.r_[0, np.diff(keys) != 0]) * (int(stop.max()) + 2 + abs(gap))
    reach = np.maximum.accumulate(stop + shift)
    opens = np.r_[True, (start + shift)[1:] > reach[:-1] + gap]
    return order, opens, reach - shift
