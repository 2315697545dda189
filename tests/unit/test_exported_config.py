"""``config.json`` of an export: what ``transformers`` opens, and by what it computes the same as the trainer."""

from __future__ import annotations

from typing import Any

import pytest

from paddle_reshard.pipeline.layouts.huggingface.config import agreed_config, exported_config

GEMMA = {
    "model_type": "gemma3_text",
    "paddleformers_version": "1.2.0",
    "layer_types": ["sliding_attention", "full_attention"],
    "rope_theta": 1_000_000.0,
    "rope_local_base_freq": 10_000.0,
}
ROPE = {"rope_type": "yarn", "factor": 40, "original_max_position_embeddings": 4096}
DEEPSEEK = {"model_type": "deepseek_v3", "paddleformers_version": "1.2.0", "max_position_embeddings": 8192}
CASES = {
    "no window": ({"sliding_window": False}, {"sliding_window": None}, ""),
    "a window": ({"sliding_window": 4096}, {}, ""),
    "gemma": (GEMMA, {"rope_local_base_freq": 1_000_000.0}, "is 1000000.0 instead of 10000.0"),
    "gemma, full attention alone": ({**GEMMA, "layer_types": ["full_attention"]}, {}, ""),
    "gemma, not of PaddleFormers": ({k: v for k, v in GEMMA.items() if k[:6] != "paddle"}, {}, ""),
    "gemma, scaled": ({**GEMMA, "rope_scaling": {"rope_type": "linear"}}, {}, "with linear rope too"),
    "deepseek": (
        {**DEEPSEEK, "rope_scaling": ROPE, "rope_parameters": ROPE},
        {key: {**ROPE, "factor": 2.0} for key in ("rope_scaling", "rope_parameters")},
        "factor of rope_scaling is 2 instead of 40",
    ),
    "deepseek, scaled softmax": (
        {**DEEPSEEK, "rope_scaling": {**ROPE, "mscale_all_dim": 1.0}},
        {},
        "with the factor 40 of rope_scaling; their results differ",
    ),
    "deepseek as published": ({**DEEPSEEK, "max_position_embeddings": 163_840, "rope_scaling": ROPE}, {}, ""),
}


@pytest.mark.parametrize("name", CASES)
def test_entries_by_which_both_libraries_compute_the_same(name: str) -> None:
    config, changed, remark = CASES[name]
    exported = exported_config(config, None)
    assert exported.entries == {**config, **changed}
    assert len(exported.remarks) == bool(remark)
    assert all(remark in said for said in exported.remarks)
    assert agreed_config(exported.entries) == exported.entries


@pytest.mark.parametrize("value", [None, [], "x", 1, True, {}, -1.5, {"rope_type": [], "factor": "2"}])
@pytest.mark.parametrize("config", [GEMMA, {**DEEPSEEK, "rope_scaling": ROPE}])
def test_an_entry_of_another_type_is_left_as_it_is(config: dict[str, Any], value: object) -> None:
    """Whoever wrote the file: what an export does not understand of it, it does not touch."""
    for entry in config:
        if entry not in ("model_type", "rope_theta", "rope_local_base_freq"):
            odd = {**config, entry: value}
            assert exported_config(odd, None).entries.get(entry) == value
    for inner in ROPE:
        odd = {**config, "rope_scaling": {**ROPE, inner: value}}
        exported_config(odd, None)
