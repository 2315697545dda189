"""Rows of vocabulary are added and removed only on request, and nothing else changes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import paddle_reshard
from tests import oracle
from tests.conftest import case_directory, hybrid_cases

CASES = [
    n
    for n in ("mp2pp2sh2_s1v2_meta_ema", "mp2_tied", "nlp_fused_mp2", "sh2_s1v1_meta_fp32")
    if n in hybrid_cases()
]


def _resized(name: str, array: np.ndarray, key: str, size: int) -> np.ndarray:
    """The truth with a vocabulary of ``size`` rows, zeros where there were none."""
    if ("embed_tokens" not in key and "lm_head" not in key) or array.shape == (1,):
        return array
    dim = 1 if key.startswith("lm_head") and name.startswith("nlp") else 0
    if size <= array.shape[dim]:
        return np.take(array, range(size), axis=dim)
    shape = list(array.shape)
    shape[dim] = size
    grown = np.zeros(shape, array.dtype)
    grown[tuple(slice(0, extent) for extent in array.shape)] = array
    return grown


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("size", [100, 150])
@pytest.mark.parametrize(
    ("to", "strategy"), [("tp=1", None), ("tp=2,pp=2,sharding=2", "stage1v2"), ("sharding=3", "stage1v1")]
)
def test_the_vocabulary_is_resized_in_every_state(
    name: str, size: int, to: str, strategy: str | None, tmp_path: Path
) -> None:
    truth = oracle.read_truth(case_directory(name) / "truth.safetensors")
    wanted = {key: _resized(name, array, key, size) for key, array in truth.items()}
    target = tmp_path / "target"
    paddle_reshard.convert(
        case_directory(name) / "checkpoint-3", target, to=to, sharding_strategy=strategy, vocab_size=size
    )
    oracle.assert_same_tensors(oracle.read_checkpoint(target, oracle.shapes_of(wanted)), wanted)
    assert json.loads((target / "config.json").read_text())["vocab_size"] == size


def test_a_vocabulary_that_has_the_size_stays_as_it_is(tmp_path: Path) -> None:
    source = case_directory("mp2pp2sh2_s1v2_meta_ema") / "checkpoint-3"
    plans = [paddle_reshard.plan(source, to="tp=1", **size) for size in ({}, {"vocab_size": 128})]
    assert plans[0].plan_id == plans[1].plan_id


def test_a_vocabulary_that_tp_does_not_divide_is_replicated_where_the_trainer_does(tmp_path: Path) -> None:
    """Trimmed to 127 rows, two tp ranks of PaddleNLP each hold the whole embedding and head."""
    name = "nlp_fused_mp2"
    truth = oracle.read_truth(case_directory(name) / "truth.safetensors")
    wanted = {key: _resized(name, array, key, 127) for key, array in truth.items()}
    paddle_reshard.convert(
        case_directory(name) / "checkpoint-3", tmp_path / "target", to="tp=2,sharding=2", vocab_size=127
    )
    oracle.assert_same_tensors(oracle.read_checkpoint(tmp_path / "target", oracle.shapes_of(wanted)), wanted)
    meta = json.loads((tmp_path / "target" / "model_meta.json").read_text())
    described = meta["sharding_metas"]["tp01_pp00"]["param_meta"]["llama.embed_tokens.weight"]
    assert described[0] == [127, 64]
    assert described[2] is False


def test_a_vocabulary_that_tp_does_not_divide_is_refused_where_the_trainer_does(tmp_path: Path) -> None:
    source = case_directory("mp2pp2sh2_s1v2_meta_ema") / "checkpoint-3"
    with pytest.raises(paddle_reshard.ReshardError, match="tp=2 does not divide vocab_size=127"):
        paddle_reshard.convert(source, tmp_path / "target", to="tp=2", vocab_size=127)
