"""What one worker of a cluster does. Ray makes an actor of this class; nothing else of Ray is known to it.

A refusal (``ReshardError``) is returned, not raised: so it arrives at the driver whole, with its own class and
text. Whatever is raised is a failed attempt, and the driver may try again elsewhere.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, ParamSpec, TypeVar

from paddle_reshard.pipeline.errors import ReshardError
from paddle_reshard.pipeline.planning.work import GroupWork
from paddle_reshard.storage.retry_counts import count_retries
from paddle_reshard.storage.store import ReadRange, WritePart
from paddle_reshard.tasks.device import HOST, Buffer, Mover, PaddleMover
from paddle_reshard.tasks.figures import WorkerFigures, add_figures
from paddle_reshard.tasks.run_group import GroupReport, finish_group, load_band, run_group
from paddle_reshard.tasks.workspace import Workspace

P = ParamSpec("P")
R = TypeVar("R")


class ReshardWorker:
    """Loads bands, moves boxes and writes parts, one call after another.

    Its memory is that of one call, a whole group or a share of one. Between whole groups it is kept.
    """

    def __init__(
        self,
        source: ReadRange,
        target: WritePart,
        place: str | None,
        number: int,
        environment: Mapping[str, str],
    ) -> None:
        """``place`` is Paddle's name of the device that moves are made on; ``None`` is NumPy.

        ``environment`` are variables by which the drivers of stores find their credentials.
        """
        os.environ.update(environment)
        self.source, self.target, self.place = source, target, place
        self.mover: Mover = HOST
        self.space = Workspace(0)
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
        begun = time.monotonic()
        report = _refusals_returned(run_group, work, self.source, self.target, self._mover_for(work))
        if isinstance(report, ReshardError):
            return report
        self.figures.add(begun, 1, report.read_bytes, report.written_bytes)
        return replace(report, figures=(self.figures.tell(),))

    def _mover_for(self, work: GroupWork) -> Mover:
        if self.place is not None:
            return self.mover
        if self.space.capacity_bytes < work.peak_bytes:
            self.space = Workspace(0)  # given back before more is taken
            self.space = Workspace(work.peak_bytes)
        self.space.clear()
        return self.space

    def load(self, path: str, start: int, stop: int) -> Buffer | ReshardError:
        """One band, to be shared as an object."""
        begun = time.monotonic()
        self.space = Workspace(0)  # objects take its place
        band = _refusals_returned(load_band, self.source, path, start, stop)
        self.figures.add(begun, read_bytes=0 if isinstance(band, ReshardError) else len(band))
        return band

    def finish(self, share: GroupWork, *bands: Buffer | ReshardError) -> GroupReport | ReshardError:
        """One worker's share of a group whose bands others may have loaded."""
        loaded: list[Buffer] = []
        for band in bands:
            if isinstance(band, ReshardError):
                return band
            loaded.append(band)
        begun = time.monotonic()
        self.space = Workspace(0)
        report = _refusals_returned(finish_group, share, loaded, self.target, self.mover)
        if isinstance(report, ReshardError):
            return report
        self.figures.add(begun, 1, written_bytes=report.written_bytes)
        return replace(report, figures=(self.figures.tell(),))


def _refusals_returned(do: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R | ReshardError:
    try:
        return do(*args, **kwargs)
    except ReshardError as error:
        return error.with_traceback(None)


class _Figures:
    """What one worker did: told to the driver with each report, and to Ray's metrics endpoint."""

    def __init__(self, number: int) -> None:
        self.nothing = WorkerFigures(number, socket.gethostname())
        self.since, self.counted = self.nothing, count_retries()
        self.metrics = _Metrics(number)

    def add(self, begun: float, groups: int = 0, read_bytes: int = 0, written_bytes: int = 0) -> None:
        """A call that began at ``begun`` (``time.monotonic``) has done this."""
        counted = count_retries()
        did = replace(
            self.nothing,
            groups=groups,
            read_bytes=read_bytes,
            written_bytes=written_bytes,
            busy_seconds=time.monotonic() - begun,
            retries=dict(counted - self.counted),
        )
        self.counted = counted
        (self.since,) = add_figures((self.since, did))
        self.metrics.add(did)

    def tell(self) -> WorkerFigures:
        """What was done since this was last asked."""
        told, self.since = self.since, self.nothing
        return told


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
