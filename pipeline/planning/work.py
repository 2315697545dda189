"""One group of a plan as a value that can be sent to any worker."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from paddle_reshard.pipeline.core.errors import PlanError
from paddle_reshard.pipeline.core.geometry import Ints
from paddle_reshard.pipeline.core.literals import Literals
from paddle_reshard.pipeline.core.mixture import Mixture
from paddle_reshard.pipeline.core.tensors import Tensor
from paddle_reshard.pipeline.planning.ops import OpRows
from paddle_reshard.pipeline.planning.parts import MADE, Parts
from paddle_reshard.pipeline.planning.plan import Bands, Plan

GROUPS_AT_A_TIME = 2
"""On a worker of a cluster, as far as its memory allows: a group waits for storage half of the time."""


@dataclass(frozen=True)
class GroupWork:
    """Everything that one group reads, does and writes."""

    group: int
    source_paths: dict[int, str]
    """Source file number → path, of the files that appear in ``bands`` and are copied from."""
    target_paths: dict[int, str]
    bands: Bands
    """Sorted by pass, file and start."""
    parts: Parts
    ops: OpRows
    literals: tuple[tuple[int, int, bytes], ...]
    """``(index into parts, byte offset in the part, bytes)``, sorted by part."""
    tensors: dict[int, Tensor]
    """Tensor number → what it is, of the tensors that appear in ``ops``."""
    peak_bytes: int
    allow_replica_drift: bool = False
    allow_master_drift: bool = False
    mixtures: Mapping[int, Mixture] = field(default_factory=dict)
    """Tensor number → how it is computed, of those in ``tensors`` that are."""

    @property
    def label(self) -> str:
        """A name for it: its first tensor, or its first file."""
        if len(self.ops):
            return self.tensors[int(self.ops["tensor"][0])].label
        return next(iter(self.target_paths.values()), "nothing")


def plan_work(plan: Plan) -> Iterator[GroupWork]:
    """All groups of a plan, in order.

    Raises
    ------
    PlanError
        If the plan was carried out before and its ops were released.
    """
    if len(plan.ops) != len(plan.op_groups):
        raise PlanError(
            "this plan was carried out, and its ops were released then; plan the conversion again"
        )
    count = plan.groups
    op_first = np.searchsorted(plan.op_groups, np.arange(count + 1))
    band_first = np.searchsorted(plan.bands["group"], np.arange(count + 1))
    part_first = np.searchsorted(plan.parts["group"], np.arange(count + 1))
    literals = _Places.of(plan.literals)
    for group in range(count):
        ops = plan.ops[op_first[group] : op_first[group + 1]].rows()
        bands = plan.bands[band_first[group] : band_first[group + 1]]
        parts = plan.parts[part_first[group] : part_first[group + 1]]
        yield GroupWork(
            group=group,
            source_paths={int(f): plan.source_files[f].path for f in _sources(bands, parts)},
            target_paths={int(f): plan.target_files[f].path for f in np.unique(parts["file"])},
            bands=bands,
            parts=parts,
            ops=ops,
            literals=tuple(_literals_of(parts, plan.literals, literals)),
            tensors={int(t): plan.tensors[t] for t in np.unique(ops["tensor"])},
            peak_bytes=int(plan.group_peaks[group]),
            allow_replica_drift=plan.allow_replica_drift,
            allow_master_drift=plan.allow_master_drift,
            mixtures={
                int(t): plan.mixtures[int(t)] for t in np.unique(ops["tensor"]) if int(t) in plan.mixtures
            },
        )


def _sources(bands: Bands, parts: Parts) -> Ints:
    copied = parts["source_file"][parts["source_file"] != MADE]
    return np.unique(np.concatenate([bands["file"], copied]))


class _Places(NamedTuple):
    """Literals by file and byte."""

    number: Ints
    """Number of each in the plan."""
    file: Ints
    start: Ints
    stop: Ints

    @classmethod
    def of(cls, literals: Literals) -> _Places:
        file, start = literals.files, literals.offsets
        order = np.lexsort((start, file))
        return cls(order, file[order], start[order], (start + literals.sizes)[order])

    def between(self, file: int, start: int, stop: int) -> Ints:
        """The numbers of those that have bytes in this range."""
        first, last = np.searchsorted(self.file, [file, file + 1])
        low = first + np.searchsorted(self.stop[first:last], start, side="right")
        high = first + np.searchsorted(self.start[first:last], stop, side="left")
        return self.number[low:high]


def _literals_of(parts: Parts, literals: Literals, places: _Places) -> Iterator[tuple[int, int, bytes]]:
    """The literal bytes of each part; a literal may reach over several."""
    for index, part in enumerate(parts):
        start, stop = int(part["start"]), int(part["stop"])
        for number in places.between(int(part["file"]), start, stop).tolist():
            _, offset, content = literals[number]
            yield index, max(offset - start, 0), content[max(start - offset, 0) : stop - offset]
