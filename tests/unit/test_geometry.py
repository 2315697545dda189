"""Boxes: cut from flat ranges, intersected, paired."""

from itertools import product
from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paddle_reshard.pipeline.geometry import (
    MAX_DIMS,
    boxes_of_flat_range,
    column_major_strides,
    intersect,
    padded,
    pairs_within,
    row_major_strides,
)

SHAPES = st.lists(st.integers(1, 5), max_size=MAX_DIMS).map(tuple)


@st.composite
def flat_ranges(draw: st.DrawFn) -> tuple[int, int, tuple[int, ...]]:
    shape = draw(SHAPES)
    start, stop = sorted((draw(st.integers(0, prod(shape))), draw(st.integers(0, prod(shape)))))
    return start, stop, shape


@given(flat_ranges())
def test_a_flat_range_is_cut_once_and_in_order_into_few_boxes(case: tuple[int, int, tuple[int, ...]]) -> None:
    start, stop, shape = case
    boxes = boxes_of_flat_range(start, stop, shape)
    numbered = np.arange(prod(shape)).reshape(shape)
    cut = [
        numbered[tuple(slice(o, o + e) for o, e in zip(offset, extents, strict=True))].ravel()
        for offset, extents in boxes
    ]
    assert np.concatenate([*cut, np.empty(0, int)]).tolist() == list(range(start, stop))
    assert all(part.size for part in cut)
    assert len(boxes) <= max(1, 2 * len(shape) - 1)


def test_the_most_boxes_that_a_flat_range_can_need() -> None:
    """One element off at either end of a tensor of four dims: 2 * 4 - 1 boxes."""
    assert len(boxes_of_flat_range(1, 3**4 - 1, (3, 3, 3, 3))) == 7


@pytest.mark.parametrize("bounds", [(-1, 2), (3, 2), (0, 7), (7, 7)])
def test_a_flat_range_outside_the_tensor_is_refused(bounds: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match=r"flat range \[.*\) does not lie in a tensor of shape \(2, 3\)"):
        boxes_of_flat_range(*bounds, (2, 3))


@pytest.mark.parametrize("order", ["C", "F"])
@given(SHAPES, st.sampled_from((1, 2, 4, 8)))
def test_strides_are_those_of_numpy(order: str, shape: tuple[int, ...], itemsize: int) -> None:
    strides = {"C": row_major_strides, "F": column_major_strides}[order]
    assert strides(shape, itemsize) == np.empty(shape, f"u{itemsize}", order=order).strides


def test_padding_of_dims() -> None:
    assert padded((2, 3), 1) == (2, 3, 1, 1)
    with pytest.raises(ValueError, match="5 dims, at most 4 are supported"):
        padded((1,) * 5, 0)


def box_columns(boxes: list[list[tuple[int, int]]]) -> tuple[np.ndarray, np.ndarray]:
    table = np.array(boxes, dtype=np.int64).reshape(-1, MAX_DIMS, 2)
    return table[:, :, 0], table[:, :, 1]


BOXES = st.lists(st.tuples(st.integers(0, 4), st.integers(1, 4)), min_size=MAX_DIMS, max_size=MAX_DIMS)


def elements_of(offset: np.ndarray, extents: np.ndarray) -> set[tuple[int, ...]]:
    return set(product(*(range(o, o + max(e, 0)) for o, e in zip(offset, extents, strict=True))))


@given(st.lists(st.tuples(BOXES, BOXES), min_size=1, max_size=6))
def test_intersection_holds_the_elements_of_both(pairs: list) -> None:
    offset_a, extents_a = box_columns([a for a, _ in pairs])
    offset_b, extents_b = box_columns([b for _, b in pairs])
    offset, extents, meets = intersect(offset_a, extents_a, offset_b, extents_b)
    for row in range(len(pairs)):
        common = elements_of(offset_a[row], extents_a[row]) & elements_of(offset_b[row], extents_b[row])
        assert meets[row] == bool(common)
        if common:
            assert elements_of(offset[row], extents[row]) == common


IDS = st.lists(st.integers(0, 5), max_size=8).map(sorted)


@given(IDS, IDS)
def test_pairs_of_equal_ids_are_complete_and_in_order(left: list[int], right: list[int]) -> None:
    i, j = pairs_within(np.array(left, dtype=np.int32), np.array(right, dtype=np.int32), 6)
    expected = [(a, b) for a in range(len(left)) for b in range(len(right)) if left[a] == right[b]]
    assert list(zip(i.tolist(), j.tolist(), strict=True)) == expected
