"""Divide a conversion into groups, and work out how much memory each needs.

A *group* is the same range of logical tensors in all sibling target files, with the *bands* (source byte ranges) that
it reads; each band is read once and shared. Every target file is tiled by *parts*, contiguous byte ranges, and each
part belongs to one group. Groups are independent: any worker can run any of them, and running one twice writes the
same bytes. The peak of a group, its parts and the bands it holds at a time, is part of the plan. Parts copied by the
storage need no memory.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from paddle_reshard.pipeline.checkpoint.files import TargetFiles
from paddle_reshard.pipeline.core.catalog import ITEMSIZES, Catalog, File, volumes
from paddle_reshard.pipeline.core.columns import Flags
from paddle_reshard.pipeline.core.errors import CoverageError, MemoryBudgetError, PlanError
from paddle_reshard.pipeline.core.geometry import Ranges, Shape
from paddle_reshard.pipeline.core.literals import Literals
from paddle_reshard.pipeline.core.mixture import Mixture
from paddle_reshard.pipeline.core.numbers import Ints, same_fields
from paddle_reshard.pipeline.core.part_limits import PartLimits
from paddle_reshard.pipeline.core.sorting import order_of
from paddle_reshard.pipeline.core.tensor_columns import Tensors
from paddle_reshard.pipeline.core.tensors import DType, Tensor
from paddle_reshard.pipeline.planning.checks import MasterChecks, add_checks
from paddle_reshard.pipeline.planning.copies import carve_copies
from paddle_reshard.pipeline.planning.groups import (
    FileSizes,
    GroupMemory,
    group_ops,
    set_passes,
    source_ranges,
)
from paddle_reshard.pipeline.planning.match import plan_ops, source_tensors, volumes_inside
from paddle_reshard.pipeline.planning.ops import CHECK, HOLD, MOVE, PROBE, Ops, hull, itemsizes
from paddle_reshard.pipeline.planning.parts import MADE, NO_GROUP, PART, Parts, part_sizes, plan_parts
from paddle_reshard.pipeline.planning.ranges import by_owner, dense_numbers, merge
from paddle_reshard.pipeline.planning.settings import PlanSettings, PlanSizes, Tie

FOOTPRINT_BYTES = 136 << 20
"""What a worker process needs for itself: interpreter, libraries, metadata. Groups share the rest of the budget."""
UNLIMITED_BYTES = 1 << 62
GROUPS_IN_BUDGET = 4
"""How many groups the budget must hold, so that some are read or written while others are moved. In a small budget
groups are smaller."""
SMALLEST_GROUP_BYTES = 16 << 20
"""In smaller groups requests would cost more than they transfer."""
COPY_GROUP_FACTOR = 4
COPY_GROUP_PARTS = 64
"""Copied parts are gathered into groups of at most ``COPY_GROUP_PARTS`` parts and about ``COPY_GROUP_FACTOR`` times the
bytes of the largest allowed copy."""
TINY_BYTES = 64 << 10
"""If the store has a minimum part size, a source range up to this size may be read once for each file that needs it."""
ACCUMULATOR_FACTOR = 2
"""Mixing takes float32: the accumulator of a part with 2-byte values has twice the bytes of the part."""
JOIN_GAP_BYTES = 4096
"""Bands of a file at most this far apart are read as one."""

BAND = np.dtype(
    [
        ("group", np.int32),
        ("pass", np.int32),  # bands of one pass are held at once
        ("file", np.int32),
        ("start", np.int64),
        ("stop", np.int64),
    ]
)
Bands = npt.NDArray[np.void]


@dataclass(frozen=True, slots=True)
class CarriedFile:
    """A file that goes to the target byte for byte."""

    source_path: str
    target_path: str
    size_bytes: int


@dataclass(frozen=True, eq=False)
class Plan:
    """Everything a conversion or comparison will do."""

    tensors: Tensors
    source_files: tuple[File, ...]
    target_files: tuple[File, ...]
    literals: Literals
    budget_bytes: int
    """Memory budget of each worker, including the overhead of its process."""
    carried: tuple[CarriedFile, ...]
    ops: Ops = field(default_factory=Ops.empty)
    """Sorted by ``op_groups`` and pass. Values copied by the storage have no op."""
    op_groups: Ints = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    """Group of each op."""
    bands: Bands = field(default_factory=lambda: np.zeros(0, dtype=BAND))
    """Sorted by group, pass, file and start."""
    parts: Parts = field(default_factory=lambda: np.zeros(0, dtype=PART))
    """Sorted by group, file and start; by file and start they tile every target file."""
    group_peaks: Ints = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    """Memory of each group in bytes: its parts and the bands of its largest pass."""
    allow_replica_drift: bool = False
    """Whether copies of a tensor may differ: the first is used, and every difference is reported."""
    tied: Mapping[str, Tie] = field(default_factory=dict)
    """As in the settings. Not saved with a plan, nor part of its id: it follows from the source."""
    allow_master_drift: bool = False
    """Whether parameters may differ from their rounded master weights: both are kept, and it is reported."""
    compared_only: int = 0
    """Number of tensors, at the end of ``tensors``, that are only compared and go to no target."""
    read_once_budget_bytes: int | None = None
    """A budget with which every source byte is read once; ``None`` if that is already so."""
    mixtures: Mapping[int, Mixture] = field(default_factory=dict)
    """Tensor number → how its values are computed, for tensors that are mixed."""
    measured: Mapping[int, DType] | None = None
    """In a plan that measures differences: dtypes of the second side, where it has others."""

    def __eq__(self, other: object) -> bool:
        return same_fields(self, other)

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
        """Bytes read from tensor files, including gaps within bands."""
        return int((self.bands["stop"] - self.bands["start"]).sum())

    @cached_property
    def payload_bytes(self) -> int:
        """Source bytes that some op needs, each counted once; bytes copied by the storage are not included."""
        _, file, start, stop = source_ranges(self.ops)
        _, low, high = merge(file, start, stop)
        return int((high - low).sum())

    @property
    def read_amplification(self) -> float:
        """Bytes read or copied per source byte that is needed."""
        copied = self.copied_bytes
        return (self.read_bytes + copied) / max(self.payload_bytes + copied, 1)

    @cached_property
    def checked_parameters(self) -> tuple[int, int]:
        """How many parameters are compared with their master weights in full, and how many by samples."""
        every, some = np.zeros((2, len(self.tensors)), dtype=bool)
        for kind, compared in ((CHECK, every), (HOLD, every), (PROBE, some)):
            compared[self.ops["tensor"][self.ops["kind"] == kind]] = True
        return int(np.count_nonzero(every & ~some)), int(np.count_nonzero(some))

    @property
    def copied_bytes(self) -> int:
        """Target bytes copied by the storage."""
        return int(part_sizes(self.parts[self.parts["source_file"] != MADE]).sum())

    @property
    def copied_share(self) -> float:
        """Share of the target copied by the storage."""
        return self.copied_bytes / max(self.written_bytes, 1)

    @property
    def written_bytes(self) -> int:
        """Size of the target, including carried files."""
        return sum(f.size_bytes for f in self.target_files) + sum(f.size_bytes for f in self.carried)

    @cached_property
    def plan_id(self) -> str:
        """Hash of the plan's contents."""
        digest = hashlib.sha256()
        for (name, dim), column in self.ops.narrow():
            same, called = column.strides == (0,), name.replace("_length", "_stop")  # ids call it so
            digest.update(f"{called} {dim} {column.dtype.str} {len(column)} {same} ".encode())
            digest.update(np.ascontiguousarray(column[:1] if same else column).view(np.uint8).data)
        literals = self.literals
        for table in (
            *(self.op_groups, self.bands, self.parts, self.group_peaks),
            *(literals.files, literals.offsets, literals.sizes),
        ):
            digest.update(b"%d " % len(table))
            digest.update(np.ascontiguousarray(table).view(np.uint8).data)
        for content in literals.contents():
            digest.update(content)
        tables = (self.source_files, self.target_files, self.carried)
        for text in _repr_of((_reprs(self.tensors), *(map(repr, table) for table in tables))):
            digest.update(text.encode())
        if self.mixtures:
            digest.update(repr(self.mixtures).encode())
        return digest.hexdigest()[:16]

    def numbers(self) -> Iterator[tuple[str, npt.NDArray[Any], int]]:
        """Every column of numbers of groups, files or tensors: what it names, the column, and how many there are."""
        moves, copied = self.ops["kind"] == MOVE, self.parts["source_file"] != MADE
        for groups in (self.op_groups, self.bands["group"], self.parts["group"]):
            yield "group", groups, self.groups
        for files in (
            self.ops["source_file"],
            self.ops["target_file"][~moves],
            self.bands["file"],
            self.parts["source_file"][copied],
        ):
            yield "source file", files, len(self.source_files)
        for files in (self.ops["target_file"][moves], self.parts["file"], self.literals.files):
            yield "target file", files, len(self.target_files)
        for tensors in (self.ops["tensor"], self.ops["source_tensor"]):
            yield "tensor", tensors, len(self.tensors)

    def check_not_run(self) -> None:
        """Refuse a plan that was run: what its groups do was released then."""
        if len(self.ops) != len(self.op_groups):
            raise PlanError("this plan was run before, and its ops were released; plan the conversion again")

    def release_ops(self) -> None:
        """Free the ops and literals after the run; figures for reports are computed first."""
        _ = self.plan_id, self.payload_bytes, self.checked_parameters  # cached properties that need the ops
        self.ops.clear()
        self.literals.clear()


