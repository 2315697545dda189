"""Run a plan: move → verify → publish. An observer receives events."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from paddle_reshard.clusters.engine import Engine
from paddle_reshard.pipeline.checkpoint.checkpoint import Checkpoint, MissingPolicy
from paddle_reshard.pipeline.checkpoint.format import Staged
from paddle_reshard.pipeline.checkpoint.reading import IndexFiles, SourceFiles
from paddle_reshard.pipeline.convert.integrity import check_target_quickly, manifest_of
from paddle_reshard.pipeline.convert.manifest import Manifest, describe_targets, format_manifest
from paddle_reshard.pipeline.convert.plan import ConversionPlan, PlannedTarget
from paddle_reshard.pipeline.core import version
from paddle_reshard.pipeline.core.errors import MasterDriftError, TargetError
from paddle_reshard.pipeline.core.events import Observer, Progress, StepEnded, StepStarted
from paddle_reshard.pipeline.core.file_names import MANIFEST
from paddle_reshard.pipeline.core.heap import trim_heap
from paddle_reshard.pipeline.core.shown import counted, readable_bytes
from paddle_reshard.pipeline.indexing.detect import index_source
from paddle_reshard.pipeline.indexing.opening import dequantising
from paddle_reshard.pipeline.indexing.optimizer_steps import check_optimizer
from paddle_reshard.pipeline.model.rules.tables import RuleTables
from paddle_reshard.pipeline.planning.plan import CarriedFile, Plan
from paddle_reshard.pipeline.planning.work import RemainingGroups
from paddle_reshard.pipeline.request.parse import ConversionRequest
from paddle_reshard.pipeline.request.record import session_record
from paddle_reshard.storage.documents.manifest import own_manifest
from paddle_reshard.storage.outputs import Outputs
from paddle_reshard.storage.session.ledger import source_difference
from paddle_reshard.storage.store import Identity, NewFile, Receipt, Record, Source, TargetStore, WritePart
from paddle_reshard.tasks.figures import WorkerFigures, add_figures, add_retries
from paddle_reshard.tasks.group import GroupReport, groups_ended
from paddle_reshard.tasks.index import index_here

COPY_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class MoveReport:
    """Figures of a run."""

    groups: int
    read_bytes: int
    written_bytes: int
    compared_elements: int
    replica_drift: tuple[str, ...]
    """Values that differ although they should be equal, if that was allowed."""
    workers: tuple[WorkerFigures, ...] = ()
    """Work of each worker of a cluster."""
    retries: Mapping[str, int] = field(default_factory=dict)
    """Failure of a store → how often a request was repeated because of it, on all machines."""
    resumed_groups: int = 0
    """Groups done by an earlier run; not included in ``groups``."""
    resumed_bytes: int = 0
    """Bytes written by an earlier run, including carried files; not included in ``written_bytes``."""
    copied_bytes: int = 0
    """How many of ``written_bytes`` the storage copied."""


# -------------------------------------------------------------------------------------- move, verify, publish


def identify(conversion: ConversionPlan) -> Identity:
    """The identity of a conversion: plan, source files with their versions, and version of this package."""
    store = conversion.store
    files = _describe_files(store.sizes(), store.versions())
    asked = session_record(conversion.asked)
    return Identity(conversion.plan.plan_id, version.__version__, store.location, files, asked)


def _describe_files(sizes: Mapping[str, int], versions: Mapping[str, str]) -> dict[str, str]:
    return {path: f"{size} bytes, {versions.get(path)}" for path, size in sizes.items()}


def check_finished(target: TargetStore, source: Source) -> bool:
    """Whether a target is finished; refused if it differs from its manifest, or is of other source files."""
    if target.published(MANIFEST) is None:
        return False
    manifest = _check_published(target)
    reason = source_difference(
        _describe_files(manifest.source.files, manifest.source.versions),
        _describe_files(source.sizes(), source.versions()),
    )
    if reason is not None:
        raise TargetError(
            f"{target.location}: already finished, but made from a different source: {reason}; give a new target, or "
            "use --overwrite without --resume"
        )
    return True


def _already_made(described: Mapping[str, Any], target: TargetStore) -> bool:
    """Whether the published manifest is that of this conversion: an earlier run was killed after publishing."""
    found = own_manifest(target.published(MANIFEST)) or {}
    source = found.get("source")
    if not isinstance(source, dict):
        return False
    made = ("version", "plan_id", "portion", "files")
    return all(found.get(name) == described.get(name) for name in made) and all(
        source.get(name) == described["source"][name] for name in ("files", "versions")
    )


def _check_published(target: TargetStore) -> Manifest:
    """The manifest of a finished target, which is refused if it visibly does not match."""
    published = target.reopen()
    manifest = manifest_of(published)
    if damages := check_target_quickly(published, manifest):
        more = f", and {len(damages) - 1} more" if len(damages) > 1 else ""
        raise TargetError(
            f"{target.location}: finished, but damaged: {damages[0].path}: {damages[0].detail}{more}; list all damage "
            f"with paddle-reshard verify {target.location}; to convert again, move it away"
        )
    return manifest


def run_conversion(
    conversion: ConversionPlan,
    outputs: Outputs,
    engine: Engine,
    observe: Observer,
    request: ConversionRequest = ConversionRequest(),
    index_files: IndexFiles = index_here,
) -> MoveReport:
    """Move, verify and publish all targets.

    If this fails, nothing looks like a finished target: finished work is kept for a later run to resume, or removed if
    the checkpoint was refused. With ``resume``, targets that are already finished are kept, and refused if visibly
    damaged. ``index_files`` indexes the staged targets.
    """
    check_optimizer(conversion.store, conversion.source)
    plan = conversion.plan
    if request.resume:
        described = describe_targets(conversion)
        outputs.made = {p for p, target in outputs.targets.items() if _already_made(described[p], target)}
        for prefix in sorted(outputs.made):
            _check_published(outputs.targets[prefix])
        if len(outputs.made) == len(described):
            return MoveReport(0, 0, 0, 0, (), resumed_groups=plan.groups, resumed_bytes=plan.written_bytes)
        check_targets(conversion, outputs)
    with outputs:
        observe(StepStarted("move", plan.written_bytes, plan.groups, plan.budget_bytes))
        report, receipts = _move(conversion, outputs, engine, observe)
        reused = f"{_extent(report.resumed_groups, report.resumed_bytes)} from an earlier run"
        resumed = f"; {reused}" if report.resumed_bytes else ""
        observe(StepEnded("move", f"{_extent(report.groups, report.written_bytes)} written{resumed}"))
        if engine.in_process:  # the same memory is needed to index the staged targets
            plan.release_ops()
            trim_heap()
        observe(StepStarted("verify"))
        conversion.store.check_unchanged()
        _verify(conversion, outputs, receipts, index_files)
        observe(StepEnded("verify", "the staged files read back as a complete checkpoint"))
        observe(StepStarted("publish"))
        _publish(outputs, describe_targets(conversion, report.replica_drift, receipts))
        observe(StepEnded("publish", outputs.location))
    return report


def _verify(
    conversion: ConversionPlan, outputs: Outputs, receipts: Sequence[Receipt], index_files: IndexFiles
) -> None:
    """Check what is staged."""
    planned = dict(zip(outputs.targets, conversion.targets, strict=True))
    for prefix, staged in outputs.finish(receipts).items():
        if (portion := conversion.portion) is not None:
            from paddle_reshard.storage.views import CompletedSource

            staged = CompletedSource(staged, portion.files.files, portion.files.literals)
        _check_staged(staged, planned[prefix], index_files)


def _publish(outputs: Outputs, described: Mapping[str, Mapping[str, Any]]) -> None:
    """Publish each target with its manifest."""
    for prefix, target in outputs.pending():
        manifest = {**described[prefix], "etags": dict(target.etags())}
        target.publish(MANIFEST, format_manifest(manifest))


def _extent(groups: int, size_bytes: int) -> str:
    return f"{counted(groups, 'group')}, {readable_bytes(size_bytes)}"


def check_targets(conversion: ConversionPlan, outputs: Outputs, *, space: bool = True) -> None:
    """Refuse file names that a target does not allow, and targets without enough free ``space``."""
    files = _new_files(conversion)
    outputs.check_names(files)
    if space:
        outputs.check_space(files)


def _new_files(conversion: ConversionPlan) -> list[NewFile]:
    """Every file of the targets except manifests, with the offsets of its parts."""
    plan = conversion.plan
    parts = plan.parts[np.lexsort((plan.parts["start"], plan.parts["file"]))]
    first = np.searchsorted(parts["file"], np.arange(len(plan.target_files) + 1))
    files = [
        NewFile(file.path, file.size_bytes, tuple(parts["start"][low:high].tolist()))
        for file, low, high in zip(plan.target_files, first[:-1], first[1:], strict=True)
    ]
    return files + [
        NewFile(file.target_path, file.size_bytes, tuple(range(0, file.size_bytes, COPY_BYTES)))
        for file in plan.carried
    ]


@dataclass
class _Done:
    """What is done of a plan, by this run and the one that it resumes; added to while groups end."""

    units: Mapping[int, Record]
    """Groups and files of the earlier run."""
    drift: list[str]
    receipts: list[Receipt]
    resumed_groups: int
    resumed_bytes: int
    groups: int = 0
    read_bytes: int = 0
    written_bytes: int = 0
    copied_bytes: int = 0
    compared_elements: int = 0
    figures: list[WorkerFigures] = field(default_factory=list)

    @classmethod
    def before(cls, plan: Plan, records: Iterable[Record]) -> _Done:
        """What an earlier run has done. Groups with drift that this run does not allow are run again."""
        units = {one.unit: one for one in records if all(_is_allowed(plan, line) for line in one.drift)}
        receipts = [receipt for record in units.values() for receipt in record.receipts]
        return cls(
            units,
            drift=[line for record in units.values() for line in record.drift],
            receipts=receipts,
            resumed_groups=sum(unit < plan.groups for unit in units),
            resumed_bytes=sum(receipt.nbytes for receipt in receipts),
        )

    def add_group(self, report: GroupReport) -> None:
        """Add a group that has ended."""
        self.groups += 1
        self.read_bytes += report.read_bytes
        self.written_bytes += report.written_bytes
        self.copied_bytes += report.copied_bytes
        self.compared_elements += report.compared_elements
        self.receipts += report.receipts
        self.figures += report.figures
        self.drift += _drift(report)

    def add_file(self, parts: Sequence[Receipt]) -> int:
        """Add a file that is carried, apart from the groups; its size."""
        size_bytes = sum(part.nbytes for part in parts)
        self.receipts += parts
        self.read_bytes += size_bytes
        self.written_bytes += size_bytes
        return size_bytes

    def report(self) -> MoveReport:
        """The figures. On a cluster groups end in any order, on which manifests must not depend: drift is sorted."""
        workers = add_figures(self.figures)
        return MoveReport(
            self.groups,
            self.read_bytes,
            self.written_bytes,
            self.compared_elements,
            tuple(sorted(self.drift)),
            workers,
            add_retries(worker.retries for worker in workers),
            resumed_groups=self.resumed_groups,
            resumed_bytes=self.resumed_bytes,
            copied_bytes=self.copied_bytes,
        )


def _move(
    conversion: ConversionPlan, outputs: Outputs, engine: Engine, observe: Observer
) -> tuple[MoveReport, list[Receipt]]:
    """Run the groups of a plan, then write the files that no group writes."""
    source, plan = conversion.store, conversion.plan
    writer, records = outputs.begin(_new_files(conversion), identify(conversion), source.openness)
    done = _Done.before(plan, records)
    observe(Progress(done.resumed_bytes, before=True, groups=done.resumed_groups))
    with closing(engine.run(RemainingGroups(plan, done.units), source, writer)) as batches:
        for reports in batches:
            outputs.note([Record(report.group, report.receipts, _drift(report)) for report in reports])
            for report in reports:
                done.add_group(report)
            for ended in groups_ended(plan, reports):
                observe(ended)
            observe(Progress(sum(report.written_bytes for report in reports)))
    for unit, carried in enumerate(plan.carried, plan.groups):
        if unit not in done.units:
            parts = _carry(source, carried, writer)
            outputs.note([Record(unit, tuple(parts))])
            observe(Progress(done.add_file(parts)))
    return done.report(), done.receipts


def _drift(report: GroupReport) -> tuple[str, ...]:
    return tuple(f"{d.tensor}: {d.detail}: {d.path_a}, {d.path_b}" for d in report.differences)


def _is_allowed(plan: Plan, drift: str) -> bool:
    in_master = MasterDriftError.PHRASE in drift
    return plan.allow_master_drift if in_master else plan.allow_replica_drift


def _carry(source: Source, carried: CarriedFile, writer: WritePart) -> list[Receipt]:
    receipts = []
    for start in range(0, carried.size_bytes, COPY_BYTES):
        block = source.read(carried.source_path, start, min(COPY_BYTES, carried.size_bytes - start))
        receipts.append(writer.write_part(carried.target_path, start, memoryview(block)))
    return receipts


def _check_staged(staged: Source, planned: PlannedTarget, index_files: IndexFiles) -> None:
    """Index a staged target like a source and check that it is the planned checkpoint."""
    wanted = planned.wanted
    staged = dequantising(staged)
    files = SourceFiles(staged, wanted.model.config, index_here, index_files)
    missing = MissingPolicy(
        # What an adapter's files lack of their base is missing in a target that holds the base too.
        allowed=tuple(t.key for t in wanted.model.tensors if t.missing and not t.of_base),
        untrained=frozenset(t.key for t in wanted.model.tensors if not t.trained),
    )

    def index() -> Checkpoint:
        return index_source(files, RuleTables([wanted.model.table]), missing, pieces=True)

    planned.spec.check_staged(Staged(files, wanted, planned.states_not_carried, index))
