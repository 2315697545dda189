"""How a sharding group holds a tensor of 6 elements, and what is refused: by strategy, without a file."""

from __future__ import annotations

import pytest

from paddle_reshard.pipeline.core.errors import CoverageError
from paddle_reshard.pipeline.core.tensors import MASTER_WEIGHT, PARAM, dtype_named
from paddle_reshard.pipeline.layouts.hybrid.arrays import StoredArray
from paddle_reshard.pipeline.layouts.hybrid.ranks import Cell
from paddle_reshard.pipeline.layouts.hybrid.sharding_group import ShardingGroup, common_dtype, one_number
from paddle_reshard.storage.formats.paddle_pickle import ArrayRef, SplitArray

KEY = "w"
SHAPE = (2, 3)


def stored(shard: int, shape: tuple[int, ...], at: int = 0, copy: int = 0, dtype: str = "f4") -> StoredArray:
    return StoredArray(shard, f"rank{shard}", ArrayRef(at, dtype, shape, None, None), copy)


def cell(sliced: bool = False, **facts: object) -> Cell:
    found = Cell(0, 0, shapes={KEY: SHAPE}, dtypes={KEY: dtype_named("bfloat16")}, **facts)
    if sliced:
        found.sliced.add(KEY)
    return found


def placed(strategy: str, degree: int, arrays: list[StoredArray], of: Cell, state: str = MASTER_WEIGHT):
    copies = ShardingGroup(strategy, degree).copies(of, KEY, state, arrays)
    return [[(array.path, array.flat) for array in copy] for copy in copies]


def total(of: Cell, strategy: str, degree: int) -> int:
    """Elements of all slices, padding included: what the refusal of too few says."""
    with pytest.raises(CoverageError) as refused:
        placed(strategy, degree, [stored(0, (1,))], of)
    return int(str(refused.value).split("ranks are ")[1].split()[0])


def test_slices_make_one_copy_in_the_order_of_their_ranks() -> None:
    whole = total(cell(), "stage1v2", 2)
    arrays = [stored(0, (4,)), stored(1, (whole - 4,))]
    assert placed("stage1v2", 2, arrays, cell()) == [[("rank0", (0, 4)), ("rank1", (4, whole))]]


def test_an_array_that_was_cut_when_it_was_saved_lies_in_several_places() -> None:
    whole = total(cell(), "stage1v2", 1)
    parts = (ArrayRef(100, "f4", (5,), None, None), ArrayRef(300, "f4", (whole - 5,), None, None))
    split = StoredArray(0, "rank0", SplitArray(parts, (whole,)))
    (copy,) = ShardingGroup("stage1v2", 1).copies(cell(), KEY, MASTER_WEIGHT, [split])
    assert [(array.byte_offset, array.flat) for array in copy] == [(100, (0, 5)), (300, (5, whole))]


def test_stage_3_holds_large_tensors_in_equal_slices_and_small_ones_on_every_rank() -> None:
    each = total(cell(sliced=True), "stage3", 2) // 2
    slices = [stored(0, (each,)), stored(1, (each,))]
    assert placed("stage3", 2, slices, cell(sliced=True)) == [
        [("rank0", (0, each)), ("rank1", (each, 2 * each))]
    ]
    copies = [stored(0, SHAPE), stored(1, SHAPE)]
    assert placed("stage3", 2, copies, cell()) == [[("rank0", None)], [("rank1", None)]]


def test_parameters_are_not_cut_whatever_the_strategy() -> None:
    for strategy in ("none", "stage1v1", "stage1v2", "stage2", "stage3"):
        assert placed(strategy, 2, [stored(1, SHAPE)], cell(), PARAM) == [[("rank1", None)]]


def test_several_copies_are_told_apart_by_their_number() -> None:
    arrays = [stored(0, SHAPE, copy=0), stored(0, SHAPE, copy=1)]
    assert placed("stage1v1", 2, arrays, cell()) == [[("rank0", None)], [("rank0", None)]]


@pytest.mark.parametrize(
    ("strategy", "arrays", "facts", "message"),
    [
        ("stage1v2", [stored(0, SHAPE)], {}, r"a slice has one dim, this has shape \(2, 3\)"),
        ("stage1v2", [stored(0, (3,)), stored(2, (3,))], {}, "shards 0 and 2 hold slices, shard 1 does not"),
        (
            "stage1v2",
            [stored(0, (3,)), stored(1, (2,))],
            {},
            "its slices have 5 elements together, 6 elements",
        ),
        ("stage3", [stored(0, SHAPE)], {}, "1 of 2 ranks hold it; stage 3 keeps uncut tensors on every rank"),
        ("stage1v1", [stored(0, SHAPE), stored(1, SHAPE)], {}, "under stage1v1 only one may"),
        (
            "stage1v1",
            [stored(0, (6,))],
            {},
            r"stored with shape \(6,\), under stage1v1 a rank's whole tensor",
        ),
        ("stage1v1", [stored(0, SHAPE)], {"owners": {KEY: 1}}, "param2rank says rank 1 holds it"),
    ],
)
def test_what_a_group_cannot_hold_is_refused(
    strategy: str, arrays: list[StoredArray], facts: dict[str, object], message: str
) -> None:
    with pytest.raises(CoverageError, match=message):
        placed(strategy, 2, arrays, cell(**facts))


def test_unequal_slices_of_stage_3_are_refused() -> None:
    whole = total(cell(sliced=True), "stage3", 2)
    arrays = [stored(0, (whole - 1,)), stored(1, (1,))]
    with pytest.raises(CoverageError, match=r"2 slices of \[1, \d+\] elements, stage 3 makes 2 equal ones"):
        placed("stage3", 2, arrays, cell(sliced=True))


def test_arrays_of_one_tensor_have_one_dtype() -> None:
    assert common_dtype(KEY, "moment1", [stored(0, (3,)), stored(1, (3,))]).name == "float32"
    with pytest.raises(CoverageError, match="stored as float32 and as float16"):
        common_dtype(KEY, "moment1", [stored(0, (3,)), stored(1, (3,), dtype="f2")])


def test_a_power_of_a_beta_is_one_number() -> None:
    assert one_number(KEY, "beta1_pow_acc", stored(0, (1,), at=7)).byte_offset == 7
    with pytest.raises(CoverageError, match=r"shape \(2,\), one number per parameter is expected"):
        one_number(KEY, "beta1_pow_acc", stored(0, (2,)))
