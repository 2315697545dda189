"""Prove that a plan writes every byte of every target file exactly once, with the values that belong there.

Nothing of the planner is used here, only the columns that it made: ops, parts, bands and literals. They are held
against what the files say: the fragments of the source, and the layout of the target.

1. Literals, padding and values, cut into contiguous *runs* of bytes, are swept from the first byte to the last: each
   run must begin where the run before it ends. A run that begins later leaves a gap, one that begins earlier
   overlaps.
2. Every box of values must lie, on both sides, in a fragment of its tensor in that file, at the byte that the fragment
   gives for its elements. With 1., every element of the target comes from that element of the source.
3. The parts must tile every file, and every op lie in a part and a band of its own group: what a group neither reads
   nor holds, it cannot write.
4. The elements of every source tensor that some box reads are counted, so that those left out are known.

A matrix that is cut by columns has a run for each row. Runs are swept in windows, so memory depends on the number of
boxes in a file, and not on its size.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from paddle_reshard.pipeline.checkpoint.files import TargetFiles
from paddle_reshard.pipeline.core.catalog import ITEMSIZES, Catalog, File, Fragments, hulls
from paddle_reshard.pipeline.core.columns import Flags
from paddle_reshard.pipeline.core.geometry import (
    MAX_DIMS,
    Boxes,
    Intervals,
    Ranges,
    by_tensor,
    candidate_pairs,
    meeting_intervals,
    meeting_pairs,
)
from paddle_reshard.pipeline.core.numbers import Ints, numbered_within
from paddle_reshard.pipeline.planning.ops import CHECK, MOVE, Ops
from paddle_reshard.pipeline.planning.parts import MADE, Parts
from paddle_reshard.pipeline.planning.plan import Bands, Plan

LITERAL, PADDING, VALUE, COPIED = range(4)
KINDS = ("a literal", "padding", "a value", "a value that the storage copies")
MOST_PROBLEMS = 40
"""Problems that are described; all are counted."""
MOST_OF_A_WINDOW = 5
"""Gaps of a window that are described, and as many overlaps."""
BATCH_BOXES = 1 << 19
"""Files are taken together up to this number of boxes and literals."""
WINDOW_RUNS = 1 << 19
LARGEST_WINDOW = 1 << 28
SMALLEST_WINDOW = 1 << 14


@dataclass
class Problems:
    """What contradicts the proof."""

    count: int = 0
    described: list[str] = field(default_factory=list)

    def add(self, description: str) -> None:
        """Add a problem."""
        self.count += 1
        if len(self.described) < MOST_PROBLEMS:
            self.described.append(description)

    def first(self, wrong: Flags) -> Iterator[int]:
        """The first row that is ``wrong``, if any is, to be described; the others are only counted."""
        if wrong.any():
            self.count += int(wrong.sum()) - 1
            yield int(np.argmax(wrong))


class Swept(NamedTuple):
    """What a sweep over the targets found."""

    bytes_of: Ints
    """Bytes of literals, padding, values, and values that the storage copies."""
    used: Ints
    """Elements of each tensor that some value is read from."""
    checked: Ints
    """Elements of each tensor that are compared because no target holds them."""
    problems: Problems


def sweep(plan: Plan, source: Catalog, target: TargetFiles) -> Swept:
    """Sweep over all target files, as they are planned; ``source`` and ``target`` have the tensors of ``plan``."""
    problems = Problems()
    bytes_of = np.zeros(len(KINDS), dtype=np.int64)
    sizes = np.array([file.size_bytes for file in plan.target_files], dtype=np.int64)
    _check_numbers(plan, problems)
    if problems.count:
        nothing = np.zeros(len(source.tensors), dtype=np.int64)
        return Swept(bytes_of, nothing, nothing, problems)
    _check_parts(plan, sizes, problems)
    _check_groups(plan, problems)
    values = _Values(plan, source, target)
    _check_sources(values, problems)
    for files in _batches(plan, target):
        bytes_of += _sweep_files(values, files, sizes, problems)
    boxes, checks = values.boxes, plan.ops[plan.ops["kind"] == CHECK]
    return Swept(
        bytes_of,
        _distinct_elements(boxes["source_tensor"], boxes["offset"], boxes["extents"], source),
        _distinct_elements(checks["tensor"], checks["offset"], checks["extents"], source),
        problems,
    )


def _batches(plan: Plan, target: TargetFiles) -> Iterator[range]:
    """Consecutive files with about ``BATCH_BOXES`` boxes and literals together."""
    count = len(plan.target_files)
    boxes = np.bincount(plan.ops["target_file"][plan.ops["kind"] == MOVE], minlength=count)
    boxes = boxes + np.bincount(plan.literals.files, minlength=count)
    boxes = boxes + np.bincount(target.fragments["file"], minlength=count)
    batch = (np.cumsum(boxes) - boxes) // BATCH_BOXES
    edges = [0, *(np.flatnonzero(np.diff(batch)) + 1).tolist(), count]
    for first, stop in pairwise(edges):
        if first < stop:
            yield range(first, stop)


# ------------------------------------------------------------------------------------------------------ values


class _Values:
    """The boxes of values that a plan moves, followed by those in the parts that the storage copies."""

    def __init__(self, plan: Plan, source: Catalog, target: TargetFiles) -> None:
        self.plan, self.source, self.target = plan, source, target
        self.by_source = _ByTensorAndFile(source.fragments, len(plan.source_files))
        self.by_target = _ByTensorAndFile(target.fragments, len(plan.target_files))
        moved, copied = plan.ops[plan.ops["kind"] == MOVE], copied_values(plan, source, target)
        self.kinds = np.repeat(np.array([VALUE, COPIED]), [len(moved), len(copied)])
        self.boxes = Ops.joined([moved, copied])


def copied_values(plan: Plan, source: Catalog, target: TargetFiles) -> Ops:
    """The boxes of values in the parts that the storage copies, which have no op.

    Where a fragment of the target in the written range and a fragment of the source in the copied range have elements
    in common at the same distances from the beginning, the copy moves these elements. What a part copies besides is no
    value, and remains a gap.
    """
    parts = plan.parts[plan.parts["source_file"] != MADE]
    if not len(parts):
        return Ops.empty()
    start, stop, from_ = (parts[name].astype(np.int64) for name in ("start", "stop", "source_start"))
    read_from = np.arange(len(source.tensors))
    read_from[list(source.implied)] = list(source.implied.values())
    of_target, written = _in_ranges(target.fragments, parts["file"], start, stop)
    of_source, stored = _in_ranges(source.fragments, parts["source_file"], from_, from_ + stop - start)
    keys = (
        of_target * len(read_from) + read_from[written["tensor"]],
        of_source * len(read_from) + stored["tensor"],
    )
    numbers = np.unique(np.concatenate(keys), return_inverse=True)[1].ravel()
    i, j = meeting_pairs(
        Boxes(numbers[: len(written)], written["offset"], written["extents"]),
        Boxes(numbers[len(written) :], stored["offset"], stored["extents"]),
    )
    alike = written["dtype"][i] == stored["dtype"][j]
    i, j = i[alike], j[alike]
    part = of_target[i]
    ops, inside = _clipped(_in_common(written[i], stored[j]), start[part], stop[part])
    part = part[inside]
    copied = ops["target_byte"] - start[part] == ops["source_byte"] - from_[part]
    in_one_order = (ops["target_strides"] == ops["source_strides"]) | (ops["extents"] == 1)
    return ops[copied & in_one_order.all(axis=1)]


def _in_ranges(fragments: Fragments, file: Ints, start: Ints, stop: Ints) -> tuple[Ints, Fragments]:
    """The fragments that may have bytes in ranges of files, and the number of the range."""
    ranges = Intervals(file, {0: (start, stop)})
    number, row = meeting_intervals(ranges, Intervals(fragments["file"], {0: hulls(fragments)}))
    return number, fragments[row]


def _in_common(target: Fragments, source: Fragments) -> Ops:
    """What each pair of fragments has in common."""
    low = np.maximum(target["offset"], source["offset"])
    ends = (side["offset"] + side["extents"] for side in (target, source))
    ops = Ops.empty(len(target))
    ops["kind"], ops["tensor"], ops["source_tensor"] = MOVE, target["tensor"], source["tensor"]
    ops["offset"], ops["extents"] = low, np.minimum(*ends) - low
    for side, boxes in (("target", target), ("source", source)):
        for column in ("file", "dtype", "strides"):
            ops[f"{side}_{column}"] = boxes[column]
        ops[f"{side}_byte"] = boxes["byte_base"] + ((low - boxes["offset"]) * boxes["strides"]).sum(axis=1)
    return ops


def _clipped(ops: Ops, start: Ints, stop: Ints) -> tuple[Ops, Flags]:
    """The slabs of boxes, along the slowest dim of each, whose bytes lie in ``[start, stop)`` of the target.

    And which boxes have any.
    """
    extents, strides, byte = ops["extents"].copy(), ops["target_strides"], ops["target_byte"]
    rows, dim = np.arange(len(ops)), np.where(extents > 1, strides, -1).argmax(axis=1)
    count, step = extents[rows, dim], np.maximum(strides[rows, dim], 1)
    extents[rows, dim] = 1
    length = ITEMSIZES[ops["target_dtype"]] + ((extents - 1) * strides).sum(axis=1)
    first = np.maximum(0, -((byte - start) // step))
    kept = np.minimum(count, (stop - byte - length) // step + 1) - first
    extents[rows, dim] = kept
    offset = ops["offset"].copy()
    offset[rows, dim] += first
    for side in ("source", "target"):
        ops[f"{side}_byte"] = ops[f"{side}_byte"] + first * ops[f"{side}_strides"][rows, dim]
    ops["offset"], ops["extents"] = offset, extents
    return ops[kept > 0], kept > 0


# -------------------------------------------------------------------------------------------- fragments and boxes


class _ByTensorAndFile:
    """Fragments found by tensor and file."""

    def __init__(self, fragments: Fragments, files: int) -> None:
        self.fragments, self._files = fragments, files
        keys = fragments["tensor"].astype(np.int64) * files + fragments["file"]
        self._order = np.argsort(keys, kind="stable")
        self._keys = keys[self._order]

    def holds(self, ops: Ops, tensor: str, side: str) -> Flags:
        """Whether each box is part of a fragment, element for element and byte for byte."""
        keys = ops[tensor].astype(np.int64) * self._files + ops[f"{side}_file"]
        first, stop = (np.searchsorted(self._keys, keys, side=end) for end in ("left", "right"))
        held = np.zeros(len(ops), dtype=bool)
        for fragment, op in candidate_pairs(self._order, first, stop, np.arange(len(ops))):
            held[op[_part_of(ops[op], self.fragments[fragment], side)]] = True
        return held


def _part_of(ops: Ops, fragments: Fragments, side: str) -> Flags:
    distance = ops["offset"] - fragments["offset"]
    inside = (distance >= 0).all(axis=1)
    inside &= (distance + ops["extents"] <= fragments["extents"]).all(axis=1)
    inside &= ops[f"{side}_dtype"] == fragments["dtype"]
    byte = fragments["byte_base"] + (distance * fragments["strides"]).sum(axis=1)
    inside &= ops[f"{side}_byte"] == byte
    alike = (ops[f"{side}_strides"] == fragments["strides"]) | (ops["extents"] == 1)
    return np.asarray(inside & alike.all(axis=1))


def _check_sources(values: _Values, problems: Problems) -> None:
    """Check that the values of every box are read from its tensor, or from those that it is defined by."""
    plan = values.plan
    count = len(plan.tensors)
    allowed = {(tensor, master) for tensor, master in values.source.implied.items()}
    allowed |= {(tensor, term.tensor) for tensor, mixture in plan.mixtures.items() for term in mixture.terms}
    defined = np.array([tensor * count + other for tensor, other in allowed], dtype=np.int64)
    tensor, read = (values.boxes[name].astype(np.int64) for name in ("tensor", "source_tensor"))
    mixed = np.isin(tensor, list(plan.mixtures))
    wrong = (mixed | (tensor != read)) & ~np.isin(tensor * count + read, defined)
    for at in problems.first(wrong):
        made, other = (plan.tensors[int(numbers[at])].label for numbers in (tensor, read))
        problems.add(f"{made} is made from {other}, which does not define it")


def _check_boxes(values: _Values, ops: Ops, problems: Problems) -> None:
    """Check that every box lies where the fragments of source and target have its elements."""
    plan = values.plan
    for side, tensor, files, fragments in (
        ("target", "tensor", plan.target_files, values.by_target),
        ("source", "source_tensor", plan.source_files, values.by_source),
    ):
        for at in problems.first(~fragments.holds(ops, tensor, side)):
            row = ops[at : at + 1].rows()[0]
            path = files[int(row[f"{side}_file"])].path
            problems.add(
                f"{plan.tensors[int(row[tensor])].label}: elements at {tuple(row['offset'].tolist())} of extents "
                f"{tuple(row['extents'].tolist())} are not at byte {row[f'{side}_byte']} of {path}"
            )


# -------------------------------------------------------------------------------------------------- groups


def _check_numbers(plan: Plan, problems: Problems) -> None:
    """Check that everything that the columns name exists, and that workers find it: sorted by group."""
    for what, numbers, count in plan.numbers():
        for at in problems.first((numbers < 0) | (numbers >= count)):
            problems.add(f"the {what} {numbers[at]} is named, but there are {count}")
    for what, groups in (
        ("ops", plan.op_groups),
        ("bands", plan.bands["group"]),
        ("parts", plan.parts["group"]),
    ):
        if (np.diff(groups) < 0).any():
            problems.add(f"the {what} are not sorted by group, so that workers would not find all of them")


def _check_parts(plan: Plan, sizes: Ints, problems: Problems) -> None:
    """Check that the parts tile every target file."""
    parts = plan.parts[np.lexsort((plan.parts["start"], plan.parts["file"]))]
    file, start, stop = (parts[name].astype(np.int64) for name in ("file", "start", "stop"))
    opens = np.diff(file, prepend=-1) != 0
    wrong = start != np.where(opens, 0, np.r_[0, stop[:-1]][: len(stop)])
    closes = np.diff(file, append=len(sizes)) != 0
    wrong |= closes & (stop != sizes[file])
    for at in problems.first(wrong):
        problems.add(
            f"{plan.target_files[int(file[at])].path}: the part [{start[at]}, {stop[at]}) does not begin where the one "
            f"before it ends, or the file of {sizes[file[at]]} bytes does not end with it"
        )
    for bare in problems.first((sizes > 0) & (np.bincount(file, minlength=len(sizes)) == 0)):
        problems.add(f"{plan.target_files[bare].path}: has no part")


def _check_groups(plan: Plan, problems: Problems) -> None:
    """Check that every op writes into a part of its group, and reads from a band of its group and pass."""
    ops, groups = plan.ops, plan.op_groups.astype(np.int64)
    files = max(len(plan.target_files), len(plan.source_files), 1)
    passes = 1 + max(int(ops["pass"].max(initial=0)), int(plan.bands["pass"].max(initial=0)))
    of_bands = plan.bands["group"].astype(np.int64) * passes + plan.bands["pass"]
    bands = _owned(plan.bands, of_bands, files)
    made = plan.parts[plan.parts["source_file"] == MADE]
    parts = _owned(made, made["group"].astype(np.int64), files)
    moves, of_pass = ops["kind"] == MOVE, groups * passes + ops["pass"]
    for chosen, side, owners, ranges, what in (
        (moves, "target", groups, parts, "writes outside of the parts"),
        (moves | True, "source", of_pass, bands, "reads outside of the bands"),
        (~moves, "target", of_pass, bands, "reads outside of the bands"),  # a comparison has two sources
    ):
        start, length = ops[f"{side}_byte"], ITEMSIZES[ops[f"{side}_dtype"]]
        length = length + ((ops["extents"] - 1) * ops[f"{side}_strides"]).sum(axis=1)
        covered = ranges.cover(owners * files + ops[f"{side}_file"], start, start + length)
        for at in problems.first(chosen & ~covered):
            label = plan.tensors[int(ops["tensor"][at])].label
            problems.add(f"{label}: a box of group {groups[at]} {what} of its group")


def _owned(ranges: Bands | Parts, owners: Ints, files: int) -> Ranges:
    """Parts or bands by owner and file."""
    keys = owners * files + ranges["file"]
    order = np.lexsort((ranges["start"], keys))
    return Ranges(keys[order], ranges["start"][order], ranges["stop"][order])


# ------------------------------------------------------------------------------------------------------ runs


class _Spans(NamedTuple):
    """Strided boxes of bytes in one row of addresses: ``unit`` bytes, repeated ``counts`` times ``steps`` apart."""

    first: Ints
    unit: Ints
    counts: Ints
    """Slowest dim first; 1 where the box has no such dim."""
    steps: Ints
    kind: Ints
    owner: Ints
    """Which box it is, for messages."""

    @property
    def stops(self) -> Ints:
        """One past the last byte of each."""
        return np.asarray(self.first + ((self.counts - 1) * self.steps).sum(axis=1) + self.unit)

    def chosen(self, rows: Ints | Flags | slice) -> _Spans:
        """Some of them."""
        return _Spans(*(column[rows] for column in self))


def _spans(first: Ints, extents: Ints, strides: Ints, unit: Ints, kind: Ints, owner: Ints) -> _Spans:
    """Boxes as runs: dims that continue where a run ends make it longer."""
    key = np.where(extents > 1, strides, -1)
    order = np.argsort(-key, axis=1, kind="stable")
    counts, steps = (np.take_along_axis(side, order, axis=1) for side in (extents, np.maximum(key, 0)))
    unit, open_ = unit.copy(), np.ones(len(first), dtype=bool)
    for dim in reversed(range(MAX_DIMS)):
        single = counts[:, dim] == 1
        joins = open_ & ~single & (steps[:, dim] == unit)
        unit[joins] *= counts[joins, dim]
        counts[joins, dim] = 1
        open_ &= single | joins
    return _Spans(first.astype(np.int64), unit, counts, steps, kind, owner)


def _ranges(first: Ints, sizes: Ints, kind: int) -> _Spans:
    """Contiguous ranges."""
    ones = np.ones((len(first), MAX_DIMS), dtype=np.int64)
    some = sizes > 0
    numbers = np.full(len(first), kind, dtype=np.int64)
    return _Spans(first, sizes, ones, ones * 0, numbers, np.arange(len(first))).chosen(some)


class _Runs(NamedTuple):
    start: Ints
    stop: Ints
    span: Ints
    """Index of the span of each run."""


def _windows(spans: _Spans, size: int) -> Iterator[tuple[int, int, _Runs]]:
    """The runs of all spans in windows of ``[0, size)``, sorted by start and cut at the ends of the window.

    A window is as large as its runs allow. ``spans`` are sorted by first byte.
    """
    stops = spans.stops
    reach = np.maximum.accumulate(stops) if len(stops) else stops
    runs = spans.counts.prod(axis=1)
    density = runs / np.maximum(stops - spans.first, 1)
    low, width = 0, LARGEST_WINDOW
    while low < size:
        high = min(low + width, size)
        first = int(np.searchsorted(reach, low, side="right"))
        last = int(np.searchsorted(spans.first, high, side="left"))
        rows = first + np.flatnonzero(stops[first:last] > low)
        overlap = np.minimum(stops[rows], high) - np.maximum(spans.first[rows], low)
        if (density[rows] * overlap).sum() + len(rows) > WINDOW_RUNS and width > SMALLEST_WINDOW:
            width //= 4
            continue
        yield low, high, _runs_within(spans, rows, low, high)
        low, width = high, min(2 * width, LARGEST_WINDOW)


def _runs_within(spans: _Spans, rows: Ints, low: int, high: int) -> _Runs:
    start = spans.first[rows]
    counts, steps, unit = spans.counts[rows], spans.steps[rows], spans.unit[rows]
    inner = ((counts - 1) * steps).sum(axis=1) + unit
    for dim in range(MAX_DIMS):
        inner = inner - (counts[:, dim] - 1) * steps[:, dim]
        if (counts[:, dim] == 1).all():
            continue
        step = np.maximum(steps[:, dim], 1)
        begin = np.clip(-((start + inner - low - 1) // step), 0, counts[:, dim])
        end = np.clip((high - 1 - start) // step + 1, begin, counts[:, dim])
        repeated = np.repeat(np.arange(len(rows)), end - begin)
        within = numbered_within(end - begin)
        start = start[repeated] + (begin[repeated] + within) * steps[repeated, dim]
        rows, counts, steps, unit, inner = (side[repeated] for side in (rows, counts, steps, unit, inner))
    start, stop = np.maximum(start, low), np.minimum(start + unit, high)
    some = start < stop
    order = np.argsort(start[some], kind="stable")
    return _Runs(start[some][order], stop[some][order], rows[some][order])


# ------------------------------------------------------------------------------------------------------ bytes


def _sweep_files(values: _Values, files: range, sizes: Ints, problems: Problems) -> Ints:
    """Sweep over some files, laid end to end; returns the bytes of each kind."""
    sizes = sizes[files.start : files.stop]
    laid = _Files(values.plan, files, np.cumsum(sizes) - sizes)
    size = int(sizes.sum())
    spans = _written(values, laid, problems)
    outside = (spans.first < 0) | (spans.stops > size)
    for at in problems.first(outside):
        problems.add(f"{laid.what(spans, at)} lies outside of its file")
    spans = spans.chosen(~outside)
    spans = spans.chosen(np.argsort(spans.first, kind="stable"))
    bytes_of = np.zeros(len(KINDS), dtype=np.int64)
    for low, high, runs in _windows(spans, size):
        _check_runs(laid, spans, runs, low, high, problems)
        lengths = np.bincount(spans.kind[runs.span], weights=runs.stop - runs.start, minlength=len(KINDS))
        bytes_of += lengths.astype(np.int64)
    return bytes_of


def _written(values: _Values, laid: _Files, problems: Problems) -> _Spans:
    """Everything that is written to some files: the boxes of values, literals and padding."""
    plan, files, base = laid
    file = values.boxes["target_file"]
    within = (file >= files.start) & (file < files.stop)
    ops, kinds = values.boxes[within], values.kinds[within]
    _check_boxes(values, ops, problems)
    last = np.ones(len(ops), dtype=bool)
    for tensor, mixture in plan.mixtures.items():  # every step writes to the same bytes
        last &= (ops["tensor"] != tensor) | (ops["source_tensor"] == mixture.terms[-1].tensor)
    ops, kinds = ops[last], kinds[last]
    first = base[ops["target_file"] - files.start] + ops["target_byte"]
    unit, owner = ITEMSIZES[ops["target_dtype"]], ops["tensor"].astype(np.int64)
    boxes = _spans(first, ops["extents"], ops["target_strides"], unit, kinds, owner)
    literals = plan.literals
    chosen = (literals.files >= files.start) & (literals.files < files.stop)
    begin = base[literals.files[chosen] - files.start] + literals.offsets[chosen]
    written = _ranges(begin, literals.sizes[chosen], LITERAL)
    fills = np.array([fill for fill in values.target.fills if fill[0] in files], dtype=np.int64).reshape(
        -1, 3
    )
    padding = _ranges(base[fills[:, 0] - files.start] + fills[:, 1], fills[:, 2], PADDING)
    several = (boxes, written, padding, *_beyond(values.target.fragments, values.source, files, base))
    return _Spans(*(np.concatenate(columns) for columns in zip(*several, strict=True)))


class _Files(NamedTuple):
    """Files that are laid end to end."""

    plan: Plan
    files: range
    base: Ints

    def at(self, address: int) -> tuple[File, int]:
        """The file of an address, and the byte in it."""
        number = int(np.searchsorted(self.base, address, side="right")) - 1
        return self.plan.target_files[self.files.start + number], address - int(self.base[number])

    def what(self, spans: _Spans, span: int) -> str:
        """What a span is."""
        kind = int(spans.kind[span])
        if kind not in (VALUE, COPIED):
            return KINDS[kind]
        return f"{KINDS[kind]} of {self.plan.tensors[int(spans.owner[span])].label}"


def _check_runs(files: _Files, spans: _Spans, runs: _Runs, low: int, high: int, problems: Problems) -> None:
    """Check that the runs of a window follow one another from its first byte to its last."""
    reach = np.maximum.accumulate(np.r_[low, runs.stop])
    begins = np.r_[runs.start, high]
    gaps, overlaps = begins > reach, begins[:-1] < reach[:-1]
    for at in _some(gaps):
        file, byte = files.at(int(reach[at]))
        problems.add(
            f"{file.path}: bytes [{byte}, {byte + int(begins[at] - reach[at])}) are written by nothing"
        )
    for at in _some(overlaps):
        file, byte = files.at(int(begins[at]))
        before = int(np.argmax(runs.stop[:at]))
        first, second = (files.what(spans, int(runs.span[run])) for run in (before, at))
        problems.add(f"{file.path}: byte {byte} is written twice, as {first} and as {second}")
    described = len(_some(gaps)) + len(_some(overlaps))
    problems.count += int(gaps.sum() + overlaps.sum()) - described


def _some(wrong: Flags) -> list[int]:
    return np.flatnonzero(wrong)[:MOST_OF_A_WINDOW].tolist()


def _beyond(fragments: Fragments, source: Catalog, files: range, base: Ints) -> Iterator[_Spans]:
    """What of the target's boxes extends beyond the source's tensors: zeros, because a larger vocabulary was requested.

    A box of (8, 6) of which (5, 6) are inside gives one box of (3, 6).
    """
    chosen = fragments[(fragments["file"] >= files.start) & (fragments["file"] < files.stop)]
    shapes = source.tensors.shapes
    reach = np.clip(shapes[chosen["tensor"]] - chosen["offset"], 0, chosen["extents"])
    larger = (reach < chosen["extents"]).any(axis=1)
    chosen, reach = chosen[larger], reach[larger]
    first = base[chosen["file"] - files.start] + chosen["byte_base"]
    for dim in range(MAX_DIMS):
        extents = np.where(np.arange(MAX_DIMS) < dim, reach, chosen["extents"])
        extents[:, dim] -= reach[:, dim]
        some = (extents > 0).all(axis=1)
        begin = first + reach[:, dim] * chosen["strides"][:, dim]
        kind = np.full(len(chosen), PADDING, dtype=np.int64)
        unit, owner = ITEMSIZES[chosen["dtype"]], chosen["tensor"].astype(np.int64)
        yield _spans(begin, np.maximum(extents, 1), chosen["strides"], unit, kind, owner).chosen(some)


# --------------------------------------------------------------------------------------------------- elements


def _distinct_elements(tensors: Ints, offset: Ints, extents: Ints, source: Catalog) -> Ints:
    """How many elements of each tensor lie in at least one of its boxes."""
    counts = np.zeros(len(source.tensors), dtype=np.int64)
    known = np.flatnonzero(tensors < len(counts))
    (blocks,) = by_tensor(tensors[known])
    for rows in map(known.__getitem__, blocks):
        _add_distinct(counts, tensors[rows].astype(np.int64), offset[rows], extents[rows], source)
    return counts


def _add_distinct(counts: Ints, tensors: Ints, offset: Ints, extents: Ints, source: Catalog) -> None:
    """Count the elements of the boxes of some tensors, whose elements are laid end to end."""
    known = np.unique(tensors)
    elements = source.tensors.elements[known]
    inner = source.tensors.shapes[known][:, :0:-1]  # without the slowest dim, fastest first
    strides = np.c_[np.cumprod(inner, axis=1)[:, ::-1], np.ones(len(known), dtype=np.int64)]
    number = np.searchsorted(known, tensors)
    base = np.cumsum(elements) - elements
    first = base[number] + (offset * strides[number]).sum(axis=1)
    ones = np.ones(len(tensors), dtype=np.int64)
    spans = _spans(first, extents, strides[number], ones, ones * VALUE, number)
    inside = (spans.first >= base[number]) & (spans.stops <= base[number] + elements[number])
    spans = spans.chosen(inside)
    spans = spans.chosen(np.argsort(spans.first, kind="stable"))
    for low, _, runs in _windows(spans, int(elements.sum())):
        if not len(runs.start):
            continue
        reach = np.maximum.accumulate(np.r_[low, runs.stop])[:-1]
        added = np.maximum(runs.stop - np.maximum(runs.start, reach), 0)
        counted = np.bincount(spans.owner[runs.span], weights=added, minlength=len(known))
        counts[known] += counted.astype(np.int64)
