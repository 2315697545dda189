"""How a block of a new file is written down, given the block of an old file that it is compared with.

Both are arrays of unsigned integers, whatever their bytes mean. What is written is the difference of each pair modulo
the integers' range, folded so that small steps in either direction are small numbers: 0, −1, 1, −2, 2 become 0, 1, 2,
3, 4. An optimizer's step moves a weight by few units in the last place, so most bytes of a difference are zero.

========  ==================================================================================================
same      nothing: the new block is the old block
sparse    how many integers differ (4 bytes), the gaps between them, their differences by planes
dense     the differences of all integers by planes
whole     the new integers themselves by planes; it needs no old block
========  ==================================================================================================

*By planes*: first the lowest byte of each, then the second byte of each, … A *gap* is the number of
equal integers before one that differs, in bytes that are added up: 255 says that another byte of the same gap follows.

Everything is little-endian. Compression comes after this and knows nothing of it.
"""

from __future__ import annotations

from enum import Enum
from typing import Any, Final

import numpy as np
import numpy.typing as npt

BLOCK_BYTES: Final = 8 << 20
"""The most that a block has."""
SPARSE_SHARE: Final = 4
"""A sparse block takes at most this fraction of the block, before compression; so few positions are held at a time."""
ITEM_BYTES: Final = (1, 2, 4, 8)
"""Sizes of the integers that are compared."""

_COUNT_BYTES: Final = 4
_LONG_GAP: Final = 255
_Bytes = npt.NDArray[np.uint8]
_Integers = npt.NDArray[Any]


class Coding(str, Enum):
    """How a block is written down."""

    SAME = "same"
    SPARSE = "sparse"
    DENSE = "dense"
    WHOLE = "whole"


def encode(new: memoryview, old: memoryview | None, item_bytes: int) -> tuple[Coding, bytes]:
    """Write down a block in the way that is shortest before compression, ``whole`` only without an old block.

    Parameters
    ----------
    new, old
        The two blocks, of one length, a multiple of ``item_bytes``.
    item_bytes
        Size of the integers that are compared, one of :data:`ITEM_BYTES`.
    """
    items = _integers(new, item_bytes)
    if old is None:
        return Coding.WHOLE, _planes(items)
    before = _integers(old, item_bytes)
    differs = items != before
    count = int(np.count_nonzero(differs))
    if not count:
        return Coding.SAME, b""
    most_bytes = most_written_bytes(Coding.SPARSE, len(new))
    if _COUNT_BYTES + count * (1 + item_bytes) <= most_bytes:
        positions = np.flatnonzero(differs)
        head = count.to_bytes(_COUNT_BYTES, "little") + _gaps(positions).tobytes()
        if len(head) + count * item_bytes <= most_bytes:
            return Coding.SPARSE, head + _planes(_folded(items[positions] - before[positions]))
    return Coding.DENSE, _planes(_folded(items - before))


def decode(
    coding: Coding, written: memoryview, old: memoryview | None, item_bytes: int, new: memoryview
) -> None:
    """Fill ``new`` with what :func:`encode` has written down.

    Parameters
    ----------
    old
        The block that it was compared with, as long as ``new``; ``None`` for ``whole``.

    Raises
    ------
    ValueError
        If that is not what it has written.
    """
    items = _integers(new, item_bytes)
    if old is None:
        items[:] = _from_planes(written, len(items), item_bytes)
    elif coding is Coding.DENSE:
        steps = _from_planes(written, len(items), item_bytes)
        np.add(_integers(old, item_bytes), _unfolded(steps), out=items)
    else:
        new[:] = old
    if coding is Coding.SPARSE:
        count = int.from_bytes(written[:_COUNT_BYTES], "little")
        rest = written[_COUNT_BYTES:]
        gap_bytes = len(rest) - count * item_bytes
        if gap_bytes < count:
            raise ValueError(f"{count} differences in {len(rest)} bytes")
        positions = _positions(np.frombuffer(rest[:gap_bytes], np.uint8), count, len(items))
        items[positions] += _unfolded(_from_planes(rest[gap_bytes:], count, item_bytes))


def most_written_bytes(coding: Coding, nbytes: int) -> int:
    """The most that a block of ``nbytes`` can take, before compression."""
    return {Coding.SAME: 0, Coding.SPARSE: nbytes // SPARSE_SHARE}.get(coding, nbytes)


def _integers(block: memoryview, item_bytes: int) -> _Integers:
    return np.frombuffer(block, f"<u{item_bytes}")


def _folded(steps: _Integers) -> _Integers:
    """Differences modulo the range as small numbers; overwrites its argument."""
    negative = steps >> (8 * steps.itemsize - 1)
    np.negative(negative, out=negative)
    np.left_shift(steps, 1, out=steps)
    return np.bitwise_xor(steps, negative, out=steps)


def _unfolded(steps: _Integers) -> _Integers:
    """The differences again."""
    negative = steps & steps.dtype.type(1)
    np.negative(negative, out=negative)
    return np.bitwise_xor(negative, steps >> 1, out=negative)


def _planes(steps: _Integers) -> bytes:
    return steps.view(np.uint8).reshape(-1, steps.itemsize).T.tobytes()


def _from_planes(planes: memoryview, count: int, item_bytes: int) -> _Integers:
    if len(planes) != count * item_bytes:
        raise ValueError(f"{len(planes)} bytes of differences for {count} integers of {item_bytes}")
    rows = np.frombuffer(planes, np.uint8).reshape(item_bytes, count).T
    return np.ascontiguousarray(rows).reshape(-1).view(f"<u{item_bytes}")


def _gaps(positions: npt.NDArray[np.int64]) -> _Bytes:
    """Gaps between ascending positions, as bytes."""
    gaps = np.diff(positions, prepend=-1) - 1
    longer, last = np.divmod(gaps, _LONG_GAP)
    ends = np.cumsum(longer + 1)
    written = np.full(int(ends[-1]), _LONG_GAP, np.uint8)
    written[ends - 1] = last
    return written


def _positions(gaps: _Bytes, count: int, items: int) -> npt.NDArray[np.int64]:
    """Positions from gaps; ``count`` of them, below ``items``."""
    is_last = gaps != _LONG_GAP
    positions = np.cumsum(gaps, dtype=np.int64)[is_last]
    if len(positions) != count or (len(gaps) and not is_last[-1]):
        raise ValueError(f"{len(positions)} gaps for {count} differences")
    positions += np.arange(count)
    if count and positions[-1] >= items:
        raise ValueError(f"a difference at {positions[-1]} of {items} integers")
    return positions
