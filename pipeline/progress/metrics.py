"""``--metrics-port``: figures of a run for Prometheus, over HTTP."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import click

from paddle_reshard.pipeline.core.outcome import Outcome
from paddle_reshard.pipeline.core.run_state import RunState
from paddle_reshard.pipeline.progress.stream import Checked, Happening

if TYPE_CHECKING:
    from prometheus_client.core import Metric
    from prometheus_client.registry import Collector

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Address:
    """Where figures are served."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def read_address(text: str) -> Address:
    """A port of this machine that only its own programs reach, or ``HOST:PORT``.

    >>> read_address("9100")
    Address(host='127.0.0.1', port=9100)
    >>> read_address("[::]:9100")
    Address(host='::', port=9100)

    Raises
    ------
    click.BadParameter
        If it is neither.
    """
    host, colon, port = text.rpartition(":")
    if not port.isascii() or not port.isdigit() or int(port) > 0xFFFF or (colon and not host):
        raise click.BadParameter(f"{text!r} is neither a port nor HOST:PORT")
    return Address(host.strip("[]") or LOOPBACK, int(port))


class RunFigures:
    """Figures of one command: the state of the run at that moment."""

    def __init__(self, state: RunState) -> None:
        self.state = state

    def collect(self) -> Iterator[Metric]:
        """The figures, with the names that the workers of a Ray cluster use."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        workers = dict(self.state.workers)
        for name, what in (
            ("groups", "groups that this worker ended"),
            ("read_bytes", "bytes read from the source"),
            ("written_bytes", "bytes written to the target"),
            ("busy_seconds", "seconds in which this worker ran groups"),
        ):
            counter = CounterMetricFamily(
                f"paddle_reshard_{name}", f"paddle-reshard: {what}", labels=["worker"]
            )
            for worker, done in workers.items():
                counter.add_metric([worker], getattr(done, name))
            yield counter
        retries = CounterMetricFamily(
            "paddle_reshard_retries", "paddle-reshard: retried requests to a store", labels=["failure"]
        )
        for failure, times in self.state.retries().items():
            retries.add_metric([failure], times)
        yield retries
        for name, what, value in (
            ("step_done_bytes", "bytes of the current step that are done", self.state.done_bytes),
            ("step_bytes", "bytes of the current step", self.state.total_bytes),
            ("plan_done_groups", "groups of the current plan that are done", self.state.done_groups),
            ("plan_groups", "groups of the current plan", self.state.total_groups),
            ("budget_bytes", "memory budget of each worker", self.state.budget_bytes),
        ):
            if value is not None:
                yield GaugeMetricFamily(f"paddle_reshard_{name}", f"paddle-reshard: {what}", value)
        step = GaugeMetricFamily("paddle_reshard_step", "paddle-reshard: the current step", labels=["step"])
        if self.state.step:
            step.add_metric([self.state.step], 1)
        yield step


class CheckpointFigures:
    """Figures of a watcher: an observer that counts checkpoints."""

    def __init__(self) -> None:
        self.ended = {"converted": 0, "failed": 0, "refused": 0, "stale": 0}
        self.waiting = 0
        self.last_success: float | None = None

    def __call__(self, event: Happening) -> None:
        """Count how a conversion ended, or what waits."""
        if isinstance(event, Checked):
            self.waiting = list(event.results.values()).count("waiting")
        elif isinstance(event, Outcome) and event.event in self.ended:
            self.ended[event.event] += 1
            if event.event == "converted":
                self.last_success = event.at

    def collect(self) -> Iterator[Metric]:
        """The figures, since this watcher began."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        failed = sum(count for event, count in self.ended.items() if event != "converted")
        for name, what, count in (
            ("converted", "checkpoints that were converted", self.ended["converted"]),
            ("failed", "attempts that failed or were refused, and stale checkpoints", failed),
        ):
            yield CounterMetricFamily(
                f"paddle_reshard_checkpoints_{name}", f"paddle-reshard: {what}", value=count
            )
        yield GaugeMetricFamily(
            "paddle_reshard_checkpoints_waiting", "paddle-reshard: checkpoints that wait", self.waiting
        )
        if self.last_success is not None:
            yield GaugeMetricFamily(
                "paddle_reshard_last_success_timestamp_seconds",
                "paddle-reshard: when a checkpoint was last converted, in seconds since the epoch",
                self.last_success,
            )


@contextmanager
def serving(figures: Collector, address: Address) -> Iterator[int]:
    """Serve figures, and those of this process, until the block ends. Yields the port."""
    from paddle_reshard.pipeline.core.errors import UsageError
    from paddle_reshard.pipeline.core.extras import require

    require("prometheus_client", "metrics", "--metrics-port")
    from prometheus_client import CollectorRegistry, ProcessCollector, start_http_server

    registry = CollectorRegistry()
    registry.register(figures)
    ProcessCollector(registry=registry)
    try:
        server, thread = start_http_server(address.port, address.host, registry)
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror
        raise UsageError(f"--metrics-port {address.host}:{address.port}: {reason}") from error
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
