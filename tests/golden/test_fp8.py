"""Hugging Face checkpoints with FP8 weights are read as the bfloat16 weights that they stand for.

The values are computed here once more: e4m3 as the OCP specification defines it, bit field by bit field, and the
product rounded to bfloat16 by Paddle.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import paddle_reshard
from paddle_reshard.pipeline.core.errors import CheckpointError, CoverageError, ReshardError, UnsupportedError
from tests.conftest import case_directory
from tests.ema.scaled import paddle
from tests.golden.fp8 import FP8, QUANTISED, quantised, values, widened
from tests.golden.unified_cases import (
    INDEX,
    Entries,
    Entry,
    check_stands_for,
    read,
    write_model,
    write_safetensors,
)

# ------------------------------------------------------------------------------------------------ the oracle


def _dequantised(codes: np.ndarray, scales: np.ndarray) -> bytes:
    """bfloat16, one block after the other."""
    found = np.empty(codes.shape, np.float32)
    for i in range(0, codes.shape[0], 128):
        for j in range(0, codes.shape[1], 128):
            block = (slice(i, i + 128), slice(j, j + 128))
            with np.errstate(all="ignore"):
                found[block] = values()[codes[block]] * np.float32(scales[i // 128, j // 128])
    return paddle.to_tensor(found).astype("bfloat16").numpy().tobytes()


def test_the_specification_is_what_paddle_casts() -> None:
    codes = np.arange(256, dtype=np.uint8)
    wide = paddle.to_tensor(codes).view(paddle.float8_e4m3fn).astype("float32").numpy()
    np.testing.assert_array_equal(wide, values())


# ------------------------------------------------------------------------------------------------ real models


def _tree(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != "paddle_reshard.json"
    }


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A real model, quantised, and the bfloat16 model that this stands for."""
    folder = tmp_path_factory.mktemp("fp8")
    (checkpoint,) = case_directory("moe/dsv3_single").glob("checkpoint-*")
    paddle_reshard.convert(checkpoint, folder / "trained", format="huggingface")
    config = json.loads((folder / "trained" / "config.json").read_text())
    first: Entries = {}
    second: Entries = {}
    plain: Entries = {}
    for number, (key, entry) in enumerate(sorted(read(folder / "trained").items())):
        tag, shape, data = entry
        of_key, of_scales = (first, second) if number % 2 else (second, second)
        if tag == "BF16" and QUANTISED.match(key):
            codes, scales = quantised(widened(data, shape))
            of_key[key] = ("F8_E4M3", shape, codes.tobytes())
            of_scales[f"{key}_scale_inv"] = ("F32", scales.shape, scales.tobytes())
            entry = ("BF16", shape, _dequantised(codes, scales))
        else:
            of_key[key] = entry
        plain[key] = entry
    assert sum(tag == "F8_E4M3" for tag, _, _ in {**first, **second}.values()) > 20
    split = [{key: plain[key] for key in file if key in plain} for file in (first, second)]
    return (
        write_model(folder / "fp8", [first, second], {**config, "quantization_config": FP8}),
        write_model(folder / "bf16", split, config),
    )


@pytest.mark.parametrize(
    "options",
    [{"to": "tp=2"}, {"format": "flex"}, {"format": "huggingface"}],
    ids=["tp2", "flex", "huggingface"],
)
def test_what_is_made_of_fp8_weights_is_what_they_stand_for(
    options: dict[str, str], deepseek: tuple[Path, Path], tmp_path: Path
) -> None:
    fp8, bf16 = deepseek
    report = paddle_reshard.convert(fp8, tmp_path / "a", memory="256MiB", **options)
    paddle_reshard.convert(bf16, tmp_path / "b", **options)
    found, expected = _tree(tmp_path / "a"), _tree(tmp_path / "b")
    for files in (found, expected):
        config = json.loads(files.pop("config.json", b"{}"))
        assert "quantization_config" not in config
        files["config"] = json.dumps(config, sort_keys=True).encode()
    assert found == expected
    assert ("dequantised" in dict(report.plan.facts())) and not paddle_reshard.check(tmp_path / "a").damages


def test_statements_see_the_weights_that_are_stood_for(deepseek: tuple[Path, Path], tmp_path: Path) -> None:
    (tmp_path / "rules.txt").write_text(
        "model.layers.$LAYER_ID.self_attn.o_proj.weight^T -> o.$LAYER_ID\n"
        "model.layers.$LAYER_ID.mlp.experts.$EXPERT_ID.gate_proj.weight, "
        "model.layers.$LAYER_ID.mlp.experts.$EXPERT_ID.up_proj.weight -> gu.$LAYER_ID.$EXPERT_ID, axis=0\n"
        "lm_head.weight -> _"
    )
    for name, source in zip(("fp8", "bf16"), deepseek, strict=True):
        paddle_reshard.convert(
            source, tmp_path / name, format="huggingface", aoa=tmp_path / "rules.txt", memory="256MiB"
        )
    made, plain = read(tmp_path / "fp8"), read(deepseek[1])
    assert made == read(tmp_path / "bf16")
    tag, shape, data = plain["model.layers.0.self_attn.o_proj.weight"]
    turned = np.ascontiguousarray(np.frombuffer(data, "<u2").reshape(shape).T)
    assert made["o.0"] == (tag, turned.shape, turned.tobytes())
    assert not any(key.endswith("_scale_inv") for key in made)


# --------------------------------------------------------------------------------------------------- values


SHAPES = [(300, 200), (128, 128), (1, 1), (129, 7), (2, 70_001), (5, 0)]


