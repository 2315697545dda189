"""What running and comparing a group share: its report, its passes, its bands, and the boxes of its ops."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from paddle_reshard.pipeline.core.errors import DriftError
from paddle_reshard.pipeline.core.geometry import Ranges
from paddle_reshard.pipeline.core.numbers import Ints
from paddle_reshard.pipeline.core.sorting import distinct
from paddle_reshard.pipeline.core.tensors import DTYPES
from paddle_reshard.pipeline.planning.ops import Ops
from paddle_reshard.pipeline.planning.parts import Parts
from paddle_reshard.pipeline.planning.plan import Bands
from paddle_reshard.pipeline.planning.work import GroupWork
from paddle_reshard.storage.store import Read, ReadRange, Receipt
from paddle_reshard.tasks.device import HOST, Buffer, DeviceBox, Mover
from paddle_reshard.tasks.figures import WorkerFigures
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
    buffers = [mover.allocate(int(band["stop"] - band["start"]), int(band["start"])) for band in bands]
    source.read_many(
        [
            Read(work.source_paths[int(band["file"])], int(band["start"]), buffer.data)
            for band, buffer in zip(bands, buffers, strict=True)
        ]
    )
    return buffers


class Pass(NamedTuple):
    """Bands that are read together, and the ops that use them."""

    bands: Bands
    ops: Ops


def passes(work: GroupWork) -> Iterator[Pass]:
    """The passes of a group, in order. A group whose bands fit into memory together has one."""
    of_ops = work.ops["pass"]
    for number in distinct(work.bands["pass"]):
        bands = work.bands[slice(*np.searchsorted(work.bands["pass"], [number, number + 1]))]
        ops = work.ops[slice(*np.searchsorted(of_ops, [number, number + 1]))]
        yield Pass(bands, ops)


def with_ranges(ops: Ops, *sides: tuple[Bands | Parts, str]) -> Iterator[tuple[Any, ...]]:
    """Each op as a row, with the index of the range that holds each side; few rows exist at a time."""
    for block in ops.blocks(ROWS_AT_A_TIME):
        yield from zip(block.rows(), *(locate(ranges, block, side) for ranges, side in sides), strict=True)


def summed_up(work: GroupWork, reports: Sequence[GroupReport]) -> GroupReport:
    """One report of all passes of a group."""
    return GroupReport(
        group=work.group,
        read_bytes=sum(report.read_bytes for report in reports),
        written_bytes=0,
        compared_elements=sum(report.compared_elements for report in reports),
        differences=tuple(chain.from_iterable(report.differences for report in reports)),
    )


def locate_bands(bands: Bands, ops: Ops, side: str) -> Ints:
    """For each op of a group, the index of the band of its pass that holds its ``side``."""
    files = 1 + max(int(bands["file"].max(initial=0)), int(ops[f"{side}_file"].max(initial=0)))
    stretches = bands["pass"].astype(np.int64) * files + bands["file"]
    of_ops = ops["pass"].astype(np.int64) * files + ops[f"{side}_file"]
    return Ranges(stretches, bands["start"], bands["stop"]).holding(of_ops, ops[f"{side}_byte"])


def locate(ranges: Bands | Parts, ops: Ops, side: str) -> Ints:
    """For each op, the index of the range that holds its ``side``; ``ranges`` is sorted by file and start."""
    by_file = Ranges(ranges["file"].astype(np.int64), ranges["start"], ranges["stop"])
    return by_file.holding(ops[f"{side}_file"], ops[f"{side}_byte"])


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
