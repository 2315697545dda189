"""The commands ``plan`` and ``convert``."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click

import paddle_reshard
from paddle_reshard.pipeline.cli.command import answer, next_of, running
from paddle_reshard.pipeline.cli.commands.cards import print_cards
from paddle_reshard.pipeline.cli.json_output import coverage_data, plan_data
from paddle_reshard.pipeline.cli.options import (
    LOCATION,
    OF_ONE_SOURCE,
    ON_STDERR,
    SectionedCommand,
    all_of,
    declared,
    given,
    outcome_option,
    report_option,
    run_options,
    target_options,
)
from paddle_reshard.pipeline.cli.terminal import print_facts, say
from paddle_reshard.pipeline.core.errors import FinishedError, UsageError
from paddle_reshard.pipeline.core.shown import readable_bytes
from paddle_reshard.pipeline.core.topology import number_of_cards
from paddle_reshard.pipeline.core.units import PathLike
from paddle_reshard.pipeline.formats.registry import DEFAULT, average_target, formats_for_average
from paddle_reshard.pipeline.request.options import (
    TARGET_OPTIONS,
    ConversionOptions,
    ConvertOptions,
    TargetOptions,
    Targets,
    flag_of,
)
from paddle_reshard.pipeline.request.parse import locations_of, parse_request, parse_target

if TYPE_CHECKING:
    from paddle_reshard.pipeline.convert.plan import ConversionPlan
    from paddle_reshard.pipeline.examine.coverage import Coverage

NOT_PROVEN = 1
"""Exit status of a plan that ``--prove`` found to be incomplete."""


conversion_options = all_of(
    click.argument("source", type=LOCATION, metavar="SRC"),
    click.argument("target", type=LOCATION, metavar="[DST]", required=False),
    outcome_option(
        "--target",
        "targets",
        multiple=True,
        metavar="DST:FORMAT[:NAME=VALUE,…]",
        help=f"Replaces DST: a target with its format and options, as in DST:{DEFAULT}:tp=4,pp=2 or "
        f"DST:{average_target(formats_for_average()[1])}. Repeat it to write several targets in one pass over "
        "SRC. NAME is an axis or "
        f"{', '.join(flag_of(name)[2:] for name in TARGET_OPTIONS if name not in ('to', 'format'))}. "
        "With --resume, DST alone is enough, in the original order.",
    ),
    *map(declared, OF_ONE_SOURCE),
    target_options,
)


@click.command(
    cls=SectionedCommand,
    examples=(
        "checkpoint-1000 --cards 4",
        "checkpoint-1000 --to tp=2,pp=2",
        "checkpoint-1000 two-cards --to tp=2 --save two.plan --report two.html",
    ),
)
@conversion_options
@click.option(
    "--save",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write the plan to a file, for convert --plan.",
)
@click.option(
    "--prove",
    is_flag=True,
    help="Prove that every byte of every target file is written exactly once, and that every element of the source is "
    "used or left out for a reason. Exit status 1 if not.",
)
@click.option(
    "--cards",
    type=click.IntRange(1),
    metavar="N",
    help="List every topology of N cards to which SRC can be converted, with what each needs and loses, and how a job "
    "starts from it. Takes no DST and no --to.",
)
@click.option(
    "--all",
    "every",
    is_flag=True,
    help="With --cards on a terminal: every topology, and all there is to know.",
)
@report_option
@click.pass_context
def plan(
    context: click.Context,
    /,
    source: str,
    target: str | None,
    targets: tuple[str, ...],
    save: Path | None,
    prove: bool,
    cards: int | None,
    every: bool,
    **_: Any,
) -> None:
    """Plan a conversion, or list the topologies of N cards.

    Shows what would be read and written, how much memory it needs, and what would not be carried over.

    With DST, the plan is the one that convert makes for it, with the same id. Without it, nothing is known of the
    target's storage, which may copy ranges by itself; then the id is another.
    """
    options = given(context)
    if cards is not None:
        if target is not None or targets or save or prove:
            raise UsageError(
                "--cards lists topologies; DST, --target, --save and --prove are for one of them"
            )
        _show_cards(source, cards, every, options)
        return
    if every:
        raise UsageError("--all is for --cards")
    destination = _targets(target, targets) if target is not None or targets else None
    options = _with_topology(context, source, destination, options)
    request = parse_request(cast(ConversionOptions, options), destination)
    from paddle_reshard.pipeline.convert.conversion import plan_with

    if save is not None:
        from paddle_reshard.pipeline.convert.plan_file import save_plan  # says at once if it cannot write any
        from paddle_reshard.storage.local.folders import check_writable

        check_writable(save, UsageError)
    with running("reading headers and planning") as run:
        planned = plan_with(locations_of((source,), destination, request), request, run)
        coverage = paddle_reshard.prove(planned) if prove else None
        if run.page is not None:
            run.page.show_plan(planned, coverage)
    if save is not None:
        save_plan(planned.plan, save)
    _show_plan(planned, coverage)
    if coverage is not None and not coverage:
        sys.exit(NOT_PROVEN)


def _show_plan(planned: ConversionPlan, coverage: Coverage | None) -> None:
    """Answer with a plan, and its proof if one was asked for."""
    proof = {} if coverage is None else {"coverage": coverage_data(coverage)}
    shown = [*planned.facts(), *_free_space(planned), *(() if coverage is None else coverage.facts())]
    answer(plan_data(planned) | proof, lambda: print_facts(shown))


def _free_space(planned: ConversionPlan) -> list[tuple[str, str]]:
    """What is free on the disks of local targets; a plan for a disk with too little is refused."""
    from paddle_reshard.storage.locate import is_local, local_path
    from paddle_reshard.storage.space import room_for

    rooms = [room_for(local_path(at).absolute()) for at in planned.target_locations if is_local(at)]
    free = {room.device: room.free_bytes for room in rooms if room.free_bytes is not None}
    return [("free", readable_bytes(size)) for size in free.values()]


def _show_cards(source: str, cards: int, every: bool, options: Mapping[str, Any]) -> None:
    """Print what a checkpoint can become on a number of cards."""
    with running("reading headers and comparing topologies") as run:
        found = paddle_reshard.plan(source, cards=cards, observe=run, **options)
        run.show(found)
    answer(found, lambda: print_cards(found, every))


@click.command(
    cls=SectionedCommand,
    examples=(
        "checkpoint-1000 one-card --to tp=1",
        "checkpoint-1000 four-stages --to pp=4,sharding=2 --report four.html",
        "checkpoint-1000 four-cards --to 4",
        "checkpoint-1000 model --format huggingface --dtype bfloat16",
        "s3://bucket/checkpoint-1000 s3://bucket/two-cards --to tp=2 --memory 4GiB",
        "checkpoint-1000 one-card --resume",
    ),
)
@conversion_options
@run_options
@all_of(*map(declared, ("expected_plan", "device")))
@report_option
@click.pass_context
def convert(
    context: click.Context,
    /,
    source: str,
    target: str | None,
    targets: tuple[str, ...],
    **_: Any,
) -> None:
    """Convert a checkpoint. The target appears complete or not at all."""
    options = given(context)
    destination = _targets(target, targets, bool(options.get("resume")))
    options = _with_topology(context, source, destination, options)
    request = parse_request(cast(ConvertOptions, options), destination)
    locations = locations_of((source,), destination, request)
    from paddle_reshard.pipeline.convert.conversion import convert_with  # mistakes above are told at once

    with _finished(), running() as run, run.converting([source], locations.targets) as converted:
        report = convert_with(locations, request, run)
        converted(report)
    answer(report, lambda: print_facts([*report.facts(), *next_of(report)]))


def _with_topology(
    context: click.Context, source: str, target: Targets | None, options: dict[str, Any]
) -> dict[str, Any]:
    """The options, with a topology in place of a number of cards, which is said before it takes hours."""
    if number_of_cards(options.get("to")) is None:
        return options
    from paddle_reshard.pipeline.examine.cards import with_topology

    silent = context.params["quiet"] or context.params["events"] == ON_STDERR
    with_one: dict[str, Any] = with_topology(
        source, target, options, lambda said: None if silent else say(said, err=True)
    )
    return with_one


@contextmanager
def _finished() -> Iterator[None]:
    """Exit with status 0 if there is nothing to do."""
    try:
        yield
    except FinishedError as done:
        message = str(done)
        answer({"finished": True, "message": message}, lambda: say(message))
        sys.exit(0)


def _targets(
    target: str | None, targets: tuple[str, ...], resume: bool = False
) -> str | dict[PathLike, TargetOptions]:
    """The path of a single target, or the paths of several with their options; with ``resume`` a session has those."""
    if (target is None) == (not targets):
        raise UsageError("give one target, SRC DST, or several with --target DST:FORMAT:…")
    if target is not None:
        return target
    by_path: dict[PathLike, TargetOptions] = dict(parse_target(text, resume) for text in targets)
    if len(by_path) < len(targets):
        raise UsageError("two targets have the same path")
    return by_path
