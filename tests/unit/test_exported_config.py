"""``config.json`` of an export: what ``transformers`` opens, and by what it computes the same as the trainer."""

from __future__ import annotations

import json
from typing import Any

import pytest

from paddle_reshard.pipeline.core.tensors import dtype_named
from paddle_reshard.pipeline.model.transformers_config import agreed_config, exported_config

GEMMA = {
    "model_type": "gemma3_text",
    "paddleformers_version": "1.2.0",
    "layer_types": ["sliding_attention", "full_attention"],
    "rope_theta": 1_000_000.0,
    "rope_local_base_freq": 10_000.0,
}
ROPE = {"rope_type": "yarn", "factor": 40, "original_max_position_embeddings": 4096}
DEEPSEEK = {"model_type": "deepseek_v3", "paddleformers_version": "1.2.0", "max_position_embeddings": 8192}
GLM_OCR = {"model_type": "glm_ocr", "paddleformers_version": "1.2.0"}
QWEN_VL = {"model_type": "qwen2_5_vl", "architectures": ["Qwen2_5_VLForConditionalGeneration"]}
ERNIE = {"model_type": "ernie4_5_moe", "paddleformers_version": "1.2.0"}
QWEN_NEXT = {"model_type": "qwen3_next"}
LINEAR, FULL = ["linear_attention"] * 3, "full_attention"
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
    "glm_ocr": (
        {**GLM_OCR, "text_config": {"rms_norm_eps": 1e-5, "hidden_size": 32}},
        {"text_config": {"rms_norm_eps": 1e-6, "hidden_size": 32, "attention_bias": False}},
        "rms_norm_eps of text_config is 1e-06 instead of 1e-05",
    ),
    "glm_ocr by default": (
        {**GLM_OCR, "text_config": {}},
        {"text_config": {"rms_norm_eps": 1e-6, "attention_bias": False}},
        "is 1e-06 instead of 1e-05",
    ),
    "glm_ocr, rotated heads": (
        {**GLM_OCR, "text_config": {"rms_norm_eps": 1e-6, "rope_parameters": {"rope_theta": 1e4}}},
        {
            "text_config": {
                "rms_norm_eps": 1e-6,
                "rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 1.0},
                "attention_bias": False,
            },
        },
        "",
    ),
    "norms of glm4v_moe": (
        {"model_type": "glm4v_moe", "architectures": ["X"], "text_config": {}},
        {"text_config": {"use_qk_norm": False}},
        "",
    ),
    "no class": (
        {"model_type": "qwen2_5_vl", "architectures": None},
        {"architectures": ["Qwen2_5_VLForConditionalGeneration"]},
        "",
    ),
    "a class": ({"model_type": "qwen2_5_vl", "architectures": ["Qwen2_5_VLTextModel"]}, {}, ""),
    "no class of others": ({"model_type": "gpt"}, {}, ""),
    "experts": ({"model_type": "qwen3_moe", "num_local_experts": 4}, {"num_experts": 4}, ""),
    "experts, as published": ({"model_type": "qwen3_moe", "num_experts": 4}, {}, ""),
    "experts of gpt_oss": ({"model_type": "gpt_oss", "num_experts": 4}, {"num_local_experts": 4}, ""),
    "experts of others": ({"model_type": "qwen3_next", "num_experts": 4}, {}, ""),
    "experts of minimax_m2": (
        {"model_type": "minimax_m2", "n_routed_experts": 4, "moe_intermediate_size": 8},
        {"num_local_experts": 4, "intermediate_size": 8},
        "",
    ),
    "gelu": (
        {"vision_config": {"hidden_act": "gelu_tanh", "depth": 2}},
        {"vision_config": {"hidden_act": "gelu_pytorch_tanh", "depth": 2}},
        "",
    ),
    "channels of qwen2_5_vl": (
        {**QWEN_VL, "vision_config": {"in_channels": 3}}, {"vision_config": {"in_channels": 3, "in_chans": 3}}, ""
    ),
    "channels of others": ({"model_type": "paddleocr_vl", "vision_config": {"in_channels": 3}}, {}, ""),
    "class of ernie": (
        {"model_type": "ernie4_5", "architectures": ["Ernie4_5_ForCausalLM"]},
        {"architectures": ["Ernie4_5ForCausalLM"]},
        "",
    ),
    "routing of ernie": (ERNIE, {"moe_use_aux_free": True}, ""),
    "routing of ernie, without a bias": ({**ERNIE, "moe_use_aux_free": False}, {}, ""),
    "routing of ernie, of another library": ({"model_type": "ernie4_5_moe"}, {}, ""),
    "interval": ({**QWEN_NEXT, "layer_types": [*LINEAR, FULL] * 2}, {"full_attention_interval": 4}, ""),
    "interval, cut": ({**QWEN_NEXT, "layer_types": [*LINEAR, FULL, *LINEAR]}, {"full_attention_interval": 4}, ""),
    "interval, another": ({**QWEN_NEXT, "layer_types": [*LINEAR, FULL, FULL]}, {}, ""),
    "interval, none": ({**QWEN_NEXT, "layer_types": LINEAR}, {}, ""),
    "deepseek as published": ({**DEEPSEEK, "max_position_embeddings": 163_840, "rope_scaling": ROPE}, {}, ""),
}  # fmt: skip


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


@pytest.mark.parametrize(
    ("config", "exported"),
    [
        ({"dtype": "bfloat16"}, {"torch_dtype": "float16"}),
        ({"dtype": "bfloat16", "torch_dtype": "bfloat16"}, {"torch_dtype": "float16"}),
        ({}, {"torch_dtype": "float16"}),
        (
            {"torch_dtype": "bfloat16", "text_config": {"dtype": "bfloat16"}, "vision_config": {}},
            {"torch_dtype": "float16", "text_config": {"torch_dtype": "float16"}, "vision_config": {}},
        ),
    ],
)
def test_the_dtype_has_one_name(config: dict[str, Any], exported: dict[str, Any]) -> None:
    """FastDeploy takes weights for Paddle's own layout by the other one, and refuses both."""
    assert exported_config(config, dtype_named("float16")).entries == exported
    as_trained = exported_config({**config, "source": "paddle"}, None).entries
    assert as_trained == json.loads(json.dumps(exported if config else {}).replace("float16", "bfloat16"))
