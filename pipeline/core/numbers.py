"""Arrays of whole numbers, of which very many are held."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

Ints: TypeAlias = "npt.NDArray[np.int64]"


def numbered_within(lengths: Ints) -> Ints:
    """The number of each item within its run, for runs of these lengths that lie one after the other.

    With ``np.repeat`` it unrolls nested loops: ``np.repeat(first, lengths) + numbered_within(lengths)`` are the indices
    of all items of runs that begin at ``first``.

    >>> numbered_within(np.array([2, 3])).tolist()
    [0, 1, 0, 1, 2]
    """
    return np.arange(int(lengths.sum())) - np.repeat(np.cumsum(lengths) - lengths, lengths)
