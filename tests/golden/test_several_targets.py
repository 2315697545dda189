"""Several targets of one reading are what separate conversions make, byte for byte."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import paddle_reshard
from paddle_reshard.pipeline.core.errors import DriftError, UsageError
from paddle_reshard.pipeline.core.events import Event, Progress
from paddle_reshard.pipeline.request.options import TargetOptions
from paddle_reshard.pipeline.request.parse import parse_target
from tests.conftest import case_directory
from tests.jobs.command import run_here

SOURCE = case_directory("mp2sh2_s1v2_meta_mid") / "checkpoint-3"
TARGETS: dict[str, TargetOptions] = {
    "cards": {"to": "tp=1"},
    "stages": {"to": "tp=2,pp=2", "layout": {"sequence_parallel": True}},
    "shards": {"to": "sharding=4", "sharding_strategy": "stage1v2", "format": "hybrid-plain"},
    "model": {"format": "huggingface", "max_shard_size": "2MB"},
    "wide": {"format": "huggingface", "dtype": "float32"},
}


def contents(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name != "paddle_reshard.json"
    }


@pytest.fixture(scope="module")
def separate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("separate")
    for name, options in TARGETS.items():
        paddle_reshard.convert(SOURCE, made / name, **options)
    return made


def test_together_they_are_the_same(separate: Path, tmp_path: Path) -> None:
    report = paddle_reshard.convert(SOURCE, {tmp_path / name: of for name, of in TARGETS.items()})
    for name in TARGETS:
        assert contents(tmp_path / name) == contents(separate / name)
        assert paddle_reshard.check(tmp_path / name).intact
    carried = sum(file.size_bytes for file in report.plan.plan.carried)
    files = {f.path: f.size_bytes for f in report.plan.plan.source_files}
    assert report.moved.read_bytes - carried <= 1.05 * sum(files.values())
    assert not list(tmp_path.glob(".*"))


def test_a_killed_conversion_resumes(separate: Path, tmp_path: Path) -> None:
    asked: dict[Any, TargetOptions] = {tmp_path / name: TARGETS[name] for name in ("cards", "model")}
    moved = 0

    def kill(event: Event) -> None:
        nonlocal moved
        moved += isinstance(event, Progress)
        if moved == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        paddle_reshard.convert(SOURCE, asked, observe=kill)
    assert not (tmp_path / "cards").exists()
    assert not (tmp_path / "model").exists()
    report = paddle_reshard.convert(SOURCE, asked, resume=True)
    assert report.moved.resumed_groups > 0
    for name in ("cards", "model"):
        assert contents(tmp_path / name) == contents(separate / name)
    before = {path: path.read_bytes() for path in tmp_path.rglob("paddle_reshard.json")}
    again = paddle_reshard.convert(SOURCE, asked, resume=True)
    assert (again.moved.written_bytes, again.moved.resumed_groups) == (0, again.plan.plan.groups)
    assert before == {path: path.read_bytes() for path in tmp_path.rglob("paddle_reshard.json")}


def test_one_that_is_there_already_stays(separate: Path, tmp_path: Path) -> None:
    """A run that was killed between publishing two targets."""
    asked: dict[Any, TargetOptions] = {tmp_path / name: TARGETS[name] for name in ("cards", "model")}
    paddle_reshard.convert(SOURCE, asked)
    manifest = (tmp_path / "cards" / "paddle_reshard.json").read_bytes()
    for path in (tmp_path / "model").iterdir():
        path.unlink()
    (tmp_path / "model").rmdir()
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "cards").iterdir()}
    paddle_reshard.convert(SOURCE, asked, resume=True)
    assert contents(tmp_path / "model") == contents(separate / "model")
    assert before == {path: path.stat().st_mtime_ns for path in (tmp_path / "cards").iterdir()}
    assert json.loads(manifest)["files"].keys() == contents(tmp_path / "cards").keys()


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("a", "write DST:FORMAT"),
        ("a:tensorflow", "write DST:FORMAT"),
        ("a:hybrid", "--to is missing"),
        ("a:hybrid:tp=2,dtype=float32", "--dtype does not apply to --format hybrid"),
        ("a:huggingface:state", "'state' has no value"),
        ("a:huggingface:state=", "'state=' has no value"),
        ("a:huggingface:tp=2", "--to does not apply to .* options for huggingface: --state, --dtype,"),
        (
            "a:flex:shards=2",
            "unknown name in 'shards=2'; known: an axis or sharding-strategy, layout, max-shard-size, paddle-version",
        ),
        ("a:hybrid:cp=2", "unknown name in 'cp=2'; known: an axis or sharding-strategy, layout"),
        ("a:flex:max-shard-size=2GB,max-shard-size=3GB", "max-shard-size is given twice"),
    ],
)
def test_a_malformed_target_is_refused(text: str, told: str) -> None:
    with pytest.raises(UsageError, match=told):
        parse_target(text)


def test_two_targets_may_not_be_the_same_folder(tmp_path: Path) -> None:
    asked: dict[Any, TargetOptions] = {tmp_path / "a": {"to": "tp=1"}, tmp_path / "a" / "b": {"to": "tp=1"}}
    with pytest.raises(UsageError, match="two targets may not be inside each other"):
        paddle_reshard.plan(SOURCE, asked)
    asked = {str(tmp_path / "a"): {"to": "tp=1"}, f"{tmp_path}/b/../a": {"format": "flex"}}
    with pytest.raises(UsageError, match="two targets are the same folder"):
        paddle_reshard.plan(SOURCE, asked)


def test_each_target_is_reported_with_its_path(tmp_path: Path) -> None:
    places = {str(tmp_path / "cards"): "hybrid:tp=2", str(tmp_path / "model"): "huggingface:dtype=float32"}
    targets = [text for place, form in places.items() for text in ("--target", f"{place}:{form}")]
    told = run_here("plan", SOURCE, *targets)
    assert f"{tmp_path}/cards: hybrid, tp=2, no sharding" in told.stdout
    assert f"{tmp_path}/model: Hugging Face, param, float32" in told.stdout
    data = json.loads(run_here("plan", SOURCE, *targets, "--json").stdout)
    assert {target["path"]: target["format"] for target in data["targets"]} == {
        place: form.split(":")[0] for place, form in places.items()
    }
    cards, model = data["targets"]
    assert "moment1" in model["states_not_carried"] and not cards["states_not_carried"]
    assert "rng_state_0.pth" in {left["path"] for left in model["not_carried"]}
    assert data["not_carried"] == cards["not_carried"] + model["not_carried"]
    misplaced = run_here("plan", SOURCE, *targets, "--to", "tp=1")
    assert (
        "--to: with several targets, give it inside each --target DST:FORMAT:NAME=VALUE" in misplaced.stderr
    )


def test_what_one_target_refuses_another_does_not_hide(tmp_path: Path) -> None:
    """A parameter that is not the cast of its master weight is lost where only the master weight goes out."""
    source = tmp_path / "source"
    paddle_reshard.convert(SOURCE, source, to="tp=1")
    weights = source / "model_state.pdparams"
    content = bytearray(weights.read_bytes())
    content[len(content) // 2] ^= 1
    weights.write_bytes(content)
    sharded: TargetOptions = {"to": "sharding=2", "sharding_strategy": "stage1v2"}
    asked: dict[Any, TargetOptions] = {tmp_path / "a": sharded, tmp_path / "b": {"format": "huggingface"}}
    model: dict[str, Any] = {"format": "huggingface", "master_weights": "report"}
    paddle_reshard.convert(source, tmp_path / "alone", **model)
    for target in ({tmp_path / "d": sharded}, asked):
        with pytest.raises(DriftError, match="the target would keep the master weight only"):
            paddle_reshard.convert(source, target)
    assert not (tmp_path / "a").exists()
    assert not (tmp_path / "b").exists()
