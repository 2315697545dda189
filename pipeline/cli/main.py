"""The command line: arguments to API calls, results to tables, lines or JSON.

Exit status: 0 done, 1 refused or failed, 2 wrong usage, 128 + n for signal n (130: interrupted).
``verify`` follows ``cmp`` and ``diff``: 0 equal, 1
different, 2 trouble: it could not compare, whatever the reason.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

import paddle_reshard
from paddle_reshard.pipeline.cli.ema import ema_command
from paddle_reshard.pipeline.cli.jobs import job_commands
from paddle_reshard.pipeline.cli.json_output import (
    Json,
    conversion_data,
    inspection_data,
    integrity_data,
    plan_data,
    verify_data,
)
from paddle_reshard.pipeline.cli.options import access_option, conduct_option, outcome_option, place_option
from paddle_reshard.pipeline.cli.output import (
    Choice,
    Commands,
    occupy_standard_files,
    print_facts,
    print_object,
    print_table,
)
from paddle_reshard.pipeline.cli.signals import heard_signals
from paddle_reshard.pipeline.cli.simulate import simulate_command
from paddle_reshard.pipeline.cli.terminal import console, log_to_terminal, say
from paddle_reshard.pipeline.convert.request import (
    CHECKS,
    FORMATS,
    REPLICAS,
    TargetOptions,
    check_options,
    parse_target,
)
from paddle_reshard.pipeline.core.errors import FinishedError, UsageError
from paddle_reshard.pipeline.core.topology import STRATEGIES, Topology
from paddle_reshard.pipeline.core.units import DEFAULT_MEMORY, PathLike, parse_memory
from paddle_reshard.pipeline.layouts.huggingface.choices import EXPORTED_STATES, FLOATING
from paddle_reshard.storage.formats.strict_json import parse_json
from paddle_reshard.storage.schemes import PLAIN_SCHEMES

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from paddle_reshard.pipeline.convert.inspection import Inspection
    from paddle_reshard.pipeline.convert.integrity import IntegrityReport
    from paddle_reshard.pipeline.convert.verify import VerifyReport
    from paddle_reshard.pipeline.core.events import Event
    from paddle_reshard.pipeline.planning.compare import Difference

FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
DIFFERENT = 1
"""Exit status of ``verify``, where it has compared."""
SHOWN_DIFFERENCES = 20
SHOWN_WORKERS = 16
SHOWN_AMPLIFICATION = 1.05
KNOWN_TO_ONE = (
    *("a", "source", "as_json", "quiet"),
    *("storage_options", "source_storage_options", "target_storage_options", "allow_scheme", "allow_links"),
)
"""Options of ``verify`` that also go with one target alone."""
EXCHANGES = ("auto", "always", "never")
DEVICES = ("cpu", "gpu")


# ----------------------------------------------------------------------------------------------- commands


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(paddle_reshard.__version__, prog_name="paddle-reshard")
def cli() -> None:
    """Convert PaddlePaddle training checkpoints to any other topology and format, bit for bit."""
    log_to_terminal()


def _options(*decorators: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def decorate(function: Any) -> Any:
        for decorator in reversed(decorators):
            function = decorator(function)
        return function

    return decorate


json_option = conduct_option("--json", "as_json", is_flag=True, help="Print one JSON object.")
rules_option = outcome_option(
    "--rules", type=FILE, help="Rule table of the model family, instead of those that come with the tool."
)
config_option = outcome_option(
    "--config", type=FILE, help="The model's config.json, for a checkpoint that has none."
)
missing_option = outcome_option(
    "--allow-missing",
    multiple=True,
    metavar="PATTERN",
    help="Keys that no file of a checkpoint holds and that may be missing in a target too; * stands for anything.",
)
replicas_option = outcome_option(
    "--replicas",
    type=click.Choice(REPLICAS),
    default="compare",
    show_default=True,
    help="Tensors that several ranks hold: compare all copies, or look at the first.",
)
memory_option = conduct_option(
    "--memory", default=DEFAULT_MEMORY, show_default=True, help="Memory budget of each worker."
)


def _storage_option(text: str, *names: str) -> Callable[[Any], Any]:
    return access_option(
        *names,
        metavar="JSON|@FILE",
        callback=lambda context, parameter, value: _storage_options(value),
        help=text,
    )


_REACH = (
    "What fsspec needs to reach the store: key, secret, endpoint_url, profile, … Never printed or stored; "
    "@FILE keeps it out of the list of processes."
)
allow_scheme_option = conduct_option(
    "--allow-scheme",
    multiple=True,
    metavar="NAME",
    help=f"Open URLs of this scheme too, beside the plain ones: {', '.join(sorted(PLAIN_SCHEMES))}.",
)
storage_option = _options(_storage_option(_REACH, "--storage-options"), allow_scheme_option)
allow_links_option = outcome_option(
    "--allow-links", is_flag=True, help="Follow links in the source that lead out of its folder."
)
source_storage_option = _options(
    allow_links_option,
    _storage_option(_REACH, "--storage-options", "--source-storage-options", "storage_options"),
    allow_scheme_option,
)
target_storage_option = _options(
    _storage_option(_REACH, "--storage-options", "--target-storage-options", "storage_options"),
    allow_scheme_option,
)
both_storage_options = _options(
    allow_links_option,
    storage_option,
    _storage_option("The same for what is read, in place of --storage-options.", "--source-storage-options"),
    _storage_option(
        "The same for what is written, in place of --storage-options.", "--target-storage-options"
    ),
)
quiet_option = conduct_option("--quiet", is_flag=True, help="Print nothing but errors.")
target_options = _options(
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
        default="hybrid",
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
conversion_options = _options(
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
run_options = _options(
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


@cli.command()
@click.argument("source", metavar="SRC")
@rules_option
@config_option
@click.option("--tensors", is_flag=True, help="List every tensor with the rule that matched it.")
@source_storage_option
@json_option
def inspect(
    source: str,
    rules: Path | None,
    config: Path | None,
    tensors: bool,
    storage_options: dict[str, Any] | None,
    allow_scheme: tuple[str, ...],
    allow_links: bool,
    as_json: bool,
) -> None:
    """Say what a checkpoint is, from its metadata alone."""
    with _waiting("reading headers", as_json) as observe:
        found = paddle_reshard.inspect(
            source,
            rules=rules,
            config=config,
            storage_options=storage_options,
            allow_scheme=allow_scheme,
            allow_links=allow_links,
            observe=observe,
        )
    _answer(inspection_data(found), as_json, False, lambda: _show_inspection(found, tensors))


@cli.command()
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
    with _waiting("reading headers and planning", quiet or as_json) as observe:
        planned = paddle_reshard.plan(source, places, observe=observe, **api_arguments(options))
    if save is not None:
        from paddle_reshard.pipeline.convert.plan_file import save_plan

        save_plan(planned.plan, save)
    _answer(plan_data(planned), as_json, quiet, lambda: print_facts(planned.facts()))


@cli.command()
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
    with _observing(quiet or as_json) as observe, _finished(as_json, quiet):
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
    _answer(conversion_data(report), as_json, quiet, lambda: print_facts(report.facts()))


@cli.command()
@click.argument("a", metavar="A")
@click.argument("b", metavar="[B]", required=False)
@click.option("--state", "states", metavar="LIST", help="Only these states, comma-separated: param,moment1,…")
@click.option("--subset", is_flag=True, help="B may lack tensors that A has.")
@click.option(
    "--source",
    metavar="SRC",
    help="With one argument: what it was converted from, to compare what the storage has copied. What the manifest "
    "says of it is never opened.",
)
@replicas_option
@memory_option
@rules_option
@config_option
@missing_option
@both_storage_options
@json_option
@quiet_option
def verify(
    a: str,
    b: str | None,
    states: str | None,
    subset: bool,
    source: str | None,
    replicas: str,
    memory: str,
    rules: Path | None,
    config: Path | None,
    allow_missing: tuple[str, ...],
    as_json: bool,
    quiet: bool,
    **reach: Any,
) -> None:
    """Compare the logical content of two checkpoints of any topologies, bit for bit.

    With one argument: compare every byte of a target with the checksums in its manifest. A checkpoint that has none is
    held against itself: all copies of a tensor, and every parameter with its master weight.

    Exit status: 0 equal (or intact), 1 different (or damaged), 2 it could not be compared.
    """
    finished = b is None and _holds_manifest(a, reach)
    if finished:
        _check_for_one(click.get_current_context())
        with _waiting("comparing with the manifest", quiet or as_json) as observe:
            found = paddle_reshard.check(a, source=source, observe=observe, **reach)
        _answer(integrity_data(found), as_json, quiet, lambda: _show_integrity(found))
        sys.exit(0 if found else DIFFERENT)
    if source is not None:
        raise UsageError(
            f"--source is for one target and its manifest; {a} has none"
            if b is None
            else "--source is for one target and its manifest; two checkpoints are compared as they are"
        )
    chosen = None if states is None else [state.strip() for state in states.split(",")]
    with _waiting("reading headers", quiet or as_json) as observe:
        report = paddle_reshard.verify(
            a,
            b,
            states=chosen,
            subset=subset,
            replicas=replicas,
            memory=memory,
            rules=rules,
            config=config,
            allow_missing=allow_missing,
            observe=observe,
            **reach,
        )
    _answer(verify_data(report), as_json, quiet, lambda: _show_verification(report, alone=b is None))
    sys.exit(0 if report else DIFFERENT)


def _holds_manifest(location: str, reach: dict[str, Any]) -> bool:
    from paddle_reshard.pipeline.convert.verify import holds_manifest

    return holds_manifest(location, **reach)


def _check_for_one(context: click.Context) -> None:
    """Refuse what ``verify`` of one target would not look at."""
    for option in context.command.params:
        given = context.get_parameter_source(option.name or "") is not ParameterSource.DEFAULT
        if given and option.name not in KNOWN_TO_ONE:
            raise UsageError(
                f"{option.opts[0]} is for two checkpoints; one is compared with its manifest, byte for byte"
            )


@cli.command()
@click.argument("target", metavar="DST")
@click.option(
    "--take-over",
    is_flag=True,
    help="Also what a conversion of another machine has left, without waiting for its lock to expire.",
)
@target_storage_option
@json_option
@quiet_option
def clean(
    target: str,
    take_over: bool,
    storage_options: dict[str, Any] | None,
    allow_scheme: tuple[str, ...],
    as_json: bool,
    quiet: bool,
) -> None:
    """Remove what an unfinished conversion has left at a target; refused while it runs."""
    with _waiting("removing what an unfinished conversion has left", quiet or as_json):
        removed = paddle_reshard.clean(
            target, take_over=take_over, storage_options=storage_options, allow_scheme=allow_scheme
        )

    def show() -> None:
        for line in removed or (f"{target}: no unfinished conversion is here",):
            say(f"removed {line}" if removed else line)

    _answer({"removed": list(removed)}, as_json, quiet, show)


@contextmanager
def _finished(as_json: bool, quiet: bool) -> Iterator[None]:
    """Nothing to do is no failure."""
    try:
        yield
    except FinishedError as done:
        told = str(done)
        _answer({"finished": True, "message": told}, as_json, quiet, lambda: say(told))
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
    return {"format": None if format_name == "hybrid" else format_name, "layout": layout, **options}


def _storage_options(text: str | None) -> dict[str, Any] | None:
    """A JSON object, or the one in a file; the text itself never appears in a message, it holds secrets."""
    if text is None:
        return None
    try:
        value = parse_json(Path(text[1:]).read_text("utf-8") if text.startswith("@") else text)
    except (OSError, ValueError) as error:
        raise click.BadParameter("neither a JSON object nor @FILE with one") from error
    if not isinstance(value, dict):
        raise click.BadParameter("a JSON object is expected")
    return value


def _segmentation(text: str | None) -> str | list[int] | None:
    if text is None or not text[:1].isdigit():
        return text
    try:
        return [int(start) for start in text.split(",")]
    except ValueError as error:
        raise UsageError(f"--segmentation {text!r}: item numbers are whole numbers, 0,3,6") from error


# ------------------------------------------------------------------------------------------------- output


def _answer(data: Json, as_json: bool, quiet: bool, show: Callable[[], None]) -> None:
    """Print a result as one JSON object, for people, or not at all."""
    if as_json:
        print_object(click.get_current_context().info_name or "", data)
    elif not quiet:
        show()


@contextmanager
def _observing(silent: bool) -> Iterator[Callable[[Event], None]]:
    """An observer that draws a progress bar on a terminal, and prints lines otherwise."""
    from paddle_reshard.pipeline.cli.progress import ProgressLines
    from paddle_reshard.pipeline.core.events import ignore_events

    if silent:
        yield ignore_events
        return
    if not sys.stderr or not sys.stderr.isatty():
        lines = ProgressLines(lambda line: say(line, err=True))
        with lines.ticking():
            yield lines
        return
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=console(err=True),
        transient=True,
    ) as bar:
        yield _Bar(bar)


@contextmanager
def _waiting(step: str, silent: bool) -> Iterator[Callable[[Event], None]]:
    """An observer of a command that begins with this step; nothing is said of one that takes no time."""
    from paddle_reshard.pipeline.core.events import StepStarted

    with _observing(silent) as observe:
        observe(StepStarted(step))
        yield observe


class _Bar:
    """Events as a progress bar."""

    def __init__(self, bar: Progress) -> None:
        self.bar = bar
        self.step = ""
        self.task: TaskID | None = None

    def __call__(self, event: Event) -> None:
        from paddle_reshard.pipeline.core.events import FilesRead, StepStarted, Waiting
        from paddle_reshard.pipeline.core.events import Progress as Moved

        if isinstance(event, StepStarted):
            if self.task is not None:
                self.bar.remove_task(self.task)
            self.step = event.step
            self.task = self.bar.add_task(event.step, total=event.total_bytes)
        elif isinstance(event, Moved) and self.task is not None:
            self.bar.update(self.task, description=self.step, advance=event.done_bytes)
        elif isinstance(event, FilesRead):
            self._describe(f"{event.done} of {event.of} files read")
        elif isinstance(event, Waiting):
            self._describe(f"waits for {event.what}")

    def _describe(self, detail: str) -> None:
        if self.task is not None:
            self.bar.update(self.task, description=f"{self.step}: {detail}")


def _show_inspection(found: Inspection, tensors: bool) -> None:
    print_facts(found.facts())
    click.echo()
    states = [
        (
            state.state,
            "/".join(state.dtypes),
            str(state.tensors),
            f"{state.elements:,}",
            f"{state.implied} as the cast of their master weight" if state.implied else "yes",
        )
        for state in found.states
    ]
    print_table(("state", "dtype", "tensors", "elements", "stored"), states)
    if not tensors:
        return
    click.echo()
    rows = []
    for tensor in found.tensors:
        cut = "replicated" if tensor.rule.split is None else f"tp cuts dim {tensor.rule.split}"
        fused = f", {tensor.rule.parts} fused parts" if tensor.rule.parts > 1 else ""
        rows.append((tensor.key, str(list(tensor.global_shape)), tensor.dtype.name, cut + fused))
    print_table(("tensor", "shape", "dtype", "rule"), rows)


def _show_verification(report: VerifyReport, alone: bool) -> None:
    lonely, others = _only_on_one_side(report.differences)
    for (state, side), keys in lonely.items():
        more = f" and {len(keys) - 1} more" if len(keys) > 1 else ""
        say(f"{state} of {keys[0]}{more}: {side}")
    for difference in others[:SHOWN_DIFFERENCES]:
        say(f"{difference.tensor}: {difference.detail}")
    if len(others) > SHOWN_DIFFERENCES:
        say(f"… and {len(others) - SHOWN_DIFFERENCES} more, listed with --json")
    if lonely:
        say("to compare what both have, name it: --state LIST; or --subset, where B may hold less")
    if not alone:
        say(report.verdict)
        return
    from paddle_reshard.pipeline.core.file_names import MANIFEST

    count = len(report.differences)
    say(f"has no {MANIFEST}: what it stores twice is compared, nothing else")
    say(f"{f'contradicts itself: {count} differences' if count else 'consistent'}; {report.extent}")


def _only_on_one_side(
    differences: Sequence[Difference],
) -> tuple[dict[tuple[str, str], list[str]], list[Difference]]:
    """State and side → keys of the tensors that only this side has; and all other differences."""
    from paddle_reshard.pipeline.planning.compare import ONLY_IN_A, ONLY_IN_B

    lonely: dict[tuple[str, str], list[str]] = {}
    others = []
    for difference in differences:
        if difference.detail in (ONLY_IN_A, ONLY_IN_B):
            key, _, state = difference.tensor.rpartition(" ")
            lonely.setdefault((state.strip("()"), difference.detail), []).append(key)
        else:
            others.append(difference)
    return lonely, others


def _show_integrity(report: IntegrityReport) -> None:
    for damage in report.damages[:SHOWN_DIFFERENCES]:
        say(f"{damage.path}{damage.stretch}: {damage.detail}")
    if len(report.damages) > SHOWN_DIFFERENCES:
        say(f"… and {len(report.damages) - SHOWN_DIFFERENCES} more")
    say(report.verdict)
    if report.unchecked_bytes:
        say(
            "these were copied by the storage: to compare them, --source SRC names what it was made from, unchanged "
            f"since; the manifest says {report.recorded_source}"
        )


for command in job_commands(convert, api_arguments):
    cli.add_command(command)
cli.add_command(simulate_command())
cli.add_command(
    ema_command(
        _options(target_options, run_options),
        _observing,
        api_arguments,
        lambda report, as_json, quiet: _answer(
            conversion_data(report), as_json, quiet, lambda: print_facts(report.facts())
        ),
    )
)


def main() -> None:
    """Entry point of ``paddle-reshard``."""
    occupy_standard_files()
    with heard_signals():
        cli()
