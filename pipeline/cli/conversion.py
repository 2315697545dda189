"""The commands ``plan`` and ``convert``, and the options that they share with ``ema``, ``submit`` and ``watch``."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

import paddle_reshard
from paddle_reshard.pipeline.cli.json_output import conversion_data, plan_data
from paddle_reshard.pipeline.cli.observers import observing, waiting
from paddle_reshard.pipeline.cli.options import (
    Decorator,
    all_of,
    declared,
    given,
    json_option,
    layout_flags,
    outcome_option,
    quiet_option,
)
from paddle_reshard.pipeline.cli.output import answer, print_facts
from paddle_reshard.pipeline.cli.terminal import say
from paddle_reshard.pipeline.convert.options import (
    CONVERSION_OPTIONS,
    TARGET_OPTIONS,
    TargetOptions,
    flag_of,
    is_complete,
)
from paddle_reshard.pipeline.convert.request import check_options, parse_target
from paddle_reshard.pipeline.core.errors import FinishedError, UsageError
from paddle_reshard.pipeline.core.topology import Topology
from paddle_reshard.pipeline.core.units import DEFAULT_MEMORY, PathLike, parse_memory
from paddle_reshard.pipeline.layouts.formats import DEFAULT, average_target, formats_for_average

OF_ONE_SOURCE = ("aoa", "fill", "merge_into", "lora_config")
"""Options of a conversion that make no sense for a series of checkpoints."""


def _declared(names: Iterable[str]) -> Iterator[Decorator]:
    """Options of a conversion; those that stand for an entry of ``--layout`` follow it."""
    for name in names:
        yield declared(name)
        if name == "layout":
            yield layout_flags


target_options = all_of(
    *_declared(name for name in CONVERSION_OPTIONS if name not in OF_ONE_SOURCE), json_option, quiet_option
)
conversion_options = all_of(
    click.argument("source", metavar="SRC"),
    click.argument("target", metavar="[DST]", required=False),
    outcome_option(
        "--target",
        "targets",
        multiple=True,
        metavar="DST:FORMAT[:NAME=VALUE,…]",
        help=f"A target with its format and options, instead of DST: DST:{DEFAULT}:tp=4,pp=2 or "
        f"DST:{average_target(formats_for_average()[1])}. Repeat it to write several targets in one "
        "pass over SRC. NAME is an axis or one of "
        f"{', '.join(flag_of(name) for name in TARGET_OPTIONS if name not in ('to', 'format'))}. "
        "With --resume, DST alone is enough, in the same order.",
    ),
    *_declared(OF_ONE_SOURCE),
    target_options,
)
run_options = all_of(*_declared(("cluster", "workers", "exchange", "resume", "take_over")))


@click.command()
@conversion_options
@click.option(
    "--save",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write the plan to a file, for simulate and convert --plan.",
)
@click.pass_context
def plan(
    context: click.Context,
    /,
    source: str,
    target: str | None,
    targets: tuple[str, ...],
    save: Path | None,
    as_json: bool,
    quiet: bool,
    **_: Any,
) -> None:
    """Show what a conversion would read, write and need, without converting."""
    asked = given(context)
    places = _targets(target, targets, asked) if target or targets else None
    with waiting("reading headers and planning", quiet or as_json) as observe:
        planned = paddle_reshard.plan(source, places, observe=observe, **asked)
    if save is not None:
        from paddle_reshard.pipeline.convert.plan_file import save_plan

        save_plan(planned.plan, save)
    answer(plan_data(planned), as_json, quiet, lambda: print_facts(planned.facts()))


@click.command()
@conversion_options
@run_options
@all_of(*_declared(("expected_plan", "device", "verify")))
@click.pass_context
def convert(
    context: click.Context,
    /,
    source: str,
    target: str | None,
    targets: tuple[str, ...],
    as_json: bool,
    quiet: bool,
    **_: Any,
) -> None:
    """Convert a checkpoint. The target appears as a whole, or not at all."""
    asked = given(context)
    places = _targets(target, targets, asked)
    with observing(quiet or as_json) as observe, _finished(as_json, quiet):
        report = paddle_reshard.convert(source, places, observe=observe, **asked)
    answer(conversion_data(report), as_json, quiet, lambda: print_facts(report.facts()))


@contextmanager
def _finished(as_json: bool, quiet: bool) -> Iterator[None]:
    """Nothing to do is no failure."""
    try:
        yield
    except FinishedError as done:
        told = str(done)
        answer({"finished": True, "message": told}, as_json, quiet, lambda: say(told))
        sys.exit(0)


def _targets(
    target: str | None, targets: tuple[str, ...], asked: Mapping[str, Any]
) -> str | dict[PathLike, TargetOptions]:
    """The only target, or the places of several with their options. What is wrong is told before anything is loaded."""
    parse_memory(asked.get("memory", DEFAULT_MEMORY))
    if (target is None) == (not targets):
        raise UsageError("give one target, SRC DST, or several with --target DST:FORMAT:…")
    resume = bool(asked.get("resume") or asked.get("take_over"))  # then what was begun says the rest
    if target is not None:
        if not resume or is_complete(target, asked):
            check_options(asked.get("format", DEFAULT), asked)
        if "to" in asked:
            Topology.parse(asked["to"])
        return target
    places: dict[PathLike, TargetOptions] = dict(parse_target(text, resume) for text in targets)
    if len(places) < len(targets):
        raise UsageError("two targets have the same place")
    return places
