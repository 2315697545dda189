"""Qwen3.5 of PaddleFleet: from Hugging Face checkpoints to its names and layouts, from one tp rank and two, and back.

Its class declares how such a checkpoint becomes its model. Paddle's own engine executes these statements on random
values for all tensors that ``transformers`` builds (``fleet/vision.json``, ``tests/lab/fleet.py``); conversions
have to hold what it makes.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import paddle_reshard
from paddle_reshard.pipeline.core.errors import CoverageError, RuleError
from tests import oracle
from tests.aoa.arrays import Arrays, Engine, paddle, random_array
from tests.golden.test_fleet import assert_same, exported, read_flex, save_exported, statements
from tests.lab import fleet

DECLARED: dict[str, Any] = json.loads(fleet.VISION.read_text())["families"]
CUT = {
    r"embed_tokens\.weight|lm_head\.weight|o_proj\.weight|out_proj\.weight|down_proj\.weight": 0,
    r"conv1d\.weight|dt_bias|A_log|grouped_gemm_experts\.weight[12]": 0,
    r"qkv_proj\.weight|in_proj\.weight|up_gate_proj\.weight": 1,
}
"""Tensors of the language model → the dim that tp, or ep for experts, cuts in PaddleFleet's ``sharded_state_dict``."""


def published(family: str, variant: str) -> Arrays:
    """A published model with random values."""
    rng, found = np.random.default_rng(17), {}
    shapes = DECLARED[family]["published"]
    if variant == "mtp":
        shapes = {**shapes, **of_mtp(shapes)}
    for key, shape in shapes.items():
        if variant != "tied" or key != "lm_head.weight":
            dtype = "float32" if key.endswith(("A_log", "dt_bias")) else "bfloat16"
            found[key, "param"] = random_array(shape, dtype, rng), dtype
    return found


