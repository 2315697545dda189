"""Compare the boxes of a group, bit for bit, or measure how far they are apart."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, cached_property
from itertools import count, islice, repeat
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from paddle_reshard.pipeline.core.catalog import ITEMSIZES, volumes
from paddle_reshard.pipeline.core.errors import DriftError, MasterDriftError, PlanError
from paddle_reshard.pipeline.core.sorting import distinct
from paddle_reshard.pipeline.planning.ops import COMPARE, HOLD, MOVE, PROBE, SUM, Ops, hull
from paddle_reshard.pipeline.planning.plan import Bands
from paddle_reshard.pipeline.planning.work import GroupWork
from paddle_reshard.storage.store import Read, ReadRange
from paddle_reshard.tasks.boxes import blocks
from paddle_reshard.tasks.cast import cast
from paddle_reshard.tasks.device import HOST, Buffer, Mover
from paddle_reshard.tasks.group import (
    ROWS_AT_A_TIME,
    GroupReport,
    Pass,
    box_of,
    load_bands,
    locate_bands,
    passes,
    with_ranges,
)
from paddle_reshard.tasks.statistics import Statistics, Tolerance, compare_values

SMALLEST_RUN_BYTES = 32
"""Shorter runs are compared element by element."""
SCRATCH_BYTES = 1 << 20
"""Runs that are compared at a time; they and their copies fit the third-level cache."""


def compare_group(work: GroupWork, source: ReadRange, mover: Mover = HOST) -> GroupReport:
    """Make the comparisons of one group and report every pair of boxes that differs.

    A pass may be as small as what a processor's cache holds, so everything that can be is prepared for many at a time.
    """
    ops = _comparisons(work.ops)
    pairs = _pairs(ops, work.bands)
    comparer = _Comparer(work)
    of_bands, of_ops = work.bands["pass"], ops["pass"]
    numbers = distinct(of_bands)
    ends = zip(
        *(np.searchsorted(of, numbers, side="right").tolist() for of in (of_bands, of_ops)), strict=True
    )
    paths, starts, stops = (work.bands[name].tolist() for name in ("file", "start", "stop"))
    first_band = first_op = 0
    with source.kept_open() as files:
        for last_band, last_op in ends:
            here = range(first_band, last_band)
            buffers = [mover.allocate(stops[band] - starts[band], starts[band]) for band in here]
            files.read_many(
                [
                    Read(work.source_paths[paths[band]], starts[band], buffer.data)
                    for band, buffer in zip(here, buffers, strict=True)
                ]
            )
            comparer.compare(islice(pairs, last_op - first_op), buffers, first_band)
            mover.release()
            first_band, first_op = last_band, last_op
    return GroupReport(
        work.group,
        sum(stops) - sum(starts),
        0,
        compared_elements=int(volumes(ops).sum()),
        differences=tuple(comparer.differences),
    )


def measure_group(
    work: GroupWork, source: ReadRange, tolerance: Tolerance, mover: Mover = HOST
) -> GroupReport:
    """Measure how far the two sides of the boxes of one group are apart."""
    statistics: list[tuple[int, Statistics]] = []
    read = 0
    for step in passes(work):
        bands = load_bands(work, step.bands, source, mover)
        read += sum(map(len, bands))
        for op, *pair in with_ranges(step.ops, (step.bands, "source"), (step.bands, "target")):
            statistics.append(_measured(work, step, op, [bands[band] for band in pair], pair, tolerance))
        mover.release()
    return GroupReport(work.group, read, 0, statistics=tuple(statistics))


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
    statistics = compare_values(sides[0], sides[1], dtypes, tolerance)
    if statistics.first is not None:
        at = tuple(int(i + o) for i, o in zip(statistics.first[:dims], op["offset"][:dims], strict=True))
        statistics = statistics._replace(first=at)
    return number, statistics


def compare_pass(work: GroupWork, ranges: Bands, ops: Ops, bands: Sequence[Buffer]) -> GroupReport:
    """Make the comparisons of a pass, given its ``bands``, and report every pair that differs."""
    ops = _comparisons(ops)
    comparer = _Comparer(work)
    comparer.compare(_pairs(ops, ranges), bands, 0)
    read = sum(len(buffer) for buffer in bands)
    return GroupReport(work.group, read, 0, (), int(volumes(ops).sum()), tuple(comparer.differences))


def _comparisons(ops: Ops) -> Ops:
    """The ops that compare, in their order."""
    chosen = (ops["kind"] != MOVE) & (ops["kind"] != SUM)
    return ops if chosen.all() else ops[chosen]


class _RowsOnDemand:
    """Ops as rows, which are made when the first is asked for: few comparisons ask."""

    def __init__(self, ops: Ops) -> None:
        self.ops = ops

    def __getitem__(self, number: int) -> Any:
        return self._made[number]

    @cached_property
    def _made(self) -> npt.NDArray[np.void]:
        return self.ops.rows()


class _Pair(NamedTuple):
    """The two sides of an op: the band that holds each, where in the band it begins, and its runs of bytes."""

    rows: _RowsOnDemand
    number: int
    """Which of ``rows`` is the op."""
    bands: tuple[int, int]
    begins: tuple[int, int]
    run: int
    """Bytes of a run that is in one piece on both sides; 0 if elements are compared one by one."""
    extents: tuple[int, ...]
    """How many runs there are along each dim; none for a single run."""
    strides: tuple[tuple[int, ...], tuple[int, ...]]


def _pairs(ops: Ops, ranges: Bands) -> Iterator[_Pair]:
    """Both sides of each op; ``ranges`` are those of all passes of ``ops``."""
    for block in ops.blocks(ROWS_AT_A_TIME):
        sides = []
        for side in ("source", "target"):
            bands = locate_bands(ranges, block, side)
            start, stop = hull(block, side)
            if (bands < 0).any() or (stop > ranges["stop"][bands]).any():
                raise PlanError("a comparison reaches beyond the bands of its pass")
            begins = start - ranges["start"][bands]
            sides.append((bands.tolist(), begins.tolist()))
        (a, a_begins), (b, b_begins) = sides
        yield from map(
            _Pair,
            repeat(_RowsOnDemand(block)),
            count(),
            zip(a, b, strict=True),
            zip(a_begins, b_begins, strict=True),
            *_runs(block),
        )


def _runs(ops: Ops) -> tuple[list[int], list[tuple[int, ...]], list[tuple[tuple[int, ...], tuple[int, ...]]]]:
    """The bytes of the runs of each op, how many there are along each dim, and their strides on both sides."""
    extents, *strides = (ops[name] for name in ("extents", "source_strides", "target_strides"))
    # Dims in the memory order of the first side, fastest last. Those with one element, of any stride, come first.
    order = np.argsort(np.where(extents > 1, -strides[0], np.iinfo(np.int64).min), axis=1, kind="stable")
    extents, source_strides, target_strides = (
        np.take_along_axis(of, order, axis=1) for of in (extents, *strides)
    )
    run = ITEMSIZES[ops["source_dtype"]]
    open_ = ops["source_dtype"] == ops["target_dtype"]
    usable = open_.copy()
    last = np.full(len(ops), extents.shape[1])
    for dim in range(extents.shape[1] - 1, -1, -1):
        open_ &= (extents[:, dim] == 1) | (source_strides[:, dim] == run) & (target_strides[:, dim] == run)
        run = np.where(open_, run * extents[:, dim], run)
        last -= open_
    first = (extents == 1).cumprod(axis=1).sum(axis=1)
    usable &= (last <= first) | (run >= SMALLEST_RUN_BYTES)
    dims = [slice(*ends) for ends in zip(first.tolist(), last.tolist(), strict=True)]
    shapes, *sides = (
        [tuple(row[of]) for row, of in zip(table.tolist(), dims, strict=True)]
        for table in (extents, source_strides, target_strides)
    )
    return np.where(usable, run, 0).tolist(), shapes, list(zip(*sides, strict=True))


class _Comparer:
    """Compares pairs of boxes of a group and keeps the differences."""

    def __init__(self, work: GroupWork) -> None:
        self.work = work
        self.differences: list[DriftError] = []
        self.owners = set[tuple[int, ...]]()
        """Owners of all differences."""
        self.scratch: Sequence[Buffer] = ()
        """Memory for the runs of either side."""
        self.scratch_at: Sequence[int] = ()
        """Addresses of ``scratch``."""

    def compare(self, pairs: Iterable[_Pair], buffers: Sequence[Buffer], first: int) -> None:
        """Compare pairs of boxes in ``buffers``, those of the bands from number ``first`` on."""
        memcmp = _memcmp()
        addresses = [_address_of(buffer) for buffer in buffers]
        for pair in pairs:
            a, b = (band - first for band in pair.bands)
            at = addresses[a] + pair.begins[0], addresses[b] + pair.begins[1]
            if pair.run and pair.extents:
                equal = self._same_runs(pair, (buffers[a], buffers[b]), at)
            else:
                equal = pair.run > 0 and not memcmp(*at, pair.run)
            if not equal:
                self._look(pair, buffers[a], buffers[b])

    def _same_runs(self, pair: _Pair, buffers: tuple[Buffer, Buffer], at: tuple[int, int]) -> bool:
        """Whether all runs of two boxes, which begin ``at`` these addresses, are equal bit for bit.

        Tensors begin at any byte of a file, where NumPy would copy each block before it compares it. Runs of bytes are
        copied to one piece as they are, unless they are in one, and compared there, which takes half of the time.
        """
        kind = np.dtype((np.void, pair.run))
        sides = [
            np.ndarray(pair.extents, kind, *side)
            for side in zip(buffers, pair.begins, pair.strides, strict=True)
        ]
        whole = [side.flags.c_contiguous for side in sides]
        if not self.scratch or len(self.scratch[0]) < pair.run:
            room = np.empty((2, max(SCRATCH_BYTES, pair.run)), dtype=np.uint8)
            self.scratch = room[0], room[1]
            self.scratch_at = _address_of(room[0]), _address_of(room[1])
        most = max(1, SCRATCH_BYTES // pair.run)
        memcmp, done = _memcmp(), 0
        for block in [()] if sides[0].size <= most else blocks(pair.extents, most):
            source_address, target_address = (
                begin + done if in_one else _copied(side[block], scratch, address)
                for begin, in_one, side, scratch, address in zip(
                    at, whole, sides, self.scratch, self.scratch_at, strict=True
                )
            )
            nbytes = sides[0][block].nbytes
            if memcmp(source_address, target_address, nbytes):
                return False
            done += nbytes
        return True

    def _look(self, pair: _Pair, *buffers: Buffer) -> None:
        """Compare a pair of boxes element by element, unless the tensor is known to differ in their files.

        Large boxes are compared in pieces, of which thousands may differ.
        """
        op = pair.rows[pair.number]
        owner = tuple(int(op[name]) for name in ("tensor", "kind", "source_file", "target_file"))
        if owner in self.owners:
            return
        source, target = (
            box_of(buffer, int(op[f"{side}_byte"]) - begin, op, side).array()
            for buffer, begin, side in zip(buffers, pair.begins, ("source", "target"), strict=True)
        )
        in_master = op["kind"] in (HOLD, PROBE)
        dtype = target.dtype if in_master else np.dtype(f"<{self.work.tensors[int(op['tensor'])].dtype.code}")
        index = _first_difference(source, target, dtype, any_nan=in_master)
        if index is not None:
            self.owners.add(owner)
            self.differences.append(_difference(self.work, op, (source[index], target[index]), index, dtype))


def _copied(runs: npt.NDArray[np.void], scratch: Buffer, address: int) -> int:
    """Copy runs to one piece in ``scratch``, which is at ``address``; the same address."""
    np.copyto(np.ndarray(runs.shape, runs.dtype, scratch), runs)
    return address


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
    source: npt.NDArray[Any], target: npt.NDArray[Any], dtype: np.dtype[Any], any_nan: bool
) -> tuple[int, ...] | None:
    """Index of the first element whose bits differ as ``dtype``.

    With ``any_nan`` all NaNs are equal: devices differ in the NaN that they round a NaN to.
    """
    for block in blocks(source.shape):
        a, b = (cast(side[block], dtype) for side in (source, target))
        bits = np.dtype(f"<u{dtype.itemsize}")
        differs = np.ascontiguousarray(a).view(bits) != np.ascontiguousarray(b).view(bits)
        if any_nan and differs.any():
            differs &= ~(_is_nan(a) & _is_nan(b))
        if differs.any():
            at = tuple(int(i) for i in np.argwhere(differs)[0])
            return tuple(i + (s.start or 0) for i, s in zip(at, block, strict=False)) + at[len(block) :]
    return None


def _address_of(buffer: npt.NDArray[Any]) -> int:
    """The address of the first byte; ``ctypes`` has no faster way that also takes memory which cannot be written."""
    address: int = buffer.__array_interface__["data"][0]
    return address


@cache
def _memcmp() -> Callable[[int, int, int], int]:
    """``memcmp`` of the C library. Python's lock is free while it runs."""
    function = ctypes.CDLL(None).memcmp
    function.argtypes = ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t
    memcmp: Callable[[int, int, int], int] = function
    return memcmp


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
