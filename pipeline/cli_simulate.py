"""The command ``simulate``: what a saved plan would take on many workers."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from paddle_reshard.pipeline.options import parse_size
from paddle_reshard.pipeline.terminal import console

if TYPE_CHECKING:
    from rich.table import Table

    from paddle_reshard.pipeline.planning.simulate import Simulation

Reporting = Callable[[bool], AbstractContextManager[None]]
"""Turns errors into one sentence and an exit status."""


def simulate_command(reporting: Reporting, size: Callable[[int], str]) -> click.Command:
    """The command; ``size`` spells bytes for people."""

    @click.command("simulate")
    @click.argument("plan", type=click.Path(exists=True, dir_okay=False, path_type=Path), metavar="PLAN")
    @click.option(
        "--workers", default="1,8,64,1024", show_default=True, metavar="N,…", help="Numbers of workers."
    )
    @click.option(
        "--read-rate", default="1GB", show_default=True, help="Bytes per second that a worker reads."
    )
    @click.option(
        "--write-rate", default="1GB", show_default=True, help="Bytes per second that a worker writes."
    )
    @click.option(
        "--total-read-rate", help="Of the source's store for all workers together. Default: no limit."
    )
    @click.option(
        "--total-write-rate", help="Of the target's store for all workers together. Default: no limit."
    )
    @click.option(
        "--copy-rate", default="1GB", show_default=True, help="Of each copy that the storage makes by itself."
    )
    @click.option(
        "--latency",
        type=click.FloatRange(0),
        default=0.02,
        show_default=True,
        metavar="SECONDS",
        help="Until a store begins to answer.",
    )
    @click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
    def command(plan: Path, workers: str, latency: float, as_json: bool, **rates: str | None) -> None:
        """Estimate how long a plan takes on many workers. PLAN is a file that plan --save made; nothing is moved."""
        with reporting(as_json):
            from paddle_reshard.pipeline.planning.simulate import Rates, simulate
            from paddle_reshard.storage.plan_file import load_plan

            chosen = Rates(
                read_bytes_per_second=_rate(rates["read_rate"]),
                write_bytes_per_second=_rate(rates["write_rate"]),
                total_read_bytes_per_second=_rate(rates["total_read_rate"]),
                total_write_bytes_per_second=_rate(rates["total_write_rate"]),
                copy_bytes_per_second=_rate(rates["copy_rate"]),
                request_seconds=latency,
            )
            found = simulate(load_plan(plan), _counts(workers), chosen)
        if as_json:
            click.echo(json.dumps({"simulations": [asdict(one) for one in found]}))
        else:
            console(width=120).print(_table(found, size))

    return command


def _rate(text: str | None) -> float:
    return float("inf") if text is None else float(parse_size(text))


def _counts(text: str) -> list[int]:
    try:
        return [int(count) for count in text.split(",")]
    except ValueError as error:
        raise click.BadParameter(
            f"{text!r} is not a list of whole numbers", param_hint="--workers"
        ) from error


def _table(found: list[Simulation], size: Callable[[int], str]) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("workers", "time", "speed-up", "busy", "most read", "most written", "peak of a worker"):
        table.add_column(heading, justify="right")
    slowest: Any = max(found, key=lambda one: one.seconds)
    for one in found:
        gain = slowest.seconds / one.seconds if one.seconds else 1.0
        table.add_row(
            f"{one.workers:,}",
            _duration(one.seconds),
            f"{gain:.1f}",
            f"{one.busy_share:.0%}",
            size(one.most_read_bytes),
            size(one.most_written_bytes),
            size(one.peak_bytes),
        )
    return table


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.3g} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{seconds / 3600:.1f} h"
