"""A head with values of its own, which the config ties to the word embedding: two parameters, and no copies."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file, save_file

import paddle_reshard
from paddle_reshard.pipeline.core.errors import RuleError, TiedDriftError
from tests.conftest import COMMITTED, case_directory

SOURCE = COMMITTED / "mp2pp2sh2_s1v2_meta_ema" / "checkpoint-3"
FORMATS: dict[str, dict[str, Any]] = {
    "huggingface": {"format": "huggingface"},
    "flex": {"format": "flex"},
    "unified": {"format": "unified", "drop": ["ema"]},
    "hybrid": {"to": "tp=1"},
}


def tie(folder: Path, tied: bool) -> None:
    config = json.loads((folder / "config.json").read_bytes())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": tied}))


@pytest.fixture(scope="module", params=FORMATS)
def trained_apart(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with a head of its own and a config that ties it."""
    folder = tmp_path_factory.mktemp(request.param) / "checkpoint"
    paddle_reshard.convert(SOURCE, folder, **FORMATS[request.param])
    (folder / "paddle_reshard.json").unlink()
    tie(folder, True)
    return folder


@pytest.mark.parametrize("options", [{}, {"replicas": "report"}, {"replicas": "first"}])
def test_neither_of_two_parameters_is_taken_for_the_other(
    options: dict[str, Any], trained_apart: Path, tmp_path: Path
) -> None:
    with pytest.raises(TiedDriftError) as refused:
        paddle_reshard.convert(trained_apart, tmp_path / "t", format="huggingface", **options)
    for named in ("model.embed_tokens.weight", "lm_head.weight", "tie_word_embeddings"):
        assert named in str(refused.value)
    assert "--allow" not in str(refused.value)
    assert not (tmp_path / "t").exists()


def test_a_parameter_name_of_its_own_is_told_as_such(tmp_path: Path) -> None:
    paddle_reshard.convert(SOURCE, tmp_path / "one", to="tp=1")
    (tmp_path / "one" / "paddle_reshard.json").unlink()
    tie(tmp_path / "one", True)
    with pytest.raises(RuleError, match=r"lm_head\.weight has a parameter name of its.*tie_word"):
        paddle_reshard.convert(tmp_path / "one", tmp_path / "t", to="tp=2")


def test_with_the_entry_that_fits_both_are_converted(trained_apart: Path, tmp_path: Path) -> None:
    apart = tmp_path / "apart"
    shutil.copytree(trained_apart, apart)
    tie(apart, False)
    assert paddle_reshard.verify(SOURCE, apart, subset=True).equal
    paddle_reshard.convert(apart, tmp_path / "t", format="huggingface")
    paddle_reshard.convert(SOURCE, tmp_path / "wanted", format="huggingface")
    assert (tmp_path / "t/model.safetensors").read_bytes() == (
        tmp_path / "wanted/model.safetensors"
    ).read_bytes()


@pytest.mark.parametrize("options", [{}, {"replicas": "report"}, {"replicas": "first"}])
def test_a_class_with_one_tensor_for_both_takes_no_head_of_its_own(
    options: dict[str, Any], tmp_path: Path
) -> None:
    """Another library trained them apart, as its config.json says; this class has one all the same."""
    paddle_reshard.convert(
        case_directory("families/gemma3_text_single") / "checkpoint-3",
        tmp_path / "hf",
        format="huggingface",
        dtype="float32",
    )
    (tmp_path / "hf/paddle_reshard.json").unlink()
    tie(tmp_path / "hf", False)
    arrays = load_file(tmp_path / "hf/model.safetensors")
    arrays["lm_head.weight"] = arrays["model.embed_tokens.weight"] * 2
    save_file(arrays, tmp_path / "hf/model.safetensors", {"format": "pt"})
    with pytest.raises(TiedDriftError, match=r"lm_head\.weight.*has one tensor for both") as refused:
        paddle_reshard.convert(
            tmp_path / "hf", tmp_path / "t", to="tp=1", convention="paddleformers", **options
        )
    assert "--allow" not in str(refused.value)
    assert not (tmp_path / "t").exists()
