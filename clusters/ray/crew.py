"""The workers of a run: those that start late, and those that are lost and replaced."""

from __future__ import annotations

import logging
from typing import Any

from ray.exceptions import RayError

from paddle_reshard.clusters.ray.actors import Actors
from paddle_reshard.clusters.ray.backlog import ATTEMPTS
from paddle_reshard.clusters.ray.calls import Calls, cause_of
from paddle_reshard.clusters.ray.state import Running, Worker
from paddle_reshard.pipeline.core.errors import ClusterError

log = logging.getLogger(__name__)


class Crew:
    """All workers of a run."""

    def __init__(self, actors: Actors, calls: Calls, count: int) -> None:
        self.actors, self.calls = actors, calls
        self.workers = [Worker(number, actors.start(number)) for number in range(count)]
        for worker in self.workers:
            calls.ping(worker)

    @property
    def slots(self) -> int:
        """How many batches all workers run at a time."""
        return len(self.workers) * self.calls.batches_at_a_time

    def settle(self, worker: Worker, running: Running, lost: bool) -> None:
        """A worker has ended its share of ``running``; or it is ``lost``, which a ping will tell for sure."""
        worker.running.remove(running)
        if lost and not worker.pinged:
            self.calls.ping(worker)

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