@pytest.mark.parametrize("scale_dtype", ["F32", "BF16"])
def test_every_range_of_every_value(scale_dtype: str, tmp_path: Path) -> None:
    """Ragged blocks, all codes, scales that overflow or are NaN; ranges that cut elements, headers and tensors."""
    rng = np.random.default_rng(8)
    stored: Entries = {"norm": ("F32", (3,), rng.bytes(12))}
    expected: Entries = dict(stored)
    for number, shape in enumerate(SHAPES):
        codes = rng.integers(0, 256, shape, np.uint8)
        blocks = tuple(-(-extent // 128) for extent in shape)
        scales = np.exp2(rng.uniform(-20, 20, blocks)).astype(np.float32)
        if not number:
            scales.flat[:4] = [3e38, np.nan, np.inf, 1e-42]
        bits = (scales.view(np.uint32) >> 16).astype("<u2")
        if scale_dtype == "BF16":
            scales = widened(bits.tobytes(), blocks)
        stored[f"w{number}"] = ("F8_E4M3", shape, codes.tobytes())
        stored[f"w{number}_scale_inv"] = (
            scale_dtype,
            blocks,
            scales.tobytes() if scale_dtype == "F32" else bits.tobytes(),
        )
        expected[f"w{number}"] = ("BF16", shape, _dequantised(codes, scales))
    folder = write_model(tmp_path / "model", [stored], {"quantization_config": FP8})
    check_stands_for(folder, expected)


# -------------------------------------------------------------------------------------------------- refusals


def _model(**changes: Entry | None) -> Entries:
    tensors: dict[str, Entry | None] = {
        "w": ("F8_E4M3", (300, 200), bytes(60_000)),
        "w_scale_inv": ("F32", (3, 2), bytes(24)),
        **changes,
    }
    return {key: entry for key, entry in tensors.items() if entry is not None}


@pytest.mark.parametrize(
    ("config", "tensors", "error", "words"),
    [
        ({"quant_method": "awq", "bits": 4}, {}, UnsupportedError, "quant_method 'awq'"),
        (
            {"quant_method": "gptq", "bits": 4},
            {},
            UnsupportedError,
            "quant_method 'gptq'; supported are fp8, .*, mxfp4, and integers of compressed-tensors",
        ),
        ({**FP8, "weight_block_size": [1, 128]}, {}, UnsupportedError, r"weight_block_size \[1, 128\]"),
        ({"quant_method": "fp8"}, {}, UnsupportedError, "weight_block_size None"),
        ({**FP8, "fmt": "e5m2"}, {}, UnsupportedError, "fmt 'e5m2'"),
        ({**FP8, "activation_scheme": "static"}, {}, UnsupportedError, "activation_scheme 'static'"),
        (FP8, {"w_scale_inv": None}, CoverageError, "w_scale_inv: no file holds the scales of w"),
        (FP8, {"w": None}, CoverageError, "w_scale_inv: scales of w, which no file holds"),
        (FP8, {"w": ("BF16", (1,), bytes(2))}, CoverageError, "scales of w, which is BF16, not FP8"),
        (
            FP8,
            {"w_scale_inv": ("F32", (2, 2), bytes(16))},
            CoverageError,
            r"shape \(2, 2\), but a weight of shape \(300, 200\) has scales of shape \(3, 2\)",
        ),
        (FP8, {"w_scale_inv": ("F16", (3, 2), bytes(12))}, CoverageError, "scales stored as F16"),
        (FP8, {"w": ("F8_E4M3", (2, 3, 4), bytes(24))}, UnsupportedError, r"w: .* shape \(2, 3, 4\)"),
        (FP8, {"w": ("F8_E5M2", (3,), bytes(3))}, CheckpointError, "'w' has the dtype 'F8_E5M2'"),
        (None, {}, CheckpointError, "'w' has the dtype 'F8_E4M3'"),
    ],
)
def test_what_cannot_be_dequantised_is_refused(
    config: dict[str, Any] | None,
    tensors: dict[str, Any],
    error: type[ReshardError],
    words: str,
    tmp_path: Path,
) -> None:
    entries = {"model_type": "llama", "torch_dtype": "bfloat16"}
    if config is not None:
        entries["quantization_config"] = config
    folder = write_model(tmp_path / "model", [_model(**tensors)], entries)
    with pytest.raises(error, match=words):
        paddle_reshard.plan(folder, to="tp=2")


def _of_other_dtype(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "torch_dtype": "float16"}))


def _of_other_file(folder: Path) -> None:
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"]["w_scale_inv"] = "elsewhere.safetensors"
    (folder / INDEX).write_text(json.dumps(index))


def _of_two_files(folder: Path) -> None:
    (folder / "model.safetensors.index.json").unlink(missing_ok=True)
    write_safetensors(folder / "more.safetensors", {"w_scale_inv": ("F32", (3, 2), bytes(24))})


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (_of_two_files, "w_scale_inv: two files hold it"),
        (_of_other_dtype, "torch_dtype is 'float16'"),
        (_of_other_file, "the index says that elsewhere"),
    ],
)
def test_what_contradicts_itself_is_refused(
    spoil: Callable[[Path], None], words: str, tmp_path: Path
) -> None:
    folder = write_model(
        tmp_path / "model", [_model()], {"torch_dtype": "bfloat16", "quantization_config": FP8}
    )
    spoil(folder)
    with pytest.raises(ReshardError, match=words):
        paddle_reshard.plan(folder, to="tp=2")
