"""A job whose parameters are not called as a checkpoint calls them is refused before it trains.

The checkpoints are those of real trainers, and small ones by Paddle's own layers, optimizer and ``paddle.save``.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import paddle_reshard
from paddle_reshard import CheckpointError, check_names
from paddle_reshard.pipeline.training.names import compare_with_job
from tests import oracle
from tests.conftest import case_directory

NAMES = "StructuredToParameterName@@"
PADDLE_NAMES = {"uint16": "bfloat16", 16: "bfloat16", 15: "float16", 10: "float32"}
"""NumPy's name of an array in a file, or the number in ``model_meta.json`` → Paddle's name of the dtype."""


def model_of(*, first: str = "up", width: int = 8, more: bool = False) -> Any:
    """A model of real layers; which of two equal ones is built first decides over their names."""
    import paddle

    with paddle.utils.unique_name.guard():
        model = paddle.nn.Layer()
        model.embedding = paddle.nn.Embedding(16, 8)
        for name in (first, "down" if first == "up" else "up"):
            setattr(model, name, paddle.nn.Linear(8, width if name == "down" else 8))
        if more:
            model.head = paddle.nn.Linear(8, 2)
    return model


def save(model: Any, folder: Path) -> Path:
    """One step of Paddle's AdamW, and the files of a job on one card."""
    import paddle

    optimizer = paddle.optimizer.AdamW(parameters=model.parameters())
    hidden = model.embedding(paddle.to_tensor([1, 2]))
    (model.up(hidden).sum() + model.down(hidden).sum()).backward()
    optimizer.step()
    folder.mkdir(exist_ok=True)
    paddle.save(model.state_dict(), str(folder / "model_state.pdparams"))
    paddle.save(optimizer.state_dict(), str(folder / "optimizer.pdopt"))
    return folder


def test_layers_in_another_order_are_refused(tmp_path: Path) -> None:
    """The trainer would load every state without a word: names and shapes are all there."""
    saved = save(model_of(), tmp_path)
    message = (
        r"up\.weight is linear_1\.w_0 in this job and linear_0\.w_0 in the checkpoint; .*, and 1 more: the"
    )
    with pytest.raises(CheckpointError, match=message):
        check_names(model_of(first="down"), saved)


def test_another_shape_is_refused(tmp_path: Path) -> None:
    saved = save(model_of(), tmp_path)
    with pytest.raises(
        CheckpointError, match=r"down\.weight is \(8, 4\) in this job and \(8, 8\) in the checkpo"
    ):
        check_names(model_of(width=4), saved)


def test_weights_in_safetensors_leave_the_names_of_states(tmp_path: Path) -> None:
    """The trainers save parameters so by default (``save_to_hf``): under their keys, without their names."""
    saved = save(model_of(), tmp_path)
    (saved / "model_state.pdparams").rename(saved / "model.safetensors")
    assert check_names(model_of(), saved) == 5
    with pytest.raises(
        CheckpointError, match=r"holds linear_1\.w_0_moment1_\d as \(8, 8\), in this job it is \(8, 4\)"
    ):
        check_names(model_of(width=4), saved)


def test_a_parameter_of_one_side_alone_is_refused(tmp_path: Path) -> None:
    saved = save(model_of(), tmp_path / "fewer")
    with pytest.raises(CheckpointError, match=r"head\.weight \(linear_2\.w_0\) is only in this job"):
        check_names(model_of(more=True), saved)
    saved = save(model_of(more=True), tmp_path / "more")
    with pytest.raises(CheckpointError, match=r"head\.weight \(linear_2\.w_0\) is only in the checkpoint"):
        check_names(model_of(), saved)


def test_states_of_another_model_are_refused(tmp_path: Path) -> None:
    """Parameters that fit say nothing about the states beside them."""
    saved, other = (
        save(model_of(), tmp_path / "a"),
        save(model_of(width=4), tmp_path / "b"),
    )
    (saved / "optimizer.pdopt").write_bytes((other / "optimizer.pdopt").read_bytes())
    with pytest.raises(
        CheckpointError, match=r"holds linear_1\.w_0_moment1_\d+ as \(8, 4\), in this job it is \(8, 8\)"
    ):
        check_names(model_of(), saved)


# --- real jobs ----------------------------------------------------------------------------------------


