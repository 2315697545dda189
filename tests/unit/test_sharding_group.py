"""How a sharding group holds a tensor of 6 elements, and what is refused: by strategy, without a file."""

from __future__ import annotations

import pytest

from paddle_reshard.pipeline.core.errors import CoverageError
from paddle_reshard.pipeline.core.tensors import MASTER_WEIGHT, dtype_named
from paddle_reshard.pipeline.formats.hybrid.arrays import StoredArray
from paddle_reshard.pipeline.formats.hybrid.ranks import StoredCell
from paddle_reshard.pipeline.formats.hybrid.sharding_group import ShardingGroup, one_number
from paddle_reshard.pipeline.formats.reading import common_dtype
from paddle_reshard.storage.files.paddle_pickle import ArrayRef, SplitArray

KEY = "w"
SHAPE = (2, 3)


def stored(shard: int, shape: tuple[int, ...], at: int = 0, copy: int = 0, dtype: str = "f4") -> StoredArray:
    return StoredArray(shard, f"rank{shard}", ArrayRef(at, dtype, shape, None, None), copy)


def cell(**facts: object) -> StoredCell:
    return StoredCell(0, 0, shapes={KEY: SHAPE}, dtypes={KEY: dtype_named("bfloat16")}, **facts)


CUT = {0: (0, 4), 1: (4, 256)}
"""What each rank of a group must hold of the tensor, padding included."""


def placed(
    strategy: str,
    arrays: list[StoredArray],
    slices: dict[int, tuple[int, int]] | None = None,
    **facts: object,
) -> None:
    group = ShardingGroup(strategy, 2, {} if slices is None else {KEY: slices})
    list(group.copies(cell(**facts), KEY, MASTER_WEIGHT, arrays))


def test_an_array_that_was_cut_when_it_was_saved_lies_in_several_places() -> None:
    parts = (ArrayRef(100, "f4", (5,), None, None), ArrayRef(300, "f4", (251,), None, None))
    split = StoredArray(0, "rank0", SplitArray(parts, (256,)))
    group = ShardingGroup("stage1v2", 1, {KEY: {0: (0, 256)}})
    [(_, copy)] = group.copies(cell(), KEY, MASTER_WEIGHT, [split])
    assert [(array.byte_offset, array.flat) for array in copy] == [(100, (0, 5)), (300, (5, 256))]


@pytest.mark.parametrize(
    ("strategy", "arrays", "facts", "message"),
    [
        ("stage3", [stored(0, SHAPE)], {}, "1 of 2 ranks hold it; stage 3 keeps uncut tensors on every rank"),
        ("stage1v1", [stored(0, SHAPE), stored(1, SHAPE)], {}, "under stage1v1 only one may"),
        ("stage1v1", [stored(0, (6,))], {}, r"stored with shape \(6,\), under stage1v1 a rank's whole tensor"),
        ("stage1v1", [stored(0, SHAPE)], {"owners": {KEY: 1}}, "param2rank says rank 1 holds it"),
    ],
)  # fmt: skip
def test_what_a_group_cannot_hold_is_refused(
    strategy: str, arrays: list[StoredArray], facts: dict[str, object], message: str
) -> None:
    with pytest.raises(CoverageError, match=message):
        placed(strategy, arrays, **facts)


def test_several_copies_are_told_apart_by_their_number() -> None:
    placed("stage1v1", [stored(0, SHAPE, copy=0), stored(0, SHAPE, copy=1)])


@pytest.mark.parametrize(
    ("arrays", "found"),
    [
        ([stored(0, (252,)), stored(1, (4,))], r"\[252\] \(rank 0\), \[4\] \(rank 1\)"),
        ([stored(0, SHAPE), stored(1, (252,))], r"\[2, 3\] \(rank 0\), \[252\] \(rank 1\)"),
        ([stored(0, (4,)), stored(2, (252,))], r"\[4\] \(rank 0\), \[252\] \(rank 2\)"),
        ([stored(1, (256,))], r"\[256\] \(rank 1\)"),
    ],
)
@pytest.mark.parametrize("strategy", ["stage1v2", "stage3"])
def test_slices_that_a_rank_must_not_hold_are_refused(
    strategy: str, arrays: list[StoredArray], found: str
) -> None:
    message = rf"hold slices of {found}; .* must hold \[4\] \(rank 0\), \[252\] \(rank 1\): files of two"
    with pytest.raises(CoverageError, match=message) as refused:
        placed(strategy, arrays, CUT)
    assert refused.value.args  # it names the tensor and the files
    for stored_array in arrays:
        assert stored_array.path in str(refused.value)


def test_arrays_of_one_tensor_have_one_dtype() -> None:
    single, half = [(array.dtype(), array.path) for array in (stored(0, (3,)), stored(1, (3,), dtype="f2"))]
    assert common_dtype(KEY, "moment1", [single, single]).name == "float32"
    with pytest.raises(CoverageError, match="stored as float32 and as float16") as refused:
        common_dtype(KEY, "moment1", [single, half])
    assert half[1] in str(refused.value)


def test_a_power_of_a_beta_is_one_number() -> None:
    assert one_number(KEY, "beta1_pow_acc", stored(0, (1,), at=7)).byte_offset == 7
    with pytest.raises(CoverageError, match=r"shape \(2,\), one number per parameter is expected"):
        one_number(KEY, "beta1_pow_acc", stored(0, (2,)))
