"""Auto-parallel checkpoints: states under parameter names, in one folder of nested keys."""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest

from paddle_reshard import convert, inspect
from paddle_reshard.pipeline.core.errors import CheckpointError, PlanError, UsageError
from tests import oracle
from tests.conftest import REPO, case_directory
from tests.golden.test_flex import LOAD, files_of
from tests.paddle_processes import run_paddle

RULES = REPO / "pipeline" / "model" / "rules"
STATES = (*oracle.MOMENTS, *oracle.POWERS)
# The tensors of the small model of ``auto_dp2mp2``: two linear layers between an embedding and a head.
ROWS = [
    ("embed.weight", "embedding", 0),
    ("up.weight", "linear", 1),
    ("up.bias", "linear", 0),
    ("down.weight", "linear", 0),
    ("norm.weight", "layer_norm", None),
    ("norm.bias", "layer_norm", None),
    ("head.weight", "linear", 1),
]
SAVE_NESTED = """
import sys
import paddle
flat = paddle.load(f"{sys.argv[1]}/0_0.distcp")
nested = {"model": {}, "optimizer": {"master_weights": {}}}
for key, value in flat.items():
    part, _, name = key.partition(".")
    if name.startswith("master_weights."):
        nested["optimizer"]["master_weights"][name.removeprefix("master_weights.")] = value
    else:
        nested[part][name] = value
paddle.distributed.save_state_dict(nested, sys.argv[2], safetensors=True)
"""

