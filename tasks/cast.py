"""Casts that a format defines, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

BLOCK_ELEMENTS = 1 << 18
"""Casts and comparisons work in blocks of about this size, so that they need no memory to speak of."""


def bfloat16_bits(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Round to nearest, ties to even; the bit patterns of bfloat16.

    Any NaN becomes 0x7fff, as in Paddle's own cast (paddlepaddle 3.3.1, seen by running it).

    >>> [hex(b) for b in bfloat16_bits(np.float32([1.0, 1.00390625, 1.01171875]))]
    ['0x3f80', '0x3f80', '0x3f82']
    """
    bits = np.ascontiguousarray(values, dtype="<f4").view(np.uint32)
    rounded = ((bits + (((bits >> 16) & 1) + np.uint32(0x7FFF))) >> 16).astype(np.uint16)
    rounded[np.isnan(values)] = 0x7FFF
    return rounded


def blocks(extents: tuple[int, ...], elements: int = BLOCK_ELEMENTS) -> Iterator[tuple[slice, ...]]:
    """Cut a box into slices of at most about ``elements`` elements each, in order."""
    if not extents:
        yield ()
        return
    inner = 1
    for extent in extents[1:]:
        inner *= extent
    rows = max(1, elements // max(inner, 1))
    for low in range(0, extents[0], rows):
        high = min(low + rows, extents[0])
        if inner > elements:
            for rest in blocks(extents[1:], elements):
                yield (slice(low, high), *rest)
        else:
            yield (slice(low, high),)
