"""Slices, concatenations and permutations of tensors in pieces are those of NumPy."""

from __future__ import annotations

import numpy as np
import pytest

from paddle_reshard.pipeline.changes.aoa.values import Value, concatenated, permuted, source_value, split
from paddle_reshard.pipeline.core.tensors import dtype_named

ARRAYS = {
    "a": np.arange(24).reshape(2, 4, 3),
    "b": np.arange(100, 148).reshape(4, 4, 3),
    "c": np.arange(200, 236).reshape(3, 6, 2),
}


def filled(value: Value) -> np.ndarray:
    """What a value is made of; -1 where nothing is, or more than one piece."""
    made, times = np.zeros(value.shape, dtype=int), np.zeros(value.shape, dtype=int)
    for piece in value.segments:
        box = ARRAYS[piece.source][
            tuple(slice(s, s + e) for s, e in zip(piece.start, piece.extents, strict=True))
        ]
        box = box.transpose(piece.order)
        where = tuple(slice(o, o + e) for o, e in zip(piece.offset, box.shape, strict=True))
        made[where] += box
        times[where] += 1
    return np.where(times == 1, made, -1)


def value_of(name: str) -> Value:
    return source_value(name, ARRAYS[name].shape, dtype_named("float32"))


@pytest.mark.parametrize("order", [(2, 0, 1), (1, 2, 0), None], ids=str)
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_pieces_of_what_was_joined_and_turned(axis: int, order: tuple[int, int, int] | None) -> None:
    joined = concatenated([value_of("a"), value_of("b")], 0)
    array = np.concatenate([ARRAYS["a"], ARRAYS["b"]], axis=0)
    assert np.array_equal(filled(joined), array)
    turned, array = permuted(joined, order), array.transpose(order)
    assert np.array_equal(filled(turned), array)
    count = 3 if array.shape[axis] % 3 == 0 else 2
    parts, arrays = split(turned, axis, count), np.split(array, count, axis=axis)
    for part, wanted in zip(parts, arrays, strict=True):
        assert np.array_equal(filled(part), wanted)
    again = permuted(concatenated([*parts[1:], parts[0]], axis), order)
    wanted = np.concatenate([*arrays[1:], arrays[0]], axis=axis).transpose(order)
    assert np.array_equal(filled(again), wanted)


def test_equal_sizes_joined_along_each_axis() -> None:
    for axis in range(3):
        joined = concatenated([value_of("c"), value_of("c")], axis)
        assert np.array_equal(filled(joined), np.concatenate([ARRAYS["c"]] * 2, axis=axis))
