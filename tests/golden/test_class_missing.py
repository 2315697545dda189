"""Layers that no file holds are missed, and those of another kind than the class builds are refused."""

import json
import shutil
from pathlib import Path

import pytest
import safetensors

import paddle_reshard
from paddle_reshard.pipeline.core.errors import CoverageError
from tests.conftest import case_directory
from tests.golden.unified_cases import write_safetensors


def _export_without(name: str, part: str, folder: Path) -> Path:
    """A Hugging Face folder of a case without a class of tensors."""
    [checkpoint] = case_directory(name).glob("checkpoint-*")
    paddle_reshard.convert(checkpoint, folder, format="huggingface")
    path = folder / "model.safetensors"
    held = dict(safetensors.deserialize(path.read_bytes()))
    kept = {
        key: (entry["dtype"], entry["shape"], bytes(entry["data"]))
        for key, entry in held.items()
        if part not in key
    }
    write_safetensors(path, kept)
    return folder


def test_layers_of_multi_token_prediction_that_the_config_announces_are_missed(tmp_path: Path) -> None:
    source = _export_without("states/dsv3_mtp_small_single", "model.layers.3.", tmp_path / "hf")

    with pytest.raises(CoverageError, match=r"layers\.3\.\S+: no file .*num_nextn_predict_layers: 1.*--drop"):
        paddle_reshard.convert(source, tmp_path / "refused", to="tp=1")

    paddle_reshard.convert(source, tmp_path / "done", to="tp=1", drop=("mtp",))
    assert json.loads((tmp_path / "done" / "config.json").read_text())["num_nextn_predict_layers"] == 0


@pytest.mark.parametrize(
    ("case", "entries", "words"),
    [
        ("moe/moe_single", {"mlp_only_layers": [1]}, "layer 1 has one dense MLP, and the files hold experts"),
        ("moe/glm4moe_single", {"first_k_dense_replace": 0}, "layer 0 has experts, and the files hold one dense"),
        ("moe/dsv3_single", {"first_k_dense_replace": 2}, "layer 1 has one dense MLP, and the files hold experts"),
        (
            "families/qwen3_next_single",
            {"layer_types": ["full_attention", "linear_attention"]},
            "layer 0 has full attention, and the files hold linear attention",
        ),
    ],
)  # fmt: skip
def test_layers_are_of_the_kind_that_the_class_builds(
    case: str, entries: dict[str, object], words: str, tmp_path: Path
) -> None:
    """transformers, too, would begin with other values there, and only warns."""
    [checkpoint] = case_directory(case).glob("checkpoint-*")
    source = tmp_path / "source"
    shutil.copytree(checkpoint, source, copy_function=shutil.copyfile)
    paddle_reshard.inspect(source)
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, **entries}))
    with pytest.raises(paddle_reshard.CheckpointError, match=words):
        paddle_reshard.convert(source, tmp_path / "refused", format="huggingface")
