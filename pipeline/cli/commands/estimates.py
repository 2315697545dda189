"""The options ``--workers`` and ``--rates`` of ``plan``: how long the plan would take on so many workers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from paddle_reshard.pipeline.cli.options import all_of, execution_option
from paddle_reshard.pipeline.cli.terminal import print_table
from paddle_reshard.pipeline.core.shown import Bytes, Count

if TYPE_CHECKING:
    from paddle_reshard.pipeline.planning.simulate import Rates, Simulation

HEADINGS = ("workers", "time", "speed-up", "busy", "most read", "most written", "peak of a worker")


def _counts(context: click.Context, option: click.Parameter, text: str | None) -> tuple[int, ...]:
    if text is None:
        return ()
    try:
        counts = tuple(map(int, text.split(",")))
    except ValueError as error:
        raise click.BadParameter(f"{text!r} is not a list of whole numbers") from error
    if min(counts) < 1:
        raise click.BadParameter(f"{min(counts)} workers cannot run a plan")
    return counts


def _rates(context: click.Context, option: click.Parameter, text: str | None) -> Rates | None:
    if text is None:
        return None
    from paddle_reshard.pipeline.planning.simulate import parse_rates

    return parse_rates(text)


estimate_options = all_of(
    execution_option(
        "--workers",
        "worker_counts",
        metavar="N,…",
        callback=_counts,
        help="Estimate how long the plan takes on these numbers of workers, as in 1,8,64.",
    ),
    execution_option(
        "--rates",
        metavar="NAME=RATE,…",
        callback=_rates,
        help="Bytes per second for --workers: read and write of a worker, copy of each copy made by the storage; "
        "total-read and total-write, of the stores for all workers together; and latency, seconds until a store begins "
        "to respond. Default: 1GB each, no limit for all together, 0.02 s.",
    ),
)


def print_estimates(found: Sequence[Simulation]) -> None:
    """Print a line for each number of workers, below the facts of the plan."""
    if not found:
        return
    slowest = max(one.seconds for one in found)
    click.echo()
    print_table(
        HEADINGS,
        [
            (
                Count(one.workers),
                _duration(one.seconds),
                f"{slowest / one.seconds if one.seconds else 1.0:.1f}",
                f"{one.busy_share:.0%}",
                Bytes(one.most_read_bytes),
                Bytes(one.most_written_bytes),
                Bytes(one.peak_bytes),
            )
            for one in found
        ],
    )


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.3g} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{seconds / 3600:.1f} h"
