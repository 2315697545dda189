"""Are two checkpoints the same, is a checkpoint at one with itself, is a target what its manifest says?"""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from paddle_reshard.clusters.inline import InlineEngine
from paddle_reshard.pipeline.convert.inputs import given_inputs
from paddle_reshard.pipeline.convert.integrity import IntegrityReport, check_target
from paddle_reshard.pipeline.convert.manifest import parse_manifest
from paddle_reshard.pipeline.convert.options import check_names, takes
from paddle_reshard.pipeline.convert.plan import reread_in_words
from paddle_reshard.pipeline.convert.read_options import CheckOptions, VerifyOptions
from paddle_reshard.pipeline.convert.request import parse_choice
from paddle_reshard.pipeline.core.backports import Unpack
from paddle_reshard.pipeline.core.choices import REPLICAS
from paddle_reshard.pipeline.core.errors import CheckpointError, UsageError
from paddle_reshard.pipeline.core.events import Observer, Progress, StepStarted, ignore_events
from paddle_reshard.pipeline.core.file_names import MANIFEST
from paddle_reshard.pipeline.core.heap import trim_heap
from paddle_reshard.pipeline.core.shown import SHOWN_DIFFERENCES, Facts, Shown, readable_bytes
from paddle_reshard.pipeline.core.suggest import did_you_mean
from paddle_reshard.pipeline.core.units import DEFAULT_MEMORY, PathLike, parse_memory, texts_of
from paddle_reshard.pipeline.indexing import small_files
from paddle_reshard.pipeline.indexing.detect import index_checkpoint
from paddle_reshard.pipeline.indexing.optimizer_steps import check_optimizer
from paddle_reshard.pipeline.indexing.pair import Contents, index_pair
from paddle_reshard.pipeline.layouts.checkpoint import MissingPolicy
from paddle_reshard.pipeline.planning.compare import (
    SIDE_A,
    SIDE_B,
    Comparison,
    Difference,
    plan_comparison,
    plan_self_comparison,
)
from paddle_reshard.pipeline.planning.metadata import check_metadata, spare_bytes
from paddle_reshard.pipeline.planning.settings import PlanSettings, PlanSizes
from paddle_reshard.pipeline.planning.work import plan_work
from paddle_reshard.storage.locate import Access, is_local, open_source, source_access, target_access
from paddle_reshard.storage.store import ReadRange, Source
from paddle_reshard.storage.views import JoinedSource, Mount
from paddle_reshard.tasks.index import index_here


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


@dataclass(frozen=True)
class VerifyRequest:
    """A comparison as it was asked for, every value read and in range."""

    a: str
    b: str | None
    """``None``: what ``a`` stores twice is compared."""
    access: tuple[Access, Access]
    """How each of the two is reached."""
    rules: PathLike | None
    config: PathLike | None
    missing: MissingPolicy
    planning: PlanSettings
    states: frozenset[str] | None = None
    """Only these states; ``None``: all, and what a trainer reads beside the tensors."""
    subset: bool = False
    """Whether ``b`` may hold less."""

    def __post_init__(self) -> None:
        if self.b is None and (self.states is not None or self.subset):
            raise UsageError("states and subset are for two checkpoints; one is held against itself")


@takes(VerifyOptions)
def verify(
    a: PathLike,
    b: PathLike | None = None,
    *,
    states: Sequence[str] | None = None,
    subset: bool = False,
    observe: Observer = ignore_events,
    **options: Unpack[VerifyOptions],
) -> VerifyReport:
    """Compare the logical content of two checkpoints of any topologies, bit for bit.

    An implied parameter is the cast of its master weight; padding is not content; aliases are one tensor. A
    state that only one side has is a difference, and so is what a trainer reads beside the tensors: the learning-rate
    schedule, the trainer's state, the model's configuration, tokenizer files; what of it may differ is listed in
    ``pipeline/indexing/small_files.py``. So are copies of a tensor that differ within a side. Tensors that no file of a
    side holds are refused.

    Without ``b``, what ``a`` stores twice is compared, every element of it: copies of a tensor, and parameters with
    their master weights.

    Parameters
    ----------
    states
        Compare only these, and nothing that is not a tensor.
    subset
        Allow that ``b`` has less.
    observe
        Is told how far it is as event values, as by :func:`convert`.
    options
        :class:`VerifyOptions`.

    Raises
    ------
    ReshardError
        If one of the two is not a whole, consistent checkpoint, or the comparison does not fit ``memory``.
    """
    return verify_request(read_verify_request(a, b, states, subset, options), observe)


def read_verify_request(
    a: PathLike,
    b: PathLike | None,
    states: Sequence[str] | None,
    subset: bool,
    options: VerifyOptions,
    sizes: PlanSizes = PlanSizes(),
) -> VerifyRequest:
    """What is asked for.

    Raises
    ------
    UsageError
        If it makes no sense.
    """
    check_names(options, VerifyOptions)
    return VerifyRequest(
        a=os.fspath(a),
        b=None if b is None else os.fspath(b),
        access=(source_access(options), target_access(options)),
        rules=options.get("rules"),
        config=options.get("config"),
        missing=MissingPolicy(allowed=texts_of(options.get("allow_missing", ()))),
        planning=PlanSettings(
            compare_replicas=parse_choice(
                options.get("replicas", REPLICAS[0]), REPLICAS, "choice of replicas"
            ),
            budget_bytes=parse_memory(options.get("memory", DEFAULT_MEMORY)),
            sizes=sizes,
        ),
        states=None if states is None else frozenset(texts_of(states)),
        subset=subset,
    )


