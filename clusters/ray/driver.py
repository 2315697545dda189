"""Hand out all groups of a run to its workers, and collect their reports."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from ray.exceptions import RayError

from paddle_reshard.clusters.ray.actors import live_nodes
from paddle_reshard.clusters.ray.backlog import Backlog
from paddle_reshard.clusters.ray.calls import Calls, cause_of
from paddle_reshard.clusters.ray.capacity import most_object_bytes
from paddle_reshard.clusters.ray.crew import Crew
from paddle_reshard.clusters.ray.dealing import Dealer, NextGroup, Table, next_batch_groups
from paddle_reshard.clusters.ray.exchange import band_bytes, merge_reports
from paddle_reshard.clusters.ray.join import head_of_cluster, lost_node
from paddle_reshard.clusters.ray.state import Running, Worker
from paddle_reshard.pipeline.core.errors import ClusterError, ReshardError
from paddle_reshard.pipeline.core.events import Observer
from paddle_reshard.pipeline.planning.work import GroupWork
from paddle_reshard.tasks.answers import BatchAnswer
from paddle_reshard.tasks.group import GroupReport

log = logging.getLogger(__name__)

Reports = Iterator[Sequence[GroupReport]]


class Driver:
    """One run of all groups. Everything happens on one thread, between two waits."""

    def __init__(self, backlog: Backlog, crew: Crew, calls: Calls, dealer: Dealer, observe: Observer) -> None:
        """``observe`` is called with what each worker runs."""
        self.backlog, self.crew, self.calls, self.dealer = backlog, crew, calls, dealer
        self.observe = observe
        self.head = head_of_cluster()
        self.running: set[Running] = set()
        self.stores_known = True
        """Whether the dealer knows the object stores of all nodes with workers."""
        self.patient = True
        """Whether to wait for workers that are still starting if they could share a group."""

    def reports(self) -> Reports:
        """Run all groups."""
        try:
            while True:
                self._hand_out()
                if not self.backlog and not self.running:
                    return
                done = self.calls.wait(hurried=not self.head.answers)
                for answered in self.calls.answers(done):
                    yield from self._settle(*answered)
                self._check_cluster(idle=not done)
        finally:
            self.calls.pending.clear()

    def _check_cluster(self, idle: bool) -> None:
        """Find out whether it is worth waiting for an answer; ``idle`` if there was none for long.

        Raises
        ------
        ClusterError
            If this process has lost its cluster. Finished groups are kept, as after a kill.
        """
        lost = self.head.lost(at_once=idle)
        if idle and self.head.answers:
            lost = lost_node()
        if lost:
            raise ClusterError(
                f"Ray was lost while groups were being moved ({lost}); finished work is kept: run the same command "
                "with --resume"
            )
        if idle:
            self.patient = False
            if not self.running and self.head.answers:
                log.warning("still waiting for workers; each needs %s", self.crew.actors.demand)

    # --------------------------------------------------------------------------------------- handing out

    @property
    def many(self) -> bool:
        """Whether so many groups wait that no worker will be idle soon."""
        return self.dealer.exchange != "always" and self.backlog.left > self.crew.slots

    def _hand_out(self) -> None:
        """Hand waiting groups to workers while there are workers for them."""
        while self.backlog:
            if not (self._deal() if self.backlog.singles or not self.many else self._hand_batch()):
                return

    def _hand_batch(self) -> bool:
        """Hand the next batch to a worker, if there is one for it."""
        worker = self.crew.next_free(self.backlog.next_peak_bytes)
        if worker is None:
            return False
        most = min(worker.batch_groups, max(1, self.backlog.left // self.crew.slots))
        self.running.add(self.calls.run(worker, *self.backlog.take_batch(most)))
        self._tell([worker])
        self.crew.note_free(worker)
        return True

    def _deal(self) -> bool:
        """Hand a single group to one or several workers, if there are any for it."""
        backlog = self.backlog
        if not self.stores_known and self.dealer.exchange != "never":
            nodes = self.crew.actors.demand.eligible(live_nodes())
            self.dealer = replace(self.dealer, most_object_bytes=most_object_bytes(nodes))
            self.stores_known = True
        if not self.many:
            backlog.look_ahead(1 + (self.crew.idle or len(self.crew.workers)))
        attempt = backlog.singles[0]
        work = backlog.works.work(attempt.groups.start)
        chosen = self.dealer.choose(self._table(work))
        if not chosen:
            return False
        backlog.singles.popleft()
        if len(chosen) == 1:
            running = self.calls.run(chosen[0], attempt, backlog.works.batch(attempt.groups))
        else:
            running = self.calls.share(chosen, attempt, work)
        self.running.add(running)
        self._tell(chosen)
        return True

    def _tell(self, workers: Iterable[Worker]) -> None:
        for worker in workers:
            if worker.name:
                self.observe(worker.assigned)

    def _table(self, work: GroupWork) -> Table:
        """The state in which ``work``, the first single group, is dealt."""
        singles = self.backlog.singles
        return Table(
            next=NextGroup(
                work.label,
                work.peak_bytes,
                len(work.bands),
                len(work.parts),
                band_bytes(work),
                singles[0].number,
            ),
            waiting_peaks=tuple(attempt.peak_bytes for attempt in singles),
            workers=self.crew.workers,
            exhausted=not self.backlog.left,
            patient=self.patient,
            object_bytes=sum(running.object_bytes for running in self.running),
        )

    # ------------------------------------------------------------------------------------------ settling

    def _settle(self, worker: Worker, running: Running | None, answer: Any) -> Reports:
        """Process an answer. Yields the reports of groups that are done with it."""
        # Ray's wrapper of what a worker raised is both.
        if isinstance(answer, ReshardError) and not isinstance(answer, RayError):
            raise answer
        if running is None:
            self._settle_ping(worker, answer)
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
            worker.batch_groups = next_batch_groups(len(answer.groups), answer.seconds, self.crew.slots)
            yield from self._finish_batch(running, answer)
        elif running.shares == 0:
            yield from self._finish_shares(running)

    def _settle_ping(self, worker: Worker, answer: Any) -> None:
        """A worker answered a ping, or failed to. A new one may be on a node with a smaller object store."""
        was_ready = worker.ready
        self.crew.settle_ping(worker, answer)
        self.stores_known = self.stores_known and worker.ready == was_ready

    def _finish_batch(self, running: Running, answer: BatchAnswer) -> Reports:
        """Process the answer to a batch, of which some groups may not be done."""
        self.running.remove(running)
        if answer.groups:
            yield answer.reports()
        if answer.refusal is not None:
            raise answer.refusal
        self.backlog.take_back(running.attempt, len(answer.groups), answer.failure)

    def _finish_shares(self, running: Running) -> Reports:
        """All workers have ended their shares of a group, or the worker of a batch is lost."""
        self.running.remove(running)
        if running.failure is not None:
            self.backlog.retry(running.attempt, cause_of(running.failure), running.failure)
        else:
            yield [merge_reports(self.backlog.works.work(running.attempt.groups.start), running.reports)]
