"""What a plan would take on many workers, held against arithmetic done by hand and against every schedule's limits."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.synthetic import Dims, catalog_of
from paddle_reshard.pipeline.core.catalog import File
from paddle_reshard.pipeline.core.errors import UsageError
from paddle_reshard.pipeline.core.literals import Literals
from paddle_reshard.pipeline.core.tensor_columns import Tensors
from paddle_reshard.pipeline.core.topology import Topology
from paddle_reshard.pipeline.formats.hybrid.target import HybridTarget, layout_hybrid
from paddle_reshard.pipeline.planning.ops import Ops
from paddle_reshard.pipeline.planning.parts import MADE, PART
from paddle_reshard.pipeline.planning.plan import BAND, FOOTPRINT_BYTES, Plan, plan_conversion
from paddle_reshard.pipeline.planning.settings import PlanSettings
from paddle_reshard.pipeline.planning.simulate import Rates, simulate

SECOND = Rates(
    read_bytes_per_second=100,
    write_bytes_per_second=50,
    copy_bytes_per_second=10,
    request_seconds=0,
    request_bytes=100,
    requests_at_once=1,
)


def plan_of(groups: list[tuple[int, int, int]]) -> Plan:
    """A plan whose groups read, write and copy so many bytes each."""
    bands = np.zeros(len(groups), dtype=BAND)
    parts = np.zeros(2 * len(groups), dtype=PART)
    for group, (read, written, copied) in enumerate(groups):
        bands[group]["group"], bands[group]["stop"] = group, read
        for part, source, nbytes in ((2 * group, MADE, written), (2 * group + 1, 0, copied)):
            parts[part]["group"], parts[part]["stop"], parts[part]["source_file"] = group, nbytes, source
    return Plan(
        tensors=Tensors(),
        source_files=(File("source", 1 << 40),),
        target_files=(File("target", 1 << 40),),
        ops=Ops.empty(),
        op_groups=np.zeros(0, dtype=np.int64),
        bands=bands,
        parts=parts,
        literals=Literals(),
        group_peaks=np.array([read + written for read, written, _ in groups], dtype=np.int64),
        budget_bytes=1 << 30,
        carried=(),
    )


def test_one_worker_reads_while_it_writes() -> None:
    (found,) = simulate(plan_of([(100, 50, 10), (200, 100, 0)]), [1], SECOND)
    assert found.seconds == pytest.approx(1 + max(1 + 1, 2) + 2)
    assert (found.busy_share, found.most_read_bytes, found.most_written_bytes) == (
        pytest.approx(4 / 5),
        300,
        160,
    )
    assert found.peak_bytes == 150 + 300 + FOOTPRINT_BYTES


def test_a_worker_has_two_groups_at_most() -> None:
    """The third is read when the first is written, though reading has been idle since the second was read."""
    (found,) = simulate(plan_of([(100, 500, 0)] * 3), [1], SECOND)
    assert found.seconds == pytest.approx(1 + 3 * 10)
    (found,) = simulate(plan_of([(100, 500, 0), (100, 50, 0), (1000, 50, 0)]), [1], SECOND)
    assert found.seconds == pytest.approx(1 + 10 + 10 + 1)


def test_the_next_group_goes_to_the_worker_that_is_free_first() -> None:
    """Of 3, 1, 1, and 1 seconds of reading, the first keeps one worker busy while the other does the rest."""
    (found,) = simulate(plan_of([(300, 0, 0), (100, 0, 0), (100, 0, 0), (100, 0, 0)]), [2], SECOND)
    assert (found.seconds, found.busy_share, found.most_read_bytes) == (
        pytest.approx(3),
        pytest.approx(1),
        300,
    )


def test_every_request_waits_for_its_answer() -> None:
    """Three reads of at most 100 bytes, two at a time, then one write."""
    rates = replace(SECOND, request_seconds=10, requests_at_once=2)
    (found,) = simulate(plan_of([(300, 50, 0)]), [1], rates)
    assert found.seconds == pytest.approx(2 * 10 + 10 + 3 + 1)


def test_a_store_is_shared_by_all_workers() -> None:
    """Four groups of a second each on four workers take four seconds where the store serves only one worker."""
    groups = plan_of([(100, 0, 0)] * 4)
    shared = replace(SECOND, total_read_bytes_per_second=100)
    assert [found.seconds for found in simulate(groups, [1, 4], SECOND)] == pytest.approx([4, 1])
    assert [found.seconds for found in simulate(groups, [1, 4], shared)] == pytest.approx([4, 4])


@given(st.lists(st.tuples(*[st.integers(0, 1000)] * 3), min_size=1, max_size=30), st.integers(1, 40))
def test_no_schedule_is_faster_than_its_longest_group_or_the_mean(groups: list, workers: int) -> None:
    """And handing out in turn wastes no more than two groups' time (after Graham 1966)."""
    (found,) = simulate(plan_of(groups), [workers], SECOND)
    reading = [read / 100 for read, _, _ in groups]
    writing = [written / 50 + copied / 10 for _, written, copied in groups]
    longest = max(map(sum, zip(reading, writing, strict=True)))
    least, most = max(sum(reading), sum(writing)) / workers, (sum(reading) + sum(writing)) / workers
    assert max(longest, least) - 1e-9 <= found.seconds <= 2 * longest + most + 1e-9
    assert found.busy_share <= 1 + 1e-9


def test_a_real_plan_scales_until_there_are_too_few_groups() -> None:
    source = catalog_of(
        Dims(2048, 8192, 4, 16, 16, 32000), HybridTarget(Topology(tp=4, sharding=8), "stage1v2")
    )
    files = layout_hybrid(source, HybridTarget(Topology(tp=2, sharding=4), "stage1v2"))
    plan = plan_conversion(source.catalog, files, [], PlanSettings(1 << 30))
    one, eight, many = simulate(plan, [1, 8, 4096], Rates())
    assert one.most_read_bytes == plan.read_bytes
    assert one.most_written_bytes == plan.written_bytes
    assert one.seconds / eight.seconds > 7
    assert many.seconds >= one.seconds / plan.groups


@pytest.mark.parametrize("workers", [0, -3])
def test_workers_are_counted_from_one(workers: int) -> None:
    with pytest.raises(UsageError, match=f"{workers} workers cannot run a plan"):
        simulate(plan_of([(1, 1, 1)]), [1, workers], Rates())


def test_rates_are_above_zero() -> None:
    with pytest.raises(UsageError, match="read bytes per second cannot be 0"):
        Rates(read_bytes_per_second=0)
