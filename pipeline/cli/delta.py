"""The commands ``delta`` and ``apply``."""

from __future__ import annotations

from typing import Any

import click

import paddle_reshard
from paddle_reshard.pipeline.cli.json_output import apply_data, delta_data
from paddle_reshard.pipeline.cli.observers import observing
from paddle_reshard.pipeline.cli.options import (
    LOCATION,
    all_of,
    declared,
    given,
    json_option,
    progress_option,
    quiet_option,
)
from paddle_reshard.pipeline.cli.output import answer, print_facts

_delta_options = all_of(
    declared("memory", help="Memory budget of this process."),
    declared("overwrite", help="Replace an existing checkpoint or delta at the target."),
    declared("resume", help="Continue an interrupted run of the same command, if there is one."),
    declared(
        "take_over",
        help="Resume a run that has ended on another machine, without waiting for its lock to expire.",
    ),
    declared("no_space_check"),
    declared("allow_links", help="Follow links that lead out of a folder that is read."),
    declared("storage_options"),
    declared("allow_scheme"),
    declared("source_storage_options", help="The same for both inputs only; replaces --storage-options."),
    declared("target_storage_options"),
    json_option,
    quiet_option,
    progress_option,
)


@click.command()
@click.argument("old", type=LOCATION, metavar="OLD")
@click.argument("new", type=LOCATION, metavar="NEW")
@click.argument("target", type=LOCATION, metavar="DST")
@_delta_options
@click.pass_context
def delta(
    context: click.Context, /, old: str, new: str, target: str, as_json: bool, quiet: bool, **_: Any
) -> None:
    """Store the difference between two checkpoints of a model.

    The apply command recreates NEW from OLD and DST.
    """
    with observing(quiet or as_json) as observe:
        report = paddle_reshard.delta(old, new, target, observe=observe, **given(context))
    answer(delta_data(report), as_json, quiet, lambda: print_facts(report.facts()))


@click.command()
@click.argument("old", type=LOCATION, metavar="OLD")
@click.argument("changes", type=LOCATION, metavar="DELTA")
@click.argument("target", type=LOCATION, metavar="DST")
@_delta_options
@click.pass_context
def apply(
    context: click.Context, /, old: str, changes: str, target: str, as_json: bool, quiet: bool, **_: Any
) -> None:
    """Recreate a checkpoint from an older one and a delta.

    Byte for byte; OLD must be the checkpoint that DELTA was made from. The target appears complete or not at all.
    """
    with observing(quiet or as_json) as observe:
        report = paddle_reshard.apply_delta(old, changes, target, observe=observe, **given(context))
    answer(apply_data(report), as_json, quiet, lambda: print_facts(report.facts()))
