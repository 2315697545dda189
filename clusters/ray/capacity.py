"""What a worker reserves, and how many there is room for. Pure, and independent of Ray."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from paddle_reshard.pipeline.core.errors import UnsupportedError, UsageError

log = logging.getLogger(__name__)

Resources = Mapping[str, float]
"""Name → amount, as Ray counts them."""


@dataclass(frozen=True, slots=True)
class Demand:
    """What Ray reserves for each worker."""

    memory_bytes: int
    gpu: bool = False

    @property
    def resources(self) -> dict[str, float]:
        """Name → amount."""
        return {"CPU": 1.0, "memory": float(self.memory_bytes), **({"GPU": 1.0} if self.gpu else {})}

    def room(self, nodes: Iterable[Resources]) -> int:
        """How many workers fit on these nodes of an idle cluster.

        >>> Demand(10**9).room([{"CPU": 8, "memory": 3e9}, {"CPU": 1, "memory": 9e9}])
        4
        """
        needed = self.resources.items()
        return sum(min(int(node.get(name, 0) // amount) for name, amount in needed) for node in nodes)

    def __str__(self) -> str:
        return f"1 CPU, {self.memory_bytes / (1 << 20):.0f}MiB{', 1 GPU' if self.gpu else ''}"

    def waits(self, requested: int | None, grows: bool) -> bool:
        """Whether ``requested`` workers may wait for nodes to join a cluster that ``grows``."""
        return grows and requested is not None and not self.gpu


def most_object_bytes(nodes: Iterable[Resources]) -> int:
    """Limit for bytes in the object store, so that no node spills even if it holds them all."""
    return min((int(node.get("object_store_memory", 0)) for node in nodes), default=0) // 2


def worker_count(requested: int | None, demand: Demand, nodes: Sequence[Resources], grows: bool) -> int:
    """How many workers to start; ``requested`` is ``None`` for as many as there is room for.

    ``grows``: whether nodes may still join the cluster.

    Raises
    ------
    UsageError
        If there is no room for a worker.
    UnsupportedError
        If there are not enough GPUs.
    """
    room = demand.room(nodes)
    if demand.gpu and room < (requested or 1):
        raise UnsupportedError(
            f"device gpu: the Ray cluster has room for {room} workers with {demand} each, but "
            f"{requested or 1} are requested"
        )
    if not room and not demand.waits(requested, grows):
        most_bytes = max((int(node.get("memory", 0)) for node in nodes), default=0)
        wait = ", or give the number of --workers that the cluster will scale up to" if grows else ""
        raise UsageError(
            f"no node of the Ray cluster has {demand} for a worker, at most {most_bytes >> 20}MiB of "
            f"memory; use less --memory{wait}"
        )
    count = requested or room
    if count > room:
        log.warning("%d workers requested, the Ray cluster has room for %d now", count, room)
    return count if grows else min(count, room)
