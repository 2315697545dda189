"""The worker of a cluster. Ray makes an actor of this class, which knows nothing else about Ray.

A refusal (``ReshardError``) is returned, not raised: so it arrives at the driver whole, with its own class and
text. Whatever is raised is a failed attempt, and the driver may try again elsewhere; so is what the operating system of
this machine alone may refuse.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, ParamSpec, TypeVar

from paddle_reshard.pipeline.core.errors import ReshardError
from paddle_reshard.pipeline.planning.plan import FOOTPRINT_BYTES
from paddle_reshard.pipeline.planning.work import GroupWork
from paddle_reshard.storage.os_errors import may_go_well_elsewhere
from paddle_reshard.storage.remote.retry_counts import count_retries
from paddle_reshard.storage.store import ReadRange, WritePart
from paddle_reshard.tasks.device import HOST, Buffer, Mover, PaddleMover
from paddle_reshard.tasks.figures import WorkerFigures, add_figures
from paddle_reshard.tasks.run_group import GroupReport, finish_group, load_band, run_group
from paddle_reshard.tasks.workspace import Workspace, Workspaces

P = ParamSpec("P")
R = TypeVar("R")


class ReshardWorker:
    """Loads bands, moves boxes and writes parts.

    On the host several whole groups may run side by side (:meth:`run`), so that some are read or written while others
    are moved; together they stay within the memory of the worker. All other calls come one after another; a share of a
    group comes while no whole group runs.
    """

    def __init__(
        self,
        source: ReadRange,
        target: WritePart,
        place: str | None,
        number: int,
        memory_bytes: int,
        environment: Mapping[str, str],
    ) -> None:
        """``place`` is Paddle's name of the device that moves are made on; ``None`` is NumPy.

        ``memory_bytes`` is what the worker may use, itself included. ``environment`` are variables by which the
        drivers of stores find their credentials.
        """
        os.environ.update(environment)
        self.source, self.target, self.place = source, target, place
        self.mover: Mover = HOST
        self.pool = WorkspacePool(memory_bytes - FOOTPRINT_BYTES)
        self.prepared = False
        self.figures = _Figures(number)

    def prepare(self) -> str | ReshardError:
        """Get ready, and say where this worker is; may be asked again to learn whether it lives."""
        return _refusals_returned(self._prepare)

    def _prepare(self) -> str:
        if self.place is not None and not self.prepared:
            self.mover = PaddleMover(self.place)
        self.prepared = True
        device = "cpu" if self.place is None else f"{self.place} of {os.environ.get('CUDA_VISIBLE_DEVICES')}"
        return f"process {os.getpid()} on {socket.gethostname()}, device {device}"

    def run(self, work: GroupWork) -> GroupReport | ReshardError:
        """A whole group."""
        with self.figures.busy():
            report = _refusals_returned(self._run, work)
        if isinstance(report, ReshardError):
            return report
        return self.figures.told_with(report, report.read_bytes)

    def _run(self, work: GroupWork) -> GroupReport:
        if self.place is not None:
            return run_group(work, self.source, self.target, self.mover)
        with self.pool.workspace(work) as space:
            return run_group(work, self.source, self.target, space)

    def load(self, path: str, start: int, stop: int) -> Buffer | ReshardError:
        """One band, to be shared as an object."""
        self.pool.clear()  # objects take the place of workspaces
        with self.figures.busy():
            band = _refusals_returned(load_band, self.source, path, start, stop)
        self.figures.add_read(0 if isinstance(band, ReshardError) else len(band))
        return band

    def finish(self, share: GroupWork, *bands: Buffer | ReshardError) -> GroupReport | ReshardError:
        """One worker's share of a group whose bands others may have loaded."""
        loaded: list[Buffer] = []
        for band in bands:
            if isinstance(band, ReshardError):
                return band
            loaded.append(band)
        self.pool.clear()
        with self.figures.busy():
            report = _refusals_returned(finish_group, share, loaded, self.target, self.mover)
        if isinstance(report, ReshardError):
            return report
        return self.figures.told_with(report)