def job_of(case: str, rank: str) -> Any:
    """The model of one rank of a real job: its keys, and names and shapes of its tensors."""
    folder = case_directory(case) / "checkpoint-3"
    tp, pp, shard = (
        int(found[1]) if (found := re.search(rf"{part}(\d+)", rank)) else 0 for part in ("tp", "pp", "shard")
    )
    tensors = {}
    if (folder / "model_meta.json").exists():
        meta = json.loads((folder / "model_meta.json").read_text())
        cell = f"tp{tp:02}_pp{pp:02}"
        if (ep := meta["parallel_config"].get("ep_degree", 1)) > 1:
            apart = ep // meta["parallel_config"]["mp_degree"]
            cell += f"_ep{shard % apart * meta['parallel_config']['mp_degree'] + tp:02}"
        described = meta["sharding_metas"][cell]
        tensors = {
            key: (name, described["param_meta"][key][0], PADDLE_NAMES[described["param_meta"][key][1]])
            for key, name in described["structure_name_mapping"].items()
        }
    else:
        suffix = re.sub(r"_?shard\d+", "", rank)
        (path,) = folder.glob(f"model_state.{suffix}*pdparams" if suffix else "model_state.pdparams")
        root = oracle.unpickle(path)
        tensors = {
            key: (name, root[key].shape, PADDLE_NAMES.get(root[key].dtype.name, root[key].dtype.name))
            for key, name in root[NAMES].items()
        }
    live = {
        key: SimpleNamespace(name=n, shape=list(s), stop_gradient=False, dtype=f"paddle.{d}")
        for key, (n, s, d) in tensors.items()
    }
    return SimpleNamespace(state_dict=lambda: live)


def ranks_of(case: str) -> list[str]:
    paths = (case_directory(case) / "checkpoint-3").glob("optimizer*.pdopt")
    return [path.name.removeprefix("optimizer").removesuffix("pdopt").strip(".") for path in sorted(paths)]


REAL = (
    *("dense/single", "dense/mp2pp2", "dense/mp2pp2_sp", "dense/sh2_s3_seg512", "dense/single_tied"),
    *("dense/mp2pp2sh2_s1v2_meta_ema", "dense/nlp_mp2", "moe/ep2_mp2", "moe/ep4_mp2pp2sh2_s1v2_meta"),
    *("moe/nlp_dsv2_ep_dp2", "moe/dsv3_single", "small-families/nlp_gpt_mp2pp2sh2_s1v2_meta"),
)


@pytest.mark.parametrize("case", REAL)
def test_every_rank_of_a_real_job_fits_its_own_files(case: str) -> None:
    for rank in ranks_of(case):
        assert check_names(job_of(case, rank), case_directory(case) / "checkpoint-3", rank=rank)


@pytest.mark.parametrize(
    ("job", "checkpoint", "advice"),
    [
        ("dense/mp2pp2", "dense/mp2pp2_sp", ("true", "false")),
        ("dense/mp2pp2_sp", "dense/mp2pp2", ("false", "true")),
    ],
)
def test_names_of_sequence_parallelism_are_refused_in_a_job_without(
    job: str, checkpoint: str, advice: tuple[str, str]
) -> None:
    told = (
        rf"start it with --sequence_parallel {advice[0]}.*--layout '{{\"sequence_parallel\": {advice[1]}}}'"
    )
    for rank in ranks_of(job):
        with pytest.raises(CheckpointError, match=told):
            check_names(job_of(job, rank), case_directory(checkpoint) / "checkpoint-3", rank=rank)


def test_a_mixture_named_for_sequence_parallelism_is_refused_in_a_job_without(tmp_path: Path) -> None:
    """Its projections are called otherwise, and so are its experts, whose numbers stay within the same class."""
    source = case_directory("moe/moe_single") / "checkpoint-3"
    paddle_reshard.convert(source, tmp_path / "two", to="tp=2", layout={"sequence_parallel": True})
    with pytest.raises(CheckpointError, match=r"--sequence_parallel true"):
        check_names(job_of("moe/moe_mp2", "tp01"), tmp_path / "two", rank="tp01")
    paddle_reshard.convert(source, tmp_path / "serial", to="tp=2", layout={"sequence_parallel": False})
    assert check_names(job_of("moe/moe_mp2", "tp01"), tmp_path / "serial", rank="tp01")


