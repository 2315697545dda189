"""FP8 weights without our code: what e4m3 codes stand for, and models that are stored with them."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path

import numpy as np

from tests.golden.unified_cases import Entries, read, write_safetensors

FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e4m3", "activation_scheme": "dynamic"}
QUANTISED = re.compile(r"model\.layers\.\d+\..*_proj(_with_mqa)?\.weight$")


def _value(code: int) -> float:
    """OCP 8-bit Floating Point Specification 1.0, E4M3: bias 7, subnormals, S.1111.111 is NaN, no infinities."""
    sign, exponent, mantissa = -1.0 if code >> 7 else 1.0, code >> 3 & 0b1111, code & 0b111
    if exponent == 0b1111 and mantissa == 0b111:
        return float("nan")
    if exponent == 0:
        return sign * 2.0**-6 * mantissa / 8
    return sign * 2.0 ** (exponent - 7) * (1 + mantissa / 8)


@cache
def values() -> np.ndarray:
    """The value of every code."""
    return np.array([_value(code) for code in range(256)], np.float32)


def widened(data: bytes, shape: tuple[int, ...]) -> np.ndarray:
    """bfloat16 as float32."""
    return (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32).reshape(shape)


def quantised(weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Codes and scales; the nearest values below, which is good enough for a test."""
    blocks = [-(-extent // 128) for extent in weight.shape]
    codes, scales = np.zeros(weight.shape, np.uint8), np.ones(blocks, np.float32)
    for i, j in np.ndindex(*blocks):
        block = (slice(i * 128, i * 128 + 128), slice(j * 128, j * 128 + 128))
        scales[i, j] = np.abs(weight[block]).max() / 448 or 1
        scaled = weight[block] / scales[i, j]
        nearest = np.searchsorted(values()[:127], np.abs(scaled), side="right") - 1
        codes[block] = nearest | np.where(np.signbit(scaled), 0x80, 0)
    return codes, scales


def store_as_fp8(model: Path) -> Path:
    """Store the bfloat16 matrices of a Hugging Face model as FP8, in one file; returns ``model``."""
    tensors: Entries = {}
    for key, (tag, shape, data) in read(model).items():
        if tag != "BF16" or not QUANTISED.match(key):
            tensors[key] = (tag, shape, data)
            continue
        codes, scales = quantised(widened(data, shape))
        tensors[key] = ("F8_E4M3", shape, codes.tobytes())
        tensors[f"{key}_scale_inv"] = ("F32", scales.shape, scales.tobytes())
    assert any(tag == "F8_E4M3" for tag, *_ in tensors.values())
    for path in [*model.glob("*.safetensors*"), *model.glob("paddle_reshard.json")]:
        path.unlink()
    write_safetensors(model / "model.safetensors", tensors)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "quantization_config": FP8}))
    return model
