"""Who takes the next group on Ray, without a cluster: what is known of groups and workers decides."""

from __future__ import annotations

from dataclasses import replace

import pytest

from paddle_reshard.clusters.ray.backlog import Attempt
from paddle_reshard.clusters.ray.dealing import Dealer, NextGroup, Table
from paddle_reshard.clusters.ray.state import Running, Worker
from paddle_reshard.pipeline.core.errors import MemoryBudgetError
from paddle_reshard.pipeline.planning.plan import FOOTPRINT_BYTES

MIB = 1 << 20
DEALER = Dealer(FOOTPRINT_BYTES + 100 * MIB, "auto", side_by_side=True, most_object_bytes=200 * MIB)
IDLE, STARTING = Worker(0, None, ready=True, pinged=False), Worker(0, None)
GROUP = NextGroup("w", 40 * MIB, bands=6, parts=3, object_bytes=50 * MIB)


def busy(*mib: int, alone: bool = False) -> Worker:
    running = [Running(Attempt(range(1), peak * MIB, 1 + alone)) for peak in mib]
    return replace(IDLE, running=running)


def table(*workers: Worker, group: NextGroup = GROUP, others: int = 0, **known: object) -> Table:
    """The last groups of a run unless ``exhausted=False``; ``others`` wait behind the next one and are as large."""
    peaks = (group.peak_bytes,) * (1 + others)
    defaults = {"exhausted": True, "patient": True, "object_bytes": 0}
    return Table(group, peaks, workers, **{**defaults, **known})


@pytest.mark.parametrize(
    ("dealt", "chosen"),
    [
        (table(IDLE, busy(1), IDLE, exhausted=False), [0]),  # many are left: each takes a group of its own
        (table(IDLE, IDLE, IDLE), [0, 1, 2]),  # the last one is shared by all
        (table(IDLE, IDLE, IDLE, others=1), [0]),  # three for two: one each
        (table(*[IDLE] * 4, others=1), [0, 1]),  # four for two: two each
        (table(*[IDLE] * 9), [0, 1, 2, 3, 4, 5]),  # no more than it has bands
        (table(IDLE, IDLE, STARTING), []),  # a third could share it soon
        (table(IDLE, IDLE, STARTING, patient=False), [0, 1]),
        (table(IDLE, IDLE, group=replace(GROUP, peak_bytes=20 * MIB)), [0]),  # too small
        (table(IDLE, IDLE, group=replace(GROUP, bands=1)), [0]),
        (table(IDLE, IDLE, group=replace(GROUP, attempt=2)), [0]),
        (table(IDLE, IDLE, object_bytes=160 * MIB), [0]),  # its bands do not fit beside others
        (table(STARTING, STARTING), []),
    ],
)
def test_idle_workers(dealt: Table, chosen: list[int]) -> None:
    assert DEALER.choose(dealt) == [dealt.workers[number] for number in chosen]


@pytest.mark.parametrize(
    ("dealt", "chosen"),
    [
        (table(busy(30, 10), busy(50), exhausted=False), [1]),  # two at a time at most
        (table(busy(30), busy(70), exhausted=False), [0]),
        (table(busy(70), busy(70), exhausted=False), []),  # no room for 40 more
        (table(busy(30), busy(30)), []),  # one will be idle soon
        (table(busy(30), busy(30), others=2), [0]),
        (table(busy(30, alone=True), busy(50), exhausted=False), [1]),
        (table(busy(30), exhausted=False, group=replace(GROUP, attempt=2)), []),  # it has to be alone
        (table(replace(busy(30), pinged=True), exhausted=False), []),
    ],
)
def test_busy_workers(dealt: Table, chosen: list[int]) -> None:
    assert DEALER.choose(dealt) == [dealt.workers[number] for number in chosen]
    assert replace(DEALER, side_by_side=False).choose(dealt) == []
    assert replace(DEALER, exchange="always").choose(dealt) == []


@pytest.mark.parametrize(
    ("exchange", "members", "chosen"),
    [("never", 3, 1), ("always", 3, 3), ("always", 1, 1), ("auto", 1, 1)],
)
def test_what_is_asked_for(exchange: str, members: int, chosen: int) -> None:
    assert replace(DEALER, exchange=exchange).choose(table(*[IDLE] * members)) == [IDLE] * chosen


def test_always_sharing_waits_for_a_second_worker_and_for_room_in_the_object_store() -> None:
    always = replace(DEALER, exchange="always")
    assert always.choose(table(IDLE, busy(10), exhausted=False)) == []
    assert always.choose(table(IDLE, IDLE, object_bytes=160 * MIB)) == []
    assert always.choose(table(IDLE, IDLE, group=replace(GROUP, object_bytes=300 * MIB))) == [IDLE]


def test_a_group_that_no_worker_can_hold_is_refused() -> None:
    with pytest.raises(MemoryBudgetError):
        DEALER.choose(table(IDLE, group=replace(GROUP, peak_bytes=101 * MIB)))
