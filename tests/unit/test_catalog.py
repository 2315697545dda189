"""The catalog's proof of coverage: what is whole passes, and every fault is named in full."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paddle_reshard.pipeline.core.catalog import (
    Catalog,
    File,
    FragmentRow,
    check_catalog,
    fragment_row,
    fragment_rows,
)
from paddle_reshard.pipeline.core.errors import CheckpointError, CoverageError
from paddle_reshard.pipeline.core.geometry import row_major_strides
from paddle_reshard.pipeline.core.tensor_columns import Tensors
from paddle_reshard.pipeline.core.tensors import PARAM, Tensor, dtype_named

FLOAT32 = dtype_named("float32")
ONE, TWO = File("optimizer.tp00.pdopt", 1000), File("optimizer.tp01.pdopt", 1000)
LABEL = "model.norm.weight (moment1)"


def box(
    offset: Sequence[int], extents: Sequence[int], file: int = 0, byte_base: int = 100, replica: int = 0
) -> FragmentRow:
    strides = row_major_strides(tuple(extents), 4)
    return fragment_row(0, file, FLOAT32, replica, byte_base, offset, extents, strides)


def catalog(shape: Sequence[int], *rows: FragmentRow) -> Catalog:
    tensor = Tensor("model.norm.weight", "moment1", FLOAT32, tuple(shape))
    return Catalog(Tensors((tensor,)), (ONE, TWO), fragment_rows(list(rows)), {})


def refusal(shape: Sequence[int], *rows: FragmentRow) -> str:
    with pytest.raises(CoverageError) as caught:
        check_catalog(catalog(shape, *rows))
    assert caught.value.tensor == LABEL
    return str(caught.value)


@pytest.mark.parametrize(
    ("shape", "rows", "told"),
    [
        ((4, 6), [], "0 of 24 elements are stored"),
        ((4, 6), [((0, 0), (4, 2)), ((0, 2), (3, 4), 1)], f"20 of 24 elements are stored (in {ONE.path}, {TWO.path})"),
        ((4, 6), [((0, 0), (2, 6)), ((2, 0), (2, 6), 1, 100, 1)], "12 of 24"),  # copies do not count
        ((4, 2), [((0, 0), (3, 2)), ((2, 0), (1, 2), 1)], "two pieces overlap"),  # their volumes add up to all of it
        ((4, 6), [((0, 1), (4, 6))], "(0, 1, 0, 0, 0) of extents (4, 6, 1, 1, 1) lies outside the shape (4, 6)"),
        ((4, 6), [((1, 0), (4, 6))], "(1, 0, 0, 0, 0) of extents (4, 6, 1, 1, 1) lies outside the shape (4, 6)"),
        ((4, 6), [((-1, 0), (4, 6))], "a piece at (-1, 0, 0, 0, 0) of extents (4, 6, 1, 1, 1) lies outside"),
        ((4,), [((0, 0), (4, 2))], "lies outside the shape (4,)"),
        ((4, 6), [((0, 0), (4, 4)), ((1, 3), (3, 3), 1)], "two pieces overlap: at (0, 0, 0, 0, 0) of extents "
         "(4, 4, 1, 1, 1), and at (1, 3, 0, 0, 0) of extents (3, 3, 1, 1, 1) (in " + f"{ONE.path}, {TWO.path})"),
        ((4, 6), [((0, 0), (4, 6)), ((0, 0), (4, 6), 0, 950, 1)], "lie outside the file"),
        ((4, 6), [((0, 0), (4, 6), 1, 905)], f"bytes [905, 1001) lie outside the file of 1000 bytes (in {TWO.path})"),
        ((4, 6), [((0, 0), (4, 6), 1, -1)], "bytes [-1, 95) lie outside the file"),
    ],
)  # fmt: skip
def test_a_tensor_that_is_not_whole(shape: tuple[int, ...], rows: list[Any], told: str) -> None:
    assert told in refusal(shape, *(box(*row) for row in rows))


def test_an_implied_tensor_is_stored_where_its_master_weight_is() -> None:
    param = Tensor("model.norm.weight", PARAM, dtype_named("bfloat16"), (4, 6))
    whole = catalog((4, 6), box((0, 0), (4, 6)))
    both = Catalog(Tensors((*whole.tensors, param)), whole.files, whole.fragments, {1: 0})
    assert both.stored(1).rows().tobytes() == whole.fragments.rows().tobytes()


def test_fragments_cannot_be_changed() -> None:
    fragments = catalog((4, 6), box((0, 0), (4, 6))).fragments
    with pytest.raises(ValueError, match="read-only"):
        fragments["file"] = 1
    with pytest.raises(TypeError, match="Fragments"):
        Catalog(Tensors(), (), np.zeros(1), {})


@given(st.data())
def test_any_tiling_passes_and_any_tiling_with_one_fault_does_not(data: st.DataObject) -> None:
    """Cut a box in two again and again; then drop, double, shift or grow one of the pieces."""
    shape = (data.draw(st.integers(1, 6)), data.draw(st.integers(1, 6)), data.draw(st.integers(1, 3)))
    boxes = [((0, 0, 0), shape)]
    for _ in range(data.draw(st.integers(0, 6))):
        place, dim = data.draw(st.integers(0, len(boxes) - 1)), data.draw(st.integers(0, 2))
        offset, extents = boxes[place]
        if extents[dim] > 1:
            cut = data.draw(st.integers(1, extents[dim] - 1))
            rest = extents[dim] - cut
            first = tuple(cut if d == dim else e for d, e in enumerate(extents))
            second = tuple(rest if d == dim else e for d, e in enumerate(extents))
            moved = tuple(o + cut if d == dim else o for d, o in enumerate(offset))
            boxes[place : place + 1] = [(offset, first), (moved, second)]
    check_catalog(catalog(shape, *(box(*b) for b in boxes)))

    place, dim = data.draw(st.integers(0, len(boxes) - 1)), data.draw(st.integers(0, 2))
    offset, extents = boxes[place]
    faults = {
        "drop": [],
        "double": [boxes[place]] * 2,
        "shift": [(tuple(o + (d == dim) for d, o in enumerate(offset)), extents)],
        "grow": [(offset, tuple(e + (d == dim) for d, e in enumerate(extents)))],
    }
    fault = data.draw(st.sampled_from(sorted(faults)))
    boxes[place : place + 1] = faults[fault]
    refusal(shape, *(box(*b) for b in boxes))


def test_no_tensor_has_more_dims_than_a_box() -> None:
    with pytest.raises(CheckpointError, match="at most 5"):
        Tensors([Tensor("a", PARAM, FLOAT32, (1,) * 6)])


def test_what_is_borrowed_stays_borrowed_when_tensors_are_chosen() -> None:
    tensors = Tensors(Tensor(name, PARAM, FLOAT32, (1,)) for name in "abcd")
    whole = Catalog(tensors, (), fragment_rows([]), {}, borrowed=2)
    assert [whole.only(chosen).borrowed for chosen in ([0, 1], [1, 3], [2, 3], [0, 1, 2, 3])] == [0, 1, 2, 2]
    with pytest.raises(ValueError, match="chosen last"):
        whole.only([3, 0])
