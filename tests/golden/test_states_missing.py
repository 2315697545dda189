"""Optimizer states that are gone are missed: each kind, each layer; what may well have none is named and counted."""

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import paddle_reshard
from paddle_reshard.pipeline.core.errors import CoverageError
from tests.conftest import case_directory

NAMES = "StructuredToParameterName@@"
State = dict[str, Any]
MASTERS = "master_weights"
LISTED = {
    "every accumulator": "master weights alone are what SGD keeps",
    "everything of the first layers": "a job may freeze the embedding and the first layers",
}
"""What cannot be told from a whole checkpoint → why."""


def _without(case: str, folder: Path, gone: Callable[[str, str], bool]) -> Path:
    """A copy of a case without the states for which ``gone`` holds, called with the parameter's key and the state."""
    [checkpoint] = case_directory(case).glob("checkpoint-*")
    shutil.copytree(checkpoint, folder)
    for path in folder.glob("optimizer*.pdopt"):
        model = pickle.loads(
            (folder / path.name.replace("optimizer", "model_state", 1)).with_suffix(".pdparams").read_bytes()
        )
        keys = {name: key for key, name in model[NAMES].items()}
        state: State = pickle.loads(path.read_bytes())
        masters = state.get(MASTERS, {})
        kept = {name: value for name, value in masters.items() if not gone(keys[name], MASTERS)}
        left: State = {}
        for name, value in state.items():
            owner = next(
                (p for p in keys if name.startswith((f"{p}_fp32_master_0_", f"{p}_moment", f"{p}_beta"))),
                None,
            )
            if owner is None or not gone(keys[owner], name.removeprefix(owner)):
                left[name] = value
        if MASTERS in state:
            left[MASTERS] = kept
        path.write_bytes(pickle.dumps(left, protocol=4))
    for signal in folder.glob("saved_signal*"):
        signal.touch()
    return folder


@pytest.mark.parametrize(
    ("case", "layer"), [("families/qwen3_single", 0), ("families/qwen3_single", 1), ("moe/moe_pp2", 1)]
)
def test_a_layer_without_states_is_missed(case: str, layer: int, tmp_path: Path) -> None:
    """The last of them as a stage whose file of the optimizer holds none."""
    of_stage = (
        (f"model.layers.{layer}.", "model.norm", "lm_head")
        if case.endswith("pp2")
        else (f"model.layers.{layer}.",)
    )
    source = _without(case, tmp_path / "source", lambda key, _: key.startswith(of_stage))

    with pytest.raises(
        CoverageError, match=rf"model\.layers\.{layer}\.\S+ \(optimizer states\).*--allow-missing"
    ):
        paddle_reshard.convert(source, tmp_path / "target", to="tp=2", replicas="report")

    done = tmp_path / "done"
    paddle_reshard.convert(source, done, to="tp=1,sharding=2", allow_missing=[f"{key}*" for key in of_stage])
    assert any("have no optimizer states" in remark for remark in _remarks(done))


def test_a_stage_whose_files_of_the_optimizer_hold_nothing_is_missed(tmp_path: Path) -> None:
    """The first, before which nothing is trained."""
    first = ("model.embed_tokens", "model.layers.0.")
    source = _without("moe/moe_pp2", tmp_path / "source", lambda key, _: key.startswith(first))

    allowed = r"--allow-missing 'model\.embed_tokens\.weight' 'model\.layers\.0\.\*'"
    with pytest.raises(CoverageError, match=rf"optimizer\.pp00\.pdopt holds no states.*{allowed}"):
        paddle_reshard.plan(source, to="tp=1")
    assert "optimizer.pp00.pdopt holds no states" in dict(paddle_reshard.inspect(source).facts())["left out"]
    with pytest.raises(CoverageError, match=r"model\.embed_tokens\.weight \(optimizer states\)"):
        paddle_reshard.plan(source, to="tp=1", allow_missing=("model.layers.0.*",))

    paddle_reshard.convert(source, tmp_path / "parameters", format="huggingface")
    frozen = ("model.embed_tokens.weight", "model.layers.0.*")
    paddle_reshard.convert(source, tmp_path / "done", to="tp=1", allow_missing=frozen)
    assert any("have no optimizer states" in remark for remark in _remarks(tmp_path / "done"))


def test_a_parameter_without_states_is_named_and_counted(tmp_path: Path) -> None:
    key = "model.layers.1.mlp.down_proj.weight"
    source = _without("families/qwen3_single", tmp_path / "source", lambda of, _: of == key)

    paddle_reshard.convert(source, tmp_path / "target", to="tp=1,sharding=2")

    said = f"1 of 19 parameters have no optimizer states, as if not trained: {key}"
    assert any(said in remark and "other buffers" in remark for remark in _remarks(tmp_path / "target"))
    assert said in dict(paddle_reshard.inspect(source).facts())["no states"]
    assert said in str(dict(paddle_reshard.plan(source, to="tp=1,sharding=2").facts())["remark"])


@pytest.mark.parametrize("what", LISTED)
def test_what_a_job_may_lack_is_converted(what: str, tmp_path: Path) -> None:
    first = ("model.embed_tokens", "model.layers.0.")

    def gone(key: str, state: str) -> bool:
        return state != MASTERS if what == "every accumulator" else key.startswith(first)

    source = _without("families/qwen3_single", tmp_path / "source", gone)
    paddle_reshard.convert(source, tmp_path / "target", to="tp=2")


def _remarks(folder: Path) -> list[str]:
    manifest = json.loads((folder / "paddle_reshard.json").read_text())
    return list(manifest.get("remarks", []))
