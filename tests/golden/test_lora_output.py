"""What LoRA training leaves when it ends: ``final/peft_model-*.safetensors``."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import paddle_reshard
from paddle_reshard.pipeline.core.errors import ReshardError
from tests import oracle
from tests.conftest import case_directory
from tests.golden.compare_one_card import bits, load

CASES = ["lora_fc_single", "lora_fc_mp2"]


def final(name: str) -> Path:
    return case_directory(f"states/{name}") / "final"


@pytest.mark.parametrize("name", CASES)
def test_it_holds_the_matrices_of_the_truth(name: str, tmp_path: Path) -> None:
    found = paddle_reshard.inspect(final(name))
    assert (found.format, found.adapter is not None) == ("unified", True)
    paddle_reshard.convert(final(name), tmp_path / "hybrid", format="hybrid-plain", to="tp=1")
    held = load(tmp_path / "hybrid/lora_model_state.pdparams")
    held.pop("StructuredToParameterName@@")
    truth = oracle.read_truth(final(name).parent / "truth.safetensors")
    matrices = {key: array.tobytes() for key, array in truth.items() if key.endswith(("lora_A", "lora_B"))}
    assert {key: bits(value) for key, value in held.items()} == matrices
    assert len(matrices) == 28
    paddle_reshard.convert(final(name), tmp_path / "ranks", format="hybrid-plain", to="tp=2,pp=2")
    assert paddle_reshard.verify(final(name), tmp_path / "ranks").equal
    assert not list((tmp_path / "ranks").glob("optimizer*"))


def without_index(folder: Path) -> None:
    (folder / "peft_model.safetensors.index.json").unlink()


def without_a_file(folder: Path) -> None:
    (folder / "peft_model-00002-of-00002.safetensors").unlink()


def misplaced(folder: Path) -> None:
    path = folder / "peft_model.safetensors.index.json"
    index = json.loads(path.read_text())
    key = sorted(index["weight_map"])[0]
    index["weight_map"][key] = "peft_model-00002-of-00002.safetensors"
    path.write_text(json.dumps(index))


def with_optimizer(folder: Path) -> None:
    shutil.copy(
        folder / "peft_model-00001-of-00002.safetensors", folder / "optimizer-00001-of-00001.safetensors"
    )


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (without_index, r"peft_model\.safetensors\.index\.json is missing"),
        (without_a_file, r"lora_B: peft_model\.safetensors\.index\.json and the files disagree"),
        (misplaced, r"lora_A: peft_model\.safetensors\.index\.json and the files disagree"),
        (with_optimizer, r"optimizer-00001-of-00001\.safetensors: in one folder with peft_model-00001-of-00002"),
    ],
)  # fmt: skip
def test_files_that_are_not_one_adapter(damage: Callable[[Path], None], message: str, tmp_path: Path) -> None:
    shutil.copytree(final("lora_fc_mp2"), tmp_path / "final", copy_function=shutil.copyfile)
    damage(tmp_path / "final")
    with pytest.raises(ReshardError, match=message):
        paddle_reshard.convert(tmp_path / "final", tmp_path / "target", format="huggingface")


def test_it_has_no_base_for_a_flex_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(ReshardError, match="holds the base model, which the source does not contain"):
        paddle_reshard.convert(final("lora_fc_single"), tmp_path / "target", format="flex")
