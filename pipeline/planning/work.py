"""The groups of a plan as values that can be sent to any worker, one or several at a time."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np

from paddle_reshard.pipeline.core.catalog import File
from paddle_reshard.pipeline.core.literals import Literal, LiteralSlices
from paddle_reshard.pipeline.core.mixture import Mixture
from paddle_reshard.pipeline.core.numbers import Ints
from paddle_reshard.pipeline.core.sorting import distinct
from paddle_reshard.pipeline.core.tensors import DType, Tensor
from paddle_reshard.pipeline.planning.ops import Ops
from paddle_reshard.pipeline.planning.parts import MADE, Parts
from paddle_reshard.pipeline.planning.plan import Bands, Plan
from paddle_reshard.pipeline.planning.settings import Tie

V = TypeVar("V")

GROUPS_AT_A_TIME = 2
"""Groups that a cluster worker runs at a time, if its memory allows: a group waits for storage half of the time."""
MOST_OPS = 1 << 15
MOST_PARTS = 1 << 13
MOST_LITERAL_BYTES = 1 << 20
"""Limits of a batch, as far as a single group does not exceed them."""


@dataclass(frozen=True)
class GroupWork:
    """Everything that one group reads, does and writes."""

    group: int
    source_paths: dict[int, str]
    """Source file number → path, at least for files that are read or copied from."""
    target_paths: dict[int, str]
    bands: Bands
    """Sorted by pass, file and start."""
    parts: Parts
    ops: Ops
    """A view of the plan's ops."""
    literals: Iterable[Literal]
    """``(index into parts, byte offset in the part, bytes)``, sorted by part."""
    tensors: Mapping[int, Tensor] | Sequence[Tensor]
    """By tensor number, at least the tensors in ``ops``."""
    peak_bytes: int
    allow_replica_drift: bool = False
    tied: Mapping[str, Tie] = field(default_factory=dict)
    """As in the plan."""
    allow_master_drift: bool = False
    mixtures: Mapping[int, Mixture] = field(default_factory=dict)
    """Tensor number → how it is computed, at least for the mixed tensors in ``ops``."""
    measured: Mapping[int, DType] | None = None
    """As in the plan."""

    @property
    def label(self) -> str:
        """The name of the group in messages: its first tensor, or its first file."""
        if len(self.ops):
            return self.tensors[int(self.ops["tensor"][0])].label
        return self.target_paths[int(self.parts["file"][0])] if len(self.parts) else "nothing"

    def to_send(self) -> GroupWork:
        """The same, of all tensors only those in ``ops``; differences are measured in the process that plans."""
        tensors = {number: self.tensors[number] for number in distinct(self.ops["tensor"]).tolist()}
        return replace(self, tensors=tensors, measured=None)


