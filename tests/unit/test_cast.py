"""The cast to bfloat16 is Paddle's, bit for bit; that to float16 rounds to the nearest value."""

import numpy as np
import paddle
import pytest

from paddle_reshard.tasks.cast import bfloat16_bits, cast, cast_in_range

F4, F2 = np.dtype("<f4"), np.dtype("<f2")


def paddle_bits(values: np.ndarray) -> np.ndarray:
    """Paddle's own cast; its NumPy form of bfloat16 is the bit pattern as uint16."""
    return paddle.cast(paddle.to_tensor(values), "bfloat16").numpy()


def test_every_upper_half_around_its_ties() -> None:
    """All 65,536 results, NaNs among them, each with lower halves at, below and above the tie."""
    upper = np.arange(1 << 16, dtype=np.uint32)[:, None] << 16
    lower = np.array([0, 1, 0x7FFE, 0x7FFF, 0x8000, 0x8001, 0xFFFE, 0xFFFF], dtype=np.uint32)
    values = (upper | lower).view(np.float32)
    ours, theirs = bfloat16_bits(values), paddle_bits(values)
    assert ours.dtype == theirs.dtype == np.uint16
    assert ours.shape == theirs.shape == values.shape
    assert ours.tobytes() == theirs.tobytes()


def test_every_bfloat16_and_float16_is_widened_exactly() -> None:
    patterns = np.arange(1 << 16, dtype=np.uint16)
    wide = cast(patterns, F4)
    assert wide.view(np.uint32).tobytes() == (patterns.astype(np.uint32) << 16).tobytes()
    halves = patterns.view(F2)
    np.testing.assert_array_equal(cast(halves, F4), [float(half) for half in halves])


def test_float16_is_the_nearest_one_with_ties_to_even() -> None:
    """Between neighbouring float16 values: at, below and above the middle."""
    low = np.arange(0x0000, 0x7BFF, dtype=np.uint16).view(F2).astype(np.float64)
    high = np.arange(0x0001, 0x7C00, dtype=np.uint16).view(F2).astype(np.float64)
    middle = (low + high) / 2
    for sign in (1, -1):
        values = (sign * middle).astype(np.float32)
        exact = values.astype(np.float64) == sign * middle
        assert exact.all()
        even = np.where(np.arange(len(low)) % 2 == 0, low, high)
        np.testing.assert_array_equal(cast_in_range(values, F2), sign * even)
        np.testing.assert_array_equal(cast_in_range(np.nextafter(values, np.float32(0)), F2), sign * low)
        beyond = np.nextafter(values, np.float32(sign * np.inf))
        np.testing.assert_array_equal(cast_in_range(beyond, F2), sign * high)


def test_what_float16_cannot_hold() -> None:
    with pytest.raises(OverflowError, match=r"the value 65520\.0 is too large for float16"):
        cast_in_range(np.float32([1.0, 65520.0]), F2)
    kept = cast_in_range(np.float32([65519.0, np.inf, -np.inf, np.nan]), F2)
    np.testing.assert_array_equal(kept, np.float16([65504.0, np.inf, -np.inf, np.nan]))