def test_experts_of_a_neighbour_are_refused() -> None:
    case = "moe/ep4_mp2pp2sh2_s1v2_meta"
    with pytest.raises(CheckpointError, match=r"experts\.\d"):
        check_names(
            job_of(case, "tp00_pp00_shard00"), case_directory(case) / "checkpoint-3", rank="tp00_pp00_shard01"
        )


def test_another_topology_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"there is no optimizer\.tp00\.pdopt, the file of this rank"):
        check_names(job_of("dense/single", ""), case_directory("dense/pp2") / "checkpoint-3", rank="tp00")


def in_float32(job: Any) -> Any:
    """The same model as a job with ``--fp16_opt_level O1`` builds it."""
    live = {
        key: SimpleNamespace(**{**vars(tensor), "dtype": "paddle.float32"})
        for key, tensor in job.state_dict().items()
    }
    return SimpleNamespace(state_dict=lambda: live)


@pytest.mark.parametrize("case", ["dense/single", "dense/mp2pp2sh2_s1v2_meta_ema", "dense/fc_single"])
def test_another_precision_is_refused(case: str) -> None:
    """The trainer starts from such files, and trains from other values without a word."""
    flex = case == "dense/fc_single"
    checkpoint, rank = case_directory(case) / "checkpoint-3", ranks_of("dense/single" if flex else case)[0]
    job = job_of("dense/single" if flex else case, rank)
    assert check_names(job, checkpoint, rank=rank, master_weights=True)
    with pytest.raises(
        CheckpointError, match=r"is float32 in this job and bfloat16 in the checkpoint.*launch"
    ):
        check_names(in_float32(job), checkpoint, rank=rank)
    with pytest.raises(CheckpointError, match="holds float32 master weights and this job keeps none"):
        check_names(job, checkpoint, rank=rank, master_weights=False)
    # A job at O2 converts what was built in float32 when it begins.
    assert check_names(in_float32(job), checkpoint, rank=rank, master_weights=True)


@pytest.mark.parametrize(
    ("rows", "rank", "fits"),
    [(64, "", True), (32, "", False), (32, "tp00_pp01", True), (48, "tp00_pp01", False)],
)
def test_local_shapes_are_pieces_of_what_a_flex_checkpoint_holds(rows: int, rank: str, fits: bool) -> None:
    """A job on one card holds whole parameters; of one whose tp degree is not known here, every piece is as large."""
    job, checkpoint = job_of("dense/single", ""), case_directory("dense/fc_single") / "checkpoint-3"
    weight = job.state_dict()["model.layers.0.self_attn.o_proj.weight"]
    assert weight.shape == [64, 64]
    weight.shape = [rows, 64]
    if fits:
        assert check_names(job, checkpoint, rank=rank) == 39
        return
    with pytest.raises(
        CheckpointError, match=rf"o_proj\.weight is \({rows}, 64\) in this job and \(64, 64\)"
    ):
        check_names(job, checkpoint, rank=rank)


@pytest.mark.parametrize("target", [{"format": "flex"}, {"format": "hybrid-plain", "to": "tp=1"}])
def test_a_job_with_master_weights_is_told_that_there_are_none(
    target: dict[str, Any], tmp_path: Path
) -> None:
    """It would look for moments under the names of its master weights, and begin with new ones."""
    job, source = job_of("dense/single_fp32", ""), case_directory("dense/single_fp32") / "checkpoint-3"
    paddle_reshard.convert(source, tmp_path / "target", **target)
    with pytest.raises(
        CheckpointError, match="this job keeps float32 master weights and the checkpoint holds"
    ):
        check_names(job, tmp_path / "target", master_weights=True)
    for masters in (False, None):
        assert check_names(job, tmp_path / "target", master_weights=masters)


def test_a_job_that_cuts_other_parameters_in_stage_3_is_refused() -> None:
    """The trainer would give a whole parameter the slice of its master weight."""
    case = "dense/sh2_s3_seg512"
    rank, checkpoint = ranks_of(case)[0], case_directory(case) / "checkpoint-3"
    with pytest.raises(CheckpointError, match="stage3_segment_size"):
        compare_with_job(job_of(case, rank), checkpoint, rank, True, None, placed=True)
