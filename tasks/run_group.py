"""Run one group: load its bands, move boxes from bands to parts, write its parts.

Running it again writes the same bytes to the same places. One worker can do all of it (:func:`run_group`), or
several can share the loading and each finish some parts (:func:`load_band`, :func:`finish_group`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from paddle_reshard.pipeline.errors import DriftError
from paddle_reshard.pipeline.geometry import Ints
from paddle_reshard.pipeline.planning.match import COMPARE, MOVE, Ops
from paddle_reshard.pipeline.planning.plan import Bands
from paddle_reshard.pipeline.planning.work import GroupWork
from paddle_reshard.pipeline.tensors import DTYPES
from paddle_reshard.storage.store import Read, ReadRange, Receipt, WritePart
from paddle_reshard.tasks.cast import bfloat16_bits, blocks
from paddle_reshard.tasks.device import HOST, Box, Buffer, Mover
from paddle_reshard.tasks.figures import WorkerFigures


@dataclass(frozen=True, slots=True)
class GroupReport:
    """What running a group did."""

    group: int
    read_bytes: int
    written_bytes: int
    receipts: tuple[Receipt, ...] = ()
    compared_elements: int = 0
    differences: tuple[DriftError, ...] = field(default=())
    figures: tuple[WorkerFigures, ...] = ()
    """What the workers of a cluster that ran it have done since they last told."""


def run_group(work: GroupWork, source: ReadRange, target: WritePart, mover: Mover = HOST) -> GroupReport:
    """Make the parts of one group.

    Raises
    ------
    DriftError
        If two copies of the same values differ; nothing of the group is written then. Where the work allows
        replica drift, it is reported instead; a parameter that is not the cast of its master weight never is.
    """
    return finish_group(work, _load_bands(work, source), target, mover)


def compare_group(work: GroupWork, source: ReadRange) -> GroupReport:
    """Make the comparisons of one group and report every pair of boxes that differs."""
    return compare_bands(work, _load_bands(work, source))


def load_band(source: ReadRange, path: str, start: int, stop: int) -> Buffer:
    """The bytes ``[start, stop)`` of one source file."""
    buffer = np.empty(stop - start, dtype=np.uint8)
    source.read_into(path, start, buffer.data)
    return buffer


def _load_bands(work: GroupWork, source: ReadRange) -> list[Buffer]:
    bands = [np.empty(int(band["stop"] - band["start"]), dtype=np.uint8) for band in work.bands]
    source.read_many(
        [
            Read(work.source_paths[int(band["file"])], int(band["start"]), buffer.data)
            for band, buffer in zip(work.bands, bands, strict=True)
        ]
    )
    return bands


def finish_group(
    work: GroupWork, bands: Sequence[Buffer], target: WritePart, mover: Mover = HOST
) -> GroupReport:
    """Compare, make and write the parts of a group whose ``bands`` are loaded; they are only read."""
    compared = compare_bands(work, bands)
    for difference in compared.differences:
        if not (work.allow_replica_drift and difference.replicas):
            raise difference
    loaded = [mover.load(band) for band in bands]
    moves = work.ops[work.ops["kind"] == MOVE]
    places = locate(work.parts, moves, "target")
    receipts = []
    for index, part in enumerate(work.parts):
        if part["start"] < part["stop"]:
            buffer = _make_part(work, index, moves[places == index], loaded, mover)
            path = work.target_paths[int(part["file"])]
            receipts.append(target.write_part(path, int(part["start"]), buffer.data))
    return GroupReport(
        group=work.group,
        read_bytes=compared.read_bytes,
        written_bytes=int((work.parts["stop"] - work.parts["start"]).sum()),
        receipts=tuple(receipts),
        compared_elements=compared.compared_elements,
        differences=compared.differences,
    )


def _make_part(work: GroupWork, index: int, moves: Ops, bands: Sequence[Any], mover: Mover) -> Buffer:
    """All bytes of one part: moved values, literal bytes, and zeros where there is neither."""
    part = work.parts[index]
    start = int(part["start"])
    made = mover.zeros(int(part["stop"]) - start)
    for op, band in zip(moves, locate(work.bands, moves, "source"), strict=True):
        source = _box(bands[band], int(work.bands[band]["start"]), op, "source")
        mover.move(source, _box(made, start, op, "target"))
    buffer = mover.fetch(made)
    for place, offset, content in work.literals:
        if place == index:
            buffer[offset : offset + len(content)] = np.frombuffer(content, dtype=np.uint8)
    return buffer


def compare_bands(work: GroupWork, bands: Sequence[Buffer]) -> GroupReport:
    """Make the comparisons of a group whose ``bands`` are loaded, and report every pair that differs."""
    differences = []
    compared = 0
    ops = work.ops[work.ops["kind"] != MOVE]
    places = (locate(work.bands, ops, side) for side in ("source", "target"))
    for op, *pair in zip(ops, *places, strict=True):
        one, other = (
            _box(bands[band], int(work.bands[band]["start"]), op, side).array()
            for band, side in zip(pair, ("source", "target"), strict=True)
        )
        compared += one.size
        tensor = work.tensors[int(op["tensor"])]
        difference = _first_difference(one, other, np.dtype(f"<{tensor.dtype.code}"))
        if difference is not None:
            place, a, b = difference
            dims = len(tensor.global_shape)
            index = tuple(int(p + o) for p, o in zip(place[:dims], op["offset"][:dims], strict=True))
            differences.append(
                DriftError(
                    tensor.label,
                    f"element {index} is {a} and {b}",
                    work.source_paths[int(op["source_file"])],
                    work.source_paths[int(op["target_file"])],
                    bool(op["kind"] == COMPARE),
                )
            )
    read = sum(len(buffer) for buffer in bands)
    return GroupReport(work.group, read, 0, (), compared, tuple(differences))


def locate(ranges: Bands, ops: Ops, side: str) -> Ints:
    """For each op, the index of the range that holds one ``side``; ``ranges`` is sorted by file and start."""
    found = np.zeros(len(ops), dtype=np.int64)
    for file in np.unique(ops[f"{side}_file"]):
        low, high = (int(np.searchsorted(ranges["file"], file, end)) for end in ("left", "right"))
        here = ops[f"{side}_file"] == file
        found[here] = low - 1 + np.searchsorted(ranges["start"][low:high], ops[f"{side}_byte"][here], "right")
    return found


def _box(buffer: Any, start: int, op: np.void, side: str) -> Box:
    """One side's box of an op, on the buffer that holds the file from byte ``start`` on."""
    dtype = DTYPES[int(op[f"{side}_dtype"])]
    return Box(
        buffer=buffer,
        byte_offset=int(op[f"{side}_byte"]) - start,
        dtype=np.dtype(f"<{dtype.code}"),
        extents=tuple(op["extents"].tolist()),
        strides=tuple(op[f"{side}_strides"].tolist()),
    )


def _first_difference(
    one: npt.NDArray[Any], other: npt.NDArray[Any], dtype: np.dtype[Any]
) -> tuple[tuple[int, ...], str, str] | None:
    """Place and both values of the first element whose bits differ, each side as ``dtype``."""
    for block in blocks(one.shape):
        a, b = (side[block] if side.dtype == dtype else bfloat16_bits(side[block]) for side in (one, other))
        bits = np.dtype(f"<u{dtype.itemsize}")
        differs = np.ascontiguousarray(a).view(bits) != np.ascontiguousarray(b).view(bits)
        if differs.any():
            at = tuple(int(i) for i in np.argwhere(differs)[0])
            place = tuple(i + (s.start or 0) for i, s in zip(at, block, strict=False)) + at[len(block) :]
            return place, _show(a[at]), _show(b[at])
    return None


def _show(value: Any) -> str:
    """A value for people, with its bits; bfloat16 patterns as the number they stand for."""
    bits = value.tobytes()[::-1].hex()
    if value.dtype == np.uint16:
        value = np.array([int(value) << 16], dtype=np.uint32).view(np.float32)[0]
    return f"{value!s} (0x{bits})"
