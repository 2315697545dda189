"""Plan a conversion from a request: the targets, what they hold, and their files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from paddle_reshard.pipeline.changes.change import Altered, LeftOut
from paddle_reshard.pipeline.checkpoint.checkpoint import Checkpoint, Completion
from paddle_reshard.pipeline.checkpoint.files import LaidOut, SourceListing, TargetFiles
from paddle_reshard.pipeline.checkpoint.format import JobTarget, Target
from paddle_reshard.pipeline.checkpoint.stages import is_apart, with_equal_head
from paddle_reshard.pipeline.core.errors import FormatError
from paddle_reshard.pipeline.core.file_names import CONFIG
from paddle_reshard.pipeline.core.heap import trim_heap
from paddle_reshard.pipeline.core.part_limits import PartLimits
from paddle_reshard.pipeline.core.shown import (
    Facts,
    Result,
    by_reason,
    counted,
    readable_bytes,
    reread_in_words,
)
from paddle_reshard.pipeline.core.tensors import MASTER_WEIGHT, PARAM
from paddle_reshard.pipeline.core.topology import sharding_in_words
from paddle_reshard.pipeline.formats.jobs.job import HybridJob
from paddle_reshard.pipeline.formats.portion import Portion, digest_of, files_of_ranks, job_of, portion_of
from paddle_reshard.pipeline.formats.registry import FORMATS
from paddle_reshard.pipeline.formats.targets import check_nothing_lost, join, lay_out, starts_anew
from paddle_reshard.pipeline.indexing.detect import check_parts
from paddle_reshard.pipeline.indexing.small_files import small_files_naming_code
from paddle_reshard.pipeline.model.model import Model
from paddle_reshard.pipeline.model.optimizers import without_states_in_words
from paddle_reshard.pipeline.model.rules.rule import Rule
from paddle_reshard.pipeline.planning.checks import master_checks, master_checks_of_loaded
from paddle_reshard.pipeline.planning.metadata import FREE_BYTES, check_metadata
from paddle_reshard.pipeline.planning.plan import CarriedFile, Plan, plan_conversion
from paddle_reshard.pipeline.planning.portion import source_of
from paddle_reshard.pipeline.planning.settings import PlanSettings, Tie
from paddle_reshard.pipeline.request.parse import ConversionRequest
from paddle_reshard.pipeline.request.record import averaging
from paddle_reshard.storage.files.mistaken import BEGIN_BYTES, pointer_in_place
from paddle_reshard.storage.outputs import prefixes
from paddle_reshard.storage.store import Source

_NO_BUFFER = "they lie in no buffer of the optimizer, and a job that trains them has other buffers"
ALLOWED = "missing from the source, which was allowed"


@dataclass(frozen=True, repr=False)
class PlannedTarget:
    """One target of a conversion."""

    spec: Target
    wanted: Checkpoint
    """The source as the target will hold it: with the vocabulary resized and dropped layers removed."""
    files: TargetFiles
    """Without their fragments, which the plan contains as ops."""
    carried: tuple[str, ...]
    """Files of the source that are copied byte for byte."""
    not_carried: tuple[tuple[str, str], ...]
    """Files and tensors of the source that are not in the target, each with the reason."""
    states_not_carried: tuple[str, ...]
    """Tensor states that the target cannot hold, or that were not requested."""
    remarks: tuple[str, ...] = ()
    """What a user has to know about the target, a sentence each."""
    donated: tuple[str, ...] = ()
    """Names of small files that another model gave."""

    @property
    def states(self) -> frozenset[str]:
        """The states that the target will hold; an export of averages holds them as parameters."""
        if FORMATS[self.spec.format].model_only:
            return frozenset((PARAM,))
        return self.wanted.catalog.tensors.states.difference(self.states_not_carried)

    def __repr__(self) -> str:
        return f"<PlannedTarget: {self.spec.in_words()}>"


@dataclass(frozen=True, repr=False)
class ConversionPlan(Result):
    """A conversion that can be run."""

    store: Source = field(compare=False)
    """The source's files, as they were when indexed."""
    source: Checkpoint
    targets: tuple[PlannedTarget, ...]
    plan: Plan
    """One plan for all targets, with paths as in :class:`~paddle_reshard.storage.outputs.Outputs`."""
    pieces: int
    """Number of boxes of all targets."""
    target_locations: tuple[str, ...] = ()
    """Locations of the targets; empty if the request named none."""
    losing: tuple[tuple[str, ...], ...] = ()
    """For each target, the states that only the conversion holds which it replaces."""

    dropped: tuple[str, ...] = ()
    """States of the source that were excluded by request."""
    excluded: tuple[LeftOut, ...] = ()
    """What was excluded by request before the targets were laid out."""
    spare_bytes: int = FREE_BYTES
    """Part of the process's footprint that is free for metadata."""
    same_values: bool = False
    """Whether every tensor of a target has the values of the tensor of that name in the source."""
    asked: Mapping[str, Any] | None = None
    """The request as manifests state it (:mod:`~paddle_reshard.pipeline.request.record`)."""
    limits: PartLimits = PartLimits()
    """What the stores of the targets allow."""
    portion: Portion | None = None
    """Which portion of a target is made, of which whole; ``None``: all of it."""

    @property
    def plan_id(self) -> str:
        """The id of the plan; of a portion, that of the plan of the whole."""
        return self.plan.plan_id if self.portion is None else self.portion.plan_id

    @property
    def master_weights_made(self) -> int:
        """Number of master weights that are made from parameters, because the source stores none."""
        if all(MASTER_WEIGHT in target.states_not_carried for target in self.targets):
            return 0
        catalog = self.source.catalog
        return sum(catalog.tensors.identity(number)[1] == MASTER_WEIGHT for number in catalog.implied)

    def _in_short(self) -> str:
        targets = "; ".join(target.spec.in_words() for target in self.targets)
        return (
            f"{source_in_words(self.source)} → {targets}; {readable_bytes(self.plan.written_bytes)} to write"
        )

    def facts(self) -> Facts:
        """What would be read and written, the memory needed, and what is not carried over."""
        decisions = [
            (self._of(number, "sharding"), f"{sharding_in_words(spec.strategy)}: {spec.strategy_reason}")
            for number, spec in enumerate(target.spec for target in self.targets)
            if isinstance(spec, JobTarget)
        ]
        targets = [fact for number, _ in enumerate(self.targets) for fact in self._of_target(number)]
        return [
            *decisions,
            *self._of_source(),
            *targets,
            *self._of_traffic(),
            *self._of_memory(),
            *self._not_carried(),
            *self._of_average(),
        ]

    def _of_target(self, number: int) -> Facts:
        """What a target is, and how a job starts from it where it has no optimizer states."""
        target = self.targets[number]
        several = len(self.targets) > 1 and self.target_locations
        where = f"{self.target_locations[number]}: " if several else ""
        facts = [(self._of(number, "to"), f"{where}{target.spec.in_words()}")]
        arguments = ""
        if self.source.history.masters_made:
            arguments = FORMATS[target.spec.format].starts_with_masters
        elif starts_anew(self.source, target.spec):
            arguments = FORMATS[target.spec.format].starts_with
        if arguments:
            anew = f"the source holds parameters only; a job starts from them with {arguments}"
            facts.append((self._of(number, "optimizer"), anew))
        return facts + [(self._of(number, "remark"), remark) for remark in target.remarks]

    def _of_traffic(self) -> Facts:
        """What is read, written, copied, compared and made."""
        plan = self.plan
        again = reread_in_words(plan.read_amplification, plan.read_once_budget_bytes)
        files = len(plan.target_files) + len(plan.carried)
        held = [tensor for tensor in self.source.model.tensors if not (tensor.of_base and tensor.missing)]
        read = f"{readable_bytes(plan.read_bytes)} from {len(plan.source_files)} tensor files{again}"
        facts = [
            ("tensors", f"{len(plan.tensors) - plan.compared_only} ({len(held)} parameters)"),
            ("reads", read),
            ("writes", f"{readable_bytes(plan.written_bytes)} in {files} files"),
        ]
        if plan.copied_bytes:
            copied = f"{readable_bytes(plan.copied_bytes)} ({plan.copied_share:.0%})"
            facts.append(("copies", f"{copied} by the storage itself"))
        if any(plan.checked_parameters):
            every, some = plan.checked_parameters
            extent = [f"{every} in full"] * (every > 0) + [f"{some} by samples of every array"] * (some > 0)
            facts.append(("checks", f"parameters against their master weights: {', '.join(extent)}"))
        if self.master_weights_made:
            made = f"{self.master_weights_made} master weights from parameters"
            reason = ": the source stores none (remove_master_weight), as the trainer does when it resumes"
            facts.append(("made", f"{made}{'' if self.source.history.masters_made else reason}"))
        return facts

    def _of_memory(self) -> Facts:
        """The memory needed, and the ids of what is planned."""
        plan = self.plan
        peak, budget = readable_bytes(plan.peak_bytes), readable_bytes(plan.budget_bytes)
        facts = [
            ("memory", f"{peak} at most in {counted(plan.groups, 'group')}, budget {budget}"),
            ("plan", self.plan_id),
        ]
        if self.portion is not None:
            share = f"{readable_bytes(plan.written_bytes)} of {readable_bytes(self.portion.written_bytes)}"
            facts += [("portion", f"{self.portion.in_words()}, {share}"), ("whole", self.portion.digest)]
        return facts

    def _of_source(self) -> Facts:
        """What is read, and what was taken from elsewhere."""
        source = self.source
        filled, completion = source.history.filled, source.history.completion
        like = None if completion is None else _completion_in_words(completion, self.targets)
        taken = (
            *(("dequantised", source.history.dequantised), ("merged", source.history.merged)),
            ("filled", None if filled is None else _given_in_words(filled.tensors, filled.location)),
            *(("like", like), ("newer", source.newer), ("not proven", source.unproven)),
            ("keys", source.keys_read),
        )
        return [("from", source_in_words(source)), *((name, said) for name, said in taken if said)]

    def _of_average(self) -> Facts:
        """What is averaged, and how: near the end, as it is all that tells one average from another."""
        sources, how = averaging(self.asked or {})
        return [("average", f"of {', '.join(sources)}, {how}")] if sources else []

    def _not_carried(self) -> Facts:
        facts = [("dropped", f"{', '.join(self.dropped)}: as requested")] if self.dropped else []
        for number, states in enumerate(self.losing):
            if states:
                words = f"{', '.join(states)}: held by the conversion that it replaces, not by this one"
                facts.append((self._of(number, "lost"), words))
        for number, target in enumerate(self.targets):
            if target.states_not_carried:
                model_only = FORMATS[target.spec.format].model_only
                reason = "not requested" if model_only else "not supported by this format"
                facts.append(
                    (self._of(number, "omitted"), f"{', '.join(target.states_not_carried)}: {reason}")
                )
            for reason, names in by_reason(target.not_carried):
                facts.append((self._of(number, "not carried"), f"{names}: {reason}"))
        return facts

    def _of(self, number: int, name: str) -> str:
        return f"{name} {number}" if len(self.targets) > 1 else name


