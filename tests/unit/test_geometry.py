"""Boxes: cut from flat ranges, intersected, paired."""

from itertools import product
from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paddle_reshard.pipeline.core import geometry
from paddle_reshard.pipeline.core.geometry import (
    MAX_DIMS,
    Boxes,
    boxes_of_flat_range,
    by_tensor,
    meeting_pairs,
    padded,
    strides_in_order,
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


@pytest.mark.parametrize("bounds", [(-1, 2), (3, 2), (0, 7), (7, 7)])
def test_a_flat_range_outside_the_tensor_is_refused(bounds: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match=r"flat range \[.*\) is outside a tensor of shape \(2, 3\)"):
        boxes_of_flat_range(*bounds, (2, 3))


@given(
    SHAPES.flatmap(lambda shape: st.tuples(st.just(shape), st.permutations(range(len(shape))))),
    st.sampled_from((1, 2, 4, 8)),
)
def test_strides_of_permuted_dims_are_those_of_numpy(
    drawn: tuple[tuple[int, ...], list[int]], itemsize: int
) -> None:
    shape, axes = drawn
    stored = np.empty([shape[dim] for dim in axes], f"u{itemsize}")
    assert strides_in_order(shape, itemsize, axes) == stored.transpose(np.argsort(axes)).strides
    assert strides_in_order(shape, itemsize, None) == np.empty(shape, f"u{itemsize}").strides


def test_padding_of_dims() -> None:
    assert padded((2, 3), 1) == (2, 3, 1, 1, 1)
    with pytest.raises(ValueError, match="6 dims, at most 5 are supported"):
        padded((1,) * 6, 0)


def box_columns(boxes: list[list[tuple[int, int]]]) -> tuple[np.ndarray, np.ndarray]:
    table = np.array(boxes, dtype=np.int64).reshape(-1, MAX_DIMS, 2)
    return table[:, :, 0], table[:, :, 1]


BOXES = st.lists(st.tuples(st.integers(0, 4), st.integers(1, 4)), min_size=MAX_DIMS, max_size=MAX_DIMS)


TENSORS_AND_BOXES = st.lists(st.tuples(st.integers(0, 3), BOXES), max_size=12)


def columns_of(boxes: list[tuple[int, list[tuple[int, int]]]]) -> Boxes:
    return Boxes(np.array([tensor for tensor, _ in boxes], np.int32), *box_columns([b for _, b in boxes]))


@given(
    TENSORS_AND_BOXES,
    TENSORS_AND_BOXES,
    st.sampled_from((1, 2, 1 << 18)),
    st.sampled_from((1, 5, 1 << 18)),
    st.sampled_from((1, 1 << 59)),
)
def test_boxes_that_meet_are_found_once_and_in_order(
    left: list, right: list, block: int, boxes: int, scale: int
) -> None:
    """In blocks of any size, and where tensor and place together need more than 64 bits."""
    one, two = columns_of(left), columns_of(right)
    one.offset[:, 0] *= scale
    two.offset[:, 0] *= scale
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(geometry, "_BLOCK_PAIRS", block)
        patch.setattr(geometry, "_BLOCK_BOXES", boxes)
        found = [(np.zeros(0, np.int64), np.zeros(0, np.int64))]
        for rows, others in zip(*by_tensor(one.tensor, two.tensor), strict=True):
            pairs = meeting_pairs(
                Boxes(*(column[rows] for column in one)), Boxes(*(column[others] for column in two))
            )
            found.append((rows[pairs[0]], others[pairs[1]]))
        i, j = (np.concatenate(side) for side in zip(*found, strict=True))
    expected = []
    for tensor in range(4):
        for a, b in product(range(len(left)), range(len(right))):
            start = np.maximum(one.offset[a], two.offset[b])
            stop = np.minimum(one.offset[a] + one.extents[a], two.offset[b] + two.extents[b])
            if one.tensor[a] == two.tensor[b] == tensor and (start < stop).all():
                expected.append((a, b))
    assert list(zip(i.tolist(), j.tolist(), strict=True)) == expected


def test_boxes_without_elements_meet_nothing() -> None:
    empty = columns_of([(0, [(1, 0), *[(0, 1)] * (MAX_DIMS - 1)])])
    whole = columns_of([(0, [(0, 4), *[(0, 1)] * (MAX_DIMS - 1)])])
    for left, right in ((empty, whole), (whole, empty), (empty, empty)):
        assert [len(side) for side in meeting_pairs(left, right)] == [0, 0]


def test_boxes_of_single_elements_meet() -> None:
    """Where no dim tells boxes apart, and one side has more of them than the other."""
    ones = np.ones((3, MAX_DIMS), dtype=np.int64)
    left = Boxes(np.array([0, 1, 2]), ones * 0, ones)
    right = Boxes(np.array([2]), ones[:1] * 0, ones[:1])
    assert [side.tolist() for side in meeting_pairs(left, right)] == [[2], [0]]
