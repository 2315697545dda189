"""Choose the engine that runs a plan."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from functools import partial

from paddle_reshard.clusters.inline import InlineEngine
from paddle_reshard.pipeline.core.choices import DEVICES, EXCHANGES
from paddle_reshard.pipeline.core.errors import UsageError
from paddle_reshard.pipeline.core.events import Observer
from paddle_reshard.pipeline.layouts.reading import IndexFiles
from paddle_reshard.pipeline.planning.work import Works
from paddle_reshard.storage.store import ReadRange, WritePart
from paddle_reshard.tasks.group import GroupReport
from paddle_reshard.tasks.index import index_here

Engine = Callable[[Works, ReadRange, WritePart], Generator[Sequence[GroupReport], None, None]]
"""Runs groups and yields the reports of some of them as they are done."""


def choose_engine(
    cluster: str,
    workers: int | None,
    memory_bytes: int,
    exchange: str = EXCHANGES[0],
    device: str = DEVICES[0],
    label_selector: Sequence[str] = (),
) -> Engine:
    """The engine that ``cluster`` names: ``inline``, ``ray`` or ``ray:ADDRESS``. Ray is imported only if used.

    Raises
    ------
    UsageError
        If there is no such cluster, or it does not support these options.
    """
    name, _, address = cluster.partition(":")
    if name == "ray":
        from paddle_reshard.clusters.ray.engine import RayEngine
        from paddle_reshard.clusters.ray.labels import LabelSelector

        selector = LabelSelector.parse(label_selector)
        return RayEngine(address or None, workers, memory_bytes, exchange, device, selector)
    if cluster != "inline":
        raise UsageError(f"unknown cluster {cluster!r}; known: inline, ray and ray:ADDRESS")
    if device != DEVICES[0] or exchange != EXCHANGES[0]:
        raise UsageError(f"device {device!r} and exchange {exchange!r} require --cluster ray")
    if label_selector:
        raise UsageError("--label-selector chooses nodes of a cluster; give --cluster ray:ADDRESS too")
    return InlineEngine(memory_bytes, workers)


def observed(engine: Engine, observe: Observer) -> Engine:
    """The same engine; ``observe`` is called with what each of its workers runs."""
    if isinstance(engine, InlineEngine):
        return replace(engine, observe=observe)
    from paddle_reshard.clusters.ray.engine import RayEngine

    return replace(engine, observe=observe) if isinstance(engine, RayEngine) else engine


def choose_indexing(engine: Engine, observe: Observer) -> IndexFiles:
    """The function that indexes files for an engine; ``observe`` receives the number of files read."""
    here = partial(index_here, observe=observe)
    if isinstance(engine, InlineEngine):
        return here
    from paddle_reshard.clusters.ray.engine import RayEngine
    from paddle_reshard.clusters.ray.index import RayIndexing

    return RayIndexing(engine, observe) if isinstance(engine, RayEngine) else here
