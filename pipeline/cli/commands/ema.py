"""The command ``ema``: the average of a series of checkpoints."""

from __future__ import annotations

from typing import Any

import click

import paddle_reshard
from paddle_reshard.pipeline.cli.command import answer, next_of, running
from paddle_reshard.pipeline.cli.options import (
    LOCATION,
    SectionedCommand,
    given,
    report_option,
    run_options,
    target_options,
)
from paddle_reshard.pipeline.cli.terminal import print_facts
from paddle_reshard.pipeline.core.errors import UsageError


@click.command(
    cls=SectionedCommand,
    examples=(
        "run-7/checkpoint-10 run-7/checkpoint-20 averaged --uniform --to tp=2",
        "run-7/checkpoint-10 run-7/checkpoint-20 model --decay 0.9 --format huggingface",
    ),
)
@click.argument("paths", type=LOCATION, nargs=-1, metavar="SRC SRC… DST", required=True)
@click.option(
    "--decay",
    type=float,
    metavar="D",
    help="average = D · average + (1 − D) · weights, starting with the weights of the first SRC.",
)
@click.option("--weights", metavar="W,…", help="A weight for each SRC; they must add up to 1.")
@click.option("--uniform", is_flag=True, help="Give every SRC the same weight.")
@target_options
@run_options
@report_option
@click.pass_context
def ema(
    context: click.Context,
    /,
    paths: tuple[str, ...],
    decay: float | None,
    weights: str | None,
    uniform: bool,
    **_: Any,
) -> None:
    """Average the weights of a series of checkpoints. Their topologies may differ.

    DST becomes the last SRC with the average as its EMA state or, with --format huggingface, the average as a model.
    """
    with running() as run, run.converting(paths[:-1], paths[-1:]) as converted:
        report = paddle_reshard.average(
            paths[:-1],
            paths[-1],
            decay=decay,
            weights=_numbers(weights),
            uniform=uniform,
            observe=run,
            **given(context),
        )
        converted(report)
    answer(report, lambda: print_facts([*report.facts(), *next_of(report)]))


def _numbers(text: str | None) -> list[float] | None:
    try:
        return None if text is None else [float(number) for number in text.split(",")]
    except ValueError as error:
        raise UsageError(f"--weights {text!r} is not a list of numbers") from error