def _repr_of(tables: Sequence[Iterable[str]]) -> Iterator[str]:
    """``repr`` of tables as tuples of tuples, in pieces, from that of each row."""
    for number, table in enumerate(tables):
        yield ", (" if number else "(("
        count = 0
        for count, row in enumerate(table, 1):
            yield f", {row}" if count > 1 else row
        yield ",)" if count == 1 else ")"
    yield ")"


def _reprs(tensors: Tensors) -> Iterator[str]:
    """``repr`` of every tensor. All but their keys is the same for very many."""
    known: dict[tuple[str, DType, Shape, tuple[str, ...]], str] = {}
    for key, state, dtype, shape, aliases in tensors.fields():
        text = known.get((state, dtype, shape, aliases))
        if text is None:
            text = repr(Tensor("", state, dtype, shape, aliases)).removeprefix("Tensor(key=''")
            known[state, dtype, shape, aliases] = text
        yield f"Tensor(key={key!r}{text}"


@dataclass(frozen=True)
class _Draft:
    """A plan without groups, and what they are made of."""

    plan: Plan
    make_ops: Callable[[], Ops]
    """Makes all ops, again for each try: keeping a copy would double the memory of planning."""
    sizes: PlanSizes
    limits: PartLimits = PartLimits()


def plan_conversion(
    source: Catalog,
    target: TargetFiles,
    carried: Sequence[CarriedFile],
    settings: PlanSettings,
    limits: PartLimits = PartLimits(),
    checks: MasterChecks | None = None,
) -> Plan:
    """Plan all groups of a conversion.

    ``checks`` are added in full as far as they need no more memory; otherwise large tensors are sampled. If the budget
    suffices only by reading source bytes several times, ``read_once_budget_bytes`` says with which they are read once.

    Raises
    ------
    CoverageError, PlanError
        If the target would be incomplete, or a source tensor dropped.
    MemoryBudgetError
        If values that must be written together do not fit the budget.
    """
    _check_names(target, carried)
    plan = _without_groups(source, target, carried, settings, checks)

    def make_ops() -> Ops:
        compared = None if settings.compare_replicas else _of_keys(source.tensors, settings.tied)
        ops = plan_ops(source, target.fragments, compared, target.casts, target.omitted)
        _check_tiles(ops, target, source)
        return ops

    draft = _Draft(plan, make_ops, settings.sizes, limits)
    planned, rereads, checks = _with_checks(draft, checks)
    _check_budget(planned)
    if not rereads:
        return planned
    once, _ = _within_limits(draft, UNLIMITED_BYTES, checks)
    return replace(planned, read_once_budget_bytes=_enough_bytes(draft, once))


