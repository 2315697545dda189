"""``resume``: a job goes on by itself, on one node."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import paddle_reshard
from paddle_reshard.pipeline.core.errors import CheckpointError, TargetError, UsageError
from paddle_reshard.pipeline.core.topology import Topology
from paddle_reshard.pipeline.training.launcher import Node
from paddle_reshard.pipeline.training.resume_point import ResumePoint, Start
from tests.conftest import REPO, case_directory
from tests.resume.test_signals import SLOW

SOURCE = case_directory("mp2pp2sh2_s1v2_meta_ema") / "checkpoint-3"
SAVED_WITH = "tp=2,pp=2,sharding=2"
TRAINER = """#!{python}
import json, os, sys
print(json.dumps({{"words": sys.argv[1:], "threads": os.environ.get("OPENBLAS_NUM_THREADS")}}))
"""


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return saved(tmp_path / "run", 3)


def saved(run: Path, step: int) -> Path:
    shutil.copytree(SOURCE, run / f"checkpoint-{step}", copy_function=shutil.copyfile)
    return run


class Told(list[str]):
    """What the user is told."""

    def find(self, words: str) -> bool:
        return any(words in one for one in self)


def start(run: Path | str, local: Path, to: str, told: Told | None = None, **options: Any) -> Start:
    say = (Told() if told is None else told).append
    return Start(
        str(run),
        str(local),
        Node(0, 1),
        Topology.parse(to),
        None,
        options,
        lambda *_: None,
        say,  # type: ignore[arg-type]
    )


def point_of(start: Start) -> ResumePoint:
    return start.make_ready(start.find(), lambda whole: None)


def test_a_job_of_the_same_topology_reads_the_checkpoint_itself(run: Path, tmp_path: Path) -> None:
    found = point_of(start(run, tmp_path / "local", SAVED_WITH))
    assert found.path == str(run / "checkpoint-3") and not (tmp_path / "local").exists()
    assert found.arguments == paddle_reshard.launch(run / "checkpoint-3").arguments
    assert point_of(start(run, tmp_path / "local", SAVED_WITH + ",dp=2")).path == found.path


def test_adapters_are_not_loaded_by_the_first_rank_alone(tmp_path: Path) -> None:
    """With ``load_sharded_model`` the trainer leaves all others as they were initialised (``docs/lora.md``)."""
    case = case_directory("states/lora_pp2") / "checkpoint-3"
    shutil.copytree(case, tmp_path / "run" / "checkpoint-3", copy_function=shutil.copyfile)
    found = point_of(start(tmp_path / "run", tmp_path / "local", "sharding=2"))
    assert found.arguments is not None and "load_sharded_model" not in found.arguments
    assert not (Path(found.path) / "model_meta.json").exists()
    with pytest.raises(UsageError, match="the first rank alone"):
        point_of(start(tmp_path / "run", tmp_path / "other", "sharding=2", format="hybrid"))
    assert not list((tmp_path / "other").rglob("*.pdopt"))


def test_nor_from_a_checkpoint_that_is_sharded_already(tmp_path: Path) -> None:
    case = case_directory("states/lora_pp2") / "checkpoint-3"
    paddle_reshard.convert(case, tmp_path / "run" / "checkpoint-3", to="sharding=2")
    assert (tmp_path / "run" / "checkpoint-3" / "model_meta.json").exists()
    found = point_of(start(tmp_path / "run", tmp_path / "local", "sharding=2"))
    assert found.arguments is not None and "load_sharded_model" not in found.arguments


def test_parameters_that_the_trainer_saves_and_does_not_load_are_made_loadable(tmp_path: Path) -> None:
    """``save_to_hf``, its default: ``model.safetensors`` beside the optimizer's file, and no ``model_state``."""
    case = case_directory("single_tohf") / "checkpoint-3"
    shutil.copytree(case, tmp_path / "run" / "checkpoint-3", copy_function=shutil.copyfile)
    found = point_of(start(tmp_path / "run", tmp_path / "local", "tp=1"))
    assert {"model_state.pdparams", "optimizer.pdopt"} <= {path.name for path in Path(found.path).iterdir()}


def test_a_job_of_another_topology_reads_what_convert_makes(run: Path, tmp_path: Path) -> None:
    found = point_of(start(run, tmp_path / "local", "pp=2"))
    paddle_reshard.convert(run / "checkpoint-3", tmp_path / "expected", to="pp=2")
    names = {path.name for path in (tmp_path / "expected").iterdir()} - {"paddle_reshard.json"}
    assert names == {path.name for path in Path(found.path).iterdir()} - {"paddle_reshard.json"}
    for name in names:
        assert (Path(found.path) / name).read_bytes() == (tmp_path / "expected" / name).read_bytes()
    expected = dict(paddle_reshard.launch(tmp_path / "expected").arguments)
    assert found.arguments == {**expected, "resume_from_checkpoint": found.path}
    assert Path(found.path).name == "checkpoint-3"


