"""Our exports have the keys and shapes that ``transformers`` itself writes for their ``config.json``, and engines load.

``tests/lab/transformers_keys.py`` and ``tests/lab/engines`` made the lists; ``make serving`` lets ``transformers`` load
the exports.
"""

from __future__ import annotations

import json
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
import safetensors

from paddle_reshard.pipeline.model.rules.table import RuleTable
from paddle_reshard.pipeline.model.rules.tables import shipped_tables
from tests.serving.cases import CASES, LOGITS, ServedCase


def _list(name: str) -> dict[str, Any]:
    return json.loads(Path(__file__).with_name(f"{name}.json").read_text())["cases"]


WRITTEN = _list("transformers")
ENGINES = {engine: _list(engine) for engine in ("vllm", "sglang", "fastdeploy")}
"""Engine → case → what its own loader made of the export: ``Recorder.entry`` of ``tests/lab/engines/common.py``."""
NOT_LOADED = {
    # SGLang takes its head for tied: transformers 5 says so of a config.json without text_config.
    ("sglang", "families/paddleocr_vl_single"): "Parameter 'lm_head.weight' not found",
    # FastDeploy falls back to PaddleFormers for these, which needs PaddleFleet for them, or does not know the model.
    ("fastdeploy", "families/glm4v_moe_single"): "No module named 'paddlefleet_ops'",
    ("fastdeploy", "families/qwen3_next_sh2_s1v2_meta"): "No module named 'paddlefleet_ops'",
    ("fastdeploy", "moe/nlp_dsv2_ep_dp2sh2_s1v2_meta"): "model type `deepseek_v2`",
    ("fastdeploy", "moe/nlp_qwen2moe_single"): "paddlefleet is required",
    ("fastdeploy", "moe/qwen2moe_single"): "paddlefleet is required",
}
"""What the engine says."""
UNFILLED = {
    # Parameters with which these classes do not compute anything.
    ("sglang", "families/glm_ocr_single"): ("*.position_embedding.weight", "*.post_conv_layernorm.weight"),
    ("fastdeploy", "families/paddleocr_vl_single"): ("visual.vision_model.head.*",),
    # Its fallback to PaddleFormers loses matrices of gemma3_text, without an error.
    ("fastdeploy", "families/gemma3_text_sh2_s1v2_meta"): ("*.qkv_proj.weight", "*.up_gate_proj.weight"),
}
"""Patterns of the parameters that the engine has and no key fills."""
FALLBACK = {"sglang": "TransformersForCausalLM", "fastdeploy": "PaddleFormersForCausalLM"}
"""The class of an engine for models that it does not know itself."""


def test_every_case_is_in_the_lists() -> None:
    assert list(WRITTEN) == [case.name for case in CASES]
    assert all(loaded.keys() == WRITTEN.keys() for loaded in ENGINES.values())


def assert_loads(engine: str, case: ServedCase, keys: set[str], config: dict[str, Any]) -> None:
    """Every key is one that the engine took, and together they fill every parameter of the class it chooses."""
    loaded, known = ENGINES[engine][case.name], (engine, case.name)
    assert (known in NOT_LOADED) == ("error" in loaded)
    if known in NOT_LOADED:
        assert NOT_LOADED[known] in loaded["error"]
        return
    assert loaded["class"] in (*config["architectures"], FALLBACK.get(engine))
    filling = {key for found in loaded["parameters"].values() for key in found}
    assert keys == filling | set(loaded["further"])
    assert all(loaded["parameters"].values())
    patterns = UNFILLED.get(known, ())
    unfilled = loaded.get("unfilled", [])
    assert all(any(fnmatchcase(name, pattern) for pattern in patterns) for name in unfilled)
    assert bool(patterns) == bool(unfilled)
    if not loaded["copied"]:
        assert all(case.is_mtp(key) or case.is_only_read(key) for key in loaded["further"])


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_keys_and_shapes_are_those_of_transformers(case: ServedCase, tmp_path: Path) -> None:
    case.export(tmp_path / "hf")
    entries = safetensors.deserialize((tmp_path / "hf/model.safetensors").read_bytes())
    shapes = {key: entry["shape"] for key, entry in entries if not case.is_mtp(key)}
    written = {key: shape for key, shape in WRITTEN[case.name].items() if not case.is_only_read(key)}
    assert {key: shape for key, shape in shapes.items() if not case.is_only_read(key)} == written
    assert bool(case.only_read) == (shapes != WRITTEN[case.name])
    config = json.loads((tmp_path / "hf/config.json").read_text())
    for engine in ENGINES:
        assert_loads(engine, case, {key for key, _ in entries}, config)


def test_only_answers_of_paddlenlp_are_not_known() -> None:
    """Its models do not run in the laboratory: that their exports load is all that is shown."""
    assert {case.name for case in CASES if not case.logits.exists()} == {
        case.name for case in CASES if case.convention == "paddlenlp"
    }
    assert set(LOGITS.glob("*.npz")) <= {case.logits for case in CASES}


@pytest.mark.parametrize("table", [*shipped_tables()], ids=lambda table: f"{table.family}-{table.convention}")
def test_a_table_is_called_proven_by_transformers_if_a_case_here_proves_it(table: RuleTable) -> None:
    asked = {(case.config["model_type"], case.convention) for case in CASES if case.logits.exists()}
    current = table.version is None and not table.recipe
    proven = table.proven is not None and table.proven.huggingface == "transformers"
    assert proven == bool(current and asked & {(of_type, table.convention) for of_type in table.model_types})
