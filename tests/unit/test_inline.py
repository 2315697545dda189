"""Groups run several at a time, within the memory that they were given, and end cleanly."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import paddle_reshard
from paddle_reshard.clusters.inline import InlineEngine
from paddle_reshard.pipeline.convert.plan import ConversionPlan
from paddle_reshard.pipeline.core.errors import MemoryBudgetError, UsageError
from paddle_reshard.pipeline.core.events import WorkerAssigned
from paddle_reshard.pipeline.planning.plan import FOOTPRINT_BYTES
from paddle_reshard.pipeline.planning.work import RemainingGroups
from paddle_reshard.storage.store import Read, ReadRange
from paddle_reshard.tasks.run_group import run_group
from paddle_reshard.tasks.workspace import Workspace, Workspaces
from tests.cluster.test_exchange import Written
from tests.conftest import case_directory
from tests.reads import OneByOne
from tests.sized import in_groups

MIB = 1 << 20
GROUP_BYTES = 100_000
PATIENCE_SECONDS = 60


@pytest.fixture
def conversion(tmp_path: Path) -> ConversionPlan:
    """Of a real checkpoint, in many small groups."""
    source = case_directory("mp2pp2sh2_s1v2_meta_ema") / "checkpoint-3"
    planned = in_groups(GROUP_BYTES).plan(source, tmp_path / "T", to="tp=2,sharding=3")
    assert planned.plan.groups > 20
    return planned


class Visited(tuple[tuple[int, int, bytes], ...]):
    """Literals of a group that count how often one of them is looked at."""

    visits = 0

    def __iter__(self) -> Iterator[tuple[int, int, bytes]]:
        for literal in super().__iter__():
            self.visits += 1
            yield literal


def test_each_literal_is_looked_at_once(tmp_path: Path) -> None:
    """However many parts a group has: there may be hundreds of thousands of both."""
    source = case_directory("mp2pp2sh2_s1v2_meta_ema") / "checkpoint-3"
    conversion = paddle_reshard.plan(source, tmp_path / "T", to="tp=2,sharding=3")
    pairs = looked_at = 0
    for work in RemainingGroups(conversion.plan):
        literals = Visited(work.literals)
        run_group(replace(work, literals=literals), conversion.store, Written())
        assert literals.visits <= len(literals)
        looked_at, pairs = looked_at + literals.visits, pairs + len(literals) * len(work.parts)
    assert 0 < 10 * looked_at < pairs


@dataclass
class Reads(OneByOne):
    """A source that counts reads; the one of number ``fails`` does, and all wait at a gate if there is one."""

    source: ReadRange
    fails: int = -1
    gate: threading.Barrier | None = None
    made: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def read_into(self, path: str, byte_offset: int, buffer: memoryview) -> None:
        self.source.read_into(path, byte_offset, buffer)

    def read_many(self, reads: Sequence[Read]) -> None:
        with self.lock:
            number, self.made = self.made, self.made + 1
        if self.gate is not None:
            self.gate.wait()
        if number == self.fails:
            raise OSError("the disk is gone")
        super().read_many(reads)


def our_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("group")]


@pytest.mark.parametrize("memory_bytes", [FOOTPRINT_BYTES + 2 * GROUP_BYTES, 1 << 30])
@pytest.mark.parametrize("workers", [1, 2, 5, None])
def test_any_number_of_workers_makes_the_same(
    conversion: ConversionPlan, workers: int | None, memory_bytes: int
) -> None:
    works = RemainingGroups(conversion.plan)
    one, several = Written(), Written()
    expected = list(chain.from_iterable(InlineEngine(workers=1).run(works, conversion.store, one)))
    assert [report.group for report in expected] == [work.group for work in works]
    found = chain.from_iterable(InlineEngine(memory_bytes, workers).run(works, conversion.store, several))
    assert sorted(found, key=lambda report: report.group) == expected
    assert several.parts == one.parts
    assert not our_threads()


def test_an_observer_learns_what_each_worker_runs(conversion: ConversionPlan) -> None:
    events: list[WorkerAssigned] = []
    memory_bytes = FOOTPRINT_BYTES + 2 * GROUP_BYTES
    engine = InlineEngine(memory_bytes, 3, observe=events.append)
    works = RemainingGroups(conversion.plan)
    reports = list(chain.from_iterable(engine.run(works, conversion.store, Written())))
    ran = {group: event.worker for event in events for groups in event.groups or () for group in groups}
    assert ran == {report.group: report.worker for report in reports}
    assert sorted(ran) == [work.group for work in works]
    held: dict[str, int] = {}
    for event in events:
        assert not (held.get(event.worker) and event.groups)  # one group at a time
        held[event.worker] = event.peak_bytes
        assert sum(held.values()) <= 2 * GROUP_BYTES
    assert len(held) <= 3
    assert not any(held.values())


def test_groups_overlap(conversion: ConversionPlan) -> None:
    """Nobody comes through a gate alone: with one group at a time, the first would wait in vain."""
    reading = [work.group for work in RemainingGroups(conversion.plan) if len(work.bands)][:6]
    works = RemainingGroups(conversion.plan, set(range(conversion.plan.groups)) - set(reading))
    source = Reads(conversion.store, gate=threading.Barrier(2, timeout=PATIENCE_SECONDS))
    reports = list(InlineEngine(workers=2).run(works, source, Written()))
    assert len(reports) == len(works)


def test_a_failure_ends_all(conversion: ConversionPlan) -> None:
    source = Reads(conversion.store, fails=4)
    with pytest.raises(OSError, match="the disk is gone"):
        list(InlineEngine(workers=3).run(RemainingGroups(conversion.plan), source, Written()))
    assert source.made <= 8
    assert not our_threads()


def test_a_run_can_be_closed_at_any_time(conversion: ConversionPlan) -> None:
    source = Reads(conversion.store)
    with closing(InlineEngine(workers=3).run(RemainingGroups(conversion.plan), source, Written())) as reports:
        next(reports)
    assert source.made <= 6
    assert not our_threads()


def test_a_group_that_can_never_run_is_named(conversion: ConversionPlan) -> None:
    works = RemainingGroups(conversion.plan)
    engine = InlineEngine(FOOTPRINT_BYTES + conversion.plan.peak_bytes - 1)
    with pytest.raises(
        MemoryBudgetError, match=rf"needs {FOOTPRINT_BYTES + conversion.plan.peak_bytes} bytes"
    ):
        list(engine.run(works, conversion.store, Written()))
    assert not our_threads()


def test_workers_are_counted_from_one() -> None:
    with pytest.raises(UsageError, match="0 workers"):
        InlineEngine(workers=0)


@given(st.lists(st.tuples(st.integers(0, 100), st.integers(0, 3)), max_size=60), st.integers(1, 4))
def test_workspaces_never_exceed_the_budget(steps: list[tuple[int, int]], count: int) -> None:
    """Whatever groups come and end in whatever order; alone, every group is admitted."""
    desk = Workspaces(100 * MIB, sorted(peak * MIB for peak, _ in steps)[-count:])
    running: list[Workspace] = []
    for peak_mib, ends in steps:
        if len(running) == count:
            desk.give_back(running.pop(ends % count))
        while (space := desk.take(peak_mib * MIB, "a tensor")) is None:
            desk.give_back(running.pop(ends % len(running)))
        running.append(space)
        kept = {id(each): each.capacity_bytes for each in (*running, *desk.idle)}
        assert space.capacity_bytes >= peak_mib * MIB
        assert sum(kept.values()) <= 100 * MIB
        assert sum(capacity > 0 for capacity in kept.values()) <= count


def test_workspaces_are_made_for_the_largest_groups_where_these_are_alike() -> None:
    """No page is touched for the first time twice."""
    desk = Workspaces(1000 * MIB, [60 * MIB, 62 * MIB])
    spaces = [desk.take(peak * MIB, "a tensor") for peak in (1, 30)]
    for space in spaces:
        assert space is not None
        desk.give_back(space)
    assert all(desk.take(peak * MIB, "a tensor") in spaces for peak in (62, 60))