# As two ranks write dist tensors into FlexCheckpoint folders: columns of matrices, and parameter names with ``.dist``.
SAVE_DIST_TENSORS = """
import pathlib
import sys
import paddle
from paddle.distributed.flex_checkpoint.dcp.metadata import LocalTensorIndex, LocalTensorMetadata, Metadata
NAMES = {"model_state": "generated_tensor_{}", "master_weight": "linear_{}.w_0.dist_fp32_master_0"}
for folder in ("model_state", "master_weight", "optimizer_state"):
    target = pathlib.Path(sys.argv[2], folder)
    files, metadata = ({}, {}), Metadata({}, {}, {})
    for number, (key, whole) in enumerate(paddle.load(f"{sys.argv[1]}/{folder}/0_0.distcp").items()):
        cut = whole.ndim == 2 and whole.shape[1] % 2 == 0
        for rank, piece in enumerate(paddle.split(whole, 2, axis=1) if cut else [whole]):
            piece = piece.clone()
            piece.name = NAMES.get(folder, "linear_{}.w_0.dist_fp32_master_0_moment").format(number)
            offset = (0, rank * piece.shape[1]) if cut else (0,) * whole.ndim
            kind, local = str(piece.dtype).removeprefix("paddle."), tuple(piece.shape)
            described = LocalTensorMetadata(offset, local, kind, tuple(whole.shape), False, None)
            metadata.state_dict_metadata.setdefault(key, []).append(described)
            index = LocalTensorIndex(key, offset, False, None, None, local)
            metadata.storage_metadata[index] = f"{rank}_0.distcp"
            files[rank][key] = piece
        metadata.flat_mapping[key] = (key,)
    target.mkdir(parents=True)
    paddle.save(metadata, str(target / "0.metadata"))
    for rank, state in enumerate(files):
        paddle.save(state, str(target / f"{rank}_0.distcp"))
"""


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A rule table and a config for the small model."""
    folder = tmp_path_factory.mktemp("given")
    rows = [
        {"key": key, "item": "all", "name_class": name_class, "source": "test"}
        | ({} if split is None else {"split": split})
        for key, name_class, split in ROWS
    ]
    items = [{"name": "all", "layer_class": "DecoderLayer", "repeated": True}]
    table = {
        "family": "small",
        "convention": "paddleformers",
        "model_types": [],
        "items": items,
        "rules": rows,
    }
    (folder / "rules.json").write_text(json.dumps(table))
    (folder / "config.json").write_text(json.dumps({"model_type": "small", "num_hidden_layers": 0}))
    return {"rules": folder / "rules.json", "config": folder / "config.json"}


def by_structured_name(case: Path) -> oracle.Tensors:
    """The truth of ``auto_dp2mp2``, spelled as that of the other cases."""
    names = json.loads((case / "truth_report.json").read_text())["names"]
    truth = oracle.read_truth(case / "truth.safetensors")
    found = {key: truth[f"model/{key}"] for key in names}
    return found | {
        f"{key}.{state}": truth[f"optimizer/{name}_{state}"]
        for key, name in names.items()
        for state in STATES
    }


def test_a_real_one_becomes_the_truth_and_stays_itself(given: dict[str, Path], tmp_path: Path) -> None:
    case = case_directory("dense/auto_dp2mp2")
    real, made = tmp_path / "checkpoint-3", tmp_path / "made"
    shutil.copytree(case / "checkpoint-3", real, copy_function=shutil.copyfile)
    # It was not written by a trainer, and has no schedule.
    shutil.copy(case_directory("mp2_tied") / "checkpoint-3/scheduler.pdparams", real)
    convert(real, tmp_path / "hybrid", to="tp=2", **given)
    truth = by_structured_name(case)
    found = oracle.read_checkpoint(tmp_path / "hybrid", oracle.shapes_of(truth))
    oracle.assert_same_tensors(found, truth)

    convert(real, made, format="auto-parallel", max_shard_size="200KB", **given)
    flat = {
        key.replace("/", ".", 1): value
        for key, value in oracle.read_truth(case / "truth.safetensors").items()
    }
    np.savez(tmp_path / "truth.npz", **flat)
    assert run_paddle(LOAD, made / "dist_ckpt", tmp_path / "truth.npz").strip().endswith(f"equal {len(flat)}")
    ours, theirs = names_in(made), names_in(real)
    assert ours == theirs
    metadata = [pickle.loads((root / "dist_ckpt/0.metadata").read_bytes()) for root in (made, real)]
    assert metadata[0].flat_mapping == metadata[1].flat_mapping


def test_an_auto_parallel_job_cuts_fused_tensors_in_their_logical_order(tmp_path: Path) -> None:
    """Its folders are named like those of a hybrid-parallel job, in which every rank has a part of gate and of up."""
    case = case_directory("families/phi3_single")
    real, made = case / "checkpoint-3", tmp_path / "made"
    convert(real, tmp_path / "whole", format="flex")
    shutil.copytree(real, made, ignore=shutil.ignore_patterns("*.pdparams", "*.pdopt", "saved_signal_*"))
    shutil.copy(tmp_path / "whole/scheduler.pdparams", made)
    run_paddle(SAVE_DIST_TENSORS, tmp_path / "whole", made)
    assert "an auto-parallel job wrote these folders" in inspect(made).unproven
    convert(made, tmp_path / "hybrid", to="tp=1")
    truth = oracle.read_truth(case / "truth.safetensors")
    found = oracle.read_checkpoint(tmp_path / "hybrid", oracle.shapes_of(truth))
    oracle.assert_same_tensors(found, truth)


def names_in(checkpoint: Path) -> dict[str, str]:
    found: dict[str, str] = {}
    for path in (checkpoint / "dist_ckpt").glob("*.distcp"):
        found |= oracle.load_with_paddle(path)[oracle.NAME_TABLE]
    return found


def test_paddle_loads_master_weights_under_the_names_of_one_rank(tmp_path: Path) -> None:
    """Of two tp ranks without sequence parallelism, whose names are those of one rank."""
    case = case_directory("mp2_tied")
    truth = oracle.read_truth(case / "truth.safetensors")
    names = oracle.load_with_paddle(case / "checkpoint-3/model_state.tp00.pdparams")[oracle.NAME_TABLE]
    flat = {f"model.{key}": truth[key] for key in names}
    for key, name in names.items():
        if f"{key}.w_0" in truth:
            flat[f"optimizer.master_weights.{name}.dist"] = truth[f"{key}.w_0"]
        for state in STATES:
            if f"{key}.{state}" in truth:
                flat[f"optimizer.{name}.dist_fp32_master_0_{state}"] = truth[f"{key}.{state}"]
    convert(case / "checkpoint-3", tmp_path / "auto", format="auto-parallel", max_shard_size="200KB")
    np.savez(tmp_path / "truth.npz", **flat)
    told = run_paddle(LOAD, tmp_path / "auto/dist_ckpt", tmp_path / "truth.npz")
    assert told.strip().endswith(f"equal {len(flat)}")
    assert names_in(tmp_path / "auto").keys() == flat.keys()


def test_names_that_no_file_contains_are_predicted(tmp_path: Path) -> None:
    """Saved again by Paddle as safetensors files, which do not name their parameters."""
    source = case_directory("mp2_tied") / "checkpoint-3"
    convert(source, tmp_path / "auto", format="auto-parallel")
    run_paddle(SAVE_NESTED, tmp_path / "auto/dist_ckpt", tmp_path / "again/dist_ckpt")
    (tmp_path / "again/scheduler.pdparams").write_bytes((tmp_path / "auto/scheduler.pdparams").read_bytes())
    config = tmp_path / "auto/config.json"
    for name in ("auto", "again"):
        convert(tmp_path / name, tmp_path / f"{name}-hybrid", to="tp=2,pp=2", config=config)
    found, wanted = files_of(tmp_path / "again-hybrid"), files_of(tmp_path / "auto-hybrid")
    tensors = {path for path in wanted if path.endswith((".pdparams", ".pdopt"))}
    assert {path: found[path] for path in tensors} == {path: wanted[path] for path in tensors}
    # By a table that calls the embedding otherwise, nobody knows whose its states are.
    table = json.loads((RULES / "llama.paddleformers.json").read_text())
    for row in table["rules"]:
        row["name_class"] = row["name_class"].replace("embedding", "vocabulary")
    (tmp_path / "rules.json").write_text(json.dumps(table))
    with pytest.raises(CheckpointError, match=r"^embedding_0.w_0 \(.*no parameter of the model has"):
        convert(tmp_path / "again", tmp_path / "x", to="tp=1", config=config, rules=tmp_path / "rules.json")


def test_classes_of_auto_parallel_models_are_not_guessed(tmp_path: Path) -> None:
    """PaddleNLP's head is ``LlamaLMHeadNet`` or ``LlamaLMHeadAuto`` there: its names are to be given."""
    case = case_directory("nlp_fused_mp2") / "checkpoint-3"
    with pytest.raises(PlanError, match=r"lm_head.weight: .*'llama_lm_head'.*--layout model_meta.json"):
        convert(case, tmp_path / "auto", format="auto-parallel")
    names = oracle.load_with_paddle(case / "model_state.tp00.pdparams")[oracle.NAME_TABLE]
    given = {key: name.replace("llama_lm_head", "llama_lm_head_net") for key, name in names.items()}
    (tmp_path / "names.json").write_text(
        json.dumps({"sharding_metas": {"tp00_pp00": {"structure_name_mapping": given}}})
    )
    convert(case, tmp_path / "auto", format="auto-parallel", layout=tmp_path / "names.json")
    assert names_in(tmp_path / "auto")["model.lm_head.weight"] == "llama_lm_head_net_0.w_0.dist"
    for number, source in enumerate((case, tmp_path / "auto")):
        convert(source, tmp_path / str(number), to="pp=2")
    assert files_of(tmp_path / "0") == files_of(tmp_path / "1")
    with pytest.raises(UsageError, match="4 cells"):
        meta = case_directory("mp2pp2sh2_s1v2_meta_ema") / "checkpoint-3/model_meta.json"
        convert(case, tmp_path / "other", format="auto-parallel", layout=meta)
