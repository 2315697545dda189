"""Casts between floating-point dtypes, bit for bit as the formats define them."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]


def bfloat16_bits(values: Floats) -> npt.NDArray[np.uint16]:
    """Round to bfloat16, to nearest, ties to even; returns bit patterns.

    Any NaN becomes 0x7fff, as in Paddle's own cast (paddlepaddle 3.3.1, observed).

    >>> [hex(b) for b in bfloat16_bits(np.float32([1.0, 1.00390625, 1.01171875]))]
    ['0x3f80', '0x3f80', '0x3f82']
    """
    flat = np.ascontiguousarray(values, dtype="<f4").reshape(-1)
    return upper_halves(flat, np.empty(flat.shape, "<u4")).reshape(values.shape).copy()


def upper_halves(values: Floats, words: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint16]:
    """:func:`bfloat16_bits` of flat ``values``, as a view of every second half of ``words``, which are overwritten.

    Both are contiguous and have the same length. ::

        value    0x3f81 8000      words    0x3f82 0000      result    0x3f82
    """
    bits = values.view("<u4")
    np.right_shift(bits, 16, out=words)
    np.bitwise_and(words, 1, out=words)
    np.add(words, 0x7FFF, out=words)
    np.add(words, bits, out=words)  # may wrap around for a NaN
    nan = np.isnan(values)
    if nan.any():
        words[nan] = 0x7FFF << 16
    return words.view("<u2")[1::2]


def cast(values: npt.NDArray[Any], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """``values`` as another floating-point dtype, rounded once, to nearest, ties to even; any shape.

    bfloat16 is represented by its bit patterns, ``uint16``. Values too large for float16 become infinite.

    >>> cast(np.uint16([0x3F80, 0xC000]), np.dtype("<f2"))
    array([ 1., -2.], dtype=float16)
    """
    if values.dtype == dtype:
        return values
    wide = widened(values)
    if dtype == np.uint16:
        return bfloat16_bits(wide)
    with np.errstate(over="ignore"):
        return wide.astype(dtype)


def cast_in_range(values: npt.NDArray[Any], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """Like :func:`cast`, but finite values must stay finite.

    Raises
    ------
    OverflowError
        With the first value that is too large.
    """
    converted = cast(values, dtype)
    if dtype == np.float16:
        wide = widened(values)
        lost = np.isinf(converted) & np.isfinite(wide)
        if lost.any():
            raise OverflowError(f"the value {wide[lost][0]} is too large for {dtype.name}")
    return converted


def widened(values: npt.NDArray[Any]) -> Floats:
    """Values as float32, which represents every bfloat16 (given as ``uint16``) and float16 exactly."""
    if values.dtype == np.uint16:
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float32, copy=False)


@cache
def fp8_values() -> Floats:
    """The value of each of the 256 codes of e4m3 (OCP OFP8 1.0: bias 7, no infinities, NaN is ``S.1111.111``).

    >>> [float(fp8_values()[code]) for code in (0x00, 0x01, 0x38, 0x7E, 0xFE)]
    [0.0, 0.001953125, 1.0, 448.0, -448.0]
    """
    codes = np.arange(256)
    exponent, fraction = codes >> 3 & 15, codes & 7
    magnitude = np.where(exponent == 0, np.ldexp(fraction / 8, -6), np.ldexp(1 + fraction / 8, exponent - 7))
    magnitude[codes & 0x7F == 0x7F] = np.nan
    values = np.copysign(magnitude, np.where(codes & 0x80, -1.0, 1.0)).astype(np.float32)
    values.flags.writeable = False
    return values
