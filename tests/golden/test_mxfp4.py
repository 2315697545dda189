"""gpt-oss as it is published, with MXFP4 experts, is read as the bfloat16 model that it stands for.

The values are computed here once more: e2m1 and e8m0 as OCP's Microscaling specification defines them, in double
precision, which Paddle rounds to bfloat16. The layout is that of transformers' ``convert_moe_packed_tensors``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import paddle_reshard
from paddle_reshard.pipeline.core.errors import CoverageError, ReshardError, UnsupportedError
from tests.conftest import case_directory
from tests.ema.scaled import paddle
from tests.golden.unified_cases import Entries, check_stands_for, read, write_model

MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}


def _value(code: int, scale: int) -> float:
    """OCP Microscaling Formats 1.0: e2m1 has bias 1 and subnormals, e8m0 is a power of two with bias 127."""
    exponent, mantissa = code >> 1 & 0b11, code & 1
    magnitude = mantissa / 2 if exponent == 0 else 2.0 ** (exponent - 1) * (1 + mantissa / 2)
    return (-magnitude if code >> 3 else magnitude) * 2.0 ** (scale - 127)


VALUES = np.array([[_value(code, scale) for code in range(16)] for scale in range(256)])


def _bfloat16(values: np.ndarray) -> bytes:
    with np.errstate(over="ignore"):
        wide = values.astype(np.float32)
    return paddle.to_tensor(wide).astype("bfloat16").numpy().tobytes()


def _dequantised(blocks: np.ndarray, scales: np.ndarray) -> tuple[str, tuple[int, ...], bytes]:
    """The low half of a byte comes first; rows of blocks are columns of the tensor."""
    codes = np.stack([blocks & 15, blocks >> 4], axis=-1).reshape(*scales.shape, 32)
    values = VALUES[scales[..., None], codes].reshape(*scales.shape[:2], -1).transpose(0, 2, 1)
    return "BF16", values.shape, _bfloat16(values)


def test_every_value_is_exact_in_bfloat16() -> None:
    finite = VALUES[:253]
    rounded = np.frombuffer(_bfloat16(finite), "<u2").astype(np.uint32) << 16
    np.testing.assert_array_equal(rounded.view(np.float32).astype(np.float64).reshape(finite.shape), finite)


def _packed(rng: np.random.Generator, key: str, shape: tuple[int, int, int]) -> tuple[Entries, Entries]:
    """Random experts ``[experts, rows, columns]``: as stored, and as bfloat16."""
    experts, rows, columns = shape
    blocks = rng.integers(0, 256, (experts, columns, rows // 32, 16), np.uint8)
    scales = rng.integers(100, 130, blocks.shape[:-1], np.uint8)
    stored = {
        f"{key}_blocks": ("U8", blocks.shape, blocks.tobytes()),
        f"{key}_scales": ("U8", scales.shape, scales.tobytes()),
    }
    return stored, {key: _dequantised(blocks, scales)}


@pytest.fixture(scope="module")
def gpt_oss(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A real model, its experts packed, and the bfloat16 model that this stands for."""
    folder, rng = tmp_path_factory.mktemp("mxfp4"), np.random.default_rng(3)
    (checkpoint,) = case_directory("moe/gptoss_single").glob("checkpoint-*")
    paddle_reshard.convert(checkpoint, folder / "trained", format="huggingface")
    config = json.loads((folder / "trained" / "config.json").read_text())
    stored, plain = read(folder / "trained"), read(folder / "trained")
    packed = [key for key in plain if key.endswith(("experts.gate_up_proj", "experts.down_proj"))]
    assert len(packed) >= 4
    for key in packed:
        as_stored, as_served = _packed(rng, key, plain[key][1])
        del stored[key]
        stored |= as_stored
        plain |= as_served
    quantised = {**config, "quantization_config": MXFP4}
    keys = sorted(stored)
    files = [{key: stored[key] for key in keys[number::2]} for number in (0, 1)]
    return write_model(folder / "mxfp4", files, quantised), write_model(folder / "bf16", [plain], config)


@pytest.mark.parametrize("options", [{"to": "tp=2"}, {"format": "huggingface"}], ids=["tp2", "huggingface"])
def test_a_job_starts_from_mxfp4_experts(
    options: dict[str, str], gpt_oss: tuple[Path, Path], tmp_path: Path
) -> None:
    mxfp4, bf16 = gpt_oss
    report = paddle_reshard.convert(mxfp4, tmp_path / "a", **options)
    paddle_reshard.convert(bf16, tmp_path / "b", **options)
    assert paddle_reshard.verify(tmp_path / "a", tmp_path / "b").equal
    assert read(tmp_path / "a") == read(tmp_path / "b")
    (told,) = (text for name, text in report.plan.facts() if name == "dequantised")
    assert told.endswith("MXFP4 weights, to bfloat16, with a scale for each 32 elements")
    assert "quantization_config" not in json.loads((tmp_path / "a" / "config.json").read_text())


def test_every_range_of_every_value(tmp_path: Path) -> None:
    """All codes and scales, infinite products too; ranges that cut elements, rows, experts and tensors."""
    rng = np.random.default_rng(8)
    blocks = rng.integers(0, 256, (3, 40, 5, 16), np.uint8)
    blocks[0, :16] = np.arange(16, dtype=np.uint8)[:, None, None] * 17
    scales = rng.permuted(np.resize(np.arange(256, dtype=np.uint8), blocks.shape[:-1]), axis=0)
    stored: Entries = {
        "bias": ("F32", (3,), rng.bytes(12)),
        "w_blocks": ("U8", blocks.shape, blocks.tobytes()),
        "w_scales": ("U8", scales.shape, scales.tobytes()),
    }
    folder = write_model(tmp_path / "model", [stored], {"quantization_config": MXFP4})
    check_stands_for(folder, {"bias": stored["bias"], "w": _dequantised(blocks, scales)})


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"w_scales": None}, CoverageError, "w_scales: no file holds the scales of w_blocks"),
        ({"w_blocks": None}, CoverageError, "scales of w_blocks, which no file holds"),
        ({"w_scales": ("U8", (2, 4, 2), bytes(16))}, CoverageError, r"shape \(2, 4, 2\), expected U8 of shape"),
        ({"w_blocks": ("U8", (2, 4, 24), bytes(192))}, CoverageError, "MXFP4 experts are U8 of shape"),
        ({"w": ("BF16", (1,), bytes(2))}, CoverageError, "w: stored both packed and as it is"),
        ({"dtype": "float16"}, UnsupportedError, "MXFP4 weights are dequantised to bfloat16 only"),
    ],
)  # fmt: skip
def test_what_cannot_be_dequantised_is_refused(
    changes: dict[str, Any], error: type[ReshardError], words: str, tmp_path: Path
) -> None:
    tensors: dict[str, Any] = {
        "w_blocks": ("U8", (2, 4, 3, 16), bytes(384)),
        "w_scales": ("U8", (2, 4, 3), bytes(24)),
        **changes,
    }
    config = {"model_type": "gpt_oss", "torch_dtype": tensors.pop("dtype", "bfloat16")}
    stored = {key: entry for key, entry in tensors.items() if entry is not None}
    folder = write_model(tmp_path / "model", [stored], {**config, "quantization_config": MXFP4})
    with pytest.raises(error, match=words):
        paddle_reshard.plan(folder, to="tp=2")