def of_mtp(shapes: dict[str, list[int]]) -> dict[str, list[int]]:
    """The tensors of multi-token prediction, which ``transformers`` does not have: a layer with full attention, whose
    experts are one by one, and what is around it."""
    full = "model.language_model.layers.1."
    found = {
        key.replace(full, "mtp.layers.0."): shape
        for key, shape in shapes.items()
        if key.startswith(full) and ".experts." not in key
    }
    experts, width, hidden = shapes[f"{full}mlp.experts.gate_up_proj"]
    for expert, name in itertools.product(range(experts), ("gate", "up", "down")):
        shape = [width // 2, hidden] if name != "down" else [hidden, width // 2]
        found[f"mtp.layers.0.mlp.experts.{expert}.{name}_proj.weight"] = shape
    norms = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
    return found | {"mtp.fc.weight": [hidden, 2 * hidden]} | {f"mtp.{n}.weight": [hidden] for n in norms}


def config_of(family: str, variant: str) -> dict[str, Any]:
    """Its ``config.json``."""
    return fleet.vision_config(DECLARED[family]["config"], variant)


def program(family: str, variant: str) -> dict[str, Any]:
    """The statements for its model."""
    return statements(DECLARED[family]["statements"][variant])


def as_published(folder: Path, arrays: Arrays) -> None:
    """Check that a checkpoint holds these arrays and no others."""
    back = exported(folder)
    assert back.keys() == arrays.keys()
    assert all(
        (back[name][0].shape, back[name][0].tobytes()) == (array.shape, array.tobytes())
        for name, (array, _) in arrays.items()
    )


WAYS = [(family, variant) for family in DECLARED for variant in ("plain", "tied")]


@pytest.mark.parametrize(("family", "variant"), [*WAYS, ("qwen3_5_moe", "mtp")])
def test_from_hugging_face_and_back(family: str, variant: str, tmp_path: Path) -> None:
    arrays = published(family, variant)
    save_exported(tmp_path / "hf", arrays, config_of(family, variant))
    paddle_reshard.convert(tmp_path / "hf", tmp_path / "fleet", format="flex")
    declared = Engine(program(family, variant), arrays).parameters()
    assert_same(read_flex(tmp_path / "fleet"), {key: array for (key, _), (array, _) in declared.items()})
    paddle_reshard.convert(tmp_path / "fleet", tmp_path / "back", format="huggingface")
    as_published(tmp_path / "back", arrays)


def test_multi_token_prediction(tmp_path: Path) -> None:
    """It is dropped on request, taken from a donor, and complete; a dense model comes without it only."""
    arrays = published("qwen3_5_moe", "mtp")
    alone = {name: found for name, found in arrays.items() if not name[0].startswith("mtp.")}
    save_exported(tmp_path / "hf", arrays, config_of("qwen3_5_moe", "mtp"))
    paddle_reshard.convert(tmp_path / "hf", tmp_path / "fleet", format="flex")
    paddle_reshard.convert(tmp_path / "fleet", tmp_path / "less", format="huggingface", drop=["mtp"])
    as_published(tmp_path / "less", alone)
    config = json.loads((tmp_path / "less/config.json").read_text())
    assert config["text_config"]["mtp_num_hidden_layers"] == 0
    paddle_reshard.convert(tmp_path / "hf", tmp_path / "short", format="flex", drop=["mtp"])
    paddle_reshard.convert(tmp_path / "short", tmp_path / "like", format="huggingface", like=tmp_path / "hf")
    as_published(tmp_path / "like", arrays)
    config = json.loads((tmp_path / "like/config.json").read_text())
    assert config["text_config"]["mtp_num_hidden_layers"] == 1
    lacking = "mtp.layers.0.mlp.experts.2.down_proj.weight"
    save_exported(
        tmp_path / "lacking",
        {name: found for name, found in arrays.items() if name[0] != lacking},
        config_of("qwen3_5_moe", "mtp"),
    )
    with pytest.raises(CoverageError, match=r"layers\.3\..*\.experts\.2\.down_proj\.weight: no"):
        paddle_reshard.convert(tmp_path / "lacking", tmp_path / "x", format="flex")

    dense = published("qwen3_5", "plain")
    further = {("mtp.fc.weight", "param"): arrays["mtp.fc.weight", "param"]}
    save_exported(tmp_path / "dense", dense | further, config_of("qwen3_5", "mtp"))
    with pytest.raises(RuleError, match=r"mtp\.fc\.weight: .*convert without them with --drop mtp"):
        paddle_reshard.convert(tmp_path / "dense", tmp_path / "x", format="flex")
    paddle_reshard.convert(tmp_path / "dense", tmp_path / "without", format="flex", drop=["mtp"])
    paddle_reshard.convert(tmp_path / "without", tmp_path / "again", format="huggingface")
    as_published(tmp_path / "again", dense)


def tp_dim(key: str) -> int | None:
    """The dim of a tensor that is cut."""
    in_text = key.startswith("model.language_model.")
    return next((dim for pattern, dim in CUT.items() if in_text and re.search(f"({pattern})$", key)), None)


def saved_by_two_ranks(whole: Path, folder: Path, arrays: dict[str, np.ndarray]) -> Path:
    """These arrays as two tp ranks hold them, in a FlexCheckpoint that Paddle writes, after one of a single rank."""
    shutil.copytree(whole, folder, copy_function=shutil.copyfile)
    (folder / "paddle_reshard.json").unlink()
    (path,) = folder.glob("model_state/*.distcp")
    names = oracle.load_with_paddle(path)[oracle.NAME_TABLE]
    path.unlink()
    (path,) = folder.glob("model_state/*.metadata")
    said = paddle.load(str(path))
    pieces, storage, held = {}, {}, ({}, {})
    for index in said.storage_metadata:
        key = index.tensor_key
        dim, array = tp_dim(key), arrays[key]
        locals_ = [array] if dim is None else np.split(array, 2, dim)
        (piece,), pieces[key] = said.state_dict_metadata[key], []
        for rank, local in enumerate(locals_):
            offset = tuple(rank * local.shape[n] if n == dim else 0 for n in range(array.ndim))
            box = {"global_offset": offset, "local_shape": local.shape}
            pieces[key].append(dataclasses.replace(piece, **box, global_shape=array.shape))
            lasting = {"global_offset": offset} if index.local_shape is None else box
            storage[dataclasses.replace(index, **lasting)] = f"{rank}_0.distcp"
            held[rank][key] = np.ascontiguousarray(local)
    said.state_dict_metadata, said.storage_metadata = pieces, storage
    paddle.save(said, str(path))
    for rank, of_rank in enumerate(held):
        table = {key: names[key] for key in of_rank if key in names}
        paddle.save(of_rank | {oracle.NAME_TABLE: table}, str(path.parent / f"{rank}_0.distcp"))
    return folder


@pytest.mark.parametrize("family", DECLARED)
def test_of_two_tp_ranks(family: str, tmp_path: Path) -> None:
    """Each has its share of every part of the projections of linear attention, and half of the experts."""
    arrays = published(family, "plain")
    save_exported(tmp_path / "hf", arrays, config_of(family, "plain"))
    paddle_reshard.convert(tmp_path / "hf", tmp_path / "one", format="flex")
    one = Engine(program(family, "plain"), arrays).parameters()
    wanted = {key: (array.shape, dtype) for (key, _), (array, dtype) in one.items()}
    columns = {key: 2 for key in wanted if tp_dim(key) == 1}
    two = Engine(program(family, "tp2"), arrays, wanted, target_blocks=columns).parameters()
    made = {key: array for (key, _), (array, _) in two.items()}
    for name in ("self_attn.in_proj.weight", "self_attn.conv1d.weight"):
        key = f"model.language_model.layers.0.{name}"
        assert made[key].tobytes() != one[key, "param"][0].tobytes()
    source = saved_by_two_ranks(tmp_path / "one", tmp_path / "two", made)
    paddle_reshard.convert(source, tmp_path / "back", format="huggingface")
    as_published(tmp_path / "back", arrays)
    paddle_reshard.convert(source, tmp_path / "again", format="flex")
    assert_same(read_flex(tmp_path / "again"), read_flex(tmp_path / "one"))


def test_what_has_no_row_is_refused(tmp_path: Path) -> None:
    """Queries without gates where the config says that they have some, and experts one by one."""
    arrays = published("qwen3_5", "plain")
    config = config_of("qwen3_5", "plain")
    config["text_config"] = {**config["text_config"], "attn_output_gate": False}
    save_exported(tmp_path / "hf", arrays, config)
    with pytest.raises(RuleError, match=r"qkv_proj\.weight: .* \(16, 48\).* \(16, 72\)"):
        paddle_reshard.convert(tmp_path / "hf", tmp_path / "fleet", format="flex")
    arrays = {
        (key.replace("experts.gate_up_proj", "experts.0.gate_proj.weight"), state): found
        for (key, state), found in published("qwen3_5_moe", "plain").items()
    }
    save_exported(tmp_path / "moe", arrays, config_of("qwen3_5_moe", "plain"))
    with pytest.raises(RuleError, match=r"experts\.0\.gate_proj\.weight: no row of the paddlefleet"):
        paddle_reshard.convert(tmp_path / "moe", tmp_path / "fleet", format="flex")
