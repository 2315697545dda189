"""The actors of workers on a Ray cluster: how they start and end."""

from __future__ import annotations

import contextlib
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from paddle_reshard.clusters.ray.capacity import Demand, Resources
from paddle_reshard.clusters.ray.environment import worker_variables
from paddle_reshard.clusters.ray.worker import ReshardWorker
from paddle_reshard.pipeline.core.version import __version__
from paddle_reshard.pipeline.planning.work import GROUPS_AT_A_TIME
from paddle_reshard.storage.store import ReadRange, WritePart

SIDE_BY_SIDE = "side_by_side"
"""Calls of a worker that may run concurrently. A worker with a GPU runs one group at a time."""


def live_nodes() -> list[Resources]:
    """What every node of the cluster has."""
    every: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    return [node["Resources"] for node in every if node["Alive"]]


class Actors:
    """Starts the actors of workers, and ends them. Ray itself restarts and retries nothing."""

    def __init__(
        self,
        source: ReadRange,
        target: WritePart | None,
        demand: Demand,
        paddle_device: str,
        count: int,
    ) -> None:
        """``count`` workers are reserved together if they need GPUs; others start as soon as there is room."""
        as_actor: Any = ray.remote
        self.actor_class: Any = as_actor(concurrency_groups={SIDE_BY_SIDE: GROUPS_AT_A_TIME})(ReshardWorker)
        self.source, self.target, self.demand = source, target, demand
        self.device = paddle_device if demand.gpu else None
        self.bundles: PlacementGroup | None = None
        if demand.gpu:
            self.bundles = placement_group([demand.resources] * count, strategy="PACK")
        self.living: dict[int, Any] = {}
        """Number of the worker → its actor."""

    def close(self) -> None:
        """End all actors."""
        with contextlib.suppress(RayError):
            for number in tuple(self.living):
                self.end(number)
            if self.bundles is not None:
                remove_placement_group(self.bundles)

    def start(self, number: int) -> Any:
        """Start the actor of a worker. Ray creates it when a node has room."""
        strategy: Any = "SPREAD"
        if self.bundles is not None:
            strategy = PlacementGroupSchedulingStrategy(self.bundles, placement_group_bundle_index=number)
        options = self.actor_class.options(
            num_cpus=1,
            num_gpus=int(self.demand.gpu),
            memory=self.demand.memory_bytes,
            max_restarts=0,
            max_task_retries=0,
            scheduling_strategy=strategy,
        )
        actor = options.remote(
            self.source,
            self.target,
            self.device,
            number,
            self.demand.memory_bytes,
            worker_variables(),
            __version__,
        )
        self.living[number] = actor
        return actor

    def end(self, number: int) -> None:
        """Kill the actor of a worker."""
        ray.kill(self.living.pop(number))
