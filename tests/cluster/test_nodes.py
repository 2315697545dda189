"""Nodes that come and go while a conversion runs, as with autoscaling and spot machines."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from ray._raylet import GcsClient
from ray.autoscaler.v2.sdk import get_cluster_status
from ray.cluster_utils import Cluster
from ray.core.generated.autoscaler_pb2 import DRAIN_NODE_REASON_PREEMPTION

from paddle_reshard.clusters.engine import Engine
from paddle_reshard.clusters.ray import calls
from paddle_reshard.clusters.ray.backlog import ATTEMPTS
from paddle_reshard.clusters.ray.engine import RayEngine
from paddle_reshard.pipeline.planning.work import RemainingGroups
from tests.cluster.conftest import OBJECT_STORE_BYTES, Conversion
from tests.cluster.faults import Awaiting, Watched
from tests.cluster.test_own_ray import await_true

pytestmark = [pytest.mark.usefixtures("cluster"), pytest.mark.cluster]
BUDGET_BYTES = 256 << 20
SPOT_BYTES = 1 << 40
"""Memory that no node of the cluster has, only those that say so."""


def spot_node(cluster: Cluster, cpus: int = 1) -> Any:
    """Add a node for workers with ``SPOT_BYTES``."""
    return cluster.add_node(num_cpus=cpus, memory=cpus * SPOT_BYTES, object_store_memory=OBJECT_STORE_BYTES)


def demanded(cluster: Cluster) -> dict[tuple[tuple[str, float], ...], int]:
    """The requests that no node satisfies, as an autoscaler is shown them, and how often each is there."""
    demands = get_cluster_status(cluster.address).resource_demands.ray_task_actor_demand
    return {
        tuple(sorted(request.bundle.items())): request.count
        for demand in demands
        for request in demand.bundles_by_count
    }


def watching(notes: Path, engine: RayEngine, event: Callable[[int], None]) -> Engine:
    """An engine that calls ``event`` with the number of processes that have read, after each report."""

    def run(works: RemainingGroups, source: object, target: object) -> Iterator[object]:
        notes.mkdir()
        for report in engine.run(works, Awaiting(source, notes), target):
            event(len(list(notes.iterdir())))
            yield report

    return run


def test_workers_on_nodes_that_come_late_are_used(
    cluster: Cluster, conversion: Conversion, tmp_path: Path
) -> None:
    engine = RayEngine(workers=3, memory_bytes=SPOT_BYTES, exchange="never")
    nodes = [spot_node(cluster)]
    seen: list[object] = []

    def event(readers: int) -> None:
        if len(nodes) == 1:
            await_true(lambda: bool(demanded(cluster)))  # Ray tells its autoscaler every few seconds
            seen.append(demanded(cluster))
            nodes.append(spot_node(cluster, cpus=2))
            (tmp_path / "expected").write_text("3")
        seen.append(readers)

    try:
        report = conversion.run(watching(tmp_path / "notes", engine, event))
    finally:
        for node in nodes:
            cluster.remove_node(node)
    assert seen[0] == {(("CPU", 1.0), ("memory", float(SPOT_BYTES))): 2}
    assert seen[1] == 1
    assert seen[-1] == 3
    assert [worker.number for worker in report.workers] == [0, 1, 2]


def test_a_group_whose_node_is_preempted_waits_for_the_next_one(
    cluster: Cluster,
    conversion: Conversion,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The only worker is lost with its node as often as a group may be, each time while it reads the same group."""
    monkeypatch.setattr(calls, "PATIENCE_SECONDS", 1.0)
    engine = RayEngine(workers=1, memory_bytes=SPOT_BYTES, exchange="never")
    nodes, notes, wait = [spot_node(cluster)], tmp_path / "notes", calls.Calls.wait
    lost = 0

    def losing(self: calls.Calls, hurried: bool = False) -> list[Any]:
        nonlocal lost
        is_running = any(running for _, running in self.pending.values())
        if is_running and lost < min(len(nodes), ATTEMPTS - 1):
            await_true(lambda: notes.exists() and len(list(notes.iterdir())) > lost)
            lost += 1
            preempt(cluster, nodes[-1])
            caplog.clear()
        elif lost == len(nodes) and "still waiting for workers" in caplog.text:
            nodes.append(spot_node(cluster))
        return wait(self, hurried)

    monkeypatch.setattr(calls.Calls, "wait", losing)
    try:
        conversion.run(
            lambda works, source, target: engine.run(works, Watched(source, notes, seconds=0.2), target)
        )
    finally:
        cluster.remove_node(nodes[-1])
    assert len(nodes) == len(list(notes.iterdir())) == lost + 1 == ATTEMPTS


def preempt(cluster: Cluster, node: Any) -> None:
    """Announce that a node goes, as clouds do, and take it away."""
    accepted, reason = GcsClient(cluster.address).drain_node(
        node.node_id, DRAIN_NODE_REASON_PREEMPTION, "the spot price", 0
    )
    assert accepted, reason
    cluster.remove_node(node, allow_graceful=False)