def _completion_in_words(completion: Completion, targets: Sequence[PlannedTarget]) -> str:
    files = sorted({name for target in targets for name in target.donated})
    entries = (f"{entry} of {CONFIG}" for entry in completion.config)
    return _given_in_words(completion.tensors, completion.location, *files, *entries)


def _given_in_words(tensors: Sequence[str], location: str, *further: str) -> str:
    """What another model gave."""
    named = (names for _, names in by_reason([(key, "") for key in tensors]))
    return f"{', '.join((*named, *further)) or 'nothing was lacking'}: from {location}"


def source_in_words(source: Checkpoint) -> str:
    """Format, topology and sharding strategy."""
    described = source.model.table.described_in
    if source.job.topology is None:
        return f"{source.format}{described}"
    return f"{source.format}, {source.job.topology}, {sharding_in_words(source.job.strategy)}{described}"


def plan_checkpoint(
    altered: Altered,
    request: ConversionRequest,
    limits: PartLimits = PartLimits(),
    spare_bytes: int | None = None,
) -> ConversionPlan:
    """Plan a conversion of a checkpoint to which all changes are applied. ``limits`` are those of the targets' stores.

    If the groups will run in this process, ``spare_bytes`` is the part of its footprint that is free for metadata. The
    metadata are then checked against the budget before memory is used in proportion to them.
    """
    for asked in request.target_requests:
        altered.source.model.table.check_format(asked.format, altered.source.model.config)
    specs = [asked.target_for(altered.source) for asked in request.target_requests]
    for spec in specs:
        check_parts(altered.source, spec.topology.tp if isinstance(spec, HybridJob) else None)
    if _ties_heads(specs, request, altered.source.model):
        altered = altered.each(with_equal_head)
    store, source, wanted = altered.store, altered.source, altered.wanted
    planning = replace(request.planning, tied=_ties_of(source))
    sizes, listing = store.sizes(), _listing(store, specs)
    _check_room(source, None, request, spare_bytes)
    laid_out = [lay_out(source, wanted, spec, listing) for spec in specs]
    check_nothing_lost(specs, laid_out)
    joined = join(source.catalog, laid_out, prefixes(len(laid_out)))
    _check_room(source, joined, request, spare_bytes)
    carried = _carried(laid_out, sizes)
    _refuse_pointers(store, carried)
    checks = master_checks(source.catalog, joined.catalog)
    plan = plan_conversion(joined.catalog, joined.files, carried, planning, limits, checks)
    portion = None
    if request.ranks:
        portion = _portion(store, source, specs[0], joined, plan, request.ranks)
        plan, joined = _plan_portion(portion, specs[0], source, joined, carried, planning, limits)
    targets = tuple(_planned_targets(source, wanted, specs, laid_out))
    pieces = len(joined.files.fragments)
    del laid_out, joined
    if spare_bytes is not None:
        trim_heap()
    return ConversionPlan(
        *(store, source, targets, plan, pieces),
        dropped=altered.dropped,
        excluded=altered.excluded,
        limits=limits,
        portion=portion,
    )


