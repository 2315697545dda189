"""A folder holds the files of one save, and each has one role in it."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable
from itertools import permutations
from pathlib import Path

import pytest

import paddle_reshard
from paddle_reshard.pipeline.core.errors import CheckpointError, ReshardError, TargetError
from paddle_reshard.pipeline.indexing.detect import index_checkpoint
from paddle_reshard.pipeline.indexing.opening import open_checkpoint
from paddle_reshard.pipeline.request.inputs import load_tables
from paddle_reshard.storage.locate import Access
from paddle_reshard.storage.session.staging import Staging
from tests.conftest import case_directory
from tests.sampling import exhaustive

SAVES = (
    "dense/single",
    "dense/single_tohf",
    "dense/mp2",
    "dense/pp2",
    "dense/dp2",
    "dense/sh2_s1v1",
    "dense/sh2_s1v2",
    "dense/sh2_s2",
    "dense/sh2_s3_seg512",
    "dense/sh2_s1v1_meta",
    "dense/sh2_s1v2_meta",
    "dense/mp2pp2sh2_s1v2_meta_ema",
    "dense/fc_single",
    "dense/fc_sh2_s1v2",
    "dense/auto_dp2mp2",
    "dense/nlp_uc_mp2pp2",
    "small-unified/uc_sh2_s1v2",
    "small-unified/uc_sh2_s1v2_ignoremerge",
    "exports/llama",
    "states/lora_single",
    "states/fp16_single",
)
"""Every format, and every way of naming files."""
SHARDED = {"sh2_s1v1", "sh2_s1v2", "sh2_s2", "sh2_s3_seg512"}
COVERED = (
    *permutations(["single", "dp2"], 2),
    *permutations(sorted(SHARDED), 2),
    *permutations(["sh2_s1v1_meta", "sh2_s1v2_meta"], 2),
    ("fc_sh2_s1v2", "fc_single"),
    ("fp16_single", "single"),
    ("fp16_single", "dp2"),
    ("uc_sh2_s1v2", "llama"),
    ("uc_sh2_s1v2_ignoremerge", "llama"),
)
"""Pairs that are read as the first: it has every tensor file of the second itself, so none of that is left."""
SAMPLED = (
    ("dense/single", "dense/single_tohf"),
    ("exports/llama", "dense/single"),
    ("dense/mp2", "dense/pp2"),
    ("dense/sh2_s1v1_meta", "small-unified/uc_sh2_s1v2"),
    ("dense/fc_single", "exports/llama"),
    ("dense/single", "states/fp16_single"),
    ("dense/single", "dense/dp2"),
)


def _files(name: str) -> dict[str, Path]:
    folder = case_directory(name) / ("hf-export" if name.startswith("exports") else "checkpoint-3")
    return {str(path.relative_to(folder)): path for path in sorted(folder.rglob("*")) if path.is_file()}


def _lay(folder: Path, files: dict[str, Path]) -> Path:
    for path, file in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, folder / path)
    return folder


@pytest.mark.parametrize(
    ("first", "second"),
    [pair if pair in SAMPLED else exhaustive(*pair) for pair in permutations(SAVES, 2)],
)
def test_two_saves_in_one_folder_are_refused_by_name(first: str, second: str, tmp_path: Path) -> None:
    of_first, of_second = _files(first), _files(second)
    both = {**of_second, **of_first}
    source = open_checkpoint(str(_lay(tmp_path / "both", both)), Access({}))
    try:
        found = index_checkpoint(source, load_tables(None))
    except ReshardError as refused:
        assert any(path in str(refused) for path in both), refused
        return
    assert (first.rpartition("/")[2], second.rpartition("/")[2]) in COVERED
    assert found.own_files <= of_first.keys()


def _copy(case: str, folder: Path, leave_out: Iterable[str] = ()) -> Path:
    return _lay(
        folder / "source", {path: file for path, file in _files(case).items() if path not in leave_out}
    )


def test_tensors_of_other_libraries_are_named_and_not_carried(tmp_path: Path) -> None:
    source = _copy("dense/single", tmp_path)
    for name in ("pytorch_model.bin", "old.pt"):
        (source / name).write_bytes(b"anything")
    made = paddle_reshard.convert(source, tmp_path / "target", to="tp=2")
    reasons = dict(made.plan.targets[0].not_carried)
    for name in ("pytorch_model.bin", "old.pt"):
        assert "another library" in reasons[name]
        assert not (tmp_path / "target" / name).exists()


def test_a_file_with_the_name_of_a_folder_of_the_target_is_not_carried(tmp_path: Path) -> None:
    source = _copy("dense/single", tmp_path)
    (source / "model_state").write_bytes(b"anything")
    made = paddle_reshard.convert(source, tmp_path / "target", format="flex")
    assert "model_state" in dict(made.plan.targets[0].not_carried)
    assert (tmp_path / "target" / "model_state").is_dir()


# ------------------------------------------------------------------------------------------------- signals

HOUR_NS = 3600 * 10**9


def _older(folder: Path, pattern: str, by_ns: int) -> None:
    for path in folder.glob(pattern):
        time_ns = path.stat().st_mtime_ns - by_ns
        os.utime(path, ns=(time_ns, time_ns))


@pytest.mark.parametrize(
    ("case", "older", "newer"),
    [
        ("dense/single", "saved_signal_0", "model_state.pdparams"),
        ("dense/sh2_s1v1", "saved_signal_1", "rng_state_1.pth"),
        ("dense/fc_sh2_s1v2", "saved_signal_1", "master_weight/1_0.distcp"),
    ],
)
def test_a_signal_older_than_its_data_is_refused(case: str, older: str, newer: str, tmp_path: Path) -> None:
    source = _copy(case, tmp_path)
    paddle_reshard.plan(source, tmp_path / "target", to="tp=1", format="hybrid-plain", config=_config())
    _older(source, older, HOUR_NS)
    named = rf"^{re.escape(older)} is 1 h 00 min older than "
    with pytest.raises(CheckpointError, match=named) as refused:
        paddle_reshard.plan(source, tmp_path / "target", to="tp=1", format="hybrid-plain", config=_config())
    assert f"touch {older[:-1]}*" in str(refused.value)
    (source / older).touch()
    paddle_reshard.plan(source, tmp_path / "target", to="tp=1", format="hybrid-plain", config=_config())
    assert (source / newer).exists()


def _config() -> Path:
    return _files("dense/single")["config.json"]


def test_averages_may_be_saved_after_the_signals(tmp_path: Path) -> None:
    source = _copy("dense/mp2pp2sh2_s1v2_meta_ema", tmp_path)
    for path in source.iterdir():
        if not path.name.startswith("ema"):
            _older(source, path.name, HOUR_NS)
    assert paddle_reshard.plan(source, tmp_path / "target", to="tp=1").plan.groups


# ------------------------------------------------------------------------------------------------- staging


def test_a_staged_file_that_was_cut_is_an_error(tmp_path: Path) -> None:
    staging = Staging(tmp_path, "target")
    staging.files.mkdir()
    (staging.files / "a").write_bytes(b"1234")
    with pytest.raises(TargetError, match="a ends at byte 4, but bytes up to 6 were written"):
        staging.read_into("a", 2, memoryview(bytearray(4)))
