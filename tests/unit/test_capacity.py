"""How many workers start on Ray, for what nodes have."""

from __future__ import annotations

import pytest

from paddle_reshard.clusters.ray.capacity import Demand, Node, most_object_bytes, worker_count
from paddle_reshard.clusters.ray.labels import LabelSelector, labels_in_words
from paddle_reshard.clusters.ray.worker import ReshardWorker
from paddle_reshard.pipeline.core.errors import ReshardError, UnsupportedError, UsageError

GIB = 1 << 30
STORED = [{"CPU": 4.0, "memory": 3.0 * GIB, "object_store_memory": 500.0}, {"CPU": 1.0, "memory": 9.0 * GIB}]
NODES = [Node(STORED[0], {"zone": "a", "ray.io/node-id": "1"}), Node(STORED[1], {"ray.io/node-id": "2"})]
SMALL, LARGE, GPU = Demand(GIB), Demand(16 * GIB), Demand(GIB, gpu=True)


def labelled(*conditions: str, gpu: bool = False) -> Demand:
    return Demand(GIB, gpu, LabelSelector.parse(conditions))


@pytest.mark.parametrize(
    ("requested", "demand", "grows", "count"),
    [
        (None, SMALL, True, 4),  # three on the first, whose memory is full, and one on the second
        (2, SMALL, True, 2),
        (9, SMALL, True, 9),  # nodes may come
        (9, SMALL, False, 4),  # none comes
        (9, LARGE, True, 9),
        (None, labelled("zone=a"), True, 3),
        (None, labelled("zone=!a"), True, 1),  # also a node without a zone
        (None, labelled("zone=!in(b,c)"), False, 4),
        (9, labelled("zone=in(b,a)"), False, 3),
        (2, labelled("zone=b"), True, 2),  # such nodes may come
    ],
)
def test_as_many_workers_start_as_there_is_room_for_or_may_be(
    requested: int | None, demand: Demand, grows: bool, count: int
) -> None:
    assert worker_count(requested, demand, NODES, grows) == count


@pytest.mark.parametrize(
    ("requested", "demand", "grows", "kind", "message"),
    [
        (
            None,
            LARGE,
            True,
            UsageError,
            "16384MiB for a worker, at most 9216MiB of memory; use less --memory, or",
        ),
        (2, LARGE, False, UsageError, "at most 9216MiB of memory; use less --memory$"),
        (
            2,
            GPU,
            True,
            UnsupportedError,
            "room for 0 workers with 1 CPU, 1024MiB, 1 GPU each, but 2 are requested",
        ),
        (
            2,
            labelled("zone=a", gpu=True),
            True,
            UnsupportedError,
            "1 GPU each on nodes with zone=a, but 2 are requested",
        ),
        (
            None,
            labelled("zone=b"),
            True,
            UsageError,
            r"has zone=b; labels of its nodes: zone=a \(1 node\); none \(1 node\); give other labels, or the number",
        ),
        (
            2,
            labelled("zone=a", "disk=nvme"),
            False,
            UsageError,
            "has zone=a and disk=nvme; .*--cluster ray:ADDRESS",
        ),
    ],
)
def test_no_room_is_refused_with_numbers(
    requested: int | None, demand: Demand, grows: bool, kind: type[ReshardError], message: str
) -> None:
    with pytest.raises(kind, match=message):
        worker_count(requested, demand, NODES, grows)


def test_objects_fit_half_of_the_smallest_store() -> None:
    assert most_object_bytes(STORED[:1]) == 250
    assert most_object_bytes(STORED) == most_object_bytes([]) == 0
    assert most_object_bytes(labelled("zone=a").eligible(NODES)) == 250


@pytest.mark.parametrize(
    "condition",
    ["zone", "zone=", "=a", "zone=a b", "zone=in()", "zone=in(a, b)", "zone=!!a", "zone=-a", "z=" + "a" * 64],
)
def test_a_condition_that_ray_would_misread_is_refused(condition: str) -> None:
    with pytest.raises(UsageError, match="give KEY=VALUE, as in ray"):
        LabelSelector.parse([condition])


def test_two_conditions_for_a_label_are_refused() -> None:
    with pytest.raises(UsageError, match=r"zone is given twice; use in\(A,B\)"):
        LabelSelector.parse(["zone=a", "zone=b"])


def test_a_large_cluster_is_described_by_its_most_frequent_labels() -> None:
    described = labels_in_words({"rack": str(number // 2)} for number in range(14))
    assert described.startswith("rack=0 (2 nodes); ")
    assert described.endswith("; …")


def test_a_worker_of_another_version_refuses() -> None:
    refused = ReshardWorker(None, None, None, 0, GIB, {}, "0.0.9").prepare()
    assert isinstance(refused, UsageError)
    assert "planned by version 0.0.9; install the same version on all nodes" in str(refused)