def _ties_heads(specs: Sequence[Target], request: ConversionRequest, model: Model) -> bool:
    """Whether all targets tie the heads that the source has apart, and one run compares all copies and refuses
    differences."""
    heads = [tensor.rule for tensor in model.tensors if is_apart(tensor, model)]
    tie = bool(heads) and all(_ties(spec, rule) for spec in specs for rule in heads)
    compared = request.planning.compare_replicas and not request.planning.allow_replica_drift
    return bool(specs) and tie and compared and not request.ranks


def _ties_of(source: Checkpoint) -> dict[str, Tie]:
    """The tensors that are no copies of each other although the model has one for both."""
    # A published model may have been trained by another class, which has two. In files of a job they are copies.
    by_class = source.model.tied_by_class if FORMATS[source.format].model_only else {}
    ties = {key: Tie(twin, by_class=True) for key, twin in by_class.items()}
    return ties | {key: Tie(twin, by_class=False) for key, twin in source.model.tied_by_config.items()}


def _ties(spec: Target, head: Rule) -> bool:
    """Whether a target has one tensor for a head that some jobs tie; an export has a config that says what it is."""
    if isinstance(spec, HybridJob):
        return not head.is_own(spec.topology.pp)
    return head.own_without_stages and not FORMATS[spec.format].model_only


