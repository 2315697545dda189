"""Compare the boxes of a group, bit for bit, or measure how far they are apart."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from paddle_reshard.pipeline.core.errors import DriftError, MasterDriftError
from paddle_reshard.pipeline.planning.ops import COMPARE, HOLD, MOVE, PROBE, SUM, Ops
from paddle_reshard.pipeline.planning.plan import Bands
from paddle_reshard.pipeline.planning.work import GroupWork
from paddle_reshard.storage.store import ReadRange
from paddle_reshard.tasks.boxes import blocks, in_order_of
from paddle_reshard.tasks.cast import cast
from paddle_reshard.tasks.device import HOST, Buffer, Mover
from paddle_reshard.tasks.group import (
    GroupReport,
    Pass,
    box_of,
    load_bands,
    passes,
    summed_up,
    with_ranges,
)
from paddle_reshard.tasks.statistics import Statistics, Tolerance, compare_values


def compare_group(work: GroupWork, source: ReadRange, mover: Mover = HOST) -> GroupReport:
    """Make the comparisons of one group and report every pair of boxes that differs."""
    reports = []
    for step in passes(work):
        reports.append(compare_pass(work, step.bands, step.ops, load_bands(work, step.bands, source, mover)))
        mover.release()
    return summed_up(work, reports)


def measure_group(
    work: GroupWork, source: ReadRange, tolerance: Tolerance, mover: Mover = HOST
) -> GroupReport:
    """Measure how far the two sides of the boxes of one group are apart."""
    found: list[tuple[int, Statistics]] = []
    read = 0
    for step in passes(work):
        bands = load_bands(work, step.bands, source, mover)
        read += sum(map(len, bands))
        for op, *pair in with_ranges(step.ops, (step.bands, "source"), (step.bands, "target")):
            found.append(_measured(work, step, op, [bands[band] for band in pair], pair, tolerance))
        mover.release()
    return GroupReport(work.group, read, 0, statistics=tuple(found))


def _measured(
    work: GroupWork,
    step: Pass,
    op: np.void,
    buffers: Sequence[Buffer],
    bands: Sequence[int],
    tolerance: Tolerance,
) -> tuple[int, Statistics]:
    number = int(op["tensor"])
    tensor = work.tensors[number]
    dims = len(tensor.global_shape)
    sides = [
        box_of(buffer, int(step.bands[band]["start"]), op, side).array()
        for buffer, band, side in zip(buffers, bands, ("source", "target"), strict=True)
    ]
    other = (work.measured or {}).get(number, tensor.dtype)
    dtypes = np.dtype(f"<{tensor.dtype.code}"), np.dtype(f"<{other.code}")
    found = compare_values(sides[0], sides[1], dtypes, tolerance)
    if found.first is not None:
        at = tuple(int(i + o) for i, o in zip(found.first[:dims], op["offset"][:dims], strict=True))
        found = found._replace(first=at)
    return number, found


def compare_pass(work: GroupWork, ranges: Bands, ops: Ops, bands: Sequence[Buffer]) -> GroupReport:
    """Make the comparisons of a pass, given its ``bands``, and report every pair that differs."""
    differences = []
    compared = 0
    ops = ops[(ops["kind"] != MOVE) & (ops["kind"] != SUM)]
    for op, *pair in with_ranges(ops, (ranges, "source"), (ranges, "target")):
        a, b = (
            box_of(bands[band], int(ranges[band]["start"]), op, side).array()
            for band, side in zip(pair, ("source", "target"), strict=True)
        )
        compared += a.size
        tensor = work.tensors[int(op["tensor"])]
        in_master = op["kind"] in (HOLD, PROBE)
        dtype = b.dtype if in_master else np.dtype(f"<{tensor.dtype.code}")
        index = _first_difference(a, b, dtype, any_nan=in_master)
        if index is not None:
            differences.append(_difference(work, op, (a[index], b[index]), index, dtype))
    read = sum(len(buffer) for buffer in bands)
    return GroupReport(work.group, read, 0, (), compared, tuple(differences))


def _difference(
    work: GroupWork, op: np.void, values: tuple[Any, Any], in_box: tuple[int, ...], dtype: np.dtype[Any]
) -> DriftError:
    """The error for an op whose ``values``, compared as ``dtype``, differ at the index ``in_box`` of its box."""
    tensor = work.tensors[int(op["tensor"])]
    dims = len(tensor.global_shape)
    index = tuple(int(i + o) for i, o in zip(in_box[:dims], op["offset"][:dims], strict=True))
    path_a, path_b = (work.source_paths[int(op[f"{side}_file"])] for side in ("source", "target"))
    a, b = (_show(cast(np.array([value]), dtype)[0]) for value in values)
    if op["kind"] in (HOLD, PROBE):
        detail = f"element {index} is {b}, {MasterDriftError.PHRASE} {_show(values[0])} is rounded to {a}"
        return MasterDriftError(tensor.label, detail, path_b, path_a)
    return DriftError(
        tensor.label, f"element {index} is {a} and {b}", path_a, path_b, bool(op["kind"] == COMPARE)
    )


def _first_difference(
    one: npt.NDArray[Any], two: npt.NDArray[Any], dtype: np.dtype[Any], any_nan: bool
) -> tuple[int, ...] | None:
    """Index of the first element whose bits differ as ``dtype``.

    With ``any_nan`` all NaNs are equal: devices differ in the NaN that they round a NaN to.
    """
    if one.dtype == two.dtype and _same_bytes(one, two):
        return None
    for block in blocks(one.shape):
        a, b = (cast(side[block], dtype) for side in (one, two))
        bits = np.dtype(f"<u{dtype.itemsize}")
        differs = np.ascontiguousarray(a).view(bits) != np.ascontiguousarray(b).view(bits)
        if any_nan and differs.any():
            differs &= ~(_is_nan(a) & _is_nan(b))
        if differs.any():
            at = tuple(int(i) for i in np.argwhere(differs)[0])
            return tuple(i + (s.start or 0) for i, s in zip(at, block, strict=False)) + at[len(block) :]
    return None


def _same_bytes(one: npt.NDArray[Any], two: npt.NDArray[Any]) -> bool:
    """Whether two boxes of one dtype are equal bit for bit; False also if they are not in one piece and in one order.

    Tensors begin at any byte of a file, where NumPy would copy each block before it compares it.
    """
    a, b = in_order_of(one, one, two)
    if not (a.flags.c_contiguous and b.flags.c_contiguous):
        return False
    return _memcmp()(a.ctypes.data, b.ctypes.data, a.nbytes) == 0


@cache
def _memcmp() -> Callable[[int, int, int], int]:
    """``memcmp`` of the C library. Python's lock is free while it runs."""
    function = ctypes.CDLL(None).memcmp
    function.argtypes = ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t
    found: Callable[[int, int, int], int] = function
    return found


def _is_nan(values: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """Whether each value is NaN; bfloat16 is given as ``uint16``."""
    if values.dtype == np.uint16:
        return np.asarray((values & 0x7FFF) > 0x7F80)
    return np.isnan(values)


def _show(value: Any) -> str:
    """A value with its bits, for messages; a bfloat16 bit pattern as its number."""
    bits = value.tobytes()[::-1].hex()
    if value.dtype == np.uint16:
        value = np.array([int(value) << 16], dtype=np.uint32).view(np.float32)[0]
    return f"{value!s} (0x{bits})"
