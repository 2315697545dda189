"""``--metrics-port``: figures of a watcher for Prometheus, over HTTP."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import click

from paddle_reshard.pipeline.core.outcome import Outcome
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