def _check_room(
    source: Checkpoint, laid_out: LaidOut | None, request: ConversionRequest, spare_bytes: int | None
) -> None:
    """Refuse metadata of the source, and of what is laid out so far, that take more than is spare in this process."""
    if spare_bytes is not None:
        pieces = None if laid_out is None else len(laid_out.files.fragments)
        tensors = len(source.catalog.tensors)
        check_metadata(tensors, pieces, 0, request.planning.budget_bytes, spare_bytes)
        trim_heap()


def _portion(
    store: Source, source: Checkpoint, spec: Target, whole: LaidOut, plan: Plan, ranks: Sequence[int]
) -> Portion:
    """Which portion of which whole is made. The state of the source is told by times or, of objects, by versions."""
    job = job_of(spec, source, ranks)
    state = {
        path: (size, (store.modified() or store.versions()).get(path)) for path, size in store.sizes().items()
    }
    carried = [(file.target_path, file.size_bytes) for file in plan.carried]
    return Portion(
        tuple(ranks),
        job.topology.world_size,
        plan.plan_id,
        digest_of(whole.files, whole.catalog, carried, state),
        plan.written_bytes,
        _without_fragments(whole.files),
        job,
    )


def _listing(store: Source, specs: Sequence[Target]) -> SourceListing:
    """What the folder holds; small files are opened for models only, which others load as they are."""
    exported = any(FORMATS[spec.format].model_only for spec in specs)
    return SourceListing(store.sizes(), store.folders, small_files_naming_code(store) if exported else {})