class WorkspacePool:
    """Workspaces for groups that run side by side: one that does not fit waits until another has ended."""

    def __init__(self, budget_bytes: int) -> None:
        self.spaces = Workspaces(budget_bytes)
        self.turn = threading.Condition()

    @contextlib.contextmanager
    def workspace(self, work: GroupWork) -> Iterator[Workspace]:
        """Memory for one group."""
        with self.turn:
            while (space := self.spaces.take(work.peak_bytes, work.label)) is None:
                self.turn.wait()
        try:
            yield space
        finally:
            with self.turn:
                self.spaces.give_back(space)
                self.turn.notify_all()

    def clear(self) -> None:
        """Give memory back that nobody uses."""
        with self.turn:
            self.spaces.clear()


def _refusals_returned(do: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R | ReshardError:
    try:
        return do(*args, **kwargs)
    except ReshardError as error:
        if may_go_well_elsewhere(error):
            raise
        return error.with_traceback(None)


class _Figures:
    """The work of one worker: sent to the driver with each report, and to Ray's metrics endpoint."""

    def __init__(self, number: int) -> None:
        self.nothing = WorkerFigures(number, socket.gethostname())
        self.since, self.counted = self.nothing, count_retries()
        self.metrics = _Metrics(number)
        self.alone = threading.Lock()
        self.calls = 0
        """Calls in progress."""
        self.begun = 0.0
        """Start of the time worked that has not been reported yet."""

    @contextlib.contextmanager
    def busy(self) -> Iterator[None]:
        """Something is being done; calls side by side are busy once."""
        with self.alone:
            if self.calls == 0:
                self.begun = time.monotonic()
            self.calls += 1
        try:
            yield
        finally:
            with self.alone:
                self.calls -= 1
                now = time.monotonic()
                self._add(replace(self.nothing, busy_seconds=now - self.begun))
                self.begun = now

    def add_read(self, nbytes: int) -> None:
        """A call has read so many bytes of the source."""
        with self.alone:
            self._add(replace(self.nothing, read_bytes=nbytes))

    def told_with(self, report: GroupReport, read_bytes: int = 0) -> GroupReport:
        """The report of a group, with the figures since the last report; ``read_bytes`` were read for it."""
        with self.alone:
            did = replace(self.nothing, groups=1, read_bytes=read_bytes, written_bytes=report.written_bytes)
            self._add(did)
            told, self.since = self.since, self.nothing
        return replace(report, figures=(told,))

    def _add(self, did: WorkerFigures) -> None:
        counted = count_retries()
        did = replace(did, retries=dict(counted - self.counted))
        self.counted = counted
        (self.since,) = add_figures((self.since, did))
        self.metrics.add(did)


class _Metrics:
    """Figures of one worker for Ray's metrics endpoint; they are never a reason to fail."""

    def __init__(self, number: int) -> None:
        self.counters: dict[str, Any] = {}
        with contextlib.suppress(Exception):
            from ray.util.metrics import Counter

            for name, what, labels in (
                ("groups", "groups that this worker ran, or had a share in", ()),
                ("read_bytes", "bytes read from the source", ()),
                ("written_bytes", "bytes written to the target", ()),
                ("busy_seconds", "seconds in which this worker did not wait for work", ()),
                ("retries", "requests to a store that were repeated", ("failure",)),
            ):
                counter = Counter(
                    f"paddle_reshard_{name}_total", f"paddle-reshard: {what}", ("worker", *labels)
                )
                counter.set_default_tags({"worker": str(number)})
                self.counters[name] = counter

    def add(self, did: WorkerFigures) -> None:
        """Count what a call did."""
        with contextlib.suppress(Exception):
            for name in ("groups", "read_bytes", "written_bytes", "busy_seconds"):
                if amount := getattr(did, name):
                    self.counters[name].inc(amount)
            for failure, times in did.retries.items():
                self.counters["retries"].inc(times, {"failure": failure})
