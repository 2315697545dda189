"""Run one group: load its bands pass by pass, move boxes from bands to parts, write the parts.

Running a group again writes the same bytes at the same offsets. One worker can do everything (:func:`run_group`), or
several workers can load bands (``group.load_band``) and each finish some parts (:func:`finish_group`). Parts that the
storage copies need no bands; the worker only requests the copy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from paddle_reshard.pipeline.core.errors import CastError, DriftError, MasterDriftError
from paddle_reshard.pipeline.core.mixture import Mixture
from paddle_reshard.pipeline.core.tensors import DTYPES
from paddle_reshard.pipeline.planning.ops import MOVE, SUM, Ops, hull
from paddle_reshard.pipeline.planning.parts import MADE, Parts, part_sizes
from paddle_reshard.pipeline.planning.plan import ACCUMULATOR_FACTOR, Bands
from paddle_reshard.pipeline.planning.work import GroupWork
from paddle_reshard.storage.store import CopyRange, ReadRange, Receipt, WritePart
from paddle_reshard.tasks.compare_group import Comparisons
from paddle_reshard.tasks.device import HOST, Buffer, DeviceBox, Mover
from paddle_reshard.tasks.group import (
    GroupReport,
    Pass,
    band_bytes,
    box_of,
    load_bands,
    locate,
    passes,
    with_ranges,
)
from paddle_reshard.tasks.sums import Sum, SummedBox, Sums, Whole, added


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
    comparisons, differences = Comparisons(work), list[DriftError]()
    sums = list[Sum]()
    for step in passes(work):
        bands = load(step.bands)
        differences += _allowed(work, comparisons.next_pass(bands))
        comparisons.known.clear()  # every pass reports its own
        _move(work, step, bands, made, mixed, mover)
        sums += _add_up(work, step, bands)
        mover.release()
    mixed.clear()
    receipts = _write_parts(work, made, target, mover)
    return GroupReport(
        group=work.group,
        read_bytes=band_bytes(work),
        written_bytes=sum(receipt.nbytes for receipt in receipts),
        receipts=tuple(receipts),
        compared_elements=comparisons.elements,
        differences=tuple(differences),
        sums=added(sums),
    )


def _write_parts(work: GroupWork, made: dict[int, Any], target: WritePart, mover: Mover) -> list[Receipt]:
    """Write parts with their literal bytes, and discard each when it is written."""
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
        receipts.append(
            target.write_part(work.target_paths[int(part["file"])], int(part["start"]), buffer.data)
        )
    return receipts


def _allowed(work: GroupWork, differences: list[DriftError]) -> list[DriftError]:
    """The differences of a pass; raises the first that is not allowed."""
    for difference in differences:
        in_master = isinstance(difference, MasterDriftError)
        if not (work.allow_master_drift if in_master else work.allow_replica_drift and difference.replicas):
            raise difference
    return differences


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


def _move(
    work: GroupWork,
    step: Pass,
    bands: Sequence[Buffer],
    parts: dict[int, Any],
    mixed: dict[int, _Accumulator],
    mover: Mover,
) -> None:
    """Move or mix the boxes of one pass from its bands into parts."""
    ops = work.ops[step.ops]
    moves = _by_step(work, ops[ops["kind"] == MOVE])
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
        except OverflowError as error:
            raise CastError(work.tensors[int(op["tensor"])].label, str(error)) from error


def _add_up(work: GroupWork, step: Pass, bands: Sequence[Buffer]) -> tuple[Sum, ...]:
    """What the ``SUM`` boxes of one pass add to the fingerprints of their tensors."""
    ops, sums = work.ops[step.ops], Sums()
    for op, band in with_ranges(ops[ops["kind"] == SUM], (step.bands, "target")):
        tensor = work.tensors[int(op["tensor"])]
        box = box_of(bands[band], int(step.bands[band]["start"]), op, "target")
        whole = Whole.of(tensor.global_shape, np.dtype(f"<{tensor.dtype.code}"))
        piece = SummedBox.of(box, op["offset"].tolist(), len(tensor.global_shape))
        sums.add((int(op["tensor"]), DTYPES.index(tensor.dtype)), whole, [piece])
    return sums.totals()


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
        return list(pool.map(copy, copied))  # a failure cancels those that wait