def laid_out_again(conversion: ConversionPlan) -> list[LaidOut]:
    """The targets of a plan, laid out again, with the files that it makes."""
    source, store = conversion.source, conversion.store
    listing = _listing(store, [target.spec for target in conversion.targets])
    laid_out = [lay_out(source, target.wanted, target.spec, listing) for target in conversion.targets]
    if conversion.portion is None:
        return laid_out
    made = frozenset(file.path for file in conversion.plan.target_files)
    return [replace(one, files=portion_of(one.files, made)) for one in laid_out]


def _plan_portion(
    portion: Portion,
    spec: Target,
    source: Checkpoint,
    whole: LaidOut,
    carried: Sequence[CarriedFile],
    settings: PlanSettings,
    limits: PartLimits,
) -> tuple[Plan, LaidOut]:
    """The plan of a portion, and what it lays out."""
    paths = files_of_ranks(spec, source, [file.path for file in whole.files.files], portion.ranks)
    files = portion_of(whole.files, paths)
    catalog = source_of(whole.catalog, files.fragments)
    checks = master_checks_of_loaded(whole.catalog, files.fragments)
    return plan_conversion(catalog, files, carried, settings, limits, checks), replace(whole, files=files)


def _carried(laid_out: Sequence[LaidOut], sizes: Mapping[str, int]) -> list[CarriedFile]:
    """Files that the targets take over whole: first those of the source, then those of a donor."""
    targets = list(zip(prefixes(len(laid_out)), laid_out, strict=True))
    own = [(path, prefix + path) for prefix, layout in targets for path in layout.sidecars.carried]
    donated = [(path, prefix + name) for prefix, layout in targets for path, name in layout.sidecars.donated]
    return [CarriedFile(path, name, sizes[path]) for path, name in own + donated]


def _refuse_pointers(store: Source, carried: Iterable[CarriedFile]) -> None:
    """Refuse Git LFS pointers in place of small files, which a target would get without what they point to."""
    for file in carried:
        if 0 < file.size_bytes <= BEGIN_BYTES and (
            found := pointer_in_place(store.read(file.source_path, 0, file.size_bytes))
        ):
            raise FormatError("another_file", file.source_path, None, f"{found}, or remove it")


def _planned_targets(
    source: Checkpoint, wanted: Checkpoint, specs: Sequence[Target], laid_out: Sequence[LaidOut]
) -> Iterator[PlannedTarget]:
    not_carried = (
        *source.not_carried,
        *((t.key, ALLOWED) for t in source.model.tensors if t.missing and not t.of_base),
    )
    without = without_states_in_words(wanted.model.tensors)
    for spec, layout in zip(specs, laid_out, strict=True):
        keeps_states = bool(without) and bool(FORMATS[spec.format].starts_with)
        yield PlannedTarget(
            spec,
            wanted,
            _without_fragments(layout.files),
            layout.sidecars.carried,
            (*layout.sidecars.not_carried, *not_carried),
            layout.states_not_carried,
            (*layout.remarks, *([f"{without}; {_NO_BUFFER}"] if keeps_states else [])),
            tuple(name for _, name in layout.sidecars.donated),
        )


def _without_fragments(files: TargetFiles) -> TargetFiles:
    """The files without their fragments, which take memory and are in the plan as ops."""
    return replace(files, fragments=files.fragments[:0].copy())
