"""What ``inspect`` says of a folder that cannot be served: PaddleOCR-VL without small files."""

from __future__ import annotations

from pathlib import Path

import paddle_reshard
from tests.conftest import case_directory


def lacks(folder: Path) -> str:
    return dict(paddle_reshard.inspect(folder).facts()).get("lacks", "")


def test_it_names_the_small_files_that_an_engine_reads(tmp_path: Path) -> None:
    export = tmp_path / "model"
    source = case_directory("families/paddleocr_vl_sh2_s1v2_meta") / "checkpoint-3"
    paddle_reshard.convert(source, export, format="huggingface")
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
