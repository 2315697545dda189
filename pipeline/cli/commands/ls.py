"""The command ``ls``."""

from __future__ import annotations

from typing import Any

import click

import paddle_reshard
from paddle_reshard.pipeline.cli.command import answer, running
from paddle_reshard.pipeline.cli.options import LOCATION, given, inspect_options
from paddle_reshard.pipeline.cli.terminal import print_table
from paddle_reshard.pipeline.core.errors import ListingError


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
    from paddle_reshard.pipeline.examine.overview import HEADINGS

    with running("reading headers") as running_now:
        found = paddle_reshard.ls(run, targets=targets, observe=running_now, **given(context))
    if not found.checkpoints:
        raise ListingError(f"{found.path}: no checkpoint-<step> folders here; give the folder of a run")
    answer(found, lambda: print_table(HEADINGS, found.rows()))
