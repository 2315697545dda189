"""What was found of thousands of changes is what ``README.md`` says, and no change of a value is missed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import paddle_reshard
from paddle_reshard import CheckpointError
from tests.conftest import COMMITTED
from tests.mutations.study import BOXES, COUNTS, EXPLAINED, SLOW, Result, run, with_current_table

EVERY = 4
"""Of so many changes of a kind `make full` makes one."""


def check(result: Result) -> None:
    unexplained = [
        (command, change.kind, change.where)
        for command, change in result.missed
        if (command, change.kind) not in EXPLAINED
    ]
    assert not unexplained


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.exhaustive if name in SLOW else ()) for name in BOXES]
)
def test_changes_of_every_kind_are_found(name: str, tmp_path: Path) -> None:
    check(run(name, tmp_path, every=EVERY))


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", BOXES)
def test_what_is_found_of_all_changes_is_what_the_table_says(name: str, tmp_path: Path) -> None:
    result = run(name, tmp_path)
    check(result)
    assert result.counts == json.loads(COUNTS.read_text())[name]


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", BOXES)
def test_more_changes(name: str, tmp_path: Path) -> None:
    check(run(name, tmp_path, share=8))


def test_the_table_in_the_documents_is_current() -> None:
    before, after = with_current_table()
    assert before == after


def test_no_explanation_is_about_values_found_in_targets() -> None:
    assert not [
        kind
        for command, kind in EXPLAINED
        if command.startswith("verify") and kind.startswith(("a bit of a value", "two ", "a key"))
    ]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (b"linear_0.w_0_fp32_master_0_moment1_0", b"linear_0.w_0_fp32_master_8_moment1_0"),
        (b"\x14linear_0.w_0_fp32_master_0", b"\x14linear_0.w_0_fp32_master_1"),
    ],
    ids=["accumulator", "master weight"],
)
def test_an_accumulator_that_the_trainer_would_not_find_is_refused(
    before: bytes, after: bytes, tmp_path: Path
) -> None:
    source = tmp_path / "source"
    shutil.copytree(
        COMMITTED / "mp2pp2sh2_s1v2_meta_ema" / "checkpoint-3", source, copy_function=shutil.copyfile
    )
    file = source / "optimizer.tp00_pp00_shard00.pdopt"
    content = file.read_bytes()
    before, after = (name.replace(b"\x14", bytes([26])) for name in (before, after))
    assert before in content
    file.write_bytes(content.replace(before, after, 1))
    with pytest.raises(CheckpointError, match="looks for accumulators by the name of the master weight"):
        paddle_reshard.plan(source, to="tp=1")
