"""Arithmetic with CRC-64/NVME: what the pieces of a message contribute to the checksum of the whole.

Without its initial and final inversion, a CRC is linear: the *remainder* of a message is the sum (exclusive or) of the
remainders of its pieces, each multiplied by ``x`` to the power of the bits that follow the piece. So the checksum of a
tensor can be added up from pieces in any order, and bytes that are zero contribute nothing.

A remainder is held as CRC registers hold it, reflected: bit 63 is the coefficient of 1, bit 0 that of ``x**63``.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from paddle_reshard.pipeline.core.numbers import Ints

if TYPE_CHECKING:
    import numpy.typing as npt

Remainders: TypeAlias = "npt.NDArray[np.uint64]"

ALGORITHM = "crc64nvme"
POLYNOMIAL = 0x9A6C9329AC4BC9B5
"""Reflected, without ``x**64``."""
ALL_BITS = (1 << 64) - 1
ONE = 1 << 63
DISTANCE_BITS = 56
"""Distances are below ``2**56`` bytes."""
_KEPT_MULTIPLIERS = 256
"""Each takes 16 KiB."""
_FEW = 64
"""So few products take less time together, octet by octet, than one octet of all after the other."""
_OCTETS = np.arange(8)
_KEPT_LENGTHS = 4096
"""Tensors of a model have few different sizes."""


class Multiplier:
    """Multiplication by ``x**(8 * nbytes)``: what ``nbytes`` bytes after a piece do to its contribution."""

    __slots__ = ("_tables",)

    def __init__(self, factor: int) -> None:
        """``factor`` is a remainder."""
        products = np.empty(64, dtype=np.uint64)
        for bit in range(63, -1, -1):
            products[bit] = factor
            factor = (factor >> 1) ^ (POLYNOMIAL if factor & 1 else 0)
        self._tables = np.zeros((8, 256), dtype=np.uint64)
        for bit in range(8):
            half = 1 << bit
            self._tables[:, half : 2 * half] = self._tables[:, :half] ^ products[bit::8, np.newaxis]

    def __call__(self, remainders: Remainders) -> Remainders:
        """The product of each remainder."""
        octets = np.ascontiguousarray(remainders, dtype="<u8").view(np.uint8).reshape(*remainders.shape, 8)
        if remainders.size <= _FEW:
            few: Remainders = np.bitwise_xor.reduce(self._tables[_OCTETS, octets], axis=-1)
            return few
        products = self._tables[0].take(octets[..., 0])
        for number in range(1, 8):
            products ^= self._tables[number].take(octets[..., number])
        return products

    def factor(self) -> int:
        """The factor, a remainder."""
        return int(self._tables[7][0x80])

    def of_one(self, remainder: int) -> int:
        """The product of a single remainder."""
        product = 0
        for number in range(8):
            product ^= self._tables.item(number, remainder >> 8 * number & 0xFF)
        return product


@lru_cache(DISTANCE_BITS)
def _doubling(power: int) -> Multiplier:
    """The multiplier for ``2**power`` bytes."""
    if power == 0:
        return Multiplier(ONE >> 8)
    half = _doubling(power - 1)
    return Multiplier(half.of_one(half.factor()))


@lru_cache(_KEPT_MULTIPLIERS)
def multiplier(nbytes: int) -> Multiplier:
    """The multiplier for pieces that are followed by ``nbytes`` bytes."""
    return Multiplier(_followed(ONE, nbytes))


def _followed(remainder: int, nbytes: int) -> int:
    """The contribution of a piece that is followed by ``nbytes`` bytes."""
    for power in range(nbytes.bit_length()):
        if nbytes >> power & 1:
            remainder = _doubling(power).of_one(remainder)
    return remainder


def shifted(remainders: Remainders, distances: Ints) -> Remainders:
    """Contributions of pieces that are followed by ``distances`` bytes each; both of shape ``(n,)``."""
    contributions = np.array(remainders, dtype=np.uint64)
    for power in range(int(distances.max(initial=0)).bit_length()):
        chosen = np.flatnonzero(distances >> power & 1)
        contributions[chosen] = _doubling(power)(contributions[chosen])
    return contributions


def in_a_row(remainders: Remainders, step_bytes: int) -> Remainders:
    """The sums along the last dim, whose items begin ``step_bytes`` apart and have the same length.

    Shape ``(…, n)`` becomes ``(…)``: a sum is what the items contribute up to the end of the last one.
    """
    while remainders.shape[-1] > 1:
        if remainders.shape[-1] % 2:  # zeros in front contribute nothing
            remainders = np.concatenate([np.zeros_like(remainders[..., :1]), remainders], axis=-1)
        remainders = multiplier(step_bytes)(remainders[..., 0::2]) ^ remainders[..., 1::2]
        step_bytes *= 2
    return remainders[..., 0] if remainders.shape[-1] else np.zeros(remainders.shape[:-1], dtype=np.uint64)


def checksum_of(remainder: int, nbytes: int) -> int:
    """The checksum of a message of ``nbytes`` bytes with this remainder; and the remainder of one with this checksum.

    >>> hex(checksum_of(0, 9))  # of nine zero bytes
    '0xd68bd4e2ded1af0c'
    """
    return remainder ^ _of_zeros(nbytes)


@lru_cache(_KEPT_LENGTHS)
def _of_zeros(nbytes: int) -> int:
    """The checksum of a message of zeros."""
    return _followed(ALL_BITS, nbytes) ^ ALL_BITS
