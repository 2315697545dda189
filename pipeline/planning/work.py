"""One group of a plan as a value that can be sent to any worker."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from paddle_reshard.pipeline.core.errors import PlanError
from paddle_reshard.pipeline.core.geometry import Ints
from paddle_reshard.pipeline.core.literals import Literal
from paddle_reshard.pipeline.core.mixture import Mixture
from paddle_reshard.pipeline.core.tensors import Tensor
from paddle_reshard.pipeline.planning.ops import Ops
from paddle_reshard.pipeline.planning.parts import MADE, Parts
from paddle_reshard.pipeline.planning.plan import Bands, Plan

GROUPS_AT_A_TIME = 2
"""Groups that a cluster worker runs at a time, if its memory allows: a group waits for storage half of the time."""


@dataclass(frozen=True)
class GroupWork:
    """Everything that one group reads, does and writes."""

    group: int
    source_paths: dict[int, str]
    """Source file number → path, for files that are read or copied from."""
    target_paths: dict[int, str]
    bands: Bands
    """Sorted by pass, file and start."""
    parts: Parts
    ops: Ops
    """A view of the plan's ops."""
    literals: Sequence[Literal]
    """``(index into parts, byte offset in the part, bytes)``, sorted by part."""
    tensors: Mapping[int, Tensor]
    """Tensor number → tensor, for the tensors in ``ops``."""
    peak_bytes: int
    allow_replica_drift: bool = False
    allow_master_drift: bool = False
    mixtures: Mapping[int, Mixture] = field(default_factory=dict)
    """Tensor number → how it is computed, for the mixed tensors in ``ops``."""
    summed: Mapping[int, tuple[int, int]] | None = None
    """As in :class:`~paddle_reshard.pipeline.planning.plan.Plan`, for the tensors in ``ops``."""

    @property
    def label(self) -> str:
        """The name of the group in messages: its first tensor, or its first file."""
        if len(self.ops):
            return self.tensors[int(self.ops["tensor"][0])].label
        return next(iter(self.target_paths.values()), "nothing")


def plan_work(plan: Plan) -> Iterator[GroupWork]:
    """All groups of a plan, in order.

    Raises
    ------
    PlanError
        If the plan was run before and its ops were released.
    """
    if len(plan.ops) != len(plan.op_groups):
        raise PlanError("this plan was run before, and its ops were released; plan the conversion again")
    count = plan.groups
    op_first = np.searchsorted(plan.op_groups, np.arange(count + 1))
    band_first = np.searchsorted(plan.bands["group"], np.arange(count + 1))
    part_first = np.searchsorted(plan.parts["group"], np.arange(count + 1))
    literals = plan.literals.by_file()
    for group in range(count):
        ops = plan.ops[op_first[group] : op_first[group + 1]]
        bands = plan.bands[band_first[group] : band_first[group + 1]]
        parts = plan.parts[part_first[group] : part_first[group + 1]]
        tensors = np.unique(ops["tensor"])
        yield GroupWork(
            group=group,
            source_paths={int(f): plan.source_files[f].path for f in _sources(bands, parts)},
            target_paths={int(f): plan.target_files[f].path for f in np.unique(parts["file"])},
            bands=bands,
            parts=parts,
            ops=ops,
            literals=literals.of_ranges(
                zip(parts["file"].tolist(), parts["start"].tolist(), parts["stop"].tolist(), strict=True)
            ),
            tensors=_Chosen(plan.tensors, tensors),
            peak_bytes=int(plan.group_peaks[group]),
            allow_replica_drift=plan.allow_replica_drift,
            allow_master_drift=plan.allow_master_drift,
            mixtures={t: plan.mixtures[t] for t in tensors.tolist() if t in plan.mixtures}
            if plan.mixtures
            else {},
            summed=None
            if plan.summed is None
            else {t: plan.summed[t] for t in tensors.tolist() if t in plan.summed},
        )


def _sources(bands: Bands, parts: Parts) -> Ints:
    copied = parts["source_file"][parts["source_file"] != MADE]
    return np.unique(np.concatenate([bands["file"], copied]))


class _Chosen(Mapping[int, Tensor]):
    """The tensors of one group, looked up in the plan; pickled as a ``dict`` of only these tensors."""

    def __init__(self, tensors: Sequence[Tensor], numbers: Ints) -> None:
        self._tensors, self._numbers = tensors, numbers

    def __getitem__(self, number: int) -> Tensor:
        if number not in self:
            raise KeyError(number)
        return self._tensors[number]

    def __contains__(self, number: object) -> bool:
        index = int(np.searchsorted(self._numbers, number))  # type: ignore[call-overload]
        return index < len(self._numbers) and self._numbers[index] == number

    def __iter__(self) -> Iterator[int]:
        return iter(self._numbers.tolist())

    def __len__(self) -> int:
        return len(self._numbers)

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)
