"""The worker of an average as a Ray actor on this node.

It maps an anonymous file of this process, opened through ``/proc``. So both must see each other's processes and belong
to the same user. The actor ends with this process, which owns it.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from paddle_reshard.clusters.companion import Companion, CompanionLost
from paddle_reshard.clusters.ray.join import job_config
from paddle_reshard.pipeline.core.errors import ReshardError, UnsupportedError
from paddle_reshard.tasks.ema_worker import EmaWorker, Shared

START_SECONDS = 120.0
END_SECONDS = 60.0


class ActorLost(CompanionLost):
    """The actor has ended."""

    def __str__(self) -> str:
        return f"the averaging actor has ended: {self.last_line}"


class _Averager:
    """The actor."""

    def __init__(self, path: str, nbytes: int) -> None:
        descriptor = os.open(path, os.O_RDWR)
        memory = mmap.mmap(descriptor, nbytes)
        os.close(descriptor)
        self.worker = EmaWorker(Shared(memory, nbytes))

    def pid(self) -> int:
        """Process id of the actor."""
        return os.getpid()

    def do(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Serve a request; the actor serves one at a time."""
        return self.worker.do(request)


class ActorCompanion(Companion):
    """A companion run by Ray. It reserves no CPU, so that it never waits for training to end."""

    def start(self) -> None:
        """Start the actor on this node, or replace a lost one, and wait until it runs."""
        if not ray.is_initialized():
            ray.init(
                address=os.environ.get("RAY_ADDRESS", "auto"),
                log_to_driver=False,
                logging_level=logging.WARNING,
                job_config=job_config(),
            )
        node = ray.get_runtime_context().get_node_id()
        actor: Any = ray.remote(_Averager).options(
            num_cpus=0, num_gpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)
        )
        self.pending: deque[Any] = deque()
        self.actor = actor.remote(f"/proc/{os.getpid()}/fd/{self.descriptor}", self.nbytes)
        try:
            self.pid = int(ray.get(self.actor.pid.remote(), timeout=START_SECONDS))
        except RayError as error:
            raise UnsupportedError(
                f"an actor on this node cannot share memory with this process: {_last_line(error)}; use "
                'worker="process" if Ray runs in a container of its own'
            ) from error

    @property
    def busy(self) -> bool:
        """Whether a request is still in progress."""
        return bool(self.pending)

    def send(self, request: Mapping[str, Any]) -> None:
        """Queue a request and return at once."""
        self.pending.append(self.actor.do.remote(dict(request)))

    def wait(self, timeout_seconds: float | None = None) -> bool:
        """Wait until all requests are done. Returns whether they are."""
        waiting = [*self.pending]
        unfinished = (
            ray.wait(waiting, num_returns=len(waiting), timeout=timeout_seconds)[1] if waiting else []
        )
        failure = None
        while self.pending and self.pending[0] not in unfinished:
            try:
                failure = failure or ray.get(self.pending.popleft()).get("error")
            except RayActorError as error:
                self.pending.clear()
                raise ActorLost(None, _last_line(error)) from error
        if failure is not None:
            raise ReshardError(failure)
        return not self.pending

    def end(self) -> None:
        """Let the actor finish its requests, and wait until it ends: two actors must not write to the same memory."""
        with contextlib.suppress(ReshardError):
            self.wait(END_SECONDS)
        with contextlib.suppress(RayError):
            ray.kill(self.actor)
        deadline = time.monotonic() + END_SECONDS
        while _runs(self.pid) and time.monotonic() < deadline:
            time.sleep(0.01)


def _runs(pid: int) -> bool:
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def _last_line(error: Exception) -> str:
    return str(error).strip().splitlines()[-1] if str(error).strip() else type(error).__name__