def _of_keys(tensors: Tensors, keys: Collection[str]) -> list[int]:
    """The numbers of all states of some keys."""
    found = (tensors.find(key, state) for key in keys for state in tensors.states)
    return [number for number in found if number is not None]


def _without_groups(
    source: Catalog,
    target: TargetFiles,
    carried: Sequence[CarriedFile],
    settings: PlanSettings,
    checks: MasterChecks | None,
) -> Plan:
    """What is known of a plan before its ops are."""
    return Plan(
        tensors=source.tensors if checks is None else checks.tensors,
        source_files=source.files,
        target_files=target.files,
        literals=target.literals,
        budget_bytes=settings.budget_bytes,
        carried=tuple(carried),
        allow_replica_drift=settings.allow_replica_drift,
        tied=settings.tied,
        allow_master_drift=settings.allow_master_drift,
        compared_only=0 if checks is None else len(checks.tensors) - len(source.tensors),
        mixtures=source.mixtures,
    )


def _enough_bytes(draft: _Draft, once: Plan) -> int:
    """The budget with which a draft becomes a plan that reads every byte once, like ``once``, made without a limit."""
    made = once.parts[once.parts["source_file"] == MADE]
    largest = int(np.bincount(made["group"], weights=part_sizes(made)).max())
    held_bytes = _held_bytes(once.mixtures, once.ops) * largest + draft.sizes.pass_bytes
    return max(once.peak_bytes, held_bytes) + FOOTPRINT_BYTES