def test_what_an_earlier_start_left_is_used_again_and_no_other(run: Path, tmp_path: Path) -> None:
    local, told = tmp_path / "local", Told()
    first = point_of(start(run, local, "tp=2"))
    path = Path(first.path)
    stamps = {path: path.stat().st_mtime_ns for path in path.iterdir()}
    (path / "flex-ckpt.auto_generated.metadata").write_bytes(b"Paddle leaves it where it loads")
    assert point_of(start(run, local, "tp=2", told)) == first
    assert told.find("used again") and stamps == {path: path.stat().st_mtime_ns for path in stamps}

    other = point_of(start(run, local, "pp=2"))  # the same ranks of another job
    assert other.path == first.path and other.whole != first.whole
    assert paddle_reshard.launch(other.path).arguments["pipeline_model_parallel_size"] == 2

    (path / "flex-ckpt.auto_generated.metadata").write_bytes(b"")
    saved(run, 6)
    (local / "ranks-0-1" / "checkpoint-notes").mkdir()
    newer = point_of(start(run, local, "tp=2"))
    assert Path(newer.path).name == "checkpoint-6"
    assert {path.name for path in (local / "ranks-0-1").iterdir()} == {"checkpoint-6", "checkpoint-notes"}


@pytest.mark.parametrize("damage", ["shorter", "gone", "other bytes"])
def test_what_is_damaged_of_an_earlier_start_is_made_again(damage: str, run: Path, tmp_path: Path) -> None:
    told = Told()
    path = Path(point_of(start(run, tmp_path / "local", "tp=2")).path)
    whole = {file: file.read_bytes() for file in path.iterdir() if file.name != "paddle_reshard.json"}
    file = path / "ema.tp00.pdopt"
    if damage == "gone":
        file.unlink()
    else:
        file.write_bytes(whole[file][:-10] + b"x" * (10 * (damage == "other bytes")))
    (path / "flex-ckpt.auto_generated.metadata").write_bytes(b"Paddle leaves it where it loads")
    point_of(start(run, tmp_path / "local", "tp=2", told))
    assert told.find("ema.tp00.pdopt") and told.find("made again")
    assert {file: file.read_bytes() for file in path.iterdir() if file.name != "paddle_reshard.json"} == whole


def test_files_of_others_are_not_touched(run: Path, tmp_path: Path) -> None:
    local = tmp_path / "local"
    path = Path(point_of(start(run, local, "tp=2")).path)
    (path / "notes.txt").write_text("mine")
    with pytest.raises(TargetError, match=r"notes\.txt"):
        point_of(start(run, local, "pp=2"))
    saved(run, 6)
    other = local / "ranks-0-1" / "checkpoint-1"
    paddle_reshard.convert(run / "checkpoint-3", other, to="tp=2")  # no portion
    point_of(start(run, local, "tp=2"))
    assert (path / "notes.txt").read_text() == "mine"
    assert (other / "model_state.tp00.pdparams").exists()


def test_a_damaged_checkpoint_is_passed_over(run: Path, tmp_path: Path) -> None:
    for step in (6, 9):
        saved(run, step)
    (run / "checkpoint-9" / "saved_signal_5").unlink()
    (run / "checkpoint-6" / "optimizer.tp01_pp01_shard01.pdopt").unlink()
    told = Told()
    assert point_of(start(run, tmp_path / "local", SAVED_WITH, told)).checkpoint == "checkpoint-3"
    assert told.find("checkpoint-9 is passed over") and told.find("checkpoint-6 is passed over")
    shutil.rmtree(run / "checkpoint-3")
    with pytest.raises(
        CheckpointError, match=r"no complete checkpoint: checkpoint-6: .*optimizer.tp01_pp01_shard01"
    ):
        point_of(start(run, tmp_path / "local", SAVED_WITH))
    shutil.rmtree(run / "checkpoint-6")  # of the first save nothing is left but what its job did not finish
    assert point_of(start(run, tmp_path / "local", SAVED_WITH)) == ResumePoint(None)


