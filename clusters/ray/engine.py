"""Run a plan on Ray: the same groups as inline, in any order, on all available workers.

The driver hands out groups to actors (``ReshardWorker``), to each as many at a time as fit into its memory: some are
read or written while others are moved, and groups are created only as fast as they run. Ray restarts nothing by itself.
Groups are idempotent, so the driver hands out a group again if its worker was lost, up to ``ATTEMPTS`` times, and
replaces the worker. A group that failed is retried alone on a worker, so that a group that kills its workers takes
other groups with it only once. A ``ReshardError`` in any worker stops everything and arrives unchanged.

A group on a single worker never uses Ray's object store. A group that is *exchanged* is shared by several workers
(:mod:`paddle_reshard.clusters.ray.exchange`): its bands become ``ObjectRef``\\ s, which the makers of its parts receive
as resolved arguments, without a copy on the node that loaded them. The bands of all exchanged groups are limited to
half of the smallest node's object store: even if one node held all of them, Ray would not spill.

The source and the writer are pickled to the workers and may hold credentials: they are passed as arguments, and never
printed or logged.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from paddle_reshard.clusters.ray.dealing import Dealer, Member, Table, Waiting
from paddle_reshard.clusters.ray.environment import worker_variables
from paddle_reshard.clusters.ray.exchange import band_bytes, merge_reports, split_group
from paddle_reshard.clusters.ray.join import joined_ray, lost_node, one_line
from paddle_reshard.clusters.ray.worker import ReshardWorker
from paddle_reshard.pipeline.core.choices import DEVICES, EXCHANGES
from paddle_reshard.pipeline.core.errors import (
    ClusterError,
    GroupFailedError,
    ReshardError,
    UnsupportedError,
    UsageError,
)
from paddle_reshard.pipeline.planning.work import GROUPS_AT_A_TIME, GroupWork
from paddle_reshard.storage.store import ReadRange, WritePart
from paddle_reshard.tasks.run_group import GroupReport

log = logging.getLogger(__name__)

SIDE_BY_SIDE = "side_by_side"
"""Calls of a worker that may run concurrently. A worker with a GPU runs one group at a time."""
ATTEMPTS = 4
"""How often a group is tried, and how often a worker is started, before giving up."""
PATIENCE_SECONDS = 15.0
"""Time without events after which work is dealt to the workers that have started, or, if there are none, the log says
what each needs."""


@dataclass(frozen=True)
class RayEngine:
    """Settings of a run on Ray; called with groups, it is an ``Engine``."""

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

    def __post_init__(self) -> None:
        if self.workers is not None and self.workers < 1:
            raise UsageError(f"{self.workers} workers: at least 1 is needed")
        for value, known, what in (
            (self.exchange, EXCHANGES, "exchange"),
            (self.device, DEVICES, "device"),
        ):
            if value not in known:
                raise UsageError(f"unknown {what} {value!r}; known: {', '.join(known)}")
        if self.address is not None and "://" in self.address:
            raise UsageError(
                f"Ray at {self.address!r}: give host:port of the head node, or submit a job to that cluster"
            )

    def __call__(
        self, works: Iterable[GroupWork], source: ReadRange, target: WritePart
    ) -> Generator[GroupReport, None, None]:
        """Run every group, and report each as it is done. Closing the iterator ends all workers."""
        works = iter(works)
        for first in works:
            with joined_ray(self.joins, self.workers):
                run = _Run(self, chain([first], works), source, target)
                try:
                    yield from run.reports()
                finally:
                    run.end()

    @property
    def joins(self) -> str | None:
        """The existing cluster to join; ``None`` if there is none."""
        return self.address or os.environ.get("RAY_ADDRESS") or None

    @property
    def demand(self) -> dict[str, float]:
        """The resources that Ray reserves for each worker."""
        gpu = {"GPU": 1.0} if self.device == "gpu" else {}
        return {"CPU": 1.0, "memory": float(self.memory_bytes), **gpu}


@dataclass(eq=False)
class _Worker:
    """A worker, whose actor may be replaced."""

    number: int
    actor: Any
    starts: int = 1
    """Actors started since the last one that was ready."""
    ready: bool = False
    pinged: bool = True
    """Whether it has not answered the last ping yet."""
    attempts: list[_Attempt] = field(default_factory=list)
    """The groups in progress."""


@dataclass(eq=False)
class _Attempt:
    """An attempt at a group."""

    work: GroupWork
    number: int = 1
    shares: int = 0
    """Workers that have not finished their share yet."""
    object_bytes: int = 0
    """Bytes of its bands in the object store; 0 if it is not exchanged."""
    reports: list[GroupReport] = field(default_factory=list)
    failure: RayError | None = None

    @property
    def alone(self) -> bool:
        """Whether its workers run nothing else at the same time: it is exchanged, or it failed before."""
        return self.number > 1 or self.object_bytes > 0


class _Run:
    """One run of all groups. Everything happens on the driver's only thread, between two waits."""

    def __init__(
        self, engine: RayEngine, works: Iterator[GroupWork], source: ReadRange, target: WritePart
    ) -> None:
        self.engine, self.works, self.source, self.target = engine, works, source, target
        self.queue: deque[_Attempt] = deque()
        self.exhausted = False
        """Whether all remaining groups are in the queue."""
        self.running = 0
        self.patient = True
        """Whether to wait for workers that are still starting if they could share a group."""
        self.workers: list[_Worker] = []
        self.pending: dict[Any, tuple[_Worker, _Attempt | None]] = {}
        """Requests in progress by reference: a share of a group, or a ping (``None``)."""
        as_actor: Any = ray.remote
        self.actor_class: Any = as_actor(concurrency_groups={SIDE_BY_SIDE: GROUPS_AT_A_TIME})(ReshardWorker)
        self.bundles: PlacementGroup | None = None
        every: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
        nodes = [node["Resources"] for node in every if node["Alive"]]
        self.room = _room(nodes, engine.demand)
        smallest_store = min((int(n.get("object_store_memory", 0)) for n in nodes), default=0)
        self.dealer = Dealer(
            engine.memory_bytes, engine.exchange, engine.device == "cpu", smallest_store // 2
        )
        self.object_bytes = 0
        """Bytes of bands in the object store."""

    def reports(self) -> Iterator[GroupReport]:
        """Run all groups."""
        self._start_workers()
        while True:
            self._hand_out()
            if not self.queue and not self.running:
                return
            done, remaining = ray.wait(list(self.pending), timeout=PATIENCE_SECONDS)
            if not done:
                self.patient = False
                self._check_cluster()
                if not self.running:
                    log.warning("still waiting for workers; each needs %s", _readable(self.engine.demand))
            if remaining:  # take all answers that have arrived in the meantime
                done += ray.wait(remaining, num_returns=len(remaining), timeout=0)[0]
            for ref in done:
                yield from self._settle(ref)

    def _check_cluster(self) -> None:
        """Raise if this process has lost its cluster.

        Raises
        ------
        ClusterError
            If the node of this process is dead. Finished groups are kept, as after a kill.
        """
        if lost := lost_node():
            raise ClusterError(
                f"Ray was lost while groups were being moved ({lost}); finished work is kept: run the same command "
                "with --resume"
            )

    def end(self) -> None:
        """Kill all workers."""
        self.pending.clear()
        with contextlib.suppress(RayError):
            for worker in self.workers:
                ray.kill(worker.actor)
            if self.bundles is not None:
                remove_placement_group(self.bundles)

    # ------------------------------------------------------------------------------------------ workers

    def _start_workers(self) -> None:
        engine = self.engine
        count = _worker_count(engine, self.room)
        self._look_ahead(count)
        if self.exhausted:
            most = (1 if engine.exchange == "never" else len(a.work.bands) for a in self.queue)
            count = min(count, sum(max(1, bands) for bands in most))
        if engine.device == "gpu":
            self.bundles = placement_group([engine.demand] * count, strategy="PACK")
        for number in range(count):
            worker = _Worker(number, self._actor(number))
            self.workers.append(worker)
            self._ping(worker)

    def _actor(self, number: int) -> Any:
        """Start the actor of a worker. Ray restarts and retries nothing, see above."""
        engine = self.engine
        strategy: Any = "SPREAD"
        if self.bundles is not None:
            strategy = PlacementGroupSchedulingStrategy(self.bundles, placement_group_bundle_index=number)
        options = self.actor_class.options(
            num_cpus=1,
            num_gpus=0 if self.bundles is None else 1,
            memory=engine.memory_bytes,
            max_restarts=0,
            max_task_retries=0,
            scheduling_strategy=strategy,
        )
        device = None if self.bundles is None else engine.paddle_device
        variables = worker_variables()
        return options.remote(self.source, self.target, device, number, engine.memory_bytes, variables)

    def _ping(self, worker: _Worker) -> None:
        worker.pinged = True
        self.pending[worker.actor.prepare.remote()] = (worker, None)

    def _settle_ping(self, worker: _Worker, answer: Any) -> None:
        """A worker answered a ping, or failed to; then it is started again or given up."""
        if not isinstance(answer, RayError):
            if not worker.ready:
                log.info("worker %d: %s", worker.number, answer)
            worker.ready, worker.starts, worker.pinged = True, 1, False
            return
        cause = cause_of(answer)
        ray.kill(worker.actor)
        if not worker.ready and worker.starts >= ATTEMPTS:
            self.workers.remove(worker)
            if not self.workers:
                raise ClusterError(f"no worker could be started on the Ray cluster: {cause}") from answer
            log.warning("worker %d: given up after %d starts: %s", worker.number, worker.starts, cause)
            return
        log.warning("worker %d: lost, and started again: %s", worker.number, cause)
        worker.starts = 1 if worker.ready else worker.starts + 1
        worker.ready = False
        worker.actor = self._actor(worker.number)
        self._ping(worker)

    # ------------------------------------------------------------------------------------------- groups

    def _look_ahead(self, count: int) -> None:
        """Fill the queue with up to ``count`` groups."""
        while not self.exhausted and len(self.queue) < count:
            work = next(self.works, None)
            if work is None:
                self.exhausted = True
            else:
                self.queue.append(_Attempt(work))

    def _hand_out(self) -> None:
        """Hand waiting groups to workers while there are workers for them."""
        while True:
            idle = sum(not worker.pinged and not worker.attempts for worker in self.workers)
            self._look_ahead(1 + (idle or len(self.workers)))
            if not self.queue:
                return
            chosen = self.dealer.choose(self._table())
            if not chosen:
                return
            self._hand_to([self.workers[number] for number in chosen], self.queue.popleft())

    def _table(self) -> Table:
        attempt = self.queue[0]
        work = attempt.work
        members = (
            Member(
                worker.ready,
                not worker.pinged,
                tuple(running.work.peak_bytes for running in worker.attempts),
                any(running.alone for running in worker.attempts),
            )
            for worker in self.workers
        )
        return Table(
            Waiting(
                work.label,
                work.peak_bytes,
                len(work.bands),
                len(work.parts),
                band_bytes(work),
                attempt.number,
            ),
            tuple(waiting.work.peak_bytes for waiting in self.queue),
            tuple(members),
            self.exhausted,
            self.patient,
            self.object_bytes,
        )

    def _hand_to(self, members: list[_Worker], attempt: _Attempt) -> None:
        self.running += 1
        attempt.shares = len(members)
        for member in members:
            member.attempts.append(attempt)
        if len(members) > 1:
            self._exchange(attempt, members)
        else:
            (member,) = members
            run = member.actor.run
            if self.engine.device == "cpu":
                run = run.options(concurrency_group=SIDE_BY_SIDE)
            self.pending[run.remote(attempt.work)] = (member, attempt)

    def _exchange(self, attempt: _Attempt, members: list[_Worker]) -> None:
        """Share a group: its bands become object refs, and its parts are made from those.

        All loads are requested before the first part: a worker serves requests in order, so two workers never wait for
        each other.
        """
        work = attempt.work
        shares = split_group(work, len(members))
        attempt.object_bytes = band_bytes(work)
        self.object_bytes += attempt.object_bytes
        bands = {}
        for member, share in zip(members, shares, strict=True):
            for number in share.loads:
                band = work.bands[number]
                path = work.source_paths[int(band["file"])]
                bands[number] = member.actor.load.remote(path, int(band["start"]), int(band["stop"]))
        for member, share in zip(members, shares, strict=True):
            needed = (bands[number] for number in share.needs)
            self.pending[member.actor.finish.remote(share.work, *needed)] = (member, attempt)

    def _settle(self, ref: Any) -> Iterator[GroupReport]:
        """Process an answer. Yields the report of a group if it was the last answer for it."""
        worker, attempt = self.pending.pop(ref)
        try:
            answer = ray.get(ref)
        except RayError as failure:
            answer = failure
        if isinstance(answer, ReshardError) and not isinstance(
            answer, RayError
        ):  # Ray's wrapper of a raise is both
            raise answer
        if attempt is None:
            self._settle_ping(worker, answer)
            return
        worker.attempts.remove(attempt)
        if not isinstance(answer, RayError):
            attempt.reports.append(answer)
        else:
            attempt.failure = answer
            if not worker.pinged:
                self._ping(worker)
        attempt.shares -= 1
        if attempt.shares == 0:
            self.running -= 1
            self.object_bytes -= attempt.object_bytes
            if attempt.failure is None:
                yield merge_reports(attempt.work, attempt.reports)
            else:
                self._retry(attempt.work, attempt.number, attempt.failure)

    def _retry(self, work: GroupWork, number: int, failure: RayError) -> None:
        cause = cause_of(failure)
        if number >= ATTEMPTS:
            raise GroupFailedError(work.label, work.group, number, cause) from failure
        log.warning("group %d: attempt %d failed: %s", work.group, number, cause)
        self.queue.appendleft(_Attempt(work, number + 1))


