"""The command ``inspect``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

import paddle_reshard
from paddle_reshard.pipeline.cli.command import answer, running
from paddle_reshard.pipeline.cli.options import LOCATION, given, inspect_options
from paddle_reshard.pipeline.cli.terminal import print_facts, print_table
from paddle_reshard.pipeline.core.shown import Count

if TYPE_CHECKING:
    from paddle_reshard.pipeline.examine.inspection import Inspection


@click.command()
@click.argument("source", type=LOCATION, metavar="SRC")
@click.option("--tensors", is_flag=True, help="List every tensor with the rule that matched it.")
@inspect_options
@click.pass_context
def inspect(context: click.Context, /, source: str, tensors: bool, **_: Any) -> None:
    """Describe a checkpoint from its metadata."""
    with running("reading headers") as run:
        found = paddle_reshard.inspect(source, observe=run, **given(context))
    answer(found, lambda: _show_inspection(found, tensors))


def _show_inspection(found: Inspection, tensors: bool) -> None:
    print_facts(found.facts())
    click.echo()
    states = [
        (
            state.state,
            "/".join(state.dtypes),
            Count(state.tensors),
            Count(state.elements),
            f"{state.implied} as the cast of their master weight" if state.implied else "yes",
        )
        for state in found.states
    ]
    print_table(("state", "dtype", "tensors", "elements", "stored"), states)
    if not tensors:
        return
    click.echo()
    if found.stored:
        arrays = [(array.file, array.key, str(list(array.shape)), array.dtype) for array in found.stored]
        print_table(("file", "array", "shape", "dtype"), arrays)
        click.echo()
    if found.stored and not found.tensors:
        return
    rows = []
    for tensor in found.tensors:
        cut = "replicated" if tensor.rule.split is None else f"tp cuts dim {tensor.rule.split}"
        fused = f", {tensor.rule.fused_parts} fused parts" if tensor.rule.fused_parts > 1 else ""
        rows.append((tensor.key, str(list(tensor.global_shape)), tensor.dtype.name, cut + fused))
    print_table(("tensor", "shape", "dtype", "rule"), rows)
