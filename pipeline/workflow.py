"""The one way from a source to a published target: index → plan → move → verify → publish.

The command line and the Python API both run these steps. Each returns a typed result; what happens inside is
told to an observer as event values.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from paddle_reshard.clusters.choose import Engine
from paddle_reshard.pipeline.errors import CheckpointError, UsageError
from paddle_reshard.pipeline.indexing import index_checkpoint
from paddle_reshard.pipeline.layouts.checkpoint import Checkpoint
from paddle_reshard.pipeline.layouts.files import AVERAGE, MANIFEST, TargetFiles
from paddle_reshard.pipeline.layouts.huggingface.sidecars import check_average
from paddle_reshard.pipeline.layouts.huggingface.target import EMA, HuggingFaceTarget
from paddle_reshard.pipeline.layouts.hybrid.target import HybridTarget
from paddle_reshard.pipeline.layouts.targets import AnyTarget, lay_out, target_facts
from paddle_reshard.pipeline.layouts.vocab import resize_vocabulary
from paddle_reshard.pipeline.manifest import FORMAT, describe_parts, format_manifest
from paddle_reshard.pipeline.options import ConversionRequest, HybridRequest
from paddle_reshard.pipeline.planning.limits import PartLimits
from paddle_reshard.pipeline.planning.parts import MADE
from paddle_reshard.pipeline.planning.plan import CarriedFile, Plan, plan_conversion
from paddle_reshard.pipeline.planning.work import plan_work
from paddle_reshard.storage.locate import absolute, place
from paddle_reshard.storage.store import Identity, NewFile, Receipt, Record, Source, Target, WritePart
from paddle_reshard.tasks.figures import WorkerFigures, add_figures, add_retries
from paddle_reshard.tasks.index import index_huggingface, read_json

COPY_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class StepStarted:
    """A step of the workflow begins. ``total_bytes`` is what it will write, where that is known."""

    step: str
    total_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Progress:
    """More of the current step is done."""

    done_bytes: int


@dataclass(frozen=True, slots=True)
class StepEnded:
    """A step is done; ``summary`` says what came out, in one line."""

    step: str
    summary: str


Event = StepStarted | Progress | StepEnded
Observer = Callable[[Event], None]


def ignore_events(event: Event) -> None:
    """The observer that looks at nothing."""


@dataclass(frozen=True)
class ConversionPlan:
    """A conversion that can be run: what, from where, and what becomes of every file."""

    store: Source
    """The source's files, as they were seen when they were indexed."""
    source: Checkpoint
    target: AnyTarget
    wanted: Checkpoint
    """The source as the target is to hold it: the same but for a vocabulary of another size."""
    files: TargetFiles
    plan: Plan
    left: tuple[tuple[str, str], ...]
    """Files of the source that are not in the target, and why."""
    left_states: tuple[str, ...] = ()
    """States of tensors that the target's format has no place for."""


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
    copied_bytes: int = 0
    """Of the written ones, those that the storage copied by itself."""


# -------------------------------------------------------------------------------------------------- plan


def plan_checkpoint(
    store: Source,
    source: Checkpoint,
    request: ConversionRequest,
    limits: PartLimits = PartLimits(),  # noqa: B008 (a frozen value)
) -> ConversionPlan:
    """Plan a conversion; pure but for the sizes that ``store`` has seen. ``limits`` are those of the target."""
    form = request.form
    target = (
        form.target_for(source.model.table.convention, source.sequence_parallel)
        if isinstance(form, HybridRequest)
        else form
    )
    wanted = source
    if request.vocab_pad is not None:
        wanted = resize_vocabulary(source, request.vocab_pad, grow=True)
    elif request.vocab_trim is not None:
        wanted = resize_vocabulary(source, request.vocab_trim, grow=False)
    sizes = store.sizes()
    if isinstance(target, HuggingFaceTarget) and target.state == EMA and AVERAGE in sizes:
        check_average(read_json(store, AVERAGE, sizes), AVERAGE)
    laid_out = lay_out(source, wanted, target, sizes, store.folders)
    carried = [CarriedFile(path, path, sizes[path]) for path in laid_out.carried]
    plan = plan_conversion(
        laid_out.catalog,
        laid_out.files,
        carried,
        request.budget_bytes,
        limits,
        request.compare_replicas,
        request.allow_replica_drift,
        request.allow_reread,
    )
    return ConversionPlan(
        store, source, target, wanted, laid_out.files, plan, laid_out.left, laid_out.left_states
    )


# -------------------------------------------------------------------------------------- move, verify, publish


def check_apart(source_location: str, target_location: str) -> None:
    """Refuse a target that is the source, or inside it, or around it."""
    source, target = place(source_location), place(target_location)
    if source == target:
        raise UsageError(f"{target}: source and target are the same folder")
    if source in target.parents or target in source.parents:
        raise UsageError(f"{target}: source and target may not lie one inside the other")


def identify(conversion: ConversionPlan) -> Identity:
    """Which conversion this is: what it makes, from which very files, by which version."""
    from paddle_reshard import __version__

    store, versions = conversion.store, conversion.store.versions()
    files = {path: f"{size} bytes, {versions[path]}" for path, size in store.sizes().items()}
    return Identity(conversion.plan.plan_id, __version__, store.location, files)


def is_made(conversion: ConversionPlan, target: Target) -> bool:
    """Whether the target is what this conversion would make: a run was killed when all was done."""
    manifest = target.published(MANIFEST)
    if manifest is None:
        return False
    try:
        found = json.loads(manifest)
        source = found["source"]
    except (ValueError, TypeError, KeyError):
        return False
    wanted = describe_target(conversion)
    return all(found.get(name) == wanted[name] for name in ("format", "version", "plan_id", "files")) and all(
        source.get(name) == wanted["source"][name] for name in ("files", "versions")
    )


