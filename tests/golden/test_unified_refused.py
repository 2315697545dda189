"""Unified checkpoints that are incomplete or contradict themselves are refused, naming the file or tensor."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.numpy

import paddle_reshard
from paddle_reshard.pipeline.core.errors import (
    CheckpointError,
    CoverageError,
    DriftError,
    ReshardError,
    RuleError,
    UnsupportedError,
)
from tests.golden.unified_cases import small_case

FOUR = "nlp_uc_mp2pp2"
SLICES = "uc_sh2_s1v2"
OWN = "nlp_uc_mp2sh2_ignoremerge"
NORM = "llama.layers.1.input_layernorm.weight"
Folder = Path


@pytest.fixture
def copied(tmp_path: Path) -> Callable[[str], Folder]:
    """A copy of a case, to be damaged."""

    def copy(name: str) -> Folder:
        shutil.copytree(small_case(name) / "checkpoint-3", tmp_path / name, copy_function=shutil.copyfile)
        return tmp_path / name

    return copy


def _plan(folder: Folder) -> None:
    paddle_reshard.plan(folder, folder.parent / "target", format="unified")


def _tensors(path: Path) -> dict[str, np.ndarray]:
    return safetensors.numpy.load_file(path)


def _save(path: Path, tensors: dict[str, np.ndarray]) -> None:
    with safetensors.safe_open(path, "np") as file:
        metadata = file.metadata()
    safetensors.numpy.save_file(tensors, path, metadata)


def _change(path: Path, change: Callable[[dict[str, np.ndarray]], Any]) -> None:
    tensors = _tensors(path)
    change(tensors)
    _save(path, tensors)


def _index(folder: Folder, kind: str, change: Callable[[dict[str, Any]], Any]) -> None:
    path = folder / f"{kind}.safetensors.index.json"
    index = json.loads(path.read_text())
    change(index)
    path.write_text(json.dumps(index))


def _holder(folder: Folder, kind: str, key: str) -> Path:
    return folder / json.loads((folder / f"{kind}.safetensors.index.json").read_text())["weight_map"][key]


def _drop(folder: Folder, kind: str, key: str) -> None:
    """Take a tensor out of the files and the index."""
    for path in folder.glob(f"{kind}-*.safetensors"):
        _change(path, lambda tensors: tensors.pop(key, None))
    _index(folder, kind, lambda index: index["weight_map"].pop(key))


# ------------------------------------------------------------------------------------------- files and index


@pytest.mark.parametrize("kind", ["model", "optimizer", "master_weights"])
def test_a_missing_file(kind: str, copied: Callable[[str], Folder]) -> None:
    folder = copied(FOUR)
    (folder / f"{kind}-00003-of-00004.safetensors").unlink()
    with pytest.raises(CheckpointError, match=rf"1 of 4 {kind} files are missing: {kind}-00003-of-00004"):
        _plan(folder)


@pytest.mark.parametrize("kind", ["model", "optimizer", "master_weights"])
def test_a_missing_index(kind: str, copied: Callable[[str], Folder]) -> None:
    folder = copied(FOUR)
    (folder / f"{kind}.safetensors.index.json").unlink()
    with pytest.raises(CheckpointError, match=rf"{kind}\.safetensors\.index\.json is missing"):
        _plan(folder)


def test_a_whole_kind_is_missing_that_the_index_names(copied: Callable[[str], Folder]) -> None:
    folder = copied(FOUR)
    for path in folder.glob("master_weights-*"):
        path.unlink()
    with pytest.raises(
        CoverageError, match=r"index\.json says that master_weights-0000\d-of-00004.* does not"
    ):
        _plan(folder)


def test_the_index_names_another_file(copied: Callable[[str], Folder]) -> None:
    folder = copied(FOUR)
    wrong = "optimizer-00001-of-00004.safetensors"
    _index(folder, "optimizer", lambda index: index["weight_map"].update({f"{NORM}/moment1_0": wrong}))
    with pytest.raises(CoverageError, match=rf"{NORM}/moment1_0: .* says that {wrong} holds it"):
        _plan(folder)


def test_the_index_does_not_name_a_key(copied: Callable[[str], Folder]) -> None:
    folder = copied(FOUR)
    _index(folder, "model", lambda index: index["weight_map"].pop(NORM))
    with pytest.raises(CoverageError, match=rf"{NORM}: model\.safetensors\.index\.json does not list it"):
        _plan(folder)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("model-00001-of-00002.safetensors", "cannot belong to the same checkpoint"),
        ("model-00005-of-00004.safetensors", "must be numbered from 1 to 4"),
        ("optimizer.tp00.safetensors", "the files belong to two checkpoints"),
        ("weights.safetensors", "has no meaning in a unified checkpoint"),
        ("optimizer.pdopt", "has no meaning in a unified checkpoint"),
        ("peft_model-00001-of-00001.safetensors", "in one folder with peft_model-00001-of-00001"),
        ("optimizer.shard00.safetensors_shard_0001", "the files belong to two checkpoints"),
    ],
)
def test_a_file_too_many(path: str, message: str, copied: Callable[[str], Folder]) -> None:
    folder = copied(FOUR)
    shutil.copy(folder / "model-00001-of-00004.safetensors", folder / path)
    with pytest.raises(ReshardError, match=message) as caught:
        _plan(folder)
    assert path in str(caught.value)


def test_a_rank_is_missing(copied: Callable[[str], Folder]) -> None:
    folder = copied(OWN)
    (folder / "optimizer.tp01_shard00.safetensors").unlink()
    with pytest.raises(CheckpointError, match="optimizer: the file of the rank tp=1 pp=0 shard=0 is missing"):
        _plan(folder)


# ------------------------------------------------------------------------------------------------- contents


def test_a_key_in_two_files(copied: Callable[[str], Folder]) -> None:
    """A copy is compared; one with other values is no copy."""
    folder = copied(FOUR)
    key = f"{NORM}/moment2_0"
    holder, other = _holder(folder, "optimizer", key), folder / "optimizer-00001-of-00004.safetensors"
    values = _tensors(holder)[key]
    _change(other, lambda tensors: tensors.update({key: values}))
    paddle_reshard.convert(folder, folder.parent / "equal", format="unified")
    _change(other, lambda tensors: tensors.update({key: values * 2}))
    with pytest.raises(DriftError, match=rf"{NORM} \(moment2\).*{other.name}") as caught:
        paddle_reshard.convert(folder, folder.parent / "target", format="unified")
    assert holder.name in str(caught.value)
    assert not (folder.parent / "target").exists()
    _change(other, lambda tensors: tensors.update({key: values[:8]}))
    with pytest.raises(CoverageError, match=rf"{NORM} \(moment2\): stored with shape \(8,\), \(16,\)"):
        _plan(folder)


@pytest.mark.parametrize(
    ("kind", "key", "dtype", "message"),
    [
        ("optimizer", f"{NORM}/moment1_0", np.int8, r"stored as int8, a floating dtype is expected"),
        ("master_weights", NORM, np.float16, r"stored as float16, float32 is expected"),
        ("model", NORM, np.uint8, r"trained, but stored as uint8"),
    ],
)
def test_a_wrong_dtype(
    kind: str, key: str, dtype: type, message: str, copied: Callable[[str], Folder]
) -> None:
    folder = copied(FOUR)
    _change(_holder(folder, kind, key), lambda tensors: tensors.update({key: tensors[key].astype(dtype)}))
    with pytest.raises(ReshardError, match=message) as caught:
        paddle_reshard.convert(folder, folder.parent / "target", format="unified")
    assert NORM in str(caught.value)


def test_two_dtypes_of_one_tensor(copied: Callable[[str], Folder]) -> None:
    folder = copied(SLICES)
    key = "model.layers.1.self_attn.q_proj.weight/moment1_0"
    paths = [p for p in sorted(folder.glob("optimizer-*")) if key in _tensors(p)]
    last = paths[-1]
    other = next(k for k in _tensors(last) if k.endswith("moment1_0"))
    paths = [p for p in sorted(folder.glob("optimizer-*")) if p != last]
    _change(paths[0], lambda tensors: tensors.update({other: np.zeros(256, np.float16)}))
    with pytest.raises(CoverageError, match=r"stored as float16 and as float32.*00001.*00002"):
        _plan(folder)


def test_a_state_that_other_tensors_have(copied: Callable[[str], Folder]) -> None:
    folder = copied(FOUR)
    _drop(folder, "optimizer", f"{NORM}/moment2_0")
    with pytest.raises(
        CoverageError, match=rf"{NORM} \(moment2\): no file holds it, but other parameters have it"
    ):
        _plan(folder)


def test_a_master_weight_that_is_missing(copied: Callable[[str], Folder]) -> None:
    folder = copied(FOUR)
    _drop(folder, "master_weights", NORM)
    with pytest.raises(CoverageError, match=rf"{NORM} \(master_weight\): no file holds it"):
        _plan(folder)


@pytest.mark.parametrize("key", [NORM, "llama.norm.weight", "llama.layers.0.mlp.up_proj.weight"])
def test_a_parameter_that_is_missing_everywhere(key: str, copied: Callable[[str], Folder]) -> None:
    folder = copied(FOUR)
    _drop(folder, "model", key)
    _drop(folder, "master_weights", key)
    for state in ("moment1_0", "moment2_0", "beta1_pow_acc_0", "beta2_pow_acc_0"):
        _drop(folder, "optimizer", f"{key}/{state}")
    with pytest.raises(CoverageError, match=rf"{key}: no file holds it, and (layer|every model)"):
        _plan(folder)


def test_a_layer_that_is_missing(copied: Callable[[str], Folder]) -> None:
    folder = copied(FOUR)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    with pytest.raises(CheckpointError, match=r"config\.json says 3 decoder layers; layer 2 is in only one"):
        _plan(folder)


def test_a_state_that_is_not_known(copied: Callable[[str], Folder]) -> None:
    folder = copied(FOUR)
    path = folder / "optimizer-00001-of-00004.safetensors"
    _change(path, lambda tensors: tensors.update({f"{NORM}/velvet_0": np.zeros(16, np.float32)}))
    _index(folder, "optimizer", lambda index: index["weight_map"].update({f"{NORM}/velvet_0": path.name}))
    with pytest.raises(CheckpointError, match=r"velvet_0 is not a known accumulator"):
        _plan(folder)


# --------------------------------------------------------------------------------------------------- slices


def test_a_slice_that_is_missing(copied: Callable[[str], Folder]) -> None:
    """Nothing in the index tells that there were two."""
    folder = copied(SLICES)
    first, second = (_tensors(folder / f"master_weights-0000{n}-of-00002.safetensors") for n in (1, 2))
    (key,) = first.keys() & second.keys()
    for number in (1, 2):
        path = folder / f"optimizer-0000{number}-of-00002.safetensors"
        name = json.loads((folder / "optimizer.safetensors.index.json").read_text())["weight_map"]
        if name[f"{key}/moment1_0"] != path.name:
            _change(path, lambda tensors: tensors.pop(f"{key}/moment1_0"))
    with pytest.raises(
        CoverageError, match=rf"{key} \(moment1\): its slices have \d+ elements in total, but \d+"
    ):
        _plan(folder)


def test_a_whole_tensor_among_slices(copied: Callable[[str], Folder]) -> None:
    folder = copied(SLICES)
    key = "model.layers.0.mlp.down_proj.weight"
    path = _holder(folder, "master_weights", key)
    _change(path, lambda tensors: tensors.update({key: tensors[key][: 24 * 16].reshape(24, 16)}))
    with pytest.raises(
        CoverageError, match=rf"{key} \(master_weight\): stored with shape \(24, 16\), but other tens"
    ):
        _plan(folder)


# ---------------------------------------------------------------------------------- what is not done, by name


def test_quantised_states(copied: Callable[[str], Folder]) -> None:
    folder = copied("uc_sh2_s1v1_quant")
    with pytest.raises(
        UnsupportedError, match=r"ckpt_quant_stage is O1: quantised .* save with ckpt_quant_stage O0"
    ):
        _plan(folder)
    _index(folder, "optimizer", lambda index: index.pop("ckpt_quant_stage"))
    with pytest.raises(ReshardError, match=r"moment[12]"):
        _plan(folder)


def test_master_weights_without_weights_of_a_mixture(copied: Callable[[str], Folder]) -> None:
    """Routers are float32 themselves, and nothing tells them from master weights."""
    folder = copied("moe_uc_single_tohf")
    for path in folder.glob("model*"):
        path.unlink()
    name = "model-00001-of-00001.safetensors"
    (folder / "master_weights-00001-of-00001.safetensors").rename(folder / name)
    index = folder / "master_weights.safetensors.index.json"
    index.rename(folder / "model.safetensors.index.json")
    _index(folder, "model", lambda index: index.update(weight_map=dict.fromkeys(index["weight_map"], name)))
    with pytest.raises(UnsupportedError, match=r"skip_save_model_weight.*cannot be derived"):
        _plan(folder)


def test_float32_weights_of_an_unknown_training(copied: Callable[[str], Folder]) -> None:
    folder = copied("uc_sh2_s1v1_skip")
    config = json.loads((folder / "config.json").read_text())
    config.pop("dtype")
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedError, match=r"dtype=None.*skip_save_model_weight"):
        _plan(folder)


def test_weights_that_do_not_say_their_layout(copied: Callable[[str], Folder]) -> None:
    folder = copied("uc_sh2_s1v1_tohf")
    path = folder / "model-00001-of-00001.safetensors"
    content = path.read_bytes()
    path.write_bytes(content.replace(b'"format":"pt"', b'"fabric":"pt"', 1))
    with pytest.raises(CheckpointError, match=r"model-00001-of-00001.*format=None; np, pd or pt is expected"):
        _plan(folder)
    path.write_bytes(content.replace(b'"format":"pt"', b'"format":"np"', 1))
    with pytest.raises(RuleError, match=r"expect the shape \(24, 16\), the files hold \(16, 24\)"):
        _plan(folder)


def test_weights_of_a_rank_under_another_name(copied: Callable[[str], Folder]) -> None:
    folder = copied("mp2pp2_tohf")
    (folder / "model.tp00_pp00.safetensors").rename(folder / "weights.tp00_pp00.safetensors")
    with pytest.raises(CheckpointError, match=r"weights\.tp00_pp00\.safetensors: not the weights of a rank"):
        _plan(folder)
