"""Indices that sort many numbers are those of NumPy's own stable sort."""

from __future__ import annotations

import numpy as np
import pytest

from paddle_reshard.pipeline.core.sorting import in_order, order_by, order_of, places


@pytest.mark.parametrize("largest", [3, 1 << 20, 1 << 50, (1 << 63) - 1])
@pytest.mark.parametrize("kind", ["scattered", "close together", "nearly sorted"])
def test_the_order_is_that_of_a_stable_sort(kind: str, largest: int) -> None:
    random = np.random.default_rng(largest % 1009)
    numbers = random.integers(0, largest, 20_000, dtype=np.int64, endpoint=True)
    if kind == "close together":  # they differ in bits that do not fit next to an index
        numbers = np.minimum(numbers // 40 * 40 + random.integers(0, 40, len(numbers)), largest)
        numbers[::3] = numbers[1::3][: len(numbers[::3])]
    if kind == "nearly sorted":
        numbers = np.sort(numbers)
        numbers[[5, 500]] = numbers[[500, 5]]
    np.testing.assert_array_equal(order_of(numbers), np.argsort(numbers, kind="stable"))
    order, ordered = in_order(numbers)
    np.testing.assert_array_equal(order, np.argsort(numbers, kind="stable"))
    np.testing.assert_array_equal(ordered, np.sort(numbers))


@pytest.mark.parametrize("largest", [1 << 20, 1 << 60])
def test_pairs_are_sorted_by_both(largest: int) -> None:
    random = np.random.default_rng(0)
    major, minor = random.integers(0, 50, 20_000), random.integers(0, largest, 20_000)
    minor[1::2] = minor[::2]
    np.testing.assert_array_equal(order_by(major, minor), np.lexsort((minor, major)))
    place, pairs = places(major, minor), np.stack([major, minor], axis=1)
    np.testing.assert_array_equal(np.argsort(place, kind="stable"), np.lexsort((minor, major)))
    assert len(np.unique(place)) == len(np.unique(pairs, axis=0))
