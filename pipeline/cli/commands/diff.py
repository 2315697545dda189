"""The command ``diff``, with the exit status of ``cmp`` and ``diff``: 0 agree, 1 differ, 2 trouble."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import click

import paddle_reshard
from paddle_reshard.pipeline.cli.command import answer, running, say_differences
from paddle_reshard.pipeline.cli.options import (
    LOCATION,
    answer_options,
    compare_options,
    declared,
    given,
    report_option,
)
from paddle_reshard.pipeline.cli.terminal import print_table, say
from paddle_reshard.pipeline.core.shown import SHOWN_DIFFERENCES

if TYPE_CHECKING:
    from paddle_reshard.pipeline.examine.diff import DifferenceSummary, DiffReport

DIFFERENT = 1
"""Exit status after a comparison that found differences outside of the tolerance."""


@click.command()
@click.argument("a", type=LOCATION, metavar="A")
@click.argument("b", type=LOCATION, metavar="B")
@click.option(
    "--states",
    metavar="LIST",
    help="Compare only these states, comma-separated. master_weight:param compares master weights of A with "
    "parameters of B, ema_master_weight:master_weight an average with what it was made of.",
)
@click.option(
    "--atol", type=click.FloatRange(0), default=0.0, help="Allow differences up to this.", show_default=True
)
@click.option(
    "--rtol",
    type=click.FloatRange(0),
    default=0.0,
    help="Allow differences up to this share of the value in B, in addition to --atol.",
    show_default=True,
)
@declared("memory")
@compare_options
@report_option
@answer_options
@click.pass_context
def diff(
    context: click.Context,
    /,
    a: str,
    b: str,
    states: str | None,
    atol: float,
    rtol: float,
    **_: Any,
) -> None:
    """Measure how far two checkpoints are apart. Their topologies, formats and dtypes may differ.

    Tensors outside the tolerance come first, then those with the largest relative difference. Units in the last place
    (ulps) are those of the coarser dtype: 0 means that the finer values are rounded to the other.

    Exit status: 0 all tensors agree within --atol and --rtol, 1 they do not, 2 the comparison could not be made.
    """
    chosen = None if states is None else [state.strip() for state in states.split(",")]
    with running("reading headers") as run:
        report = paddle_reshard.diff(a, b, states=chosen, atol=atol, rtol=rtol, observe=run, **given(context))
        run.show(report, a, b)
    answer(report, lambda: _show(report))
    sys.exit(0 if report else DIFFERENT)


def _show(report: DiffReport) -> None:
    shown = report.differing[:SHOWN_DIFFERENCES]
    if shown:
        rows = [
            (
                f"{found.key} ({found.state})",
                f"{found.largest:.3g}",
                f"{found.mean:.3g}",
                _in_ulps(found.ulps),
                f"{found.relative:.3g}",
                f"{found.changed_share:.2%}",
                *([f"{found.outside:,}"] if report.tolerance else []),
                f"{list(found.first)}: {found.values[0]:g}, {found.values[1]:g}",
            )
            for found in shown
        ]
        outside = [f"outside {report.tolerance}"] if report.tolerance else []
        print_table(("tensor", "largest", "mean", "ulps", "relative", "changed", *outside, "first"), rows)
    if len(report.differing) > len(shown):
        say(f"… and {len(report.differing) - len(shown)} more, listed with --json")
    for heading, summaries in (("state", report.by_state()), ("layer", report.by_layer())):
        if len(summaries) > 1:
            click.echo()
            print_table((heading, "tensors", "largest", "mean", "ulps"), list(map(_row, summaries)))
    say_differences(report.unmatched)
    say(report.verdict)


def _in_ulps(ulps: int) -> str:
    """Ulps in a table. Two small numbers of different signs are some 10⁹ apart, which tells nobody anything."""
    return f"{ulps:,}" if ulps < 1_000_000 else "over 1,000,000"


def _row(summary: DifferenceSummary) -> tuple[str, ...]:
    figures = f"{summary.largest:.3g}", f"{summary.mean:.3g}", _in_ulps(summary.ulps)
    return summary.name, str(summary.tensors), *figures
