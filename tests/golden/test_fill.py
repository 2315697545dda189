"""``--fill``: what sharded saving loses comes from another checkpoint, and is what the trainer had in memory."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

import paddle_reshard
from paddle_reshard.pipeline.changes.change import Altered, Reading
from paddle_reshard.pipeline.changes.fill import filled, open_filling
from paddle_reshard.pipeline.checkpoint.checkpoint import MissingPolicy
from paddle_reshard.pipeline.indexing.detect import index_checkpoint
from paddle_reshard.pipeline.model.rules.tables import shipped_tables
from paddle_reshard.storage.locate import Access, open_source
from paddle_reshard.tasks.index import index_here
from tests.conftest import case_directory, checkpoint_of
from tests.golden.compare_one_card import read_one_card
from tests.golden.unified_cases import read_file as stored
from tests.golden.unified_cases import write_safetensors
from tests.oracle import read_truth

SHARDED = "small-frozen/frozen_llama_sh2_s1v2_meta_ema"
WHOLE = "small-frozen/frozen_llama_single"
EMBEDDING = "model.embed_tokens.weight"
BASES: dict[str, dict[str, Any]] = {
    "huggingface": {"format": "huggingface"},
    "flex": {"format": "flex"},
    "unified": {"format": "unified"},
    "tensor-parallel": {"format": "hybrid-plain", "to": "tp=2"},
}


def truth(case: str = SHARDED) -> dict[str, bytes]:
    return {
        key: array.tobytes() for key, array in read_truth(case_directory(case) / "truth.safetensors").items()
    }


def frozen() -> list[str]:
    """Parameters of which the trainer kept no state."""
    found = truth()
    return [key for key in found if f"{key}.w_0" not in found and re.fullmatch(r".*\.weight", key)]


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The base on one card, as checkpoints of other formats and topologies."""
    folder = tmp_path_factory.mktemp("bases")
    for name, options in BASES.items():
        paddle_reshard.convert(checkpoint_of(WHOLE), folder / name, **options)
    return folder


@pytest.mark.parametrize("base", [None, *BASES])
def test_what_no_file_holds_comes_from_any_checkpoint(base: str | None, bases: Path, tmp_path: Path) -> None:
    given = checkpoint_of(WHOLE) if base is None else bases / base
    report = paddle_reshard.convert(checkpoint_of(SHARDED), tmp_path / "card", to="tp=1", fill=given)
    assert read_one_card(tmp_path / "card") == truth()
    record = json.loads((tmp_path / "card" / "paddle_reshard.json").read_text())["filled"]
    assert record["location"] == str(given)
    assert sorted(record["tensors"]) == sorted(frozen())
    assert f": from {given}" in dict(report.facts())["filled"]
    assert paddle_reshard.check(tmp_path / "card")


