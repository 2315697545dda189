"""Sort millions of numbers by their order."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from paddle_reshard.pipeline.core.numbers import Ints

if TYPE_CHECKING:
    import numpy.typing as npt


_FEW = 1 << 12
"""Up to this many numbers, NumPy's own sort is the fastest."""
_NEARLY_SORTED = 64
"""Numbers in which at most one in so many is smaller than the one before it are merged, which takes one pass."""


def order_of(numbers: npt.NDArray[Any]) -> Ints:
    """Indices that sort whole numbers that are not negative; equal numbers keep their order.

    NumPy sorts 64-bit numbers several times faster than it sorts their indices. So each number is sorted together with
    its index, in one word: without its lowest bits, if both do not fit. What these bits change is mended by a merge.

    >>> order_of(np.array([7, 2, 7, 0])).tolist()
    [3, 1, 0, 2]
    """
    return _sorted(numbers)[0]


def in_order(numbers: Ints) -> tuple[Ints, Ints]:
    """The order of numbers, as :func:`order_of`, and the numbers in it.

    >>> in_order(np.array([7, 2, 7, 0]))
    (array([3, 1, 0, 2]), array([0, 2, 7, 7]))
    """
    order, ordered = _sorted(numbers)
    return order, numbers[order] if ordered is None else ordered


def _sorted(numbers: npt.NDArray[Any]) -> tuple[Ints, npt.NDArray[Any] | None]:
    """The order of numbers; and the numbers in it, if they were needed."""
    count = len(numbers)
    if count < _FEW or np.count_nonzero(numbers[1:] < numbers[:-1]) <= count // _NEARLY_SORTED:
        return np.argsort(numbers, kind="stable"), None
    index_bits = (count - 1).bit_length()
    dropped = max(0, int(numbers.max()).bit_length() + index_bits - 64)
    words = numbers.astype(np.uint64)
    words >>= np.uint64(dropped)
    words <<= np.uint64(index_bits)
    words |= np.arange(count, dtype=np.uint64)
    words.sort()
    words &= np.uint64((1 << index_bits) - 1)
    order = words.view(np.int64)
    if not dropped:
        return order, None
    nearly = numbers[order]
    if (nearly[1:] < nearly[:-1]).any():
        mended = np.argsort(nearly, kind="stable")
        return order[mended], nearly[mended]
    return order, nearly


def distinct(numbers: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Each number once, sorted. ``numpy.unique`` does the same, but NumPy 2.3 loads its masked arrays for it.

    >>> distinct(np.array([7, 2, 7])).tolist()
    [2, 7]
    """
    ordered = np.sort(numbers)
    return ordered[np.r_[True, ordered[1:] != ordered[:-1]][: len(ordered)]]


def order_by(major: Ints, minor: Ints) -> Ints:
    """Indices that sort by ``major``, then by ``minor``, both not negative; equal pairs keep their order."""
    if not _fits(major, minor):
        return np.lexsort((minor, major))
    return order_of(places(major, minor))


def places(major: Ints, minor: Ints) -> Ints:
    """Numbers that are in the order of pairs of numbers that are not negative, and equal where the pairs are.

    >>> places(np.array([1, 0, 1]), np.array([0, 9, 0])).tolist()
    [10, 9, 10]
    """
    if not _fits(major, minor):
        order = np.lexsort((minor, major))
        differs = (np.diff(major[order]) != 0) | (np.diff(minor[order]) != 0)
        numbers = np.empty(len(order), dtype=np.int64)
        numbers[order] = np.r_[0, np.cumsum(differs)][: len(order)]
        return numbers
    return np.asarray(major.astype(np.int64) * (int(minor.max(initial=0)) + 1) + minor)


def _fits(major: Ints, minor: Ints) -> bool:
    return (int(major.max(initial=0)) + 1) * (int(minor.max(initial=0)) + 1) < 1 << 63
