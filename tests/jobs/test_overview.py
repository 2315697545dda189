"""``ls``: the checkpoints of a run, complete or not, and what was made of them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import paddle_reshard
from tests.conftest import case_directory
from tests.published import checked

SOURCE = case_directory("mp2pp2sh2_s1v2_meta_ema") / "checkpoint-3"
STATES = (
    "param",
    "master_weight",
    "moment1",
    "moment2",
    "beta1_pow_acc",
    "beta2_pow_acc",
    "ema_master_weight",
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose last checkpoint lacks a file of a rank, and a folder with the conversion of its first."""
    root = tmp_path_factory.mktemp("run") / "run"
    for name in ("checkpoint-3", "checkpoint-6", "checkpoint-20"):
        shutil.copytree(SOURCE, root / name, copy_function=shutil.copyfile)
    (root / "checkpoint-6" / "saved_signal_5").unlink()
    (root / "checkpoint-20" / "optimizer.tp01_pp01_shard01.pdopt").unlink()
    (root / "notes").mkdir()
    paddle_reshard.convert(root / "checkpoint-3", root.parent / "converted" / "checkpoint-3", to="tp=1")
    return root


def test_checkpoints_are_listed_by_step_with_what_is_missing(run: Path) -> None:
    found = paddle_reshard.ls(run, targets=[run.parent / "converted"])
    first, unfinished, damaged = found
    assert (first.name, first.step, first.format, first.topology) == (
        *("checkpoint-3", 3, "hybrid"),
        "tp=2,pp=2,sharding=2",
    )
    assert (first.sharding_strategy, first.states, first.problem) == ("stage1v2", STATES, None)
    written = [*SOURCE.glob("*.pdparams"), *SOURCE.glob("*.pdopt")]
    assert first.tensor_bytes == sum(p.stat().st_size for p in written if p.name != "scheduler.pdparams")
    assert first.converted_to == (f"{run.parent / 'converted' / 'checkpoint-3'} (tp=1)",)
    assert "7 saved_signal_* files for 8 ranks" in str(unfinished.problem) and unfinished.converted_to == ()
    assert damaged.step == 20 and damaged.format is None
    assert found.rows()[-1][:4] == ("checkpoint-20", "?", "?", "?")
    assert "optimizer.tp01_pp01_shard01.pdopt" in str(damaged.problem)


@pytest.mark.parametrize("reverse", [False, True])
def test_a_run_whose_topology_changes_is_complete_all_the_same(tmp_path: Path, reverse: bool) -> None:
    """The ranks of the step before are no longer there, and with them the files that bear their numbers."""
    cases = ("mp2pp2", "mp2", "pp2", "sh2_s1v2", "sh2_s2", "mp2sh2_s1v1_meta")
    for step, case in enumerate(reversed(cases) if reverse else cases):
        (source,) = case_directory(case).glob("checkpoint-3")
        (tmp_path / f"checkpoint-{step}").symlink_to(source)
    found = paddle_reshard.ls(tmp_path, allow_links=True)
    assert [(checkpoint.name, checkpoint.problem) for checkpoint in found.checkpoints] == [
        (f"checkpoint-{step}", None) for step in range(len(cases))
    ]


def test_what_convert_refuses_for_an_older_signal_is_not_complete(tmp_path: Path) -> None:
    shutil.copytree(SOURCE, tmp_path / "checkpoint-3", copy_function=shutil.copyfile)
    signal = tmp_path / "checkpoint-3" / "saved_signal_5"
    os.utime(signal, (signal.stat().st_mtime - 7200,) * 2)
    (listed,) = paddle_reshard.ls(tmp_path).checkpoints
    assert listed.format == "hybrid"
    with pytest.raises(paddle_reshard.CheckpointError, match=r"saved_signal_5 is .* older than") as refused:
        paddle_reshard.plan(tmp_path / "checkpoint-3", to="tp=1")
    assert listed.problem == str(refused.value)


def test_conversions_name_their_source_as_published(run: Path) -> None:
    command = [sys.executable, "-m", "paddle_reshard", "ls", str(run.parent / "converted")]
    done = subprocess.run([*command, "--json"], capture_output=True, text=True, check=True, timeout=120)
    (converted,) = checked(done)["checkpoints"]
    assert converted["made_from"] == str(run / "checkpoint-3")
    assert (converted["topology"], converted["problem"]) == ("tp=1", None)
    assert json.loads(done.stdout)["path"] == str(run.parent / "converted")


def test_a_folder_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(paddle_reshard.ListingError, match="no such folder"):
        paddle_reshard.ls(tmp_path / "nowhere")
    assert paddle_reshard.ls(tmp_path).checkpoints == ()


def test_a_finished_checkpoint_that_is_not_whole_is_damaged(tmp_path: Path) -> None:
    """A minute after the last change; before, somebody may be copying it."""
    folder = shutil.copytree(SOURCE, tmp_path / "checkpoint-3")
    file = folder / "optimizer.tp00_pp00_shard00.pdopt"
    times = file.stat()
    file.write_bytes(file.read_bytes()[:5000])
    (copied,) = paddle_reshard.ls(tmp_path)
    assert copied.problem and file.name in copied.problem and "damaged" not in copied.problem
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    (found,) = paddle_reshard.ls(tmp_path)
    assert found.problem == f"damaged: it is marked as finished, but {copied.problem}"
    (folder / "saved_signal_7").unlink()
    (waiting,) = paddle_reshard.ls(tmp_path)
    assert waiting.problem and "damaged" not in waiting.problem