class RemainingGroups(Iterable[GroupWork]):
    """The groups of a plan that are still to be run, in order: one by one, or in batches."""

    def __init__(self, plan: Plan, done: Collection[int] = ()) -> None:
        """``done`` are groups to leave out. A plan that was run before is refused."""
        plan.check_not_run()
        self.plan, count = plan, plan.groups
        self._op_first = np.searchsorted(plan.op_groups, np.arange(count + 1))
        self._band_first = np.searchsorted(plan.bands["group"], np.arange(count + 1))
        self._part_first = np.searchsorted(plan.parts["group"], np.arange(count + 1))
        self._literals = plan.literals.by_file()
        waiting = np.ones(count, dtype=bool)
        waiting[[unit for unit in done if unit < count]] = False
        edges = np.flatnonzero(np.diff(waiting, prepend=False, append=False)).tolist()
        self.stretches = tuple(range(*pair) for pair in zip(edges[::2], edges[1::2], strict=True))
        """The numbers of the groups, as few ranges as possible."""

    def __iter__(self) -> Iterator[GroupWork]:
        for groups in self.stretches:
            for group in groups:
                yield self.work(group)

    def __len__(self) -> int:
        return sum(map(len, self.stretches))

    def largest_peaks(self, count: int) -> list[int]:
        """The ``count`` largest peaks of these groups, or all of them, in bytes."""
        peaks = self.plan.group_peaks
        waiting = [peaks[groups.start : groups.stop] for groups in self.stretches]
        return [int(peak) for peak in np.sort(np.concatenate([peaks[:0], *waiting]))[-count:]]

    def work(self, group: int) -> GroupWork:
        """One group."""
        return self._as_one(group, group + 1, self._literals_of(group))

    def _as_one(self, first: int, stop: int, literals: Iterable[Literal]) -> GroupWork:
        """The groups from ``first`` up to ``stop``, whose parts have these literals, as if they were one."""
        plan = self.plan
        ops = plan.ops[self._op_first[first] : self._op_first[stop]]
        bands = plan.bands[self._band_first[first] : self._band_first[stop]]
        parts = plan.parts[self._part_first[first] : self._part_first[stop]]
        copied = parts["source_file"][parts["source_file"] != MADE]
        tensors = distinct(ops["tensor"]).tolist() if plan.mixtures else ()
        return GroupWork(
            group=first,
            source_paths=_paths(plan.source_files, np.concatenate([bands["file"], copied])),
            target_paths=_paths(plan.target_files, parts["file"]),
            bands=bands,
            parts=parts,
            ops=ops,
            literals=literals,
            tensors=plan.tensors,
            peak_bytes=int(plan.group_peaks[first:stop].max()),
            allow_replica_drift=plan.allow_replica_drift,
            tied=plan.tied,
            allow_master_drift=plan.allow_master_drift,
            mixtures=_only(tensors, plan.mixtures),
            measured=plan.measured,
        )

    def _literals_of(self, group: int) -> LiteralSlices:
        parts = self.plan.parts[self._part_first[group] : self._part_first[group + 1]]
        columns = (parts[name].tolist() for name in ("file", "start", "stop"))
        return self._literals.of_ranges(zip(*columns, strict=True))

    def batch(self, groups: range) -> WorkBatch:
        """The first of ``groups`` as one value: all of them, unless that would be a large message."""
        first = groups.start
        most = min(
            groups.stop,
            int(np.searchsorted(self._op_first, self._op_first[first] + MOST_OPS, side="right")) - 1,
            int(np.searchsorted(self._part_first, self._part_first[first] + MOST_PARTS, side="right")) - 1,
        )
        literals: list[tuple[Literal, ...]] = []
        nbytes = 0
        for group in range(first, max(most, first + 1)):
            of_group = tuple(self._literals.read(self._literals_of(group)))
            nbytes += sum(len(content) for _, _, content in of_group)
            if literals and nbytes > MOST_LITERAL_BYTES:
                break
            literals.append(of_group)
        stop = first + len(literals)
        firsts = tuple(
            tuple((at[first : stop + 1] - at[first]).tolist())
            for at in (self._op_first, self._band_first, self._part_first)
        )
        peaks = tuple(self.plan.group_peaks[first:stop].tolist())
        whole = self._as_one(first, stop, ()).to_send()
        return WorkBatch(range(first, stop), whole, firsts, peaks, tuple(literals))


@dataclass(frozen=True)
class WorkBatch(Iterable[GroupWork]):
    """Several groups as one small message: what they have in common is in it once."""

    groups: range
    whole: GroupWork
    """All of them as if they were one, without literals."""
    firsts: tuple[tuple[int, ...], ...]
    """Index of the first op, band and part of each group, and one past the last of all."""
    peaks: tuple[int, ...]
    literals: tuple[tuple[Literal, ...], ...]

    def __iter__(self) -> Iterator[GroupWork]:
        whole = self.whole
        for index, group in enumerate(self.groups):
            (op, op_stop), (band, band_stop), (part, part_stop) = (
                at[index : index + 2] for at in self.firsts
            )
            yield replace(
                whole,
                group=group,
                bands=whole.bands[band:band_stop],
                parts=whole.parts[part:part_stop],
                ops=whole.ops[op:op_stop],
                literals=self.literals[index],
                peak_bytes=self.peaks[index],
            )


def _paths(files: Sequence[File], numbers: Ints) -> dict[int, str]:
    return {number: files[number].path for number in distinct(numbers).tolist()}


def _only(chosen: Iterable[int], of_tensors: Mapping[int, V]) -> dict[int, V]:
    return {number: of_tensors[number] for number in chosen if number in of_tensors}
