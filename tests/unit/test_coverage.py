"""The proof of a plan: real plans are complete, and no change of a plan's columns goes unnoticed."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

import paddle_reshard
from paddle_reshard.pipeline.core.catalog import fragment_rows
from paddle_reshard.pipeline.core.literals import Literals
from paddle_reshard.pipeline.core.part_limits import CopyLimits, PartLimits
from paddle_reshard.pipeline.planning import coverage
from paddle_reshard.pipeline.planning.ops import MOVE, Ops
from paddle_reshard.pipeline.planning.parts import MADE
from paddle_reshard.pipeline.planning.plan import FOOTPRINT_BYTES, Plan, plan_conversion
from paddle_reshard.pipeline.planning.settings import PlanSettings
from tests.conftest import case_directory
from tests.jobs.command import run_here
from tests.published import hold
from tests.unit.test_planning import SMALL, Files, columns, rows, sides_of, whole

HYBRID = "mp2pp2sh2_s1v2_meta_ema"
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "one card": (HYBRID, {"to": "tp=1"}),
    "another strategy": (HYBRID, {"to": "tp=2,sharding=2", "sharding_strategy": "stage1v1"}),
    "stage 3": (HYBRID, {"to": "sharding=2", "sharding_strategy": "stage3"}),
    "flex": (HYBRID, {"format": "flex", "max_shard_size": "200KB"}),
    "unified": (HYBRID, {"format": "unified", "drop": ["ema"]}),
    "model": (HYBRID, {"format": "huggingface"}),
    "average": (HYBRID, {"format": "huggingface", "state": "ema"}),
    "padded": (HYBRID, {"to": "tp=2", "vocab_size": 320}),
    "trimmed": (HYBRID, {"format": "huggingface", "vocab_size": 100}),
    "experts": ("moe/ep2_mp2", {"to": "tp=1"}),
    "from flex": ("moe/ep2_fc_sh2_s1v2", {"format": "flex"}),
    "from unified": ("small-unified/uc_sh2_s1v2", {"format": "huggingface"}),
}


@cache
def planned(name: str) -> paddle_reshard.ConversionPlan:
    case, options = CASES[name]
    (source,) = sorted(case_directory(case).glob("checkpoint-*"))[-1:]
    return paddle_reshard.plan(source, **options)


@pytest.mark.parametrize("name", CASES)
def test_plans_of_real_checkpoints_are_complete(name: str) -> None:
    plan = planned(name)
    found = paddle_reshard.prove(plan)
    assert found, found.problems
    assert found.total_bytes == plan.plan.written_bytes
    kinds = (found.literal_bytes, found.padding_bytes, found.value_bytes, found.carried_bytes)
    assert sum(kinds) == found.total_bytes
    assert found.used_elements + sum(left.elements for left in found.left_out) == found.stored_elements


def test_what_is_left_out_is_counted_with_the_reason() -> None:
    """A model of 39 tensors with 139,840 elements: 112 rows of 32 numbers in two of them are the vocabulary."""
    (left,) = [left for left in paddle_reshard.prove(planned("unified")).left_out]
    assert (left.state, left.tensors, left.elements) == ("ema_master_weight", 39, 139_840)
    assert left.reason == "dropped, as requested"
    trimmed = {left.state: left for left in paddle_reshard.prove(planned("trimmed")).left_out}
    assert trimmed["moment1"].reason == "not requested"
    assert trimmed["master_weight"].reason == "beyond the vocabulary that was requested"
    padded, plain = (paddle_reshard.prove(planned(name)) for name in ("padded", "one card"))
    assert padded.used_elements == plain.used_elements
    assert padded.padding_bytes > plain.padding_bytes == 0


Change = Callable[[Plan, np.random.Generator], Plan]


def with_ops(plan: Plan, change: Callable[[np.ndarray, int], None], random: np.random.Generator) -> Plan:
    ops = plan.ops.rows()
    change(ops, int(random.choice(np.flatnonzero(ops["kind"] == MOVE))))
    return replace(plan, ops=Ops.of_rows(ops))


def shifted(field: str, by: int) -> Change:
    def change(ops: np.ndarray, row: int) -> None:
        ops[field][row] += by

    return lambda plan, random: with_ops(plan, change, random)


def dropped(plan: Plan, random: np.random.Generator) -> Plan:
    keep = np.ones(len(plan.ops), dtype=bool)
    keep[random.choice(np.flatnonzero(plan.ops["kind"] == MOVE))] = False
    return replace(plan, ops=plan.ops[keep], op_groups=plan.op_groups[keep])


def doubled(plan: Plan, random: np.random.Generator) -> Plan:
    row = random.choice(np.flatnonzero(plan.ops["kind"] == MOVE))
    numbers = np.sort(np.r_[np.arange(len(plan.ops)), row])
    return replace(plan, ops=plan.ops[numbers], op_groups=plan.op_groups[numbers])


def other_box(plan: Plan, random: np.random.Generator) -> Plan:
    """The bytes stay, what they are said to be does not."""

    def change(ops: np.ndarray, row: int) -> None:
        ops["offset"][row, 0] += 1

    return with_ops(plan, change, random)


def exchanged(plan: Plan, random: np.random.Generator) -> Plan:
    """Two boxes of one shape write where the other should: every byte is still written once."""
    ops = plan.ops.rows()
    moves = np.flatnonzero(ops["kind"] == MOVE)
    alike = [(int(ops["target_file"][row]), *ops["extents"][row].tolist()) for row in moves]
    first = int(random.choice([i for i, found in enumerate(alike) if alike.count(found) > 1]))
    second = next(i for i, found in enumerate(alike) if i != first and found == alike[first])
    pair, turned = moves[[first, second]], moves[[second, first]]
    for field in ("target_byte", "target_length", "target_strides"):
        ops[field][pair] = ops[field][turned]
    return replace(plan, ops=Ops.of_rows(ops))


def turned(plan: Plan, random: np.random.Generator) -> Plan:
    """A matrix is read column by column where it lies row by row; it begins where it should."""
    ops = plan.ops.rows()
    several = (ops["extents"][:, :2] > 1).all(axis=1) & (ops["kind"] == MOVE)
    row = random.choice(np.flatnonzero(several))
    ops["source_strides"][row, :2] = ops["source_strides"][row, 1::-1]
    return replace(plan, ops=Ops.of_rows(ops))


def other_tensor(plan: Plan, random: np.random.Generator) -> Plan:
    def change(ops: np.ndarray, row: int) -> None:
        ops["source_tensor"][row] = (ops["source_tensor"][row] + 1) % (len(plan.tensors) - plan.compared_only)

    return with_ops(plan, change, random)


def values_of_its_like(plan: Plan, random: np.random.Generator) -> Plan:
    """Two boxes of two tensors have the same place in them, and each is filled with the values of the other."""
    ops = plan.ops.rows()
    moves = random.permutation(np.flatnonzero(ops["kind"] == MOVE))
    same = ("pass", "source_dtype", "offset", "extents")
    places = [(int(plan.op_groups[row]), *(str(ops[name][row]) for name in same)) for row in moves]
    first: dict[tuple, int] = {}
    for row, place in zip(moves, places, strict=True):
        other = first.setdefault(place, row)
        if ops["source_tensor"][other] != ops["source_tensor"][row]:
            for field in ("tensor", "file", "byte", "length", "strides"):
                ops[f"source_{field}"][[row, other]] = ops[f"source_{field}"][[other, row]]
            return replace(plan, ops=Ops.of_rows(ops))
    raise AssertionError("no two tensors are alike")


def literals(change: Callable[[list[tuple[int, int, bytes]], int], None]) -> Change:
    def changed(plan: Plan, random: np.random.Generator) -> Plan:
        rows = list(plan.literals)
        change(rows, int(random.integers(len(rows))))
        return replace(plan, literals=Literals(rows))

    return changed


def longer(rows: list[tuple[int, int, bytes]], row: int) -> None:
    file, offset, content = rows[row]
    rows[row] = file, offset, content + b"x"


def part(field: str, by: int) -> Change:
    """Any group may write a part without values, so one with values is changed."""

    def changed(plan: Plan, random: np.random.Generator) -> Plan:
        parts = plan.parts.copy()
        moves = plan.ops["kind"] == MOVE
        row = random.choice(np.flatnonzero(np.isin(parts["file"], plan.ops["target_file"][moves])))
        parts[field][row] += by
        return replace(plan, parts=parts)

    return changed


def without_part(plan: Plan, random: np.random.Generator) -> Plan:
    return replace(plan, parts=np.delete(plan.parts, random.integers(len(plan.parts))))


def without_band(plan: Plan, random: np.random.Generator) -> Plan:
    return replace(plan, bands=np.delete(plan.bands, random.integers(len(plan.bands))))


def shorter_band(plan: Plan, random: np.random.Generator) -> Plan:
    bands = plan.bands.copy()
    bands["stop"][random.integers(len(bands))] -= 1
    return replace(plan, bands=bands)


def shorter_box_and_band(plan: Plan, random: np.random.Generator) -> Plan:
    """A box that is said to end before it does, as its band does."""
    ops, bands = plan.ops.rows(), plan.bands.copy()
    ends = ops["source_byte"] + ops["source_length"]
    for band in random.permutation(len(bands)):
        reads = (plan.op_groups == bands["group"][band]) & (ops["pass"] == bands["pass"][band])
        last = reads & (ops["source_file"] == bands["file"][band]) & (ends == bands["stop"][band])
        if last.any():
            ops["source_length"][last] -= 1
            bands["stop"][band] -= 1
            return replace(plan, ops=Ops.of_rows(ops), bands=bands)
    raise AssertionError("no band ends with a box")


CHANGES: dict[str, Change] = {
    "values written further on": shifted("target_byte", 2),
    "values written too early": shifted("target_byte", -4),
    "values read further on": shifted("source_byte", 4),
    "values read from another file": shifted("source_file", 1),
    "one row more": lambda plan, random: with_ops(
        plan, lambda ops, row: ops["extents"].__setitem__((row, 0), ops["extents"][row, 0] + 1), random
    ),
    "a box dropped": dropped, "a box doubled": doubled, "another box of the tensor": other_box,
    "two boxes exchanged": exchanged, "a box turned": turned, "values of another tensor": other_tensor,
    "values of a tensor of the same shape": values_of_its_like,
    "a literal dropped": literals(lambda rows, row: rows.pop(row)),
    "a literal doubled": literals(lambda rows, row: rows.append(rows[row])),
    "a literal of another length": literals(longer),
    "a part dropped": without_part,
    "a part that begins later": part("start", 1),
    "a part that ends later": part("stop", 1),
    "a part of another group": part("group", 1),
    "a band dropped": without_band,
    "a shorter band": shorter_band,
    "a shorter band of a box that is said to be shorter": shorter_box_and_band,
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", ["another strategy", "model"])
def test_a_changed_plan_is_not_complete(name: str, change: str) -> None:
    plan = planned(name)
    random = np.random.default_rng(7)
    for _ in range(2):
        changed = CHANGES[change](plan.plan, random)
        found = paddle_reshard.prove(replace(plan, plan=changed))
        assert not found
        assert found.problem_count >= len(found.problems) > 0


def test_a_problem_names_file_bytes_and_tensor() -> None:
    plan = planned("one card")
    ops = plan.plan.ops.rows()
    moments = [plan.plan.tensors[number].state == "moment1" for number in ops["tensor"]]
    row = int(np.flatnonzero(np.array(moments) & (ops["kind"] == MOVE))[3])
    tensor = plan.plan.tensors[int(ops["tensor"][row])]
    file = plan.plan.target_files[int(ops["target_file"][row])].path
    start = int(ops["target_byte"][row])

    keep = np.arange(len(ops)) != row
    lacking = replace(plan.plan, ops=plan.plan.ops[keep], op_groups=plan.plan.op_groups[keep])
    found = paddle_reshard.prove(replace(plan, plan=lacking))
    assert any(p.startswith(f"{file}: bytes [{start}, ") and "by nothing" in p for p in found.problems)
    assert any(tensor.label in problem and "no reason" in problem for problem in found.problems)

    twice = np.sort(np.r_[np.arange(len(ops)), row])
    doubled = replace(plan.plan, ops=plan.plan.ops[twice], op_groups=plan.plan.op_groups[twice])
    (problem, *_) = paddle_reshard.prove(replace(plan, plan=doubled)).problems
    assert (
        problem
        == f"{file}: byte {start} is written twice, as a value of {tensor.label} and as a value of {tensor.label}"
    )


# ------------------------------------------------------------------------------------------- hand-made files

SHAPE = (300, 500)
LAYOUTS = {
    "columns to columns": (columns(SHAPE, 2), columns(SHAPE, 5)),
    "turned": (columns(SHAPE, 4, "F"), rows(SHAPE, (7, 100))),
    "rows to whole, turned": (rows(SHAPE, (1, 2, 250)), whole(SHAPE, "F")),
    "copied": (rows(SHAPE, (100, 200)), rows(SHAPE, (50, 120))),
}


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("window_runs", [1 << 19, 64])
def test_plans_of_hand_made_files(monkeypatch: pytest.MonkeyPatch, name: str, window_runs: int) -> None:
    """However many windows there are, and whatever the storage copies."""
    monkeypatch.setattr(coverage, "WINDOW_RUNS", window_runs)
    monkeypatch.setattr(coverage, "SMALLEST_WINDOW", 100)
    one, other = (Files(boxes) for boxes in LAYOUTS[name])
    catalog, target = sides_of([SHAPE], one, other)
    copies = PartLimits(1, copies=CopyLimits(1_000, 300_000)) if name == "copied" else PartLimits()
    settings = PlanSettings(FOOTPRINT_BYTES + (64 << 20), compare_replicas=False, sizes=SMALL)
    plan = plan_conversion(catalog, target, [], settings, copies)
    swept = coverage.sweep(plan, catalog, target)
    assert not swept.problems.count, swept.problems.described
    literal, padding, moved, copied = swept.bytes_of.tolist()
    assert (literal, padding) == (sum(len(content) for _, _, content in other.literals), 0)
    assert moved + copied == 4 * 300 * 500
    assert copied == plan.copied_bytes
    assert (copied > 0) == (name == "copied")
    assert swept.used.tolist() == [300 * 500]

    row = 0 if copied == 0 else int(np.flatnonzero(plan.parts["source_file"] != MADE)[0])
    for field, by in (("source_start", 4), ("source_start", -4)) if copied else ():
        parts = plan.parts.copy()
        parts[field][row] += by
        assert coverage.sweep(replace(plan, parts=parts), catalog, target).problems.count


def test_a_copy_of_values_in_another_order_is_not_complete() -> None:
    """Stored row by row and wanted column by column: the bytes are as many, and begin with the same element."""
    one, other = Files(whole(SHAPE)), Files(whole(SHAPE, "F"))
    catalog, target = sides_of([SHAPE], one, other)
    plan = plan_conversion(catalog, target, [], PlanSettings(FOOTPRINT_BYTES + (64 << 20), sizes=SMALL))
    (row,) = fragment_rows(one.rows).rows()
    (column,) = fragment_rows(other.rows).rows()
    parts = np.repeat(plan.parts[:1], 3)
    start, stop = int(column["byte_base"]), int(column["byte_base"]) + 4 * 300 * 500
    parts["group"], parts["start"] = (0, 1, 2), (0, start, stop)
    parts["stop"] = start, stop, other.files[0].size_bytes
    parts[1]["source_file"], parts[1]["source_start"] = row["file"], row["byte_base"]
    copied = replace(
        plan,
        ops=Ops.empty(),
        op_groups=plan.op_groups[:0],
        bands=plan.bands[:0],
        parts=parts,
        group_peaks=np.zeros(3, dtype=np.int64),
    )
    assert coverage.sweep(copied, catalog, target).problems.count


# --------------------------------------------------------------------------------------------- command line


def test_the_command_shows_the_proof() -> None:
    arguments = ["plan", case_directory(HYBRID) / "checkpoint-3", "--to", "tp=1", "--prove"]
    shown = run_here(*arguments)
    assert shown.returncode == 0
    assert "is written once" in shown.stdout
    printed = json.loads(run_here(*arguments, "--json").stdout)
    hold(printed)
    found = printed["coverage"]
    assert found["complete"]
    assert found["total_bytes"] == printed["write_bytes"]


def test_a_plan_that_was_run_cannot_be_proven(tmp_path: Any) -> None:
    report = paddle_reshard.convert(
        case_directory(HYBRID) / "checkpoint-3", tmp_path / "a", format="huggingface"
    )
    with pytest.raises(paddle_reshard.PlanError, match="run before"):
        paddle_reshard.prove(report.plan)
