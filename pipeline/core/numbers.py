"""Arrays of whole numbers, of which very many are held."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

Ints: TypeAlias = "npt.NDArray[np.int64]"


def same_fields(one: Any, other: object) -> bool:
    """Whether two dataclasses are of one class and have equal fields, arrays by what they hold."""
    pairs = ((getattr(one, field.name), getattr(other, field.name)) for field in fields(one) if field.compare)
    return type(one) is type(other) and all(
        np.array_equal(a, b) if isinstance(a, np.ndarray) else a == b for a, b in pairs
    )


def numbered_within(lengths: Ints) -> Ints:
    """The number of each item within its run, for runs of these lengths that lie one after the other.

    With ``np.repeat`` it unrolls nested loops: ``np.repeat(first, lengths) + numbered_within(lengths)`` are the indices
    of all items of runs that begin at ``first``.

    >>> numbered_within(np.array([2, 3])).tolist()
    [0, 1, 0, 1, 2]
    """
    return np.arange(int(lengths.sum())) - np.repeat(np.cumsum(lengths) - lengths, lengths)


def hashed(columns: Iterable[npt.NDArray[Any]], count: int) -> npt.NDArray[np.uint64]:
    """A hash of each of ``count`` rows, given as columns of whole numbers."""
    hashes = np.ones(count, dtype=np.uint64)
    for column in columns:
        hashes ^= column.astype(np.uint64, copy=False)
        hashes *= np.uint64(0x9E3779B97F4A7C15)
        hashes ^= hashes >> np.uint64(29)
    return hashes
