"""The commands ``plan`` and ``convert``, and the options that they share with ``ema``, ``submit`` and ``watch``."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

import paddle_reshard
from paddle_reshard.pipeline.cli.json_output import (
    conversion_data,
    plan_data,
)
from paddle_reshard.pipeline.cli.observers import observing, waiting
from paddle_reshard.pipeline.cli.options import (
    FILE,
    all_of,
    both_storage_options,
    conduct_option,
    config_option,
    json_option,
    memory_option,
    missing_option,
    outcome_option,
    place_option,
    quiet_option,
    replicas_option,
    rules_option,
)
from paddle_reshard.pipeline.cli.output import (
    Choice,
    answer,
    print_facts,
)
from paddle_reshard.pipeline.cli.terminal import say
from paddle_reshard.pipeline.convert.choices import CHECKS
from paddle_reshard.pipeline.convert.request import TargetOptions, check_options, parse_target
from paddle_reshard.pipeline.core.errors import FinishedError, UsageError
from paddle_reshard.pipeline.core.topology import STRATEGIES, Topology
from paddle_reshard.pipeline.core.units import PathLike, parse_memory
from paddle_reshard.pipeline.layouts.formats import DEFAULT, FORMATS
from paddle_reshard.pipeline.layouts.huggingface.choices import EXPORTED_STATES, FLOATING

if TYPE_CHECKING:
    pass

EXCHANGES = ("auto", "always", "never")
DEVICES = ("cpu", "gpu")
target_options = all_of(
    outcome_option(
        "--to",
        metavar="TOPOLOGY",
        help="axis=size,… of the target job: tp, pp, vpp, sharding, ep, dp; omitted axes are 1. Needed for the "
        "hybrid formats.",
    ),
    outcome_option(
        "--sharding-strategy",
        type=Choice(STRATEGIES),
        help="Default: the source's where the target can have it, else the trainer's own: PaddleFormers stage1v2, "
        "PaddleNLP stage1v1.",
    ),
    outcome_option(
        "--format",
        "format_name",
        type=Choice(tuple(FORMATS)),
        default=DEFAULT,
        show_default=True,
        help="hybrid: with model_meta.json where the trainer writes it; hybrid-plain: without; huggingface: the "
        "model alone, for transformers; flex: FlexCheckpoint; auto-parallel: its dist_ckpt; unified: unified "
        "checkpoint.",
    ),
    outcome_option(
        "--state",
        type=Choice(EXPORTED_STATES),
        help="huggingface: the parameters, or as a model their moving average, which is kept in float32 and rounded "
        "to the dtype of the parameters. Default: param.",
    ),
    outcome_option(
        "--dtype",
        type=Choice(FLOATING),
        help="huggingface: of all floating tensors but those that the model keeps in float32; rounded once, from "
        "the master weight where there is one. Default: each as trained, bit for bit.",
    ),
    outcome_option(
        "--files",
        type=click.IntRange(1),
        help="flex, auto-parallel: data files of each folder, at most; by default as many as hold 4 GiB each. "
        "unified: files of each kind, by default one.",
    ),
    outcome_option(
        "--paddle-version",
        metavar="VERSION",
        help="flex, auto-parallel: the Paddle by whose classes the metadata are written. Default: 3.3.",
    ),
    outcome_option(
        "--max-shard-size",
        metavar="SIZE",
        help="huggingface: bytes of tensors in one file. Default: 5GB.",
    ),
    memory_option,
    rules_option,
    config_option,
    missing_option,
    outcome_option(
        "--layout",
        type=FILE,
        help="JSON with what the target job decides and no topology says: comm_buffer_size_MB, comm_overlap, "
        "sort_parameters, stage3_segment_size, sequence_parallel, segmentation, convention.",
    ),
    outcome_option(
        "--comm-buffer-size-mb",
        type=click.IntRange(1),
        help="Stage 1 v2: the job's sharding_comm_buffer_size_MB. Default: 256.",
    ),
    outcome_option(
        "--sequence-parallel/--no-sequence-parallel",
        default=None,
        help="Whether the target job uses it; decides parameter names. Default: as the source.",
    ),
    outcome_option(
        "--segmentation",
        metavar="HOW",
        help="Layers per stage: uniform, layer:Regex, or item numbers 0,3,6. Default: as the model class does.",
    ),
    outcome_option(
        "--target-meta",
        type=FILE,
        help="model_meta.json of a job of the target topology, for parameter names.",
    ),
    replicas_option,
    outcome_option(
        "--allow-replica-drift", is_flag=True, help="Take the first copy where copies differ, and report it."
    ),
    conduct_option(
        "--check",
        type=click.Choice(CHECKS),
        default="sample",
        show_default=True,
        help="Parameters that are stored beside their master weights: compare what is loaded anyway and a few runs of "
        "every other array, or read everything for it.",
    ),
    outcome_option(
        "--allow-master-drift",
        is_flag=True,
        help="Keep parameters that are not their master weights, rounded, and report them.",
    ),
    conduct_option(
        "--allow-reread",
        is_flag=True,
        help="Read source bytes several times where --memory is too small for reading them once.",
    ),
    conduct_option(
        "--no-space-check",
        is_flag=True,
        help="Do not compare the free space of the target's disk with what will be written.",
    ),
    outcome_option(
        "--vocab-pad", type=click.IntRange(1), help="Grow the vocabulary to this many rows, new ones zero."
    ),
    outcome_option(
        "--drop",
        multiple=True,
        metavar="NAME",
        help="Leave this out of every target: ema, the moving average. A format that has no place for it asks for "
        "that, unless another --target holds it. Can be repeated.",
    ),
    outcome_option("--vocab-trim", type=click.IntRange(1), help="Cut the vocabulary to this many rows."),
    both_storage_options,
    outcome_option("--overwrite", is_flag=True, help="Replace a checkpoint that the target already holds."),
    json_option,
    quiet_option,
)
conversion_options = all_of(
    click.argument("source", metavar="SRC"),
    click.argument("target", metavar="[DST]", required=False),
    outcome_option(
        "--target",
        "targets",
        multiple=True,
        metavar="DST:FORMAT[:NAME=VALUE,…]",
        help="In place of DST, and as often as there are targets, which are made of one reading of SRC (with --resume, "
        "DST alone will do, in the same order): "
        "DST:hybrid:tp=4,pp=2 or DST:huggingface:state=ema; NAME is an axis or one of --sharding-strategy, --layout, "
        "--target-meta, --state, --dtype, --max-shard-size, --files, --paddle-version.",
    ),
    outcome_option(
        "--aoa",
        type=FILE,
        help="AOA statements by which tensors get other keys, are cut, joined, transposed or cast; --config is then "
        "that of the model that comes out.",
    ),
    place_option(
        "--fill",
        metavar="FILE",
        help="A safetensors file, or its URL, with tensors that no file of SRC holds.",
    ),
    target_options,
)
run_options = all_of(
    conduct_option(
        "--cluster",
        default="inline",
        show_default=True,
        metavar="inline|ray|ray:ADDRESS",
        help="Where it runs.",
    ),
    conduct_option(
        "--workers",
        type=click.IntRange(1),
        help="On Ray the number of workers, by default as many as there is room for; in this process the number of "
        "groups at a time, by default two for every processor.",
    ),
    conduct_option(
        "--exchange",
        type=click.Choice(EXCHANGES),
        default="auto",
        show_default=True,
        help="On Ray, whether several workers share a group through the object store.",
    ),
    conduct_option(
        "--resume",
        is_flag=True,
        help="Go on where a killed conversion stopped, if there is one. Without --to and --format, with all that it "
        "was begun with; --memory, --check and --allow-reread can be left out in any case. Given again are --fill, "
        "--allow-links and how stores are reached.",
    ),
    conduct_option(
        "--take-over",
        is_flag=True,
        help="Resume a conversion of another machine that has ended there, without waiting for its lock to expire.",
    ),
)


@click.command()
@conversion_options
@click.option(
    "--save",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write the plan into a file, for simulate and for convert --plan.",
)
def plan(
    source: str,
    target: str | None,
    targets: tuple[str, ...],
    save: Path | None,
    as_json: bool,
    quiet: bool,
    **options: Any,
) -> None:
    """Show what a conversion would read, write and need; nothing is moved."""
    places = _targets(target, targets, options) if target or targets else None
    with waiting("reading headers and planning", quiet or as_json) as observe:
        planned = paddle_reshard.plan(source, places, observe=observe, **api_arguments(options))
    if save is not None:
        from paddle_reshard.pipeline.convert.plan_file import save_plan

        save_plan(planned.plan, save)
    answer(plan_data(planned), as_json, quiet, lambda: print_facts(planned.facts()))


@click.command()
@conversion_options
@run_options
@outcome_option(
    "--plan",
    "expected_plan",
    type=FILE,
    help="A file that plan --save made: refuse unless this conversion is that plan.",
)
@conduct_option(
    "--device",
    type=click.Choice(DEVICES),
    default="cpu",
    show_default=True,
    help="gpu: on Ray, one GPU for each worker, and Paddle.",
)
@conduct_option(
    "--verify",
    is_flag=True,
    help="In the end, read every byte of the target and compare it with its checksum; with --resume also of one that "
    "was there already, which else is only looked at.",
)
def convert(
    source: str,
    target: str | None,
    targets: tuple[str, ...],
    cluster: str,
    workers: int | None,
    exchange: str,
    expected_plan: Path | None,
    device: str,
    resume: bool,
    take_over: bool,
    verify: bool,
    as_json: bool,
    quiet: bool,
    **options: Any,
) -> None:
    """Convert a checkpoint. Afterwards the target is there, whole, or nothing looks like a finished one."""
    places = _targets(target, targets, options, resume or take_over)
    arguments = api_arguments(options)
    if resume or take_over:
        arguments = _only_given(arguments, click.get_current_context())
    with observing(quiet or as_json) as observe, _finished(as_json, quiet):
        report = paddle_reshard.convert(
            source,
            places,
            cluster=cluster,
            workers=workers,
            exchange=exchange,
            expected_plan=expected_plan,
            device=device,
            resume=resume,
            take_over=take_over,
            verify=verify,
            observe=observe,
            **arguments,
        )
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


def _only_given(arguments: dict[str, Any], context: click.Context) -> dict[str, Any]:
    """Of the arguments of the API those that were given: what is left out is as a session has it."""
    names = [option.name or "" for option in context.command.params]
    given = {name for name in names if context.get_parameter_source(name) is not ParameterSource.DEFAULT}
    if given & {"comm_buffer_size_mb", "sequence_parallel", "segmentation"}:
        given.add("layout")
    kept = {name: value for name, value in arguments.items() if name in given}
    if "format_name" in given:
        kept["format"] = context.params["format_name"]
    return kept


def _targets(
    target: str | None, targets: tuple[str, ...], options: dict[str, Any], resume: bool = False
) -> str | dict[PathLike, TargetOptions]:
    """The only target, or the places of several with their options. What is wrong is told before anything is loaded.

    With ``resume``, what was begun says the rest.
    """
    parse_memory(options["memory"])
    if (target is None) == (not targets):
        raise UsageError("give one target, SRC DST, or several with --target DST:FORMAT:…")
    if target is not None:
        source = click.get_current_context().get_parameter_source("format_name")
        if not resume or options["to"] or source is not ParameterSource.DEFAULT:
            check_options(options["format_name"], options)
        if options["to"] is not None:
            Topology.parse(options["to"])
        return target
    asked: dict[PathLike, TargetOptions] = dict(parse_target(text, resume) for text in targets)
    if len(asked) < len(targets):
        raise UsageError("two targets have the same place")
    return asked


def api_arguments(options: dict[str, Any]) -> dict[str, Any]:
    """Keyword arguments of the API from those of the command line."""
    layout: dict[str, Any] = {}
    path: Path | None = options.pop("layout")
    if path is not None:
        from paddle_reshard.pipeline.convert import inputs

        layout.update(inputs.read_layout_file(path))
    flags = {
        "comm_buffer_size_MB": options.pop("comm_buffer_size_mb"),
        "sequence_parallel": options.pop("sequence_parallel"),
        "segmentation": _segmentation(options.pop("segmentation")),
    }
    layout.update({name: value for name, value in flags.items() if value is not None})
    format_name = options.pop("format_name")
    return {"format": None if format_name == DEFAULT else format_name, "layout": layout, **options}


def _segmentation(text: str | None) -> str | list[int] | None:
    if text is None or not text[:1].isdigit():
        return text
    try:
        return [int(start) for start in text.split(",")]
    except ValueError as error:
        raise UsageError(f"--segmentation {text!r}: item numbers are whole numbers, 0,3,6") from error
