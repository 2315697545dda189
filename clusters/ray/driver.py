"""Hand out all groups of a run to its workers, and collect their reports."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from ray.exceptions import RayError

from paddle_reshard.clusters.ray.actors import live_nodes
from paddle_reshard.clusters.ray.backlog import Backlog
from paddle_reshard.clusters.ray.calls import Calls, cause_of
from paddle_reshard.clusters.ray.capacity import most_object_bytes
from paddle_reshard.clusters.ray.crew import Crew
from paddle_reshard.clusters.ray.dealing import Dealer, Shareable, Table, next_batch_groups
from paddle_reshard.clusters.ray.exchange import merge_reports
from paddle_reshard.clusters.ray.join import head_of_cluster, lost_cluster
from paddle_reshard.clusters.ray.state import Running, Worker
from paddle_reshard.clusters.ray.worker import BatchAnswer
from paddle_reshard.pipeline.core.errors import ClusterError, ReshardError
from paddle_reshard.pipeline.core.events import Observer
from paddle_reshard.tasks.group import GroupReport, band_bytes

log = logging.getLogger(__name__)

Reports = Iterator[Sequence[GroupReport]]


class Driver:
    """One run of all groups. Everything happens on one thread, between two waits."""

    def __init__(self, backlog: Backlog, crew: Crew, calls: Calls, dealer: Dealer, observe: Observer) -> None:
        """``observe`` is called with what each worker runs."""
        self.backlog, self.crew, self.calls, self.dealer = backlog, crew, calls, dealer
        self.observe = observe
        self.head = head_of_cluster()
        self.most_object_bytes: int | None = None
        """Limit for bytes in the object store; ``None`` until it is asked for, since a worker started."""
        self.patient = True
        """Whether to wait for workers that are still starting if they could share a group."""

    def reports(self) -> Reports:
        """Run all groups."""
        try:
            while True:
                self._hand_out()
                if not self.backlog and not self.calls.running:
                    return
                done = self.calls.wait(hurried=not self.head.answers)
                for answered in self.calls.answers(done):
                    yield from self._settle(*answered)
                self._check_cluster(idle=not done)
        finally:
            self.calls.pending.clear()

    def _check_cluster(self, idle: bool) -> None:
        """End the run if this process has lost its cluster; ``idle`` if there was no answer for long."""
        if lost := lost_cluster(self.head, idle):
            raise ClusterError(
                f"Ray was lost while groups were being moved ({lost}); finished work is kept: run the same command "
                "with --resume"
            )
        if idle:
            self.patient = False
            if not self.calls.running and self.head.answers:
                log.warning("still waiting for workers; each needs %s", self.crew.actors.demand)

    def _hand_out(self) -> None:
        """Hand waiting groups to workers while there are workers for them."""
        while self.backlog:
            table = Table(self.backlog.next, self.backlog.left, self.crew.workers)
            chosen = self.dealer.choose(table, self._look)
            if not chosen:
                return
            attempt, batch = self.backlog.take(self._most_groups(chosen[0]))
            if len(chosen) == 1:
                self.calls.run(chosen[0], attempt, batch)
            else:
                (work,) = batch
                self.calls.share(chosen, attempt, work)
            self._tell(chosen)

    def _most_groups(self, worker: Worker) -> int:
        """How many groups a worker is given: so few in the end that all workers end together."""
        if self.dealer.exchange == "always":
            return 1
        return max(1, min(worker.batch_groups, self.backlog.left // self.crew.slots))

    def _look(self) -> Shareable:
        """Look at the first group in line."""
        work = self.backlog.remaining.work(self.backlog.next.groups.start)
        if self.most_object_bytes is None:
            self.most_object_bytes = most_object_bytes(live_nodes())
        return Shareable(
            bands=len(work.bands),
            parts=len(work.parts),
            object_bytes=band_bytes(work),
            used_bytes=sum(running.object_bytes for running in self.calls.running),
            most_bytes=self.most_object_bytes,
            waiting_bytes=self.backlog.peak_bytes,
            patient=self.patient,
        )

    def _tell(self, workers: Iterable[Worker]) -> None:
        for worker in workers:
            if worker.name:
                self.observe(worker.assigned)

    def _settle(self, worker: Worker, running: Running | None, answer: Any) -> Reports:
        """Process an answer. Yields the reports of groups that are done with it."""
        # Ray's wrapper of what a worker raised is both.
        if isinstance(answer, ReshardError) and not isinstance(answer, RayError):
            raise answer
        if running is None:
            self.crew.settle_ping(worker, answer)
            self.most_object_bytes = None  # it may be on a node with a smaller object store
            self._tell([worker])
            return
        running.shares -= 1
        if isinstance(answer, RayError):
            running.failure = answer
        elif isinstance(answer, GroupReport):
            running.reports.append(answer)
        self.crew.settle(worker, running, lost=isinstance(answer, RayError))
        self._tell([worker])
        if isinstance(answer, BatchAnswer):
            worker.batch_groups = next_batch_groups(len(answer.reports), answer.seconds, self.crew.slots)
            yield from self._finish_batch(running, answer)
        elif running.shares == 0:
            yield from self._finish_shares(running)

    def _finish_batch(self, running: Running, answer: BatchAnswer) -> Reports:
        """Process the answer to a batch, of which some groups may not be done."""
        if answer.reports:
            yield answer.reports
        if answer.refusal is not None:
            raise answer.refusal
        self.backlog.take_back(running.attempt, len(answer.reports), answer.failure)

    def _finish_shares(self, running: Running) -> Reports:
        """All workers have ended their shares of a group, or the worker of a batch is lost."""
        if running.failure is not None:
            self.backlog.retry(running.attempt, cause_of(running.failure), running.failure)
        else:
            yield [merge_reports(self.backlog.remaining.work(running.attempt.groups.start), running.reports)]
