"""Statements about a Hugging Face checkpoint are about the tensors in its files, as Paddle's loader reads them."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

import paddle_reshard
from tests import oracle
from tests.aoa.arrays import paddle
from tests.aoa.test_conversions import PROGRAMS
from tests.conftest import case_directory

from paddle.distributed.flex_checkpoint.dcp.sharded_weight import make_replicated_sharded_weight  # isort: skip

CASES = {
    "llama": "mp2sh2_s1v2_meta_mid",
    "llama_tied": "mp2_tied",
    "phi3": "families/phi3_single",
    "qwen3_moe": "exports/qwen3_moe",
    "gpt_oss": "exports/gpt_oss",
}
HEAD = "lm_head.weight"


def exported(case: str, to: Path) -> Path:
    """As the library itself exports it, where the case has that."""
    if (theirs := case_directory(case) / "hf-export").exists():
        return theirs
    paddle_reshard.convert(case_directory(case) / "checkpoint-3", to, format="huggingface")
    return to


def program(family: str, to: Path) -> Path:
    """PaddleFormers' own map for loading a Hugging Face checkpoint."""
    to.write_text(json.dumps(json.loads((PROGRAMS / f"{family}.json").read_text())["forward"]))
    return to


def loaded_by_paddle(
    source: Path, rules: Path, like: dict[str, np.ndarray], to: Path
) -> dict[str, np.ndarray]:
    """What Paddle's loader puts into tensors of these shapes and dtypes.

    The head is loaded again by itself: of two targets that one tensor feeds, Paddle 3.3.1 leaves one unloaded.
    """
    to.mkdir()
    for path in source.glob("*.safetensors"):
        shutil.copyfile(path, to / path.name)
    found = {}
    config = json.loads(rules.read_text())
    of_head = [text for text in config["aoa_statements"] if HEAD in text]
    for keys, statements in ((sorted(like), config["aoa_statements"]), ([HEAD], of_head)):
        targets = {key: make_replicated_sharded_weight(key, zeros_like(like[key])) for key in keys}
        asked = {**config, "aoa_statements": statements}
        paddle.distributed.load_state_dict(targets, str(to), safetensors=True, aoa_config=asked)
        found |= {key: bits(made.local_tensor) for key, made in targets.items()}
    return found


def zeros_like(array: np.ndarray) -> paddle.Tensor:
    return paddle.zeros(list(array.shape), dtype="bfloat16" if array.dtype == np.uint16 else array.dtype.name)


def bits(tensor: paddle.Tensor) -> np.ndarray:
    return (tensor.view("uint16") if tensor.dtype == paddle.bfloat16 else tensor).numpy()


@pytest.mark.parametrize("family", CASES)
def test_as_paddle_loads_the_files(family: str, tmp_path: Path) -> None:
    source, rules = exported(CASES[family], tmp_path / "source"), program(family, tmp_path / "rules.json")
    paddle_reshard.convert(source, tmp_path / "made", format="flex", aoa=rules)
    (path,) = (tmp_path / "made" / "model_state").glob("*.distcp")
    made = {
        key: np.asarray(value)
        for key, value in oracle.load_with_paddle(path).items()
        if key != "StructuredToParameterName@@"
    }
    theirs = loaded_by_paddle(source, rules, made, tmp_path / "copy")
    assert {HEAD, "model.embed_tokens.weight"} <= made.keys()
    assert {key: (a.shape, a.tobytes()) for key, a in made.items()} == {
        key: (a.shape, a.tobytes()) for key, a in theirs.items()
    }


@pytest.mark.parametrize("family", sorted(CASES.keys() - {"qwen3_moe"}))
def test_a_job_gets_what_the_rule_table_gives(family: str, tmp_path: Path) -> None:
    """The map of qwen3_moe leaves its routers in float32, as the file has them; the trainer has them in bfloat16."""
    source, rules = exported(CASES[family], tmp_path / "source"), program(family, tmp_path / "rules.json")
    paddle_reshard.convert(source, tmp_path / "built in", to="tp=1")
    paddle_reshard.convert(source, tmp_path / "aoa", to="tp=1", aoa=rules)
    assert paddle_reshard.verify(tmp_path / "built in", tmp_path / "aoa").equal
