"""States that few jobs keep: each goes to what can hold it and comes back as it was, or is refused with the reason.

That each equals its truth on one card, ``test_newer_checkpoints.py`` shows.
"""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import paddle_reshard
from paddle_reshard.pipeline.core.errors import ReshardError
from tests import oracle
from tests.conftest import case_directory

SHARDED_V1 = {"to": "pp=2,sharding=2", "sharding_strategy": "stage1v1"}
SHARDED_V2 = {"to": "tp=2,sharding=2", "sharding_strategy": "stage1v2"}
FORMATS: list[dict[str, Any]] = [
    {"format": "flex", "max_shard_size": "20KB"},
    {"format": "unified"},
    {"format": "auto-parallel"},
]
TARGETS: dict[str, list[dict[str, Any]]] = {
    "opt_custom_lowp_single": [SHARDED_V1, SHARDED_V2, *FORMATS],
    "opt_mini_single": [{"to": "pp=2"}, {**SHARDED_V1, "format": "hybrid-plain"}, {"to": "dp=2"}],
    "fp16_sh2_s1v2_meta": [SHARDED_V1, SHARDED_V2, *FORMATS],
    "noopt_single": [{"to": "tp=2,pp=2"}, {"to": "tp=2", "format": "hybrid-plain"}],
    "tfusion_sh2_s1v1": [SHARDED_V1, SHARDED_V2, *FORMATS],
    "uc_optimshard2_sh2_s1v1": [SHARDED_V1, SHARDED_V2, *FORMATS],
}
"""Case → what it can become."""


def checkpoint(name: str) -> Path:
    return case_directory(name if "/" in name else f"states/{name}") / "checkpoint-3"


def tensor_files(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir() if p.suffix in (".pdparams", ".pdopt")}


@pytest.mark.parametrize("name", TARGETS)
def test_there_and_back_is_the_straight_way(name: str, tmp_path: Path) -> None:
    """Files of small states of the trainer too: that of the scaler of gradients."""
    asked = {tmp_path / str(number): options for number, options in enumerate(TARGETS[name])}
    paddle_reshard.convert(checkpoint(name), {tmp_path / "card": {"to": "tp=1"}, **asked})
    straight = tensor_files(tmp_path / "card")
    if name.startswith("fp16"):
        assert straight["scaler.pdparams"] == (checkpoint(name) / "scaler.pdparams").read_bytes()
    for folder, options in asked.items():
        paddle_reshard.convert(folder, folder.with_suffix(".card"), to="tp=1")
        assert tensor_files(folder.with_suffix(".card")) == straight, options


@pytest.mark.parametrize("options", [*FORMATS, {"format": "huggingface"}])
def test_parameters_alone_are_a_source_for_what_holds_parameters(
    options: dict[str, Any], tmp_path: Path
) -> None:
    """All of them, and no trace of an optimizer."""
    paddle_reshard.convert(checkpoint("noopt_single"), tmp_path / "target", **options)
    report = paddle_reshard.verify(checkpoint("noopt_single"), tmp_path / "target", states=["param"])
    truth = oracle.read_truth(case_directory("states/noopt_single") / "truth.safetensors")
    keys = {key for key in truth if key in oracle.shapes_of(truth)}
    assert report.equal
    assert report.tensors == len(keys)
    assert {summary.state for summary in paddle_reshard.inspect(tmp_path / "target").states} == {"param"}


# ----------------------------------------------------------------------------------------------- refused


@pytest.mark.parametrize(
    ("name", "options", "told"),
    [
        ("opt_mini_single", {"to": "tp=2"}, "each tp rank would need the mean square of its own part"),
        ("opt_mini_single", {"to": "sharding=2"}, "stage1v2: the trainer cannot make a step with AdamWMini"),
        (
            "opt_mini_single",
            {"to": "sharding=2", "sharding_strategy": "stage3"},
            "stage3: how it stores AdamWMini's moment2",
        ),
        ("opt_mini_single", {"format": "flex"}, "in the format flex is not known; convert to hybrid or hybrid-plain"),
        ("opt_mini_single", {"format": "unified"}, "in the format unified is not known"),
        ("opt_mini_single", {"to": "tp=1", "vocab_size": 128}, "AdamWMini, .* the vocabulary cannot be resized"),
        ("noopt_single", {"to": "sharding=2"}, "sharding=2: the source holds parameters only"),
    ],
)  # fmt: skip
def test_what_no_trainer_would_load(name: str, options: dict[str, Any], told: str, tmp_path: Path) -> None:
    with pytest.raises(ReshardError, match=told):
        paddle_reshard.convert(checkpoint(name), tmp_path / "target", **options)
    assert not (tmp_path / "target").exists()


def test_rules_may_rename_what_adamw_mini_keeps_and_not_cut_it(tmp_path: Path) -> None:
    renamed, cut = tmp_path / "rename.aoa", tmp_path / "cut.aoa"
    key = "model.layers.0.self_attn.o_proj.weight"
    renamed.write_text(f"{key} -> {key}")
    cut.write_text(f"{key} -> first, second, axis=0")
    paddle_reshard.plan(checkpoint("opt_mini_single"), to="tp=1", aoa=renamed)
    with pytest.raises(ReshardError, match=rf"{key} \(mean_moment2\) is a single number"):
        paddle_reshard.plan(checkpoint("opt_mini_single"), to="tp=1", aoa=cut)


def lost_optimizer(folder: Path) -> None:
    (folder / "optimizer.pdopt").unlink()


