"""Compare two checkpoints, or a checkpoint with itself or with fingerprints.

What only some comparisons need, and takes long to load, is imported where it is used.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paddle_reshard.clusters.choose import choose_engine
from paddle_reshard.clusters.engine import Engine
from paddle_reshard.pipeline.checkpoint.checkpoint import MissingPolicy
from paddle_reshard.pipeline.core.backports import Unpack
from paddle_reshard.pipeline.core.choices import REPLICAS, parse_choice
from paddle_reshard.pipeline.core.errors import CheckpointError, UnsupportedError, UsageError
from paddle_reshard.pipeline.core.events import Observer, ignore_events
from paddle_reshard.pipeline.core.file_names import MANIFEST
from paddle_reshard.pipeline.core.fingerprints import Fingerprints, mismatches
from paddle_reshard.pipeline.core.heap import trim_heap
from paddle_reshard.pipeline.core.shown import (
    SHOWN_DIFFERENCES,
    Facts,
    Shown,
    counted,
    readable_bytes,
    reread_in_words,
)
from paddle_reshard.pipeline.core.suggest import did_you_mean
from paddle_reshard.pipeline.core.tensor_columns import Tensors
from paddle_reshard.pipeline.core.units import DEFAULT_MEMORY, PathLike, parse_memory, texts_of
from paddle_reshard.pipeline.examine.comparing import compared, differences_of, run_comparisons
from paddle_reshard.pipeline.indexing import small_files
from paddle_reshard.pipeline.indexing.detect import index_checkpoint
from paddle_reshard.pipeline.indexing.opening import open_checkpoint
from paddle_reshard.pipeline.indexing.pair import Contents, index_pair
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
from paddle_reshard.pipeline.request.inputs import given_inputs
from paddle_reshard.pipeline.request.options import check_names, takes
from paddle_reshard.pipeline.request.read_options import VerifyOptions
from paddle_reshard.storage.documents.manifest import own_manifest
from paddle_reshard.storage.locate import Access, is_local, open_source, source_access, target_access
from paddle_reshard.storage.store import ReadRange, Source
from paddle_reshard.storage.views import JoinedSource, Mount


@dataclass(frozen=True, slots=True, repr=False)
class VerifyReport(Shown):
    """The result of a comparison."""

    tensors: int
    compared_elements: int
    read_bytes: int
    differences: tuple[Difference, ...]
    read_amplification: float
    """Bytes read per byte that is needed."""
    read_once_budget_bytes: int | None
    """A budget with which every byte is read once; ``None`` if that was already so."""
    signed_by: str | None = None
    """Whose signature the fingerprints have: ``key sha256:…``; ``None`` if no public key was given."""

    @property
    def equal(self) -> bool:
        """Whether the logical content is equal."""
        return not self.differences

    def _in_short(self) -> str:
        return self.verdict

    @property
    def verdict(self) -> str:
        """The result in one line."""
        outcome = "equal" if self.equal else f"different: {counted(len(self.differences), 'difference')}"
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
        signer = [] if self.signed_by is None else [("signed by", self.signed_by)]
        return [("result", self.verdict), *signer, *shown]

    def __bool__(self) -> bool:
        """Whether the two are equal, so that ``assert verify(a, b)`` works as expected."""
        return self.equal


@dataclass(frozen=True)
class VerifyRequest:
    """A requested comparison, with every value parsed and in range."""

    a: str
    b: str | None
    """``None``: compare what ``a`` stores twice."""
    access: tuple[Access, Access]
    """Access to ``a`` and to ``b``."""
    rules: PathLike | None
    config: PathLike | None
    missing: MissingPolicy
    engine: Engine
    """Where groups are compared."""
    planning: PlanSettings
    states: frozenset[str] | None = None
    """States to compare; ``None`` for all states and the small files that a trainer reads."""
    subset: bool = False
    """Whether ``b`` may hold fewer tensors; with ``against``, whether ``a`` may."""
    against: Fingerprints | None = None
    """What ``a`` is compared with, instead of ``b``."""
    signed_by: str | None = None
    """Whose signature ``against`` has, if that was checked."""
    recorded: bool = False
    """Whether manifests are compared, and nothing else is read."""
    resume: Path | None = None
    """The file with the progress of an earlier run."""

    def __post_init__(self) -> None:
        if self.resume is not None and (self.recorded or self.against is not None):
            raise UsageError("--resume does not apply to --against and --recorded")
        if self.recorded and self.b is None and self.against is None:
            raise UsageError("--recorded compares two targets, or one with --against")
        if self.b is not None and self.against is not None:
            raise UsageError("give either a second checkpoint or --against")
        if self.b is None and self.against is None and (self.states is not None or self.subset):
            raise UsageError("--states and --subset require two checkpoints, or --against")


@takes(VerifyOptions)
def verify(
    a: PathLike,
    b: PathLike | None = None,
    *,
    states: Sequence[str] | None = None,
    subset: bool = False,
    against: PathLike | None = None,
    recorded: bool = False,
    resume: PathLike | None = None,
    public_key: PathLike | None = None,
    ca_certificate: PathLike | None = None,
    signature: PathLike | None = None,
    observe: Observer = ignore_events,
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
        A local file with the fingerprints of the tensors that ``a`` should hold, see :func:`fingerprint`; or the
        manifest of a target.
    recorded
        Compare only the fingerprints in the manifests of ``a`` and ``b``, or in that of ``a`` with ``against``. No
        tensor and no small file is read, so damage since they were written goes unnoticed; :func:`check` finds it.
    resume
        A local file for the progress of the comparison, which continues from it if it exists. It is removed when
        everything is compared.
    public_key
        With ``against``: the public key of the signature of that file, in PEM format. Nothing is compared unless the
        signature is right. Needs the extra ``sign``.
    ca_certificate
        The same with certificates of authorities, in PEM format: one of them must have issued the signer's certificate.
    signature
        A local file with that signature, by default ``against`` with ``.sig`` appended. See :func:`sign`.
    observe
        Called with events that report progress, as in :func:`convert`.
    options
        :class:`VerifyOptions`.

    Raises
    ------
    ReshardError
        If either is not a complete, consistent checkpoint, or the comparison does not fit ``memory``.
    SignatureError
        If ``against`` has no signature, or not by the owner of ``public_key`` or of a certificate.
    """
    request = read_verify_request(
        a, b, states, subset, options, against, recorded, resume, public_key, ca_certificate, signature
    )
    return verify_request(request, observe)


