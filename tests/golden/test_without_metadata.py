"""Older checkpoints say less about themselves; what they still prove is used, and nothing more."""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path

import pytest

import paddle_reshard
from tests import oracle
from tests.conftest import case_directory, hybrid_cases
from tests.golden.compare_one_card import read_one_card

NAMES = "StructuredToParameterName@@"


def _copy(name: str, tmp_path: Path) -> Path:
    source = tmp_path / "source"
    shutil.copytree(case_directory(name) / "checkpoint-3", source, copy_function=shutil.copyfile)
    return source


def _convert_to_truth(name: str, source: Path, target: Path) -> None:
    truth = oracle.read_truth(case_directory(name) / "truth.safetensors")
    paddle_reshard.convert(source, target, to="tp=1")
    oracle.assert_same_tensors(oracle.read_checkpoint(target, oracle.shapes_of(truth)), truth)


@pytest.mark.parametrize(
    "name",
    [n for n in ("sh2_s1v1_meta_fp32", "sh2_s1v1_meta", "mp2pp2sh2_s1v1_meta_ema") if n in hybrid_cases()],
)
def test_stage1_v1_needs_no_param_meta(name: str, tmp_path: Path) -> None:
    """PaddleNLP 2.8 writes model_meta.json without it; whole tensors show their shapes."""
    source = _copy(name, tmp_path)
    meta = json.loads((source / "model_meta.json").read_text())
    for cell in meta["sharding_metas"].values():
        del cell["param_meta"]
        cell.pop("param_meta_keys", None)
    (source / "model_meta.json").write_text(json.dumps(meta))
    _convert_to_truth(name, source, tmp_path / "target")


def _without_names(path: Path) -> None:
    with path.open("rb") as file:
        data = pickle.load(file)
    del data[NAMES]
    with path.open("wb") as file:
        pickle.dump(data, file, protocol=4)


@pytest.mark.parametrize(
    "name",
    [n for n in ("nlp_fused_mp2", "mp2_tied", "mp2pp2_sp", "sh2_s2", "sh2_s1v2") if n in hybrid_cases()],
)
def test_names_are_predicted_where_no_file_has_them_and_every_entry_proves_them(
    name: str, tmp_path: Path
) -> None:
    source = _copy(name, tmp_path)
    for path in source.glob("model_state*.pdparams"):
        _without_names(path)
    _convert_to_truth(name, source, tmp_path / "target")


def test_predicted_names_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    source = _copy("nlp_fused_mp2", tmp_path)
    for path in source.glob("model_state*.pdparams"):
        _without_names(path)
    for path in source.glob("optimizer*.pdopt"):
        path.write_bytes(path.read_bytes().replace(b"linear_0.w_0", b"lineal_0.w_0"))
    with pytest.raises(paddle_reshard.ReshardError, match="do not match the optimizer files"):
        paddle_reshard.convert(source, tmp_path / "target", to="tp=1")


def test_files_of_the_flash_writer_have_master_weights_first_and_no_learning_rate(tmp_path: Path) -> None:
    """FlashCheckpoint writes the optimizer dict in another order and without ``LR_Scheduler``."""
    name = "mp2pp2sh2_s1v2_meta_ema"
    source = _copy(name, tmp_path)
    for path in source.glob("optimizer*.pdopt"):
        with path.open("rb") as file:
            data = pickle.load(file)
        del data["LR_Scheduler"]
        masters = data.pop("master_weights")
        with path.open("wb") as file:
            pickle.dump({"master_weights": masters, **data}, file, protocol=4)
    paddle_reshard.convert(source, tmp_path / "target", to="tp=1")
    truth = oracle.read_truth(case_directory(name) / "truth.safetensors")
    found = read_one_card(tmp_path / "target")
    assert found == {key: array.tobytes() for key, array in truth.items()}
    assert "LR_Scheduler" not in oracle.unpickle(tmp_path / "target" / "optimizer.pdopt")


def test_a_learning_rate_in_some_files_only_is_a_contradiction(tmp_path: Path) -> None:
    source = _copy("mp2pp2sh2_s1v2_meta_ema", tmp_path)
    path = source / "optimizer.tp01_pp01_shard01.pdopt"
    with path.open("rb") as file:
        data = pickle.load(file)
    del data["LR_Scheduler"]
    with path.open("wb") as file:
        pickle.dump(data, file, protocol=4)
    with pytest.raises(paddle_reshard.ReshardError, match=r"but optimizer.tp01_pp01_shard01.pdopt does not"):
        paddle_reshard.convert(source, tmp_path / "target", to="tp=1")
