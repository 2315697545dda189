"""The cast to bfloat16 is Paddle's, bit for bit."""

import numpy as np
import paddle
import pytest

from paddle_reshard.tasks.cast import bfloat16_bits


def paddle_bits(values: np.ndarray) -> np.ndarray:
    """Paddle's own cast; its NumPy form of bfloat16 is the bit pattern as uint16."""
    return paddle.cast(paddle.to_tensor(values), "bfloat16").numpy()


def from_bits(*bits: int) -> np.ndarray:
    return np.array(bits, dtype=np.uint32).view(np.float32)


def assert_cast_as_paddle_does(values: np.ndarray) -> None:
    ours, theirs = bfloat16_bits(values), paddle_bits(values)
    assert ours.dtype == theirs.dtype == np.uint16
    assert ours.shape == theirs.shape == values.shape
    assert ours.tobytes() == theirs.tobytes()


def test_every_upper_half_around_its_ties() -> None:
    """All 65,536 results, each with lower halves at, below and above the tie."""
    upper = np.arange(1 << 16, dtype=np.uint32)[:, None] << 16
    lower = np.array([0, 1, 0x7FFE, 0x7FFF, 0x8000, 0x8001, 0xFFFE, 0xFFFF], dtype=np.uint32)
    assert_cast_as_paddle_does((upper | lower).view(np.float32))


@pytest.mark.parametrize(
    ("bits", "rounded"),
    [
        (0x00000000, 0x0000),
        (0x80000000, 0x8000),
        (0x00000001, 0x0000),
        (0x80008001, 0x8001),
        (0x3F808000, 0x3F80),
        (0x3F818000, 0x3F82),
        (0x3F808001, 0x3F81),
        (0x7F7FFFFF, 0x7F80),
        (0xFF7FFFFF, 0xFF80),
        (0x7F800000, 0x7F80),
        (0xFF800000, 0xFF80),
        (0x7F800001, 0x7FFF),
        (0xFFC00000, 0x7FFF),
        (0xFFFFFFFF, 0x7FFF),
    ],
)
def test_special_values(bits: int, rounded: int) -> None:
    assert bfloat16_bits(from_bits(bits)).tolist() == [rounded]
    assert_cast_as_paddle_does(from_bits(bits))
