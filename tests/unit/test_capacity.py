"""How many workers start on Ray, for what nodes have."""

from __future__ import annotations

import pytest

from paddle_reshard.clusters.ray.capacity import Demand, most_object_bytes, worker_count
from paddle_reshard.clusters.ray.worker import ReshardWorker
from paddle_reshard.pipeline.core.errors import ReshardError, UnsupportedError, UsageError

GIB = 1 << 30
STORED = [{"CPU": 4.0, "memory": 3.0 * GIB, "object_store_memory": 500.0}, {"CPU": 1.0, "memory": 9.0 * GIB}]
SMALL, LARGE, GPU = Demand(GIB), Demand(16 * GIB), Demand(GIB, gpu=True)


@pytest.mark.parametrize(
    ("requested", "demand", "grows", "count"),
    [
        (None, SMALL, True, 4),  # three on the first, whose memory is full, and one on the second
        (2, SMALL, True, 2),
        (9, SMALL, True, 9),  # nodes may come
        (9, SMALL, False, 4),  # none comes
        (9, LARGE, True, 9),
    ],
)
def test_as_many_workers_start_as_there_is_room_for_or_may_be(
    requested: int | None, demand: Demand, grows: bool, count: int
) -> None:
    assert worker_count(requested, demand, STORED, grows) == count


@pytest.mark.parametrize(
    ("requested", "demand", "grows", "kind", "message"),
    [
        (None, LARGE, True, UsageError, "16384MiB for a worker, at most 9216MiB of memory; use less --memory, or"),
        (2, LARGE, False, UsageError, "at most 9216MiB of memory; use less --memory$"),
        (2, GPU, True, UnsupportedError, "room for 0 workers with 1 CPU, 1024MiB, 1 GPU each, but 2 are requested"),
    ],
)  # fmt: skip
def test_no_room_is_refused_with_numbers(
    requested: int | None, demand: Demand, grows: bool, kind: type[ReshardError], message: str
) -> None:
    with pytest.raises(kind, match=message):
        worker_count(requested, demand, STORED, grows)


def test_objects_fit_half_of_the_smallest_store() -> None:
    assert most_object_bytes(STORED[:1]) == 250
    assert most_object_bytes(STORED) == most_object_bytes([]) == 0


def test_a_worker_of_another_version_refuses() -> None:
    refused = ReshardWorker(None, None, None, 0, GIB, {}, "0.0.9").prepare()
    assert isinstance(refused, UsageError)
    assert "planned by version 0.0.9; install the same version on all nodes" in str(refused)
