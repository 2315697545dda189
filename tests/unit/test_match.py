"""Boxes are matched as every pair of them would be, whichever tensors have the same boxes."""

from __future__ import annotations

import random

from paddle_reshard.pipeline.core.catalog import FragmentRow, fragment_row, fragment_rows
from paddle_reshard.pipeline.core.tensors import dtype_named
from paddle_reshard.pipeline.planning.match import match

FLOAT32 = dtype_named("float32")
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
