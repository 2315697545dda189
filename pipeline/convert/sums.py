"""Add up the checksums of tensors: the work behind every fingerprint."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from itertools import chain

import numpy as np

from paddle_reshard.clusters.engine import Engine
from paddle_reshard.pipeline.core.crc import checksum_of
from paddle_reshard.pipeline.core.errors import CheckpointError
from paddle_reshard.pipeline.core.events import Observer, Progress, StepStarted
from paddle_reshard.pipeline.core.fingerprints import Fingerprints
from paddle_reshard.pipeline.core.tensor_columns import Tensors
from paddle_reshard.pipeline.planning.plan import Plan
from paddle_reshard.pipeline.planning.work import RemainingGroups
from paddle_reshard.storage.store import CopyRange, ReadRange, Receipt, WritePart
from paddle_reshard.tasks.group import GroupReport, groups_ended
from paddle_reshard.tasks.sums import Sum, added


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
