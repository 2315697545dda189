"""Compare two checkpoints, or a checkpoint with itself or with fingerprints.

What only some comparisons need, and takes long to load, is imported where it is used.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paddle_reshard.pipeline.core.backports import Unpack
from paddle_reshard.pipeline.core.errors import UsageError
from paddle_reshard.pipeline.core.events import Observer, ignore_events
from paddle_reshard.pipeline.core.file_names import MANIFEST
from paddle_reshard.pipeline.core.fingerprints import Fingerprints, mismatches
from paddle_reshard.pipeline.core.heap import trim_heap
from paddle_reshard.pipeline.core.shown import (
    ONLY_IN,
    SHOWN_DIFFERENCES,
    Facts,
    Result,
    counted,
    readable_bytes,
    reread_in_words,
)
from paddle_reshard.pipeline.core.units import PathLike, texts_of
from paddle_reshard.pipeline.examine.comparing import compared, run_comparisons
from paddle_reshard.pipeline.examine.reading import Reader, all_local, check_states, joined, spare_of
from paddle_reshard.pipeline.indexing import small_files
from paddle_reshard.pipeline.indexing.pair import Contents, compare_jobs
from paddle_reshard.pipeline.planning.compare import (
    Comparison,
    Difference,
    plan_comparison,
    plan_self_comparison,
)
from paddle_reshard.pipeline.planning.settings import PlanSettings
from paddle_reshard.pipeline.request.options import with_options
from paddle_reshard.pipeline.request.read_options import VerifyOptions
from paddle_reshard.storage.locate import open_source, target_access
from paddle_reshard.storage.store import Source

OF_FINGERPRINTS = "the fingerprints"
"""What messages call the side that ``--against`` gives."""


@dataclass(frozen=True, slots=True, repr=False)
class VerifyReport(Result):
    """The result of a comparison."""

    tensors: int
    compared_elements: int
    read_bytes: int
    differences: tuple[Difference, ...]
    read_amplification: float
    """Bytes read per byte that is needed."""
    read_once_budget_bytes: int | None
    """A budget with which every byte is read once; ``None`` if that was already so."""
    remarks: tuple[str, ...] = ()
    """In what else the two differ, as checkpoints of two jobs may; of a single one what its files do not prove."""

    @property
    def equal(self) -> bool:
        """Whether the logical content is equal."""
        return not self.differences

    def _in_short(self) -> str:
        return self.verdict

    @property
    def verdict(self) -> str:
        """The result in one line."""
        alone = sum(difference.detail.startswith(ONLY_IN) for difference in self.differences)
        lacking = f"{counted(alone, 'tensor')} without a counterpart"
        if alone == len(self.differences):
            outcome = f"different: {lacking}, no others differ" if alone else "equal"
        else:
            outcome = f"different: {counted(len(self.differences), 'difference')}"
            outcome += f", of which {lacking}" if alone else ""
        return f"{outcome}; {self.extent}"

    @property
    def extent(self) -> str:
        """What was compared, in one line."""
        again = reread_in_words(self.read_amplification, self.read_once_budget_bytes)
        read = f"{readable_bytes(self.read_bytes)} read{again}"
        return f"{self.tensors} tensors, {self.compared_elements:,} elements compared ({read})"

    def facts(self) -> Facts:
        """The result and the first differences."""
        shown = [
            (difference.tensor, difference.detail) for difference in self.differences[:SHOWN_DIFFERENCES]
        ]
        return [("result", self.verdict), *shown, *(("remark", remark) for remark in self.remarks)]

    def __bool__(self) -> bool:
        """Whether the two are equal, so that ``assert verify(a, b)`` works as expected."""
        return self.equal


@dataclass(frozen=True)
class Scope:
    """What of a checkpoint is compared, and with what."""

    states: frozenset[str] | None = None
    """States to compare; ``None`` for all states and the small files that a trainer reads."""
    subset: bool = False
    """Whether the second checkpoint may hold fewer tensors; with ``against``, whether the first may."""
    against: Fingerprints | None = None
    """Compared in place of a second checkpoint."""
    resume: Path | None = None
    """The file with the progress of an earlier run."""

    def check(self, two: bool) -> None:
        """Refuse what contradicts itself; ``two`` checkpoints are given, or one."""
        if self.resume is not None and self.against is not None:
            raise UsageError("--resume does not apply to --against")
        if two and self.against is not None:
            raise UsageError("give either a second checkpoint or --against")
        if two or self.against is not None:
            return
        if self.states is not None or self.subset:
            raise UsageError("--states and --subset require two checkpoints, or --against")


@with_options(VerifyOptions)
def verify(
    a: PathLike,
    b: PathLike | None = None,
    *,
    states: Sequence[str] | None = None,
    subset: bool = False,
    against: PathLike | None = None,
    resume: PathLike | None = None,
    observe: Observer = ignore_events,
    progress: bool = False,
    **options: Unpack[VerifyOptions],
) -> VerifyReport:
    """Compare the logical content of two checkpoints of any topologies, bit for bit.

    An implied parameter counts as the cast of its master weight; padding is ignored; aliases are one tensor. A state
    that only one side has is a difference. So are copies of a tensor that differ within a side, and differences in what
    a trainer reads along with the tensors: the learning-rate schedule, the trainer's state, the model's configuration,
    tokenizer files. ``pipeline/indexing/small_files.py`` lists the exceptions. Missing tensors are refused.

    Without ``b``, everything that ``a`` stores twice is compared in full: copies of a tensor, and parameters with their
    master weights. With ``against``, every tensor of ``a`` is compared with its fingerprint instead, and copies of a
    tensor with each other.

    Parameters
    ----------
    states
        Compare only these states, and no small files.
    subset
        Allow ``b`` to hold fewer tensors; with ``against``, allow ``a`` to lack tensors that have a fingerprint.
    against
        A local file with the fingerprints of the tensors that ``a`` should hold, see :func:`fingerprint`.
    resume
        A local file for the progress of the comparison, which continues from it if it exists. It is removed when
        everything is compared.

    Raises
    ------
    ReshardError
        If either is not a complete, consistent checkpoint, or the comparison does not fit ``memory``.
    """
    from paddle_reshard.pipeline.examine.fingerprint import read_fingerprints

    scope = Scope(
        None if states is None else frozenset(texts_of(states)),
        subset,
        None if against is None else read_fingerprints(against),
        None if resume is None else Path(resume),
    )
    other = None if b is None else os.fspath(b)
    return verify_with(os.fspath(a), other, scope, Reader.of(options, observe))


def verify_with(a: str, b: str | None, scope: Scope, reader: Reader) -> VerifyReport:
    """:func:`verify`, with its options as values."""
    scope.check(two=b is not None)
    if scope.against is not None:
        return _verify_against(a, scope.against, scope, reader)
    if b is None:
        return _verify_alone(a, scope, reader)
    return _verify_two(a, b, scope, reader)


def _verify_alone(a: str, scope: Scope, reader: Reader) -> VerifyReport:
    """Compare what a checkpoint stores twice."""
    from paddle_reshard.pipeline.indexing.optimizer_steps import check_optimizer

    store = reader.open(a)
    checkpoint = reader.index(store, pieces=True)
    check_optimizer(store, checkpoint)
    comparison = plan_self_comparison(checkpoint.catalog, _in_steps(reader, [store]))
    remarks = tuple(f"not proven: {what}" for what in (checkpoint.alike, checkpoint.unproven) if what)
    return replace(_compared(comparison, [store], scope, reader), remarks=remarks)


def _verify_against(a: str, against: Fingerprints, scope: Scope, reader: Reader) -> VerifyReport:
    """Compare a checkpoint with fingerprints."""
    from paddle_reshard.pipeline.examine.fingerprint import fingerprints_of, run_sums
    from paddle_reshard.pipeline.planning.sums import plan_sums
    from paddle_reshard.tasks.sums import Sum, added

    store = reader.open(a)
    checkpoint = reader.index(store)
    tensors = checkpoint.catalog.tensors
    chosen = None
    if scope.states is not None:
        check_states(scope.states, tensors.states | against.tensors.states)
        chosen = [n for n in range(len(tensors)) if tensors.identity(n)[1] in scope.states]
        against = against.only(scope.states)
    plan = plan_sums(checkpoint.catalog, reader.planning, chosen, copies=True)
    del checkpoint
    trim_heap()
    sums, differences = list[Sum](), list[Difference]()
    for report in run_sums(plan, store, reader.engine, spare_of([store]), reader.observe):
        sums += report.sums
        differences += compared(report).differences
    store.check_unchanged()
    fingerprints = fingerprints_of(tensors, added(sums), chosen)
    unlike = mismatches(against, fingerprints, (OF_FINGERPRINTS, "the checkpoint"), scope.subset)
    differences += (Difference(entry.tensor, entry.detail) for entry in unlike)
    return VerifyReport(
        len(fingerprints),
        sum(tensor.elements for tensor in fingerprints.tensors),
        plan.read_bytes,
        tuple(sorted(differences, key=lambda difference: difference.tensor)),
        plan.read_amplification,
        plan.read_once_budget_bytes,
    )


def _verify_two(a: str, b: str, scope: Scope, reader: Reader) -> VerifyReport:
    """Compare two checkpoints."""
    stores = reader.open_two(a, b)
    # Only the plan keeps parts of the two catalogs, so the rest is freed.
    comparison, remarks = _plan_two(stores, *reader.index_two(stores), scope, _in_steps(reader, stores))
    trim_heap()
    return replace(_compared(comparison, stores, scope, reader), remarks=remarks)


def _plan_two(
    stores: Sequence[Source], a: Contents, b: Contents, scope: Scope, settings: PlanSettings
) -> tuple[Comparison, tuple[str, ...]]:
    """The plan of a comparison with the differences found so far, and what may differ between two jobs."""
    if scope.states is not None:
        check_states(scope.states, a.catalog.tensors.states | b.catalog.tensors.states)
    planned = plan_comparison(a.catalog, b.catalog, settings, scope.states, scope.subset)
    if scope.states is not None:
        return planned, ()
    further = _small_file_differences(stores, a.job.lr_scheduler, b.job.lr_scheduler, scope.subset)
    of_jobs, remarks = compare_jobs(stores, a, b)
    further += tuple(Difference(what, detail) for what, detail in of_jobs)
    return replace(planned, differences=planned.differences + further), tuple(remarks)


def _in_steps(reader: Reader, stores: Sequence[Source]) -> PlanSettings:
    """How a comparison is planned: local files are read a little at a time."""
    planning = reader.planning
    return replace(planning, sizes=planning.sizes.in_steps()) if all_local(stores) else planning


def _compared(comparison: Comparison, stores: Sequence[Source], scope: Scope, reader: Reader) -> VerifyReport:
    """Run the comparison of two checkpoints, or of one with itself."""
    plan, source = comparison.plan, joined(stores) if len(stores) > 1 else stores[0]
    engine = reader.engine.reserving_metadata(
        len(plan.tensors), len(plan.ops), plan.peak_bytes, spare_of(stores)
    )
    groups = run_comparisons(plan, source, stores, engine, reader.observe, scope.resume)
    for store in stores:
        store.check_unchanged()
    return VerifyReport(
        comparison.tensors,
        sum(group.elements for group in groups),
        sum(group.read_bytes for group in groups),
        (*comparison.differences, *(found for group in groups for found in group.differences)),
        plan.read_amplification,
        plan.read_once_budget_bytes,
    )


def _small_file_differences(
    stores: Sequence[Source], schedule_a: Any, schedule_b: Any, subset: bool
) -> tuple[Difference, ...]:
    """Differences outside the tensors: the schedule, the trainer's state, the configuration, tokenizer files."""
    schedules = [] if subset and schedule_b is None else list(small_files.differences(schedule_a, schedule_b))
    disagreements = [replace(entry, what=f"LR_Scheduler.{entry.what}".rstrip(".")) for entry in schedules]
    disagreements += small_files.compare_small_files(stores[0], stores[1], subset)
    return tuple(Difference(entry.what, f"{entry.a} in A, {entry.b} in B") for entry in disagreements)


def holds_manifest(target: PathLike, **access: Any) -> bool:
    """Whether a folder is a finished target of this package; ``access`` are storage options as for :func:`check`."""
    return MANIFEST in open_source(os.fspath(target), *target_access(access)).sizes()
