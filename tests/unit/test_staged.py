"""A staged target that reads back as another checkpoint is refused, naming the first tensor that differs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.synthetic import Dims, catalog_of
from paddle_reshard.pipeline.checkpoint.checkpoint import Checkpoint
from paddle_reshard.pipeline.checkpoint.format import Staged
from paddle_reshard.pipeline.core.errors import CheckpointError
from paddle_reshard.pipeline.core.tensor_columns import Tensors
from paddle_reshard.pipeline.core.tensors import Tensor, dtype_named
from paddle_reshard.pipeline.core.topology import Topology
from paddle_reshard.pipeline.formats.hybrid.target import HybridTarget
from paddle_reshard.pipeline.formats.writing import check_tensors


@pytest.fixture(scope="module")
def wanted() -> Checkpoint:
    return catalog_of(Dims(64, 128, 2, 8, 8, 512), HybridTarget(Topology(), "none"))


def _check(wanted: Checkpoint, states_not_carried: tuple[str, ...], found: list[Tensor]) -> None:
    read = replace(wanted, catalog=replace(wanted.catalog, tensors=Tensors(found)))
    check_tensors(Staged({}, wanted, states_not_carried, lambda: read), read)


def test_the_same_tensors_in_another_order_are_what_was_wanted(wanted: Checkpoint) -> None:
    tensors = list(wanted.catalog.tensors)
    _check(wanted, (), tensors[::-1])
    _check(wanted, ("moment1",), [tensor for tensor in tensors if tensor.state != "moment1"])


@pytest.mark.parametrize("change", ["lacks", "adds", "shape", "dtype", "left state"])
def test_what_differs_is_named(wanted: Checkpoint, change: str) -> None:
    tensors = list(wanted.catalog.tensors)
    place = next(number for number, tensor in enumerate(tensors) if tensor.state == "moment1")
    odd = tensors[place]
    found = {
        "lacks": [tensor for tensor in tensors if tensor is not odd],
        "adds": [*tensors, replace(odd, key=odd.key + ".more")],
        "shape": [*tensors[:place], replace(odd, global_shape=(1,)), *tensors[place + 1 :]],
        "dtype": [*tensors[:place], replace(odd, dtype=dtype_named("float64")), *tensors[place + 1 :]],
        "left state": [tensor for tensor in tensors if tensor.state != "moment1" or tensor is odd],
    }[change]
    states_not_carried = ("moment1",) if change == "left state" else ()
    with pytest.raises(CheckpointError, match=rf"{odd.key}\S* \(moment1\): not the same in the source"):
        _check(wanted, states_not_carried, found)
