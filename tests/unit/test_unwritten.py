"""Parts in memory that was used before: every byte that no move writes is zero, and few others are zeroed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paddle_reshard.pipeline.convert.plan import ConversionPlan
from paddle_reshard.pipeline.core.geometry import MAX_DIMS
from paddle_reshard.pipeline.core.tensors import DTYPES
from paddle_reshard.pipeline.planning.ops import MOVE, OP, SUM, Ops, set_stops
from paddle_reshard.pipeline.planning.parts import MADE, PART
from paddle_reshard.pipeline.planning.work import plan_work
from paddle_reshard.tasks import unwritten as module
from paddle_reshard.tasks.run_group import run_group
from paddle_reshard.tasks.unwritten import unwritten
from paddle_reshard.tasks.workspace import Workspace
from tests.cluster.test_exchange import Written
from tests.conftest import case_directory
from tests.sized import in_groups

GARBAGE = 0xA5


@pytest.fixture(autouse=True, scope="module")
def _however_small() -> Iterator[None]:
    """Groups and runs of tests are smaller than what is worth examining."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "FEWEST_BYTES", 0)
        patch.setattr(module, "SHORTEST_RUN_BYTES", 1)
        yield


MIXED = 2
SIZE_BYTES = 4096
boxes = st.tuples(
    st.lists(st.integers(1, 4), min_size=MAX_DIMS, max_size=MAX_DIMS),
    st.lists(st.integers(0, 70), min_size=MAX_DIMS, max_size=MAX_DIMS),
    st.permutations(range(MAX_DIMS)),
    st.booleans(),
    st.integers(0, SIZE_BYTES - 1),
    st.sampled_from([MOVE, MOVE, MOVE, SUM]),
    st.integers(0, len(DTYPES) - 1),
    st.integers(0, MIXED),
)


@given(st.lists(boxes, max_size=12), st.lists(st.integers(0, SIZE_BYTES), max_size=3))
def test_gaps_are_what_the_moves_leave_of_parts(drawn: list[tuple[Any, ...]], cuts: list[int]) -> None:
    """Boxes of any strides, also overlapping ones; NumPy says which bytes they write."""
    edges = [0, *sorted(cuts), SIZE_BYTES]
    parts = np.zeros(len(edges) - 1, dtype=PART)
    parts["file"], parts["source_file"] = 7, MADE
    parts["start"], parts["stop"] = edges[:-1], edges[1:]
    rows, written = [], np.zeros(SIZE_BYTES, dtype=bool)
    for extents, strides, order, dense, first, kind, dtype, tensor in drawn:
        row, nbytes = np.zeros((), dtype=OP), np.dtype(DTYPES[dtype].code).itemsize
        reach = nbytes
        for dim in order if dense else ():
            strides[dim], reach = reach, reach * extents[dim]
        stop = first + nbytes + sum((n - 1) * stride for n, stride in zip(extents, strides, strict=True))
        if stop > edges[int(np.searchsorted(edges, first, side="right"))]:
            continue  # every box lies in one part
        row["extents"], row["target_strides"] = extents, strides
        row["target_byte"], row["target_file"], row["target_dtype"] = first, 7, dtype
        row["kind"], row["tensor"] = kind, tensor
        rows.append(row)
        if kind == MOVE and tensor != MIXED:
            np.ndarray((*extents, nbytes), bool, written, first, (*strides, 1))[...] = True
    ops = Ops.of_rows(np.array(rows, dtype=OP))
    set_stops(ops)
    gaps = unwritten(parts, ops, {MIXED})
    assert gaps is not None
    for part, (start, stop) in enumerate(pairwise(edges)):
        zeroed = np.zeros(stop - start, dtype=bool)
        for begin, end in gaps[part]:
            assert 0 <= begin < end <= stop - start
            zeroed[begin:end] = True
        assert np.array_equal(zeroed, ~written[start:stop])


PLANS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "tp joined": ("mp2pp2sh2_s1v2_meta_ema", {"to": "tp=1,pp=2"}),
    "padding of fused buffers": ("mp2pp2sh2_s1v2_meta_ema", {"to": "tp=2,sharding=3"}),
    "tp cut": ("sh2_s1v1_meta_fp32", {"to": "tp=2,sharding=2", "sharding_strategy": "stage1v1"}),
    "flex": ("mp2pp2sh2_s1v2_meta_ema", {"format": "flex"}),
    "cast and transposed": ("mp2_tied", {"format": "huggingface", "dtype": "float32"}),
}


@pytest.mark.parametrize("name", PLANS)
def test_memory_full_of_garbage_gives_the_bytes_of_new_memory(name: str, tmp_path: Path) -> None:
    case, options = PLANS[name]
    source = case_directory(case) / "checkpoint-3"
    check_same(in_groups(300_000).plan(source, tmp_path / "T", **options))


def test_averages_too(tmp_path: Path) -> None:
    """They are added up in the part, or cast to it from other memory."""
    source = case_directory("mp2pp2sh2_s1v2_meta_ema") / "checkpoint-3"
    check_same(in_groups(300_000).plan_average([source, source], tmp_path / "T", to="tp=2", uniform=True))


def check_same(conversion: ConversionPlan) -> None:
    zeroed = nbytes = 0
    for work in plan_work(conversion.plan):
        used = Workspace(work.peak_bytes)
        used.memory.fill(GARBAGE)
        new, reused = Written(), Written()
        assert run_group(work, conversion.store, new) == run_group(work, conversion.store, reused, used)
        assert reused.parts == new.parts
        gaps = unwritten(work.parts, work.ops, work.mixtures)
        assert gaps is not None
        zeroed += sum(stop - start for ranges in gaps.values() for start, stop in ranges)
        nbytes += sum(map(len, new.parts.values()))
    assert 0 < zeroed < nbytes
