"""Every rule table with Hugging Face forms: a checkpoint goes out as such a model and comes back, bit for bit.

What comes back is read by Python's unpickler or Paddle, and compared with what the trainer had in memory.
"""

from __future__ import annotations

from pathlib import Path

import pytest

import paddle_reshard
from paddle_reshard.pipeline.model.rules.tables import shipped_tables
from tests import oracle
from tests.golden.compare_one_card import read_one_card
from tests.golden.test_families import EXPORTS
from tests.golden.test_fleet import CASES as FLEET
from tests.golden.test_fleet import assert_same, exported, read_flex
from tests.golden.test_fleet_only import DECLARED as FLEET_ONLY
from tests.golden.test_fleet_vision import DECLARED as FLEET_VISION
from tests.golden.test_newer_checkpoints import checkpoint, truth_of

TRAINED = {
    "deepseek_v2.paddlenlp": "moe/nlp_dsv2_single",
    "deepseek_v3.paddleformers": "moe/dsv3_single",
    "ernie4_5.paddleformers": "families/ernie4_5_single",
    "ernie4_5_moe.paddleformers": "moe/ernie45moe_single",
    "gemma3_text.paddleformers": "families/gemma3_text_single",
    "glm4_moe.paddleformers": "moe/glm4moe_single",
    "glm4v_moe.paddleformers": "families/glm4v_moe_single",
    "glm_ocr.paddleformers": "families/glm_ocr_single",
    "gpt_oss.paddleformers": "moe/gptoss_single",
    "llama.paddleformers": "single",
    "llama.paddlenlp": "nlp_single",
    "paddleocr_vl.paddleformers": "families/paddleocr_vl_single",
    "phi3.paddleformers": "families/phi3_single",
    "qwen2.paddleformers": "families/qwen2_single",
    "qwen2.paddlenlp": "small-families/nlp_qwen2_mp2pp2sh2_s1v2_meta",
    "qwen2_5_vl.paddleformers": "families/qwen2_5_vl_single",
    "qwen2_moe.paddleformers": "moe/qwen2moe_single",
    "qwen2_moe.paddlenlp": "moe/nlp_qwen2moe_single",
    "qwen3.paddleformers": "families/qwen3_single",
    "qwen3_moe.paddleformers": "moe/moe_single",
    "qwen3_next.paddleformers": "families/qwen3_next_single",
    "qwen3_vl.paddleformers": "families/qwen3_vl_single",
    "qwen3_vl_moe.paddleformers": "families/qwen3_vl_moe_single",
}
"""Table → a real checkpoint of the family."""
ALSO = [f"{family}.paddleformers" for family in EXPORTS]
"""Those that ``test_families.py`` lets come back in other topologies too."""
SAVED = "ernie4_5_moe_vl.paddleformers"
"""Its class builds and saves the model, and does not train without GPUs."""
FOR_FLEET = {f"{family}.paddlefleet": case for case, family in FLEET.items()}
"""Table of PaddleFleet → a real checkpoint of PaddleFormers, which is given PaddleFleet's names first."""
NEVER_SEEN = "deepseek_v3.paddlenlp"
"""No checkpoint was available: a model of PaddleFormers is given PaddleNLP's names."""


def test_every_table_goes_there_and_back() -> None:
    """But for those of recipes, to which no way leads from published names."""
    proven = [table for table in shipped_tables() if table.proven.huggingface and not table.recipe]
    tables = {f"{table.family}.{table.convention}" for table in proven}
    here = {*TRAINED, *FOR_FLEET, SAVED, NEVER_SEEN}
    assert here | {f"{family}.paddlefleet" for family in (*FLEET_ONLY, *FLEET_VISION)} == tables


@pytest.mark.parametrize(
    "table",
    [pytest.param(table, marks=pytest.mark.exhaustive) if table in ALSO else table for table in TRAINED],
)
def test_a_trained_model(table: str, tmp_path: Path) -> None:
    name, convention = TRAINED[table], table.partition(".")[2]
    paddle_reshard.convert(checkpoint(name), tmp_path / "hf", format="huggingface")
    paddle_reshard.convert(tmp_path / "hf", tmp_path / "back", to="tp=1", convention=convention)
    truth = truth_of(name)
    assert read_one_card(tmp_path / "back") == {key: truth[key].tobytes() for key in oracle.shapes_of(truth)}


@pytest.mark.parametrize("table", FOR_FLEET)
def test_a_model_with_the_names_of_paddlefleet(table: str, tmp_path: Path) -> None:
    to_fleet = {"format": "flex", "convention": "paddlefleet"}
    source = tmp_path / "fleet"
    paddle_reshard.convert(
        checkpoint(FOR_FLEET[table]), source, config=checkpoint(FOR_FLEET[table]) / "config.json", **to_fleet
    )
    paddle_reshard.convert(source, tmp_path / "hf", format="huggingface")
    paddle_reshard.convert(tmp_path / "hf", tmp_path / "back", **to_fleet)
    held = read_flex(tmp_path / "back")
    before = read_flex(source)
    assert_same(held, {key: before[key] for key in held})
    masters = {key for key in before if key.endswith(".w_0") and not key.startswith("ema_state/")}
    assert {key.removesuffix(".w_0") for key in masters} <= held.keys()


def test_a_model_that_was_saved_and_not_trained(tmp_path: Path) -> None:
    source = checkpoint("families/ernie4_5_moe_vl_saved")
    paddle_reshard.convert(source, tmp_path / "hf", format="huggingface")
    paddle_reshard.convert(tmp_path / "hf", tmp_path / "flex", format="flex")
    truth = oracle.read_truth(source.parent / "truth.safetensors")
    assert_same(read_flex(tmp_path / "flex"), truth)
    paddle_reshard.convert(tmp_path / "flex", tmp_path / "again", format="huggingface")
    first, again = exported(tmp_path / "hf"), exported(tmp_path / "again")
    assert_same({k: a for (k, _), (a, _) in again.items()}, {k: a for (k, _), (a, _) in first.items()})


def test_a_model_with_names_that_no_file_has_shown(tmp_path: Path) -> None:
    paddle_reshard.convert(checkpoint("moe/dsv3_single"), tmp_path / "hf", format="huggingface")
    paddle_reshard.convert(tmp_path / "hf", tmp_path / "nlp", to="tp=1", convention="paddlenlp")
    assert "deepseek_v3.embed_tokens.weight" in read_one_card(tmp_path / "nlp")
    paddle_reshard.convert(tmp_path / "nlp", tmp_path / "again", format="huggingface")
    first, again = exported(tmp_path / "hf"), exported(tmp_path / "again")
    assert_same({k: a for (k, _), (a, _) in again.items()}, {k: a for (k, _), (a, _) in first.items()})
