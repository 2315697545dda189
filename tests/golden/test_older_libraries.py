"""Checkpoints of PaddleFormers 0.4 to 1.1: known by their keys, resharded, exported, and moved to current names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import paddle_reshard
from paddle_reshard.pipeline.core.errors import ReshardError
from tests import oracle
from tests.conftest import case_directory
from tests.lab import reader

LLAMA, ERNIE = "pf041_llama_mp2sh2_s1v2_meta", "pf100_ernie4_5_mp2sh2_s1v2_meta"
AVERAGED = "pf111_llama_fc_sh2_s1v2_ema"


def checkpoint(name: str) -> Path:
    return case_directory(f"small-versions/{name}") / "checkpoint-3"


def options_of(name: str) -> dict[str, Any]:
    """A FlexCheckpoint has no ``config.json``; that of an earlier version has the same sizes."""
    if (checkpoint(name) / "config.json").exists():
        return {}
    return {"config": checkpoint("pf041_llama_single") / "config.json"}


def truth_of(name: str) -> dict[str, np.ndarray]:
    truth = oracle.read_truth(checkpoint(name).parent / "truth.safetensors")
    return {key: reader.f32(array) for key, array in truth.items()}


@pytest.mark.parametrize(
    ("source", "real"), [("pf041_llama_single", LLAMA), (LLAMA, "pf041_llama_single"), (ERNIE, ERNIE)]
)
def test_a_target_is_what_that_version_writes(source: str, real: str, tmp_path: Path) -> None:
    """Files, keys, their order, names of parameters, and ``model_meta.json`` byte for byte."""
    options = {"to": "tp=2,sharding=2", "sharding_strategy": "stage1v2", "format": "hybrid"}
    if real.endswith("single"):
        options = {"to": "tp=1", "format": "hybrid-plain"}
    before = checkpoint(source)
    if source == real:  # by way of one card
        paddle_reshard.convert(before, tmp_path / "card", to="tp=1", format="hybrid-plain")
        before = tmp_path / "card"
    paddle_reshard.convert(before, tmp_path / "made", **options)
    assert oracle.structure(tmp_path / "made") == oracle.structure(checkpoint(real))
    meta = [folder / "model_meta.json" for folder in (tmp_path / "made", checkpoint(real))]
    assert [path.exists() for path in meta] == ["meta" in real] * 2
    if "meta" in real:
        assert meta[0].read_bytes() == meta[1].read_bytes()


def test_current_names_for_a_job_of_the_current_version(tmp_path: Path) -> None:
    """Master weights, moments and all: llama's projections keep their layout, and the head turns."""
    source = checkpoint(LLAMA)
    paddle_reshard.convert(source, tmp_path / "made", to="pp=2", format="hybrid", convention="paddleformers")
    expected = {}
    for key, array in truth_of(LLAMA).items():
        turned = key.startswith("lm_head") and array.ndim == 2
        expected[key.replace("llama.", "model.")] = array.T if turned else array
    found = reader.read(tmp_path / "made", expected)
    assert found.keys() == expected.keys()
    assert [key for key in expected if not np.array_equal(found[key], expected[key])] == []
    assert (tmp_path / "made/trainer_state.bin").exists()
    assert not (tmp_path / "made/trainer_state.json").exists()


def test_projections_are_fused_for_a_job_of_the_current_version(tmp_path: Path) -> None:
    """``[q k v]`` of each group of heads, and ``[gate up]``, in every state."""
    source = checkpoint(ERNIE)
    paddle_reshard.convert(
        source, tmp_path / "made", to="tp=1", format="hybrid-plain", convention="paddleformers"
    )
    config = json.loads((source / "config.json").read_bytes())
    groups, truth = config["num_key_value_heads"], truth_of(ERNIE)
    found = reader.read(tmp_path / "made", {})
    for layer in range(config["num_hidden_layers"]):
        of_layer = f"model.layers.{layer}"
        for state in ("", ".w_0", ".moment1_0", ".moment2_0"):
            q, k, v = (
                truth[f"{of_layer}.self_attn.{one}_proj.weight{state}"].reshape(
                    config["hidden_size"], groups, -1
                )
                for one in "qkv"
            )
            fused = np.concatenate([q, k, v], axis=2).reshape(config["hidden_size"], -1)
            assert np.array_equal(found[f"{of_layer}.self_attn.qkv_proj.weight{state}"], fused)
            gate, up = (truth[f"{of_layer}.mlp.{one}_proj.weight{state}"] for one in ("gate", "up"))
            fused = np.concatenate([gate, up], axis=1)
            assert np.array_equal(found[f"{of_layer}.mlp.up_gate_proj.weight{state}"], fused)


def test_a_head_of_which_half_was_lost_is_refused_in_these_words(tmp_path: Path) -> None:
    config = checkpoint("pf041_llama_single") / "config.json"
    with pytest.raises(ReshardError, match=r"lm_head\.weight: .* \(32, 48\); .* the pieces of the other"):
        paddle_reshard.convert(
            checkpoint("pf041_llama_fc_mp2sh2_s1v2"), tmp_path / "made", to="tp=1", config=config
        )
    assert not (tmp_path / "made").exists()


def test_an_average_without_metadata_is_refused_and_the_rest_need_not_be(tmp_path: Path) -> None:
    told = r"ema_state/\d_0\.distcp: .* save the checkpoint once with PaddleFormers 1\.2, or move ema_state/ elsewhere"
    with pytest.raises(ReshardError, match=told):
        paddle_reshard.convert(checkpoint(AVERAGED), tmp_path / "made", to="tp=1", **options_of(AVERAGED))
    assert not (tmp_path / "made").exists()


def test_a_published_model_is_given_the_current_names(tmp_path: Path) -> None:
    """Only checkpoints have those of earlier versions."""
    folder = tmp_path / "model"
    paddle_reshard.convert(checkpoint(ERNIE), folder, format="huggingface")
    paddle_reshard.convert(folder, tmp_path / "made", format="hybrid-plain", to="tp=1")
    found = reader.read(tmp_path / "made", {})
    assert "model.layers.0.self_attn.qkv_proj.weight" in found


def test_a_job_of_an_earlier_version_is_not_given_current_arguments() -> None:
    with pytest.raises(ReshardError, match=r"arguments of paddleformers 0\.4 are not known.*tp=2"):
        paddle_reshard.launch(checkpoint(LLAMA))
    assert paddle_reshard.inspect(checkpoint(LLAMA)).facts()[1] == (
        "format",
        "hybrid, written by paddleformers 0.4, model family llama",
    )
