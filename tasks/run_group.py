"""Run one group: load its bands pass by pass, move boxes from bands to parts, write the parts.

Running a group again writes the same bytes at the same offsets. One worker can do everything (:func:`run_group`), or
several workers can load bands (``group.load_band``) and each finish some parts (:func:`finish_group`). Parts that the
storage copies need no bands; the worker only requests the copy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from paddle_reshard.pipeline.core.errors import CastError, MasterDriftError, PlanError
from paddle_reshard.pipeline.core.mixture import Mixture
from paddle_reshard.pipeline.core.tensors import DTYPES, Tensor
from paddle_reshard.pipeline.planning.ops import CHECK, MOVE, SUM, Ops, hull
from paddle_reshard.pipeline.planning.parts import MADE, Parts, part_sizes
from paddle_reshard.pipeline.planning.plan import ACCUMULATOR_FACTOR, Bands
from paddle_reshard.pipeline.planning.work import GroupWork
from paddle_reshard.storage.store import CopyRange, ReadRange, Receipt, WritePart
from paddle_reshard.tasks.compare_group import compare_pass
from paddle_reshard.tasks.device import HOST, Buffer, DeviceBox, Mover
from paddle_reshard.tasks.group import (
    GroupReport,
    Pass,
    box_of,
    load_bands,
    locate,
    passes,
    summed_up,
    with_ranges,
)
from paddle_reshard.tasks.quantise import NotFiniteError
from paddle_reshard.tasks.sums import SummedBox, Sums, Whole, added, better


def run_group(work: GroupWork, source: ReadRange, target: WritePart, mover: Mover = HOST) -> GroupReport:
    """Make the parts of one group.

    Raises
    ------
    DriftError
        If values that must be equal differ; nothing of the group is written then. If ``work`` allows replica or master
        drift, the difference is reported instead.
    """
    report = _make(work, lambda bands: load_bands(work, bands, source, mover), target, mover)
    copied = work.parts[work.parts["source_file"] != MADE]
    receipts = report.receipts + tuple(_copy_parts(work, copied, source, target))
    nbytes = int(part_sizes(copied).sum())
    return replace(
        report, receipts=receipts, written_bytes=report.written_bytes + nbytes, copied_bytes=nbytes
    )


def finish_group(
    work: GroupWork, bands: Sequence[Buffer], target: WritePart, mover: Mover = HOST
) -> GroupReport:
    """Compare, make and write the parts of a group, given all its ``bands``, which are not changed."""
    loaded = iter(bands)
    return _make(work, lambda wanted: [next(loaded) for _ in wanted], target, mover)


def _make(
    work: GroupWork, load: Callable[[Bands], list[Buffer]], target: WritePart, mover: Mover
) -> GroupReport:
    """Make and write the parts that are not copied; ``load`` reads the bands of one pass."""
    made = {
        int(i): mover.zeros(int(part_sizes(work.parts[i : i + 1])[0]), int(work.parts["start"][i]))
        for i in np.flatnonzero(
            (work.parts["source_file"] == MADE) & (work.parts["start"] < work.parts["stop"])
        )
    }
    mixed = {
        part: _Accumulator(mover.zeros(ACCUMULATOR_FACTOR * (stop - start)), start)
        for part, (start, stop) in _cast_after_mixing(work).items()
    }
    reports, sums = [], Sums()
    for step in passes(work):
        reports.append(_run_pass(work, step, load(step.bands), made, mixed, mover, sums))
        mover.release()
    mixed.clear()
    totals = added(chain(sums.found(), *(report.sums for report in reports)))
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
        receipts.append(_write(work, int(part["file"]), int(part["start"]), buffer, target))
    written = sum(receipt.nbytes for receipt in receipts)
    summed = summed_up(work, reports)
    return replace(summed, receipts=tuple(receipts), written_bytes=written, sums=totals)


def _write(work: GroupWork, file: int, byte_offset: int, buffer: Buffer, target: WritePart) -> Receipt:
    """Write a part that is made; a value that has no code in the target is refused with the files that hold it."""
    try:
        return target.write_part(work.target_paths[file], byte_offset, buffer.data)
    except NotFiniteError as error:
        files = ", ".join(_read_from(work, file, error.byte_offset))
        raise PlanError(
            f"{error}. It was read from {files}; nothing is published. Export without --quantize, or an earlier "
            "checkpoint"
        ) from error


def _read_from(work: GroupWork, file: int, byte_offset: int) -> list[str]:
    """Paths of the source files from which the value at a byte of a target file is moved."""
    ops = work.ops[work.ops["kind"] == MOVE]
    start, stop = hull(ops, "target")
    near = ops[(ops["target_file"] == file) & (start <= byte_offset) & (byte_offset < stop)]
    return sorted(
        {work.source_paths[int(op["source_file"])] for op in near.rows() if _holds(op, byte_offset)}
    )


def _holds(op: np.void, byte_offset: int) -> bool:
    """Whether an element of an op's target begins at a byte."""
    rest = byte_offset - int(op["target_byte"])
    for stride, extent in sorted(
        zip(op["target_strides"].tolist(), op["extents"].tolist(), strict=True), reverse=True
    ):
        if extent > 1:
            index = min(rest // stride, extent - 1)
            rest -= index * stride
    return rest == 0


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
    ranges = {}
    for part in np.unique(parts).tolist():
        start, stop = hull(ops[parts == part], "target")
        first = int(work.parts[part]["start"])
        ranges[part] = int(start.min()) - first, int(stop.max()) - first
    return ranges


def _run_pass(
    work: GroupWork,
    step: Pass,
    bands: Sequence[Buffer],
    parts: dict[int, Any],
    mixed: dict[int, _Accumulator],
    mover: Mover,
    sums: Sums,
) -> GroupReport:
    """Make the comparisons of one pass, then move or mix boxes from its bands into parts, and add them to ``sums``."""
    report = compare_pass(work, step.bands, step.ops, bands)
    for difference in report.differences:
        in_master = isinstance(difference, MasterDriftError)
        if not (work.allow_master_drift if in_master else work.allow_replica_drift and difference.replicas):
            raise difference
    of_bands = Sums()
    _add_boxes(work, step, bands, of_bands)
    moved = _Moved(work)
    moves = _by_step(work, step.ops[step.ops["kind"] == MOVE])
    loaded = [mover.load(band) for band in bands]
    for op, band, part in with_ranges(moves, (step.bands, "source"), (work.parts, "target")):
        source = box_of(loaded[band], int(step.bands[band]["start"]), op, "source")
        target = box_of(parts[int(part)], int(work.parts[part]["start"]), op, "target")
        mixture = work.mixtures.get(int(op["tensor"]))
        try:
            if mixture is None:
                mover.move(source, target)
            else:
                _mix(source, target, mixed.get(int(part)), mixture, int(op["source_tensor"]), mover)
            if work.summed is not None and not op["again"]:
                if mixture is None:
                    moved.add(op, source, bands[band], target if mover.on_host else None)
                elif int(op["source_tensor"]) == mixture.terms[-1].tensor:
                    moved.add(op, None, None, target)
        except OverflowError as error:
            raise CastError(work.tensors[int(op["tensor"])].label, str(error)) from error
    moved.add_up(sums, of_bands)
    return replace(report, sums=of_bands.found())


def _add_boxes(work: GroupWork, step: Pass, bands: Sequence[Buffer], sums: Sums) -> None:
    """Add boxes that are read but not moved: those of ``SUM``, and parameters that the target omits."""
    chosen = step.ops["kind"] == SUM
    if work.summed is not None:
        chosen |= (step.ops["kind"] == CHECK) & (step.ops["again"] == 0)
    if not chosen.any():
        return
    for op, band in with_ranges(step.ops[chosen], (step.bands, "target")):
        tensor = work.tensors[int(op["tensor"])]
        box = box_of(bands[band], int(step.bands[band]["start"]), op, "target")
        number = DTYPES.index(tensor.dtype)
        piece = SummedBox.of(box, box.buffer, op["offset"].tolist(), len(tensor.global_shape))
        sums.add((int(op["tensor"]), number), _whole(tensor, number), [piece])


def _whole(tensor: Tensor, dtype: int) -> Whole:
    """A tensor in a dtype, by number."""
    return Whole.of(tensor.global_shape, np.dtype(f"<{DTYPES[dtype].code}"))


class _Move(NamedTuple):
    """Values that were moved."""

    offset: list[int]
    stored: DeviceBox | None
    band: Buffer | None
    """Host memory in which they are ``stored``; ``None`` if they were mixed."""
    target: DeviceBox | None
    """``None`` if it is on a device."""


def _in_bands(moves: Sequence[_Move], dims: int) -> list[SummedBox]:
    return [SummedBox.of(m.stored, m.band, m.offset, dims) for m in moves if m.stored and m.band is not None]


def _in_parts(moves: Sequence[_Move], dims: int) -> list[SummedBox]:
    return [SummedBox.of(m.target, m.target.buffer, m.offset, dims) for m in moves if m.target]


class _Moved:
    """The values that a pass has moved, which are in two places, to be added up in that which takes less time."""

    def __init__(self, work: GroupWork) -> None:
        self.work = work
        self.moves: dict[tuple[int, int], list[_Move]] = {}
        """By number and dtype of the tensor."""

    def add(
        self, op: np.void, stored: DeviceBox | None, band: Buffer | None, target: DeviceBox | None
    ) -> None:
        """Add the values of a move: ``stored`` in a band, unless they were mixed; in the ``target``, unless that is on
        a device."""
        owner = int(op["tensor"]), int(op["target_dtype"])
        self.moves.setdefault(owner, []).append(_Move(op["offset"].tolist(), stored, band, target))

    def add_up(self, sums: Sums, of_bands: Sums) -> None:
        """Add all values, and those of the parameters that they imply, to ``of_bands`` or, if in parts, to ``sums``."""
        for (number, dtype), moves in self.moves.items():
            tensor = self.work.tensors[number]
            owners = [(number, dtype)]
            if self.work.summed is not None and number in self.work.summed:
                owners.append(self.work.summed[number])
            places = [_in_parts] * (moves[0].target is not None) + [_in_bands] * (moves[0].band is not None)
            for owner in owners:
                whole = _whole(tensor, owner[1])
                best, pieces = better(whole, (place(moves, len(tensor.global_shape)) for place in places))
                (sums if places[best] is _in_parts else of_bands).add(owner, whole, pieces)


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
    source: DeviceBox,
    target: DeviceBox,
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
        mixed = DeviceBox(accumulator.buffer, offset, source.dtype, target.extents, strides)
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
