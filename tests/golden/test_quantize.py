"""Exports with FP8 weights hold what DeepGEMM's ``per_block_cast_to_fp8`` computes, however the work is cut.

The codes and scales are computed here once more, block by block; Paddle rounds to e4m3.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors

import paddle_reshard
from paddle_reshard.pipeline.core.errors import ReshardError, UnsupportedError, UsageError
from paddle_reshard.tasks.quantise import e4m3_codes
from tests.conftest import case_directory
from tests.ema.scaled import paddle
from tests.golden.unified_cases import write_safetensors
from tests.golden.wide import CONFIG, write_wide
from tests.sized import in_groups

FP8: dict[str, Any] = {"format": "huggingface", "quantize": "fp8"}
DTYPES = {"F8_E4M3": "float8_e4m3fn", "F32": "float32", "BF16": "bfloat16"}
"""Names that the library gives dtypes in memory."""
Entries = dict[str, tuple[str, tuple[int, ...], bytes]]


def read(folder: Path) -> Entries:
    """Key → dtype, shape and bytes of every tensor of a folder."""
    return {
        key: (entry["dtype"], tuple(entry["shape"]), bytes(entry["data"]))
        for path in sorted(folder.glob("*.safetensors"))
        for key, entry in safetensors.deserialize(path.read_bytes())
    }


def _per_block_cast(weight: np.ndarray) -> tuple[bytes, bytes]:
    """DeepGEMM at 54e2261, ``deep_gemm/utils/math.py``, without ``use_ue8m0``."""
    blocks = [-(-extent // 128) for extent in weight.shape]
    scaled, scales = np.empty_like(weight), np.empty(blocks, np.float32)
    for i, j in np.ndindex(*blocks):
        block = (slice(i * 128, i * 128 + 128), slice(j * 128, j * 128 + 128))
        scales[i, j] = max(np.abs(weight[block]).max(), np.float32(1e-4)) / np.float32(448)
        scaled[block] = weight[block] * (np.float32(1) / scales[i, j])
    codes = paddle.to_tensor(scaled).astype(paddle.float8_e4m3fn).view("uint8").numpy()
    return codes.tobytes(), scales.tobytes()


def _as_the_library_writes_it(entries: dict[str, Any]) -> bytes:
    buffers = {key: np.frombuffer(bytes(entry["data"]), np.uint8) for key, entry in entries.items()}
    return safetensors.serialize(
        {
            key: safetensors.TensorSpec(
                dtype=DTYPES[entry["dtype"]],
                shape=entry["shape"],
                data_ptr=buffers[key].ctypes.data,
                data_len=buffers[key].nbytes,
            )
            for key, entry in entries.items()
        },
        {"format": "pt"},
    )


def _quantised(export: Path, wide: Path) -> Entries:
    """What an export with FP8 weights holds, given the same without and in float32."""
    expected = dict(read(export))
    floats = read(wide)
    for key, (_, shape, data) in floats.items():
        if "layers." in key and key.endswith(("_proj.weight", "_with_mqa.weight")) and "eh_proj" not in key:
            codes, scales = _per_block_cast(np.frombuffer(data, np.float32).reshape(shape))
            expected[key] = ("F8_E4M3", shape, codes)
            expected[f"{key}_scale_inv"] = ("F32", tuple(-(-n // 128) for n in shape), scales)
    return expected


@pytest.mark.parametrize(
    ("case", "options", "of_masters"),
    [
        ("moe/dsv3_single", {"max_shard_size": "20KB"}, True),
        ("mp2pp2sh2_s1v2_meta_ema", {}, True),
        ("mp2pp2sh2_s1v2_meta_ema", {"state": "ema"}, True),
        ("moe/qwen2moe_single", {}, True),
    ],
)
def test_codes_and_scales_are_those_of_the_reference(
    case: str, options: dict[str, str], of_masters: bool, tmp_path: Path
) -> None:
    (source,) = case_directory(case).glob("checkpoint-*")
    report = paddle_reshard.convert(source, tmp_path / "fp8", **FP8, **options)
    paddle_reshard.convert(source, tmp_path / "plain", format="huggingface", **options)
    paddle_reshard.convert(
        source, tmp_path / "wide", **{**options, "format": "huggingface", "dtype": "float32"}
    )
    found = read(tmp_path / "fp8")
    assert found == _quantised(tmp_path / "plain", tmp_path / "wide")
    assert sum(tag == "F8_E4M3" for tag, _, _ in found.values()) >= 14
    assert any("from their master weights" in text for _, text in report.plan.facts())
    assert report.moved.written_bytes == report.plan.plan.written_bytes
    index = json.loads((tmp_path / "fp8" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(len(data) for _, _, data in found.values())
    for path in (tmp_path / "fp8").glob("*.safetensors"):
        keys = {key for key, name in index["weight_map"].items() if name == path.name}
        entries = dict(safetensors.deserialize(path.read_bytes()))
        assert entries.keys() == keys
        assert _as_the_library_writes_it(entries) == path.read_bytes()


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Entries]:
    """A model with large matrices, and what it becomes."""
    folder = tmp_path_factory.mktemp("wide")
    source = write_wide(folder / "model")
    paddle_reshard.convert(source, folder / "float32", format="huggingface", dtype="float32")
    return source, _quantised(source, folder / "float32")


@pytest.mark.parametrize("through", [None, "tp=2"])
@pytest.mark.parametrize("group_bytes", [1 << 26, 300_000])
def test_groups_never_cut_blocks(
    through: str | None, group_bytes: int, wide: tuple[Path, Entries], tmp_path: Path
) -> None:
    """The blocks of fused and transposed tensors do not follow their cuts; each is scaled as a whole."""
    source, expected = wide
    if through is not None:
        paddle_reshard.convert(source, tmp_path / "job", to=through)
        source = tmp_path / "job"
    report = in_groups(group_bytes).convert(source, tmp_path / "fp8", **FP8)
    assert read(tmp_path / "fp8") == expected
    assert (report.moved.groups > 2) == (group_bytes < 1 << 20)
    assert any("from their parameters" in text for _, text in report.plan.facts())
    assert paddle_reshard.check(tmp_path / "fp8").intact
    config = json.loads((tmp_path / "fp8" / "config.json").read_text())
    assert config["quantization_config"] == {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "modules_to_not_convert": ["model.embed_tokens", "lm_head"],
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    }


def test_a_quantised_export_is_a_source_and_a_target_among_others(
    wide: tuple[Path, Entries], tmp_path: Path
) -> None:
    source, expected = wide
    targets = {str(tmp_path / "fp8"): FP8, str(tmp_path / "plain"): {"format": "huggingface"}}
    paddle_reshard.convert(source, targets)
    assert read(tmp_path / "fp8") == expected
    assert read(tmp_path / "plain") == read(source)
    paddle_reshard.convert(tmp_path / "fp8", tmp_path / "back", format="huggingface")
    back = read(tmp_path / "back")
    assert back.keys() == read(source).keys()
    key = "model.layers.0.mlp.down_proj.weight"
    values, restored = (
        (np.frombuffer(entries[key][2], "<u2").astype(np.uint32) << 16).view(np.float32)
        for entries in (read(source), back)
    )
    assert np.abs(values - restored).max() <= np.abs(values).max() / 2**4
    with pytest.raises(UnsupportedError, match=r"verify .*fp8 compares its bytes with its manifest"):
        paddle_reshard.verify(source, tmp_path / "fp8")


def test_rounding_is_to_nearest_and_ties_go_to_even() -> None:
    rng = np.random.default_rng(4)
    codes = np.arange(127, dtype=np.uint8)
    table = paddle.to_tensor(codes).view(paddle.float8_e4m3fn).astype("float32").numpy().astype(np.float64)
    middle = (table[1:] + table[:-1]) / 2
    values = np.concatenate([table, middle, rng.uniform(0, 448, 5000), np.exp2(rng.uniform(-20, 8, 5000))])
    values = np.concatenate([values, np.nextafter(middle, 0), np.nextafter(middle, 999)]).astype(np.float32)
    distance = np.abs(values.astype(np.float64)[:, None] - table[None])
    nearest = distance == distance.min(axis=1, keepdims=True)
    expected = np.where(nearest.sum(axis=1) == 1, nearest.argmax(axis=1), 0)
    for row in np.flatnonzero(nearest.sum(axis=1) == 2):
        (expected[row],) = (code for code in np.flatnonzero(nearest[row]) if code % 2 == 0)
    np.testing.assert_array_equal(e4m3_codes(values), expected)
    np.testing.assert_array_equal(e4m3_codes(-values), expected | 0x80)


@pytest.mark.parametrize(
    ("case", "options", "error", "words"),
    [
        ("moe/dsv3_single", {"quantize": "int3"}, UsageError, "unknown quantize 'int3'; known: fp8"),
        ("moe/dsv3_single", {"dtype": "float16"}, UsageError, "not --dtype float16"),
        ("moe/gptoss_single", {}, UnsupportedError, "holds all experts of a layer in one tensor"),
    ],
)
def test_what_cannot_be_quantised_is_refused(
    case: str, options: dict[str, str], error: type[ReshardError], words: str
) -> None:
    (source,) = case_directory(case).glob("checkpoint-*")
    with pytest.raises(error, match=words):
        paddle_reshard.plan(source, **{**FP8, **options})


@pytest.mark.parametrize(
    ("name", "index", "bits", "value", "rank"),
    [
        ("up_proj", (300, 77), b"\x80\x7f", "inf", 0),
        ("up_proj", (699, 319), b"\x80\xff", "-inf", 1),
        ("down_proj", (130, 349), b"\xc0\x7f", "nan", 0),
        ("down_proj", (319, 350), b"\xc0\x7f", "nan", 1),
    ],
)
def test_a_value_without_a_scale_is_named(
    name: str, index: tuple[int, int], bits: bytes, value: str, rank: int, tmp_path: Path
) -> None:
    """With its tensor, its row and column, and the file of the rank that holds it: each has half of 700."""
    source = write_wide(tmp_path / "model")
    tensors = read(source)
    key = f"model.layers.1.mlp.{name}.weight"
    tag, shape, data = tensors[key]
    at = 2 * (index[0] * shape[1] + index[1])
    tensors[key] = (tag, shape, data[:at] + bits + data[at + 2 :])
    write_safetensors(source / "model.safetensors", tensors)
    paddle_reshard.convert(source, tmp_path / "job", to="tp=2")
    words = (
        rf"{re.escape(f'{key}: the value at {index} is {value}, so it has no FP8 scale')}\. "
        rf"It was read from model_state\.tp0{rank}\.pdparams; nothing is published"
    )
    with pytest.raises(ReshardError, match=words):
        in_groups(300_000).convert(tmp_path / "job", tmp_path / "fp8", **FP8)
    assert not (tmp_path / "fp8").exists()


def test_what_was_trained_in_float16_is_refused(tmp_path: Path) -> None:
    source = write_wide(tmp_path / "model")
    tensors = read(source)
    (source / "config.json").write_text(json.dumps({**CONFIG, "torch_dtype": "float16"}))
    halves = {key: ("F16", shape, data) for key, (_, shape, data) in tensors.items()}
    write_safetensors(source / "model.safetensors", halves)
    with pytest.raises(UnsupportedError, match=r"was trained in float16; .* add --dtype bfloat16"):
        paddle_reshard.plan(source, **FP8)
