"""In which portions is the work done, and how much memory does each need?

A *group* is the same stretch of logical tensors in all sibling target files, with the *bands* (source byte
ranges) that feed it: each band is read once and shared. Every target file is cut into *parts*, contiguous
byte ranges that tile it; a part belongs to one group. A group is independent of all others, may be run by
any worker, and running it twice writes the same bytes. Its peak, bands plus parts, is known here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from paddle_reshard.pipeline.catalog import Catalog, File, volumes
from paddle_reshard.pipeline.errors import CoverageError, MemoryBudgetError
from paddle_reshard.pipeline.geometry import Ints
from paddle_reshard.pipeline.layouts.hybrid.target import TargetFiles
from paddle_reshard.pipeline.planning.match import (
    ITEMSIZES,
    MOVE,
    Ops,
    clipped,
    hull,
    op_volumes,
    plan_ops,
)
from paddle_reshard.pipeline.tensors import Tensor

SMALLEST_BUDGET_BYTES = 256 << 20
GROUP_BYTES = 64 << 20
"""Small tensors are gathered into groups of about this peak."""
JOIN_GAP_BYTES = 4096
"""Bands of a file that lie this near each other are read as one."""

BAND = np.dtype([("group", np.int32), ("file", np.int32), ("start", np.int64), ("stop", np.int64)])
PART = BAND
Bands = npt.NDArray[np.void]


@dataclass(frozen=True, slots=True)
class CarriedFile:
    """A file that goes to the target byte for byte."""

    source_path: str
    target_path: str
    size_bytes: int


@dataclass(frozen=True)
class Plan:
    """All that is to be done, before any byte moves."""

    tensors: tuple[Tensor, ...]
    source_files: tuple[File, ...]
    target_files: tuple[File, ...]
    ops: Ops
    """Sorted by ``op_groups``."""
    op_groups: Ints
    bands: Bands
    """Sorted by group, file and start."""
    parts: Bands
    """Sorted by group, file and start; by file and start they tile every target file."""
    literals: tuple[tuple[int, int, bytes], ...]
    group_peaks: Ints
    """Bytes of memory that each group needs at once: its bands and its parts."""
    budget_bytes: int
    carried: tuple[CarriedFile, ...]
    allow_replica_drift: bool = False
    """Whether copies of a tensor may differ; the first one is taken then, and every difference reported."""

    @property
    def groups(self) -> int:
        """Number of groups."""
        return len(self.group_peaks)

    @property
    def peak_bytes(self) -> int:
        """The largest peak of any group."""
        return int(self.group_peaks.max(initial=0))

    @property
    def read_bytes(self) -> int:
        """Bytes read from tensor files, gaps that are read along included."""
        return int((self.bands["stop"] - self.bands["start"]).sum())

    @property
    def payload_bytes(self) -> int:
        """Bytes of the source that some op needs, each counted once."""
        start, stop = hull(self.ops, "source")
        lows, highs = _merge(self.ops["source_file"], start, stop, 0)[1:]
        return int((highs - lows).sum())

    @property
    def written_bytes(self) -> int:
        """Size of the target, carried files included."""
        return sum(f.size_bytes for f in self.target_files) + sum(f.size_bytes for f in self.carried)

    @property
    def plan_id(self) -> str:
        """Hash of everything the plan says."""
        digest = hashlib.sha256()
        for rows in (self.ops, self.op_groups, self.bands, self.parts, self.group_peaks):
            digest.update(np.ascontiguousarray(rows).tobytes())
        digest.update(
            repr((self.tensors, self.source_files, self.target_files, self.literals, self.carried)).encode()
        )
        return digest.hexdigest()[:16]


def plan_conversion(
    source: Catalog,
    target: TargetFiles,
    carried: Sequence[CarriedFile],
    budget_bytes: int,
    smallest_part_bytes: int = 1,
    compare_replicas: bool = True,
    allow_replica_drift: bool = False,
) -> Plan:
    """Plan all groups of a conversion.

    Raises
    ------
    CoverageError, PlanError
        If the target would not be complete, or a source tensor dropped.
    MemoryBudgetError
        If a single row of a tensor, or what has to be written together, needs more than ``budget_bytes``.
    """
    ops = plan_ops(source, target.fragments, compare_replicas)
    ops, groups = group_ops(ops, source.tensors, budget_bytes)
    ops, groups = join_groups(ops, groups, target.files, smallest_part_bytes)
    bands = plan_bands(ops, groups)
    parts = plan_parts(ops, groups, target.files)
    count = int(max(groups.max(initial=-1), parts["group"].max(initial=-1))) + 1
    peaks = np.bincount(bands["group"], weights=bands["stop"] - bands["start"], minlength=count)
    peaks += np.bincount(parts["group"], weights=parts["stop"] - parts["start"], minlength=count)
    _check_tiles(ops, target, source.tensors)
    if peaks.max(initial=0) > budget_bytes:
        worst = int(peaks.argmax())
        label = source.tensors[int(ops["tensor"][groups == worst][0])].label
        raise MemoryBudgetError(label, budget_bytes, int(peaks.max()))
    return Plan(
        tensors=source.tensors,
        source_files=source.files,
        target_files=target.files,
        ops=ops,
        op_groups=groups,
        bands=bands,
        parts=parts,
        literals=target.literals,
        group_peaks=peaks.astype(np.int64),
        budget_bytes=budget_bytes,
        carried=tuple(carried),
        allow_replica_drift=allow_replica_drift,
    )


# ------------------------------------------------------------------------------------------------ groups


def group_ops(ops: Ops, tensors: Sequence[Tensor], budget_bytes: int) -> tuple[Ops, Ints]:
    """Assign every op to a group, cutting ops where a tensor is larger than the budget.

    Small tensors share a group, a large one is cut into stretches of rows. Returns the ops sorted by group,
    and their groups.
    """
    ops = ops[np.argsort(ops["feed"], kind="stable")]
    room_bytes = min(GROUP_BYTES, budget_bytes)
    sizes = _op_bytes(ops)
    per_feed = np.bincount(ops["feed"], weights=sizes, minlength=len(tensors))
    first = np.searchsorted(ops["feed"], np.arange(len(tensors) + 1))
    cut: list[Ops] = []
    groups: list[Ints] = []
    group, filled_bytes = 0, 0.0
    for feed in np.flatnonzero(per_feed):
        rows = ops[first[feed] : first[feed + 1]]
        size = per_feed[feed]
        if filled_bytes and filled_bytes + size > room_bytes:
            group, filled_bytes = group + 1, 0.0
        if size <= room_bytes:
            cut.append(rows)
            groups.append(np.full(len(rows), group, dtype=np.int64))
            filled_bytes += size
            continue
        for stretch in _stretches(rows, tensors[int(feed)], room_bytes, budget_bytes):
            cut.append(stretch)
            groups.append(np.full(len(stretch), group, dtype=np.int64))
            group += 1
    if not cut:
        return ops, np.zeros(0, dtype=np.int64)
    return np.concatenate(cut), np.concatenate(groups)


def _op_bytes(ops: Ops) -> Ints:
    """An upper bound of what each op adds to its group's peak."""
    source_start, source_stop = hull(ops, "source")
    target_start, target_stop = hull(ops, "target")
    return np.asarray((source_stop - source_start) + (target_stop - target_start), dtype=np.int64)


