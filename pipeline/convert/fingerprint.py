"""Fingerprints of a checkpoint of any topology and format: its tensors are read once, wherever groups run."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np

from paddle_reshard.clusters.choose import choose_engine
from paddle_reshard.clusters.engine import Engine
from paddle_reshard.pipeline.convert.groups_ended import groups_ended
from paddle_reshard.pipeline.convert.inputs import given_inputs
from paddle_reshard.pipeline.convert.manifest import parse_manifest
from paddle_reshard.pipeline.convert.options import check_names, takes
from paddle_reshard.pipeline.convert.read_options import FingerprintOptions
from paddle_reshard.pipeline.core import version
from paddle_reshard.pipeline.core.backports import Unpack
from paddle_reshard.pipeline.core.crc import checksum_of
from paddle_reshard.pipeline.core.errors import CheckpointError, TargetError
from paddle_reshard.pipeline.core.events import Observer, Progress, StepStarted, ignore_events
from paddle_reshard.pipeline.core.fingerprints import Fingerprints
from paddle_reshard.pipeline.core.heap import trim_heap
from paddle_reshard.pipeline.core.shown import Facts, Shown, readable_bytes
from paddle_reshard.pipeline.core.tensor_columns import Tensors
from paddle_reshard.pipeline.core.units import DEFAULT_MEMORY, PathLike, parse_memory, texts_of
from paddle_reshard.pipeline.indexing.detect import index_checkpoint
from paddle_reshard.pipeline.indexing.opening import open_checkpoint
from paddle_reshard.pipeline.layouts.checkpoint import MissingPolicy
from paddle_reshard.pipeline.planning.metadata import spare_bytes
from paddle_reshard.pipeline.planning.plan import Plan
from paddle_reshard.pipeline.planning.settings import PlanSettings, PlanSizes
from paddle_reshard.pipeline.planning.sums import plan_sums
from paddle_reshard.pipeline.planning.work import plan_work
from paddle_reshard.storage.formats.fingerprints import format_fingerprints, parse_fingerprints
from paddle_reshard.storage.formats.manifest import own_manifest
from paddle_reshard.storage.locate import absolute, is_local, source_access
from paddle_reshard.storage.store import CopyRange, ReadRange, Receipt, WritePart
from paddle_reshard.tasks.group import GroupReport
from paddle_reshard.tasks.sums import Sum, added


@dataclass(frozen=True, slots=True, repr=False)
class FingerprintReport(Shown):
    """The fingerprints of a checkpoint, and what it took."""

    path: str
    fingerprints: Fingerprints
    read_bytes: int

    @property
    def root(self) -> str:
        """The fingerprint of the whole checkpoint."""
        return self.fingerprints.root

    def _in_short(self) -> str:
        return self.root

    def facts(self) -> Facts:
        """The roots and what was read."""
        states = [(f"root of {state}", root) for state, root in self.fingerprints.states.items()]
        extent = f"{len(self.fingerprints)} tensors, {readable_bytes(self.read_bytes)} read"
        return [("root", self.root), *states, ("extent", extent)]


@takes(FingerprintOptions)
def fingerprint(
    source: PathLike,
    *,
    output: PathLike | None = None,
    observe: Observer = ignore_events,
    **options: Unpack[FingerprintOptions],
) -> FingerprintReport:
    """Compute the fingerprint of every tensor of a checkpoint, and the root over all of them.

    They do not depend on topology and format. Each tensor is read once, within the memory budget; of copies, the first
    is read.

    Parameters
    ----------
    output
        A local file to write the fingerprints to.
    observe
        Called with events that report progress, as in :func:`convert`.
    options
        :class:`FingerprintOptions`.

    Raises
    ------
    ReshardError
        If it is not a complete, consistent checkpoint, or ``memory`` is too small.
    TargetError
        If ``output`` cannot be written.
    """
    check_names(options, FingerprintOptions)
    return fingerprint_with(os.fspath(source), output, options, observe)


def fingerprint_with(
    source: str,
    output: PathLike | None,
    options: FingerprintOptions,
    observe: Observer = ignore_events,
    sizes: PlanSizes = PlanSizes(),
) -> FingerprintReport:
    """:func:`fingerprint`, with its options as a value."""
    budget_bytes = parse_memory(options.get("memory", DEFAULT_MEMORY))
    cluster, workers = options.get("cluster", "inline"), options.get("workers")
    selector = texts_of(options.get("label_selector", ()))
    engine = choose_engine(cluster, workers, budget_bytes, label_selector=selector)
    engine = engine.observed(observe)
    store = open_checkpoint(source, source_access(options))
    missing = MissingPolicy(allowed=texts_of(options.get("allow_missing", ())))
    tables, config = given_inputs(options.get("rules"), options.get("config"))
    checkpoint = index_checkpoint(store, tables, config, missing, engine.indexing(observe))
    settings = PlanSettings(budget_bytes=budget_bytes, sizes=sizes)
    plan = plan_sums(checkpoint.catalog, settings)
    tensors = checkpoint.catalog.tensors
    del checkpoint
    trim_heap()
    sums = run_sums(plan, store, engine, spare_bytes(is_local(source)), observe)
    store.check_unchanged()
    found = fingerprints_of(tensors, sums)
    report = FingerprintReport(store.location, found, plan.read_bytes)
    if output is not None:
        write_fingerprints(report, Path(output))
    return report


def run_sums(
    plan: Plan, source: ReadRange, engine: Engine, spare_bytes: int, observe: Observer
) -> tuple[Sum, ...]:
    """Run a plan of sums; ``spare_bytes`` of the footprint are free for metadata."""
    return added(
        chain.from_iterable(report.sums for report in run_reads(plan, source, engine, spare_bytes, observe))
    )


def run_reads(
    plan: Plan, source: ReadRange, engine: Engine, spare_bytes: int, observe: Observer
) -> Iterator[GroupReport]:
    """The reports of the groups of a plan of sums, which write nothing."""
    engine = engine.reserving_metadata(len(plan.tensors), len(plan.ops), plan.peak_bytes, spare_bytes)
    observe(StepStarted("reading", plan.read_bytes, plan.groups, plan.budget_bytes))
    with closing(engine.run(plan_work(plan), source, NoTarget())) as batches:
        for reports in batches:
            yield from reports
            for ended in groups_ended(plan, reports):
                observe(ended)
            observe(Progress(sum(report.read_bytes for report in reports)))


def fingerprints_of(
    tensors: Tensors, sums: Iterable[Sum], chosen: Collection[int] | None = None
) -> Fingerprints:
    """The fingerprints of all ``tensors``, or of those with some numbers.

    Raises
    ------
    CheckpointError
        If a tensor was not read in full.
    """
    by_owner = {(one.tensor, one.dtype): one for one in sums}
    dtypes, checksums = tensors.dtypes.tolist(), []
    kept = Tensors()
    for number in range(len(tensors)) if chosen is None else chosen:
        tensor, dtype = tensors[number], dtypes[number]
        found = by_owner.get((number, dtype), Sum(number, dtype, 0, 0))
        if found.elements != tensor.elements:
            raise CheckpointError(
                f"{tensor.label}: {found.elements} of {tensor.elements} elements were added up"
            )
        kept.add(tensor)
        checksums.append(checksum_of(found.remainder, tensor.nbytes))
    return Fingerprints.of(kept, np.array(checksums, dtype=np.uint64))


def write_fingerprints(report: FingerprintReport, path: Path) -> None:
    """Write the fingerprints of a checkpoint to a local file.

    Raises
    ------
    TargetError
        If it cannot be written.
    """
    facts = {"version": version.__version__, "checkpoint": absolute(report.path)}
    try:
        path.write_bytes(format_fingerprints(report.fingerprints, facts))
    except OSError as error:
        raise TargetError(f"{path}: cannot be written: {error.strerror or error}") from error


def read_document(path: PathLike) -> bytes:
    """The content of a local file with fingerprints.

    Raises
    ------
    CheckpointError
        If it cannot be read.
    """
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise CheckpointError(f"{os.fspath(path)}: cannot be read: {error.strerror or error}") from error


def parse_document(data: bytes, path: PathLike) -> Fingerprints:
    """The fingerprints in a file: one written by :func:`fingerprint`, or the manifest of a target.

    Raises
    ------
    CheckpointError
        If it holds no fingerprints.
    """
    if own_manifest(data) is None:
        return parse_fingerprints(data, os.fspath(path))
    manifest = parse_manifest(data, os.fspath(path))
    if manifest.fingerprints is None or manifest.unknown_fingerprints:
        raise CheckpointError(
            f"{os.fspath(path)}: the manifest does not record the fingerprints of all tensors"
        )
    if manifest.changed:
        raise CheckpointError(f"{os.fspath(path)}: the manifest {manifest.changed}")
    return manifest.fingerprints


@dataclass(frozen=True)
class NoTarget(WritePart):
    """The target of groups that write nothing."""

    copies_in_flight = 1

    def write_part(self, path: str, byte_offset: int, buffer: memoryview) -> Receipt:
        """Never called."""
        raise NotImplementedError

    def copy_part(self, copy: CopyRange, source: ReadRange) -> Receipt:
        """Never called."""
        raise NotImplementedError
