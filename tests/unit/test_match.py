"""Boxes are matched as every pair of them would be; what would leave an element out, write one twice or drop a tensor
is refused before it is planned."""

from __future__ import annotations

import random

import numpy as np
import pytest

from paddle_reshard.pipeline.core.catalog import Catalog, File, FragmentRow, fragment_row, fragment_rows
from paddle_reshard.pipeline.core.errors import CoverageError, PlanError, UnsupportedError
from paddle_reshard.pipeline.core.tensor_columns import Tensors
from paddle_reshard.pipeline.core.tensors import Tensor, dtype_named
from paddle_reshard.pipeline.planning.match import match, plan_ops
from paddle_reshard.pipeline.planning.ops import CHECK, COMPARE, MOVE

BFLOAT16, FLOAT16, FLOAT32 = map(dtype_named, ("bfloat16", "float16", "float32"))
Box = tuple[tuple[int, int], tuple[int, int]]
"""Offset and extents."""


def cells(box: Box) -> set[tuple[int, int]]:
    (row, column), (rows, columns) = box
    return {(r, c) for r in range(row, row + rows) for c in range(column, column + columns)}


def test_boxes_of_tensors_that_are_alike_meet_as_those_of_others() -> None:
    """Tensors 0 to 3 have the same boxes; 4 in another order; 5 and 6 on one side only; 7 is read from 0."""
    numbers = random.Random(0)
    rows = [((6 * n, 0), (6, 8)) for n in range(5)]
    columns = [((0, 2 * n), (30, 2)) for n in range(4)]
    parts: list[Box] = [((7 * n, 0), (7 if n < 4 else 2, 8)) for n in range(5)]
    sources = {0: rows, 1: rows, 2: rows, 3: rows, 4: rows[::-1], 5: rows, 6: columns}
    targets = {0: parts, 1: parts, 2: parts, 3: parts, 4: parts, 5: columns, 6: parts, 7: parts[::-1]}
    implied = {7: 0}
    given: list[list[tuple[int, Box]]] = []
    sides = []
    for tensors in (sources, targets):
        boxes = [(tensor, box) for tensor, of_tensor in tensors.items() for box in of_tensor]
        if tensors is targets:  # as files of ranks list them: those of a tensor are not together
            numbers.shuffle(boxes)
        given.append(boxes)
        fragments: list[FragmentRow] = [
            fragment_row(tensor, number, FLOAT32, 0, 0, offset, extents, (32, 4))
            for number, (tensor, (offset, extents)) in enumerate(boxes)
        ]
        sides.append(fragment_rows(fragments))
    wanted = [
        (tensor, read, i, j, cells(one) & cells(other))
        for i, (read, one) in enumerate(given[0])
        for j, (tensor, other) in enumerate(given[1])
        if implied.get(tensor, tensor) == read and cells(one) & cells(other)
    ]
    ops = match(sides[0], sides[1], implied)
    found = [
        (
            *(int(op[name]) for name in ("tensor", "source_tensor", "source_file", "target_file")),
            cells((tuple(op["offset"][:2].tolist()), tuple(op["extents"][:2].tolist()))),
        )
        for op in ops
    ]
    assert found == wanted


def rows_of(tensor: int, first: int, count: int, dtype: str = "float32", replica: int = 0) -> FragmentRow:
    """Some rows of a matrix of 8 × 6."""
    stored = dtype_named(dtype)
    strides = (6 * stored.itemsize, stored.itemsize)
    return fragment_row(tensor, tensor, stored, replica, 0, (first, 0), (count, 6), strides)


def catalog(*fragments: FragmentRow, states: tuple[str, ...] = ("moment1",)) -> Catalog:
    dtypes = {"param": BFLOAT16}
    tensors = Tensors([Tensor("w", state, dtypes.get(state, FLOAT32), (8, 6)) for state in states])
    files = tuple(File(f"{n}.bin", 8 * 6 * 4) for n in range(len(states)))
    return Catalog(tensors, files, fragment_rows(fragments), {})


WHOLE = fragment_rows([rows_of(0, 0, 8)])


def test_every_element_is_moved_once() -> None:
    ops = plan_ops(catalog(rows_of(0, 0, 3), rows_of(0, 3, 5)), WHOLE)
    assert ops["extents"][:, 0].tolist() == [3, 5]


@pytest.mark.parametrize("second", [(4, 4), (2, 6)], ids=["too few", "too many"])
def test_another_number_of_elements_than_needed_is_refused(second: tuple[int, int]) -> None:
    with pytest.raises(CoverageError, match=r"the target needs 48 elements, the source provides (42|54)"):
        plan_ops(catalog(rows_of(0, 0, 3), rows_of(0, *second)), WHOLE)


def test_a_tensor_that_the_target_does_not_hold_is_not_dropped() -> None:
    states = ("param", "master_weight", "moment1")
    source = catalog(rows_of(0, 0, 8, "bfloat16"), rows_of(1, 0, 8), rows_of(2, 0, 8), states=states)
    held = [rows_of(0, 0, 8, "bfloat16"), rows_of(1, 0, 8), rows_of(2, 0, 8)]
    for lacking, told in ((2, r"w \(moment1\)"), (1, r"w \(master_weight\)")):
        with pytest.raises(PlanError, match=f"{told}: the target cannot hold it, so it would be dropped"):
            plan_ops(source, fragment_rows([row for row in held if row[0] != lacking]))
    alone = catalog(rows_of(0, 0, 8, "bfloat16"), rows_of(1, 0, 8), states=("param", "moment1"))
    with pytest.raises(PlanError, match=r"w \(param\): the target cannot hold it, so it would be dropped"):
        plan_ops(alone, fragment_rows([rows_of(1, 0, 8)]))


def test_a_parameter_that_its_master_weight_implies_is_compared_in_full() -> None:
    source = catalog(rows_of(0, 0, 8, "bfloat16"), rows_of(1, 0, 8), states=("param", "master_weight"))
    ops = plan_ops(source, fragment_rows([rows_of(1, 0, 8)]))
    assert ops["kind"].tolist() == [MOVE, CHECK]
    assert np.prod(ops["extents"][1]) == 48


def test_every_further_copy_is_compared_with_the_first() -> None:
    copies = (rows_of(0, 0, 8, replica=1), rows_of(0, 0, 3, replica=2), rows_of(0, 3, 5, replica=2))
    ops = plan_ops(catalog(rows_of(0, 0, 3), rows_of(0, 3, 5), *copies), WHOLE)
    compared = ops[ops["kind"] == COMPARE]
    assert np.prod(compared["extents"], axis=1).sum() == 2 * 48


def test_a_cast_that_nobody_has_asked_for_is_refused() -> None:
    halves = fragment_row(0, 0, FLOAT16, 0, 0, (0, 0), (8, 6), (12, 2))
    with pytest.raises(UnsupportedError, match="stored as float32, and the target needs float16"):
        plan_ops(catalog(rows_of(0, 0, 8)), fragment_rows([halves]))
    plan_ops(catalog(rows_of(0, 0, 8)), fragment_rows([halves]), casts={("float32", "float16")})
