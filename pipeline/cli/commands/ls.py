"""The command ``ls``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

import paddle_reshard
from paddle_reshard.pipeline.cli.command import answer, running
from paddle_reshard.pipeline.cli.options import LOCATION, given, inspect_options
from paddle_reshard.pipeline.cli.terminal import on_terminal, print_table
from paddle_reshard.pipeline.core.errors import ListingError

if TYPE_CHECKING:
    from paddle_reshard.pipeline.examine.overview import Run


@click.command()
@click.argument("run", type=LOCATION, metavar="RUN_DIR")
@click.option(
    "--targets",
    multiple=True,
    metavar="DST_ROOT",
    help="A folder with conversions, such as that of watch: tells which checkpoints have been converted.",
)
@inspect_options
@click.pass_context
def ls(context: click.Context, /, run: str, targets: tuple[str, ...], **_: Any) -> None:
    """List the checkpoints of a run.

    What each holds, and whether it is complete.
    """
    with running("reading headers") as running_now:
        found = paddle_reshard.ls(run, targets=targets, observe=running_now, **given(context))
    if not found.checkpoints:
        raise ListingError(f"{found.path}: no checkpoint-<step> folders here; give the folder of a run")
    answer(found, lambda: _show(found))


def _show(found: Run) -> None:
    """Print all for programs, and for people what fits a line; ``inspect`` tells them the rest."""
    from paddle_reshard.pipeline.examine.overview import HEADINGS, HEADINGS_IN_SHORT

    if on_terminal():
        print_table(HEADINGS_IN_SHORT, found.rows_in_short())
    else:
        print_table(HEADINGS, found.rows())
