"""Run a plan on Ray: the same groups as inline, in any order, on all available workers.

The driver hands out groups to actors (``ReshardWorker``) in *batches*, to each as many at a time as fit into its
memory: some groups are read or written while others are moved. A call of an actor takes the driver about a millisecond,
so a batch grows until it keeps its worker busy for half a second, or for as long as the driver needs to serve all.
Towards the end batches shrink, so that all workers end together, and the last groups are dealt one by one, or shared
(:mod:`paddle_reshard.clusters.ray.dealing`).

Ray restarts nothing by itself. Groups are idempotent, so the driver hands out a group again if its worker was lost, up
to ``ATTEMPTS`` times, and replaces the worker. A group that failed, and each group of a batch that was lost with its
worker, is retried alone on a worker, so that a group that kills its workers takes other groups with it only once. A
``ReshardError`` in any worker stops everything and arrives unchanged.

The bands of a group on a single worker never use Ray's object store. A group that is *exchanged* is shared by several
workers (:mod:`paddle_reshard.clusters.ray.exchange`): its bands become ``ObjectRef``\\ s, which the makers of its parts
receive as resolved arguments, without a copy on the node that loaded them. The bands of all exchanged groups are
limited to half of the smallest node's object store: even if one node held all of them, Ray would not spill.

::

    RayEngine ─► Driver ─┬─ Backlog   groups that wait
                         ├─ Dealer    which workers take the next one
                         ├─ Crew      workers: starting, lost ─► Actors
                         └─ Calls     what was asked of them, and their answers

The source and the writer are pickled to the workers and may hold credentials: they are passed as arguments, and never
printed or logged.
"""

from __future__ import annotations

import os
from contextlib import closing
from dataclasses import dataclass, field, replace

from paddle_reshard.clusters.engine import Batches, Engine
from paddle_reshard.clusters.ray.actors import Actors, live_nodes
from paddle_reshard.clusters.ray.backlog import Backlog
from paddle_reshard.clusters.ray.calls import Calls
from paddle_reshard.clusters.ray.capacity import Demand, worker_count
from paddle_reshard.clusters.ray.crew import Crew
from paddle_reshard.clusters.ray.dealing import Dealer
from paddle_reshard.clusters.ray.driver import Driver
from paddle_reshard.clusters.ray.index import RayIndexing
from paddle_reshard.clusters.ray.join import joined_ray
from paddle_reshard.pipeline.checkpoint.reading import IndexFiles
from paddle_reshard.pipeline.core.choices import DEVICES, EXCHANGES, parse_choice
from paddle_reshard.pipeline.core.errors import UsageError
from paddle_reshard.pipeline.core.events import Observer, Waiting, ignore_events
from paddle_reshard.pipeline.planning.work import GROUPS_AT_A_TIME, RemainingGroups
from paddle_reshard.storage.store import ReadRange, WritePart


@dataclass(frozen=True)
class RayEngine(Engine):
    """Runs groups on the workers of a Ray cluster."""

    address: str | None = None
    """``host:port``, or ``auto`` for the cluster on this machine. ``None``: the one in ``RAY_ADDRESS``, or a private
    Ray that ends with the run. A process that has already joined a cluster stays in it."""
    workers: int | None = None
    """Number of workers. Default: as many as the cluster has room for. Never more than can be busy."""
    memory_bytes: int = 1 << 30
    """Memory that each worker reserves; no group's peak may exceed it."""
    exchange: str = "auto"
    """``auto``: a large group is shared if fewer groups wait than workers are idle; ``always``; ``never``."""
    device: str = "cpu"
    """``cpu``: NumPy moves the values. ``gpu``: each worker has its own GPU, and Paddle moves them."""
    paddle_device: str = "gpu"
    """Paddle's name for the device of a worker with a GPU. Its CPU device, ``cpu``, computes the same bits."""
    observe: Observer = field(default=ignore_events, compare=False, repr=False)
    """Called with what each worker runs, in the thread that takes the reports."""

    def __post_init__(self) -> None:
        if self.workers is not None and self.workers < 1:
            raise UsageError(f"{self.workers} workers: at least 1 is needed")
        parse_choice(self.exchange, EXCHANGES, "exchange")
        parse_choice(self.device, DEVICES, "device")
        if self.address is not None and "://" in self.address:
            raise UsageError(
                f"Ray at {self.address!r}: give host:port of the head node, or submit a job to that cluster"
            )

    def run(self, remaining: RemainingGroups, source: ReadRange, target: WritePart | None) -> Batches:
        """Run every group, and report batches as they are done. Closing the iterator ends all workers.

        Without a ``target``, groups are only compared.
        """
        self.observe(Waiting("Ray and its workers"))
        if not len(remaining):
            return
        with joined_ray(self.joins, self.workers) as grows:
            backlog = Backlog(remaining)
            backlog.check_memory(self.memory_bytes)
            room = worker_count(self.workers, self.demand, live_nodes(), grows)
            count = self._most_busy(remaining, room)
            calls = Calls(1 if self.demand.gpu else GROUPS_AT_A_TIME)
            dealer = Dealer(self.memory_bytes, self.exchange, calls.batches_at_a_time)
            with closing(Actors(source, target, self.demand, self.paddle_device, count)) as actors:
                crew = Crew(actors, calls, count)
                yield from Driver(backlog, crew, calls, dealer, self.observe).reports()

    def compare(self, remaining: RemainingGroups, source: ReadRange) -> Batches:
        """Run only the comparisons of every group."""
        return replace(self, exchange="never").run(remaining, source, None)

    def observed(self, observe: Observer) -> RayEngine:
        """The same engine; ``observe`` is called with what it waits for, and with what each of its workers runs."""
        return replace(self, observe=observe)

    def indexing(self, observe: Observer = ignore_events) -> IndexFiles:
        """Indexes files on the cluster, if there are many."""
        return RayIndexing(self.joins, self.workers, observe)

    @property
    def joins(self) -> str | None:
        """The existing cluster to join; ``None`` if there is none."""
        return self.address or os.environ.get("RAY_ADDRESS") or None

    @property
    def demand(self) -> Demand:
        """What Ray reserves for each worker."""
        return Demand(self.memory_bytes, self.device == "gpu")

    def _most_busy(self, remaining: RemainingGroups, count: int) -> int:
        """How many of ``count`` workers may ever be busy, if each band of a shared group has its own."""
        if len(remaining) > count:
            return count
        most = (1 if self.exchange == "never" else len(work.bands) for work in remaining)
        return min(count, sum(max(1, bands) for bands in most))
