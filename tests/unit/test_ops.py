"""Ops say the same however narrow they are held."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paddle_reshard.pipeline.core.geometry import MAX_DIMS
from paddle_reshard.pipeline.planning.ops import OP, Ops

LIMITS = (1, 100, 1 << 9, 1 << 20, 1 << 40)


@st.composite
def rows(draw: st.DrawFn) -> np.ndarray:
    """Any numbers that fit the fields, in some of them the same for all ops."""
    numbers = np.random.default_rng(draw(st.integers(0, 1 << 32)))
    found = np.zeros(draw(st.integers(0, 40)), dtype=OP)
    for name in OP.names or ():
        most = min(draw(st.sampled_from(LIMITS)), int(np.iinfo(OP[name].base).max))
        found[name] = numbers.integers(-most - 1 if draw(st.booleans()) else 0, most, found[name].shape)
    return found


@given(rows(), rows(), st.data())
def test_ops_say_what_rows_say(one: np.ndarray, other: np.ndarray, data: st.DataObject) -> None:
    both = np.concatenate([one, other])
    ops = Ops.joined([Ops.of_rows(one), Ops.empty(), Ops.of_rows(other)])
    assert np.array_equal(ops.rows(), both)
    assert np.array_equal(pickle.loads(pickle.dumps(ops)).rows(), both)
    order = np.array(data.draw(st.permutations(range(len(both)))), dtype=np.int64)
    ops.reorder(order)
    both = both[order]
    assert np.array_equal(np.concatenate([both[:0], *(block.rows() for block in ops.blocks(7))]), both)
    chosen = both["tensor"] % 2 == 0
    for found, wanted in zip(ops.copy().split(chosen), (both[chosen], both[~chosen]), strict=True):
        assert np.array_equal(found.rows(), wanted)
    dims = both["source_file"].astype(np.int64) % MAX_DIMS
    places = np.arange(len(both)), dims
    assert np.array_equal(ops.along_each("extents", dims), both["extents"][places])
    values = both["source_byte"] // 2
    ops.set_along_each("extents", dims, values)
    both["extents"][places] = values
    assert np.array_equal(ops.rows(), both)


def test_a_field_that_is_looked_at_cannot_be_written_to() -> None:
    """What is written there would be lost."""
    ops = Ops.empty(3)
    for name in OP.names or ():
        with pytest.raises(ValueError, match="read-only"):
            ops[name][0] = 1


def test_what_is_alike_takes_little() -> None:
    """Ops of 100,000 tensors of one shape: a third of what their rows would take, sent somewhere else too."""
    ops = Ops.empty(100_000)
    ops["tensor"] = ops["source_tensor"] = np.arange(100_000)
    ops["source_byte"] = np.arange(100_000) * 256
    assert len(pickle.dumps(ops)) < 100_000 * OP.itemsize / 4


@given(rows())
def test_columns_are_changed_one_by_one(found: np.ndarray) -> None:
    ops = Ops.of_rows(found)
    for dim in range(MAX_DIMS):
        single = ops.single("offset", dim)
        assert single is None or (found["offset"][:, dim] == single).all()
    ops.set_along("offset", 1, found["source_byte"])
    ops.share("extents", Ops.of_rows(found), "target_strides")
    found["offset"][:, 1] = found["source_byte"]
    found["extents"] = found["target_strides"]
    assert np.array_equal(ops.rows(), found)
    with pytest.raises(ValueError, match="cannot be the tensor"):
        ops.share("tensor", Ops.empty(len(found) + 1), "pass")
    ops.freeze()
    with pytest.raises(ValueError, match="read-only"):
        ops.share("tensor", Ops.empty(len(found)), "pass")
