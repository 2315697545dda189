"""Families of the group ``families`` with a table of their own: through every axis, and what transformers reads.

``test_newer_checkpoints.py`` holds the tensors of every case against its truth, ``test_as_the_job_reads.py`` files
against those of the trainer.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import paddle_reshard
from paddle_reshard.pipeline.core.errors import CheckpointError, CoverageError, ReshardError
from tests import oracle
from tests.conftest import case_directory
from tests.golden.compare_one_card import read_one_card
from tests.golden.test_newer_checkpoints import truth_of
from tests.golden.unified_cases import read_file as _read
from tests.golden.unified_cases import read_unified, write_safetensors

OWN = "hf-export/model-00001-of-00001.safetensors"
EXPORTS = {
    "qwen3_next": "hf-right/model.safetensors",
    "qwen2_5_vl": OWN.replace("export", "export-derived"),
    "qwen3_vl": OWN,
    "qwen3_vl_moe": OWN,
    "glm4v_moe": "hf-right/model.safetensors",
    "glm_ocr": OWN,
    "paddleocr_vl": OWN,
}
"""Family → what ``transformers`` computes the logits of the Paddle model from, of the case on one card; of qwen3_vl_moe
what the library exports."""
THROUGH = [f"{family}_single" for family in EXPORTS if family != "paddleocr_vl"]
THROUGH.append("paddleocr_vl_sh2_s1v2_meta")
SAVED = [f"{family}_single" for family in EXPORTS] + ["qwen3_next_single_tohf", "qwen2_5_vl_single_tohf"]


def _checkpoint(name: str) -> Path:
    return case_directory(f"families/{name}") / "checkpoint-3"


def cut_by(name: str) -> str:
    """tp=2, or 1 for families of which the trainer starts no job with tp."""
    return "tp=1" if name.startswith(("paddleocr_vl", "gemma3_text")) else "tp=2"


@pytest.mark.parametrize("name", THROUGH)
def test_through_every_axis_and_back(name: str, tmp_path: Path) -> None:
    cut, flex, back = tmp_path / "cut", tmp_path / "flex", tmp_path / "back"
    source = _checkpoint(name)
    paddle_reshard.convert(source, cut, to=f"{cut_by(name)},sharding=2", sharding_strategy="stage1v2")
    paddle_reshard.convert(cut, flex, format="flex", max_shard_size="20KB")
    paddle_reshard.convert(flex, back, to="tp=1", config=source / "config.json")
    assert read_one_card(back) == {
        key: array.tobytes() for key, array in truth_of(f"families/{name}").items()
    }
    if (
        name.endswith("_single") and "glm4v_moe" not in name
    ):  # a FlexCheckpoint does not hold the name of its buffers
        oracle.assert_same_structure(oracle.structure(back), oracle.structure(source))


@pytest.mark.parametrize("name", SAVED)
def test_an_export_is_what_transformers_reads_and_the_way_back(name: str, tmp_path: Path) -> None:
    family = name.partition("_single")[0]
    paddle_reshard.convert(_checkpoint(name), tmp_path / "hf", format="huggingface")
    right = _read(case_directory(f"families/{family}_single") / EXPORTS[family])
    assert _read(tmp_path / "hf" / "model.safetensors") == right
    truth = oracle.read_truth(case_directory(f"families/{name}") / "truth.safetensors")
    parameters = {key: truth[key] for key in oracle.shapes_of(truth)}
    paddle_reshard.convert(tmp_path / "hf", tmp_path / "unified", format="unified")
    oracle.assert_same_tensors(read_unified(tmp_path / "unified"), parameters)
    paddle_reshard.convert(tmp_path / "hf", tmp_path / "started", to=cut_by(name))
    paddle_reshard.convert(tmp_path / "started", tmp_path / "joined", to="tp=1")
    files = truth_of(f"families/{name}")
    keys = oracle.shapes_of(files)
    saved = {key: array.tobytes() for key, array in files.items() if key in keys}
    assert read_one_card(tmp_path / "joined") == saved


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"to": "pp=2"}, r"pp=2: paddleformers has no pipeline class of qwen2_5_vl"),
        ({"to": "tp=4"}, r"tp=4 does not divide num_key_value_heads=2"),
    ],
)
def test_what_the_library_cannot_is_refused(options: dict, message: str, tmp_path: Path) -> None:
    with pytest.raises(ReshardError, match=message):
        paddle_reshard.convert(_checkpoint("qwen2_5_vl_single"), tmp_path / "x", **options)


def test_a_model_as_it_is_published_is_imported(tmp_path: Path) -> None:
    """Qwen2.5-VL has the entries of its language model in no section, and ``in_chans``."""
    source = _checkpoint("qwen2_5_vl_single")
    paddle_reshard.convert(source, tmp_path / "hf", format="huggingface")
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    published = {**config.pop("text_config"), **config}
    published["vision_config"]["in_chans"] = published["vision_config"].pop("in_channels")
    del published["paddleformers_version"]
    (tmp_path / "hf" / "config.json").write_text(json.dumps(published))
    paddle_reshard.convert(tmp_path / "hf", tmp_path / "one", to="tp=1")
    files = truth_of("families/qwen2_5_vl_single")
    assert read_one_card(tmp_path / "one") == {key: files[key].tobytes() for key in oracle.shapes_of(files)}


def test_a_section_of_the_config_that_disagrees_is_named(tmp_path: Path) -> None:
    shutil.copytree(_checkpoint("qwen3_vl_single"), tmp_path / "one", copy_function=shutil.copyfile)
    config = json.loads((tmp_path / "one" / "config.json").read_text())
    config["vision_config"]["depth"] = 3
    (tmp_path / "one" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ReshardError, match=r"config\.json says 3 .*vision_config\.depth.*; layer 2 is"):
        paddle_reshard.inspect(tmp_path / "one")


def test_a_tensor_under_its_own_key_and_the_one_it_is_saved_under_is_refused(tmp_path: Path) -> None:
    """Either could be meant; one of them would be dropped without a word where no master weight contradicts it."""
    source = shutil.copytree(_checkpoint("qwen2_5_vl_single_tohf"), tmp_path / "source")
    entries = _read(source / "model.safetensors")
    twice = "visual.blocks.0.attn.proj.bias"
    tensors = entries | {f"model.{twice}": entries[twice]}
    write_safetensors(source / "model.safetensors", tensors)
    message = rf"{twice} and model\.{twice} are both model\.{twice} of the model"
    with pytest.raises(CheckpointError, match=message):
        paddle_reshard.plan(source, to="tp=1")


def test_the_vocabulary_of_a_section_grows(tmp_path: Path) -> None:
    source = _checkpoint("qwen2_5_vl_single")
    paddle_reshard.convert(source, tmp_path / "padded", to="tp=1", vocab_size=160)
    config = json.loads((tmp_path / "padded" / "config.json").read_text())
    assert config["text_config"]["vocab_size"] == 160
    assert "vocab_size" not in config
    paddle_reshard.convert(tmp_path / "padded", tmp_path / "back", to="tp=1", vocab_size=128)
    assert paddle_reshard.verify(source, tmp_path / "back").equal


def test_stacked_experts_go_out_one_by_one_and_come_back(tmp_path: Path) -> None:
    """As the library's own export has them, but for routers, which it rounds to bfloat16."""
    case = "qwen3_moe_fused_single"
    paddle_reshard.convert(_checkpoint(case), tmp_path / "hf", format="huggingface")
    ours = _read(tmp_path / "hf" / "model.safetensors")
    theirs = _read(case_directory(f"families/{case}") / "hf-export/model-00001-of-00001.safetensors")
    assert ours.keys() == theirs.keys()
    assert {key for key in ours if ours[key] != theirs[key]} == {
        f"model.layers.{layer}.mlp.gate.weight" for layer in (0, 1)
    }
    assert paddle_reshard.verify(_checkpoint(case), tmp_path / "hf", states=["param"]).equal
    paddle_reshard.convert(tmp_path / "hf", tmp_path / "unified", format="unified")
    truth = oracle.read_truth(case_directory(f"families/{case}") / "truth.safetensors")
    oracle.assert_same_tensors(
        read_unified(tmp_path / "unified"), {key: truth[key] for key in oracle.shapes_of(truth)}
    )
    lost = "model.layers.1.mlp.experts.2.up_proj.weight"
    write_safetensors(tmp_path / "hf" / "model.safetensors", {key: ours[key] for key in ours if key != lost})
    with pytest.raises(CoverageError, match=rf"{lost}: no file holds it, and it is a part of"):
        paddle_reshard.plan(tmp_path / "hf", format="unified")


@pytest.mark.parametrize("case", ["families/gemma3_text_single", "moe/nlp_qwen2moe_single"])
def test_an_export_with_another_config_is_still_the_same_model(case: str, tmp_path: Path) -> None:
    source = case_directory(case) / "checkpoint-3"
    paddle_reshard.convert(source, tmp_path / "hf", format="huggingface")
    ours, theirs = (folder / "config.json" for folder in (tmp_path / "hf", source))
    changed = {"rope_local_base_freq", "sliding_window"}
    assert any(json.loads(ours.read_text()).get(k) != json.loads(theirs.read_text()).get(k) for k in changed)
    assert paddle_reshard.verify(source, tmp_path / "hf", states=["param"]).equal
