"""The command ``simulate``: how long a saved plan would take on many workers."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from paddle_reshard.pipeline.cli.output import print_object, print_table
from paddle_reshard.pipeline.cli.reporting import report_option, reporting
from paddle_reshard.pipeline.core.shown import Bytes, Count
from paddle_reshard.pipeline.core.units import parse_size

if TYPE_CHECKING:
    from paddle_reshard.pipeline.planning.simulate import Simulation

HEADINGS = ("workers", "time", "speed-up", "busy", "most read", "most written", "peak of a worker")


@click.command()
@click.argument("plan", type=click.Path(exists=True, dir_okay=False, path_type=Path), metavar="PLAN")
@click.option(
    "--workers",
    default="1,8,64,1024",
    show_default=True,
    metavar="N,…",
    help="Numbers of workers to simulate.",
)
@click.option(
    "--read-rate", metavar="SIZE", default="1GB", show_default=True, help="Bytes per second read by a worker."
)
@click.option(
    "--write-rate",
    metavar="SIZE",
    default="1GB",
    show_default=True,
    help="Bytes per second written by a worker.",
)
@click.option(
    "--total-read-rate",
    metavar="SIZE",
    help="Bytes per second of the source's store for all workers together. Default: no limit.",
)
@click.option(
    "--total-write-rate",
    metavar="SIZE",
    help="Bytes per second of the target's store for all workers together. Default: no limit.",
)
@click.option(
    "--copy-rate",
    metavar="SIZE",
    default="1GB",
    show_default=True,
    help="Bytes per second of each copy made by the storage.",
)
@click.option(
    "--latency",
    type=click.FloatRange(0),
    default=0.02,
    show_default=True,
    metavar="SECONDS",
    help="Time until a store begins to respond.",
)
@report_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def simulate(
    plan: Path,
    workers: str,
    latency: float,
    report_path: Path | None,
    as_json: bool,
    **rates: str | None,
) -> None:
    """Estimate how long a plan takes on many workers. PLAN is a file written by plan --save."""
    from paddle_reshard.pipeline.convert.plan_file import load_plan
    from paddle_reshard.pipeline.core.events import ignore_events
    from paddle_reshard.pipeline.planning.simulate import Rates
    from paddle_reshard.pipeline.planning.simulate import simulate as estimate

    chosen = Rates(
        read_bytes_per_second=_rate(rates["read_rate"]),
        write_bytes_per_second=_rate(rates["write_rate"]),
        total_read_bytes_per_second=_rate(rates["total_read_rate"]),
        total_write_bytes_per_second=_rate(rates["total_write_rate"]),
        copy_bytes_per_second=_rate(rates["copy_rate"]),
        request_seconds=latency,
    )
    with reporting(report_path, ignore_events) as page:
        loaded = load_plan(plan)
        results = estimate(loaded, _counts(workers), chosen)
        page.simulated(plan.name, loaded, results)
    if as_json:
        print_object("simulate", {"simulations": [asdict(result) for result in results]})
    else:
        print_table(HEADINGS, _rows(results))


def _rate(text: str | None) -> float:
    return float("inf") if text is None else float(parse_size(text))


def _counts(text: str) -> list[int]:
    try:
        return [int(count) for count in text.split(",")]
    except ValueError as error:
        raise click.BadParameter(
            f"{text!r} is not a list of whole numbers", param_hint="--workers"
        ) from error


def _rows(found: list[Simulation]) -> list[tuple[str | int, ...]]:
    slowest: Any = max(found, key=lambda one: one.seconds)
    return [
        (
            Count(one.workers),
            _duration(one.seconds),
            f"{slowest.seconds / one.seconds if one.seconds else 1.0:.1f}",
            f"{one.busy_share:.0%}",
            Bytes(one.most_read_bytes),
            Bytes(one.most_written_bytes),
            Bytes(one.peak_bytes),
        )
        for one in found
    ]


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.3g} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{seconds / 3600:.1f} h"
