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
    hulls,
    volumes,
)
from paddle_reshard.pipeline.core.errors import CoverageError
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


def test_a_tensor_in_pieces_is_whole() -> None:
    check_catalog(catalog((4, 6), box((0, 0), (4, 2)), box((0, 2), (3, 4), file=1), box((3, 2), (1, 4))))
    check_catalog(catalog((4, 6), box((0, 0), (4, 6)), box((0, 0), (4, 6), file=1, replica=1)))


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
        ((4, 6), [((0, 0), (4, 6)), ((0, 0), (4, 6), 0, 950, 1)], "lie outside the file"),
    ],
)  # fmt: skip
def test_a_tensor_that_is_not_whole(shape: tuple[int, ...], rows: list[Any], told: str) -> None:
    assert told in refusal(shape, *(box(*row) for row in rows))


def test_an_overlap() -> None:
    assert refusal((4, 6), box((0, 0), (4, 4)), box((1, 3), (3, 3), file=1)) == (
        "model.norm.weight (moment1): two pieces overlap: at (0, 0, 0, 0, 0) of extents (4, 4, 1, 1, 1), and at "
        "(1, 3, 0, 0, 0) of extents (3, 3, 1, 1, 1) (in optimizer.tp00.pdopt, optimizer.tp01.pdopt)"
    )


@pytest.mark.parametrize(("byte_base", "bytes_range"), [(905, "[905, 1001)"), (-1, "[-1, 95)")])
def test_bytes_beyond_the_file(byte_base: int, bytes_range: str) -> None:
    check_catalog(catalog((4, 6), box((0, 0), (4, 6), byte_base=1000 - 96)))
    assert refusal((4, 6), box((0, 0), (4, 6), byte_base=byte_base, file=1)) == (
        f"model.norm.weight (moment1): its bytes {bytes_range} lie outside the file of 1000 bytes "
        "(in optimizer.tp01.pdopt)"
    )


def test_an_implied_tensor_needs_no_piece() -> None:
    param = Tensor("model.norm.weight", PARAM, dtype_named("bfloat16"), (4, 6))
    whole = catalog((4, 6), box((0, 0), (4, 6)))
    both = Catalog(Tensors((*whole.tensors, param)), whole.files, whole.fragments, {1: 0})
    check_catalog(both)
    assert (
        both.stored(1).rows().tobytes() == both.stored(0).rows().tobytes() == whole.fragments.rows().tobytes()
    )
    assert both.index() == {("model.norm.weight", "moment1"): 0, ("model.norm.weight", PARAM): 1}


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


def test_volumes_and_hulls() -> None:
    rows = fragment_rows([box((0, 0), (4, 2)), box((2,), (3,), byte_base=7)])
    assert volumes(rows).tolist() == [8, 3]
    start, stop = hulls(rows)
    assert (start.tolist(), stop.tolist()) == ([100, 7], [132, 19])


def test_what_is_borrowed_stays_borrowed_when_tensors_are_chosen() -> None:
    tensors = Tensors(Tensor(name, PARAM, FLOAT32, (1,)) for name in "abcd")
    whole = Catalog(tensors, (), fragment_rows([]), {}, borrowed=2)
    assert [whole.only(chosen).borrowed for chosen in ([0, 1], [1, 3], [2, 3], [0, 1, 2, 3])] == [0, 1, 2, 2]
    with pytest.raises(ValueError, match="chosen last"):
        whole.only([3, 0])