def test_nothing_is_moved_before_the_command_is_known_to_fit(run: Path, tmp_path: Path) -> None:
    def refuse(*_: object) -> None:
        raise UsageError("contradicts")

    ready = start(run, tmp_path / "local", "tp=2")
    for to in ("tp=2", SAVED_WITH):
        asked = Start(**{**vars(ready), "to": Topology.parse(to), "check": refuse})
        with pytest.raises(UsageError, match="contradicts"):
            point_of(asked)
    assert not (tmp_path / "local").exists()


def resume(*arguments: object, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "paddle_reshard", "resume", *map(str, arguments)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("OPENBLAS")}
    return subprocess.run(
        command, capture_output=True, text=True, timeout=300, env={**environment, **variables}
    )


@pytest.fixture
def trainer(tmp_path: Path) -> Path:
    script = tmp_path / "train me"
    script.write_text(TRAINER.format(python=sys.executable))
    script.chmod(0o755)
    return script


def test_the_command_takes_the_place_of_resume(run: Path, trainer: Path, tmp_path: Path) -> None:
    local = tmp_path / "local"
    done = resume(run, "--to", "tp=2", "--local", local, "--", trainer, "--json", "--seed", "1")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    path = local / "ranks-0-1" / "checkpoint-3"
    expected = paddle_reshard.launch(path).command_line().split()
    assert answer == {"words": ["--json", "--seed", "1", *expected], "threads": None}  # as the job has it
    assert "checkpoint-3: the files of ranks 0-1 of tp=2 are in" in done.stderr


def test_a_signal_ends_a_conversion_and_the_next_start_goes_on(
    run: Path, trainer: Path, tmp_path: Path
) -> None:
    options = ("--to", "tp=1", "--local", tmp_path / "local", "--", trainer)
    command = [sys.executable, "-c", SLOW, "plain", "resume", run, *options]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(list(map(str, command)), cwd=REPO, **pipes) as process:
        assert process.stdout is not None and process.stdout.readline() == "moving\n"
        process.send_signal(signal.SIGTERM)
        printed, errors = process.communicate(timeout=120)
    assert (process.returncode, printed) == (128 + signal.SIGTERM, "") and "interrupted by SIGTERM" in errors
    path = tmp_path / "local/ranks-0/checkpoint-3"
    assert not path.exists()
    sized = "from tests.sized import size_commands; size_commands(100_000)\n"  # in the same groups as before
    again = f"{sized}from paddle_reshard.pipeline.cli.main import main; main()"
    done = subprocess.run(
        list(map(str, [sys.executable, "-c", again, "resume", run, *options])),
        capture_output=True,
        text=True,
        timeout=300,
        cwd=REPO,
    )
    assert json.loads(done.stdout)["words"][1] == str(path) and "from an earlier run" in done.stderr
    assert paddle_reshard.check(path)


def test_a_job_without_a_checkpoint_begins(trainer: Path, tmp_path: Path) -> None:
    done = resume(
        tmp_path / "new", "--to", "tp=2", "--local", tmp_path / "local", "--", trainer, "--seed", "1"
    )
    assert json.loads(done.stdout)["words"] == ["--seed", "1"]
    assert "no checkpoint yet; the job begins" in done.stderr


def test_contradictions_are_wrong_usage(run: Path, trainer: Path, tmp_path: Path) -> None:
    done = resume(
        run, "--to", "tp=2", "--local", tmp_path / "local", "--", trainer, "--tensor_model_parallel_size", "4"
    )
    assert done.returncode == 2 and not done.stdout
    assert "--tensor_model_parallel_size 4, and the checkpoint needs 2" in done.stderr
    assert not (tmp_path / "local").exists()


def test_a_forgotten_mark_before_the_command_is_told(run: Path, tmp_path: Path) -> None:
    done = resume(run, "--to", "tp=2", "--local", tmp_path / "local", "python", "--seed", "1")
    assert done.returncode == 2 and "-- is missing before COMMAND" in done.stderr


def test_auto_takes_the_nearest_topology_of_the_launchers_cards(
    run: Path, trainer: Path, tmp_path: Path
) -> None:
    options = (run, "--cards", "auto", "--local", tmp_path / "local", "--", trainer)
    done = resume(*options, PADDLE_NPROC_PER_NODE="4", PADDLE_NNODES="1", PADDLE_RANK="0")
    nearest = paddle_reshard.plan(run / "checkpoint-3", cards=4).nearest
    assert nearest is not None and f"{nearest.topology}, the nearest of 4 cards" in done.stderr
    words = json.loads(done.stdout)["words"]
    for name, value in nearest.arguments.items():
        if name != "resume_from_checkpoint":
            assert words[words.index(f"--{name}") + 1] == str(value).replace("True", "true")
