"""The one way from a source to a published target: index → plan → move → verify → publish.

The command line and the Python API both run these steps. Each returns a typed result; what happens inside is
told to an observer as event values.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

import numpy as np

from paddle_reshard.clusters.choose import Engine
from paddle_reshard.clusters.inline import InlineEngine
from paddle_reshard.pipeline.convert.integrity import check_target, glance_at_target
from paddle_reshard.pipeline.convert.manifest import (
    describe_parts,
    format_manifest,
    manifest_head,
    parse_manifest,
)
from paddle_reshard.pipeline.convert.request import ConversionRequest, Form, HybridRequest
from paddle_reshard.pipeline.core import version
from paddle_reshard.pipeline.core.catalog import Mixture, Term
from paddle_reshard.pipeline.core.errors import (
    CheckpointError,
    MasterDriftError,
    TargetError,
    UnsupportedError,
)
from paddle_reshard.pipeline.core.events import Event as Event
from paddle_reshard.pipeline.core.events import Observer as Observer
from paddle_reshard.pipeline.core.events import Progress as Progress
from paddle_reshard.pipeline.core.events import StepEnded as StepEnded
from paddle_reshard.pipeline.core.events import StepStarted as StepStarted
from paddle_reshard.pipeline.core.events import Waiting as Waiting
from paddle_reshard.pipeline.core.events import ignore_events as ignore_events
from paddle_reshard.pipeline.core.file_names import AVERAGE, MANIFEST
from paddle_reshard.pipeline.core.freed import give_back_freed
from paddle_reshard.pipeline.core.part_limits import PartLimits
from paddle_reshard.pipeline.core.shown import Facts, Shown, readable_bytes
from paddle_reshard.pipeline.core.tensors import EMA_MASTER_WEIGHT, EMA_PARAM, MASTER_WEIGHT
from paddle_reshard.pipeline.indexing.detect import index_checkpoint
from paddle_reshard.pipeline.indexing.small_files import check_optimizer
from paddle_reshard.pipeline.layouts.checkpoint import Checkpoint, MissingPolicy
from paddle_reshard.pipeline.layouts.files import TargetFiles
from paddle_reshard.pipeline.layouts.huggingface.choices import EMA
from paddle_reshard.pipeline.layouts.huggingface.sidecars import average_divisor
from paddle_reshard.pipeline.layouts.huggingface.target import HuggingFaceTarget
from paddle_reshard.pipeline.layouts.hybrid.target import HybridTarget
from paddle_reshard.pipeline.layouts.targets import (
    AnyTarget,
    check_left,
    in_words,
    join,
    lay_out,
    sharding_in_words,
    target_facts,
)
from paddle_reshard.pipeline.layouts.vocab import resize_vocabulary
from paddle_reshard.pipeline.planning.checks import held_parameters
from paddle_reshard.pipeline.planning.parts import MADE
from paddle_reshard.pipeline.planning.plan import CarriedFile, Plan, check_metadata, plan_conversion
from paddle_reshard.pipeline.planning.work import plan_work
from paddle_reshard.storage.formats.strict_json import parse_json
from paddle_reshard.storage.locate import absolute
from paddle_reshard.storage.outputs import Outputs, prefixes
from paddle_reshard.storage.session.ledger import source_difference
from paddle_reshard.storage.store import Identity, NewFile, Receipt, Record, Source, Target, WritePart
from paddle_reshard.tasks.figures import WorkerFigures, add_figures, add_retries
from paddle_reshard.tasks.index import IndexFiles, index_here, index_huggingface, read_json

COPY_BYTES = 8 << 20
SHOWN_AMPLIFICATION = 1.05
ALLOWED = "no file of the source holds it, which was allowed"


@dataclass(frozen=True, repr=False)
class PlannedTarget:
    """One target of a conversion."""

    form: AnyTarget
    wanted: Checkpoint
    """The source as the target is to hold it: the same but for a vocabulary of another size."""
    files: TargetFiles
    """Without its fragments: the plan was made of them."""
    carried: tuple[str, ...]
    """Files of the source that go to the target byte for byte."""
    left: tuple[tuple[str, str], ...]
    """Files and tensors of the source that are not in the target, and why."""
    left_states: tuple[str, ...]
    """States of tensors that the target has no place for, or that were not asked for."""

    def __repr__(self) -> str:
        return f"<PlannedTarget: {in_words(self.form)}>"


@dataclass(frozen=True, repr=False)
class ConversionPlan(Shown):
    """A conversion that can be run: what, from where, and what becomes of every file."""

    store: Source
    """The source's files, as they were seen when they were indexed."""
    source: Checkpoint
    targets: tuple[PlannedTarget, ...]
    plan: Plan
    """Of all targets together; their paths as :class:`~paddle_reshard.storage.outputs.Outputs` has them."""
    pieces: int
    """Boxes of all targets."""
    places: tuple[str, ...] = ()
    """Where the targets will be; empty where nobody has said."""

    dropped: tuple[str, ...] = ()
    """States of the source that no target has, because it was asked for."""
    asked: Mapping[str, Any] | None = None
    """What was asked for, as ``pipeline/convert/resuming.py`` keeps it in a session."""

    @property
    def master_weights_made(self) -> int:
        """How many master weights of the targets are made of their parameters, because the source stores none."""
        if all(MASTER_WEIGHT in target.left_states for target in self.targets):
            return 0
        catalog = self.source.catalog
        return sum(catalog.tensors[number].state == MASTER_WEIGHT for number in catalog.implied)

    def _in_short(self) -> str:
        targets = "; ".join(in_words(target.form) for target in self.targets)
        return (
            f"{_source_in_words(self.source)} → {targets}; {readable_bytes(self.plan.written_bytes)} to write"
        )

    def facts(self) -> Facts:
        """What would be read, written and needed, and what becomes of everything."""
        plan, targets = self.plan, self.targets
        again = reread_in_words(plan.read_amplification, plan.read_once_budget_bytes)
        facts = [
            (self._of(number, "sharding"), f"{sharding_in_words(form.strategy)}: {form.strategy_reason}")
            for number, form in enumerate(target.form for target in targets)
            if isinstance(form, HybridTarget)
        ]
        facts.append(("from", _source_in_words(self.source)))
        places = self.places if len(targets) > 1 else ()
        for number, target in enumerate(targets):
            where = f"{places[number]}: " if places else ""
            facts.append((self._of(number, "to"), f"{where}{in_words(target.form)}"))
        files = len(plan.target_files) + len(plan.carried)
        facts += [
            ("tensors", f"{len(plan.tensors) - plan.beside} ({len(self.source.model.tensors)} parameters)"),
            (
                "reads",
                f"{readable_bytes(plan.read_bytes)} from {len(plan.source_files)} tensor files{again}",
            ),
            ("writes", f"{readable_bytes(plan.written_bytes)} in {files} files"),
        ]
        if plan.copied_bytes:
            copied = f"{readable_bytes(plan.copied_bytes)} ({plan.copied_share:.0%})"
            facts.append(("copies", f"{copied} are copied by the storage itself"))
        if any(plan.held):
            every, some = plan.held
            told = [f"{every} in full"] * (every > 0) + [f"{some} by samples of every array"] * (some > 0)
            facts.append(("checks", f"parameters against their master weights: {', '.join(told)}"))
        if self.master_weights_made:
            made = f"{self.master_weights_made} master weights, of the parameters: the source stores none"
            facts.append(("made", f"{made} (remove_master_weight), as the trainer does when it resumes"))
        peak, budget = readable_bytes(plan.peak_bytes), readable_bytes(plan.budget_bytes)
        facts += [
            ("memory", f"{peak} at most in {plan.groups} groups, budget {budget}"),
            ("plan", plan.plan_id),
        ]
        return facts + self._left_behind()

    def _left_behind(self) -> Facts:
        facts = [("dropped", f"{', '.join(self.dropped)}: as asked for")] if self.dropped else []
        for number, target in enumerate(self.targets):
            if target.left_states:
                model_only = isinstance(target.form, HuggingFaceTarget)
                reason = "not asked for" if model_only else "no place in this format"
                facts.append((self._of(number, "left out"), f"{', '.join(target.left_states)}: {reason}"))
            for reason, names in _by_reason(target.left):
                facts.append((self._of(number, "not carried"), f"{names}: {reason}"))
        return facts

    def _of(self, number: int, name: str) -> str:
        return f"{name} {number}" if len(self.targets) > 1 else name


