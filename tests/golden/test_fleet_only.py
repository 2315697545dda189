"""Families that only PaddleFleet trains: from Hugging Face checkpoints to its names and layouts, and back.

Their classes declare how such a checkpoint becomes their model. Paddle's own engine executes these statements on random
values for all tensors that ``transformers`` saves of a small model (``fleet/only.json``, ``tests/lab/fleet.py``);
conversions have to hold what it makes.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import paddle_reshard
from paddle_reshard.pipeline.core.errors import RuleError
from tests import oracle
from tests.aoa.arrays import Arrays, Engine, paddle, random_array
from tests.golden.test_fleet import assert_same, exported, read_flex, save_exported, statements
from tests.lab import fleet

DECLARED: dict[str, Any] = json.loads(fleet.ONLY.read_text())["families"]
WAYS = [(family, variant) for family, found in DECLARED.items() for variant in found["statements"]]


def published(family: str, variant: str) -> Arrays:
    """A published model with random values, in the tensors that ``transformers`` saves."""
    rng, found = np.random.default_rng(17), {}
    layers = DECLARED[family]["config"]["num_hidden_layers"]
    saved = "published_with_biases" if variant == "bias" else "published"
    shapes = {key: tuple(shape) for key, shape in DECLARED[family][saved].items()}
    if "mtp" in variant:
        hidden, last = DECLARED[family]["config"]["hidden_size"], f"model.layers.{layers - 1}."
        shapes |= {
            key.replace(last, f"model.layers.{layers}."): shape
            for key, shape in shapes.items()
            if key.startswith(last)
        }
        shapes |= {f"model.layers.{layers}.eh_proj.weight": (hidden, 2 * hidden)}
        norms = ("enorm", "hnorm", "shared_head.norm")
        shapes |= {f"model.layers.{layers}.{name}.weight": (hidden,) for name in norms}
    for key, shape in shapes.items():
        if variant != "tied" or key != "lm_head.weight":
            dtype = "float32" if key.endswith("e_score_correction_bias") else "bfloat16"
            found[key, "param"] = random_array(shape, dtype, rng), dtype
    return found


@pytest.mark.parametrize(("family", "variant"), WAYS)
def test_from_hugging_face_and_back(family: str, variant: str, tmp_path: Path) -> None:
    arrays = published(family, variant)
    config = DECLARED[family]["config"] | fleet.ONLY_VARIANTS[variant]
    save_exported(tmp_path / "hf", arrays, config)
    paddle_reshard.convert(tmp_path / "hf", tmp_path / "fleet", format="flex")
    declared = Engine(statements(DECLARED[family]["statements"][variant]), arrays).parameters()
    wanted = {key: array for (key, _), (array, _) in declared.items()}
    if variant == "tied" and family in fleet.READ:
        # Without the model that it is to fill, the engine drops a key that another one is made of.
        wanted["model.embed_tokens.weight"] = arrays["model.embed_tokens.weight", "param"][0]
    elif variant == "tied":
        wanted["model.shared_head.weight"] = wanted["model.lm_head.weight"]
    assert_same(read_flex(tmp_path / "fleet"), wanted)
    paddle_reshard.convert(tmp_path / "fleet", tmp_path / "back", format="huggingface")
    back = exported(tmp_path / "back")
    assert back.keys() == arrays.keys()
    assert all(back[name][0].tobytes() == array.tobytes() for name, (array, _) in arrays.items())
    if "mtp" in variant:
        paddle_reshard.convert(tmp_path / "fleet", tmp_path / "less", format="huggingface", drop=["mtp"])
        behind = re.compile(rf"model\.layers\.{config['num_hidden_layers']}\.")
        assert exported(tmp_path / "less").keys() == {key for key in arrays if not behind.match(key[0])}


def test_hybrid_files_are_described_by_themselves(tmp_path: Path) -> None:
    """What the table does not tell, the files do: names of parameters, and their order."""
    config = DECLARED["kimi_k2"]["config"]
    save_exported(tmp_path / "hf", published("kimi_k2", "plain"), config)
    paddle_reshard.convert(tmp_path / "hf", tmp_path / "fleet", format="flex")
    held = read_flex(tmp_path / "fleet")
    source = tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_text(json.dumps(config | {"paddleformers_version": "1.2.0"}))
    names = {key: f"linear_{number}.w_0" for number, key in enumerate(held)}
    paddle.save({**held, oracle.NAME_TABLE: names}, str(source / "model_state.pdparams"))
    assert paddle_reshard.inspect(source).family == "kimi_k2"
    paddle_reshard.convert(source, tmp_path / "flex", format="flex")
    assert_same(read_flex(tmp_path / "flex"), held)
    paddle_reshard.convert(source, tmp_path / "hybrid", to="tp=1")
    made = oracle.load_with_paddle(tmp_path / "hybrid" / "model_state.pdparams")
    assert made.pop(oracle.NAME_TABLE) == names
    assert_same(made, held)


def test_fused_projections_that_have_no_rows(tmp_path: Path) -> None:
    """The class would not find the separate ones."""
    config = DECLARED["minicpm"]["config"] | {"fuse_attention_qkv": True}
    save_exported(tmp_path / "hf", published("minicpm", "plain"), config)
    with pytest.raises(RuleError, match=r"[kqv]_proj\.weight: no row of the paddlefleet .* 'minicpm'"):
        paddle_reshard.convert(tmp_path / "hf", tmp_path / "fleet", format="flex")


def _hybrid_files(folder: Path, library: str) -> Path:
    """A checkpoint of two tp ranks of a family of which a table knows other formats or another library."""
    folder.mkdir()
    (folder / "config.json").write_text(
        json.dumps(DECLARED["kimi_k2"]["config"] | {f"{library}_version": "3.0"})
    )
    for rank in range(2):
        held = {"model.norm.weight": np.ones(16, np.float32)}
        names = {"model.norm.weight": "norm_0.w_0"}
        paddle.save({**held, oracle.NAME_TABLE: names}, str(folder / f"model_state.tp0{rank}.pdparams"))
    return folder


KNOWN_IN_PART = [
    ("paddleformers", r"the paddlefleet rule table knows it in the formats flex and huggingface only"),
    ("paddlenlp", r"no rule table knows it as paddlenlp trains it, only as paddlefleet does"),
]


@pytest.mark.parametrize(("library", "known"), KNOWN_IN_PART)
def test_what_a_table_of_other_formats_or_another_library_knows(
    library: str, known: str, tmp_path: Path
) -> None:
    source = _hybrid_files(tmp_path / "source", library)
    assert known in str(paddle_reshard.inspect(source).rules)
    for options in ({"to": "tp=1"}, {"format": "huggingface"}):
        with pytest.raises(RuleError, match=rf"'kimi_k2': {known}, and the source's files.*--rules"):
            paddle_reshard.convert(source, tmp_path / "target", **options)
