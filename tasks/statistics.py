"""How far two boxes of values are apart: what a comparison of two checkpoints that differ reports.

Values are compared as numbers, in float64, which holds those of every floating-point dtype of a checkpoint exactly.
NaNs are equal to NaNs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from paddle_reshard.tasks.boxes import blocks
from paddle_reshard.tasks.cast import cast, widened

_SIGNED: Mapping[int, np.dtype[Any]] = {size: np.dtype(f"<i{size}") for size in (2, 4, 8)}


class Tolerance(NamedTuple):
    """Values ``a`` and ``b`` agree if they differ by at most ``absolute + relative * abs(b)``."""

    absolute: float = 0.0
    relative: float = 0.0


class Statistics(NamedTuple):
    """How far two sides of a tensor, or of a box of it, are apart."""

    elements: int
    changed: int = 0
    """Elements that differ."""
    outside: int = 0
    """Elements that differ by more than the tolerance."""
    nans: int = 0
    """Elements that are NaN on one side only; they count as changed and outside, but not in the figures below."""
    largest: float = 0.0
    """Largest difference."""
    total: float = 0.0
    """Sum of all differences."""
    ulps: int = 0
    """Largest difference in units in the last place of the coarser dtype, after rounding to it."""
    relative: float = 0.0
    """Largest difference, divided by the larger of the two absolute values."""
    first: tuple[int, ...] | None = None
    """Index of the first element that differs."""
    values: tuple[float, float] = (0.0, 0.0)
    """The two values there."""

    @property
    def mean(self) -> float:
        """Mean difference of all elements."""
        return self.total / max(self.elements, 1)


def compare_values(
    side_a: npt.NDArray[Any],
    side_b: npt.NDArray[Any],
    dtypes: tuple[np.dtype[Any], np.dtype[Any]],
    tolerance: Tolerance,
) -> Statistics:
    """Compare two boxes of one shape; each is cast to its dtype first. bfloat16 is given as ``uint16``."""
    of_blocks = []
    for block in blocks(side_a.shape):
        a, b = (
            cast(np.ascontiguousarray(side[block]), dtype)
            for side, dtype in zip((side_a, side_b), dtypes, strict=True)
        )
        statistics = _of_block(a, b, tolerance)
        if statistics.first is not None:
            starts = [part.start or 0 for part in block] + [0] * (side_a.ndim - len(block))
            at = tuple(i + start for i, start in zip(statistics.first, starts, strict=True))
            statistics = statistics._replace(first=at)
        of_blocks.append(statistics)
    return combined(of_blocks)


def combined(parts: Iterable[Statistics]) -> Statistics:
    """The statistics of a tensor, from those of its parts."""
    parts = list(parts)
    changed = (part for part in parts if part.first is not None)
    first = min(changed, key=lambda part: part.first or (), default=Statistics(0))
    return Statistics(
        elements=sum(part.elements for part in parts),
        changed=sum(part.changed for part in parts),
        outside=sum(part.outside for part in parts),
        nans=sum(part.nans for part in parts),
        largest=max((part.largest for part in parts), default=0.0),
        total=_sum(part.total for part in parts),
        ulps=max((part.ulps for part in parts), default=0),
        relative=max((part.relative for part in parts), default=0.0),
        first=first.first,
        values=first.values,
    )


def _sum(totals: Iterable[float]) -> float:
    try:
        return math.fsum(totals)
    except OverflowError:
        return math.inf


def _of_block(a: npt.NDArray[Any], b: npt.NDArray[Any], tolerance: Tolerance) -> Statistics:
    if a.dtype == b.dtype and a.tobytes() == b.tobytes():
        return Statistics(a.size)
    x, y = _numbers(a), _numbers(b)
    nan = np.isnan(x), np.isnan(y)
    changed = (a != b) if _whole_numbers(a) and _whole_numbers(b) else (x != y) & ~(nan[0] & nan[1])
    if not changed.any():
        return Statistics(a.size)
    one_sided = nan[0] ^ nan[1]
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        apart = np.where(changed & ~one_sided, np.abs(x - y), 0.0)
        outside = one_sided | (changed & ~(apart <= tolerance.absolute + tolerance.relative * np.abs(y)))
        size = np.maximum(np.abs(x), np.abs(y))
        relative = np.where(apart > 0, apart / size, 0.0)
    relative = np.where(np.isnan(relative), 1.0, relative)  # one of them is infinite
    at = tuple(int(i) for i in np.argwhere(changed)[0])
    return Statistics(
        a.size,
        int(changed.sum()),
        int(outside.sum()),
        int(one_sided.sum()),
        float(apart.max()),
        float(apart.sum()),
        _ulps(a, b, changed & ~one_sided),
        float(relative.max()),
        at,
        (float(x[at]), float(y[at])),
    )


def _numbers(values: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    return (widened(values) if values.dtype == np.uint16 else values).astype(np.float64)


def _coarseness(dtype: np.dtype[Any]) -> tuple[int, bool]:
    """Smaller for coarser dtypes; bfloat16 is coarser than float16."""
    return dtype.itemsize, dtype != np.uint16


def _whole_numbers(values: npt.NDArray[Any]) -> bool:
    return values.dtype.kind in "iub" and values.dtype != np.uint16


def _ulps(a: npt.NDArray[Any], b: npt.NDArray[Any], chosen: npt.NDArray[np.bool_]) -> int:
    """The largest difference in units in the last place; of integers, their largest difference.

    Bits of floating-point numbers, with those of negative ones mirrored, count the numbers in between.
    """
    a, b = a[chosen], b[chosen]
    if not a.size:
        return 0
    if _whole_numbers(a) or _whole_numbers(b):
        return int(np.abs(a.astype(np.float64) - b.astype(np.float64)).max())
    coarser: np.dtype[Any] = a.dtype if _coarseness(a.dtype) <= _coarseness(b.dtype) else b.dtype
    places = []
    for side in (a, b):
        bits = cast(side, coarser).view(_SIGNED[coarser.itemsize]).astype(np.int64)
        sign = np.int64(-1) << np.int64(8 * coarser.itemsize - 1)
        places.append(np.where(bits < 0, sign - bits, bits).astype(np.float64))
    return int(np.abs(places[0] - places[1]).max())
