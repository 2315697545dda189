"""The small files of a checkpoint agree with each other, and ``verify`` sees every entry of them that differs.

Every entry of every small file of two real checkpoints is changed, one at a time. The pickles are read and written
here by Python's own ``pickle`` with a stand-in for the trainer's class.
"""

from __future__ import annotations

import json
import math
import pickle
import re
import shutil
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import paddle_reshard
from paddle_reshard.pipeline.core.errors import CheckpointError
from paddle_reshard.pipeline.indexing.small_files import (
    MAY_DIFFER_IN_CONFIG,
    compare_small_files,
    differences,
)
from paddle_reshard.storage.local.source import LocalSource
from tests.hostile.damage import copied, edited

PADDLENLP, PADDLEFORMERS = "nlp_fused_mp2", "sh2_s1v1_meta_fp32"
TRAINER_MODULE = "paddleformers.trainer.trainer_callback"
TENSORS = re.compile(r"(model_state|optimizer|ema)\..*")
MAY_DIFFER_AS_FILES = {
    r"paddle_reshard\.json": "our own manifest: when and from what the checkpoint was made",
    r"model_meta\.json|.*\.index\.json|(.*/)?\d+\.metadata|static_name_to_dyg_name\.json": (
        "index of the tensors, which are compared themselves"
    ),
    r"rng_state(_\d+)?\.pth": "random states belong to the ranks of one topology",
    r"training_args\.bin": "arguments of the job that saved it; never read back",
    r"saved_signal_\d+|save_signal_TMP_\d+|\..*|async_save_info\.json": "completion markers of the trainer",
}
"""Pattern of a file's path → why it may differ, or be missing, between equal checkpoints."""


@pytest.fixture
def nlp(tmp_path: Path) -> Path:
    return copied(PADDLENLP, tmp_path / "checkpoint-3")


