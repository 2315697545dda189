"""The worker of a cluster. Ray makes an actor of this class, which is otherwise independent of Ray.

A ``ReshardError`` is returned, not raised, so that it arrives at the driver unchanged. An exception is a failed
attempt, which the driver may retry on a different worker; so are errors of the operating system that may be limited to
this machine.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple, ParamSpec, TypeVar

from paddle_reshard.clusters.container import check_memory_limit
from paddle_reshard.pipeline.core.errors import ReshardError, UsageError
from paddle_reshard.pipeline.core.shown import one_line
from paddle_reshard.pipeline.core.version import __version__
from paddle_reshard.pipeline.planning.plan import FOOTPRINT_BYTES
from paddle_reshard.pipeline.planning.work import GroupWork, WorkBatch
from paddle_reshard.storage.os_errors import may_succeed_elsewhere
from paddle_reshard.storage.remote.retry_counts import count_retries
from paddle_reshard.storage.store import ReadRange, WritePart
from paddle_reshard.tasks.compare_group import compare_group
from paddle_reshard.tasks.device import HOST, Buffer, PaddleMover
from paddle_reshard.tasks.figures import WorkerFigures, add_figures
from paddle_reshard.tasks.group import GroupReport, load_band
from paddle_reshard.tasks.run_group import finish_group, run_group
from paddle_reshard.tasks.workspace import Workspace, Workspaces

P = ParamSpec("P")
R = TypeVar("R")


class BatchAnswer(NamedTuple):
    """What a worker did with a batch, and why it stopped."""

    reports: list[GroupReport]
    """Of the groups that it finished, which are the first ones."""
    seconds: float
    """Time that the batch took."""
    failure: str = ""
    """Why the next group failed, if another worker may succeed."""
    refusal: ReshardError | None = None
    """Why the conversion cannot go on."""


class ReshardWorker:
    """Loads bands, moves boxes and writes parts.

    On the CPU several batches may run concurrently (:meth:`run`), so that some groups are read or written while others
    are moved; together they stay within the memory of the worker. All other calls are sequential, and a share of a
    group arrives only while no whole group runs.
    """

    def __init__(
        self,
        source: ReadRange,
        target: WritePart | None,
        device: str | None,
        number: int,
        memory_bytes: int,
        environment: Mapping[str, str],
        version: str = __version__,
    ) -> None:
        """Without a ``target``, groups are only compared.

        ``device`` is Paddle's name for the device that moves values; ``None`` for NumPy. ``memory_bytes`` is the budget
        of the worker, including its footprint. ``environment`` holds variables with which the drivers of stores find
        credentials. ``version`` is that of the package that planned the groups.
        """
        os.environ.update(environment)
        self.source, self.target, self.device = source, target, device
        self.mover = HOST
        self.memory_bytes, self.version = memory_bytes, version
        self.pool = WorkspacePool(memory_bytes - FOOTPRINT_BYTES)
        self.prepared = False
        self.figures = _Figures(number)

    def prepare(self) -> tuple[str, str] | ReshardError:
        """Get ready; returns the name of this worker in reports, and its process. Also serves as a ping."""
        return _errors_returned(self._prepare)

    def _prepare(self) -> tuple[str, str]:
        if not self.prepared:
            if self.version != __version__:
                raise UsageError(
                    f"the worker on {socket.gethostname()} has version {__version__} of paddle-reshard installed, the "
                    f"conversion was planned by version {self.version}; install the same version on all nodes, or use "
                    "paddle-reshard submit, which uploads it"
                )
            room_bytes = self.memory_bytes - FOOTPRINT_BYTES
            check_memory_limit(room_bytes, room_bytes, self.memory_bytes)
            if self.device is not None:
                self.mover = PaddleMover(self.device)
        self.prepared = True
        device = (
            "cpu" if self.device is None else f"{self.device} of {os.environ.get('CUDA_VISIBLE_DEVICES')}"
        )
        return self.figures.zero.name, f"process {os.getpid()}, device {device}"

    def run(self, batch: WorkBatch) -> BatchAnswer:
        """Run whole groups, one after the other, until one fails."""
        reports: list[GroupReport] = []
        failure, refusal, started = "", None, time.monotonic()
        with self.figures.busy():
            try:
                for work in batch:
                    began = time.monotonic()
                    report = _errors_returned(self._run, work)
                    if isinstance(report, ReshardError):
                        refusal = report
                        break
                    seconds = time.monotonic() - began
                    reports.append(replace(report, worker=self.figures.zero.name, seconds=seconds))
            except Exception as error:  # noqa: BLE001 -- whatever it is, the driver tries the group elsewhere
                failure = f"{type(error).__name__}: {one_line(error)}"
        if reports:
            self.figures.count(
                groups=len(reports),
                read_bytes=sum(report.read_bytes for report in reports),
                written_bytes=sum(report.written_bytes for report in reports),
            )
            reports[0] = replace(reports[0], figures=(self.figures.taken(),))
        return BatchAnswer(reports, time.monotonic() - started, failure, refusal)

    def _run(self, work: GroupWork) -> GroupReport:
        if self.target is None:
            with self.pool.workspace(work) as space:
                return compare_group(work, self.source, space)
        if self.device is not None:
            return run_group(work, self.source, self.target, self.mover)
        with self.pool.workspace(work) as space:
            return run_group(work, self.source, self.target, space)

    def load(self, path: str, start: int, stop: int) -> Buffer | ReshardError:
        """Load a band, to be shared as an object."""
        self.pool.clear()  # objects need the memory of workspaces
        with self.figures.busy():
            band = _errors_returned(load_band, self.source, path, start, stop)
        self.figures.count(read_bytes=0 if isinstance(band, ReshardError) else len(band))
        return band

    def finish(self, share: GroupWork, *bands: Buffer | ReshardError) -> GroupReport | ReshardError:
        """Run this worker's share of a group. Any worker may have loaded the bands."""
        loaded: list[Buffer] = []
        for band in bands:
            if isinstance(band, ReshardError):
                return band
            loaded.append(band)
        if self.target is None:
            raise TypeError("groups that are only compared are not shared")
        self.pool.clear()
        with self.figures.busy():
            report = _errors_returned(finish_group, share, loaded, self.target, self.mover)
        if isinstance(report, ReshardError):
            return report
        self.figures.count(groups=1, written_bytes=report.written_bytes)  # bytes are counted as they are read
        return replace(report, figures=(self.figures.taken(),))


