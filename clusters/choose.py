"""Choose the engine that runs a plan."""

from __future__ import annotations

import os

from paddle_reshard.clusters import private_ray
from paddle_reshard.clusters.engine import Engine
from paddle_reshard.clusters.inline import InlineEngine
from paddle_reshard.pipeline.core.choices import DEVICES
from paddle_reshard.pipeline.core.errors import UsageError


def choose_engine(cluster: str, workers: int | None, memory_bytes: int, device: str = DEVICES[0]) -> Engine:
    """The engine that ``cluster`` names: ``inline``, ``ray`` or ``ray:ADDRESS``. Ray is imported only if used.

    Raises
    ------
    UsageError
        If there is no such cluster, or it does not support these options.
    """
    name, _, address = cluster.partition(":")
    if name == "ray":
        if not (address or os.environ.get("RAY_ADDRESS")):
            private_ray.prepare()  # before Ray is imported
        from paddle_reshard.clusters.ray.engine import RayEngine

        return RayEngine(address or None, workers, memory_bytes, device=device)
    if cluster != "inline":
        raise UsageError(f"unknown cluster {cluster!r}; known: inline, ray and ray:ADDRESS")
    if device != DEVICES[0]:
        raise UsageError(f"device {device!r} requires --cluster ray")
    return InlineEngine(memory_bytes, workers)
