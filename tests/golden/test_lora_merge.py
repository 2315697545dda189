"""LoRA merged into its base equals what the library itself makes of the two, bit for bit."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors

import paddle_reshard
from paddle_reshard.pipeline.changes.merge import merge_into
from paddle_reshard.pipeline.core.errors import ReshardError
from paddle_reshard.pipeline.indexing.detect import index_checkpoint
from paddle_reshard.pipeline.model.rules.tables import shipped_tables
from paddle_reshard.storage.locate import open_source
from paddle_reshard.storage.store import Read
from tests import oracle
from tests.conftest import case_directory
from tests.golden.compare_one_card import read_flex
from tests.golden.lora_base import FILES, write_base


def case(name: str) -> Path:
    return case_directory(f"states/{name}")


def bits_of(path: Path) -> dict[str, bytes]:
    """The library's own merge calls tensors that it did not touch U16 and the others BF16; their bits count."""
    return {key: bytes(entry["data"]) for key, entry in safetensors.deserialize(path.read_bytes())}


@pytest.mark.parametrize(
    ("name", "layout", "told"),
    [
        ("lora_single", "np", "LoRA of 14 weights, rank 4, scaling 2, of"),
        ("lora_single", "pt", "LoRA of 14 weights, rank 4, scaling 2, of"),
        ("lora_qwen2_single", "np", "LoRA of 8 weights, rank 4, scaling 2, of"),
        ("lora_rslora_single", "pt", "LoRA of 14 weights, rank 8, scaling 1.41421, of"),
        ("lora_qwen2_full_single", "np", "5 tensors replaced"),
    ],
)
def test_it_equals_what_the_library_merges(name: str, layout: str, told: str, tmp_path: Path) -> None:
    base = write_base(name, tmp_path / "base", layout)
    report = paddle_reshard.convert(
        case(name) / "checkpoint-3", tmp_path / "merged", format="flex", merge_into=base
    )
    assert read_flex(tmp_path / "merged") == bits_of(case(name) / "truth_merged.safetensors")
    assert told in dict(report.plan.facts())["merged"]


def test_a_flexcheckpoint_is_merged_into_the_base_that_it_holds(tmp_path: Path) -> None:
    """Of tp=2; a lora_config.json tells what it does not, rslora included."""
    source = case("lora_fc_mp2") / "checkpoint-3"
    given = json.loads((case("lora_single") / "checkpoint-3/lora_config.json").read_bytes())
    (tmp_path / "lora_config.json").write_text(json.dumps({**given, "rslora": True, "scaling": 4.0}))
    config = case("lora_single") / "checkpoint-3/config.json"
    paddle_reshard.convert(
        source,
        tmp_path / "merged",
        format="flex",
        config=config,
        lora_config=tmp_path / "lora_config.json",
        merge_into=source,
    )
    truth = oracle.read_truth(case("lora_fc_mp2") / "truth.safetensors")
    expected = oracle.read_truth(case("lora_fc_mp2") / "truth_base.safetensors")
    for key in expected:
        module = key.removesuffix(".weight")
        if f"{module}.lora_A" in truth:
            w, a, b = (
                float32(t) for t in (expected[key], truth[f"{module}.lora_A"], truth[f"{module}.lora_B"])
            )
            expected[key] = oracle.round_to_bfloat16(w + (a @ b) * np.float32(4))
    assert read_flex(tmp_path / "merged") == {key: array.tobytes() for key, array in expected.items()}
    assert not (tmp_path / "merged/scheduler.pdparams").exists()


