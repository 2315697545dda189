"""Weights that compressed-tensors has stored as integers are read as the floats that its own ``decompress`` makes.

The answers in ``tests/golden/integers`` are the library's. For a real model, Paddle multiplies in bfloat16.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import paddle_reshard
from paddle_reshard.pipeline.core.errors import CoverageError, ReshardError, UnsupportedError
from tests.conftest import case_directory
from tests.ema.scaled import paddle
from tests.golden.unified_cases import Entries, check_ranges, opened, read, write_model

ANSWERS = Path(__file__).parent / "integers"
SCHEMES = sorted(path.parent.name for path in ANSWERS.glob("*/answer.safetensors"))
FILE = "model.safetensors"


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_range_of_every_value_is_the_librarys(scheme: str, tmp_path: Path) -> None:
    """All schemes, integers and sizes of scales; ranges that cut elements, bytes, headers and tensors."""
    shutil.copytree(
        ANSWERS / scheme,
        tmp_path / "model",
        ignore=shutil.ignore_patterns("answer*"),
        copy_function=shutil.copyfile,
    )
    source = opened(tmp_path / "model")
    assert check_ranges(source, FILE) == (ANSWERS / scheme / "answer.safetensors").read_bytes()
    config = source.read("config.json", 0, source.sizes()["config.json"])
    assert "quantization_config" not in json.loads(config)


def _config(**changes: Any) -> dict[str, Any]:
    """As Kimi-K2-Thinking has it; ``weights__NAME`` and ``group__NAME`` change entries further inside."""
    weights: dict[str, Any] = {
        "actorder": None,
        "block_structure": None,
        "dynamic": False,
        "group_size": 32,
        "num_bits": 4,
        "observer": "minmax",
        "observer_kwargs": {},
        "strategy": "group",
        "symmetric": True,
        "type": "int",
    }
    group: dict[str, Any] = {"input_activations": None, "output_activations": None, "targets": ["Linear"]}
    config: dict[str, Any] = {
        "format": "pack-quantized",
        "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*"],
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
    }
    for name, value in changes.items():
        inside = weights if name.startswith("weights__") else group if name.startswith("group__") else config
        inside[name.split("__")[-1]] = value
    return {"config_groups": {"group_0": {**group, "weights": weights}}, **config}


def _bfloat16(integers: np.ndarray, scales: np.ndarray, group: int) -> bytes:
    """``integer · scale`` as Paddle multiplies bfloat16."""
    repeated = paddle.to_tensor(np.repeat(scales, group, axis=1)).view("bfloat16")
    return (paddle.to_tensor(integers.astype(np.float32)).astype("bfloat16") * repeated).numpy().tobytes()


def test_a_job_starts_from_experts_of_four_bits(tmp_path: Path) -> None:
    """The model of a real job, with its experts as Kimi-K2-Thinking's, in two files."""
    (checkpoint,) = case_directory("moe/dsv3_single").glob("checkpoint-*")
    paddle_reshard.convert(checkpoint, tmp_path / "trained", format="huggingface")
    config = json.loads((tmp_path / "trained" / "config.json").read_text())
    stored, plain = read(tmp_path / "trained"), read(tmp_path / "trained")
    experts = [key for key in plain if ".mlp.experts." in key]
    assert len(experts) >= 12
    rng, group = np.random.default_rng(3), 8
    for key in experts:
        rows, columns = plain[key][1]
        integers = rng.integers(-8, 8, (rows, columns), np.int8)
        scales = (
            rng.uniform(0.001, 0.1, (rows, columns // group)).astype(np.float32).view(np.uint32) >> 16
        ).astype("<u2")
        codes = (integers + 8).astype(np.uint8)
        words = (codes[:, 0::2] | codes[:, 1::2] << 4).view("<i4")
        name = key.removesuffix(".weight")
        del stored[key]
        stored[f"{name}.weight_packed"] = ("I32", words.shape, words.tobytes())
        stored[f"{name}.weight_scale"] = ("BF16", scales.shape, scales.tobytes())
        stored[f"{name}.weight_shape"] = ("I32", (2,), np.array([rows, columns], "<i4").tobytes())
        plain[key] = ("BF16", (rows, columns), _bfloat16(integers, scales, group))
    quantised = {**config, "quantization_config": _config(weights__group_size=group)}
    keys = sorted(stored)
    files = [{key: stored[key] for key in keys[number::2]} for number in (0, 1)]
    int4 = write_model(tmp_path / "int4", files, quantised)
    report = paddle_reshard.convert(int4, tmp_path / "job", to="tp=2", memory="256MiB")
    (told,) = (text for name, text in report.plan.facts() if name == "dequantised")
    assert told == f"{len(experts)} INT4 weights, to bfloat16, with a scale for each 8 elements of a row"
    paddle_reshard.convert(tmp_path / "job", tmp_path / "hf", format="huggingface")
    assert read(tmp_path / "hf") == plain
    assert "quantization_config" not in json.loads((tmp_path / "hf" / "config.json").read_text())


def _model(**changes: Any) -> Entries:
    tensors = {
        "w.weight_packed": ("I32", (2, 8), bytes(64)),
        "w.weight_scale": ("BF16", (2, 2), bytes(8)),
        "w.weight_shape": ("I64", (2,), np.array([2, 64], "<i8").tobytes()),
        **{key.replace("__", "."): entry for key, entry in changes.items()},
    }
    return {key: entry for key, entry in tensors.items() if entry is not None}


def _shape(*extents: int) -> tuple[str, tuple[int, ...], bytes]:
    return "I64", (len(extents),), np.array(extents, "<i8").tobytes()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"format": "nvfp4-pack-quantized"}, "the format 'nvfp4-pack-quantized'; supported: pack-quantized or"),
        ({"format": "float-quantized"}, "the format 'float-quantized'"),
        ({"group__format": "marlin-24"}, "the format 'marlin-24', 'pack-quantized'"),
        ({"format": "int-quantized"}, "num_bits 4 with int-quantized; supported: 8"),
        ({"quantization_status": "frozen"}, "quantization_status 'frozen'"),
        ({"sparsity_config": {"format": "sparse-24-bitmask"}}, "a sparsity_config"),
        ({"config_groups": {}}, "0 kinds of weights"),
        (
            {
                "config_groups": {
                    "a": _config()["config_groups"]["group_0"],
                    "b": {"weights": {"num_bits": 8, "group_size": -1}},
                },
            },
            "2 kinds of weights",
        ),
        ({"config_groups": {"W4A16": ["Linear"]}}, "a config group without weights"),
        ({"weights__symmetric": False}, "symmetric False; supported: True"),
        ({"weights__num_bits": 3}, "num_bits 3; supported: 4 or 8"),
        ({"weights__type": "float"}, "type 'float'"),
        ({"weights__strategy": "block"}, "strategy 'block'; supported: 'group' or 'channel'"),
        ({"weights__strategy": None, "weights__group_size": None}, "strategy 'tensor'"),
        ({"weights__group_size": 0}, "group_size 0"),
        ({"weights__actorder": "group"}, "actorder 'group'"),
    ],
)  # fmt: skip
def test_other_ways_to_store_weights_are_refused(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    config = {"model_type": "llama", "quantization_config": _config(**changes)}
    folder = write_model(tmp_path / "model", [_model()], config)
    with pytest.raises(
        UnsupportedError, match=f"config.json: quantization_config .* has {words}.* Convert the unquantised"
    ):
        paddle_reshard.plan(folder, to="tp=2")


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"w__weight_scale": None}, CoverageError, "w.weight_scale: no file holds the scales of w.weight_packed"),
        ({"w__weight_shape": None}, CoverageError, "w.weight_shape: no file holds the shape of w.weight_packed"),
        ({"w__weight_packed": None}, CoverageError, "scales of w.weight_packed, which no file holds"),
        ({"w__weight": ("BF16", (1,), bytes(2))}, CoverageError, "w.weight: stored both packed and as it is"),
        ({"w__weight_shape": _shape(2, 65)}, CoverageError, r"\(2, 65\) are I32 of shape \(2, 9\)"),
        ({"w__weight_shape": _shape(2, 63)}, CoverageError, "63 columns cannot be divided into groups of 32"),
        ({"w__weight_shape": _shape(2, -8)}, CoverageError, r"w.weight_shape: the shape \(2, -8\)"),
        ({"w__weight_shape": _shape(1, 2, 64)}, CoverageError, r"I64 of shape \(3,\), expected two integers"),
        ({"w__weight_packed": ("U32", (2, 8), bytes(64))}, CoverageError, r"U32 of shape \(2, 8\), but 4-bit"),
        ({"w__weight_packed": ("I32", (1, 2, 8), bytes(64))}, UnsupportedError, "only matrices are supported"),
        ({"w__weight_scale": ("F32", (2, 2), bytes(16))}, CoverageError, "scales stored as F32; supported: BF16, F16"),
        ({"w__weight_scale": ("BF16", (2, 1), bytes(4))}, CoverageError, r"has scales of shape \(2, 2\)"),
        ({"w__weight_scale": ("F16", (2, 2), bytes(8))}, UnsupportedError, "w.weight has scales in float16"),
        ({"w__weight_zero_point": ("I32", (1, 2), bytes(8))}, UnsupportedError, "zero points"),
        ({"w__weight_g_idx": ("I32", (64,), bytes(256))}, UnsupportedError, "columns that GPTQ has grouped"),
    ],
)  # fmt: skip
def test_what_contradicts_itself_is_refused(
    changes: dict[str, Any], error: type[ReshardError], words: str, tmp_path: Path
) -> None:
    config = {"model_type": "llama", "torch_dtype": "bfloat16", "quantization_config": _config()}
    folder = write_model(tmp_path / "model", [_model(**changes)], config)
    with pytest.raises(error, match=words):
        paddle_reshard.plan(folder, to="tp=2")
