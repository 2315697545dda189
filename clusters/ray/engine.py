"""Run a plan on Ray: the same groups as inline, in any order, on all available workers.

The driver hands out groups to actors (``ReshardWorker``) in *batches*, to each as many at a time as fit into its
memory: some groups are read or written while others are moved. A call of an actor takes the driver about a millisecond,
so a batch grows until it keeps its worker busy for half a second, or for as long as the driver needs to serve all.
Towards the end batches shrink, so that all workers end together, and the last groups are dealt one by one
(:mod:`paddle_reshard.clusters.ray.dealing`).

Ray restarts nothing by itself. Groups are idempotent, so the driver hands out a group again if its worker was lost, up
to ``ATTEMPTS`` times, and replaces the worker. A group that failed, and each group of a batch that was lost with its
worker, is retried alone on a worker, so that a group that kills its workers takes other groups with it only once. A
``ReshardError`` in any worker stops everything and arrives unchanged.

The bands of a group on a single worker never use Ray's object store. A group that is *exchanged* is shared by several
workers (:mod:`paddle_reshard.clusters.ray.exchange`): its bands become ``ObjectRef``\\ s, which the makers of its parts
receive as resolved arguments, without a copy on the node that loaded them. The bands of all exchanged groups are
limited to half of the smallest node's object store: even if one node held all of them, Ray would not spill.

The source and the writer are pickled to the workers and may hold credentials: they are passed as arguments, and never
printed or logged.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from paddle_reshard.clusters.ray.dealing import Dealer, Member, Table, Waiting
from paddle_reshard.clusters.ray.environment import worker_variables
from paddle_reshard.clusters.ray.exchange import band_bytes, merge_reports, split_group
from paddle_reshard.clusters.ray.join import joined_ray, lost_node
from paddle_reshard.clusters.ray.worker import ReshardWorker
from paddle_reshard.pipeline.core.choices import DEVICES, EXCHANGES
from paddle_reshard.pipeline.core.errors import (
    ClusterError,
    GroupFailedError,
    MemoryBudgetError,
    ReshardError,
    UnsupportedError,
    UsageError,
)
from paddle_reshard.pipeline.core.shown import one_line
from paddle_reshard.pipeline.planning.plan import FOOTPRINT_BYTES
from paddle_reshard.pipeline.planning.work import GROUPS_AT_A_TIME, GroupWork, WorkBatch, Works
from paddle_reshard.storage.store import ReadRange, WritePart
from paddle_reshard.tasks.answers import Answer
from paddle_reshard.tasks.group import GroupReport

log = logging.getLogger(__name__)

SIDE_BY_SIDE = "side_by_side"
"""Calls of a worker that may run concurrently. A worker with a GPU runs one group at a time."""
ATTEMPTS = 4
"""How often a group is tried, and how often a worker is started, before giving up."""
PATIENCE_SECONDS = 15.0
"""Time without events after which work is dealt to the workers that have started, or, if there are none, the log says
what each needs."""
BATCH_SECONDS = 0.5
"""How long a batch should keep a worker busy; what a killed worker or driver loses is about as much."""
SERVING_SECONDS = 0.004
"""Time in which the driver serves a batch, with some to spare: with many workers, batches take longer."""
MOST_GROUPS = 256
GROWTH = 4
"""A batch has at most ``MOST_GROUPS`` groups, and ``GROWTH`` times as many as the worker's previous batch."""


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
        self, works: Works, source: ReadRange, target: WritePart | None
    ) -> Generator[Sequence[GroupReport], None, None]:
        """Run every group, and report batches as they are done. Closing the iterator ends all workers.

        Without a ``target``, groups are only compared.
        """
        if not len(works):
            return
        with joined_ray(self.joins, self.workers):
            run = _Run(self, works, source, target)
            try:
                yield from run.reports()
            finally:
                run.end()

    def compare(self, works: Works, source: ReadRange) -> Generator[Sequence[GroupReport], None, None]:
        """Run only the comparisons of every group."""
        return replace(self, exchange="never")(works, source, None)

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
    """The batches in progress."""
    batch_groups: int = 1
    """Number of groups of its next batch."""

    @property
    def held_bytes(self) -> int:
        """Peaks of its batches in progress."""
        return sum(attempt.peak_bytes for attempt in self.attempts)

    @property
    def alone(self) -> bool:
        """Whether it may not run anything else at the same time."""
        return any(attempt.alone for attempt in self.attempts)


