"""Run one group: load its bands pass by pass, move boxes from bands to parts, write the parts.

Running a group again writes the same bytes at the same offsets. One worker can do everything (:func:`run_group`), or
several workers can load bands and each finish some parts (:func:`load_band`, :func:`finish_group`). Parts that the
storage copies need no bands; the worker only requests the copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from paddle_reshard.pipeline.core.errors import CastError, DriftError, MasterDriftError
from paddle_reshard.pipeline.core.geometry import Ints
from paddle_reshard.pipeline.core.mixture import Mixture
from paddle_reshard.pipeline.core.tensors import DTYPES
from paddle_reshard.pipeline.planning.ops import CHECK, COMPARE, HOLD, MOVE, PROBE, SUM, Ops
from paddle_reshard.pipeline.planning.parts import MADE, Parts, part_sizes
from paddle_reshard.pipeline.planning.plan import ACCUMULATOR_FACTOR, Bands
from paddle_reshard.pipeline.planning.work import GroupWork
from paddle_reshard.storage.store import CopyRange, Read, ReadRange, Receipt, WritePart
from paddle_reshard.tasks.boxes import blocks
from paddle_reshard.tasks.cast import cast
from paddle_reshard.tasks.device import HOST, Box, Buffer, Mover
from paddle_reshard.tasks.figures import WorkerFigures
from paddle_reshard.tasks.statistics import Statistics, Tolerance, compare_values
from paddle_reshard.tasks.sums import Sum, Sums, added, is_summed_in_place

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


def run_group(work: GroupWork, source: ReadRange, target: WritePart, mover: Mover = HOST) -> GroupReport:
    """Make the parts of one group.

    Raises
    ------
    DriftError
        If values that must be equal differ; nothing of the group is written then. If ``work`` allows replica or master
        drift, the difference is reported instead.
    """
    report = _make(work, lambda bands: _load_bands(work, bands, source, mover), target, mover)
    copied = work.parts[work.parts["source_file"] != MADE]
    receipts = report.receipts + tuple(_copy_parts(work, copied, source, target))
    nbytes = int(part_sizes(copied).sum())
    return replace(
        report, receipts=receipts, written_bytes=report.written_bytes + nbytes, copied_bytes=nbytes
    )


def compare_group(work: GroupWork, source: ReadRange, mover: Mover = HOST) -> GroupReport:
    """Make the comparisons of one group and report every pair of boxes that differs."""
    reports = []
    for step in _passes(work):
        reports.append(_compare(work, step.bands, step.ops, _load_bands(work, step.bands, source, mover)))
        mover.release()
    return _summed(work, reports)


def measure_group(
    work: GroupWork, source: ReadRange, tolerance: Tolerance, mover: Mover = HOST
) -> GroupReport:
    """Measure how far the two sides of the boxes of one group are apart."""
    found: list[tuple[int, Statistics]] = []
    read = 0
    for step in _passes(work):
        bands = _load_bands(work, step.bands, source, mover)
        read += sum(map(len, bands))
        for op, *pair in _with_ranges(step.ops, (step.bands, "source"), (step.bands, "target")):
            found.append(_measured(work, step, op, [bands[band] for band in pair], pair, tolerance))
        mover.release()
    return GroupReport(work.group, read, 0, statistics=tuple(found))


def _measured(
    work: GroupWork,
    step: _Pass,
    op: np.void,
    buffers: Sequence[Buffer],
    bands: Sequence[int],
    tolerance: Tolerance,
) -> tuple[int, Statistics]:
    number = int(op["tensor"])
    tensor = work.tensors[number]
    dims = len(tensor.global_shape)
    sides = [
        _box(buffer, int(step.bands[band]["start"]), op, side).array()
        for buffer, band, side in zip(buffers, bands, ("source", "target"), strict=True)
    ]
    other = (work.measured or {}).get(number, tensor.dtype)
    dtypes = np.dtype(f"<{tensor.dtype.code}"), np.dtype(f"<{other.code}")
    found = compare_values(sides[0], sides[1], dtypes, tolerance)
    if found.first is not None:
        at = tuple(int(i + o) for i, o in zip(found.first[:dims], op["offset"][:dims], strict=True))
        found = found._replace(first=at)
    return number, found


def load_band(source: ReadRange, path: str, start: int, stop: int) -> Buffer:
    """The bytes ``[start, stop)`` of one source file."""
    buffer = np.empty(stop - start, dtype=np.uint8)
    source.read_into(path, start, buffer.data)
    return buffer


def _load_bands(work: GroupWork, bands: Bands, source: ReadRange, mover: Mover) -> list[Buffer]:
    buffers = [mover.allocate(int(band["stop"] - band["start"])) for band in bands]
    source.read_many(
        [
            Read(work.source_paths[int(band["file"])], int(band["start"]), buffer.data)
            for band, buffer in zip(bands, buffers, strict=True)
        ]
    )
    return buffers


def finish_group(
    work: GroupWork, bands: Sequence[Buffer], target: WritePart, mover: Mover = HOST
) -> GroupReport:
    """Compare, make and write the parts of a group, given all its ``bands``, which are not changed."""
    loaded = iter(bands)
    return _make(work, lambda wanted: [next(loaded) for _ in wanted], target, mover)


class _Pass(NamedTuple):
    """Bands that are read together, and the ops that use them."""

    bands: Bands
    ops: Ops


def _passes(work: GroupWork) -> Iterator[_Pass]:
    passes = work.ops["pass"]
    for number in np.unique(work.bands["pass"]):
        bands = work.bands[slice(*np.searchsorted(work.bands["pass"], [number, number + 1]))]
        ops = work.ops[slice(*np.searchsorted(passes, [number, number + 1]))]
        yield _Pass(bands, ops)


def _make(
    work: GroupWork, load: Callable[[Bands], list[Buffer]], target: WritePart, mover: Mover
) -> GroupReport:
    """Make and write the parts that are not copied; ``load`` reads the bands of one pass."""
    made = {
        int(i): mover.zeros(int(part_sizes(work.parts[i : i + 1])[0]))
        for i in np.flatnonzero(
            (work.parts["source_file"] == MADE) & (work.parts["start"] < work.parts["stop"])
        )
    }
    mixed = {
        part: _Accumulator(mover.zeros(ACCUMULATOR_FACTOR * (stop - start)), start)
        for part, (start, stop) in _cast_after_mixing(work).items()
    }
    reports, sums = [], Sums()
    for step in _passes(work):
        reports.append(_run_pass(work, step, load(step.bands), made, mixed, mover, sums))
        mover.release()
    mixed.clear()
    found = added(chain(sums.found(), *(report.sums for report in reports)))
    receipts = []
    literals = iter(work.literals)  # sorted by part
    literal = next(literals, None)
    for index in sorted(made):
        part = work.parts[index]
        buffer = mover.fetch(made.pop(index))
        while literal is not None and literal[0] <= index:
            part_index, offset, content = literal
            if part_index == index:
                buffer[offset : offset + len(content)] = np.frombuffer(content, dtype=np.uint8)
            literal = next(literals, None)
        path = work.target_paths[int(part["file"])]
        receipts.append(target.write_part(path, int(part["start"]), buffer.data))
    written = sum(receipt.nbytes for receipt in receipts)
    summed = _summed(work, reports)
    return replace(summed, receipts=tuple(receipts), written_bytes=written, sums=found)


class _Accumulator(NamedTuple):
    """Float32 memory for mixing values that a part holds in another dtype."""

    buffer: Any
    first_byte: int
    """Offset in the part of its first mixed value."""


def _cast_after_mixing(work: GroupWork) -> dict[int, tuple[int, int]]:
    """Part → the range of bytes in it that holds values which are cast after mixing."""
    if not work.mixtures:
        return {}
    ops = work.ops[np.isin(work.ops["tensor"], list(work.mixtures))]
    ops = ops[ops["target_dtype"] != ops["source_dtype"]]
    parts = locate(work.parts, ops, "target")
    found = {}
    for part in np.unique(parts).tolist():
        here, start = ops[parts == part], int(work.parts[part]["start"])
        found[part] = int(here["target_byte"].min()) - start, int(here["target_stop"].max()) - start
    return found


def _run_pass(
    work: GroupWork,
    step: _Pass,
    bands: Sequence[Buffer],
    parts: dict[int, Any],
    mixed: dict[int, _Accumulator],
    mover: Mover,
    sums: Sums,
) -> GroupReport:
    """Make the comparisons of one pass, then move or mix boxes from its bands into parts, and add them to ``sums``."""
    report = _compare(work, step.bands, step.ops, bands)
    for difference in report.differences:
        in_master = isinstance(difference, MasterDriftError)
        if not (work.allow_master_drift if in_master else work.allow_replica_drift and difference.replicas):
            raise difference
    of_bands = Sums()
    _add_boxes(work, step, bands, of_bands)
    moves = _by_step(work, step.ops[step.ops["kind"] == MOVE])
    loaded = [mover.load(band) for band in bands]
    for op, band, part in _with_ranges(moves, (step.bands, "source"), (work.parts, "target")):
        source = _box(loaded[band], int(step.bands[band]["start"]), op, "source")
        target = _box(parts[int(part)], int(work.parts[part]["start"]), op, "target")
        mixture = work.mixtures.get(int(op["tensor"]))
        try:
            if mixture is None:
                mover.move(source, target)
            else:
                _mix(source, target, mixed.get(int(part)), mixture, int(op["source_tensor"]), mover)
            if work.summed is not None and not op["again"]:
                stored = None if mixture is not None else replace(source, buffer=bands[band])
                if mixture is None or int(op["source_tensor"]) == mixture.terms[-1].tensor:
                    _add_moved(work, op, target if mover.on_host else None, stored, sums, of_bands)
        except OverflowError as error:
            raise CastError(work.tensors[int(op["tensor"])].label, str(error)) from error
    return replace(report, sums=of_bands.found())


def _add_boxes(work: GroupWork, step: _Pass, bands: Sequence[Buffer], sums: Sums) -> None:
    """Add boxes that are read but not moved: those of ``SUM``, and parameters that the target omits."""
    chosen = step.ops["kind"] == SUM
    if work.summed is not None:
        chosen |= (step.ops["kind"] == CHECK) & (step.ops["again"] == 0)
    if not chosen.any():
        return
    for op, band in _with_ranges(step.ops[chosen], (step.bands, "target")):
        tensor = work.tensors[int(op["tensor"])]
        box = _box(bands[band], int(step.bands[band]["start"]), op, "target")
        owner = int(op["tensor"]), DTYPES.index(tensor.dtype)
        sums.add(owner, box, op["offset"].tolist(), tensor.global_shape, np.dtype(f"<{tensor.dtype.code}"))


def _add_moved(
    work: GroupWork, op: np.void, target: Box | None, stored: Box | None, sums: Sums, of_bands: Sums
) -> None:
    """Add the values of a move, and those of the parameter that they imply.

    They are in the ``target``, unless that is on a device, and as ``stored`` in a band, unless they were mixed. Better
    is the one that holds them in the order of the tensor.
    """
    number, offset = int(op["tensor"]), op["offset"].tolist()
    shape = work.tensors[number].global_shape
    owners = [(number, int(op["target_dtype"]))]
    if work.summed is not None and number in work.summed:
        owners.append(work.summed[number])
    for owner in owners:
        dtype = np.dtype(f"<{DTYPES[owner[1]].code}")
        if target is None or (
            stored is not None
            and not is_summed_in_place(target, shape, dtype)
            and is_summed_in_place(stored, shape, dtype)
        ):
            assert stored is not None  # noqa: S101 (devices do not mix)
            of_bands.add(owner, stored, offset, shape, dtype)
        else:
            sums.add(owner, target, offset, shape, dtype)


def _with_ranges(ops: Ops, *sides: tuple[Bands | Parts, str]) -> Iterator[tuple[Any, ...]]:
    """Each op as a row, with the index of the range that holds each side; few rows exist at a time."""
    for block in ops.blocks(ROWS_AT_A_TIME):
        yield from zip(block.rows(), *(locate(ranges, block, side) for ranges, side in sides), strict=True)


def _by_step(work: GroupWork, moves: Ops) -> Ops:
    """The same ops, sorted by step of their mixture."""
    if not work.mixtures:
        return moves
    step_of = {
        (tensor, term.tensor): step
        for tensor, mixture in work.mixtures.items()
        for step, term in enumerate(mixture.terms)
    }
    steps = [
        step_of.get(pair, 0)
        for pair in zip(moves["tensor"].tolist(), moves["source_tensor"].tolist(), strict=True)
    ]
    return moves[np.argsort(steps, kind="stable").astype(np.int64)]


def _mix(
    source: Box,
    target: Box,
    accumulator: _Accumulator | None,
    mixture: Mixture,
    source_tensor: int,
    mover: Mover,
) -> None:
    """Add ``source_tensor`` to a mixture: in the part, or in the ``accumulator`` if the part has another dtype."""
    mixed = target
    if accumulator is not None and target.dtype != source.dtype:
        offset = ACCUMULATOR_FACTOR * (target.byte_offset - accumulator.first_byte)
        strides = tuple(ACCUMULATOR_FACTOR * stride for stride in target.strides)
        mixed = Box(accumulator.buffer, offset, source.dtype, target.extents, strides)
    step = next(number for number, term in enumerate(mixture.terms) if term.tensor == source_tensor)
    mover.mix(source, mixed, mixture.terms[step], step == 0)
    if step == len(mixture.terms) - 1:
        mover.finish(mixed, target, mixture.divide_by)


def _copy_parts(work: GroupWork, copied: Parts, source: ReadRange, target: WritePart) -> list[Receipt]:
    """Have the storage copy parts, as many at a time as the target allows."""

    def copy(part: Any) -> Receipt:
        whole = CopyRange(
            path=work.target_paths[int(part["file"])],
            byte_offset=int(part["start"]),
            nbytes=int(part["stop"] - part["start"]),
            source_path=work.source_paths[int(part["source_file"])],
            source_offset=int(part["source_start"]),
        )
        return target.copy_part(whole, source)

    if len(copied) < 2 or target.copies_in_flight < 2:
        return [copy(part) for part in copied]
    with ThreadPoolExecutor(target.copies_in_flight) as pool:
        futures = [pool.submit(copy, part) for part in copied]
        try:
            return [future.result() for future in futures]
        finally:
            for future in futures:
                future.cancel()


def _summed(work: GroupWork, reports: Sequence[GroupReport]) -> GroupReport:
    """One report of all passes of a group."""
    return GroupReport(
        group=work.group,
        read_bytes=sum(report.read_bytes for report in reports),
        written_bytes=0,
        compared_elements=sum(report.compared_elements for report in reports),
        differences=tuple(chain.from_iterable(report.differences for report in reports)),
    )


def _compare(work: GroupWork, ranges: Bands, ops: Ops, bands: Sequence[Buffer]) -> GroupReport:
    """Make the comparisons of a pass, given its ``bands``, and report every pair that differs."""
    differences = []
    compared = 0
    ops = ops[(ops["kind"] != MOVE) & (ops["kind"] != SUM)]
    for op, *pair in _with_ranges(ops, (ranges, "source"), (ranges, "target")):
        a, b = (
            _box(bands[band], int(ranges[band]["start"]), op, side).array()
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


def locate_bands(bands: Bands, ops: Ops, side: str) -> Ints:
    """For each op of a group, the index of the band of its pass that holds its ``side``."""
    found = np.zeros(len(ops), dtype=np.int64)
    for number in np.unique(ops["pass"]):
        first, last = np.searchsorted(bands["pass"], [number, number + 1])
        here = ops["pass"] == number
        found[here] = first + locate(bands[first:last], ops[here], side)
    return found


def locate(ranges: Bands | Parts, ops: Ops, side: str) -> Ints:
    """For each op, the index of the range that holds its ``side``; ``ranges`` is sorted by file and start."""
    found = np.zeros(len(ops), dtype=np.int64)
    for file in np.unique(ops[f"{side}_file"]):
        low, high = (int(np.searchsorted(ranges["file"], file, end)) for end in ("left", "right"))
        here = ops[f"{side}_file"] == file
        found[here] = low - 1 + np.searchsorted(ranges["start"][low:high], ops[f"{side}_byte"][here], "right")
    return found


def _box(buffer: Any, start: int, op: np.void, side: str) -> Box:
    """The box of an op on one ``side``; ``buffer`` holds the file from byte ``start`` on."""
    dtype = DTYPES[int(op[f"{side}_dtype"])]
    return Box(
        buffer=buffer,
        byte_offset=int(op[f"{side}_byte"]) - start,
        dtype=np.dtype(f"<{dtype.code}"),
        extents=tuple(op["extents"].tolist()),
        strides=tuple(op[f"{side}_strides"].tolist()),
    )


def _first_difference(
    one: npt.NDArray[Any], two: npt.NDArray[Any], dtype: np.dtype[Any], any_nan: bool
) -> tuple[int, ...] | None:
    """Index of the first element whose bits differ as ``dtype``.

    With ``any_nan`` all NaNs are equal: devices differ in the NaN that they round a NaN to.
    """
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