def _check_names(target: TargetFiles, carried: Sequence[CarriedFile]) -> None:
    """Refuse two files of one name, and a file with the name of another's folder: one of the two would be lost."""
    made = Counter([*(file.path for file in target.files), *(file.target_path for file in carried)])
    folders = {
        "/".join(parts[:n]) for parts in (path.split("/") for path in made) for n in range(1, len(parts))
    }
    sources = {file.target_path: file.source_path for file in carried}
    for path, times in made.items():
        if times > 1 or path in folders:
            what = (
                "two files of the target have this name"
                if times > 1
                else "also the name of a folder of the target"
            )
            raise PlanError(
                f"{path}: {what}; {sources.get(path, 'one of them')} of the source is carried along under it: rename "
                "it, or move it elsewhere"
            )


def _with_checks(draft: _Draft, checks: MasterChecks | None) -> tuple[Plan, bool, MasterChecks | None]:
    """The plan with groups, whether bytes are read several times, and the checks it contains.

    A full comparison reads both tensors together. If that takes more than half of the budget, large tensors are only
    sampled; if that is still too much, all are.
    """
    budget_bytes = draft.plan.budget_bytes
    room_bytes = (budget_bytes - FOOTPRINT_BYTES) // 2
    planned, rereads = _within_limits(draft, budget_bytes, checks)
    if checks is None:
        return planned, rereads, checks
    reduced = checks
    for most_bytes in (SMALLEST_GROUP_BYTES, 0):
        if not rereads and planned.peak_bytes <= room_bytes:
            break
        reduced = checks.up_to(most_bytes)
        planned, rereads = _within_limits(draft, budget_bytes, reduced)
    return planned, rereads, reduced


