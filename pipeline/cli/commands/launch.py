"""The command ``launch``."""

from __future__ import annotations

from typing import Any

import click

import paddle_reshard
from paddle_reshard.pipeline.cli.command import answer, running
from paddle_reshard.pipeline.cli.options import LOCATION, declared, given, inspect_options


@click.command()
@click.argument("checkpoint", type=LOCATION, metavar="DST")
@declared("to", help="Topology of the job, if the format records none, or to add dp: tp=2,pp=2.")
@inspect_options
@click.pass_context
def launch(context: click.Context, /, checkpoint: str, **_: Any) -> None:
    """Tell how to start a job from a checkpoint.

    Nothing is started.
    """
    with running("reading headers") as run:
        found = paddle_reshard.launch(checkpoint, observe=run, **given(context))
    answer(found)