@dataclass(eq=False)
class _Attempt:
    """An attempt at a batch, or at a single group."""

    groups: range
    peak_bytes: int
    """Peak of its largest group."""
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

    def __init__(self, engine: RayEngine, works: Works, source: ReadRange, target: WritePart | None) -> None:
        self.engine, self.works, self.source, self.target = engine, works, source, target
        self.waiting = deque(works.stretches)
        """Groups that are neither running nor in the queue."""
        self.left = len(works)
        """How many they are."""
        self.queue: deque[_Attempt] = deque()
        """Single groups: those to be retried, and the last ones."""
        self.running = 0
        self.patient = True
        """Whether to wait for workers that are still starting if they could share a group."""
        self.workers: list[_Worker] = []
        self.idle: deque[_Worker] = deque()
        self.half_busy: deque[_Worker] = deque()
        """Workers that may be free, or able to run a further batch. Each is checked when its turn comes."""
        self.pending: dict[Any, tuple[_Worker, _Attempt | None]] = {}
        """Requests in progress by reference: a batch, a share of a group, or a ping (``None``)."""
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
        self._check_memory()

    @property
    def slots(self) -> int:
        """How many batches all workers run at a time."""
        return len(self.workers) * self.batches_at_a_time

    @property
    def batches_at_a_time(self) -> int:
        """How many batches a worker runs at a time."""
        return GROUPS_AT_A_TIME if self.engine.device == "cpu" else 1

    def reports(self) -> Iterator[Sequence[GroupReport]]:
        """Run all groups."""
        self._start_workers()
        while True:
            self._hand_out()
            if not self.left and not self.queue and not self.running:
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

    def _check_memory(self) -> None:
        """Refuse a group that fits no worker.

        Raises
        ------
        MemoryBudgetError
        """
        peaks = self.works.plan.group_peaks
        largest = max((group for groups in self.waiting for group in groups), key=peaks.__getitem__)
        needed_bytes = int(peaks[largest]) + FOOTPRINT_BYTES
        if needed_bytes > self.engine.memory_bytes:
            raise MemoryBudgetError(self.works.work(largest).label, self.engine.memory_bytes, needed_bytes)

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
        if self.left <= count:
            works = [self.works.work(group) for groups in self.waiting for group in groups]
            most = (1 if engine.exchange == "never" else len(work.bands) for work in works)
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
            self._note_free(worker)
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

    def _note_free(self, worker: _Worker) -> None:
        """Put a worker in line for a batch if it can take one."""
        if not worker.attempts:
            self.idle.append(worker)
        elif len(worker.attempts) < self.batches_at_a_time:
            self.half_busy.append(worker)

    # ------------------------------------------------------------------------------------------- groups

    @property
    def many(self) -> bool:
        """Whether so many groups wait that no worker will be idle soon."""
        return self.engine.exchange != "always" and self.left > self.slots

    def _hand_out(self) -> None:
        """Hand waiting groups to workers while there are workers for them."""
        while self.queue or self.left:
            if not (self._deal() if self.queue or not self.many else self._hand_batch()):
                return

    def _hand_batch(self) -> bool:
        """Hand the next batch to a worker, if there is one for it. Idle workers come first."""
        first = self.waiting[0]
        peak_bytes = int(self.works.plan.group_peaks[first.start])
        worker = self._next_free(peak_bytes)
        if worker is None:
            return False
        most = min(worker.batch_groups, max(1, self.left // self.slots))
        batch = self.works.batch(first[:most])
        self._drop(len(batch.groups))
        self._request(worker, _Attempt(batch.groups, max(batch.peaks)), batch)
        self._note_free(worker)
        return True

    def _next_free(self, peak_bytes: int) -> _Worker | None:
        while self.idle:
            worker = self.idle.popleft()
            if not worker.pinged and not worker.attempts:
                return worker
        most_bytes = self.engine.memory_bytes - FOOTPRINT_BYTES - peak_bytes
        while self.half_busy:
            worker = self.half_busy.popleft()
            busy = len(worker.attempts) >= self.batches_at_a_time or worker.alone
            if not worker.pinged and not busy and worker.held_bytes <= most_bytes:
                return worker
        return None

    def _drop(self, count: int) -> None:
        """Remove the next ``count`` groups, of one stretch, from those that wait."""
        groups = self.waiting.popleft()
        if len(groups) > count:
            self.waiting.appendleft(groups[count:])
        self.left -= count

    def _look_ahead(self, count: int) -> None:
        """Fill the queue with up to ``count`` single groups."""
        while self.left and len(self.queue) < count:
            self.queue.append(self._single(self.waiting[0].start))
            self._drop(1)

    def _single(self, group: int, number: int = 1) -> _Attempt:
        return _Attempt(range(group, group + 1), int(self.works.plan.group_peaks[group]), number)

    def _deal(self) -> bool:
        """Hand a single group to one or several workers, if there are any for it."""
        if not self.many:
            idle = sum(not worker.pinged and not worker.attempts for worker in self.workers)
            self._look_ahead(1 + (idle or len(self.workers)))
        attempt = self.queue[0]
        work = self.works.work(attempt.groups.start)
        chosen = [self.workers[number] for number in self.dealer.choose(self._table(attempt, work))]
        if not chosen:
            return False
        self.queue.popleft()
        if len(chosen) == 1:
            self._request(chosen[0], attempt, self.works.batch(attempt.groups))
        else:
            self._exchange(chosen, attempt, work)
        return True

    def _table(self, attempt: _Attempt, work: GroupWork) -> Table:
        members = (
            Member(
                worker.ready,
                not worker.pinged,
                tuple(running.peak_bytes for running in worker.attempts),
                worker.alone,
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
            tuple(waiting.peak_bytes for waiting in self.queue),
            tuple(members),
            not self.left,
            self.patient,
            self.object_bytes,
        )

    def _request(self, worker: _Worker, attempt: _Attempt, batch: WorkBatch) -> None:
        """Have one worker run whole groups."""
        self.running += 1
        attempt.shares = 1
        worker.attempts.append(attempt)
        run = worker.actor.run
        if self.engine.device == "cpu":
            run = run.options(concurrency_group=SIDE_BY_SIDE)
        self.pending[run.remote(batch)] = (worker, attempt)

    def _exchange(self, members: list[_Worker], attempt: _Attempt, work: GroupWork) -> None:
        """Share a group: its bands become object refs, and its parts are made from those.

        All loads are requested before the first part: a worker serves requests in order, so two workers never wait for
        each other.
        """
        self.running += 1
        attempt.shares = len(members)
        for member in members:
            member.attempts.append(attempt)
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

    def _settle(self, ref: Any) -> Iterator[Sequence[GroupReport]]:
        """Process an answer. Yields the reports of groups that are done with it."""
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
        attempt.shares -= 1
        if isinstance(answer, RayError):
            attempt.failure = answer
            if not worker.pinged:
                self._ping(worker)
        elif isinstance(answer, GroupReport):
            attempt.reports.append(answer)
        if not worker.pinged:
            self._note_free(worker)
        if attempt.shares == 0:
            self.running -= 1
            self.object_bytes -= attempt.object_bytes
            if isinstance(answer, Answer):
                self._resize(worker, answer)
                yield from self._finish_batch(attempt, answer)
            elif attempt.failure is not None:
                self._retry(attempt, cause_of(attempt.failure))
            else:
                yield [merge_reports(self.works.work(attempt.groups.start), attempt.reports)]

    def _finish_batch(self, attempt: _Attempt, answer: Answer) -> Iterator[Sequence[GroupReport]]:
        """Process the answer to a batch, of which some groups may not be done."""
        if answer.groups:
            yield answer.reports()
        if answer.refusal is not None:
            raise answer.refusal
        rest = attempt.groups[len(answer.groups) :]
        if rest:
            self._retry(replace(attempt, groups=rest[:1]), answer.failure)
        if len(rest) > 1:
            self.waiting.appendleft(rest[1:])
            self.left += len(rest) - 1

    def _resize(self, worker: _Worker, answer: Answer) -> None:
        """Let the next batch of a worker take about as long as a batch should."""
        done = len(answer.groups)
        wanted_seconds = max(BATCH_SECONDS, self.slots * SERVING_SECONDS)
        enough = int(done * wanted_seconds / max(answer.seconds, 1e-6))
        worker.batch_groups = max(1, min(enough, GROWTH * done, MOST_GROUPS))

    def _retry(self, attempt: _Attempt, cause: str) -> None:
        """Put every group of an attempt that failed in the queue again."""
        groups, number = attempt.groups, attempt.number
        if number >= ATTEMPTS:
            raise GroupFailedError(
                self.works.work(groups.start).label, groups.start, number, cause
            ) from attempt.failure
        names = f"group {groups.start}" if len(groups) == 1 else f"groups {groups.start} to {groups[-1]}"
        log.warning("%s: attempt %d failed: %s", names, number, cause)
        self.queue.extendleft(self._single(group, number + 1) for group in reversed(groups))


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
