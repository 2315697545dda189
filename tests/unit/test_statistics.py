"""Figures of differences, where values are special."""

from __future__ import annotations

import math

import numpy as np
import pytest

from paddle_reshard.tasks.cast import bfloat16_bits
from paddle_reshard.tasks.statistics import Statistics, Tolerance, combined, compare_values

FLOAT32 = np.dtype("<f4")


def of(a: list[float], b: list[float], rtol: float = 0) -> Statistics:
    return compare_values(np.float32(a), np.float32(b), (FLOAT32, FLOAT32), Tolerance(0, rtol))


def test_nans_and_infinities() -> None:
    found = of([math.nan, math.nan, math.inf, 1.0, math.inf], [math.nan, 1.0, math.inf, 1.0, -math.inf])
    assert (found.changed, found.nans, found.outside, found.first) == (2, 1, 2, (1,))
    assert (found.largest, found.relative) == (math.inf, 1.0)


def test_zeros_of_both_signs_are_equal_numbers() -> None:
    assert of([0.0], [-0.0]) == Statistics(1)


@pytest.mark.parametrize(
    ("a", "b"), [(1.0, np.nextafter(np.float32(1), np.float32(2))), (0.0, -1e-45), (-1e-45, 0.0)]
)
def test_neighbours_are_one_ulp_apart(a: float, b: float) -> None:
    assert of([a], [b]).ulps == 1


def test_ulps_are_those_of_the_coarser_dtype() -> None:
    fine = np.float32([1.001, -2.003, 1.02])
    coarse = bfloat16_bits(fine)
    coarse[2] += 1
    found = compare_values(fine, coarse, (FLOAT32, np.dtype("<u2")), Tolerance(0, 0.005))
    assert (found.changed, found.ulps, found.outside) == (3, 1, 1)


def test_whole_numbers_are_compared_exactly() -> None:
    large = np.int64([2**60, 7])
    found = compare_values(large, large + np.int64([1, 0]), (large.dtype, large.dtype), Tolerance())
    assert (found.changed, found.first) == (1, (0,))


def test_parts_of_a_tensor_are_combined() -> None:
    parts = [
        Statistics(4, 1, 1, 0, 2.0, 2.0, 3, 0.5, (7, 1), (1.0, 3.0)),
        Statistics(4, 2, 0, 0, 1.0, 1.5, 9, 0.1, (2, 9)),
    ]
    found = combined(parts)
    assert (found.elements, found.changed, found.outside, found.ulps, found.first) == (8, 3, 1, 9, (2, 9))
    assert (found.largest, found.mean, found.relative) == (2.0, 3.5 / 8, 0.5)


def test_differences_whose_sum_no_number_holds_are_infinite() -> None:
    far = Statistics(1, 1, 1, largest=1e308, total=1e308)
    assert combined([far, far]).total == math.inf
