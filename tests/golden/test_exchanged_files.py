"""Files of two ranks that have changed places: refused, or the result is the same, or nothing in the files can tell.

Every exchange of two files and every reversal is tried, of each kind of files alone and of all together. Nothing can
tell only where each file holds exactly the same entries, names, shapes and dtypes as the one whose place it takes, and
then ``inspect`` says so. What the files hold is read by this suite's own reader, and whether a result is the same is
decided by the bytes of its files: those of the undisturbed checkpoint are compared with the truth elsewhere.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import paddle_reshard
from paddle_reshard.pipeline.core.errors import ReshardError
from tests import oracle
from tests.conftest import case_directory, case_names
from tests.permuted import Renamed, permutations, permuted
from tests.sampling import exhaustive

SAMPLE = (
    "dense/mp2_tied",
    "dense/pp2",
    "dense/sh2_s1v1_meta_fp32",
    "dense/sh2_s1v2_meta",
    "dense/sh2_s3_seg512",
    "moe/ep2_sh2_s1v2_meta_ema",
)
_OF_SEVERAL_RANKS = re.compile(r"(mp|pp|sh|dp)\d")
_OTHER_FORMATS = re.compile(r"(^|_)(fc|uc|muon|tohf|auto)")
CASES = tuple(
    name
    for group in ("dense", "moe", "states", "families", "small-families")
    for name in case_names(group)
    if _OF_SEVERAL_RANKS.search(name) and not _OTHER_FORMATS.search(name.partition("/")[2])
    if name != "dense/dp2"  # whose ranks write one set of files
)

ANYWHERE: tuple[dict[str, Any], ...] = (
    {"format": "flex"},
    {"format": "flex", "allow_replica_drift": True, "allow_missing": ("*",)},
    {"format": "hybrid-plain", "to": "tp=1", "allow_replica_drift": True},
)
"""Targets that hold everything, for ordinary sources, for those with copies that differ or with tensors in no file, and
for LoRA."""


def checkpoint_of(case: str) -> Path:
    (folder,) = case_directory(case).glob("checkpoint-*")
    return folder


def converted(source: Path, target: Path, options: Mapping[str, Any]) -> dict[str, bytes]:
    """The tensor files of a conversion."""
    paddle_reshard.convert(source, target, **options)
    suffixes = (".distcp", ".metadata", ".pdparams", ".pdopt")
    files = {
        str(path.relative_to(target)): path.read_bytes()
        for path in target.rglob("*")
        if path.suffix in suffixes
    }
    shutil.rmtree(target)
    return files


def undisturbed(folder: Path, tmp_path: Path) -> tuple[dict[str, bytes], Mapping[str, Any]]:
    """The files that a checkpoint becomes, and how."""
    for number, options in enumerate(ANYWHERE[:-1]):
        try:
            return converted(folder, tmp_path / f"undisturbed{number}", options), options
        except ReshardError:
            continue
    return converted(folder, tmp_path / "undisturbed", ANYWHERE[-1]), ANYWHERE[-1]


def alike(folder: Path, renamed: Renamed) -> bool:
    """Whether every file holds the same entries as the one whose place it takes, except for values."""
    held = oracle.structure(folder)
    return all(held[name] == held[other] for name, other in renamed.items())


@pytest.mark.parametrize("case", [*SAMPLE, *(exhaustive(case) for case in CASES if case not in SAMPLE)])
def test_exchanged_files_are_refused_or_change_nothing_or_are_said_to_be_alike(
    case: str, tmp_path: Path
) -> None:
    folder = checkpoint_of(case)
    whole, options = undisturbed(folder, tmp_path)
    nothing_tells, others, tried = [], [], 0
    for how, renamed in permutations(folder):
        source = permuted(folder, renamed, tmp_path / "exchanged")
        try:
            result = converted(source, tmp_path / "converted", options)
        except ReshardError:
            result = whole
        if result != whole:
            (nothing_tells if alike(folder, renamed) else others).append((how, result))
        tried += 1
        shutil.rmtree(source)
    assert tried
    assert not nothing_tells or "which rank wrote" in paddle_reshard.inspect(folder).unproven
    for how, result in others:  # files that are alike changed places, and stages whose keys tell them
        assert any(result == told for _, told in nothing_tells), how


def made(case: str, target: Path, **options: Any) -> Path:
    paddle_reshard.convert(checkpoint_of(case), target, **options)
    return target


@pytest.mark.parametrize(
    ("case", "alike"),
    [
        ("dense/mp2_tied", "4 of 4"),  # tp ranks
        ("dense/pp2", None),  # keys tell the stage of parameters, values that of master weights
        ("dense/sh2_s1v1", None),  # whoever holds whole tensors
        ("dense/sh2_s2", None),
        ("dense/sh2_s1v2_meta", None),  # lengths tell
        ("dense/sh2_s3_seg512", None),  # values tell
        ("moe/ep2_sh2_s1v2_meta_ema", None),
        ("dense/mp2pp2sh2_s1v2_meta_ema", "16 of 16"),
    ],
)
def test_files_that_nothing_tells_from_those_of_another_rank_are_counted(
    case: str, alike: str | None
) -> None:
    found = paddle_reshard.inspect(checkpoint_of(case)).unproven
    assert found.startswith(f"which rank wrote {alike} files") if alike else not found


def test_stages_of_equal_layers_are_alike_where_no_file_stores_their_parameters(tmp_path: Path) -> None:
    stages = made("dense/single_l8", tmp_path / "stages", to="pp=4,sharding=2", sharding_strategy="stage1v2")
    assert paddle_reshard.inspect(stages).unproven.startswith("which rank wrote 4 of 8 files")
    plain = made("dense/single_l8", tmp_path / "plain", to="pp=4", format="hybrid-plain")
    assert not paddle_reshard.inspect(plain).unproven


def test_slices_of_stage_3_without_master_weights_are_alike(tmp_path: Path) -> None:
    slices = made(
        "dense/single_fp32",
        tmp_path / "slices",
        to="sharding=2",
        sharding_strategy="stage3",
        layout={"stage3_segment_size": 512},
        format="hybrid-plain",
    )
    assert paddle_reshard.inspect(slices).unproven.startswith("which rank wrote 2 of 3 files")


def test_a_conversion_says_what_nothing_proves() -> None:
    said = dict(paddle_reshard.plan(checkpoint_of("dense/mp2_tied"), to="tp=1").facts())
    assert said["not proven"] == paddle_reshard.inspect(checkpoint_of("dense/mp2_tied")).unproven