def read_verify_request(
    a: PathLike,
    b: PathLike | None,
    states: Sequence[str] | None,
    subset: bool,
    options: VerifyOptions,
    against: PathLike | None = None,
    recorded: bool = False,
    resume: PathLike | None = None,
    public_key: PathLike | None = None,
    ca_certificate: PathLike | None = None,
    signature: PathLike | None = None,
    sizes: PlanSizes = PlanSizes(),
) -> VerifyRequest:
    """Parse the options of a comparison.

    Raises
    ------
    UsageError
        If an option is invalid, or options contradict each other.
    """
    check_names(options, VerifyOptions)
    budget_bytes = parse_memory(options.get("memory", DEFAULT_MEMORY))
    fingerprints, signer = _given_fingerprints(against, public_key, ca_certificate, signature)
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
            budget_bytes=budget_bytes,
            sizes=sizes,
        ),
        states=None if states is None else frozenset(texts_of(states)),
        subset=subset,
        signed_by=signer,
        against=fingerprints,
        recorded=recorded,
        engine=choose_engine(
            options.get("cluster", "inline"),
            options.get("workers"),
            budget_bytes,
            label_selector=texts_of(options.get("label_selector", ())),
        ),
        resume=None if resume is None else Path(resume),
    )


def _given_fingerprints(
    against: PathLike | None,
    public_key: PathLike | None,
    ca_certificate: PathLike | None,
    signature: PathLike | None,
) -> tuple[Fingerprints | None, str | None]:
    """The fingerprints in a file, and who signed them, if there is something to check that with."""
    if all(given is None for given in (against, public_key, ca_certificate, signature)):
        return None, None
    from paddle_reshard.pipeline.examine.fingerprint import parse_document, read_document
    from paddle_reshard.pipeline.examine.signing import read_trusted, signer_of_file

    trusted = read_trusted(public_key, ca_certificate, signature)
    if trusted is not None and against is None:
        raise UsageError(f"{trusted.option} requires --against, or a single target with a manifest")
    if against is None:
        return None, None
    data = read_document(against)
    signer = signer_of_file(against, data, trusted, signature)
    return parse_document(data, against), signer


def verify_request(request: VerifyRequest, observe: Observer = ignore_events) -> VerifyReport:
    """Run a request made by :func:`read_verify_request`."""
    request = replace(request, engine=request.engine.observed(observe))
    return replace(_run(request, observe), signed_by=request.signed_by)


