"""What running and comparing a group share: its report, its passes, its bands, and the boxes of its ops."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from paddle_reshard.pipeline.core.errors import DriftError, PlanError
from paddle_reshard.pipeline.core.events import GroupEnded
from paddle_reshard.pipeline.core.geometry import Ranges
from paddle_reshard.pipeline.core.numbers import Ints
from paddle_reshard.pipeline.core.sorting import distinct
from paddle_reshard.pipeline.core.tensors import DTYPES
from paddle_reshard.pipeline.planning.ops import Ops
from paddle_reshard.pipeline.planning.parts import Parts
from paddle_reshard.pipeline.planning.plan import Bands, Plan
from paddle_reshard.pipeline.planning.work import GroupWork
from paddle_reshard.storage.store import Read, ReadRange, Receipt
from paddle_reshard.tasks.device import HOST, Buffer, DeviceBox, Mover
from paddle_reshard.tasks.figures import WorkerFigures, add_retries
from paddle_reshard.tasks.statistics import Statistics
from paddle_reshard.tasks.sums import Sum

ROWS_AT_A_TIME = 1 << 12
"""Ops that are unpacked to rows at a time."""


@dataclass(frozen=True, slots=True)
class GroupReport:
    """The result of running a group."""

    group: int
    read_bytes: int
    written_bytes: int
    """Bytes of all its parts, including those copied by the storage."""
    receipts: tuple[Receipt, ...] = ()
    compared_elements: int = 0
    differences: tuple[DriftError, ...] = field(default=())
    figures: tuple[WorkerFigures, ...] = ()
    """What the workers that ran it did since their previous report."""
    copied_bytes: int = 0
    """How many of ``written_bytes`` the storage copied."""
    sums: tuple[Sum, ...] = ()
    """What it adds to the fingerprints of tensors."""
    statistics: tuple[tuple[int, Statistics], ...] = ()
    """How far two sides of tensors are apart, by number."""
    worker: str = field(default="", compare=False)
    """The worker that ran it; empty if several did."""
    seconds: float = field(default=0.0, compare=False)
    """How long it ran."""


def load_band(source: ReadRange, path: str, start: int, stop: int) -> Buffer:
    """The bytes ``[start, stop)`` of one source file."""
    buffer = HOST.allocate(stop - start, start)
    source.read_into(path, start, buffer.data)
    return buffer


def load_bands(work: GroupWork, bands: Bands, source: ReadRange, mover: Mover) -> list[Buffer]:
    """The bytes of each band, in memory of the mover; the source may read several at a time."""
    files, starts, stops = (bands[name].tolist() for name in ("file", "start", "stop"))
    buffers = [mover.allocate(stop - start, start) for start, stop in zip(starts, stops, strict=True)]
    paths = (work.source_paths[file] for file in files)
    source.read_many(
        [Read(path, start, buffer.data) for path, start, buffer in zip(paths, starts, buffers, strict=True)]
    )
    return buffers


def band_bytes(work: GroupWork) -> int:
    """Bytes of all bands of a group."""
    return int((work.bands["stop"] - work.bands["start"]).sum())


class Pass(NamedTuple):
    """Bands that are read together, and which ops of the group use them."""

    bands: Bands
    ops: slice


def passes(work: GroupWork) -> Iterator[Pass]:
    """The passes of a group, in order. A group whose bands fit into memory together has one."""
    numbers = distinct(work.bands["pass"])
    ends = (np.searchsorted(of["pass"], numbers, side="right").tolist() for of in (work.bands, work.ops))
    first_band = first_op = 0
    for band, op in zip(*ends, strict=True):
        yield Pass(work.bands[first_band:band], slice(first_op, op))
        first_band, first_op = band, op


def with_ranges(ops: Ops, *sides: tuple[Bands | Parts, str]) -> Iterator[tuple[Any, ...]]:
    """Each op as a row, with the index of the range that holds each side; few rows exist at a time."""
    for block in ops.blocks(ROWS_AT_A_TIME):
        yield from zip(block.rows(), *(locate(ranges, block, side) for ranges, side in sides), strict=True)


def locate(ranges: Bands | Parts, ops: Ops, side: str) -> Ints:
    """For each op of a group, the index of the part, or of the band of its pass, that holds its ``side``."""
    stretches, of_ops = ranges["file"].astype(np.int64), ops[f"{side}_file"].astype(np.int64)
    if "pass" in (ranges.dtype.names or ()):
        files = 1 + max(int(stretches.max(initial=0)), int(of_ops.max(initial=0)))
        stretches += files * ranges["pass"].astype(np.int64)
        of_ops += files * ops["pass"].astype(np.int64)
    numbers = Ranges(stretches, ranges["start"], ranges["stop"]).holding(of_ops, ops[f"{side}_byte"])
    if (numbers < 0).any():
        raise PlanError(f"the {side} of a box is in no range of its group and pass")
    return numbers


def box_of(buffer: Any, start: int, op: np.void, side: str) -> DeviceBox:
    """The box of an op on one ``side``; ``buffer`` holds the file from byte ``start`` on."""
    dtype = DTYPES[int(op[f"{side}_dtype"])]
    return DeviceBox(
        buffer=buffer,
        byte_offset=int(op[f"{side}_byte"]) - start,
        dtype=np.dtype(f"<{dtype.code}"),
        extents=tuple(op["extents"].tolist()),
        strides=tuple(op[f"{side}_strides"].tolist()),
    )


def groups_ended(plan: Plan, reports: Sequence[GroupReport]) -> list[GroupEnded]:
    """What ``reports`` say, in order. Groups that are reported together ran one after the other."""
    events: list[GroupEnded] = []
    later_seconds = 0.0
    for report in reversed(reports):
        figures = report.read_bytes, report.written_bytes, report.copied_bytes
        peak_bytes = int(plan.group_peaks[report.group])
        retries = add_retries(worker.retries for worker in report.figures)
        event = GroupEnded(
            report.group, report.worker, report.seconds, later_seconds, peak_bytes, *figures, retries
        )
        events.append(event)
        later_seconds += report.seconds
    return events[::-1]
