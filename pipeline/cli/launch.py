"""The command ``launch``."""

from __future__ import annotations

from typing import Any

import click

import paddle_reshard
from paddle_reshard.pipeline.cli.json_output import launch_data
from paddle_reshard.pipeline.cli.observers import waiting
from paddle_reshard.pipeline.cli.options import LOCATION, declared, given, inspect_options, json_option
from paddle_reshard.pipeline.cli.output import answer, print_facts


@click.command()
@click.argument("checkpoint", type=LOCATION, metavar="DST")
@declared("to", help="Topology of the job, if the format records none, or to add dp: tp=2,pp=2.")
@inspect_options
@json_option
@click.pass_context
def launch(context: click.Context, /, checkpoint: str, as_json: bool, **_: Any) -> None:
    """Tell how to start a job from a checkpoint.

    Nothing is started.
    """
    with waiting("reading headers", as_json) as observe:
        found = paddle_reshard.launch(checkpoint, observe=observe, **given(context))
    answer(launch_data(found), as_json, False, lambda: print_facts(found.facts()))
