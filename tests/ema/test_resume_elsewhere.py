"""An average continues from a checkpoint of a different topology: every rank gets its slices of the truth."""

from __future__ import annotations

import json
import shutil
from math import prod
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import paddle
import pytest
from paddle.distributed.fleet.meta_parallel.sharding import group_sharded_stage3

from paddle_reshard.pipeline.core.errors import CheckpointError, UnsupportedError, UsageError
from paddle_reshard.pipeline.training.async_ema import AsyncEma
from paddle_reshard.pipeline.training.flex import FlexRank
from paddle_reshard.pipeline.training.paddle_objects import rank_boxes, rank_pieces
from paddle_reshard.pipeline.training.resume import Piece, RankPieces
from paddle_reshard.pipeline.training.stretches import Weights
from tests import oracle
from tests.bfloat16 import bfloat16_cpu, to_bfloat16
from tests.conftest import case_directory
from tests.live.fleet_job import model_of

__all__ = ["bfloat16_cpu"]  # a fixture

CASE = "mp2pp2sh2_s1v2_meta_ema"
AVERAGE = ".ema_w_0"
TP_DIM = {"q_proj": 1, "k_proj": 1, "v_proj": 1, "gate_proj": 1, "up_proj": 1, "o_proj": 0, "down_proj": 0}
TP_DIM |= {"embed_tokens": 0, "lm_head": 0}
"""Dims that tensor parallelism cuts, written down once more."""


def averages() -> dict[str, np.ndarray]:
    truth = oracle.read_truth(case_directory(CASE) / "truth.safetensors")
    return {k.removesuffix(AVERAGE): v for k, v in truth.items() if k.endswith(AVERAGE)}


def local(key: str, whole: np.ndarray, tp: int, rank: int) -> np.ndarray:
    dim = TP_DIM.get(key.split(".")[-2])
    return whole if dim is None else np.split(whole, tp, axis=dim)[rank]


