"""Fingerprints of a checkpoint of any topology and format: its tensors are read once, wherever groups run."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np

from paddle_reshard.clusters.engine import Engine
from paddle_reshard.pipeline.core import version
from paddle_reshard.pipeline.core.backports import Unpack
from paddle_reshard.pipeline.core.crc import checksum_of
from paddle_reshard.pipeline.core.errors import CheckpointError, TargetError
from paddle_reshard.pipeline.core.events import Observer, Progress, StepStarted, ignore_events
from paddle_reshard.pipeline.core.fingerprints import Fingerprints
from paddle_reshard.pipeline.core.heap import trim_heap
from paddle_reshard.pipeline.core.shown import Facts, Result, readable_bytes
from paddle_reshard.pipeline.core.tensor_columns import Tensors
from paddle_reshard.pipeline.core.units import PathLike
from paddle_reshard.pipeline.examine.reading import Reader, spare_of
from paddle_reshard.pipeline.planning.plan import Plan
from paddle_reshard.pipeline.planning.sums import plan_sums
from paddle_reshard.pipeline.planning.work import RemainingGroups
from paddle_reshard.pipeline.request.options import with_options
from paddle_reshard.pipeline.request.read_options import FingerprintOptions
from paddle_reshard.storage.documents.fingerprints import format_fingerprints, parse_fingerprints
from paddle_reshard.storage.local.folders import check_writable, written_whole
from paddle_reshard.storage.locate import absolute
from paddle_reshard.storage.store import CopyRange, ReadRange, Receipt, WritePart
from paddle_reshard.tasks.group import GroupReport, groups_ended
from paddle_reshard.tasks.sums import Sum, added


@dataclass(frozen=True, slots=True, repr=False)
class FingerprintReport(Result):
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


@with_options(FingerprintOptions)
def fingerprint(
    source: PathLike,
    *,
    output: PathLike | None = None,
    observe: Observer = ignore_events,
    progress: bool = False,
    **options: Unpack[FingerprintOptions],
) -> FingerprintReport:
    """Compute the fingerprint of every tensor of a checkpoint, and the root over all of them.

    They do not depend on topology and format. Each tensor is read once, within the memory budget; of copies, the first
    is read.

    Parameters
    ----------
    output
        A local file to write the fingerprints to.

    Raises
    ------
    ReshardError
        If it is not a complete, consistent checkpoint, or ``memory`` is too small.
    TargetError
        If ``output`` cannot be written.
    """
    path = None if output is None else Path(output)
    if path is not None:
        check_writable(path, TargetError)
    report = fingerprint_with(os.fspath(source), Reader.of(options, observe))
    if path is not None:
        write_fingerprints(report, path)
    return report


def fingerprint_with(source: str, reader: Reader) -> FingerprintReport:
    """:func:`fingerprint`, with its options as a value."""
    store = reader.open(source)
    checkpoint = reader.index(store)
    plan = plan_sums(checkpoint.catalog, reader.planning)
    tensors = checkpoint.catalog.tensors
    del checkpoint
    trim_heap()
    reports = run_sums(plan, store, reader.engine, spare_of([store]), reader.observe)
    sums = added(chain.from_iterable(report.sums for report in reports))
    store.check_unchanged()
    return FingerprintReport(store.location, fingerprints_of(tensors, sums), plan.read_bytes)


def write_fingerprints(report: FingerprintReport, path: Path) -> None:
    """Write the fingerprints of a checkpoint to a local file."""
    facts = {"version": version.__version__, "checkpoint": absolute(report.path)}
    with written_whole(path, TargetError) as file:
        file.write(format_fingerprints(report.fingerprints, facts))


def read_fingerprints(path: PathLike) -> Fingerprints:
    """The fingerprints in a local file that :func:`fingerprint` has written."""
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise CheckpointError(f"{os.fspath(path)}: cannot be read: {error.strerror or error}") from error
    return parse_fingerprints(data, os.fspath(path))


def run_sums(
    plan: Plan, source: ReadRange, engine: Engine, spare_bytes: int, observe: Observer
) -> Iterator[GroupReport]:
    """The reports of the groups of a plan of sums, which write nothing."""
    engine = engine.reserving_metadata(len(plan.tensors), len(plan.ops), plan.peak_bytes, spare_bytes)
    observe(StepStarted("reading", plan.read_bytes, plan.groups, plan.budget_bytes))
    with closing(engine.run(RemainingGroups(plan), source, NoTarget())) as batches:
        for reports in batches:
            yield from reports
            for ended in groups_ended(plan, reports):
                observe(ended)
            observe(Progress(sum(report.read_bytes for report in reports)))


def fingerprints_of(
    tensors: Tensors, sums: Iterable[Sum], chosen: Collection[int] | None = None
) -> Fingerprints:
    """The fingerprints of all ``tensors``, or of those with some numbers; refused if one was not read in full."""
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
