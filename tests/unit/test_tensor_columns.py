"""Tensors come back from their columns as they were given, and are found by key and state."""

from __future__ import annotations

import pytest

from paddle_reshard.pipeline.core.errors import CheckpointError
from paddle_reshard.pipeline.core.tensor_columns import TensorIndex, Tensors
from paddle_reshard.pipeline.core.tensors import DTYPES, MASTER_WEIGHT, PARAM, Tensor, dtype_named

FLOAT, HALF = dtype_named("float32"), dtype_named("bfloat16")
GIVEN = (
    Tensor("a", PARAM, HALF, (2, 3), ("tied",)),
    Tensor("b", "moment1", FLOAT, (5,)),
    Tensor("a", MASTER_WEIGHT, FLOAT, (2, 3)),
    Tensor("c", PARAM, FLOAT, ()),
    Tensor("b", PARAM, HALF, (5,)),
)


def test_tensors_come_back_as_they_were_given() -> None:
    tensors = Tensors(GIVEN)
    assert tuple(tensors) == GIVEN
    assert tensors[1:4] == GIVEN[1:4]
    assert [Tensor(*each) for each in tensors.fields()] == list(GIVEN)
    assert [tensors[number] for number in range(-len(GIVEN), 0)] == list(GIVEN)
    assert tensors == Tensors(GIVEN)
    assert tensors != Tensors(GIVEN[:-1])
    with pytest.raises(IndexError):
        tensors[len(GIVEN)]


def test_columns_are_those_of_the_tensors() -> None:
    tensors = Tensors(GIVEN)
    assert [DTYPES[number] for number in tensors.dtypes] == [tensor.dtype for tensor in GIVEN]
    assert tensors.elements.tolist() == [tensor.elements for tensor in GIVEN]
    shapes = [[2, 3, 1, 1, 1], [5, 1, 1, 1, 1], [2, 3, 1, 1, 1], [1, 1, 1, 1, 1], [5, 1, 1, 1, 1]]
    assert tensors.shapes.tolist() == shapes
    assert tensors.states == {PARAM, MASTER_WEIGHT, "moment1"}
    assert list(tensors.of_state(PARAM).items()) == [("a", 0), ("c", 3), ("b", 4)]
    assert tensors.of_state("velocity") == {}


def test_tensors_are_found_by_key_and_state() -> None:
    index = TensorIndex(Tensors(GIVEN))
    assert dict(index) == {(tensor.key, tensor.state): number for number, tensor in enumerate(GIVEN)}
    for identity in (("a", "moment1"), ("c", MASTER_WEIGHT), ("d", PARAM), ("a", "velocity")):
        assert identity not in index
        assert index.get(identity) is None
        assert Tensors(GIVEN).finder(identity[1])(identity[0]) is None
    assert [Tensors(GIVEN).finder(state)(key) for key, state in index] == list(range(len(GIVEN)))


def test_none_has_more_dims_than_a_box() -> None:
    with pytest.raises(CheckpointError, match="at most 5"):
        Tensors([Tensor("a", PARAM, FLOAT, (1,) * 6)])
