"""What one worker of a cluster does. Ray makes an actor of this class; nothing else of Ray is known to it.

A refusal (``ReshardError``) is returned, not raised: so it arrives at the driver whole, with its own class and
text. Whatever is raised is a failed attempt, and the driver may try again elsewhere.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from paddle_reshard.pipeline.errors import ReshardError
from paddle_reshard.pipeline.planning.work import GroupWork
from paddle_reshard.storage.store import ReadRange, WritePart
from paddle_reshard.tasks.device import HOST, Buffer, Mover, PaddleMover
from paddle_reshard.tasks.run_group import GroupReport, finish_group, load_band, run_group

P = ParamSpec("P")
R = TypeVar("R")


class ReshardWorker:
    """Loads bands, moves boxes and writes parts, one call after another.

    Its memory is that of one call: a whole group, or one band, or one part.
    """

    def __init__(self, source: ReadRange, target: WritePart, place: str | None) -> None:
        """``place`` is Paddle's name of the device that moves are made on; ``None`` is NumPy."""
        self.source, self.target, self.place = source, target, place
        self.mover: Mover = HOST
        self.prepared = False
        self.counters = _Counters()

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
        report = _refusals_returned(run_group, work, self.source, self.target, self.mover)
        if isinstance(report, GroupReport):
            self.counters.add(report.read_bytes, report.written_bytes, groups=1)
        return report

    def load(self, path: str, start: int, stop: int) -> Buffer | ReshardError:
        """One band, to be shared as an object."""
        band = _refusals_returned(load_band, self.source, path, start, stop)
        self.counters.add(0 if isinstance(band, ReshardError) else len(band), 0)
        return band

    def finish(self, share: GroupWork, *bands: Buffer | ReshardError) -> GroupReport | ReshardError:
        """One worker's share of a group whose bands others may have loaded."""
        loaded: list[Buffer] = []
        for band in bands:
            if isinstance(band, ReshardError):
                return band
            loaded.append(band)
        report = _refusals_returned(finish_group, share, loaded, self.target, self.mover)
        if isinstance(report, GroupReport):
            self.counters.add(0, report.written_bytes)
        return report


def _refusals_returned(do: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R | ReshardError:
    try:
        return do(*args, **kwargs)
    except ReshardError as error:
        return error.with_traceback(None)


class _Counters:
    """Figures of one worker for Ray's metrics endpoint; they are never a reason to fail."""

    def __init__(self) -> None:
        self.counters: dict[str, Any] = {}
        with contextlib.suppress(Exception):
            from ray.util.metrics import Counter

            self.counters = {
                name: Counter(f"paddle_reshard_{name}_total", description=f"paddle-reshard: {what}")
                for name, what in (
                    ("read_bytes", "bytes read from the source"),
                    ("written_bytes", "bytes written to the target"),
                    ("groups", "groups that one worker ran from end to end"),
                )
            }

    def add(self, read_bytes: int, written_bytes: int, groups: int = 0) -> None:
        """Count what a call did."""
        with contextlib.suppress(Exception):
            amounts = {"read_bytes": read_bytes, "written_bytes": written_bytes, "groups": groups}
            for name, amount in amounts.items():
                if amount:
                    self.counters[name].inc(amount)