class WorkspacePool:
    """Workspaces for concurrent groups: a group that does not fit waits until another group has ended."""

    def __init__(self, budget_bytes: int) -> None:
        self.spaces = Workspaces(budget_bytes)
        self.changed = threading.Condition()

    @contextlib.contextmanager
    def workspace(self, work: GroupWork) -> Iterator[Workspace]:
        """Memory for one group."""
        with self.changed:
            while (space := self.spaces.take(work.peak_bytes, work.label)) is None:
                self.changed.wait()
        try:
            yield space
        finally:
            with self.changed:
                self.spaces.give_back(space)
                self.changed.notify_all()

    def clear(self) -> None:
        """Release unused memory."""
        with self.changed:
            self.spaces.clear()


def _errors_returned(do: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R | ReshardError:
    try:
        return do(*args, **kwargs)
    except ReshardError as error:
        if may_succeed_elsewhere(error):
            raise
        return error.with_traceback(None)


class _Figures:
    """The work of one worker: sent to the driver with each report, and to Ray's metrics endpoint."""

    def __init__(self, number: int) -> None:
        self.zero = WorkerFigures(number, socket.gethostname())
        self.unreported, self.counted = self.zero, count_retries()
        self.metrics = _Metrics(number)
        self.lock = threading.Lock()
        self.calls = 0
        """Calls in progress."""
        self.started = 0.0
        """Start of the working time that has not been recorded yet."""

    @contextlib.contextmanager
    def busy(self) -> Iterator[None]:
        """Record the time of the block as busy; concurrent calls count once."""
        with self.lock:
            if self.calls == 0:
                self.started = time.monotonic()
            self.calls += 1
        try:
            yield
        finally:
            with self.lock:
                self.calls -= 1
                now = time.monotonic()
                self._add(replace(self.zero, busy_seconds=now - self.started))
                self.started = now

    def count(self, groups: int = 0, read_bytes: int = 0, written_bytes: int = 0) -> None:
        """Record work that was done."""
        with self.lock:
            self._add(replace(self.zero, groups=groups, read_bytes=read_bytes, written_bytes=written_bytes))

    def taken(self) -> WorkerFigures:
        """The figures since the last report."""
        with self.lock:
            figures, self.unreported = self.unreported, self.zero
        return figures

    def _add(self, work: WorkerFigures) -> None:
        counted = count_retries()
        work = replace(work, retries=dict(counted - self.counted))
        self.counted = counted
        (self.unreported,) = add_figures((self.unreported, work))
        self.metrics.add(work)


class _Metrics:
    """Figures of one worker for Ray's metrics endpoint. Failures here are ignored."""

    def __init__(self, number: int) -> None:
        self.counters: dict[str, Any] = {}
        with contextlib.suppress(Exception):
            from ray.util.metrics import Counter

            for name, what, labels in (
                ("groups", "groups that this worker ran, alone or shared", ()),
                ("read_bytes", "bytes read from the source", ()),
                ("written_bytes", "bytes written to the target", ()),
                ("busy_seconds", "seconds in which this worker did not wait for work", ()),
                ("retries", "retried requests to a store", ("failure",)),
            ):
                counter = Counter(
                    f"paddle_reshard_{name}_total", f"paddle-reshard: {what}", ("worker", *labels)
                )
                counter.set_default_tags({"worker": str(number)})
                self.counters[name] = counter

    def add(self, work: WorkerFigures) -> None:
        """Add the figures of a call."""
        with contextlib.suppress(Exception):
            for name in ("groups", "read_bytes", "written_bytes", "busy_seconds"):
                if amount := getattr(work, name):
                    self.counters[name].inc(amount)
            for failure, times in work.retries.items():
                self.counters["retries"].inc(times, {"failure": failure})