def _room(nodes: Iterable[Mapping[str, float]], demand: Mapping[str, float]) -> int:
    """How many workers fit on the nodes of an idle cluster.

    >>> _room([{"CPU": 8, "memory": 3e9}, {"CPU": 1, "memory": 9e9}], {"CPU": 1, "memory": 1e9})
    4
    """
    return sum(min(int(node.get(name, 0) // need) for name, need in demand.items()) for node in nodes)


def _worker_count(engine: RayEngine, room: int) -> int:
    """How many workers to start.

    Raises
    ------
    UsageError
        If there is no room for a worker.
    UnsupportedError
        If there are not enough GPUs.
    """
    if engine.device == "gpu" and room < (engine.workers or 1):
        raise UnsupportedError(
            f"device gpu: the Ray cluster has room for {room} workers with {_readable(engine.demand)} each, but "
            f"{engine.workers or 1} are requested"
        )
    if engine.workers is None and not room:
        raise UsageError(
            f"no node of the Ray cluster has {_readable(engine.demand)} for a worker; use less --memory, or "
            "give the number of --workers that the cluster will scale up to"
        )
    count = engine.workers or room
    if count > room:
        log.warning("%d workers requested, the Ray cluster has room for %d now", count, room)
    return count


def _readable(demand: Mapping[str, float]) -> str:
    parts = [
        f"{amount / (1 << 20):.0f}MiB" if name == "memory" else f"{amount:g} {name}"
        for name, amount in demand.items()
    ]
    return ", ".join(parts)


def cause_of(failure: RayError) -> str:
    """The failure in one line: the error in the worker, or Ray's reason for its end."""
    cause = getattr(failure, "cause", None) if isinstance(failure, RayTaskError) else None
    if isinstance(cause, BaseException):
        return f"{type(cause).__name__}: {one_line(cause)}"
    return f"{type(failure).__name__}: {one_line(failure)}"