def float32(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


@pytest.mark.parametrize("layout", ["np", "pt"])
def test_any_range_of_a_file_is_the_same(layout: str, tmp_path: Path) -> None:
    """Also one that begins or ends inside of an element, in several buffers at once, and in another process."""
    base, adapter = write_base("lora_single", tmp_path / "base", layout), case("lora_single") / "checkpoint-3"
    stores = [open_source(str(folder), {}) for folder in (base, adapter)]
    checkpoints = [index_checkpoint(store, shipped_tables()) for store in stores]
    source, _ = merge_into(stores[0], checkpoints[0], stores[1], checkpoints[1])
    path = FILES[layout]
    whole = source.read(path, 0, source.sizes()[path])
    assert whole != stores[0].read(path, 0, len(whole))
    sent = pickle.loads(pickle.dumps(source))
    rng = np.random.default_rng(0)
    for first, last in np.sort(rng.integers(0, len(whole), (200, 2)), axis=1).tolist():
        assert sent.read(path, first, last - first) == whole[first:last]
    buffers = [bytearray(101) for _ in range(40)]
    sent.read_many([Read(path, 97 * n, memoryview(buffer)) for n, buffer in enumerate(buffers)])
    assert buffers == [whole[97 * n : 97 * n + 101] for n in range(40)]


def test_several_formats_of_a_merged_model_hold_the_same(tmp_path: Path) -> None:
    base = write_base("lora_single", tmp_path / "base", "pt")
    places = {tmp_path / "hf": {"format": "huggingface"}, tmp_path / "unified": {"format": "unified"}}
    paddle_reshard.convert(case("lora_single") / "checkpoint-3", places, merge_into=base)
    merged = bits_of(case("lora_single") / "truth_merged.safetensors")
    assert bits_of(tmp_path / "unified/model-00001-of-00001.safetensors") == merged
    found = bits_of(tmp_path / "hf/model.safetensors")
    assert found.keys() == merged.keys()
    key = "model.layers.0.mlp.down_proj.weight"
    assert np.array_equal(
        np.frombuffer(found[key], np.uint16).reshape(32, 48).T,
        np.frombuffer(merged[key], np.uint16).reshape(48, 32),
    )


WEIGHT = "model.layers.1.self_attn.o_proj.weight"


@pytest.mark.parametrize(
    ("source", "change", "options", "words"),
    [
        ("lora_single", {WEIGHT: np.zeros((32, 32), np.float32)}, {}, f"{WEIGHT}: float32; only bfloat16"),
        ("lora_qwen2_single", {}, {}, r"is LoRA of qwen2 \(paddleformers\), .* is a model of llama"),
        ("fp16_single", {}, {}, "holds no LoRA that could be merged"),
        ("lora_single", {}, {"lora_config": "lora_config.json"}, "has its own lora_config.json"),
        ("lora_single", {}, {"format": "hybrid", "to": "sharding=2"}, "parameters only"),
    ],
)
def test_what_cannot_be_merged_is_refused(
    source: str, change: dict[str, np.ndarray], options: dict[str, Any], words: str, tmp_path: Path
) -> None:
    base = write_base("lora_single", tmp_path / "base", "np", change)
    if "lora_config" in options:
        options["lora_config"] = case("lora_single") / "checkpoint-3/lora_config.json"
    with pytest.raises(ReshardError, match=words):
        paddle_reshard.convert(
            case(source) / "checkpoint-3",
            tmp_path / "merged",
            **{"format": "flex", "merge_into": base, **options},
        )
    assert not (tmp_path / "merged").exists()


def test_without_a_lora_config_the_scaling_is_not_known(tmp_path: Path) -> None:
    source = case("lora_fc_single") / "checkpoint-3"
    config = case("lora_single") / "checkpoint-3/config.json"
    with pytest.raises(ReshardError, match=r"has no lora_config.json, .* give it with --lora-config FILE"):
        paddle_reshard.convert(source, tmp_path / "merged", format="flex", config=config, merge_into=source)


def test_statements_about_a_base_of_hugging_face_need_a_step_of_their_own(tmp_path: Path) -> None:
    """They would be about the base as its files hold it, of which the merged tensors are no part."""
    base, rules = write_base("lora_single", tmp_path / "base", "pt"), tmp_path / "rules.txt"
    rules.write_text(f"{WEIGHT}^T -> {WEIGHT}")
    source = case("lora_single") / "checkpoint-3"
    with pytest.raises(ReshardError, match=r"--aoa with a Hugging Face checkpoint: .*convert in two steps"):
        paddle_reshard.convert(source, tmp_path / "made", format="flex", merge_into=base, aoa=rules)
    paddle_reshard.convert(source, tmp_path / "merged", format="flex", merge_into=base)
    paddle_reshard.convert(tmp_path / "merged", tmp_path / "made", format="flex", aoa=rules)
    merged, made = (read_flex(tmp_path / name) for name in ("merged", "made"))
    assert made.keys() == merged.keys()
    turned = np.frombuffer(merged[WEIGHT], np.uint16).reshape(32, 32).T
    assert made == {**merged, WEIGHT: turned.tobytes()}