def verify_request(request: VerifyRequest, observe: Observer = ignore_events) -> VerifyReport:
    """Make a comparison that :func:`read_verify_request` has read."""
    if request.b is None:
        return _verify_alone(request, observe)
    return _verify_two(request, request.b, observe)


def _verify_alone(request: VerifyRequest, observe: Observer) -> VerifyReport:
    """Compare what a checkpoint stores twice."""
    store = open_source(request.a, *request.access[0])
    inputs = given_inputs(request.rules, request.config)
    checkpoint = index_checkpoint(store, *inputs, request.missing, partial(index_here, observe=observe))
    check_optimizer(store, checkpoint)
    comparison = plan_self_comparison(checkpoint.catalog, request.planning)
    report = _compared(comparison, store, _spare(request), observe)
    store.check_unchanged()
    return report


def _verify_two(request: VerifyRequest, b: str, observe: Observer) -> VerifyReport:
    """Compare two checkpoints."""
    stores = [open_source(place, *reach) for place, reach in zip((request.a, b), request.access, strict=True)]
    inputs = given_inputs(request.rules, request.config)
    index_files = partial(index_here, observe=observe)
    # The plan is all that is kept of the two catalogs.
    comparison = _plan_two(
        request, stores, *index_pair(stores[0], stores[1], *inputs, request.missing, index_files)
    )
    trim_heap()
    pair = JoinedSource((Mount(SIDE_A, stores[0]), Mount(SIDE_B, stores[1])))
    report = _compared(comparison, pair, _spare(request), observe)
    for store in stores:
        store.check_unchanged()
    return report


def _plan_two(request: VerifyRequest, stores: Sequence[Source], one: Contents, two: Contents) -> Comparison:
    _check_states(request.states, one.catalog.tensors.states | two.catalog.tensors.states)
    tensors = max(len(side.catalog.tensors) for side in (one, two))
    pieces = max(len(side.catalog.fragments) for side in (one, two))
    check_metadata(tensors, pieces, 0, request.planning.budget_bytes, _spare(request))
    planned = plan_comparison(one.catalog, two.catalog, request.planning, request.states, request.subset)
    differences = planned.differences
    if request.states is None:
        differences += _small_file_differences(stores, one.lr_scheduler, two.lr_scheduler, request.subset)
    return replace(planned, differences=differences)


def _spare(request: VerifyRequest) -> int:
    """What of the footprint is free for metadata."""
    return spare_bytes(all(place is None or is_local(place) for place in (request.a, request.b)))


def _check_states(chosen: Collection[str] | None, known: Collection[str]) -> None:
    if unknown := set(chosen or ()) - set(known):
        raise UsageError(
            f"neither checkpoint has the state {min(unknown)!r}; known: {', '.join(sorted(known))}"
            f"{did_you_mean(min(unknown), known)}"
        )


def _compared(comparison: Comparison, source: ReadRange, spare_bytes: int, observe: Observer) -> VerifyReport:
    """Make a comparison; ``spare_bytes`` of the footprint are free for metadata."""
    plan = comparison.plan
    engine = InlineEngine(plan.budget_bytes)
    engine = engine.beside(len(plan.tensors), len(plan.ops), plan.peak_bytes, spare_bytes)
    differences = list(comparison.differences)
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


def _small_file_differences(
    stores: Sequence[Source], schedule_a: Any, schedule_b: Any, subset: bool
) -> tuple[Difference, ...]:
    """What differs beside the tensors: the schedule, what the trainer says of itself, the configuration."""
    schedules = [] if subset and schedule_b is None else list(small_files.differences(schedule_a, schedule_b))
    told = [replace(odd, what=f"LR_Scheduler.{odd.what}".rstrip(".")) for odd in schedules]
    told += small_files.compare_small_files(stores[0], stores[1], subset)
    return tuple(Difference(odd.what, f"{odd.a} in A, {odd.b} in B") for odd in told)


@takes(CheckOptions)
def check(
    target: PathLike,
    *,
    source: PathLike | None = None,
    observe: Observer = ignore_events,
    **options: Unpack[CheckOptions],
) -> IntegrityReport:
    """Compare a target with its manifest: every file, every part, every byte.

    Parameters
    ----------
    source
        The checkpoint that the target was made from. Parts that the storage copied by itself, and told no MD5 of, are
        compared with it. The location that the manifest names is never opened.
    observe
        Is told how far it is as event values, as by :func:`convert`.
    options
        :class:`CheckOptions`.

    Raises
    ------
    CheckpointError
        If it has no manifest, so that it is no finished target, or one without checksums; if ``source`` is not there.
    """
    check_names(options, CheckOptions)
    store = open_source(os.fspath(target), *target_access(options))
    made_from = None if source is None else open_source(os.fspath(source), *source_access(options))
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