def run_conversion(
    conversion: ConversionPlan, target: Target, engine: Engine, observe: Observer
) -> MoveReport:
    """Move, verify and publish: afterwards the target is there, whole.

    If it does not come to that, nothing looks like a finished target: what is done is kept for a later run to go on
    with, or taken back if the checkpoint was refused.
    """
    plan, source = conversion.plan, conversion.store
    with target:
        observe(StepStarted("move", plan.written_bytes))
        report, receipts = _move(conversion, target, engine, observe)
        before = f", {report.resumed_groups} groups were done before" if report.resumed_groups else ""
        observe(StepEnded("move", f"{report.groups} groups, {report.written_bytes} bytes written{before}"))
        observe(StepStarted("verify"))
        source.check_unchanged()
        _check_staged(target.finish(receipts), conversion)
        observe(StepEnded("verify", "the staged target reads back as a whole checkpoint"))
        observe(StepStarted("publish"))
        described = describe_target(conversion, report.replica_drift, receipts, target.etags())
        target.publish(MANIFEST, format_manifest(described))
        observe(StepEnded("publish", target.location))
    return report


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
    conversion: ConversionPlan, target: Target, engine: Engine, observe: Observer
) -> tuple[MoveReport, list[Receipt]]:
    source, plan = conversion.store, conversion.plan
    writer, records = target.begin(_new_files(plan), identify(conversion))
    # What differed and was allowed then is not taken over by a run that does not allow it.
    done = {record.unit: record for record in records if plan.allow_replica_drift or not record.drift}
    resumed = sum(unit < plan.groups for unit in done)
    read = written = copied = compared = groups = 0
    drift = [line for record in done.values() for line in record.drift]
    receipts = [receipt for record in done.values() for receipt in record.receipts]
    observe(Progress(sum(receipt.nbytes for receipt in receipts)))
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
            target.note(Record(report.group, tuple(report.receipts), found))
            observe(Progress(report.written_bytes))
    for unit, carried in enumerate(plan.carried, plan.groups):
        if unit in done:
            continue
        written_parts = _carry(source, carried, writer)
        receipts += written_parts
        target.note(Record(unit, tuple(written_parts)))
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
        copied_bytes=copied,
    )
    return moved, receipts


def _carry(source: Source, carried: CarriedFile, writer: WritePart) -> list[Receipt]:
    receipts = []
    for start in range(0, carried.size_bytes, COPY_BYTES):
        block = source.read(carried.source_path, start, min(COPY_BYTES, carried.size_bytes - start))
        receipts.append(writer.write_part(carried.target_path, start, memoryview(block)))
    return receipts


def _check_staged(staged: Source, conversion: ConversionPlan) -> None:
    """Index the staged target as if it were a source: it must be the checkpoint that was planned."""
    wanted, target = conversion.wanted, conversion.target
    if isinstance(target, HuggingFaceTarget):
        index_huggingface(staged, staged.sizes(), wanted.model, target)
        return
    found = index_checkpoint(staged, [wanted.model.table], wanted.model.config)
    if found.topology is not None and isinstance(target, HybridTarget):
        planned = (target.topology.tp, target.topology.pp, target.topology.sharding)
        if (found.topology.tp, found.topology.pp, found.topology.sharding) != planned:
            raise CheckpointError(
                f"the staged target reads back as {found.topology}, planned was {target.topology}"
            )
    kept = [t for t in wanted.catalog.tensors if t.state not in conversion.left_states]
    one = {(t.key, t.state, t.dtype, t.global_shape) for t in kept}
    two = {(t.key, t.state, t.dtype, t.global_shape) for t in found.catalog.tensors}
    if one != two:
        odd = sorted((key, state) for key, state, *_ in one ^ two)
        raise CheckpointError(f"{odd[0][0]} ({odd[0][1]}): not the same in the source and the staged target")


def describe_target(
    conversion: ConversionPlan,
    replica_drift: Sequence[str] = (),
    receipts: Iterable[Receipt] = (),
    etags: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """The manifest: what was made, and from what. The same conversion gives the same bytes."""
    from paddle_reshard import __version__

    plan, source, store = conversion.plan, conversion.source, conversion.store
    return {
        "format": FORMAT,
        "version": __version__,
        "plan_id": plan.plan_id,
        **target_facts(conversion.target),
        "files": {f.path: f.size_bytes for f in plan.target_files}
        | {c.target_path: c.size_bytes for c in plan.carried},
        "source": {
            "location": absolute(store.location),
            "format": source.format,
            "topology": None if source.topology is None else str(source.topology),
            "sharding_strategy": source.strategy,
            "files": store.sizes(),
            "versions": store.versions(),
            "not_carried": dict(conversion.left),
            "states_left": list(conversion.left_states),
            "replica_drift": list(replica_drift),
        },
        "etags": dict(etags or {}),
        "parts": describe_parts(receipts, _copies(plan)),
    }


def _copies(plan: Plan) -> dict[tuple[str, int], tuple[str, int]]:
    """File and byte offset of every copied part → file and byte of the source."""
    return {
        (plan.target_files[part["file"]].path, int(part["start"])): (
            plan.source_files[part["source_file"]].path,
            int(part["source_start"]),
        )
        for part in plan.parts[plan.parts["source_file"] != MADE]
    }