@pytest.fixture
def formers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint whose ``trainer_state.bin`` is the pickle of an object; here that is of a class of ours."""
    module = types.ModuleType(TRAINER_MODULE)
    module.TrainerState = type("TrainerState", (), {"__module__": TRAINER_MODULE})  # type: ignore[attr-defined]
    for name in ("paddleformers", "paddleformers.trainer"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, TRAINER_MODULE, module)
    return copied(PADDLEFORMERS, tmp_path / "checkpoint-3")


def load(path: Path) -> Any:
    """The plain values of a small file."""
    if path.suffix == ".json":
        return json.loads(path.read_bytes())
    found = pickle.loads(path.read_bytes())
    return found if isinstance(found, dict) else vars(found)


def store(path: Path, values: Any) -> None:
    if path.suffix == ".json":
        path.write_text(json.dumps(values))
    elif path.name == "trainer_state.bin":
        state = sys.modules[TRAINER_MODULE].TrainerState()  # type: ignore[attr-defined]
        vars(state).update(values)
        path.write_bytes(pickle.dumps(state, 4))
    else:
        path.write_bytes(pickle.dumps(values, 4))


def edit(path: Path, **entries: Any) -> None:
    store(path, {**load(path), **entries})


# ---------------------------------------------------------------------------------------- of one checkpoint


def refused(source: Path, target: Path) -> str:
    with pytest.raises(CheckpointError) as error:
        paddle_reshard.plan(source, target, to="tp=1")
    return str(error.value)


def test_a_trainer_state_of_another_step_is_refused(formers: Path, tmp_path: Path) -> None:
    """As its object says; one in JSON is among `refusals.py`."""
    edit(formers / "trainer_state.bin", global_step=6)
    told = refused(formers, tmp_path / "x")
    assert "trainer_state.bin: global_step is 6, last_epoch in scheduler.pdparams is 3" in told


def test_steps_that_were_skipped_are_counted_by_the_trainer_alone(nlp: Path, tmp_path: Path) -> None:
    """PaddleNLP: ``skip_data_intervals``."""
    edit(nlp / "trainer_state.json", global_step=6)
    arguments = (nlp / "training_args.bin").read_bytes()
    assert b"skip_data_intervals\x94N" in arguments
    assert "global_step is 6" in refused(nlp, tmp_path / "x")
    (nlp / "training_args.bin").write_bytes(
        arguments.replace(b"skip_data_intervals\x94N", b"skip_data_intervals\x94]")
    )
    paddle_reshard.plan(nlp, tmp_path / "x", to="tp=1")
    edit(nlp / "trainer_state.json", global_step=2)  # but no step is made that is not counted
    assert "global_step is 2" in refused(nlp, tmp_path / "x")


def test_a_loss_of_nan_in_the_history_is_no_reason_to_refuse(nlp: Path, tmp_path: Path) -> None:
    edit(nlp / "trainer_state.json", log_history=[{"loss": math.nan, "step": 1}], best_metric=math.inf)
    assert paddle_reshard.plan(nlp, tmp_path / "x", to="tp=1").plan.groups


# ------------------------------------------------------------------------------------------------- of two


def leaves(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every value that is no container, and of every empty container."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    if not inner or not value:
        yield at
    for key, entry in inner:
        yield from leaves(entry, (*at, key))


def another(value: Any) -> list[Any]:
    """Values that are another one, as close as can be."""
    if isinstance(value, bool) or value is None:
        return [not value, 0]
    if isinstance(value, int):
        return [value + 1, float(value)]
    if isinstance(value, float):
        return [math.nextafter(value, math.inf), math.nan, -value]
    return [f"{value} ", None] if isinstance(value, str) else [None]


@pytest.mark.parametrize("name", ["nlp", "formers"])
def test_every_change_of_every_entry_is_seen_or_listed(
    name: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    original: Path = request.getfixturevalue(name)
    one = Path(shutil.copytree(original, tmp_path / "one", copy_function=shutil.copyfile))
    assert compare_small_files(LocalSource(one), LocalSource(original)) == []
    changes = 0
    for path in sorted(original.iterdir()):
        if TENSORS.fullmatch(path.name) or any(re.fullmatch(p, path.name) for p in MAY_DIFFER_AS_FILES):
            continue
        values, content = load(path), path.read_bytes()
        for at in leaves(values):
            inner = values
            for key in at:
                inner = inner[key]
            for other in (*(edited(values, at, v) for v in another(inner)), edited(values, at)):
                store(path, other)
                try:
                    found = compare_small_files(LocalSource(one), LocalSource(original))
                except CheckpointError as error:  # NaN is not JSON
                    found = [error]  # type: ignore[list-item]
                listed = path.name == "config.json" and set(at) & set(MAY_DIFFER_IN_CONFIG)
                assert bool(found) != bool(listed), (path.name, at, other)
                changes += 1
        path.write_bytes(content)
    assert changes > 100


def test_an_empty_file_equals_an_empty_file_alone(tmp_path: Path) -> None:
    contents = {"a": "", "b": "", "c": "{}"}
    for name, content in contents.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "added_tokens.json").write_text(content)
    a, b, c = (LocalSource(tmp_path / name) for name in contents)
    assert compare_small_files(a, b) == []
    assert [odd.what for odd in compare_small_files(a, c)] == ["added_tokens.json"]


@pytest.mark.parametrize(
    ("name", "entries", "told"),
    [
        ("config.json", {"rms_norm_eps": 1e-5}, "config.json: rms_norm_eps: 1e-06 in A, 1e-05 in B"),
        ("generation_config.json", {"eos_token_id": 7}, "generation_config.json: eos_token_id: 2 in A, 7 in B"),
    ],
)  # fmt: skip
def test_verify_reports_differences_besides_the_tensors(
    name: str, entries: dict[str, Any], told: str, nlp: Path, tmp_path: Path
) -> None:
    before = Path(shutil.copytree(nlp, tmp_path / "before", copy_function=shutil.copyfile))
    assert paddle_reshard.verify(before, nlp)
    edit(nlp / name, **entries)
    report = paddle_reshard.verify(before, nlp)
    assert [f"{d.tensor}: {d.detail}" for d in report.differences] == [told]
    assert paddle_reshard.verify(before, nlp, states=["param"])
    (nlp / name).unlink()
    if name != "config.json":
        assert not paddle_reshard.verify(before, nlp)
        assert paddle_reshard.verify(before, nlp, subset=True)


def test_verify_sees_another_schedule(nlp: Path, tmp_path: Path) -> None:
    before = Path(shutil.copytree(nlp, tmp_path / "before", copy_function=shutil.copyfile))
    for path in (*nlp.glob("optimizer.*"), nlp / "scheduler.pdparams"):
        values = pickle.loads(path.read_bytes())
        values.get("LR_Scheduler", values)["last_epoch"] = 999_999
        path.write_bytes(pickle.dumps(values, 4))
    (nlp / "trainer_state.json").unlink()
    (before / "trainer_state.json").unlink()
    report = paddle_reshard.verify(before, nlp)
    assert {d.tensor for d in report.differences} == {
        "LR_Scheduler.last_epoch",
        "scheduler.pdparams: last_epoch",
    }


def test_values_are_compared_by_their_bits() -> None:
    assert not list(differences({"a": [math.nan, 0.0, 1]}, {"a": [math.nan, 0.0, 1]}))
    for one, two in ((0.0, -0.0), (1, 1.0), (True, 1), (None, 0), ("1", 1), ([1], (1,)), ({}, None)):
        assert list(differences(one, two)), (one, two)
    assert list(differences(math.nan, math.copysign(math.nan, -1)))
