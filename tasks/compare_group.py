"""Compare the boxes of a group, bit for bit, or measure how far they are apart."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import count, islice, repeat
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from paddle_reshard.pipeline.core.catalog import ITEMSIZES, volumes
from paddle_reshard.pipeline.core.errors import DriftError, MasterDriftError, PlanError, TiedDriftError
from paddle_reshard.pipeline.core.sorting import distinct
from paddle_reshard.pipeline.planning.ops import COMPARE, HOLD, MOVE, PROBE, SUM, Ops, hull
from paddle_reshard.pipeline.planning.plan import Bands
from paddle_reshard.pipeline.planning.work import GroupWork
from paddle_reshard.storage.store import ReadRange
from paddle_reshard.tasks.boxes import blocks
from paddle_reshard.tasks.cast import cast, widened
from paddle_reshard.tasks.device import HOST, Buffer, Mover
from paddle_reshard.tasks.group import (
    ROWS_AT_A_TIME,
    GroupReport,
    band_bytes,
    box_of,
    load_bands,
    locate,
    passes,
    with_ranges,
)
from paddle_reshard.tasks.statistics import Statistics, Tolerance, compare_values

SMALLEST_RUN_BYTES = 32
"""Shorter runs are compared element by element."""
SCRATCH_BYTES = 1 << 20
"""Runs that are compared at a time; they and their copies fit the third-level cache."""


def compare_group(work: GroupWork, source: ReadRange, mover: Mover = HOST) -> GroupReport:
    """Make the comparisons of one group and report every pair of boxes that differs."""
    comparisons = Comparisons(work)
    differences: list[DriftError] = []
    with source.kept_open() as files:
        for step in passes(work):
            differences += comparisons.next_pass(load_bands(work, step.bands, files, mover))
            mover.release()
    elements = comparisons.elements
    return GroupReport(
        work.group, band_bytes(work), 0, compared_elements=elements, differences=tuple(differences)
    )


def measure_group(
    work: GroupWork, source: ReadRange, tolerance: Tolerance, mover: Mover = HOST
) -> GroupReport:
    """Measure how far the two sides of the boxes of one group are apart."""
    statistics: list[tuple[int, Statistics]] = []
    for step in passes(work):
        bands = load_bands(work, step.bands, source, mover)
        ops = work.ops[step.ops]
        for op, *pair in with_ranges(ops, (step.bands, "source"), (step.bands, "target")):
            sides = [
                box_of(bands[band], int(step.bands[band]["start"]), op, side).array()
                for band, side in zip(pair, ("source", "target"), strict=True)
            ]
            statistics.append(_measured(work, op, sides, tolerance))
        mover.release()
    return GroupReport(work.group, band_bytes(work), 0, statistics=tuple(statistics))


def _measured(
    work: GroupWork, op: np.void, sides: Sequence[npt.NDArray[Any]], tolerance: Tolerance
) -> tuple[int, Statistics]:
    number = int(op["tensor"])
    tensor = work.tensors[number]
    dims = len(tensor.global_shape)
    other = (work.measured or {}).get(number, tensor.dtype)
    dtypes = np.dtype(f"<{tensor.dtype.code}"), np.dtype(f"<{other.code}")
    statistics = compare_values(sides[0], sides[1], dtypes, tolerance)
    if statistics.first is not None:
        at = tuple(int(i + o) for i, o in zip(statistics.first[:dims], op["offset"][:dims], strict=True))
        statistics = statistics._replace(first=at)
    return number, statistics


class _Pair(NamedTuple):
    """The two sides of an op: the band that holds each, where in the band it begins, and its runs of bytes."""

    ops: Ops
    number: int
    """Which of ``ops`` it is."""
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
            bands = locate(ranges, block, side)
            start, stop = hull(block, side)
            if (stop > ranges["stop"][bands]).any():
                raise PlanError("a comparison reaches beyond the bands of its pass")
            begins = start - ranges["start"][bands]
            sides.append((bands.tolist(), begins.tolist()))
        (a, a_begins), (b, b_begins) = sides
        yield from map(
            _Pair,
            repeat(block),
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


class Comparisons:
    """Makes the comparisons of a group, pass by pass.

    A pass may be as small as what a processor's cache holds, so everything that can be is prepared for many at a time.
    """

    def __init__(self, work: GroupWork) -> None:
        self.work = work
        kinds = work.ops["kind"]
        compares = (kinds != MOVE) & (kinds != SUM)
        ops = work.ops if compares.all() else work.ops[compares]
        self.elements = int(volumes(ops).sum())
        """How many elements are compared."""
        self.known = set[tuple[int, ...]]()
        """Owners of differences that are found, which are not looked for again."""
        self._pairs = _pairs(ops, work.bands)
        ends = np.searchsorted(ops["pass"], distinct(work.bands["pass"]), side="right")
        self._counts = iter(np.diff(ends, prepend=0).tolist())
        self._first_band = 0
        self._scratch: Sequence[Buffer] = ()
        """Memory for the runs of either side."""
        self._scratch_at: Sequence[int] = ()
        """Addresses of ``_scratch``."""

    def next_pass(self, buffers: Sequence[Buffer]) -> list[DriftError]:
        """Make the comparisons of the next pass, given its bands; every pair that differs."""
        pairs = islice(self._pairs, next(self._counts))
        first, self._first_band = self._first_band, self._first_band + len(buffers)
        differences = []
        memcmp = _memcmp()
        addresses = [_address_of(buffer) for buffer in buffers]
        for pair in pairs:
            a, b = (band - first for band in pair.bands)
            at = addresses[a] + pair.begins[0], addresses[b] + pair.begins[1]
            if pair.run and pair.extents:
                equal = self._same_runs(pair, (buffers[a], buffers[b]), at)
            else:
                equal = pair.run > 0 and not memcmp(*at, pair.run)
            if not equal and (difference := self._look(pair, buffers[a], buffers[b])) is not None:
                differences.append(difference)
        return differences

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
        if not self._scratch or len(self._scratch[0]) < pair.run:
            room = np.empty((2, max(SCRATCH_BYTES, pair.run)), dtype=np.uint8)
            self._scratch = room[0], room[1]
            self._scratch_at = _address_of(room[0]), _address_of(room[1])
        most = max(1, SCRATCH_BYTES // pair.run)
        memcmp, done = _memcmp(), 0
        for block in [()] if sides[0].size <= most else blocks(pair.extents, most):
            source_address, target_address = (
                begin + done if in_one else _copied(side[block], scratch, address)
                for begin, in_one, side, scratch, address in zip(
                    at, whole, sides, self._scratch, self._scratch_at, strict=True
                )
            )
            nbytes = sides[0][block].nbytes
            if memcmp(source_address, target_address, nbytes):
                return False
            done += nbytes
        return True

    def _look(self, pair: _Pair, *buffers: Buffer) -> DriftError | None:
        """Compare a pair of boxes element by element, unless the tensor is known to differ in their files.

        Large boxes are compared in pieces, of which thousands may differ.
        """
        (op,) = pair.ops[pair.number : pair.number + 1].rows()
        owner = tuple(int(op[name]) for name in ("tensor", "kind", "source_file", "target_file"))
        if owner in self.known:
            return None
        source, target = (
            box_of(buffer, int(op[f"{side}_byte"]) - begin, op, side).array()
            for buffer, begin, side in zip(buffers, pair.begins, ("source", "target"), strict=True)
        )
        in_master = op["kind"] in (HOLD, PROBE)
        dtype = target.dtype if in_master else np.dtype(f"<{self.work.tensors[int(op['tensor'])].dtype.code}")
        index = _first_difference(source, target, dtype, any_nan=in_master)
        if index is None:
            return None
        self.known.add(owner)
        return _difference(self.work, op, (source[index], target[index]), index, dtype)


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
    detail, are_copies = f"element {index} is {a} and {b}", bool(op["kind"] == COMPARE)
    if are_copies and tensor.key in work.tied:
        return TiedDriftError(tensor.label, *work.tied[tensor.key], detail, path_a, path_b)
    return DriftError(tensor.label, detail, path_a, path_b, are_copies)


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
        value = widened(np.array([value]))[0]
    return f"{value!s} (0x{bits})"
