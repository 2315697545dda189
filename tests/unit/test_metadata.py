"""Metadata are part of the budget of a process that plans and moves, as far as its footprint has no room for them."""

from __future__ import annotations

import pickle

import pytest

from paddle_reshard.clusters.inline import InlineEngine
from paddle_reshard.pipeline.core.errors import MemoryBudgetError
from paddle_reshard.pipeline.planning.metadata import check_metadata, spare_bytes

MIB = 1 << 20
BUDGET_BYTES = 256 * MIB
MANY = 270_849
"""About as many tensors as a training checkpoint of DeepSeek-V3 has."""
ON_DISKS, IN_A_STORE = spare_bytes(local=True), spare_bytes(local=False)


def test_270_000_tensors_on_disks_fit_256_mib() -> None:
    check_metadata(MANY, None, 0, BUDGET_BYTES, ON_DISKS)
    check_metadata(MANY, MANY, 64 * MIB, BUDGET_BYTES, ON_DISKS)
    left = InlineEngine(BUDGET_BYTES).reserving_metadata(MANY, MANY, 64 * MIB, ON_DISKS).memory_bytes
    assert BUDGET_BYTES - 64 * MIB < left < BUDGET_BYTES


@pytest.mark.parametrize("pieces", [None, MANY])
def test_a_refusal_names_a_budget_that_would_do(pieces: int | None) -> None:
    with pytest.raises(MemoryBudgetError) as refused:
        check_metadata(MANY, pieces, 0, BUDGET_BYTES, IN_A_STORE)
    assert ("at least" in str(refused.value)) == (pieces is None)
    assert str(pickle.loads(pickle.dumps(refused.value))) == str(refused.value)
    check_metadata(MANY, pieces, 0, refused.value.needed_bytes, IN_A_STORE)
    with pytest.raises(MemoryBudgetError):
        check_metadata(MANY, pieces, 0, refused.value.needed_bytes - 1, IN_A_STORE)


def test_few_tensors_fit_any_budget_and_leave_all_of_it() -> None:
    """Whether a group fits is for the plan to say."""
    check_metadata(10_000, 10_000, BUDGET_BYTES, 1, IN_A_STORE)
    assert InlineEngine(BUDGET_BYTES).reserving_metadata(
        10_000, 10_000, BUDGET_BYTES, IN_A_STORE
    ) == InlineEngine(BUDGET_BYTES)
