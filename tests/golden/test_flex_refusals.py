"""Dist checkpoints that are not whole, or hold what is not understood: each is refused by name."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from paddle_reshard import convert
from paddle_reshard.pipeline.core.errors import ReshardError
from tests import oracle
from tests.conftest import case_directory
from tests.paddle_processes import run_paddle

# Saved by Paddle itself, with one folder changed before.
SAVE_VARIANTS = """
import pathlib
import shutil
import sys
import paddle
source, variants = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])
norm, first = "model.norm.weight", "model.layers.0.mlp.up_proj.weight"
changes = {
    "moment": ("optimizer_state", lambda s: s.pop(f"{norm}.moment2_0")),
    "master": ("master_weight", lambda s: s.pop(f"{norm}.w_0")),
    "parameter": ("model_state", lambda s: s.pop(norm)),
    "average": ("ema_state", lambda s: s.pop(f"{norm}.w_0")),
    "muon": ("optimizer_state", lambda s: s.update({f"{norm}.momentum_0": s[f"{norm}.moment1_0"]})),
    "quantised": ("optimizer_state", lambda s: s.update({f"{norm}.moment1_0@scales": paddle.ones([1])})),
    "eight_bits": ("model_state", lambda s: s.update({norm: s[norm].astype("float8_e4m3fn")})),
    "shape": ("master_weight", lambda s: s.update({f"{norm}.w_0": s[f"{norm}.w_0"][:-1]})),
    "powers": ("optimizer_state", lambda s: s.update({f"{norm}.beta1_pow_acc_0": paddle.ones([2])})),
    "layer": ("model_state", lambda s: s.update({first.replace("0", "9"): s[first]})),
    "unknown": ("model_state", lambda s: s.update({"model.extra.weight": s[norm]})),
}
for name, (folder, change) in changes.items():
    shutil.copytree(source, variants / name, copy_function=shutil.copyfile)
    state = paddle.load(str(source / folder / "0_0.distcp"))
    change(state)
    shutil.rmtree(variants / name / folder)
    paddle.distributed.save_state_dict(state, str(variants / name / folder))
"""
VARIANTS = {
    "moment": r"model.norm.weight \(moment2\): no file holds it, but other parameters have it",
    "master": r"model.norm.weight \(master_weight\): no file holds it",
    "parameter": r"model.norm.weight \(param\): no file holds it",
    "average": r"model.norm.weight \(ema_master_weight\): no file holds it",
    "muon": r"model.norm.weight.momentum_0 is not a known parameter or optimizer state",
    "quantised": r"model.norm.weight.moment1_0@scales is not a known parameter or optimizer state",
    "eight_bits": r"'float8_e4m3fn' is not supported",
    "shape": r"model.norm.weight \(master_weight\): shape \(63,\), but the parameter has \(64,\)",
    "powers": r"model.norm.weight \(beta1_pow_acc\): shape \(2,\), one number per parameter",
    "layer": r"config.json says 4 decoder layers; layer 9 is in only one of the config and the files",
    "unknown": r"model.extra.weight: no row",
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "flex"
    convert(case_directory("mp2pp2sh2_s1v2_meta_ema") / "checkpoint-3", folder, format="flex")
    return folder


@pytest.fixture(scope="module")
def variants(whole: Path) -> Path:
    folder = whole.parent / "variants"
    folder.mkdir()
    run_paddle(SAVE_VARIANTS, whole, folder)
    return folder


def refused(checkpoint: Path, target: Path, told: str) -> None:
    with pytest.raises(ReshardError, match=told) as caught:
        convert(checkpoint, target, to="tp=1")
    assert not target.exists()
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


@pytest.mark.parametrize("name", VARIANTS)
def test_what_is_not_whole_or_not_known(name: str, variants: Path, tmp_path: Path) -> None:
    refused(variants / name, tmp_path / "target", VARIANTS[name])


def test_a_tensor_that_no_metadata_names_is_missed(whole: Path, tmp_path: Path) -> None:
    (tmp_path / "rules.aoa").write_text("model.norm.weight -> _")
    convert(whole, tmp_path / "lacking", format="flex", aoa=tmp_path / "rules.aoa")
    refused(
        tmp_path / "lacking", tmp_path / "target", r"model\.norm\.weight.*: no file holds it, and every model"
    )


def test_tied_weights_that_differ_are_found_while_moving(tmp_path: Path) -> None:
    checkpoint = tmp_path / "flex"
    convert(case_directory("mp2_tied") / "checkpoint-3", checkpoint, format="flex")
    path = checkpoint / "model_state/0_0.distcp"
    value, data = oracle.load_with_paddle(path)["lm_head.weight"].tobytes(), bytearray(path.read_bytes())
    first = data.index(value)
    data[data.index(value, first + 1)] ^= 1
    path.write_bytes(data)
    refused(checkpoint, tmp_path / "target", r"embed_tokens.* and lm_head.*tie_word_embeddings")