class Rank:
    """A rank of some job: its tensors, what they are, and what its average must be."""

    def __init__(self, tp: int, tp_rank: int, slices: int = 0) -> None:
        """With ``slices``, of every parameter the one-dim slice that one of so many sharding ranks might hold."""
        random = np.random.default_rng(tp + tp_rank + slices)
        pieces, self.expected = {}, {}
        for number, (key, whole) in enumerate(averages().items()):
            mine = local(key, whole, tp, tp_rank)
            flat, expected = None, mine
            if slices:
                padded = -(-mine.size // 7) * 7 + 64
                start, stop = sorted(random.choice(padded, 2, replace=False).tolist())
                # Some are padding only, some all of the tensor and padding.
                flat = {0: (mine.size, padded), 1: (0, padded)}.get(number, (start, stop))
                expected = np.pad(mine.ravel(), (0, padded - mine.size))[flat[0] : flat[1]]
            name = f"linear_{number}.w_0"
            pieces[name] = Piece(key, mine.shape, flat)
            self.expected[name] = expected
        self.pieces = RankPieces(pieces, tp, tp_rank)

    def weights(self) -> Weights:
        return Weights({name: np.full(value.shape, 7, np.float32) for name, value in self.expected.items()})

    def differences(self, ema: AsyncEma) -> list[str]:
        found = ema.state().master_weights
        return [k for k, v in self.expected.items() if np.asarray(found[k]).tobytes() != v.tobytes()]


@pytest.mark.parametrize("rank", [(1, 0, 0), (2, 1, 0), (1, 0, 3), (2, 0, 2)], ids=str)
def test_every_rank_of_any_job_gets_its_slices_of_the_truth(rank: tuple[int, int, int]) -> None:
    job = Rank(*rank)
    with AsyncEma(job.weights, decay=0.9) as ema:
        ema.load(case_directory(CASE) / "checkpoint-3", job.pieces)
        assert job.differences(ema) == []
        # Without ema.json it is assumed to have started with weights: the next update continues from it.
        ema.update(4)
        key, before = next(iter(job.expected.items()))
        after = before * np.float32(0.9) + np.float32(7) * np.float32(1 - 0.9)
        assert np.asarray(ema.state().master_weights[key]).tobytes() == after.tobytes()


def test_a_config_that_contradicts_the_checkpoints_own_is_refused() -> None:
    checkpoint = case_directory(CASE) / "checkpoint-3"
    own = json.loads((checkpoint / "config.json").read_text())
    job = Rank(1, 0)
    with AsyncEma(job.weights, decay=0.9) as ema:
        ema.load(checkpoint, job.pieces, config=own)
        with pytest.raises(UsageError, match=r"for vocab_size, that of --config 7"):
            ema.load(checkpoint, job.pieces, config=own | {"vocab_size": 7})


def test_only_what_the_rank_needs_is_read(tmp_path: Path) -> None:
    """Values of the other tensor-parallel rank may be corrupted."""
    checkpoint = tmp_path / "checkpoint-3"
    shutil.copytree(case_directory(CASE) / "checkpoint-3", checkpoint, copy_function=shutil.copyfile)
    for path in checkpoint.glob("ema.tp01_*.pdopt"):
        content = path.read_bytes()
        for values in paddle.load(str(path))["master_weights"].values():
            content = content.replace(values.numpy().tobytes(), b"\xff" * 4 * values.size)
        assert content != path.read_bytes()
        path.write_bytes(content)
    job = Rank(2, 0)
    with AsyncEma(job.weights, decay=0.9) as ema:
        ema.load(checkpoint, job.pieces)
        assert job.differences(ema) == []


def test_experts_of_several_ranks_and_a_float32_router() -> None:
    case = case_directory("moe/ep2_sh2_s1v2_meta_ema")
    truth = oracle.read_truth(case / "truth.safetensors")
    expert, router = "model.layers.1.mlp.experts.3.down_proj.weight", "model.layers.0.mlp.gate.weight"
    own, other = truth[f"{expert}{AVERAGE}"], truth[f"{router}.ema"]
    held = Weights(
        {"linear_9.w_0": np.zeros(own.shape, np.float32)}, {router: np.zeros(other.shape, np.float32)}
    )
    with AsyncEma(lambda: held, decay=0.9) as ema:
        # Of an expert, tensor parallelism leaves half, and all where experts are spread over its ranks.
        for piece, tp in ((Piece(expert, own.shape), 1), (Piece(expert, own.shape, whole=True), 2)):
            ema.load(case / "checkpoint-3", RankPieces({"linear_9.w_0": piece}, tp, tp - 1))
            state = ema.state()
            assert np.asarray(state.master_weights["linear_9.w_0"]).tobytes() == own.tobytes()
            assert np.asarray(state.params[router]).tobytes() == other.tobytes()
        with pytest.raises(CheckpointError, match=rf"{expert}: has shape .* in the .* and .* cut by tp=2"):
            ema.load(case / "checkpoint-3", RankPieces({"linear_9.w_0": Piece(expert, own.shape)}, 2, 1))


def test_progress_comes_along_and_a_failed_load_leaves_nothing(tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint-3"
    shutil.copytree(case_directory(CASE) / "checkpoint-3", checkpoint, copy_function=shutil.copyfile)
    said = {"start": "weights", "updates": 3, "step": 30, "start_weight": 0.0, "divide_by": 1.0}
    (checkpoint / "ema.json").write_text(json.dumps(said))
    job = Rank(2, 1, 2)
    with AsyncEma(job.weights, decay=0.9) as ema:
        ema.load(checkpoint, job.pieces)
        assert (ema.progress.updates, ema.progress.step) == (3, 30)
        (checkpoint / "ema.tp01_pp00_shard01.pdopt").write_bytes(b"\x80\x04}.")
        with pytest.raises(CheckpointError):
            ema.load(checkpoint, job.pieces)
        with pytest.raises(UsageError, match="no average yet"):
            ema.state()


def test_what_is_not_this_ranks_is_refused_by_name() -> None:
    job = Rank(2, 1)
    source = case_directory(CASE) / "checkpoint-3"
    name, piece = next(entry for entry in job.pieces.master_weights.items() if "up_proj" in entry[1].key)
    wrong = (
        (Piece("model.layers.9.norm.weight", piece.local_shape), "model.layers.9.norm.weight"),
        (Piece(piece.key, (3, 5)), rf"{piece.key}: has shape .* in the checkpoint and .* cut by tp=2"),
        (Piece(piece.key, piece.local_shape, whole=True), rf"{piece.key}: .* uncut, but"),
        (
            Piece(piece.key, piece.local_shape, (0, 3)),
            rf"{name}: has shape .* in this rank, but its piece of {piece.key} has \(3,\)",
        ),
    )
    for other, message in wrong:
        pieces = RankPieces({**job.pieces.master_weights, name: other}, 2, 1)
        with AsyncEma(job.weights, decay=0.9) as ema, pytest.raises(CheckpointError, match=message):
            ema.load(source, pieces)
    with (
        AsyncEma(job.weights, decay=0.9) as ema,
        pytest.raises(UsageError, match="do not say which parameter"),
    ):
        ema.load(source, RankPieces())
    plain = case_directory("sh2_s1v1_meta_fp32") / "checkpoint-3"
    with AsyncEma(job.weights, decay=0.9) as ema, pytest.raises(CheckpointError, match="contains no average"):
        ema.load(plain, job.pieces)


class TwoLayers(paddle.nn.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.first = paddle.nn.Linear(4, 6)
        self.second = paddle.nn.Linear(6, 2, bias_attr=False)


def optimizer_of(model: paddle.nn.Layer) -> paddle.optimizer.Optimizer:
    """With master weights, as the first step makes them, which needs a GPU for bfloat16."""
    optimizer = paddle.optimizer.AdamW(parameters=model.parameters(), multi_precision=True)
    for parameter in model.parameters():
        optimizer._create_master_weight(parameter)
    return optimizer


@pytest.mark.usefixtures("bfloat16_cpu")
def test_pieces_of_an_optimizer_of_paddle() -> None:
    model = TwoLayers()
    to_bfloat16(model)
    optimizer = optimizer_of(model)
    pieces = rank_pieces(model, optimizer, tp=2, tp_rank=1)
    found = {piece.key: (piece.local_shape, piece.flat) for piece in pieces.master_weights.values()}
    assert found == {
        "first.weight": ((4, 6), None),
        "first.bias": ((6,), None),
        "second.weight": ((6, 2), None),
    }
    assert set(pieces.master_weights) == set(optimizer.state_dict()["master_weights"])
    with pytest.raises(UsageError, match="belongs to no parameter"):
        rank_pieces(model.first, optimizer)


class Experts(paddle.nn.Layer):
    """Two of four experts, in the list that PaddleFormers makes of them; and one that is no expert."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = paddle.nn.LayerList([])
        for number in range(4):
            self.experts.append(paddle.nn.Linear(4, 2, bias_attr=False) if number >= 2 else None)
        for parameter in self.experts.parameters():
            parameter.no_sync = True
        self.gate = paddle.nn.Linear(4, 4, bias_attr=False)


@pytest.mark.usefixtures("bfloat16_cpu")
def test_pieces_of_a_rank_that_has_some_of_all_experts() -> None:
    model = Experts()
    to_bfloat16(model)
    found = rank_pieces(model, optimizer_of(model), tp=2, tp_rank=1).master_weights.values()
    assert {(piece.key, piece.local_shape, piece.whole) for piece in found} == {
        ("experts.2.weight", (4, 2), True),
        ("experts.3.weight", (4, 2), True),
        ("gate.weight", (4, 4), False),
    }


@pytest.mark.usefixtures("bfloat16_cpu")
def test_an_expert_without_a_number_is_refused_naming_it() -> None:
    """A list of this rank's experts alone counts from 0 on every rank."""
    model = Experts()
    model.experts = paddle.nn.LayerList([expert for expert in model.experts if expert is not None])
    to_bfloat16(model)
    with pytest.raises(UnsupportedError, match=r"experts\.0\.weight: belongs to one rank of an expert"):
        rank_pieces(model, optimizer_of(model))


class Stage3:
    """A rank of two under sharding stage 3: its model, and its optimizer with slices of the master weights."""

    def __init__(self, rank: int, segment_size: int = 512) -> None:
        self.rank, self.averages = rank, averages()
        self.model = model_of(self.averages, self.averages)
        self.optimizer = paddle.optimizer.AdamW(parameters=self.model.parameters(), multi_precision=True)
        self.names = {parameter.name: key for key, parameter in self.model.state_dict().items()}
        with mock.patch.object(group_sharded_stage3.core, "is_compiled_with_cuda", lambda: True):
            group_sharded_stage3.GroupShardedStage3(
                self.model,
                self.optimizer,
                SimpleNamespace(nranks=2, rank=rank, ranks=[0, 1]),
                device="cpu",
                segment_size=segment_size,
                pretrain_sync_models=False,
            )

    def expected(self) -> dict[str, np.ndarray]:
        found = {}
        for name, master in self.optimizer.state_dict()["master_weights"].items():
            whole = self.averages[self.names[name.removeprefix("slice@")]]
            if "@" in name:
                length = prod(master.shape)
                whole = np.pad(whole.ravel(), (0, 2 * length - whole.size))[self.rank * length :][:length]
            found[name] = whole
        return found


@pytest.mark.usefixtures("bfloat16_cpu")
@pytest.mark.parametrize("rank", [0, 1])
def test_an_average_continues_under_sharding_stage_3(rank: int) -> None:
    job = Stage3(rank)
    expected = job.expected()
    assert 0 < sum("@" in name for name in expected) < len(expected)
    with AsyncEma(job.optimizer, decay=0.9) as ema:
        ema.load(case_directory(CASE) / "checkpoint-3", rank_pieces(job.model, job.optimizer))
        state = ema.state().master_weights
        oracle.assert_same_tensors({name: np.array(value) for name, value in state.items()}, expected)
        assert not any(p._is_initialized() for p in job.model.parameters() if hasattr(p, "fw_storage"))


@pytest.mark.usefixtures("bfloat16_cpu")
def test_ranks_of_stage_3_save_a_flex_checkpoint(tmp_path: Path) -> None:
    jobs = [Stage3(rank) for rank in range(2)]
    boxes = tuple(rank_boxes(job.model, job.optimizer) for job in jobs)
    for rank, job in enumerate(jobs):
        with AsyncEma(job.optimizer, decay=0.9) as ema:
            ema.load(case_directory(CASE) / "checkpoint-3", rank_pieces(job.model, job.optimizer))
            ema.save(tmp_path, FlexRank(rank, boxes))
    loaded = {f"{key}.w_0": paddle.zeros(whole.shape) for key, whole in averages().items()}
    paddle.distributed.load_state_dict(loaded, str(tmp_path / "ema_state"))
    held = {key.removesuffix(".w_0"): tensor.numpy() for key, tensor in loaded.items()}
    oracle.assert_same_tensors(held, averages())


@pytest.mark.usefixtures("bfloat16_cpu")
def test_a_slice_of_which_nothing_is_known_is_refused() -> None:
    job = Stage3(0)
    del job.optimizer.update_slice
    with pytest.raises(UsageError, match=r"slice@.*the optimizer that group_sharded_parallel returned"):
        rank_pieces(job.model, job.optimizer)
