"""What the driver asks of workers, and what they answer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from paddle_reshard.clusters.ray.actors import SIDE_BY_SIDE
from paddle_reshard.clusters.ray.backlog import Attempt
from paddle_reshard.clusters.ray.exchange import split_group
from paddle_reshard.clusters.ray.state import Running, Worker
from paddle_reshard.pipeline.core.shown import one_line
from paddle_reshard.pipeline.planning.work import GroupWork, WorkBatch
from paddle_reshard.tasks.group import band_bytes

PATIENCE_SECONDS = 15.0
"""Time without events after which work is dealt to the workers that have started, or, if there are none, the log says
what each needs."""


class Calls:
    """Calls of actors in progress."""

    def __init__(self, batches_at_a_time: int) -> None:
        """``batches_at_a_time``: how many of them a worker runs."""
        self.batches_at_a_time = batches_at_a_time
        self.pending: dict[Any, tuple[Worker, Running | None]] = {}

    @property
    def running(self) -> set[Running]:
        """All attempts in progress."""
        return {running for _, running in self.pending.values() if running is not None}

    def ping(self, worker: Worker) -> None:
        """Ask a worker whether it is ready."""
        worker.pinged = True
        self.pending[worker.actor.prepare.remote()] = (worker, None)

    def run(self, worker: Worker, attempt: Attempt, batch: WorkBatch) -> None:
        """Have one worker run whole groups."""
        running = Running(attempt)
        worker.running.append(running)
        run = worker.actor.run
        if self.batches_at_a_time > 1:
            run = run.options(concurrency_group=SIDE_BY_SIDE)
        self.pending[run.remote(batch)] = (worker, running)

    def share(self, members: Sequence[Worker], attempt: Attempt, work: GroupWork) -> None:
        """Share a group: its bands become object refs, and its parts are made from those.

        All loads are requested before the first part: a worker serves requests in order, so two workers never wait for
        each other.
        """
        running = Running(attempt, len(members), band_bytes(work))
        for member in members:
            member.running.append(running)
        shares = split_group(work, len(members))
        bands = {}
        for member, share in zip(members, shares, strict=True):
            for number in share.loads:
                band = work.bands[number]
                path = work.source_paths[int(band["file"])]
                bands[number] = member.actor.load.remote(path, int(band["start"]), int(band["stop"]))
        for member, share in zip(members, shares, strict=True):
            needed = (bands[number] for number in share.needs)
            self.pending[member.actor.finish.remote(share.work, *needed)] = (member, running)

    def wait(self, hurried: bool = False) -> list[Any]:
        """Wait for an answer, and take all that have arrived by then; none if there is none for long.

        If ``hurried``, one second is long.
        """
        seconds = min(PATIENCE_SECONDS, 1.0) if hurried else PATIENCE_SECONDS
        done, remaining = ray.wait(list(self.pending), timeout=seconds)
        if remaining:
            done += ray.wait(remaining, num_returns=len(remaining), timeout=0)[0]
        return done

    def answers(self, refs: Sequence[Any]) -> Iterator[tuple[Worker, Running | None, Any]]:
        """Workers, what they ran, ``None`` for a ping, and their answers, or the failure to answer."""
        for ref in refs:
            worker, running = self.pending.pop(ref)
            try:
                answer = ray.get(ref)
            except RayError as failure:
                answer = failure
            yield worker, running, answer


def cause_of(failure: RayError) -> str:
    """The failure in one line: the error in the worker, or Ray's reason for its end."""
    cause = getattr(failure, "cause", None) if isinstance(failure, RayTaskError) else None
    if isinstance(cause, BaseException):
        return f"{type(cause).__name__}: {one_line(cause)}"
    return f"{type(failure).__name__}: {one_line(failure)}"
