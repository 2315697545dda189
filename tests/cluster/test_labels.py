"""Workers run only on nodes with the labels that are asked for, as Ray and its autoscalers understand them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster

import paddle_reshard
from paddle_reshard.clusters.ray import calls
from paddle_reshard.clusters.ray.engine import RayEngine
from paddle_reshard.clusters.ray.labels import LabelSelector
from paddle_reshard.pipeline.core.errors import UsageError
from paddle_reshard.pipeline.core.events import Event, Waiting
from tests.cluster.conftest import CASE, OBJECT_STORE_BYTES, ZONE, Conversion
from tests.cluster.faults import NodesNoted
from tests.conftest import case_directory

pytestmark = pytest.mark.usefixtures("cluster")
SOURCE = case_directory(CASE) / "checkpoint-3"


def engine_for(*conditions: str, **settings: Any) -> RayEngine:
    selector = LabelSelector.parse(conditions)
    return RayEngine(
        **{"memory_bytes": 256 << 20, "exchange": "never", "label_selector": selector, **settings}
    )


def nodes_that_read(conversion: Conversion, engine: RayEngine) -> list[str]:
    """Run a conversion. Returns the id of the node of each process that has read."""
    notes = conversion.folder / "notes"
    conversion.run(lambda works, source, target: engine.run(works, NodesNoted(source, notes), target))
    return [note.read_text() for note in notes.iterdir()]


def ids(labelled: bool) -> set[str]:
    """The nodes of the cluster with a zone, or those without."""
    return {node["NodeID"] for node in ray.nodes() if node["Alive"] and (ZONE in node["Labels"]) == labelled}


@pytest.mark.parametrize(
    ("condition", "labelled", "workers"),
    [
        ("=a", True, 1),
        pytest.param("=in(b,a)", True, 1, marks=pytest.mark.cluster),
        pytest.param("=!a", False, 2, marks=pytest.mark.cluster),
        pytest.param("=!in(a,b)", False, 2, marks=pytest.mark.cluster),
    ],
)
def test_as_many_workers_as_labelled_nodes_have_room_for_run_on_them(
    condition: str, labelled: bool, workers: int, conversion: Conversion
) -> None:
    events: list[Event] = []
    engine = engine_for(f"{ZONE}{condition}", observe=events.append)
    readers = nodes_that_read(conversion, engine)
    assert len(readers) == workers
    assert set(readers) == ids(labelled)
    _, waiting = (event.what for event in events if isinstance(event, Waiting))
    assert waiting.endswith(f"on 1 of 2 nodes, those with {ZONE}{condition}")


@pytest.mark.parametrize(
    "run",
    [
        partial(paddle_reshard.convert, SOURCE, "made", to="tp=1"),
        partial(paddle_reshard.verify, SOURCE, SOURCE),
        partial(paddle_reshard.fingerprint, SOURCE),
    ],
)
def test_no_node_with_the_labels_is_refused_with_those_that_there_are(
    run: Callable[..., object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError) as refused:
        run(cluster="ray", label_selector=[f"{ZONE}=b", "disk=nvme"])
    assert str(refused.value).startswith(
        f"no node of the Ray cluster has {ZONE}=b and disk=nvme; labels of its nodes: "
    )
    assert f"{ZONE}=a (1 node)" in str(refused.value)
    assert "none (1 node)" in str(refused.value)


@pytest.mark.cluster
def test_a_node_with_the_label_that_comes_late_is_used(
    cluster: Cluster,
    conversion: Conversion,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(calls, "PATIENCE_SECONDS", 1.0)
    nodes, wait = [], calls.Calls.wait

    def add_late(self: calls.Calls, hurried: bool = False) -> list[Any]:
        if not nodes and "still waiting for workers" in caplog.text:
            late = {"num_cpus": 1, "object_store_memory": OBJECT_STORE_BYTES, "labels": {ZONE: "late"}}
            nodes.append(cluster.add_node(**late))
        return wait(self, hurried)

    monkeypatch.setattr(calls.Calls, "wait", add_late)
    try:
        readers = nodes_that_read(conversion, engine_for(f"{ZONE}=late", workers=1))
    finally:
        for node in nodes:
            cluster.remove_node(node)
    assert f"no node of the Ray cluster has {ZONE}=late; labels of its nodes: " in caplog.text
    assert readers == [node.node_id for node in nodes]


@pytest.mark.cluster
def test_workers_with_gpus_run_on_labelled_nodes(cluster: Cluster, conversion: Conversion) -> None:
    node = cluster.add_node(
        num_cpus=2, num_gpus=2, object_store_memory=OBJECT_STORE_BYTES, labels={ZONE: "gpus"}
    )
    try:
        engine = engine_for(f"{ZONE}=gpus", workers=2, device="gpu", paddle_device="cpu")
        assert nodes_that_read(conversion, engine) == [node.node_id] * 2
    finally:
        cluster.remove_node(node)