def _run(request: VerifyRequest, observe: Observer) -> VerifyReport:
    if request.recorded:
        return _verify_recorded(request)
    if request.against is not None:
        return _verify_against(request, request.against, observe)
    if request.b is None:
        return _verify_alone(request, observe)
    return _verify_two(request, request.b, observe)


def _verify_alone(request: VerifyRequest, observe: Observer) -> VerifyReport:
    """Compare what a checkpoint stores twice."""
    from paddle_reshard.pipeline.indexing.optimizer_steps import check_optimizer

    store = open_checkpoint(request.a, request.access[0])
    inputs = given_inputs(request.rules, request.config)
    checkpoint = index_checkpoint(store, *inputs, request.missing, request.engine.indexing(observe), True)
    check_optimizer(store, checkpoint)
    comparison = plan_self_comparison(checkpoint.catalog, _in_steps(request))
    report = _compared(comparison, store, [store], request, observe)
    store.check_unchanged()
    return report


def _verify_against(request: VerifyRequest, against: Fingerprints, observe: Observer) -> VerifyReport:
    """Compare a checkpoint with fingerprints."""
    from paddle_reshard.pipeline.convert.sums import fingerprints_of, run_reads
    from paddle_reshard.pipeline.planning.sums import plan_sums
    from paddle_reshard.tasks.sums import Sum, added

    store = open_checkpoint(request.a, request.access[0])
    inputs = given_inputs(request.rules, request.config)
    checkpoint = index_checkpoint(store, *inputs, request.missing, request.engine.indexing(observe))
    tensors = checkpoint.catalog.tensors
    _check_states(request.states, tensors.states | against.tensors.states)
    chosen = _of_states(tensors, request.states)
    if request.states is not None:
        against = against.only(request.states)
    plan = plan_sums(checkpoint.catalog, request.planning, chosen, copies=True)
    del checkpoint
    trim_heap()
    sums, differences = list[Sum](), list[Difference]()
    for report in run_reads(plan, store, request.engine, _spare(request), observe):
        sums += report.sums
        differences += differences_of([compared(report)])
    store.check_unchanged()
    fingerprints = fingerprints_of(tensors, added(sums), chosen)
    unlike = mismatches(against, fingerprints, ("the fingerprints", "the checkpoint"), request.subset)
    differences += (Difference(entry.tensor, entry.detail) for entry in unlike)
    elements = sum(tensor.elements for tensor in fingerprints.tensors)
    return VerifyReport(
        len(fingerprints),
        elements,
        plan.read_bytes,
        tuple(sorted(differences, key=lambda difference: difference.tensor)),
        plan.read_amplification,
        plan.read_once_budget_bytes,
    )


def _verify_recorded(request: VerifyRequest) -> VerifyReport:
    """Compare the fingerprints in manifests."""
    names = ("A", "B") if request.against is None else ("the manifest", "the fingerprints")
    a = _recorded(request.a, request.access[0])
    b = _recorded(request.b, request.access[1]) if request.b is not None else request.against
    assert b is not None  # noqa: S101
    _check_states(request.states, a.tensors.states | b.tensors.states)
    if request.states is not None:
        a, b = a.only(request.states), b.only(request.states)
    if request.against is None:
        unlike = mismatches(a, b, names, request.subset)
    else:
        unlike = mismatches(b, a, names[::-1], request.subset)
    differences = tuple(Difference(entry.tensor, entry.detail) for entry in unlike)
    common = sum(b.tensors.find(*a.tensors.identity(number)) is not None for number in range(len(a)))
    return VerifyReport(common, 0, 0, differences, 1.0, None)


def _recorded(location: str, access: Access) -> Fingerprints:
    """The fingerprints in the manifest of a target, whose files have the names and sizes that it lists.

    Raises
    ------
    CheckpointError
        If it has none, or not of all tensors, or if files were changed visibly.
    """
    from paddle_reshard.pipeline.convert.integrity import check_target_quickly, manifest_of

    store = open_source(location, *access)
    manifest = manifest_of(store)[1]
    if manifest.fingerprints is None:
        raise CheckpointError(f"{store.location}: its {MANIFEST} records no fingerprints; omit --recorded")
    if unknown := manifest.unknown_fingerprints:
        known = len(manifest.fingerprints)
        raise CheckpointError(
            f"{store.location}: its {MANIFEST} records the fingerprints of {known} of {known + unknown} tensors only; "
            "omit --recorded, or convert with --fingerprint full"
        )
    if damages := check_target_quickly(store, manifest):
        raise CheckpointError(f"{store.location}: {damages[0].path}: {damages[0].detail}")
    return manifest.fingerprints