def test_a_base_that_nothing_is_taken_from_is_said(tmp_path: Path) -> None:
    planned = paddle_reshard.plan(checkpoint_of(WHOLE), to="tp=1", fill=checkpoint_of(WHOLE))
    assert dict(planned.facts())["filled"].startswith("nothing was lacking")


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"vocab_size": 128}, r"bfloat16 \(96, 32\) in the checkpoint, but bfloat16 \(128, 32\) in "),
        ({"dtype": "float32"}, r"bfloat16 \(96, 32\) in the checkpoint, but float32 \(96, 32\) in "),
    ],
)
def test_a_base_with_another_shape_or_dtype_is_refused(
    options: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    given = tmp_path / "base"
    paddle_reshard.convert(checkpoint_of(WHOLE), given, format="huggingface", **options)
    with pytest.raises(paddle_reshard.CoverageError, match=sentence) as caught:
        paddle_reshard.plan(checkpoint_of(SHARDED), to="tp=1", fill=given)
    assert EMBEDDING in str(caught.value)
    assert f"{given}, given with --fill" in str(caught.value)


def test_a_base_that_lacks_it_too_is_refused() -> None:
    with pytest.raises(paddle_reshard.CoverageError, match="has no such tensor either") as caught:
        paddle_reshard.plan(checkpoint_of(SHARDED), to="tp=1", fill=checkpoint_of(SHARDED))
    assert EMBEDDING in str(caught.value)


def test_a_base_of_another_family_is_refused() -> None:
    other = case_directory("moe/moe_single") / "checkpoint-3"
    with pytest.raises(paddle_reshard.CheckpointError, match=r"a model of qwen3_moe .*of llama"):
        paddle_reshard.plan(checkpoint_of(SHARDED), to="tp=1", fill=other)


def test_a_file_gives_what_is_missing_and_the_rest_is_ignored(bases: Path, tmp_path: Path) -> None:
    """By the keys of the source, or as a model is published."""
    published = stored(bases / "huggingface" / "model.safetensors")
    held = stored(case_directory(SHARDED) / "truth.safetensors")
    own = {key: held[key] for key in [*frozen(), "model.norm.weight"]}
    files = {"own": (own, "np"), "said": (published, "pt")}
    for name, (tensors, layout) in files.items():
        write_safetensors(tmp_path / f"{name}.safetensors", tensors, layout)
        report = paddle_reshard.convert(
            checkpoint_of(SHARDED), tmp_path / name, to="tp=1", fill=tmp_path / f"{name}.safetensors"
        )
        assert read_one_card(tmp_path / name) == truth()
        assert "model.norm.weight" not in dict(report.facts())["filled"]


@pytest.mark.parametrize("layout", ["pt", None])
def test_a_file_of_a_published_model_is_told_by_its_metadata_or_its_keys(
    layout: str | None, tmp_path: Path
) -> None:
    """Queries, keys and values are one tensor in training, and cut from its three parts."""
    source, file = tmp_path / "source", tmp_path / "whole.safetensors"
    paddle_reshard.convert(checkpoint_of("families/qwen3_single"), source, format="huggingface")
    whole = stored(source / "model.safetensors")
    write_safetensors(file, whole, layout)
    kept = {key: held for key, held in whole.items() if "layers.0.self_attn" not in key}
    write_safetensors(source / "model.safetensors", kept)

    paddle_reshard.convert(source, tmp_path / "one", to="tp=1", fill=file)
    paddle_reshard.convert(tmp_path / "one", tmp_path / "again", format="huggingface")
    assert stored(tmp_path / "again" / "model.safetensors") == whole


def test_a_square_projection_is_taken_only_in_a_layout_that_the_file_says(tmp_path: Path) -> None:
    """Published models transpose it, under the same key and in the same shape."""
    key = "model.layers.0.self_attn.o_proj.weight"
    whole, source, own = checkpoint_of("dense/single"), tmp_path / "source", tmp_path / "own.safetensors"
    paddle_reshard.convert(whole, source, format="huggingface")
    given = stored(source / "model.safetensors")
    write_safetensors(source / "model.safetensors", {name: given[name] for name in given.keys() - {key}})
    dtype, shape, data = given[key]
    assert shape[0] == shape[1]

    write_safetensors(own, {key: given[key]}, None)
    with pytest.raises(paddle_reshard.CoverageError, match=rf"{re.escape(key)}.*does not say.*transposed"):
        paddle_reshard.plan(source, to="tp=1", fill=own)
    turned = np.frombuffer(data, "<u2").reshape(shape).T.tobytes()
    for layout, values in (("pt", data), ("np", turned)):
        write_safetensors(own, {key: (dtype, shape, values)}, layout)
        paddle_reshard.convert(source, tmp_path / layout, to="tp=1", fill=own)
        assert read_one_card(tmp_path / layout)[key] == turned


@pytest.mark.parametrize("key", ["lm_head.weight", EMBEDDING])
def test_a_tied_tensor_is_taken_by_any_of_its_keys(key: str, tmp_path: Path) -> None:
    """No job was found whose tied embedding is frozen, so a checkpoint is taken for one that lacks it."""
    store = open_source(str(case_directory("dense/single_tied") / "checkpoint-3"), {})
    whole = index_checkpoint(store, shipped_tables())
    lost = {EMBEDDING, "lm_head.weight"}
    kept = [number for number, tensor in enumerate(whole.catalog.tensors) if tensor.key not in lost]
    tensors = tuple(replace(tensor, missing=tensor.key in lost) for tensor in whole.model.tensors)
    lacking = replace(whole, catalog=whole.catalog.only(kept), model=replace(whole.model, tensors=tensors))
    bits = np.zeros((128, 64), "uint16")  # read as bfloat16
    save_file({key: bits}, tmp_path / "lost.safetensors")
    filling = open_filling(str(tmp_path / "lost.safetensors"), Access({}))
    reading = Reading(shipped_tables(), None, MissingPolicy(), index_here)
    made = filled(filling, Altered.of(store, lacking), reading).source
    assert not any(tensor.missing for tensor in made.model.tensors)
    assert made.catalog.tensors.find(EMBEDDING, "param") is not None