def _peak(ops: Ops) -> int:
    groups = np.zeros(len(ops), dtype=np.int64)
    bands = plan_bands(ops, groups)
    moves = ops[ops["kind"] == MOVE]
    start, stop = hull(moves, "target")
    _, low, high = _merge(moves["target_file"], start, stop, 0)
    return int((bands["stop"] - bands["start"]).sum() + (high - low).sum())


def _stretches(rows: Ops, tensor: Tensor, room_bytes: int, budget_bytes: int) -> list[Ops]:
    """Cut one tensor's ops into stretches of rows (dim 0), each within ``room_bytes`` if that can be.

    A stretch that still exceeds the room is accepted up to the whole budget.
    """
    length = tensor.global_shape[0] if tensor.global_shape else 1
    step = length
    while True:
        stretches = [_rows_between(rows, low, min(low + step, length)) for low in range(0, length, step)]
        stretches = [s for s in stretches if len(s)]
        peak = max(_peak(s) for s in stretches)
        if peak <= room_bytes or (step == 1 and peak <= budget_bytes):
            return stretches
        if step == 1:
            raise MemoryBudgetError(tensor.label, budget_bytes, peak)
        step = max(1, min(step // 2, step * room_bytes // peak))


def _rows_between(ops: Ops, low: int, high: int) -> Ops:
    """The parts of ops that lie in rows ``[low, high)`` of their tensor."""
    start = ops["offset"][:, 0]
    stop = start + ops["extents"][:, 0]
    cut = ops[(start < high) & (stop > low)].copy()
    first = np.maximum(cut["offset"][:, 0], low)
    last = np.minimum(cut["offset"][:, 0] + cut["extents"][:, 0], high)
    skipped = first - cut["offset"][:, 0]
    for side in ("source", "target"):
        cut[f"{side}_byte"] += skipped * cut[f"{side}_strides"][:, 0]
    cut["offset"][:, 0] = first
    cut["extents"][:, 0] = last - first
    return cut


# -------------------------------------------------------------------------------------- bands and parts


def _merge(keys: npt.NDArray[np.int64], start: Ints, stop: Ints, gap: int) -> tuple[Ints, Ints, Ints]:
    """Union of half-open ranges per key; ranges at most ``gap`` apart are joined. Sorted by key, start."""
    if not len(start):
        empty = np.zeros(0, dtype=np.int64)
        return empty, empty, empty
    order = np.lexsort((start, keys))
    keys, start, stop = keys[order].astype(np.int64), start[order], stop[order]
    # A running maximum within each key: shift every key's ranges beyond those of the key before.
    shift = np.cumsum(np.r_[0, np.diff(keys) != 0]) * (int(stop.max()) + gap + 1)
    reach = np.maximum.accumulate(stop + shift)
    opens = np.r_[True, (start + shift)[1:] > reach[:-1] + gap]
    begin = np.flatnonzero(opens)
    end = np.r_[begin[1:], len(start)] - 1
    return keys[begin], start[begin], (reach - shift)[end]


def plan_bands(ops: Ops, groups: Ints) -> Bands:
    """The source byte ranges that each group reads, near ones joined."""
    compares = ops["kind"] != MOVE
    source, target = hull(ops, "source"), hull(ops, "target")
    files = int(max(ops["source_file"].max(initial=0), ops["target_file"].max(initial=0))) + 1
    keys = np.concatenate(
        [groups * files + ops["source_file"], (groups * files + ops["target_file"])[compares]]
    )
    start = np.concatenate([source[0], target[0][compares]])
    stop = np.concatenate([source[1], target[1][compares]])
    key, low, high = _merge(keys, start, stop, JOIN_GAP_BYTES)
    return _bands(key // files, key % files, low, high)


def _bands(group: Ints, file: Ints, start: Ints, stop: Ints) -> Bands:
    rows = np.zeros(len(group), dtype=BAND)
    rows["group"], rows["file"], rows["start"], rows["stop"] = group, file, start, stop
    return rows


def plan_parts(ops: Ops, groups: Ints, files: Sequence[File]) -> Bands:
    """Cut every target file into parts, each of one group.

    What lies between the values of two groups (literal bytes, padding) goes to the part before it; files
    without values become parts of one more group.
    """
    moves = ops["kind"] == MOVE
    ops, groups = ops[moves], groups[moves]
    start, stop = hull(ops, "target")
    count = int(groups.max(initial=-1)) + 1
    key, low, _ = _merge(ops["target_file"].astype(np.int64) * max(count, 1) + groups, start, stop, 0)
    file, group = key // max(count, 1), key % max(count, 1)
    order = np.lexsort((low, file))
    file, group, low = file[order], group[order], low[order]
    first_of_file = np.r_[True, file[1:] != file[:-1]] if len(file) else np.zeros(0, dtype=bool)
    opens = first_of_file | np.r_[True, group[1:] != group[:-1]] if len(file) else first_of_file
    file, group, low = file[opens], group[opens], np.where(first_of_file, 0, low)[opens]
    sizes = np.array([f.size_bytes for f in files], dtype=np.int64)
    last_of_file = np.r_[file[1:] != file[:-1], True] if len(file) else np.zeros(0, dtype=bool)
    high = np.where(last_of_file, sizes[file], np.r_[low[1:], 0]) if len(file) else low
    empty = np.setdiff1d(np.arange(len(files)), file)
    parts = _bands(
        np.r_[group, np.full(len(empty), count)].astype(np.int64),
        np.r_[file, empty],
        np.r_[low, np.zeros(len(empty), dtype=np.int64)],
        np.r_[high, sizes[empty]],
    )
    return parts[np.lexsort((parts["start"], parts["file"], parts["group"]))]


def join_groups(ops: Ops, groups: Ints, files: Sequence[File], smallest_part_bytes: int) -> tuple[Ops, Ints]:
    """Join groups until every part but the last of a file has the size that the store wants.

    Along each file, groups are joined from a part that is too small onwards until it has grown large enough.
    Files of one topology are alike, so the same groups are joined in most of them.
    """
    while True:
        parts = plan_parts(ops, groups, files)
        parts = parts[np.lexsort((parts["start"], parts["file"]))]
        parent = np.arange(int(parts["group"].max(initial=-1)) + 1)
        joins = _joins_of_small_parts(parts, smallest_part_bytes)
        if not joins:
            return ops, groups
        for one, other in joins:
            a, b = _root(parent, one), _root(parent, other)
            parent[max(a, b)] = min(a, b)
        roots = np.array([_root(parent, g) for g in range(len(parent))], dtype=np.int64)
        _, joined = np.unique(roots[groups], return_inverse=True)
        order = np.argsort(joined, kind="stable")
        ops, groups = ops[order], joined[order].astype(np.int64)


def _joins_of_small_parts(parts: Bands, smallest_part_bytes: int) -> list[tuple[int, int]]:
    """Pairs of groups to join; ``parts`` is sorted by file and start."""
    joins: list[tuple[int, int]] = []
    file, group, grown_bytes = -1, -1, smallest_part_bytes
    for part in parts:
        if part["file"] == file and grown_bytes < smallest_part_bytes:
            joins.append((group, int(part["group"])))
        else:
            grown_bytes = 0
        file, group = int(part["file"]), int(part["group"])
        grown_bytes += int(part["stop"] - part["start"])
    return joins


def _root(parent: Ints, group: int) -> int:
    while parent[group] != group:
        group = int(parent[group])
    return group


def _check_tiles(ops: Ops, target: TargetFiles, tensors: Sequence[Tensor]) -> None:
    """Literal bytes, padding and values together are exactly as long as every file.

    Parts of tensors that reach beyond the source's are zeros, as padding is.
    """
    moves = ops[ops["kind"] == MOVE]
    count = len(target.files)
    covered = np.bincount(
        moves["target_file"],
        weights=op_volumes(moves) * ITEMSIZES[moves["target_dtype"]],
        minlength=count,
    )
    boxes = target.fragments
    beyond = (volumes(boxes) - volumes(clipped(boxes, tensors))) * ITEMSIZES[boxes["dtype"]]
    covered += np.bincount(boxes["file"], weights=beyond, minlength=count)
    for file, _, content in target.literals:
        covered[file] += len(content)
    for file, _, nbytes in target.fills:
        covered[file] += nbytes
    for file, described in enumerate(target.files):
        if covered[file] != described.size_bytes:
            raise CoverageError(
                described.path, f"{int(covered[file])} of {described.size_bytes} bytes would be written"
            )
