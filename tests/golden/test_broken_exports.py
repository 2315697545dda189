"""What ``inspect`` says of a folder that cannot be served: PaddleOCR-VL without small files, or without a tensor."""

from __future__ import annotations

from pathlib import Path

import pytest

import paddle_reshard
from paddle_reshard.pipeline.core.errors import ReshardError
from tests.conftest import case_directory
from tests.golden.unified_cases import read, write_safetensors

POSITIONS = "visual.vision_model.embeddings.packing_position_embedding.weight"


@pytest.fixture
def export(tmp_path: Path) -> Path:
    source = case_directory("families/paddleocr_vl_sh2_s1v2_meta") / "checkpoint-3"
    paddle_reshard.convert(source, tmp_path / "model", format="huggingface")
    return tmp_path / "model"


def lacks(folder: Path) -> str:
    return dict(paddle_reshard.inspect(folder).facts()).get("lacks", "")


def test_it_names_the_small_files_that_an_engine_reads(export: Path, tmp_path: Path) -> None:
    assert "no tokenizer and no image processor" in lacks(export)
    donor = tmp_path / "donor"
    donor.mkdir()
    for path in export.iterdir():
        if path.name != "paddle_reshard.json":
            (donor / path.name).write_bytes(path.read_bytes())
    (donor / "tokenizer.json").write_text("{}")
    (donor / "preprocessor_config.json").write_text("{}")
    source = case_directory("small-lora/lora_paddleocr_vl_sh2_s1v2_meta") / "checkpoint-3"
    paddle_reshard.convert(source, tmp_path / "merged", format="huggingface", merge_into=donor)
    assert not lacks(tmp_path / "merged")
    assert (tmp_path / "merged/preprocessor_config.json").exists()
    (tmp_path / "merged/preprocessor_config.json").unlink()
    assert lacks(tmp_path / "merged").startswith("no image processor:")


def test_it_names_the_tensor_that_is_missing(export: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_bytes((export / "config.json").read_bytes())
    held = read(export)
    del held[POSITIONS]
    write_safetensors(broken / "model.safetensors", held)
    with pytest.raises(ReshardError, match=rf"{POSITIONS}: no file holds it, and every model"):
        paddle_reshard.inspect(broken)
