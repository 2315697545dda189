"""Weights in the layout of ERNIE's ``-Paddle`` repositories are read as what they are."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import paddle_reshard
from tests.ernie_layout import read, write_ernie_layout
from tests.serving.cases import CASES, ServedCase

ERNIE = [case for case in CASES if case.name in ("families/ernie4_5_single", "moe/ernie45moe_mpmoe_mp2")]
LOADED = json.loads((Path(__file__).parents[1] / "serving/fastdeploy.json").read_text())["cases"]


@pytest.fixture
def written(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """The export of a case, and ``ernie``, the same model in the other layout."""
    case, metadata = request.param
    case.export(tmp_path / "hf")
    write_ernie_layout(tmp_path / "hf", tmp_path / "ernie", metadata)
    return tmp_path


@pytest.mark.parametrize(
    "written", [(case, {"format": "np"}) for case in ERNIE] + [(ERNIE[0], {})], indirect=True
)
def test_it_becomes_the_same_export(written: Path) -> None:
    config = written / "ernie/config.json"
    published = json.loads(config.read_text())
    del published["paddleformers_version"]
    config.write_text(json.dumps(published | {"moe_use_aux_free": True}))
    paddle_reshard.convert(written / "ernie", written / "back", format="huggingface")
    assert (written / "back/model.safetensors").read_bytes() == (
        written / "hf/model.safetensors"
    ).read_bytes()
    assert {"Ernie4_5ForCausalLM", "Ernie4_5_MoeForCausalLM"} > set(
        json.loads((written / "back/config.json").read_text())["architectures"]
    )


@pytest.mark.parametrize("written", [(ERNIE[1], {"format": "pd"})], indirect=True)
def test_training_starts_from_it(written: Path) -> None:
    paddle_reshard.convert(written / "ernie", written / "job", to="tp=2", format="hybrid-plain")
    paddle_reshard.convert(written / "job", written / "back", format="huggingface")
    assert read(written / "back/model.safetensors").keys() == read(written / "hf/model.safetensors").keys()
    assert (written / "back/model.safetensors").read_bytes() == (
        written / "hf/model.safetensors"
    ).read_bytes()


@pytest.mark.parametrize("written", [(ERNIE[0], {"format": "np"})], indirect=True)
def test_another_family_in_it_is_refused(written: Path) -> None:
    config = written / "ernie/config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"model_type": "qwen2"}))
    with pytest.raises(paddle_reshard.UnsupportedError, match="not supported for qwen2; supported: ernie4_5"):
        paddle_reshard.convert(written / "ernie", written / "back", format="huggingface")


@pytest.mark.parametrize("case", ERNIE, ids=lambda case: case.name)
def test_fastdeploy_fills_the_same_parameters_from_both(case: ServedCase) -> None:
    assert LOADED[case.name]["ernie_layout"] == LOADED[case.name]["sha256"]
