"""Who takes the next group on Ray, without a cluster: what is known of groups and workers decides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import pytest

from paddle_reshard.clusters.ray.backlog import Attempt
from paddle_reshard.clusters.ray.dealing import Dealer, Shareable, Table
from paddle_reshard.clusters.ray.state import Running, Worker
from paddle_reshard.pipeline.planning.plan import FOOTPRINT_BYTES

MIB = 1 << 20
DEALER = Dealer(FOOTPRINT_BYTES + 100 * MIB, "auto", batches_at_a_time=2)
IDLE, STARTING = Worker(0, None, ready=True, pinged=False), Worker(0, None)
NEXT = Attempt(range(1), 40 * MIB)
AGAIN = replace(NEXT, number=2)
GROUP = Shareable(
    bands=6, parts=3, object_bytes=50 * MIB, used_bytes=0, most_bytes=200 * MIB, waiting_bytes=0, patient=True
)
FULL = {"used_bytes": 160 * MIB}
MANY = 100


def busy(*mib: int, alone: bool = False) -> Worker:
    running = [Running(Attempt(range(1), peak * MIB, 1 + alone)) for peak in mib]
    return replace(IDLE, running=running)


@dataclass(frozen=True)
class Dealt:
    """A group that is dealt while ``others`` of its size wait behind it."""

    workers: Sequence[Worker]
    others: int
    attempt: Attempt
    known: Mapping[str, object]

    def chosen(self, dealer: Dealer = DEALER) -> list[Worker]:
        waiting = 1 + self.others
        group = replace(GROUP, waiting_bytes=waiting * self.attempt.peak_bytes, **self.known)
        return dealer.choose(Table(self.attempt, waiting, self.workers), lambda: group)


def dealt(*workers: Worker, others: int = 0, attempt: Attempt = NEXT, **known: object) -> Dealt:
    return Dealt(workers, others, attempt, known)


@pytest.mark.parametrize(
    ("case", "chosen"),
    [
        (dealt(IDLE, busy(1), IDLE, others=MANY), [0]),  # many are left: each takes a group of its own
        (dealt(IDLE, IDLE, IDLE), [0, 1, 2]),  # the last one is shared by all
        (dealt(IDLE, IDLE, IDLE, others=1), [0]),  # three for two: one each
        (dealt(*[IDLE] * 4, others=1), [0, 1]),  # four for two: two each
        (dealt(*[IDLE] * 9), [0, 1, 2, 3, 4, 5]),  # no more than it has bands
        (dealt(IDLE, IDLE, STARTING), []),  # a third could share it soon
        (dealt(IDLE, IDLE, STARTING, others=1), []),
        (dealt(IDLE, busy(1), STARTING, others=1), [0]),  # each takes a group of its own
        (dealt(IDLE, IDLE, STARTING, patient=False), [0, 1]),
        (dealt(IDLE, IDLE, attempt=replace(NEXT, peak_bytes=20 * MIB)), [0]),  # too small
        (dealt(IDLE, IDLE, bands=1), [0]),
        (dealt(IDLE, IDLE, attempt=AGAIN), [0]),
        (dealt(IDLE, IDLE, **FULL), [0]),  # its bands do not fit beside others
        (dealt(STARTING, STARTING), []),
    ],
)
def test_idle_workers(case: Dealt, chosen: list[int]) -> None:
    assert case.chosen() == [case.workers[number] for number in chosen]


@pytest.mark.parametrize(
    ("case", "chosen"),
    [
        (dealt(busy(30, 10), busy(50), others=MANY), [1]),  # two at a time at most
        (dealt(busy(30), busy(70), others=MANY), [0]),
        (dealt(busy(70), busy(70), others=MANY), []),  # no room for 40 more
        (dealt(busy(30), busy(30)), []),  # one will be idle soon
        (dealt(busy(30), busy(30), others=2), [0]),
        (dealt(busy(30, alone=True), busy(50), others=MANY), [1]),
        (dealt(busy(30), others=MANY, attempt=AGAIN), []),  # it has to be alone
        (dealt(replace(busy(30), pinged=True), others=MANY), []),
    ],
)
def test_busy_workers(case: Dealt, chosen: list[int]) -> None:
    assert case.chosen() == [case.workers[number] for number in chosen]
    assert case.chosen(replace(DEALER, batches_at_a_time=1)) == []
    assert case.chosen(replace(DEALER, exchange="always")) == []


@pytest.mark.parametrize(
    ("exchange", "members", "chosen"), [("never", 3, 1), ("always", 3, 3), ("always", 1, 1), ("auto", 1, 1)]
)
def test_what_is_asked_for(exchange: str, members: int, chosen: int) -> None:
    assert dealt(*[IDLE] * members).chosen(replace(DEALER, exchange=exchange)) == [IDLE] * chosen


def test_always_sharing_waits_for_a_second_worker_and_for_room_in_the_object_store() -> None:
    always = replace(DEALER, exchange="always")
    assert dealt(IDLE, busy(10), others=MANY).chosen(always) == []
    assert dealt(IDLE, IDLE, **FULL).chosen(always) == []
    assert dealt(IDLE, IDLE, object_bytes=300 * MIB).chosen(always) == [IDLE]
