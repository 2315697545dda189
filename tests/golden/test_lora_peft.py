"""LoRA as the library peft opens it: names, shapes, layout and entries, read by the safetensors library."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import safetensors

import paddle_reshard
from paddle_reshard.pipeline.core.errors import ReshardError
from tests import oracle
from tests.conftest import case_directory

PREFIX = "base_model.model."


def checkpoint(name: str) -> Path:
    return case_directory(f"states/{name}") / "checkpoint-3"


def tensors_of(path: Path) -> dict[str, np.ndarray]:
    return {
        key: np.frombuffer(entry["data"], np.uint16).reshape(entry["shape"])
        for key, entry in safetensors.deserialize(path.read_bytes())
    }


def parts_of_qwen2(key: str, matrix: np.ndarray) -> dict[str, np.ndarray]:
    """What becomes of a matrix of Qwen2 with 4 heads of 8 elements and 2 key/value heads, written down once more."""
    module, name = key.rsplit(".", 1)
    if module.endswith("qkv_proj"):
        q, k, v = np.split(matrix.reshape(-1, 2, 32), [16, 24], axis=2) if name == "lora_B" else [matrix] * 3
        parts = {"q_proj": q, "k_proj": k, "v_proj": v}
    elif module.endswith("up_gate_proj"):
        gate, up = np.split(matrix, 2, axis=1) if name == "lora_B" else [matrix] * 2
        parts = {"gate_proj": gate, "up_proj": up}
    else:
        parts = {module.rpartition(".")[2]: matrix}
    above = module.rpartition(".")[0]
    return {
        f"{PREFIX}{above}.{part}.{name}.weight": values.reshape(len(matrix), -1).T
        for part, values in parts.items()
    }


@pytest.mark.parametrize("name", ["lora_pp2", "lora_qwen2_single", "lora_fc_mp2"])
def test_an_adapter_for_peft(name: str, tmp_path: Path) -> None:
    of_flex = {
        key: checkpoint("lora_single") / f"{file}.json"
        for key, file in (("config", "config"), ("lora_config", "lora_config"))
    }
    paddle_reshard.convert(
        checkpoint(name), tmp_path / "made", format="huggingface", **(of_flex if "fc" in name else {})
    )
    truth = oracle.read_truth(case_directory(f"states/{name}") / "truth.safetensors")
    expected: dict[str, np.ndarray] = {}
    for key, matrix in truth.items():
        if key.endswith((".lora_A", ".lora_B")):
            plain = {f"{PREFIX}{key}.weight": matrix.T}
            expected |= parts_of_qwen2(key, matrix) if "qwen2" in name else plain
    found = tensors_of(tmp_path / "made/adapter_model.safetensors")
    assert found.keys() == expected.keys()
    for key, array in expected.items():
        assert np.array_equal(found[key], array), key
    entries = json.loads((tmp_path / "made/adapter_config.json").read_bytes())
    assert (entries["peft_type"], entries["r"], entries["lora_alpha"], entries["use_rslora"]) == (
        "LORA", 4, 8, False,
    )  # fmt: skip
    assert entries["target_modules"] == [
        "down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj",
    ]  # fmt: skip
    assert (entries["base_model_name_or_path"], entries["bias"], entries["fan_in_fan_out"]) == (
        "base",
        "none",
        False,
    )
    assert sorted(path.name for path in (tmp_path / "made").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
        "paddle_reshard.json",
    ]


def test_without_a_lora_config_there_is_no_scaling(tmp_path: Path) -> None:
    config = checkpoint("lora_single") / "config.json"
    with pytest.raises(ReshardError, match="which holds the scaling; give it with --lora-config FILE"):
        paddle_reshard.convert(
            checkpoint("lora_fc_single"), tmp_path / "made", format="huggingface", config=config
        )