def _within_limits(draft: _Draft, budget_bytes: int, checks: MasterChecks | None = None) -> tuple[Plan, bool]:
    """The plan with groups; a file that would have too many parts gets larger ones, in a further try, which is rare."""
    limits = draft.limits
    total = np.array([f.size_bytes for f in draft.plan.target_files], dtype=np.int64)
    smallest = np.full(len(total), limits.smallest_bytes)
    while True:
        files = FileSizes(total, smallest, np.maximum(draft.sizes.fill_bytes, 2 * smallest))
        ops, copied = carve_copies(draft.make_ops(), smallest, limits.copies, draft.plan.mixtures)
        if checks is not None:
            ops = add_checks(ops, copied, checks)
        planned, rereads = _grouped(draft, ops, copied, files, budget_bytes)
        if limits.most is None:
            return planned, rereads
        enough = -(-total // limits.most)
        too_many = np.bincount(planned.parts["file"], minlength=len(total)) > limits.most
        if not (too_many & (smallest < enough)).any():
            return planned, rereads
        smallest = np.where(too_many, np.maximum(smallest, enough), smallest)


def plan_comparisons(ops: Ops, tensors: Tensors, files: tuple[File, ...], settings: PlanSettings) -> Plan:
    """Plan the comparisons ``ops`` between boxes of ``files``; nothing is written.

    Two boxes with different dim orders that do not fit the budget together are compared piece by piece, and some bytes
    are read several times; ``read_once_budget_bytes`` is then a budget that avoids this. Two that cannot be cut are a
    :class:`MemoryBudgetError`.
    """
    plan = Plan(
        tensors=tensors,
        source_files=files,
        target_files=(),
        literals=Literals(),
        budget_bytes=settings.budget_bytes,
        carried=(),
    )
    draft = _Draft(plan, ops.copy, settings.sizes)
    planned, rereads = _within_limits(draft, settings.budget_bytes)
    _check_budget(planned)
    if not rereads:
        return planned
    once, _ = _within_limits(draft, UNLIMITED_BYTES)
    enough_bytes = once.peak_bytes + settings.sizes.pass_bytes + FOOTPRINT_BYTES
    return replace(planned, read_once_budget_bytes=enough_bytes)


def _grouped(
    draft: _Draft, ops: Ops, copied: Parts, files: FileSizes, budget_bytes: int
) -> tuple[Plan, bool]:
    """The plan with groups, parts and bands of all ``ops``; and whether bytes are read several times.

    ``ops`` is emptied.
    """
    plan, sizes, copies = draft.plan, draft.sizes, draft.limits.copies
    copy_group_bytes = 0 if copies is None else COPY_GROUP_FACTOR * copies.largest_bytes
    most_bytes = budget_bytes - FOOTPRINT_BYTES
    memory = GroupMemory(
        min(sizes.group_bytes, max(most_bytes // GROUPS_IN_BUDGET, SMALLEST_GROUP_BYTES)),
        sizes.pass_bytes,
        most_bytes,
        TINY_BYTES,
    )
    for_parts = (memory.most_bytes - sizes.pass_bytes) // _held_bytes(plan.mixtures, ops)
    ops, groups, rereads, most_read = group_ops(
        ops, copied, files, memory._replace(most_bytes=sizes.pass_bytes + for_parts)
    )
    parts = plan_parts(ops, groups, copied, *files)
    values = int(groups.max(initial=-1)) + 1
    parts["group"] = _groups_of_parts(parts, values, sizes.fill_bytes, copy_group_bytes)
    count = max(values, int(parts["group"].max(initial=-1)) + 1)
    parts = parts.take(order_of(parts["group"].astype(np.int64)))  # those of a group stay in order
    made = parts.take(np.flatnonzero(parts["source_file"] == MADE))
    peaks = np.bincount(made["group"], weights=part_sizes(made), minlength=count).astype(np.int64)
    peaks += _accumulator_bytes(plan.mixtures, ops, groups, made, count)
    if sizes.step_bytes is not None and not len(parts):
        step_bytes = min(sizes.step_bytes, memory.group_bytes)
        memory = memory._replace(group_bytes=step_bytes, pass_bytes=step_bytes)
    ops, groups = set_passes(ops, groups, peaks[:values], most_read, memory)
    bands = plan_bands(ops, groups)
    peaks += largest_passes(bands, count)
    planned = replace(plan, ops=ops, op_groups=groups, bands=bands, parts=parts, group_peaks=peaks)
    return planned, rereads


def _accumulator_bytes(
    mixtures: Mapping[int, Mixture], ops: Ops, groups: Ints, made: Parts, count: int
) -> Ints:
    """Accumulator bytes of each of ``count`` groups, for parts that hold mixed values in another dtype than float32.

    A part needs one accumulator, from its first such value to its last. ``made`` is sorted by group, file and start.
    A part [0, 900) that mixes bfloat16 values in [100, 300) and [500, 700) needs 2 · (700 − 100) = 1200 bytes.
    """
    rows = _cast_after_mixing(mixtures, ops)
    if not rows.any():
        return np.zeros(count, dtype=np.int64)
    start, stop = (side[rows] for side in hull(ops, "target"))
    files = int(made["file"].max()) + 1
    of_parts = made["group"].astype(np.int64) * files + made["file"]
    ranges = Ranges(of_parts, made["start"], made["stop"])
    part = ranges.holding(groups[rows] * files + ops["target_file"][rows], start)
    low, high = np.full(len(made), np.iinfo(np.int64).max), np.zeros(len(made), dtype=np.int64)
    np.minimum.at(low, part, start)
    np.maximum.at(high, part, stop)
    sizes = ACCUMULATOR_FACTOR * np.maximum(high - low, 0)
    return np.bincount(made["group"], weights=sizes, minlength=count).astype(np.int64)


def _cast_after_mixing(mixtures: Mapping[int, Mixture], ops: Ops) -> Flags:
    """Whether each op is a step of a mixture that is cast afterwards."""
    if not mixtures:
        return np.zeros(len(ops), dtype=bool)
    return np.isin(ops["tensor"], list(mixtures)) & (ops["target_dtype"] != ops["source_dtype"])


def _held_bytes(mixtures: Mapping[int, Mixture], ops: Ops) -> int:
    """Memory for each byte of a part, including its accumulator, at most."""
    return 1 + ACCUMULATOR_FACTOR if _cast_after_mixing(mixtures, ops).any() else 1


def _groups_of_parts(parts: Parts, first: int, fill_bytes: int, copy_group_bytes: int) -> Ints:
    """The group of every part. Parts without values, and copied parts, are gathered into groups of their own."""
    groups = parts["group"].astype(np.int64)
    ungrouped = groups == NO_GROUP
    for chosen, most_bytes, most_parts in (
        (ungrouped & (parts["source_file"] == MADE), fill_bytes, len(parts)),
        (ungrouped & (parts["source_file"] != MADE), copy_group_bytes, COPY_GROUP_PARTS),
    ):
        sizes = part_sizes(parts.take(np.flatnonzero(chosen)))
        portion = (np.cumsum(sizes) - sizes) // most_bytes
        number = np.arange(len(sizes)) // max(most_parts, 1)
        both = portion * (len(sizes) + 1) + number
        numbers = dense_numbers(both)
        groups[chosen] = first + numbers
        first += int(numbers.max(initial=-1)) + 1
    return groups


def _check_budget(plan: Plan) -> None:
    if plan.peak_bytes + FOOTPRINT_BYTES > plan.budget_bytes:
        worst = int(plan.group_peaks.argmax())
        raise MemoryBudgetError(_label(plan, worst), plan.budget_bytes, plan.peak_bytes + FOOTPRINT_BYTES)


def _label(plan: Plan, group: int) -> str:
    """The name of a group in messages: its first tensor, or its first file."""
    ops = plan.ops[plan.op_groups == group]
    if len(ops):
        return plan.tensors[int(ops["tensor"][0])].label
    return plan.target_files[int(plan.parts["file"][plan.parts["group"] == group][0])].path


# ----------------------------------------------------------------------------------------------- bands


def plan_bands(ops: Ops, groups: Ints) -> Bands:
    """The source byte ranges that each group reads in each of its passes; ranges close together are joined."""
    chunks = [np.zeros(0, dtype=BAND)]
    for rows in by_owner(groups):
        block, first = ops[rows], int(groups[rows].min(initial=0))
        op, file, start, stop = source_ranges(block)
        files, passes = int(file.max(initial=0)) + 1, int(block["pass"].max(initial=0)) + 1
        keys = ((groups[rows] - first) * passes + block["pass"])[op] * files + file
        key, low, high = merge(keys, start, stop, JOIN_GAP_BYTES)
        bands = np.zeros(len(key), dtype=BAND)
        bands["group"], bands["file"] = first + key // files // passes, key % files
        bands["pass"], bands["start"], bands["stop"] = key // files % passes, low, high
        chunks.append(bands)
    return np.concatenate(chunks)


def largest_passes(bands: Bands, count: int) -> Ints:
    """Bytes of the largest pass of each of ``count`` groups."""
    passes = int(bands["pass"].max(initial=0)) + 1
    held = np.bincount(
        bands["group"].astype(np.int64) * passes + bands["pass"],
        weights=bands["stop"] - bands["start"],
        minlength=count * passes,
    )
    return np.asarray(held.reshape(count, passes).max(axis=1, initial=0), dtype=np.int64)


# ---------------------------------------------------------------------------------------------- checks


def _check_tiles(ops: Ops, target: TargetFiles, source: Catalog) -> None:
    """Check that literal bytes, padding and values add up to the size of every target file.

    The part of a target tensor that extends beyond the source's is zeros, like padding. Only the last step of a mixture
    counts.
    """
    tensors = source.tensors
    moves = ops["kind"] == MOVE
    if source.mixtures:
        finished = source_tensors(ops["tensor"], {t: m.terms[-1].tensor for t, m in source.mixtures.items()})
        moves &= ~np.isin(ops["tensor"], list(source.mixtures)) | (ops["source_tensor"] == finished)
    count = len(target.files)
    written = volumes(ops)
    written *= itemsizes(ops, "target_dtype")
    written *= moves
    covered = np.bincount(np.where(moves, ops["target_file"], 0), weights=written, minlength=count)
    boxes = target.fragments
    beyond = (volumes(boxes) - volumes_inside(boxes, tensors)) * ITEMSIZES[boxes["dtype"]]
    covered = covered + np.bincount(boxes["file"], weights=beyond, minlength=count)  # integers of no moves
    literals = target.literals
    covered = covered + np.bincount(literals.files, weights=literals.sizes, minlength=count)
    for file, _, nbytes in target.fills:
        covered[file] += nbytes
    for file, described in enumerate(target.files):
        if covered[file] != described.size_bytes:
            raise CoverageError(
                described.path, f"{int(covered[file])} of {described.size_bytes} bytes would be written"
            )
