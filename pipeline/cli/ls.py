"""The command ``ls``."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import click

import paddle_reshard
from paddle_reshard.pipeline.cli.observers import waiting
from paddle_reshard.pipeline.cli.options import LOCATION, given, inspect_options, json_option
from paddle_reshard.pipeline.cli.output import answer, print_table
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
@json_option
@click.pass_context
def ls(context: click.Context, /, run: str, targets: tuple[str, ...], as_json: bool, **_: Any) -> None:
    """List the checkpoints of a run.

    What each holds, and whether it is complete.
    """
    from paddle_reshard.pipeline.watch.overview import HEADINGS

    with waiting("reading headers", as_json) as observe:
        found = paddle_reshard.checkpoints(run, targets=targets, observe=observe, **given(context))
    if not found.checkpoints:
        raise ListingError(f"{found.path}: no checkpoint-<step> folders here; give the folder of a run")
    answer(asdict(found), as_json, False, lambda: print_table(HEADINGS, found.rows()))