def _of_states(tensors: Tensors, states: Collection[str] | None) -> list[int]:
    """The numbers of the tensors of ``states``; ``None`` for all."""
    return [n for n in range(len(tensors)) if states is None or tensors.identity(n)[1] in states]


def _verify_two(request: VerifyRequest, b: str, observe: Observer) -> VerifyReport:
    """Compare two checkpoints."""
    stores = [
        open_checkpoint(location, access)
        for location, access in zip((request.a, b), request.access, strict=True)
    ]
    _refuse_quantised(stores)
    inputs = given_inputs(request.rules, request.config)
    index_files = request.engine.indexing(observe)
    # Only the plan keeps parts of the two catalogs, so the rest is freed.
    comparison = _plan_two(
        request, stores, *index_pair(stores[0], stores[1], *inputs, request.missing, index_files)
    )
    trim_heap()
    pair = JoinedSource((Mount(SIDE_A, stores[0]), Mount(SIDE_B, stores[1])))
    report = _compared(comparison, pair, stores, request, observe)
    for store in stores:
        store.check_unchanged()
    return report


def _refuse_quantised(stores: Sequence[Source]) -> None:
    """Refuse to compare a checkpoint with an export whose values were rounded when it was made."""
    quantised = []
    for store in stores:
        sizes = store.sizes()
        made = own_manifest(store.read(MANIFEST, 0, sizes[MANIFEST]) if MANIFEST in sizes else None)
        quantised.append(None if made is None else made.get("quantize"))
    if quantised[1] is not None and quantised[0] != quantised[1]:
        place = stores[1].location
        raise UnsupportedError(
            f"{place}: its weights were quantised to {quantised[1]}, so no checkpoint has the same values; "
            f"paddle-reshard verify {place} compares its bytes with its manifest"
        )


def _plan_two(
    request: VerifyRequest, stores: Sequence[Source], contents_a: Contents, contents_b: Contents
) -> Comparison:
    _check_states(request.states, contents_a.catalog.tensors.states | contents_b.catalog.tensors.states)
    tensors = max(len(side.catalog.tensors) for side in (contents_a, contents_b))
    pieces = max(len(side.catalog.fragments) for side in (contents_a, contents_b))
    if request.engine.in_process:
        check_metadata(tensors, pieces, 0, request.planning.budget_bytes, _spare(request))
    planned = plan_comparison(
        contents_a.catalog, contents_b.catalog, _in_steps(request), request.states, request.subset
    )
    differences = planned.differences
    if request.states is None:
        differences += _small_file_differences(
            stores, contents_a.lr_scheduler, contents_b.lr_scheduler, request.subset
        )
    return replace(planned, differences=differences)


def _spare(request: VerifyRequest) -> int:
    """Part of the footprint that is free for metadata."""
    return spare_bytes(_all_local(request))


def _in_steps(request: VerifyRequest) -> PlanSettings:
    """How a comparison is planned: local files are read a little at a time."""
    planning = request.planning
    return replace(planning, sizes=planning.sizes.in_steps()) if _all_local(request) else planning


def _all_local(request: VerifyRequest) -> bool:
    return all(location is None or is_local(location) for location in (request.a, request.b))


def _check_states(chosen: Collection[str] | None, known: Collection[str]) -> None:
    if unknown := set(chosen or ()) - set(known):
        raise UsageError(
            f"neither checkpoint has the state {min(unknown)!r}; known: {', '.join(sorted(known))}"
            f"{did_you_mean(min(unknown), known)}"
        )


def _compared(
    comparison: Comparison,
    source: ReadRange,
    stores: Sequence[Source],
    request: VerifyRequest,
    observe: Observer,
) -> VerifyReport:
    """Run a comparison of files of ``source``, which are those of ``stores``."""
    plan, engine = comparison.plan, request.engine
    engine = engine.reserving_metadata(len(plan.tensors), len(plan.ops), plan.peak_bytes, _spare(request))
    groups = run_comparisons(plan, source, stores, engine, observe, request.resume)
    return VerifyReport(
        comparison.tensors,
        sum(group.elements for group in groups),
        sum(group.read_bytes for group in groups),
        (*comparison.differences, *differences_of(groups)),
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