def lost_all_but_the_signal(folder: Path) -> None:
    lost_optimizer(folder)
    (folder / "scheduler.pdparams").unlink()


def change_optimizer(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    state = oracle.load_with_paddle(folder / "optimizer.pdopt")
    change(state)
    (folder / "optimizer.pdopt").write_bytes(pickle.dumps(state, protocol=4))


def one_moment2_is_a_number(folder: Path) -> None:
    change_optimizer(
        folder, lambda state: state.update({"linear_0.w_0_fp32_master_0_moment2_0": np.zeros(1, np.float32)})
    )


def one_moment2_is_whole(folder: Path) -> None:
    change_optimizer(
        folder,
        lambda state: state.update(
            {"linear_0.w_0_fp32_master_0_moment2_0": state["linear_0.w_0_fp32_master_0_moment1_0"]}
        ),
    )


def of_two_tp_ranks(folder: Path) -> None:
    for kind, suffix in (("model_state", "pdparams"), ("optimizer", "pdopt")):
        for rank in range(2):
            shutil.copy(folder / f"{kind}.{suffix}", folder / f"{kind}.tp0{rank}.{suffix}")
        (folder / f"{kind}.{suffix}").unlink()
    (folder / "saved_signal_1").write_bytes(b"1")


def shorter_buffer(folder: Path) -> None:
    path = folder / "optimizer.shard01.pdopt"
    state = oracle.load_with_paddle(path)
    name = next(key for key in state if key.endswith("_moment2_0"))
    state[name] = state[name][:-128]
    path.write_bytes(pickle.dumps(state, protocol=4))


def lost_buffer(folder: Path) -> None:
    path = folder / "optimizer.shard01.pdopt"
    state = oracle.load_with_paddle(path)
    lost = list(state["master_weights"])[-1]
    del state["master_weights"][lost]
    path.write_bytes(pickle.dumps({k: v for k, v in state.items() if not k.startswith(lost)}, protocol=4))


def beside_meta(folder: Path) -> None:
    shutil.copy(checkpoint("fp16_sh2_s1v2_meta") / "model_meta.json", folder)


def lost_piece(folder: Path) -> None:
    (folder / "optimizer.shard01.safetensors_shard_0001").unlink()


def lost_last_pieces(folder: Path) -> None:
    for path in folder.glob("*.safetensors_shard_0002"):
        path.unlink()


def other_count(folder: Path) -> None:
    index = folder / "optimizer.safetensors.index.json"
    index.write_text(json.dumps({**json.loads(index.read_text()), "optim_shard_num": 3}))


@pytest.mark.parametrize(
    ("name", "damage", "told"),
    [
        ("opt_custom_single", lost_optimizer, "no optimizer file, but saved_signal_0, which the trainer only"),
        ("opt_custom_single", lost_all_but_the_signal, "no optimizer file, but saved_signal_0, which"),
        ("opt_custom_single", one_moment2_is_a_number, r"\(moment2\): stored with shape \(1,\)"),
        ("opt_mini_single", one_moment2_is_whole, r"\(moment2\): stored with shape \(1,\)"),
        ("opt_mini_single", of_two_tp_ranks, "AdamWMini. With tp=2 each tp rank stores the number of its own piece"),
        ("tfusion_sh2_s1v1", shorter_buffer, r"_moment2_0 has shape \(10624,\); \(10752,\) is expected for "),
        ("tfusion_sh2_s1v1", lost_buffer, "master weights of 1 fused buffers; 2 are expected"),
        (
            "tfusion_sh2_s1v1",
            beside_meta,
            r"fused buffers \(stage1_tensor_fusion\) are not supported together with model_meta\.json",
        ),
        (
            "uc_optimshard2_sh2_s1v1",
            lost_piece,
            r"optimizer\.shard01\.safetensors_shard_0002: its rank has files \[2\] of 2 \(optim_shard_num\)",
        ),
        ("uc_optimshard2_sh2_s1v1", lost_last_pieces, r"optim_shard_num is 2, but a rank has 1 files"),
        ("uc_optimshard2_sh2_s1v1", other_count, r"optim_shard_num is 3, but a rank has 2 files"),
    ],
)  # fmt: skip
def test_what_is_damaged_is_not_taken_for_another_optimizer(
    name: str, damage: Callable[[Path], None], told: str, tmp_path: Path
) -> None:
    source = shutil.copytree(checkpoint(name), tmp_path / "source", copy_function=shutil.copyfile)
    damage(source)
    with pytest.raises(ReshardError, match=told):
        paddle_reshard.plan(source, to="tp=1")


def test_buffers_of_another_rank_are_found_by_their_values(tmp_path: Path) -> None:
    """Both have the same length: only the parameters, to which master weights round, tell them apart."""
    source = shutil.copytree(
        checkpoint("tfusion_sh2_s1v1"), tmp_path / "source", copy_function=shutil.copyfile
    )
    first, second = (source / f"optimizer.shard0{rank}.pdopt" for rank in range(2))
    state, other = oracle.load_with_paddle(first), oracle.load_with_paddle(second)
    decayed, other_decayed = next(iter(state["master_weights"])), next(iter(other["master_weights"]))
    assert state["master_weights"][decayed].shape == other["master_weights"][other_decayed].shape
    state["master_weights"][decayed] = other["master_weights"][other_decayed]
    first.write_bytes(pickle.dumps(state, protocol=4))
    with pytest.raises(ReshardError, match="its master weight"):
        paddle_reshard.convert(source, tmp_path / "target", to="tp=1")
    assert not (tmp_path / "target").exists()
