"""Groups, passes, parts and copies of hand-made files: what is planned is what running it needs and makes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise, product
from math import prod
from typing import Any

import numpy as np
import pytest

from paddle_reshard.pipeline.checkpoint.files import TargetFiles
from paddle_reshard.pipeline.core.catalog import Catalog, File, fragment_row, fragment_rows, volumes
from paddle_reshard.pipeline.core.errors import MemoryBudgetError
from paddle_reshard.pipeline.core.literals import Literals
from paddle_reshard.pipeline.core.part_limits import CopyLimits, PartLimits
from paddle_reshard.pipeline.core.tensor_columns import Tensors
from paddle_reshard.pipeline.core.tensors import Tensor, dtype_named
from paddle_reshard.pipeline.planning.match import match
from paddle_reshard.pipeline.planning.ops import COMPARE, HOLD, Ops
from paddle_reshard.pipeline.planning.plan import FOOTPRINT_BYTES, Plan, plan_comparisons, plan_conversion
from paddle_reshard.pipeline.planning.settings import PlanSettings, PlanSizes
from paddle_reshard.pipeline.planning.work import RemainingGroups
from paddle_reshard.storage.store import CopyRange, ReadRange, Receipt
from paddle_reshard.tasks.compare_group import SCRATCH_BYTES, compare_group
from paddle_reshard.tasks.run_group import run_group
from tests.reads import OneByOne
from tests.sampling import exhaustive

MIB = 1 << 20
FLOAT32 = dtype_named("float32")
SIZE = 4
HEADER, FOOTER = b"header of a file", b"its end"
Box = tuple[tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True)
class Stored:
    """A box of a tensor as one file holds it, between a header and a footer."""

    tensor: int
    offset: tuple[int, ...]
    extents: tuple[int, ...]
    order: str = "C"
    padding: int = 0
    """Zero bytes after the values."""

    @property
    def nbytes(self) -> int:
        return prod(self.extents) * SIZE

    def strides(self) -> tuple[int, ...]:
        return np.empty(self.extents, dtype="<f4", order=self.order).strides


def whole(shape: tuple[int, ...], order: str = "C", tensor: int = 0) -> list[list[Stored]]:
    return [[Stored(tensor, (0,) * len(shape), shape, order)]]


def columns(shape: tuple[int, int], count: int, order: str = "C") -> list[list[Stored]]:
    width = shape[1] // count
    return [[Stored(0, (0, i * width), (shape[0], width), order)] for i in range(count)]


def rows(shape: tuple[int, int], edges: Sequence[int], order: str = "C") -> list[list[Stored]]:
    return [[Stored(0, (a, 0), (b - a, shape[1]), order)] for a, b in pairwise((0, *edges, shape[0]))]


@dataclass
class Files:
    """Files whose boxes follow one another, each with literal bytes around it."""

    boxes: list[list[Stored]]
    rows: list = field(default_factory=list)
    files: list[File] = field(default_factory=list)
    literals: list[tuple[int, int, bytes]] = field(default_factory=list)
    fills: list[tuple[int, int, int]] = field(default_factory=list)
    places: list[list[int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        for file, boxes in enumerate(self.boxes):
            self.literals.append((file, 0, HEADER))
            at, places = len(HEADER), []
            for box in boxes:
                places.append(at)
                self.rows.append(
                    fragment_row(box.tensor, file, FLOAT32, 0, at, box.offset, box.extents, box.strides())
                )
                at += box.nbytes
                if box.padding:
                    self.fills.append((file, at, box.padding))
                at += box.padding
                self.literals.append((file, at, FOOTER))
                at += len(FOOTER)
            self.places.append(places)
            self.files.append(File(f"{file}.bin", at))

    def contents(self, values: Sequence[np.ndarray]) -> dict[str, bytes]:
        """What the files hold, by NumPy alone."""
        found = {}
        for boxes, file in zip(self.boxes, self.files, strict=True):
            content = HEADER
            for box in boxes:
                where = tuple(slice(o, o + e) for o, e in zip(box.offset, box.extents, strict=True))
                content += values[box.tensor][where].tobytes(box.order) + bytes(box.padding) + FOOTER
            found[file.path] = content
        return found


class Memory(OneByOne):
    """Source and target in memory, which counts what it is asked for."""

    copies_in_flight = 1

    def __init__(self, source: dict[str, bytes], plan: Plan) -> None:
        self.source = source
        self.made = {file.path: bytearray(b"\xaa" * file.size_bytes) for file in plan.target_files}
        self.read_bytes = self.copied_bytes = 0

    def read_into(self, path: str, byte_offset: int, buffer: memoryview) -> None:
        self.read_bytes += len(buffer)
        buffer[:] = self.source[path][byte_offset : byte_offset + len(buffer)]

    def write_part(self, path: str, byte_offset: int, buffer: memoryview) -> Receipt:
        self.made[path][byte_offset : byte_offset + len(buffer)] = buffer
        return Receipt(path, byte_offset, len(buffer))

    def copy_part(self, copy: CopyRange, source: ReadRange) -> Receipt:
        assert source is self
        self.copied_bytes += copy.nbytes
        values = self.source[copy.source_path][copy.source_offset :][: copy.nbytes]
        self.made[copy.path][copy.byte_offset : copy.byte_offset + copy.nbytes] = values
        return Receipt(copy.path, copy.byte_offset, copy.nbytes)


def sides_of(shapes: Sequence[tuple[int, ...]], source: Files, target: Files) -> tuple[Catalog, TargetFiles]:
    """The catalog and the target of these files, which hold tensors of these shapes."""
    tensors = Tensors(Tensor(f"w{i}", "moment1", FLOAT32, shape) for i, shape in enumerate(shapes))
    return (
        Catalog(tensors, tuple(source.files), fragment_rows(source.rows), {}),
        TargetFiles(
            files=tuple(target.files),
            literals=Literals(target.literals),
            fills=tuple(target.fills),
            fragments=fragment_rows(target.rows),
        ),
    )


def plan_of(
    shapes: Sequence[tuple[int, ...]],
    source: Files,
    target: Files,
    room_bytes: int,
    limits: PartLimits = PartLimits(),
    **settings: Any,
) -> Plan:
    catalog, files = sides_of(shapes, source, target)
    return plan_conversion(catalog, files, [], PlanSettings(FOOTPRINT_BYTES + room_bytes, **settings), limits)


def run(plan: Plan, source: Files, target: Files, shapes: Sequence[tuple[int, ...]]) -> Memory:
    """Run all groups, last first, and hold what they made against what NumPy makes."""
    random = np.random.default_rng(0)
    values = [random.random(shape, dtype=np.float32) for shape in shapes]
    memory = Memory(source.contents(values), plan)
    for work in reversed(list(RemainingGroups(plan))):
        report = run_group(work, memory, memory)
        made = sum(r.nbytes for r in report.receipts) - report.copied_bytes
        assert made <= work.peak_bytes
    wanted = target.contents(values)
    for path, content in memory.made.items():
        assert bytes(content) == wanted[path], path
    assert memory.read_bytes == plan.read_bytes
    assert memory.copied_bytes == plan.copied_bytes
    return memory


def check_tiles(plan: Plan, smallest_bytes: int = 1) -> None:
    for number, file in enumerate(plan.target_files):
        parts = np.sort(plan.parts[plan.parts["file"] == number], order="start")
        assert parts["start"][0] == 0
        assert parts["stop"][-1] == file.size_bytes
        assert (parts["start"][1:] == parts["stop"][:-1]).all()
        assert ((parts["stop"] - parts["start"])[:-1] >= smallest_bytes).all()


SMALL = PlanSizes(group_bytes=1 << 20, pass_bytes=128 << 10, fill_bytes=256 << 10)
"""A 64th of what is usual."""
IN_STEPS = replace(SMALL, step_bytes=64 << 10)


# --------------------------------------------------------------------------- tensors larger than the budget

LARGE = (2_000, 5_000)
"""40 MB."""
ROOM_BYTES = 6 * MIB
LAYOUTS = {
    "rows to rows": (whole(LARGE), rows(LARGE, (700,))),
    "columns to whole": (columns(LARGE, 4), whole(LARGE)),
    "whole to columns": (whole(LARGE), columns(LARGE, 5)),
    "columns to columns": (columns(LARGE, 2), columns(LARGE, 5)),
    "rows to columns": (rows(LARGE, (3, 501, 1777)), columns(LARGE, 2)),
    "both transposed": (columns(LARGE, 2, "F"), rows(LARGE, (999,), "F")),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_tensor_larger_than_the_budget_is_read_once(name: str) -> None:
    source, target = (Files(boxes) for boxes in LAYOUTS[name])
    plan = plan_of([LARGE], source, target, ROOM_BYTES, sizes=SMALL)
    assert plan.read_once_budget_bytes is None
    assert plan.peak_bytes <= ROOM_BYTES
    check_tiles(plan)
    memory = run(plan, source, target, [LARGE])
    assert memory.read_bytes <= 1.001 * prod(LARGE) * SIZE


TRANSPOSED = {
    "Fortran order to rows": (whole(LARGE, "F"), whole(LARGE)),
    "Fortran order to columns": (whole(LARGE, "F"), columns(LARGE, 5)),
    "rows to Fortran order": (rows(LARGE, (1_500,)), whole(LARGE, "F")),
}


@pytest.mark.parametrize(
    "name",
    [exhaustive("Fortran order to rows"), "Fortran order to columns", exhaustive("rows to Fortran order")],
)
def test_what_has_to_be_turned_is_read_several_times_and_says_the_budget_that_would_do(name: str) -> None:
    source, target = (Files(boxes) for boxes in TRANSPOSED[name])
    plan = plan_of([LARGE], source, target, ROOM_BYTES, sizes=SMALL)
    assert plan.peak_bytes <= ROOM_BYTES
    assert plan.read_amplification > 1.5
    check_tiles(plan)
    memory = run(plan, source, target, [LARGE])
    assert memory.read_bytes == pytest.approx(plan.read_amplification * prod(LARGE) * SIZE)

    enough_bytes = plan.read_once_budget_bytes
    assert enough_bytes is not None
    enough = plan_of([LARGE], source, target, enough_bytes - FOOTPRINT_BYTES, sizes=SMALL)
    assert enough.read_once_budget_bytes is None
    assert enough.peak_bytes + FOOTPRINT_BYTES <= enough_bytes
    assert enough.peak_bytes < 1.1 * prod(LARGE) * SIZE  # the parts and one pass, not everything twice
    run(enough, source, target, [LARGE])


@pytest.mark.parametrize("orders", [("C", "C"), ("F", "F")], ids=lambda orders: "".join(orders))
def test_rows_larger_than_the_budget_are_cut_too(orders: tuple[str, str]) -> None:
    shape = (3, 2_000_000) if orders[0] == "C" else (2_000_000, 3)
    source, target = Files(whole(shape, orders[0])), Files(whole(shape, orders[1]))
    plan = plan_of([shape], source, target, ROOM_BYTES, sizes=SMALL)
    assert plan.peak_bytes <= ROOM_BYTES < 2_000_000 * SIZE
    check_tiles(plan)
    assert run(plan, source, target, [shape]).read_bytes == prod(shape) * SIZE


def test_what_must_be_written_together_and_does_not_fit_is_refused() -> None:
    """Eight files, each of which wants parts of a mebibyte."""
    source, target = Files(whole(LARGE)), Files(columns(LARGE, 8))
    limits = PartLimits(MIB)
    plan = plan_of([LARGE], source, target, 32 * MIB, limits=limits, sizes=SMALL)
    check_tiles(plan, MIB)
    run(plan, source, target, [LARGE])
    with pytest.raises(MemoryBudgetError, match="w0") as refusal:
        plan_of([LARGE], source, target, 6 * MIB, limits=limits, sizes=SMALL)
    enough = plan_of(
        [LARGE], source, target, refusal.value.needed_bytes - FOOTPRINT_BYTES, limits=limits, sizes=SMALL
    )
    assert enough.peak_bytes + FOOTPRINT_BYTES <= refusal.value.needed_bytes


@pytest.mark.parametrize(
    ("one", "other", "most_reads", "sizes"),
    [
        (columns(LARGE, 4), rows(LARGE, (7, 1_000)), 1.0, SMALL),
        (columns(LARGE, 4), rows(LARGE, (7, 1_000)), 1.0, IN_STEPS),
        (whole(LARGE, "F"), columns(LARGE, 2, "F"), 1.0, IN_STEPS),
        (whole(LARGE, "F"), whole(LARGE), 20.0, IN_STEPS),
    ],
    ids=["alike", "in steps", "both transposed", "one transposed"],
)
def test_large_tensors_are_compared_within_the_budget(
    one: list[list[Stored]], other: list[list[Stored]], most_reads: float, sizes: PlanSizes
) -> None:
    a, b = Files(one), Files(other)
    plan = comparison_of(a, b, LARGE, PlanSettings(FOOTPRINT_BYTES + ROOM_BYTES, sizes=sizes))
    steps = np.bincount(pass_of(plan), weights=plan.bands["stop"] - plan.bands["start"])
    assert plan.peak_bytes == steps.max() <= ROOM_BYTES
    if sizes.step_bytes is not None and most_reads == 1:
        assert steps.max() <= sizes.step_bytes
    assert plan.read_amplification <= most_reads
    assert (plan.read_once_budget_bytes is None) == (plan.read_amplification < 1.05)
    if plan.read_once_budget_bytes is not None:
        settings = PlanSettings(plan.read_once_budget_bytes, sizes=sizes)
        enough = comparison_of(a, b, LARGE, settings)
        assert enough.read_amplification == 1
        assert enough.read_once_budget_bytes is None

    values = np.random.default_rng(0).random(LARGE, dtype=np.float32)
    contents = {f"A/{path}": content for path, content in a.contents([values]).items()}
    values[1_999, 4_999] += 1
    contents |= {f"B/{path}": content for path, content in b.contents([values]).items()}
    memory = Memory(contents, plan)
    reports = [compare_group(work, memory) for work in RemainingGroups(plan)]
    assert sum(report.compared_elements for report in reports) == prod(LARGE)
    assert memory.read_bytes == sum(report.read_bytes for report in reports) == plan.read_bytes
    (difference,) = [d for report in reports for d in report.differences]
    assert "element (1999, 4999)" in difference.detail


def comparison_of(a: Files, b: Files, shape: tuple[int, ...], settings: PlanSettings) -> Plan:
    """The comparison of one tensor in the files ``A/…`` and ``B/…``."""
    fragments = [fragment_rows(side.rows) for side in (a, b)]
    fragments[1]["file"] = fragments[1]["file"] + len(a.files)
    files = tuple(
        File(f"{name}/{file.path}", file.size_bytes)
        for name, side in (("A", a), ("B", b))
        for file in side.files
    )
    tensors = Tensors([Tensor("w0", "moment1", FLOAT32, shape)])
    return plan_comparisons(match(*fragments, {}, kind=COMPARE), tensors, files, settings)


def pass_of(plan: Plan) -> np.ndarray:
    """The number of the pass of each band, among those of all groups."""
    passes = plan.bands["group"].astype(np.int64) * len(plan.bands) + plan.bands["pass"]
    return np.unique(passes, return_inverse=True)[1]


def boxes(shape: tuple[int, ...], cuts: tuple[int, ...], order: str = "C") -> list[list[Stored]]:
    """A file for each box of a grid with so many boxes along each dim."""
    steps = [-(-extent // count) for extent, count in zip(shape, cuts, strict=True)]
    corners = product(*(range(0, extent, step) for extent, step in zip(shape, steps, strict=True)))
    return [
        [Stored(0, corner, tuple(min(s, e - o) for s, e, o in zip(steps, shape, corner, strict=True)), order)]
        for corner in corners
    ]


@pytest.mark.parametrize("sizes", [SMALL, IN_STEPS], ids=["group by group", "in steps"])
@pytest.mark.parametrize(
    ("shape", "cuts", "orders"),
    [
        ((40_001,), ((3,), (7,)), "CC"),
        ((250, 160), ((1, 2), (2, 5)), "CC"),
        ((250, 160), ((1, 2), (3, 1)), "FF"),
        ((250, 160), ((5, 2), (1, 3)), "CF"),
        ((20, 40, 50), ((1, 2, 1), (2, 3, 2)), "CC"),
        ((20, 40, 50), ((1, 2, 5), (1, 1, 25)), "CC"),
        ((4, 10, 1, 20, 50), ((1, 2, 1, 1, 2), (1, 5, 1, 2, 1)), "CC"),
    ],
    ids=str,
)
def test_a_changed_bit_is_found_wherever_it_is(
    shape: tuple[int, ...], cuts: tuple[tuple[int, ...], tuple[int, ...]], orders: str, sizes: PlanSizes
) -> None:
    """In runs of bytes, long and short, and in boxes that have none in common."""
    a, b = (Files(boxes(shape, cut, order)) for cut, order in zip(cuts, orders, strict=True))
    plan = comparison_of(a, b, shape, PlanSettings(FOOTPRINT_BYTES + ROOM_BYTES, sizes=sizes))
    random = np.random.default_rng(3)
    bits = random.integers(0, 1 << 32, shape, dtype=np.uint32)  # among them NaNs, which equal themselves
    bits.flat[0] = 0x80000000  # -0.0
    one = {f"A/{path}": content for path, content in a.contents([bits.view("<f4")]).items()}
    changes = [(), (0,), (bits.size - 1,), *((int(at),) for at in random.integers(0, bits.size, 5))]
    for change in changes:
        changed = bits.copy()
        for at in change:
            changed.flat[at] ^= 0x80000000 if at == 0 else 1 << int(random.integers(32))
        two = {f"B/{path}": content for path, content in b.contents([changed.view("<f4")]).items()}
        memory = Memory(one | two, plan)
        reports = [compare_group(work, memory) for work in RemainingGroups(plan)]
        assert sum(report.compared_elements for report in reports) == bits.size
        found = [d.detail for report in reports for d in report.differences]
        indices = [tuple(map(int, np.unravel_index(at, shape))) for at in change]
        assert [detail.partition(" is ")[0] for detail in found] == [f"element {index}" for index in indices]


def test_a_tensor_that_differs_everywhere_is_reported_once_for_two_files_and_a_group() -> None:
    shape = (1_000, 1_000)
    a, b = Files(whole(shape)), Files(columns(shape, 2))
    plan = comparison_of(a, b, shape, PlanSettings(FOOTPRINT_BYTES + ROOM_BYTES, sizes=IN_STEPS))
    assert len(plan.ops) > 8 * plan.groups
    values = np.zeros(shape, dtype=np.float32)
    contents = {f"A/{path}": content for path, content in a.contents([values]).items()}
    contents |= {f"B/{path}": content for path, content in b.contents([values + 1]).items()}
    for work in RemainingGroups(plan):
        found = compare_group(work, Memory(contents, plan)).differences
        assert len({(d.path_a, d.path_b) for d in found}) == len(found) == 2


def test_a_changed_bit_is_found_in_every_block_of_a_large_strided_box() -> None:
    """Columns in one piece, compared with those of a matrix; what changes is surrounded by its equals."""
    shape = (5 * SCRATCH_BYTES // 400, 200)
    sides = {"A": Files(columns(shape, 2)), "B": Files(whole(shape))}
    plan = comparison_of(sides["A"], sides["B"], shape, PlanSettings(FOOTPRINT_BYTES + 64 * MIB))
    assert (volumes(plan.ops) * SIZE > SCRATCH_BYTES).all()
    values = np.zeros(shape, dtype=np.float32)
    equal = {
        f"{name}/{path}": c for name, side in sides.items() for path, c in side.contents([values]).items()
    }
    for name, row in product(sides, (0, shape[0] // 2, shape[0] - 1)):
        values[row, 7] = 1
        changed = {f"{name}/{path}": c for path, c in sides[name].contents([values]).items()}
        memory = Memory(equal | changed, plan)
        found = [d.detail for work in RemainingGroups(plan) for d in compare_group(work, memory).differences]
        assert [detail.partition(" is ")[0] for detail in found] == [f"element ({row}, 7)"]
        values[row, 7] = 0


def test_no_difference_hides_another_of_other_files_tensors_or_kinds() -> None:
    """Two tensors in two files each, compared as copies and as parameters with their master weights."""
    shape = (4, 6)
    halves = [[Stored(tensor, (2 * n, 0), (2, 6)) for tensor in (0, 1)] for n in (0, 1)]
    a, b = Files([[*whole(shape)[0], *whole(shape, tensor=1)[0]]]), Files(halves)
    fragments = [fragment_rows(side.rows) for side in (a, b)]
    fragments[1]["file"] = fragments[1]["file"] + 1
    paths = [File("A/0.bin", a.files[0].size_bytes), *(File(f"B/{f.path}", f.size_bytes) for f in b.files)]
    tensors = Tensors([Tensor(f"w{n}", "param", FLOAT32, shape) for n in (0, 1)])
    ops = Ops.joined([match(*fragments, {}, kind=kind) for kind in (COMPARE, HOLD)])
    plan = plan_comparisons(ops, tensors, tuple(paths), PlanSettings(FOOTPRINT_BYTES + MIB))
    values = np.zeros(shape, dtype=np.float32)
    contents = {"A/0.bin": a.contents([values, values])["0.bin"]}
    contents |= {f"B/{path}": content for path, content in b.contents([values + 1, values + 1]).items()}
    found = [
        d for work in RemainingGroups(plan) for d in compare_group(work, Memory(contents, plan)).differences
    ]
    assert sorted((d.tensor, type(d).__name__, {d.path_a, d.path_b} - {"A/0.bin"}) for d in found) == sorted(
        (f"w{tensor} (param)", kind, {f"B/{file}.bin"})
        for tensor, kind, file in product((0, 1), ("DriftError", "MasterDriftError"), (0, 1))
    )


def test_infinity_is_no_nan() -> None:
    """Any NaN may be that of a master weight which is NaN, but nothing else may."""
    masters = np.array([np.nan, np.nan, np.inf], dtype="<f4")
    params = np.array([0x7FC0, 0x7F80, 0x7F80], dtype="<u2")  # NaN, infinite, infinite
    files = (File("A", 12), File("B", 6))
    sides = [
        fragment_rows([fragment_row(0, n, dtype_named(dtype), 0, 0, (0,), (3,), (size,))])
        for n, (dtype, size) in enumerate((("float32", 4), ("bfloat16", 2)))
    ]
    tensors = Tensors([Tensor("w", "param", dtype_named("bfloat16"), (3,))])
    plan = plan_comparisons(match(*sides, {}, kind=HOLD), tensors, files, PlanSettings(FOOTPRINT_BYTES + MIB))
    (work,) = RemainingGroups(plan)
    memory = Memory({"A": masters.tobytes(), "B": params.tobytes()}, plan)
    (difference,) = compare_group(work, memory).differences
    assert difference.detail.startswith("element (1,) is inf")


# ------------------------------------------------------------------------------------------------- parts


@pytest.mark.parametrize("copies", [None, CopyLimits(10_000, 300_000)], ids=["moved", "copied"])
@pytest.mark.parametrize("smallest_bytes", [1, 20_000, 100_000])
def test_parts_have_the_size_that_the_store_wants(smallest_bytes: int, copies: CopyLimits | None) -> None:
    """Sixty tensors of odd sizes, in files that agree about nothing."""
    random = np.random.default_rng(1)
    shapes = [(int(r), int(c)) for r, c in random.integers(1, 300, (60, 2))]

    def spread(count: int) -> list[list[Stored]]:
        boxes: list[list[Stored]] = [[] for _ in range(count)]
        for number, shape in enumerate(shapes):
            for file in boxes:
                edge = int(random.integers(0, shape[0] + 1))
                if file is boxes[number % count]:
                    file.extend(_halves(number, shape, edge))
        return boxes

    source, target = Files(spread(3)), Files(spread(4))
    limits = PartLimits(smallest_bytes, 10_000, copies)
    plan = plan_of(shapes, source, target, 64 * MIB, limits=limits, sizes=SMALL)
    check_tiles(plan, smallest_bytes)
    run(plan, source, target, shapes)
    assert (plan.copied_bytes > 0) == (copies is not None)
    copied = plan.parts[plan.parts["source_file"] >= 0]
    sizes = copied["stop"] - copied["start"]
    if copies is not None:
        assert sizes.min() >= max(copies.smallest_bytes, smallest_bytes)
        assert sizes.max() <= max(copies.largest_bytes, 2 * smallest_bytes)


def _halves(tensor: int, shape: tuple[int, int], edge: int) -> list[Stored]:
    edges = [a for a in (0, edge, shape[0]) if a in (0, shape[0]) or 0 < a < shape[0]]
    return [Stored(tensor, (a, 0), (b - a, shape[1])) for a, b in pairwise(edges) if b > a]


def test_a_file_with_too_many_parts_gets_larger_ones() -> None:
    shape = (1_000, 1_000)
    source, target = Files(rows(shape, range(10, 1_000, 10))), Files(whole(shape))
    sizes = PlanSizes(group_bytes=80_000)
    many = plan_of([shape], source, target, 64 * MIB, limits=PartLimits(20_000), sizes=sizes)
    plan = plan_of([shape], source, target, 64 * MIB, limits=PartLimits(20_000, most=7), sizes=sizes)
    assert len(many.parts) > 7 >= len(plan.parts) > 1
    check_tiles(plan, 4_000_000 // 7)
    run(plan, source, target, [shape])


def test_padding_is_cut_into_parts() -> None:
    boxes = [[Stored(0, (0, 0), (10, 10), padding=3_000_000), Stored(0, (10, 0), (10, 10))]]
    source, target = Files(whole((20, 10))), Files(boxes)
    plan = plan_of([(20, 10)], source, target, 64 * MIB, sizes=PlanSizes(fill_bytes=500_000))
    check_tiles(plan)
    assert (plan.parts["stop"] - plan.parts["start"]).max() <= 500_000
    assert plan.peak_bytes <= 1_000_000
    run(plan, source, target, [(20, 10)])


# ------------------------------------------------------------------------------------------------ copies


def test_a_bridge_takes_rows_from_the_longer_neighbour() -> None:
    """Rows of 40 bytes; between two copies at least 200 bytes are made, 7 of them literal."""
    shapes = [(100, 10), (30, 10)]
    source = Files([[Stored(0, (0, 0), shapes[0])], [Stored(1, (0, 0), shapes[1])]])
    target = Files([[Stored(0, (0, 0), shapes[0]), Stored(1, (0, 0), shapes[1])]])
    plan = plan_of(shapes, source, target, 64 * MIB, limits=PartLimits(200, 10_000, CopyLimits(200, 1 << 20)))
    parts = np.sort(plan.parts, order="start")
    # The header has 16 bytes, so 5 rows follow it in the first part; 5 more are taken before the 7 literal bytes.
    first, second = 16 + 100 * 40, 16 + 100 * 40 + 7
    assert parts["start"].tolist() == [0, 216, first - 200, second, second + 1200]
    assert parts["source_file"].tolist() == [-1, 0, -1, 1, -1]
    assert parts["source_start"][[1, 3]].tolist() == [216, 16]
    check_tiles(plan, 200)
    run(plan, source, target, shapes)


def test_without_a_smallest_part_only_literal_bytes_are_made() -> None:
    shape = (100, 10)
    source, target = Files(rows(shape, (40,))), Files(whole(shape))
    plan = plan_of([shape], source, target, 64 * MIB, limits=PartLimits(copies=CopyLimits(1, 1 << 20)))
    assert plan.copied_bytes == 4_000
    assert plan.read_bytes == 0
    assert run(plan, source, target, [shape]).copied_bytes == 4_000


@pytest.mark.parametrize(
    ("source", "target"),
    [(whole((100, 10)), columns((100, 10), 2)), (whole((100, 10), "F"), whole((100, 10)))],
    ids=["columns", "another order"],
)
def test_what_is_not_one_stretch_of_a_file_is_not_copied(
    source: list[list[Stored]], target: list[list[Stored]]
) -> None:
    one, other = Files(source), Files(target)
    plan = plan_of([(100, 10)], one, other, 64 * MIB, limits=PartLimits(copies=CopyLimits(1, 1 << 20)))
    assert plan.copied_bytes == 0
    run(plan, one, other, [(100, 10)])
