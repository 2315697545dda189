"""The Python API: what the command line does, as functions with typed results."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from paddle_reshard.clusters.choose import Engine, choose_engine, choose_indexing
from paddle_reshard.clusters.inline import InlineEngine
from paddle_reshard.pipeline.aoa.rewrite import rewrite
from paddle_reshard.pipeline.convert.inputs import (
    as_file,
    given_inputs,
    load_layout,
    load_program,
    load_target_names,
)
from paddle_reshard.pipeline.convert.integrity import IntegrityReport, check_target
from paddle_reshard.pipeline.convert.manifest import parse_manifest
from paddle_reshard.pipeline.convert.request import (
    CHECKS,
    CONVERSION_OPTIONS,
    REPLICAS,
    TARGET_OPTIONS,
    ConversionOptions,
    ConversionRequest,
    Form,
    HybridRequest,
    TargetOptions,
    check_options,
    parse_choice,
    parse_drop,
    parse_flex,
    parse_huggingface,
    parse_unified,
)
from paddle_reshard.pipeline.convert.resuming import go_on, is_whole, request_of
from paddle_reshard.pipeline.convert.run import (
    ConversionPlan,
    MoveReport,
    Observer,
    Progress,
    StepEnded,
    StepStarted,
    check_finished,
    check_targets,
    ignore_events,
    plan_checkpoint,
    reread_in_words,
    run_conversion,
)
from paddle_reshard.pipeline.core.errors import CheckpointError, FinishedError, UsageError
from paddle_reshard.pipeline.core.file_names import MANIFEST
from paddle_reshard.pipeline.core.shown import Facts, Shown, readable_bytes, readable_seconds
from paddle_reshard.pipeline.core.suggest import did_you_mean
from paddle_reshard.pipeline.core.topology import Topology
from paddle_reshard.pipeline.core.units import DEFAULT_MEMORY, PathLike, parse_memory
from paddle_reshard.pipeline.indexing import small_files
from paddle_reshard.pipeline.indexing.detect import index_checkpoint, index_pair
from paddle_reshard.pipeline.indexing.fill import read_filling
from paddle_reshard.pipeline.layouts.checkpoint import MissingPolicy
from paddle_reshard.pipeline.layouts.flex.target import FlexTarget
from paddle_reshard.pipeline.layouts.hybrid.target import HybridTarget
from paddle_reshard.pipeline.planning.compare import (
    Comparison,
    Difference,
    plan_comparison,
    plan_self_comparison,
)
from paddle_reshard.pipeline.planning.plan import check_metadata
from paddle_reshard.pipeline.planning.work import plan_work
from paddle_reshard.storage.apart import check_apart, check_targets_apart
from paddle_reshard.storage.locate import (
    StorageOptions,
    open_source,
    open_target,
    source_access,
    target_access,
)
from paddle_reshard.storage.outputs import Outputs
from paddle_reshard.storage.remote.retry_counts import count_retries
from paddle_reshard.storage.store import Read, ReadRange, Source
from paddle_reshard.tasks.figures import add_retries
from paddle_reshard.tasks.index import IndexFiles, index_here

if TYPE_CHECKING:
    from typing_extensions import Unpack

SHOWN_DIFFERENCES = 20
SHOWN_WORKERS = 16


@dataclass(frozen=True, slots=True, repr=False)
class ConversionReport(Shown):
    """What a conversion made."""

    source: str
    target: str
    plan: ConversionPlan
    moved: MoveReport
    seconds: float
    """How long it took, planning and publishing included."""

    def _in_short(self) -> str:
        return f"{self.source} → {self.target}, {readable_bytes(self.moved.written_bytes)} written"

    def facts(self) -> Facts:
        """What was planned, and what came of it."""
        moved, drift = self.moved, self.moved.replica_drift
        outcome = f"{len(drift)} differ" if drift else "all equal"
        facts = self.plan.facts()
        facts.append(("compared", f"{moved.compared_elements:,} elements that are stored twice, {outcome}"))
        facts += [("drift", line) for line in drift[:SHOWN_DIFFERENCES]]
        if len(drift) > SHOWN_DIFFERENCES:
            facts.append(("drift", f"… and {len(drift) - SHOWN_DIFFERENCES} more, listed in {MANIFEST}"))
        facts += [(f"worker {worker.number}", worker.in_words()) for worker in moved.workers[:SHOWN_WORKERS]]
        if len(moved.workers) > SHOWN_WORKERS:
            facts.append(("workers", f"… and {len(moved.workers) - SHOWN_WORKERS} more, shown with --json"))
        if moved.retries:
            repeated = ", ".join(f"{times} × {failure}" for failure, times in moved.retries.items())
            facts.append(("repeated", repeated))
        if moved.resumed_bytes:
            again = f"{moved.resumed_groups} of {self.plan.plan.groups} groups"
            facts.append(("reused", f"{again}, {readable_bytes(moved.resumed_bytes)}, were done before"))
        rate = (
            f", {readable_bytes(int(moved.written_bytes / self.seconds))}/s written" if self.seconds else ""
        )
        facts.append(("time", f"{readable_seconds(self.seconds)}{rate if moved.written_bytes else ''}"))
        facts.append(("done", self.target))
        return facts


@dataclass(frozen=True, slots=True, repr=False)
class VerifyReport(Shown):
    """What a comparison found."""

    tensors: int
    compared_elements: int
    read_bytes: int
    differences: tuple[Difference, ...]
    read_amplification: float
    """Bytes read for each that is needed."""
    read_once_budget_bytes: int | None
    """Where bytes were read several times, because two storage orders did not fit: a budget with which they are not."""

    @property
    def equal(self) -> bool:
        """Whether the logical content is the same."""
        return not self.differences

    def _in_short(self) -> str:
        return self.verdict

    @property
    def verdict(self) -> str:
        """What came out, in a line."""
        return (
            f"{'equal' if self.equal else f'different: {len(self.differences)} differences'}; {self.extent}"
        )

    @property
    def extent(self) -> str:
        """What was compared, in a line."""
        again = reread_in_words(self.read_amplification, self.read_once_budget_bytes)
        read = f"{readable_bytes(self.read_bytes)} read{again}"
        return f"{self.tensors} tensors, {self.compared_elements:,} elements compared ({read})"

    def facts(self) -> Facts:
        """Whether they are equal, and the first differences."""
        shown = [(found.tensor, found.detail) for found in self.differences[:SHOWN_DIFFERENCES]]
        return [("result", self.verdict), *shown]

    def __bool__(self) -> bool:
        """The report is true if the two are equal, so that ``assert verify(a, b)`` means what it says."""
        return self.equal


def plan(
    source: PathLike,
    target: PathLike | Mapping[PathLike, TargetOptions] | None = None,
    *,
    resume: bool = False,
    observe: Observer = ignore_events,
    **options: Unpack[ConversionOptions],
) -> ConversionPlan:
    """Plan a conversion: the exact layout of the targets, groups and their peaks. Nothing is moved.

    Parameters
    ----------
    target
        Where it goes. Several targets, which are made of one reading of the source, are a mapping from the place of
        each to its own :class:`TargetOptions`. Without one, parts are those that any store takes.
    resume
        Plan also where an unfinished conversion is, which may be gone on with.
    observe
        Is told how far it is as event values.
    options
        :class:`ConversionOptions`.

    Raises
    ------
    ReshardError
        If the source is not whole, or cannot become what is asked.
    """
    return _plan(source, target, resume, options, partial(index_here, observe=observe))


def _plan(
    source: PathLike,
    target: PathLike | Mapping[PathLike, TargetOptions] | None,
    resume: bool,
    options: ConversionOptions,
    index_files: IndexFiles,
    in_process: bool = False,
) -> ConversionPlan:
    request = read_request(target, options)
    sinks = None if target is None else open_targets((source,), target, options, resume, False)
    access = source_access(options)
    fill = options.get("fill")
    filling = read_filling(
        None if fill is None else os.fspath(fill), options.get("allow_missing", ()), access
    )
    program = load_program(as_file(options.get("aoa")))
    tables, config = given_inputs(options.get("rules"), options.get("config"))
    own = open_source(os.fspath(source), *access)
    checkpoint = index_checkpoint(own, tables, config, filling.policy, index_files)
    store = filling.serve(own)
    if program is not None:
        checkpoint = rewrite(checkpoint, program, tables if _by_table(request.forms) else None, config)
    if sinks is None or target is None:
        return plan_checkpoint(store, checkpoint, request)
    planned = plan_checkpoint(store, checkpoint, request, sinks.limits(store), in_process)
    check_targets(planned, sinks, resume or options.get("no_space_check", False))
    return replace(planned, places=sinks.locations, asked=request_of(target, options))


def _by_table(forms: Sequence[Form]) -> bool:
    """Whether the targets are for jobs that cut tensors or name parameters, which only a rule table tells."""
    for_jobs = {
        isinstance(form, HybridRequest) or (isinstance(form, FlexTarget) and form.auto_parallel)
        for form in forms
    }
    if len(for_jobs) > 1:
        raise UsageError(
            "with --aoa, targets of the formats hybrid, hybrid-plain and auto-parallel hold a model that a rule table "
            "describes, the others whatever the statements make; convert to them one after the other"
        )
    return for_jobs.pop()


def read_request(
    target: PathLike | Mapping[PathLike, TargetOptions] | None, options: ConversionOptions
) -> ConversionRequest:
    """What is asked for.

    Raises
    ------
    UsageError
        If it makes no sense.
    """
    if unknown := options.keys() - set(CONVERSION_OPTIONS):
        raise TypeError(f"unknown option {sorted(unknown)[0]!r}")
    if isinstance(target, Mapping):
        if odd := [name for name in TARGET_OPTIONS if options.get(name)]:
            option = odd[0].replace("_", "-")
            raise UsageError(
                f"--{option} is said of each of several targets: --target DST:FORMAT:NAME=VALUE,…"
            )
        if not target:
            raise UsageError("no target is given")
        asked = list(target.values())
    else:
        own = {name: options[name] for name in TARGET_OPTIONS if name in options}  # type: ignore[literal-required]
        asked = [cast(TargetOptions, own)]
    return ConversionRequest(
        forms=tuple(_form(of_target) for of_target in asked),
        budget_bytes=parse_memory(options.get("memory", DEFAULT_MEMORY)),
        compare_replicas=parse_choice(options.get("replicas", REPLICAS[0]), REPLICAS, "choice of replicas"),
        allow_replica_drift=options.get("allow_replica_drift", False),
        check_in_full=not parse_choice(options.get("check", CHECKS[0]), CHECKS, "choice of checks"),
        allow_master_drift=options.get("allow_master_drift", False),
        allow_reread=options.get("allow_reread", False),
        vocab_pad=options.get("vocab_pad"),
        vocab_trim=options.get("vocab_trim"),
        dropped_states=parse_drop(options.get("drop", ())),
    )


def _form(options: TargetOptions) -> Form:
    """One target as it was asked for."""
    format = options.get("format") or "hybrid"
    check_options(format, options)
    if format == "huggingface":
        return parse_huggingface(options.get("state"), options.get("dtype"), options.get("max_shard_size"))
    if format == "unified":
        return parse_unified(options.get("files"))
    names = load_target_names(as_file(options.get("target_meta")))
    if format in ("flex", "auto-parallel"):
        return parse_flex(
            format == "auto-parallel", options.get("files"), options.get("paddle_version"), names
        )
    to, layout = options.get("to"), options.get("layout")
    return HybridRequest(
        topology=to if isinstance(to, Topology) else Topology.parse(to or ""),
        strategy=options.get("sharding_strategy"),
        sharded_saving=format == "hybrid",
        layout=load_layout(layout if layout is None or isinstance(layout, Mapping) else Path(layout)),
        names=names,
    )


def open_targets(
    sources: Sequence[PathLike],
    target: PathLike | Mapping[PathLike, TargetOptions],
    options: ConversionOptions,
    resume: bool,
    take_over: bool,
) -> Outputs:
    """The places of all targets; an occupied one is refused before anything is read."""
    access = target_access(options)
    locations = [os.fspath(place) for place in (target if isinstance(target, Mapping) else (target,))]
    for number, location in enumerate(locations):
        for source in sources:
            check_apart(os.fspath(source), location)
        if (fill := options.get("fill")) is not None:
            check_apart(os.fspath(fill), location)
        for other in locations[:number]:
            check_targets_apart(other, location)
    overwrite = options.get("overwrite", False)
    return Outputs(
        [
            open_target(place, overwrite, access.options, resume, take_over, access.schemes)
            for place in locations
        ]
    )


def convert(
    source: PathLike,
    target: PathLike | Mapping[PathLike, TargetOptions],
    *,
    resume: bool = False,
    take_over: bool = False,
    cluster: str = "inline",
    workers: int | None = None,
    exchange: str = "auto",
    expected_plan: PathLike | None = None,
    device: str = "cpu",
    verify: bool = False,
    observe: Observer = ignore_events,
    **options: Unpack[ConversionOptions],
) -> ConversionReport:
    """Convert a checkpoint; afterwards the targets are there, whole, or nothing looks like a finished one.

    Parameters
    ----------
    target
        As for :func:`plan`. Several targets appear one after the other, when all of them are whole.
    resume
        Go on where an unfinished run of this very conversion stopped, if there is one; and if all was done, do
        nothing but look at the targets: one that is seen to be damaged is refused. Without ``to`` and ``format``, go on
        with what that run was begun with; ``memory``, ``check`` and ``allow_reread`` may be left out in any case.
        Where there are several targets, ``target`` maps their places to ``{}``, in the same order. What a record may
        not decide is given again: ``fill``, ``allow_links``, and how stores are reached.
    take_over
        Also if it ran on another machine and may still be alive; implies ``resume``.
    cluster
        ``"inline"``: in this process. ``"ray"``: on the Ray that ``RAY_ADDRESS`` names, else on one of our own;
        ``"ray:ADDRESS"``: on that one.
    workers
        On Ray how many, by default as many as there is room for; in this process how many groups at a time, by
        default two for every processor.
    exchange
        On Ray, whether several workers share a group through the object store: ``"auto"``, ``"always"``,
        ``"never"``.
    expected_plan
        A file that ``plan --save`` made: refuse unless this conversion is that plan.
    device
        ``"cpu"``: NumPy. ``"gpu"``, on Ray: one GPU for each worker, and Paddle.
    verify
        In the end, read every byte of all targets and compare it with its checksum, also of those that were there.
    observe
        Is told what happens as event values.
    options
        :class:`ConversionOptions`.

    Raises
    ------
    ReshardError
        If the conversion is refused, or the source turns out to contradict itself while it is read.
    FinishedError
        If ``resume`` is all that is asked for, and the targets are finished: there is nothing to do.
    """
    resume = resume or take_over
    if resume:
        target, options = _resumed(source, target, options, take_over, verify)
    memory_bytes = parse_memory(options.get("memory", DEFAULT_MEMORY))
    engine = choose_engine(cluster, workers, memory_bytes, exchange, device)

    def make_plan(index_files: IndexFiles) -> ConversionPlan:
        made = _plan(source, target, resume, options, index_files, isinstance(engine, InlineEngine))
        if expected_plan is not None:
            from paddle_reshard.pipeline.convert.plan_file import check_is_saved

            check_is_saved(made.plan, Path(expected_plan))
        return made

    return plan_and_run(
        make_plan,
        lambda: open_targets((source,), target, options, resume, take_over),
        engine,
        observe,
        resume,
        verify,
        options.get("no_space_check", False),
    )


def _resumed(
    source: PathLike,
    target: PathLike | Mapping[PathLike, TargetOptions],
    options: ConversionOptions,
    take_over: bool,
    in_full: bool,
) -> tuple[PathLike | Mapping[PathLike, TargetOptions], ConversionOptions]:
    """The request with what an unfinished conversion was begun with, where it leaves that open."""
    outputs = open_targets((source,), target, options, True, take_over)
    for sink in outputs.targets.values():
        if (left := sink.unfinished) is None:
            continue
        if left.request is not None:
            return go_on(sink.location, left.request, target, options)
        if not is_whole(target, options):
            raise UsageError(
                f"{sink.location}: nobody has noted what the unfinished conversion here was begun with; give the same "
                f"options, or paddle-reshard clean {sink.location}"
            )
        return target, options
    if is_whole(target, options):
        return target, options
    store = open_source(os.fspath(source), *source_access(options))
    for sink in outputs.targets.values():
        if not check_finished(sink, store, in_full):
            raise UsageError(f"{sink.location}: nothing to resume is here; say what to make: --to, --format")
    raise FinishedError(f"{outputs.location}: finished before, and what the manifest says; nothing to do")


def plan_and_run(
    make_plan: Callable[[IndexFiles], ConversionPlan],
    open_sinks: Callable[[], Outputs],
    engine: Engine,
    observe: Observer,
    resume: bool,
    verify: bool = False,
    no_space_check: bool = False,
) -> ConversionReport:
    """Make a plan, open the targets and carry it out; ``observe`` is told of all steps."""
    begun = time.monotonic()
    counted, index_files = count_retries(), choose_indexing(engine, observe)
    observe(StepStarted("plan"))
    conversion = make_plan(index_files)
    groups, written_bytes = conversion.plan.groups, conversion.plan.written_bytes
    forms = [target.form for target in conversion.targets]
    chosen = [f"{f.strategy} ({f.strategy_reason})" for f in forms if isinstance(f, HybridTarget)]
    facts = (*dict.fromkeys(chosen), f"{groups} groups", f"{written_bytes} bytes to write")
    observe(StepEnded("plan", ", ".join(facts)))
    if isinstance(engine, InlineEngine):
        tensors = len(conversion.plan.tensors)
        engine = engine.beside(tensors, conversion.pieces, conversion.plan.peak_bytes)
    sinks = open_sinks()
    moved = run_conversion(conversion, sinks, engine, observe, resume, index_files, verify, no_space_check)
    moved = replace(moved, retries=add_retries((moved.retries, count_retries() - counted)))
    return ConversionReport(
        conversion.store.location, sinks.location, conversion, moved, time.monotonic() - begun
    )


def verify(
    a: PathLike,
    b: PathLike | None = None,
    *,
    states: Sequence[str] | None = None,
    subset: bool = False,
    memory: str = DEFAULT_MEMORY,
    replicas: str = REPLICAS[0],
    rules: PathLike | None = None,
    config: PathLike | None = None,
    allow_missing: Sequence[str] = (),
    storage_options: StorageOptions | None = None,
    source_storage_options: StorageOptions | None = None,
    target_storage_options: StorageOptions | None = None,
    allow_scheme: Sequence[str] = (),
    allow_links: bool = False,
    observe: Observer = ignore_events,
) -> VerifyReport:
    """Compare the logical content of two checkpoints of any topologies, bit for bit.

    An implied parameter is the cast of its master weight; padding is not content; aliases are one tensor. A
    state that only one side has is a difference, unless ``states`` leaves it out, or ``subset`` allows that
    ``b`` has less. So is what a trainer reads beside the tensors, unless ``states`` names some of them: the
    learning-rate schedule, the trainer's state, the model's configuration, tokenizer files; what of it may differ is
    listed in ``pipeline/indexing/small_files.py``. So are copies of a tensor that differ within a side, unless
    ``replicas`` is ``"first"``.
    Tensors that no file of a side holds are refused, unless a pattern of ``allow_missing`` fits their key.
    ``source_storage_options`` are those of ``a``, ``target_storage_options`` those of ``b``.

    Without ``b``, what ``a`` stores twice is compared, every element of it: copies of a tensor, and parameters with
    their master weights.

    ``observe`` is told how far it is, as by :func:`convert`.
    """
    index_files = partial(index_here, observe=observe)
    given = {"storage_options": storage_options, "allow_scheme": allow_scheme, "allow_links": allow_links}
    given |= {"source_storage_options": source_storage_options}
    given |= {"target_storage_options": target_storage_options}
    missing = MissingPolicy(allowed=tuple(allow_missing))
    compare_replicas = parse_choice(replicas, REPLICAS, "choice of replicas")
    engine = InlineEngine(parse_memory(memory))
    if b is None:
        if states is not None or subset:
            raise UsageError("states and subset are for two checkpoints; one is held against itself")
        store = open_source(os.fspath(a), *source_access(given))
        checkpoint = index_checkpoint(store, *given_inputs(rules, config), missing, index_files)
        small_files.check_optimizer(store, checkpoint)
        own = plan_self_comparison(checkpoint.catalog, engine.memory_bytes, compare_replicas)
        report = _compared(own, engine, store, (), observe)
        store.check_unchanged()
        return report
    stores = [
        open_source(os.fspath(a), *source_access(given)),
        open_source(os.fspath(b), *target_access(given)),
    ]
    one, two = index_pair(stores[0], stores[1], *given_inputs(rules, config), missing, index_files)
    known = {t.state for t in (*one.catalog.tensors, *two.catalog.tensors)}
    if unknown := set(states or ()) - known:
        raise UsageError(
            f"neither checkpoint has the state {sorted(unknown)[0]!r}; known: {', '.join(sorted(known))}"
            f"{did_you_mean(sorted(unknown)[0], known)}"
        )
    tensors = max(len(side.catalog.tensors) for side in (one, two))
    pieces = max(len(side.catalog.fragments) for side in (one, two))
    check_metadata(tensors, pieces, 0, engine.memory_bytes)
    comparison = plan_comparison(
        one.catalog,
        two.catalog,
        None if states is None else set(states),
        subset,
        engine.memory_bytes,
        compare_replicas,
    )
    differences = []
    if states is None:
        differences = _other_differences(stores, one.lr_scheduler, two.lr_scheduler, subset)
    report = _compared(comparison, engine, _Pair(*stores), differences, observe)
    for store in stores:
        store.check_unchanged()
    return report


def _compared(
    comparison: Comparison,
    engine: InlineEngine,
    source: ReadRange,
    known: Sequence[Difference],
    observe: Observer,
) -> VerifyReport:
    """Make a comparison; what is ``known`` to differ is told too."""
    plan = comparison.plan
    engine = engine.beside(len(plan.tensors), len(plan.ops), plan.peak_bytes)
    differences = [*comparison.differences, *known]
    observe(StepStarted("comparing", plan.read_bytes))
    reports = []
    with closing(engine.compare(plan_work(comparison.plan), source)) as made:
        for report in made:
            reports.append(report)
            observe(Progress(report.read_bytes))
    reports.sort(key=lambda report: report.group)
    differences += [
        Difference(d.tensor, f"{d.detail}: {d.path_a} and {d.path_b}")
        for report in reports
        for d in report.differences
    ]
    elements = sum(report.compared_elements for report in reports)
    read = sum(report.read_bytes for report in reports)
    return VerifyReport(
        comparison.tensors,
        elements,
        read,
        tuple(differences),
        comparison.plan.read_amplification,
        comparison.plan.read_once_budget_bytes,
    )


def _other_differences(
    stores: Sequence[Source], schedule_a: Any, schedule_b: Any, subset: bool
) -> list[Difference]:
    """What differs beside the tensors: the schedule, what the trainer says of itself, the configuration."""
    schedules = [] if subset and schedule_b is None else list(small_files.differences(schedule_a, schedule_b))
    told = [replace(odd, what=f"LR_Scheduler.{odd.what}".rstrip(".")) for odd in schedules]
    told += small_files.compare_small_files(stores[0], stores[1], subset)
    return [Difference(odd.what, f"{odd.a} in A, {odd.b} in B") for odd in told]


def check(
    target: PathLike,
    *,
    source: PathLike | None = None,
    storage_options: StorageOptions | None = None,
    source_storage_options: StorageOptions | None = None,
    target_storage_options: StorageOptions | None = None,
    allow_scheme: Sequence[str] = (),
    allow_links: bool = False,
    observe: Observer = ignore_events,
) -> IntegrityReport:
    """Compare a target with its manifest: every file, every part, every byte.

    Parts that the storage copied by itself, and told no MD5 of, are compared with ``source``, the checkpoint that the
    target was made from. The location that the manifest names is never opened. ``observe`` is told how far it is.

    Raises
    ------
    CheckpointError
        If it has no manifest, so that it is no finished target, or one without checksums; if ``source`` is not there.
    """
    given = {"storage_options": storage_options, "allow_scheme": allow_scheme, "allow_links": allow_links}
    given |= {"source_storage_options": source_storage_options}
    given |= {"target_storage_options": target_storage_options}
    store = open_source(os.fspath(target), *target_access(given))
    made_from = None if source is None else open_source(os.fspath(source), *source_access(given))
    sizes = store.sizes()
    if MANIFEST not in sizes:
        raise CheckpointError(
            f"{store.location}: has no {MANIFEST}, so it was not made by this package or is not whole"
        )
    manifest = parse_manifest(store.read(MANIFEST, 0, sizes[MANIFEST]), f"{store.location}/{MANIFEST}")
    return check_target(store, manifest, made_from, observe)


def holds_manifest(target: PathLike, **reach: Any) -> bool:
    """Whether a folder is a target that this package has finished; ``reach`` is how to get there, as for ``check``."""
    return MANIFEST in open_source(os.fspath(target), *target_access(reach)).sizes()


def clean(
    target: PathLike,
    *,
    take_over: bool = False,
    storage_options: StorageOptions | None = None,
    allow_scheme: Sequence[str] = (),
) -> tuple[str, ...]:
    """Remove what an unfinished conversion has left at a target, and say what: nothing is left to resume.

    Raises
    ------
    TargetError
        If the conversion is running. One on another machine whose lock has not expired is overruled with
        ``take_over``.
    """
    sink = open_target(
        os.fspath(target), False, storage_options or {}, True, take_over=take_over, schemes=allow_scheme
    )
    return tuple(sink.clean())


@dataclass(frozen=True, slots=True)
class _Pair(ReadRange):
    """Two sources as one, their paths prefixed with ``A/`` and ``B/``."""

    a: Source
    b: Source

    def read_into(self, path: str, byte_offset: int, buffer: memoryview) -> None:
        side, _, inner = path.partition("/")
        (self.a if side == "A" else self.b).read_into(inner, byte_offset, buffer)

    def read_many(self, reads: Sequence[Read]) -> None:
        for name, side in (("A", self.a), ("B", self.b)):
            prefix = f"{name}/"
            side.read_many(
                [
                    replace(read, path=read.path.removeprefix(prefix))
                    for read in reads
                    if read.path.startswith(prefix)
                ]
            )
