"""The workers of a run: those that start late, those that are lost and replaced, and which of them are free."""

from __future__ import annotations

import logging
from collections import deque
from typing import Any

from ray.exceptions import RayError

from paddle_reshard.clusters.ray.actors import Actors
from paddle_reshard.clusters.ray.backlog import ATTEMPTS
from paddle_reshard.clusters.ray.calls import Calls, cause_of
from paddle_reshard.clusters.ray.state import Running, Worker
from paddle_reshard.pipeline.core.errors import ClusterError
from paddle_reshard.pipeline.planning.plan import FOOTPRINT_BYTES
from paddle_reshard.pipeline.planning.work import GROUPS_AT_A_TIME

log = logging.getLogger(__name__)


class Crew:
    """All workers of a run."""

    def __init__(self, actors: Actors, calls: Calls, count: int) -> None:
        self.actors, self.calls = actors, calls
        self.memory_bytes = actors.demand.memory_bytes
        self.batches_at_a_time = GROUPS_AT_A_TIME if calls.side_by_side else 1
        self.workers: list[Worker] = []
        self._idle: deque[Worker] = deque()
        self._half_busy: deque[Worker] = deque()
        """Workers that may be free, or able to run a further batch. Each is checked when its turn comes."""
        for number in range(count):
            worker = Worker(number, actors.start(number))
            self.workers.append(worker)
            calls.ping(worker)

    @property
    def slots(self) -> int:
        """How many batches all workers run at a time."""
        return len(self.workers) * self.batches_at_a_time

    @property
    def idle(self) -> int:
        """How many workers have nothing to do."""
        return sum(worker.idle for worker in self.workers)

    def next_free(self, peak_bytes: int) -> Worker | None:
        """A worker for a batch of groups of ``peak_bytes``, if there is any. Idle workers come first."""
        while self._idle:
            worker = self._idle.popleft()
            if worker.idle:
                return worker
        most_bytes = self.memory_bytes - FOOTPRINT_BYTES - peak_bytes
        while self._half_busy:
            worker = self._half_busy.popleft()
            if worker.has_room(most_bytes, self.batches_at_a_time):
                return worker
        return None

    def note_free(self, worker: Worker) -> None:
        """Put a worker in line for a batch if it can take one."""
        if worker.pinged:
            return
        if not worker.running:
            self._idle.append(worker)
        elif len(worker.running) < self.batches_at_a_time:
            self._half_busy.append(worker)

    def settle(self, worker: Worker, running: Running, lost: bool) -> None:
        """A worker has ended its share of ``running``; or it is ``lost``, which a ping will tell for sure."""
        worker.running.remove(running)
        if lost and not worker.pinged:
            self.calls.ping(worker)
        self.note_free(worker)

    def settle_ping(self, worker: Worker, answer: Any) -> None:
        """A worker answered a ping, or failed to; then it is started again or given up.

        Raises
        ------
        ClusterError
            If no worker remains.
        """
        if isinstance(answer, RayError):
            self._replace(worker, answer)
            return
        if not worker.ready:
            worker.name, process = answer
            log.info("%s: %s", worker.name, process)
        worker.ready, worker.starts, worker.pinged = True, 1, False
        self.note_free(worker)

    def _replace(self, worker: Worker, failure: RayError) -> None:
        cause = cause_of(failure)
        self.actors.end(worker.number)
        if not worker.ready and worker.starts >= ATTEMPTS:
            self.workers.remove(worker)
            if not self.workers:
                raise ClusterError(f"no worker could be started on the Ray cluster: {cause}") from failure
            log.warning("worker %d: given up after %d starts: %s", worker.number, worker.starts, cause)
            return
        log.warning("worker %d: lost, and started again: %s", worker.number, cause)
        worker.starts = 1 if worker.ready else worker.starts + 1
        worker.ready = False
        worker.actor = self.actors.start(worker.number)
        self.calls.ping(worker)
