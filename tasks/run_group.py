"""Run one group: read its bands, move boxes between buffers, write its parts.

Running it again writes the same bytes to the same places.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from paddle_reshard.pipeline.errors import DriftError
from paddle_reshard.pipeline.planning.match import COMPARE, MOVE
from paddle_reshard.pipeline.planning.plan import Bands
from paddle_reshard.pipeline.planning.work import GroupWork
from paddle_reshard.pipeline.tensors import DTYPES
from paddle_reshard.storage.store import ReadRange, Receipt, WritePart
from paddle_reshard.tasks.cast import bfloat16_bits, blocks

Buffer = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class GroupReport:
    """What running a group did."""

    group: int
    read_bytes: int
    written_bytes: int
    receipts: tuple[Receipt, ...] = ()
    compared_elements: int = 0
    differences: tuple[DriftError, ...] = field(default=())


def run_group(work: GroupWork, source: ReadRange, target: WritePart) -> GroupReport:
    """Make the parts of one group.

    Raises
    ------
    DriftError
        If two copies of the same values differ; nothing of the group is written then. Where the work allows
        replica drift, it is reported instead; a parameter that is not the cast of its master weight never is.
    """
    bands = _read_bands(work, source)
    report = _compare(work, bands)
    for difference in report.differences:
        if not (work.allow_replica_drift and difference.replicas):
            raise difference
    parts = [np.zeros(int(p["stop"] - p["start"]), dtype=np.uint8) for p in work.parts]
    for index, offset, content in work.literals:
        parts[index][offset : offset + len(content)] = np.frombuffer(content, dtype=np.uint8)
    for op in work.ops[work.ops["kind"] == MOVE]:
        index = _locate(work.parts, int(op["target_file"]), int(op["target_byte"]))
        to = _view(parts[index], int(work.parts[index]["start"]), op, "target")
        _move(_source_view(work, bands, op, "source"), to)
    receipts = tuple(
        target.write_part(work.target_paths[int(part["file"])], int(part["start"]), buffer.data)
        for part, buffer in zip(work.parts, parts, strict=True)
        if len(buffer)
    )
    return GroupReport(
        group=work.group,
        read_bytes=report.read_bytes,
        written_bytes=sum(len(buffer) for buffer in parts),
        receipts=receipts,
        compared_elements=report.compared_elements,
        differences=report.differences,
    )


def compare_group(work: GroupWork, source: ReadRange) -> GroupReport:
    """Make the comparisons of one group and report every pair of boxes that differs."""
    return _compare(work, _read_bands(work, source))


def _read_bands(work: GroupWork, source: ReadRange) -> list[Buffer]:
    bands = []
    for band in work.bands:
        buffer = np.empty(int(band["stop"] - band["start"]), dtype=np.uint8)
        source.read_into(work.source_paths[int(band["file"])], int(band["start"]), buffer.data)
        bands.append(buffer)
    return bands


def _compare(work: GroupWork, bands: list[Buffer]) -> GroupReport:
    differences = []
    compared = 0
    for op in work.ops[work.ops["kind"] == COMPARE]:
        one = _source_view(work, bands, op, "source")
        other = _source_view(work, bands, op, "target")
        compared += one.size
        tensor = work.tensors[int(op["tensor"])]
        difference = _first_difference(one, other, np.dtype(f"<{tensor.dtype.code}"))
        if difference is not None:
            place, a, b = difference
            index = tuple(int(p + o) for p, o in zip(place, op["offset"], strict=False))
            differences.append(
                DriftError(
                    tensor.label,
                    f"element {index} is {a} and {b}",
                    work.source_paths[int(op["source_file"])],
                    work.source_paths[int(op["target_file"])],
                    bool(op["tensor"] == op["feed"]),
                )
            )
    read = sum(len(buffer) for buffer in bands)
    return GroupReport(work.group, read, 0, (), compared, tuple(differences))


def _locate(ranges: Bands, file: int, byte: int) -> int:
    """Index of the range that holds a byte of a file; ``ranges`` is sorted by file and start."""
    low = int(np.searchsorted(ranges["file"], file, side="left"))
    high = int(np.searchsorted(ranges["file"], file, side="right"))
    return low + int(np.searchsorted(ranges["start"][low:high], byte, side="right")) - 1


def _source_view(work: GroupWork, bands: list[Buffer], op: np.void, side: str) -> npt.NDArray[Any]:
    index = _locate(work.bands, int(op[f"{side}_file"]), int(op[f"{side}_byte"]))
    return _view(bands[index], int(work.bands[index]["start"]), op, side)


def _view(buffer: Buffer, start: int, op: np.void, side: str) -> npt.NDArray[Any]:
    """One side's box of an op as an array on the buffer that holds its bytes."""
    dtype = DTYPES[int(op[f"{side}_dtype"])]
    return np.ndarray(
        shape=tuple(op["extents"].tolist()),
        dtype=np.dtype(f"<{dtype.code}"),
        buffer=buffer,
        offset=int(op[f"{side}_byte"]) - start,
        strides=tuple(op[f"{side}_strides"].tolist()),
    )


def _move(source: npt.NDArray[Any], target: npt.NDArray[Any]) -> None:
    if source.dtype == target.dtype:
        target[...] = source
        return
    for block in blocks(source.shape):
        target[block] = bfloat16_bits(source[block])


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
