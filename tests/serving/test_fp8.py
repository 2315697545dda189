"""``transformers`` reads exports with FP8 weights: what it makes of them is what they stand for.

Run by ``make serving``. Without a GPU it dequantises (which needs accelerate). The same file is dequantised here once
more, as the OCP specification defines e4m3, and written without ``quantization_config``; both are loaded and compared.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import paddle_reshard
from tests.conftest import case_directory
from tests.golden.test_fp8 import _values
from tests.golden.test_quantize import read
from tests.golden.unified_cases import write_safetensors
from tests.golden.wide import VOCAB, write_wide
from tests.serving.test_transformers import _answer, _load

pytestmark = [
    pytest.mark.serving,
    pytest.mark.filterwarnings("default"),  # other people's libraries
]
SEVERAL_BLOCKS = "several blocks"
"""A model whose matrices have several blocks; those of the corpus have one."""
DISTANCE = {
    "mp2pp2sh2_s1v2_meta_ema": 0.2,
    SEVERAL_BLOCKS: 0.5,
    "moe/ep2_pp2sh2_s1v2_meta": 0.5,
    "families/qwen3_next_sh2_s1v2_meta": 0.5,
}
"""Case → how far logits may be from those of the unquantised model: the ratio of the standard deviations of the
difference and of the logits. e4m3 has three bits of mantissa, so weights change by up to 1/16. Where experts are
chosen, a small change sends some tokens elsewhere, and with weights as large as those of several blocks, attention
chooses too. Logits that have nothing in common are at 1.4."""


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def _source(name: str, folder: Path) -> Path:
    if name == SEVERAL_BLOCKS:
        return write_wide(folder / "wide", hidden=256, intermediate=384)
    (found,) = case_directory(name).glob("checkpoint-*")
    return found


def _without_quantisation(fp8: Path, plain: Path) -> Path:
    """The model that an export with FP8 weights stands for, in float32 where these were."""
    stored = read(fp8)
    assert sum(tag == "F8_E4M3" for tag, _, _ in stored.values()) >= 14
    tensors = {}
    for key, (tag, shape, data) in stored.items():
        if tag == "F8_E4M3":
            _, (rows, columns), scales = stored[f"{key}_scale_inv"]
            factors = np.frombuffer(scales, np.float32).reshape(rows, columns)
            factors = factors.repeat(128, axis=0).repeat(128, axis=1)[: shape[0], : shape[1]]
            values = _values()[np.frombuffer(data, np.uint8)].reshape(shape) * factors
            tensors[key] = ("F32", shape, values.tobytes())
        elif not key.endswith("_scale_inv"):
            tensors[key] = (tag, shape, data)
    plain.mkdir()
    write_safetensors(plain / "model.safetensors", tensors)
    config = json.loads((fp8 / "config.json").read_text())
    del config["quantization_config"]
    (plain / "config.json").write_text(json.dumps(config))
    return plain


def _loaded(folder: Path) -> tuple[Any, dict[str, np.ndarray]]:
    """The model in float32, every key of which is in the export and the other way round."""
    model, found = _load(folder, images=False)
    assert not any(found.values()), found
    model = model.float()
    return model, {key: tensor.numpy() for key, tensor in model.state_dict().items()}


@pytest.mark.parametrize("name", DISTANCE)
def test_every_tensor_is_what_it_stands_for(name: str, tmp_path: Path) -> None:
    source = _source(name, tmp_path)
    paddle_reshard.convert(source, tmp_path / "hf", format="huggingface", dtype="float32")
    report = paddle_reshard.convert(source, tmp_path / "fp8", format="huggingface", quantize="fp8")
    assert not any("multiple of 128" in remark for remark in report.plan.targets[0].remarks)
    quantised, found = _loaded(tmp_path / "fp8")
    plain, expected = _loaded(_without_quantisation(tmp_path / "fp8", tmp_path / "plain"))
    assert found.keys() == expected.keys()
    for key, array in expected.items():
        np.testing.assert_array_equal(found[key], array, err_msg=key)
    ids = np.random.default_rng(5).integers(0, VOCAB, (2, 12))
    logits = _answer(quantised, ids)
    np.testing.assert_array_equal(logits, _answer(plain, ids))
    unquantised = _answer(_loaded(tmp_path / "hf")[0], ids)
    distance = (logits - unquantised).std() / unquantised.std()
    assert 0.01 < distance < DISTANCE[name]


def test_a_remark_names_weights_that_it_dequantises_wrongly(tmp_path: Path) -> None:
    """192 rows have blocks of 128 and 64, of which ``transformers`` makes two of 96."""
    source = write_wide(tmp_path / "wide", hidden=192, intermediate=256)
    report = paddle_reshard.convert(source, tmp_path / "fp8", format="huggingface", quantize="fp8")
    (remark,) = (text for text in report.plan.targets[0].remarks if "multiple of 128" in text)
    assert (
        "14 quantised weights, such as model.layers.0.self_attn.q_proj.weight of shape (192, 192)" in remark
    )
    _, found = _loaded(tmp_path / "fp8")
    _, expected = _loaded(_without_quantisation(tmp_path / "fp8", tmp_path / "plain"))
    assert not np.array_equal(
        found["model.layers.0.mlp.down_proj.weight"], expected["model.layers.0.mlp.down_proj.weight"]
    )
