"""The command ``ema``: the average of a series of checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import click

import paddle_reshard
from paddle_reshard.pipeline.core.errors import UsageError

if TYPE_CHECKING:
    from paddle_reshard.pipeline.convert.run import ConversionReport
    from paddle_reshard.pipeline.core.events import Observer

Decorator = Callable[[Any], Any]
Observing = Callable[[bool], "AbstractContextManager[Observer]"]
"""Shows progress, unless it is to be silent."""
Answer = Callable[["ConversionReport", bool, bool], None]
"""Prints a report: as JSON, or for people, or not at all."""


def ema_command(
    options: Decorator,
    observing: Observing,
    arguments: Callable[[dict[str, Any]], dict[str, Any]],
    answer: Answer,
) -> click.Command:
    """The command; ``options`` are those of a target and of a run, ``arguments`` makes the API's of them."""

    @click.command("ema")
    @click.argument("places", nargs=-1, metavar="SRC SRC… DST", required=True)
    @click.option(
        "--decay",
        type=float,
        metavar="D",
        help="average = D · average + (1 − D) · weights, from the first SRC on.",
    )
    @click.option("--weights", metavar="W,…", help="A weight for every SRC; together 1.")
    @click.option("--uniform", is_flag=True, help="Every SRC counts the same.")
    @options
    def command(
        places: tuple[str, ...],
        decay: float | None,
        weights: str | None,
        uniform: bool,
        cluster: str,
        workers: int | None,
        exchange: str,
        resume: bool,
        take_over: bool,
        as_json: bool,
        quiet: bool,
        **given: Any,
    ) -> None:
        """Average the weights of a series of checkpoints, each in any topology.

        DST becomes the last SRC with the average as its EMA state, or with --format huggingface the average as a model.
        """
        with observing(quiet or as_json) as observe:
            report = paddle_reshard.average(
                places[:-1],
                places[-1],
                decay=decay,
                weights=_numbers(weights),
                uniform=uniform,
                cluster=cluster,
                workers=workers,
                exchange=exchange,
                resume=resume,
                take_over=take_over,
                observe=observe,
                **arguments(given),
            )
        answer(report, as_json, quiet)

    return command


def _numbers(text: str | None) -> list[float] | None:
    try:
        return None if text is None else [float(number) for number in text.split(",")]
    except ValueError as error:
        raise UsageError(f"--weights {text!r} is not a list of numbers") from error