def _source_in_words(source: Checkpoint) -> str:
    if source.topology is None:
        return source.format
    return f"{source.format}, {source.topology}, {sharding_in_words(source.strategy)}"


def reread_in_words(amplification: float, once_bytes: int | None) -> str:
    """How often bytes are read, where that is more than once, and what would avoid it."""
    often = amplification > SHOWN_AMPLIFICATION
    again = f", {amplification:.2f} times the bytes that are needed" if often else ""
    return again if once_bytes is None else f"{again}; once with a budget of {readable_bytes(once_bytes)}"


def _by_reason(left: Sequence[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """Files and tensors left behind, those of one reason together."""
    for reason, group in groupby(sorted(left, key=lambda entry: entry[1]), key=lambda entry: entry[1]):
        names = [name for name, _ in group]
        yield reason, names[0] if len(names) == 1 else f"{names[0]} … {names[-1]} ({len(names)})"


@dataclass(frozen=True, slots=True)
class MoveReport:
    """What moving did."""

    groups: int
    read_bytes: int
    written_bytes: int
    compared_elements: int
    replica_drift: tuple[str, ...]
    """Copies that differ, where that was allowed."""
    workers: tuple[WorkerFigures, ...] = ()
    """What each worker of a cluster did."""
    retries: Mapping[str, int] = field(default_factory=dict)
    """Failure of a store → how often a request was repeated for it, on all machines."""
    resumed_groups: int = 0
    """Groups that an earlier run had done; they count nowhere else."""
    resumed_bytes: int = 0
    """Bytes that an earlier run had written, those of files that are carried as they are among them."""
    copied_bytes: int = 0
    """Of the written ones, those that the storage copied by itself."""


# -------------------------------------------------------------------------------------------------- plan


def plan_checkpoint(
    store: Source,
    source: Checkpoint,
    request: ConversionRequest,
    limits: PartLimits = PartLimits(),  # noqa: B008 (a frozen value)
    in_process: bool = False,
) -> ConversionPlan:
    """Plan a conversion; pure but for the sizes that ``store`` has seen. ``limits`` are those of the targets.

    If the groups are to run ``in_process``, where the metadata are too, these are held against the budget before
    anything is made in their proportion.
    """
    dropped = sorted({t.state for t in source.catalog.tensors} & set(request.dropped_states))
    source = _divided(source.without(dropped), request.forms, store)
    wanted = source
    if request.vocab_pad is not None:
        wanted = resize_vocabulary(source, request.vocab_pad, grow=True)
    elif request.vocab_trim is not None:
        wanted = resize_vocabulary(source, request.vocab_trim, grow=False)
    sizes = store.sizes()
    forms = [_chosen(form, source) for form in request.forms]
    tensors = len(source.catalog.tensors)
    if in_process:  # a target has a piece of every tensor at least
        check_metadata(tensors, tensors, 0, request.budget_bytes)
        give_back_freed()
    laid_out = [lay_out(source, wanted, form, sizes, store.folders) for form in forms]
    check_left(forms, laid_out)
    joined = join(source.catalog, laid_out, prefixes(len(laid_out)))
    carried = [
        CarriedFile(path, prefix + path, sizes[path])
        for prefix, of_target in zip(prefixes(len(laid_out)), laid_out, strict=True)
        for path in of_target.carried
    ]
    if in_process:
        check_metadata(tensors, len(joined.files.fragments), 0, request.budget_bytes)
        give_back_freed()
    plan = plan_conversion(
        joined.catalog,
        joined.files,
        carried,
        request.budget_bytes,
        limits,
        request.compare_replicas,
        request.allow_replica_drift,
        request.allow_reread,
        held_parameters(source.catalog, joined.catalog, request.check_in_full),
        request.allow_master_drift,
    )
    left = (*source.left, *((t.key, ALLOWED) for t in source.model.tensors if t.missing))
    targets = [
        PlannedTarget(form, wanted, _filled(one.files), one.carried, (*one.left, *left), one.left_states)
        for form, one in zip(forms, laid_out, strict=True)
    ]
    pieces = len(joined.files.fragments)
    del laid_out, joined
    if in_process:
        give_back_freed()
    return ConversionPlan(store, source, tuple(targets), plan, pieces, dropped=tuple(dropped))


def _filled(files: TargetFiles) -> TargetFiles:
    """The files of a target of whose boxes a plan is made: these are not held beside it."""
    return replace(files, fragments=files.fragments[:0].copy())


def _chosen(form: Form, source: Checkpoint) -> AnyTarget:
    """A target with what it leaves open taken from the source."""
    if isinstance(form, HybridRequest):
        return form.target_for(source)
    return form


def _divided(source: Checkpoint, forms: Sequence[Form], store: Source) -> Checkpoint:
    """The source with its average divided, where it began at zero and goes out as a model."""
    sizes = store.sizes()
    if AVERAGE not in sizes or not any(isinstance(f, HuggingFaceTarget) and f.state == EMA for f in forms):
        return source
    divide_by = average_divisor(read_json(store, AVERAGE, sizes), AVERAGE)
    if divide_by == 1:
        return source
    if len(forms) > 1:
        raise UnsupportedError(
            f"{AVERAGE}: the average began at zero and has to be divided by {divide_by}; make the model of it in a "
            "conversion of its own"
        )
    catalog = source.catalog
    mixtures = {
        number: Mixture((Term(number, 0.0, 1.0),), divide_by)
        for number, tensor in enumerate(catalog.tensors)
        if tensor.state in (EMA_MASTER_WEIGHT, EMA_PARAM)
    }
    return replace(source, catalog=replace(catalog, mixtures=mixtures))


# -------------------------------------------------------------------------------------- move, verify, publish


def identify(conversion: ConversionPlan) -> Identity:
    """Which conversion this is: what it makes, from which very files, by which version."""
    store = conversion.store
    files = _said_of_files(store.sizes(), store.versions())
    return Identity(conversion.plan.plan_id, version.__version__, store.location, files, conversion.asked)


def _said_of_files(sizes: Mapping[str, int], versions: Mapping[str, str]) -> dict[str, str]:
    return {path: f"{size} bytes, {versions.get(path)}" for path, size in sizes.items()}


def check_finished(target: Target, source: Source, in_full: bool) -> bool:
    """Whether a target is finished; then it must be what its manifest says, and made of these very source files.

    Raises
    ------
    TargetError
        If it is not.
    """
    data = target.published(MANIFEST)
    if data is None:
        return False
    _check_published(target, in_full)
    made_of = parse_manifest(data, f"{target.location}/{MANIFEST}")
    reason = source_difference(
        _said_of_files(made_of.source_files, made_of.source_versions),
        _said_of_files(source.sizes(), source.versions()),
    )
    if reason is not None:
        raise TargetError(
            f"{target.location}: is finished, and was made of something else: {reason}; give another target, or "
            "--overwrite without --resume"
        )
    return True


def _is_made(described: Mapping[str, Any], target: Target) -> bool:
    """Whether the target is what this conversion would make: a run was killed when all was done."""
    manifest = target.published(MANIFEST)
    if manifest is None:
        return False
    try:
        found = parse_json(manifest)
        source = found["source"]
    except (ValueError, TypeError, KeyError):
        return False
    return all(
        found.get(name) == described[name] for name in ("format", "version", "plan_id", "files")
    ) and all(source.get(name) == described["source"][name] for name in ("files", "versions"))


def _check_published(target: Target, in_full: bool, observe: Observer = ignore_events) -> None:
    """Refuse a finished target that is not what its manifest says: at a glance, or reading every byte of it."""
    published = target.reopen()
    data = published.read(MANIFEST, 0, published.sizes()[MANIFEST])
    manifest = parse_manifest(data, f"{target.location}/{MANIFEST}")
    if in_full:
        damages = check_target(published, manifest, None, observe).damages
    else:
        damages = glance_at_target(published, manifest)
    if damages:
        more = f", and {len(damages) - 1} more" if len(damages) > 1 else ""
        raise TargetError(
            f"{target.location}: is finished, and damaged: {damages[0].path}: {damages[0].detail}{more}; "
            f"paddle-reshard verify {target.location} tells all, --overwrite without --resume makes it anew"
        )


def run_conversion(
    conversion: ConversionPlan,
    outputs: Outputs,
    engine: Engine,
    observe: Observer,
    resume: bool = False,
    index_files: IndexFiles = index_here,
    verify: bool = False,
    no_space_check: bool = False,
) -> MoveReport:
    """Move, verify and publish: afterwards the targets are there, whole.

    If it does not come to that, nothing looks like a finished target: what is done is kept for a later run to go on
    with, or taken back if the checkpoint was refused. With ``resume``, targets that are there already stay, unless a
    glance shows that they are damaged. What is staged is indexed by ``index_files``. With ``verify`` every byte of all
    targets is read in the end and compared with its checksum.
    """
    check_optimizer(conversion.store, conversion.source)
    report = _run(conversion, outputs, engine, observe, resume, index_files, no_space_check)
    if verify:
        observe(StepStarted("read back"))
        for target in outputs.targets.values():
            _check_published(target, in_full=True, observe=observe)
        observe(StepEnded("read back", "every byte is what the manifest says"))
    return report


def _run(
    conversion: ConversionPlan,
    outputs: Outputs,
    engine: Engine,
    observe: Observer,
    resume: bool,
    index_files: IndexFiles,
    no_space_check: bool,
) -> MoveReport:
    plan, source = conversion.plan, conversion.store
    if resume:
        described = describe_targets(conversion)
        outputs.made = {p for p, target in outputs.targets.items() if _is_made(described[p], target)}
        for prefix in sorted(outputs.made):
            _check_published(outputs.targets[prefix], in_full=False)
        if len(outputs.made) == len(described):
            return MoveReport(0, 0, 0, 0, (), resumed_groups=plan.groups, resumed_bytes=plan.written_bytes)
        check_targets(conversion, outputs, no_space_check)
    with outputs:
        observe(StepStarted("move", plan.written_bytes))
        report, receipts = _move(conversion, outputs, engine, observe)
        reused = f"{report.resumed_groups} groups, {report.resumed_bytes} bytes, were done before"
        before = f"; {reused}" if report.resumed_bytes else ""
        observe(StepEnded("move", f"{report.groups} groups, {report.written_bytes} bytes written{before}"))
        observe(StepStarted("verify"))
        source.check_unchanged()
        planned = dict(zip(outputs.targets, conversion.targets, strict=True))
        for prefix, staged in outputs.finish(receipts).items():
            _check_staged(staged, planned[prefix], index_files)
        observe(StepEnded("verify", "what is staged reads back as a whole checkpoint"))
        observe(StepStarted("publish"))
        described = describe_targets(conversion, report.replica_drift, receipts)
        for prefix, target in outputs.pending():
            manifest = {**described[prefix], "etags": dict(target.etags())}
            target.publish(MANIFEST, format_manifest(manifest))
        observe(StepEnded("publish", outputs.location))
    return report


def check_targets(conversion: ConversionPlan, outputs: Outputs, no_space_check: bool) -> None:
    """Refuse what the targets cannot hold: names that are none, and more bytes than there is room for.

    Raises
    ------
    TargetError
    """
    files = _new_files(conversion.plan)
    outputs.check_names(files)
    if not no_space_check:
        outputs.check_space(files)


def _new_files(plan: Plan) -> list[NewFile]:
    """Every file of the target but the manifest, with the offsets at which its parts start."""
    parts = plan.parts[np.lexsort((plan.parts["start"], plan.parts["file"]))]
    first = np.searchsorted(parts["file"], np.arange(len(plan.target_files) + 1))
    files = [
        NewFile(file.path, file.size_bytes, tuple(parts["start"][first[i] : first[i + 1]].tolist()))
        for i, file in enumerate(plan.target_files)
    ]
    return files + [
        NewFile(c.target_path, c.size_bytes, tuple(range(0, c.size_bytes, COPY_BYTES))) for c in plan.carried
    ]


def _move(
    conversion: ConversionPlan, outputs: Outputs, engine: Engine, observe: Observer
) -> tuple[MoveReport, list[Receipt]]:
    source, plan = conversion.store, conversion.plan
    writer, records = outputs.begin(_new_files(plan), identify(conversion), source.openness)
    # What differed and was allowed then is not taken over by a run that does not allow it.
    done = {
        record.unit: record for record in records if all(_is_allowed(plan, line) for line in record.drift)
    }
    resumed = sum(unit < plan.groups for unit in done)
    read = written = copied = compared = groups = 0
    drift = [line for record in done.values() for line in record.drift]
    receipts = [receipt for record in done.values() for receipt in record.receipts]
    resumed_bytes = sum(receipt.nbytes for receipt in receipts)
    observe(Progress(resumed_bytes, before=True))
    if not isinstance(engine, InlineEngine):
        observe(Waiting("Ray and its workers"))
    figures: list[WorkerFigures] = []
    with closing(engine((w for w in plan_work(plan) if w.group not in done), source, writer)) as reports:
        for report in reports:
            groups += 1
            read, written = read + report.read_bytes, written + report.written_bytes
            copied += report.copied_bytes
            compared += report.compared_elements
            receipts += report.receipts
            figures += report.figures
            found = tuple(f"{d.tensor}: {d.detail}: {d.path_a}, {d.path_b}" for d in report.differences)
            drift += found
            outputs.note(Record(report.group, tuple(report.receipts), found))
            observe(Progress(report.written_bytes))
    for unit, carried in enumerate(plan.carried, plan.groups):
        if unit in done:
            continue
        written_parts = _carry(source, carried, writer)
        receipts += written_parts
        outputs.note(Record(unit, tuple(written_parts)))
        read, written = read + carried.size_bytes, written + carried.size_bytes
        observe(Progress(carried.size_bytes))
    # Groups end in any order on a cluster; the manifest must not depend on it.
    workers = add_figures(figures)
    retries = add_retries(worker.retries for worker in workers)
    moved = MoveReport(
        groups,
        read,
        written,
        compared,
        tuple(sorted(drift)),
        workers,
        retries,
        resumed_groups=resumed,
        resumed_bytes=resumed_bytes,
        copied_bytes=copied,
    )
    return moved, receipts


def _is_allowed(plan: Plan, drift: str) -> bool:
    in_master = MasterDriftError.PHRASE in drift
    return plan.allow_master_drift if in_master else plan.allow_replica_drift


def _carry(source: Source, carried: CarriedFile, writer: WritePart) -> list[Receipt]:
    receipts = []
    for start in range(0, carried.size_bytes, COPY_BYTES):
        block = source.read(carried.source_path, start, min(COPY_BYTES, carried.size_bytes - start))
        receipts.append(writer.write_part(carried.target_path, start, memoryview(block)))
    return receipts


def _check_staged(staged: Source, planned_target: PlannedTarget, index_files: IndexFiles) -> None:
    """Index a staged target as if it were a source: it must be the checkpoint that was planned."""
    wanted, target = planned_target.wanted, planned_target.form
    if isinstance(target, HuggingFaceTarget):
        index_huggingface(staged, staged.sizes(), wanted.model, target)
        return
    missing = MissingPolicy(allowed=tuple(t.key for t in wanted.model.tensors if t.missing))
    found = index_checkpoint(staged, [wanted.model.table], wanted.model.config, missing, index_files)
    if found.topology is not None and isinstance(target, HybridTarget):
        planned, read = target.topology, found.topology
        if (read.tp, read.pp, read.sharding, read.ep) != (
            planned.tp,
            planned.pp,
            planned.sharding,
            planned.ep,
        ):
            raise CheckpointError(
                f"the staged target reads back as {found.topology}, planned was {target.topology}"
            )
    content = wanted.catalog.tensors[: len(wanted.catalog.tensors) - wanted.catalog.borrowed]
    kept = [t for t in content if t.state not in planned_target.left_states]
    one = {(t.key, t.state, t.dtype, t.global_shape) for t in kept}
    two = {(t.key, t.state, t.dtype, t.global_shape) for t in found.catalog.tensors}
    if one != two:
        odd = sorted((key, state) for key, state, *_ in one ^ two)
        raise CheckpointError(f"{odd[0][0]} ({odd[0][1]}): not the same in the source and the staged target")


def describe_targets(
    conversion: ConversionPlan, replica_drift: Sequence[str] = (), receipts: Iterable[Receipt] = ()
) -> dict[str, dict[str, Any]]:
    """Prefix of each target → its manifest: what was made, and from what. The same conversion gives the same bytes."""
    plan, source, store = conversion.plan, conversion.source, conversion.store
    files = {f.path: f.size_bytes for f in plan.target_files}
    files |= {c.target_path: c.size_bytes for c in plan.carried}
    parts = describe_parts(receipts, _copies(plan))
    described = {}
    for prefix, target in zip(prefixes(len(conversion.targets)), conversion.targets, strict=True):
        described[prefix] = {
            **manifest_head(version.__version__),
            "plan_id": plan.plan_id,
            **target_facts(target.form),
            "files": _below(prefix, files),
            "source": {
                "location": absolute(store.location),
                "format": source.format,
                "topology": None if source.topology is None else str(source.topology),
                "sharding_strategy": source.strategy,
                "files": store.sizes(),
                "versions": store.versions(),
                "not_carried": dict(target.left),
                "states_left": list(target.left_states),
                "states_dropped": list(conversion.dropped),
                "replica_drift": list(replica_drift),
            },
            "etags": {},
            "parts": _below(prefix, parts),
        }
    return described


def _below(prefix: str, of_paths: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of one target, by its own paths."""
    return {path.removeprefix(prefix): value for path, value in of_paths.items() if path.startswith(prefix)}


def _copies(plan: Plan) -> dict[tuple[str, int], tuple[str, int]]:
    """File and byte offset of every copied part → file and byte of the source."""
    return {
        (plan.target_files[part["file"]].path, int(part["start"])): (
            plan.source_files[part["source_file"]].path,
            int(part["source_start"]),
        )
        for part in plan.parts[plan.parts["source_file"] != MADE]
    }
