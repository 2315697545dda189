"""Our exports have the keys and shapes that ``transformers`` itself writes for their ``config.json``, and vLLM loads.

``tests/lab/transformers_keys.py`` and ``tests/lab/engines.py`` made the lists; ``make serving`` lets ``transformers``
load the exports.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors

from paddle_reshard.pipeline.layouts.rules import RuleTable, shipped_tables
from tests.serving.cases import CASES, LOGITS, ServedCase

WRITTEN = json.loads(Path(__file__).with_name("transformers.json").read_text())["cases"]
LOADED = json.loads(Path(__file__).with_name("vllm.json").read_text())["cases"]
"""Case → what vLLM's own loader made of the export: ``tests.lab.engines.load``."""


def test_every_case_is_in_the_lists() -> None:
    assert list(WRITTEN) == [case.name for case in CASES]
    assert LOADED.keys() == WRITTEN.keys()


def assert_vllm_loads(case: ServedCase, keys: set[str], config: dict[str, Any]) -> None:
    """Every key is one that vLLM's loader took, and together they fill every parameter of the class it chooses."""
    loaded = LOADED[case.name]
    assert config["architectures"] == [loaded["class"]]
    filling = {key for found in loaded["parameters"].values() for key in found}
    assert keys == filling | set(loaded["further"])
    assert all(loaded["parameters"].values())
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
    assert_vllm_loads(case, {key for key, _ in entries}, config)


def test_only_answers_of_paddlenlp_are_not_known() -> None:
    """Its models do not run in the laboratory: that their exports load is all that is shown."""
    assert {case.name for case in CASES if not case.logits.exists()} == {
        case.name for case in CASES if case.convention == "paddlenlp"
    }
    assert set(LOGITS.glob("*.npz")) <= {case.logits for case in CASES}


@pytest.mark.parametrize("table", shipped_tables(), ids=lambda table: f"{table.family}-{table.convention}")
def test_a_table_is_called_proven_by_transformers_if_a_case_here_proves_it(table: RuleTable) -> None:
    asked = {(case.config["model_type"], case.convention) for case in CASES if case.logits.exists()}
    proven = table.proven is not None and table.proven.huggingface == "transformers"
    assert proven == bool(asked & {(of_type, table.convention) for of_type in table.model_types})
