"""FlexCheckpoints laid out by rank, compared with those of the trainer of the same topology, and asked of Paddle."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from paddle_reshard import convert, launch, plan
from paddle_reshard.pipeline.core.errors import PlanError, UnsupportedError, UsageError
from tests import oracle
from tests.conftest import case_directory
from tests.golden.test_flex import LOAD, by_folder, read, unpickle
from tests.paddle_processes import run_paddle, run_ranks

FOLDERS = ("model_state", "master_weight", "optimizer_state", "ema_state")
OF_OPTIMIZER = ("master_weight", "optimizer_state")


class Real(NamedTuple):
    """A FlexCheckpoint of the trainer, and the topology of its job."""

    name: str
    config: str
    to: str
    strategy: str

    @property
    def checkpoint(self) -> Path:
        return case_directory(self.name) / "checkpoint-3"

    @property
    def layout(self) -> dict[str, int] | None:
        """Stage 3 cuts the parameters of a model this small only if it is told to."""
        return {"stage3_segment_size": 16} if self.strategy == "stage3" else None

    def convert(self, source: Path, target: Path, **options: Any) -> Path:
        config = case_directory(self.config)
        found = config / "config.json"
        found = found if found.exists() else config / "checkpoint-3/config.json"
        to = {"to": self.to, "sharding_strategy": self.strategy, "layout": self.layout}
        convert(source, target, format="flex", config=found, **(to | options))
        return target


def ranks(name: str, to: str, strategy: str) -> Real:
    return Real(f"small-ranks/{name}", f"small-ranks/{name}", to, strategy)


SINGLE = ranks("rk_single", "tp=1", "none")
TP_SHARDING = ranks("rk_mp2sh2_rep", "tp=2,sharding=2", "stage1v2")
PP_SHARDING = ranks("rk_pp2sh2_rep", "pp=2,sharding=2", "stage1v2")
SHARDING_V1 = ranks("rk_sh2_v1_rep", "sharding=2", "stage1v1")
STAGE3 = ranks("rk_sh4_stage3_rep", "sharding=4", "stage3")
AVERAGED = ranks("rk_mp2sh2_ema", "tp=2,sharding=2", "stage1v2")
REPLICATED = (TP_SHARDING, PP_SHARDING, SHARDING_V1, STAGE3)


class Piece(NamedTuple):
    file: str
    key: str
    offset: tuple[int, ...]
    local_shape: tuple[int, ...]
    flattened: tuple[int, ...] | None


def numbers(values: Any) -> tuple[int, ...] | None:
    return None if values is None else tuple(map(int, values))


def described(checkpoint: Path, folder: str) -> dict[Piece, tuple[Any, ...]]:
    """Every copy of every piece → its number, dtype and global shape, by Paddle's own classes."""
    metadata = oracle_metadata(checkpoint / folder)
    of_pieces = {
        (key, numbers(one.global_offset), numbers(one.flattened_range)): (
            one.dtype,
            numbers(one.global_shape),
        )
        for key, pieces in metadata.state_dict_metadata.items()
        for one in pieces
    }
    found = {}
    for index, file in metadata.storage_metadata.items():
        offset, flat = numbers(index.global_offset), numbers(index.flattened_range)
        piece = Piece(file, index.tensor_key, offset or (), numbers(index.local_shape) or (), flat)
        found[piece] = (index.replica_id, *of_pieces[piece.key, offset, flat])
    return found


def oracle_metadata(folder: Path) -> Any:
    load_data(next(folder.glob("*.distcp")))  # imports Paddle, whose classes the metadata name
    (path,) = folder.glob("*.metadata")
    return unpickle(path)


def load_data(path: Path) -> dict[str, np.ndarray]:
    return {k: v for k, v in oracle.load_with_paddle(path).items() if k != oracle.NAME_TABLE}


@cache
def arrays(folder: Path) -> dict[str, dict[str, np.ndarray]]:
    return {path.name: load_data(path) for path in sorted(folder.glob("*.distcp"))}


def shapes(folder: Path) -> dict[str, list[tuple[str, tuple[int, ...], str]]]:
    """Data file → its keys in their order, with shapes and dtypes."""
    return {
        file: [(key, value.shape, str(value.dtype)) for key, value in held.items()]
        for file, held in arrays(folder).items()
    }


def wholes(checkpoint: Path, folder: str) -> dict[str, np.ndarray]:
    """The tensors of a folder, put together from every copy of every piece, which must agree and leave no hole."""
    held = arrays(checkpoint / folder)
    found: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    for piece, (_, _, whole) in described(checkpoint, folder).items():
        array = held[piece.file][piece.key]
        values, filled = found.setdefault(piece.key, (np.zeros(whole, array.dtype), np.zeros(whole, bool)))
        box = tuple(slice(o, o + n) for o, n in zip(piece.offset, piece.local_shape, strict=True))
        start, stop = piece.flattened or (0, array.size)
        local, seen = values[box].ravel(), filled[box].ravel()
        copied = seen[start:stop]
        assert local[start:stop][copied].tobytes() == array.ravel()[copied].tobytes(), piece
        local[start:stop], seen[start:stop] = array.ravel(), True
        values[box], filled[box] = local.reshape(piece.local_shape), seen.reshape(piece.local_shape)
    assert all(filled.all() for _, filled in found.values())
    return {key: values for key, (values, _) in found.items()}


# ------------------------------------------------------------------------------- as the trainer writes them


@pytest.mark.parametrize("source", [SINGLE, TP_SHARDING, PP_SHARDING], ids=lambda real: real.name)
@pytest.mark.parametrize("target", REPLICATED, ids=lambda real: real.name)
def test_files_are_those_of_the_trainer(source: Real, target: Real, tmp_path: Path) -> None:
    """Piece by piece, copy by copy, key by key; the arrays have the source's values."""
    made = target.convert(source.checkpoint, tmp_path / "made")
    for folder in OF_OPTIMIZER if target.strategy == "stage1v2" else FOLDERS[:3]:
        assert described(made, folder) == described(target.checkpoint, folder), folder
        assert shapes(made / folder) == shapes(target.checkpoint / folder), folder
    signals = {path.name for path in made.glob("saved_signal_*")}
    assert signals == {path.name for path in target.checkpoint.glob("saved_signal_*")}
    truth = by_folder(oracle.read_truth(source.checkpoint.parent / "truth.safetensors"))
    for folder, tensors in truth.items():
        oracle.assert_same_tensors(wholes(made, folder), tensors)


def test_a_model_that_no_rank_asks_for_is_dealt_as_the_trainer_deals_it(tmp_path: Path) -> None:
    """Under stage 1 v2 parameters are cast from the masters: every piece is written once."""
    made = AVERAGED.convert(SINGLE.checkpoint, tmp_path / "made")
    real = described(AVERAGED.checkpoint, "model_state")
    assert described(made, "model_state").keys() == real.keys()
    assert shapes(made / "model_state") == shapes(AVERAGED.checkpoint / "model_state")


REAL = [
    AVERAGED,
    *(
        Real(f"small-flex/{name}", f"small-flex/{name}", to, "stage1v2")
        for name, to in (
            ("fc_moe_mp2sh2_s1v2_ema", "tp=2,sharding=2"),
            ("fc_pp2sh2_s1v2_tied", "pp=2,sharding=2"),
        )
    ),
]
MORE_REAL = [
    Real("dense/fc_mp2pp2", "dense/single", "tp=2,pp=2", "none"),
    Real("dense/fc_mp2pp2sh2_s1v2", "dense/single", "tp=2,pp=2,sharding=2", "stage1v2"),
    Real("moe/ep2_fc_sh2_s1v2", "moe/moe_single", "sharding=2,ep=2", "stage1v2"),
    Real("moe/ep2_fc_mp2", "moe/moe_single", "tp=2,ep=2", "none"),
    Real("states/lora_fc_mp2", "states/lora_mp2pp2_sp", "tp=2", "none"),
    Real("states/muon_fc_mp2", "states/fp16_single", "tp=2", "none"),
    Real("states/muon_fc_pp2", "states/fp16_single", "pp=2", "none"),
    Real("states/dsv3_mtp_fc_sh2_s1v2_ema", "states/dsv3_mtp_ep2_sh2_s1v2_meta", "sharding=2", "stage1v2"),
    Real("recipes/ernie_ep2_fc_sh2_s1v2", "recipes/ernie_ep2_fc_sh2_s1v2", "sharding=2,ep=2", "stage1v2"),
    Real("families/qwen3_next_fc_sh2_s1v2", "families/qwen3_next_mp2", "sharding=2", "stage1v2"),
    Real("families/qwen2_5_vl_fc_sh2_s1v2", "families/qwen2_5_vl_mp2", "sharding=2", "stage1v2"),
]


@pytest.mark.parametrize(
    "real",
    [*REAL, *(pytest.param(one, marks=pytest.mark.exhaustive) for one in MORE_REAL)],
    ids=lambda r: r.name,
)
def test_what_the_trainer_writes_once_is_written_there_and_where_it_is_asked_for(
    real: Real, tmp_path: Path
) -> None:
    """By default the trainer keeps one copy of each piece. The pieces are the same, and more files hold them."""
    made = real.convert(real.checkpoint, tmp_path / "made")
    for folder in FOLDERS:
        if (real.checkpoint / folder).exists():
            ours, theirs = described(made, folder), described(real.checkpoint, folder)
            assert theirs.keys() <= ours.keys(), folder
            assert {piece[1:] for piece in ours} == {piece[1:] for piece in theirs}, folder
            assert {piece[1:]: about[1:] for piece, about in ours.items()} == {
                piece[1:]: about[1:] for piece, about in theirs.items()
            }


@pytest.mark.parametrize("dp", [1, 2])
def test_copies_are_numbered_from_0_and_described_once(dp: int, tmp_path: Path) -> None:
    """Without a copy 0 a job of another topology crashes; two copies without a number are one entry."""
    made = TP_SHARDING.convert(SINGLE.checkpoint, tmp_path / "made", to=f"{TP_SHARDING.to},dp={dp}")
    for folder in FOLDERS[:3]:
        copies: dict[tuple[Any, ...], list[int]] = {}
        for piece, (copy, *_) in described(made, folder).items():
            copies.setdefault(piece[1:], []).append(copy)
        assert all(sorted(found) == list(range(len(found))) for found in copies.values())
        assert len(list((made / folder).glob("*.distcp"))) == 4 * dp
        held = sum(len(of_file) for of_file in arrays(made / folder).values())
        assert held == sum(map(len, copies.values()))  # no array that no entry names


# ---------------------------------------------------------------------------------------- asked of Paddle

CHECK = """
import json
import pathlib
import sys
import paddle
from paddle.distributed.flex_checkpoint.dcp import utils
from paddle.distributed.flex_checkpoint.dcp.metadata import LocalTensorMetadata
from paddle.distributed.flex_checkpoint.dcp.metadata_manager import MetadataManager

def asked(needs):
    rows = {}
    for key, need in needs.items():
        flat = need["flattened_range"]
        rows[key] = LocalTensorMetadata(
            tuple(need["global_offset"]), tuple(need["local_shape"]), need["dtype"], tuple(need["global_shape"]),
            need["is_flattened"], None if flat is None else tuple(flat),
        )
    return rows

utils.extract_tensor_metadata = lambda value: (None, value)
utils.paddle.distributed.all_gather_object = lambda found, mine, group: found.append(mine)
answers = {}
checkpoint, needs = map(pathlib.Path, sys.argv[1:])
for path in sorted(needs.glob("needs_*.json")):
    of_rank = json.loads(path.read_text("utf-8"))
    paddle.distributed.get_rank = lambda of_rank=of_rank: of_rank["rank"]
    for folder, tensors in of_rank["needs"].items():
        manager = MetadataManager()
        manager.set_metadata_list([paddle.load(str(checkpoint / folder / "0.metadata"))])
        local = utils.check_resumable_locally(str(checkpoint / folder), asked(tensors), manager, True, None)
        answers[f"{folder} of rank {of_rank['rank']}"] = local
print("answers", json.dumps(answers))
"""


RESUME = """
import json
import os
import pathlib
import sys
import numpy as np
import paddle
from paddle.distributed.flex_checkpoint.dcp.sharded_weight import ShardedWeight
paddle.set_device("cpu")
paddle.Tensor.cuda = lambda self, *args, **more: self
paddle.distributed.init_parallel_env()
checkpoint, needs, truth = map(pathlib.Path, sys.argv[1:])
loaded = 0
for folder, asked in json.loads((needs / f"needs_{paddle.distributed.get_rank()}.json").read_text())["needs"].items():
    whole, state, wanted = np.load(truth / f"{folder}.npz"), {}, {}
    for key, need in asked.items():
        box = tuple(slice(o, o + n) for o, n in zip(need["global_offset"], need["local_shape"]))
        piece = whole[key][box]
        more = {}
        if need["is_flattened"]:
            span = slice(*need["flattened_range"])
            piece, more = piece.ravel()[span], {"is_flattened": True, "flattened_range": span}
        tensor = paddle.zeros(piece.shape, need["dtype"])
        shape, offset = tuple(need["global_shape"]), tuple(need["global_offset"])
        state[key] = ShardedWeight(key, tensor, tuple(need["local_shape"]), shape, offset, **more)
        wanted[key] = piece
    paddle.distributed.load_state_dict(state, str(checkpoint / folder))
    for key, piece in wanted.items():
        assert state[key].local_tensor.numpy().tobytes() == piece.tobytes(), (folder, key)
        loaded += 1
print("equal", loaded, flush=True)
os._exit(0)
"""
AMSGRAD = """
import pathlib
import shutil
import sys
import paddle
folder = pathlib.Path(sys.argv[1])
state = paddle.load(str(folder / "0_0.distcp"))
state |= {key.replace("moment2_0", "moment2_max_0"): value for key, value in state.items() if "moment2_0" in key}
shutil.rmtree(folder)
paddle.distributed.save_state_dict(state, str(folder))
"""


def resumable(checkpoint: Path, needs: Path) -> Mapping[str, bool]:
    """``FOLDER of rank N`` → whether Paddle's own check finds all that the trainer's rank asked for in its own file."""
    told = run_paddle(CHECK, checkpoint, needs)
    return json.loads(told.rpartition("answers ")[2])


@pytest.mark.parametrize(
    ("source", "target"),
    [
        (SINGLE, TP_SHARDING),
        (TP_SHARDING, PP_SHARDING),
        (PP_SHARDING, SHARDING_V1),
        (TP_SHARDING, SINGLE),
        (TP_SHARDING, STAGE3),
    ],
    ids=lambda real: real.name,
)
def test_every_rank_of_the_job_resumes_from_its_own_files(source: Real, target: Real, tmp_path: Path) -> None:
    made = target.convert(source.checkpoint, tmp_path / "made")
    found = resumable(made, case_directory(target.name) / "needs")
    assert set(found.values()) == {True}, found
    assert len(found) == 3 * len(list((case_directory(target.name) / "needs").iterdir()))


@pytest.mark.parametrize(
    "target", [SHARDING_V1, pytest.param(AVERAGED, marks=pytest.mark.exhaustive)], ids=lambda real: real.name
)
def test_a_job_loads_its_own_files_without_resharding(target: Real, tmp_path: Path) -> None:
    """Paddle's whole loader, in a process for every rank: it says so in its log, and every value is the source's."""
    needs = case_directory(target.name) / "needs"
    made = target.convert(AVERAGED.checkpoint, tmp_path / "made")
    for folder, tensors in by_folder(
        oracle.read_truth(AVERAGED.checkpoint.parent / "truth.safetensors")
    ).items():
        np.savez(tmp_path / f"{folder}.npz", **tensors)
    asked = [json.loads(path.read_text("utf-8"))["needs"] for path in sorted(needs.iterdir())]
    for of_rank, told in zip(asked, run_ranks(len(asked), RESUME, made, needs, tmp_path), strict=True):
        assert told.strip().endswith(f"equal {sum(map(len, of_rank.values()))}"), told[-2000:]
        assert told.count("resumable locally, skipping reshard") == len(of_rank)


@pytest.mark.full
@pytest.mark.parametrize("paddle_version", ["3.3", "3.4"])
def test_averages_are_resumed_from_own_files_too(paddle_version: str, tmp_path: Path) -> None:
    """The trainer's own files are not: it writes each piece of an average once."""
    needs = case_directory(AVERAGED.name) / "needs"
    made = AVERAGED.convert(AVERAGED.checkpoint, tmp_path / "made", paddle_version=paddle_version)
    assert set(resumable(made, needs).values()) == {True}
    assert not all(resumable(AVERAGED.checkpoint, needs).values())
    degrees = json.loads((made / "model_meta.json").read_text("utf-8"))["parallel_config"]
    real = json.loads((AVERAGED.checkpoint / "model_meta.json").read_text("utf-8"))["parallel_config"]
    assert degrees == real


@pytest.mark.full
def test_whole_tensors_are_not_what_ranks_ask_for(tmp_path: Path) -> None:
    """The check that the tests above rely on can say no."""
    made = TP_SHARDING.convert(SINGLE.checkpoint, tmp_path / "made", to=None, sharding_strategy=None)
    found = resumable(made, case_directory(TP_SHARDING.name) / "needs")
    assert not any(found[f"master_weight of rank {rank}"] for rank in range(4))


@pytest.mark.parametrize(("target", "paddle_version"), [(TP_SHARDING, "3.3"), (PP_SHARDING, "3.4")])
def test_jobs_of_other_topologies_read_it_too(target: Real, paddle_version: str, tmp_path: Path) -> None:
    """Paddle's own loader on one card puts whole tensors together; and so do we."""
    made = target.convert(AVERAGED.checkpoint, tmp_path / "made", paddle_version=paddle_version)
    truth = oracle.read_truth(AVERAGED.checkpoint.parent / "truth.safetensors")
    pairs: list[Path] = []
    for folder, tensors in by_folder(truth).items():
        np.savez(tmp_path / f"{folder}.npz", **tensors)
        pairs += [made / folder, tmp_path / f"{folder}.npz"]
    assert run_paddle(LOAD, *pairs).strip().endswith(f"equal {len(truth)}")
    convert(made, tmp_path / "hybrid", to="tp=1")
    oracle.assert_same_tensors(read(tmp_path / "hybrid", truth), truth)


def test_launch_knows_the_job_that_the_files_are_for(tmp_path: Path) -> None:
    made = SHARDING_V1.convert(SINGLE.checkpoint, tmp_path / "made")
    found = launch(made)
    assert found.ranks == 2
    assert (found.arguments["sharding_parallel_size"], found.arguments["split_param"]) == (2, False)
    assert "every rank finds all that it asks for in its own files: nothing is resharded" in found.remarks
    other = launch(made, to="tp=2")
    assert other.ranks == 2
    assert (
        "its files are laid out for the ranks of sharding=2: the trainer reshards them for tp=2"
        in other.remarks
    )


# ------------------------------------------------------------------------------------------------ refused


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            {"sharding_strategy": "stage2"},
            PlanError,
            "stage2: PaddleFormers 1.2 saves FlexCheckpoints under it and resumes from none",
        ),
        ({"paddle_version": "3.2"}, PlanError, "only metadata of Paddle 3.3 and later"),
        (
            {"to": "pp=2,sharding=2", "sharding_strategy": "stage1v2", "layout": {"comm_overlap": True}},
            PlanError,
            "comm_overlap: .* asks for no master weight and no moment",
        ),
        ({"max_shard_size": "2GB"}, UsageError, "--max-shard-size 2GB with --to"),
        ({"to": None, "sharding_strategy": "stage1v2"}, UsageError, "--sharding-strategy without --to"),
    ],
)
def test_what_cannot_be_laid_out_by_rank_is_refused(
    options: dict[str, Any], error: type[Exception], message: str, tmp_path: Path
) -> None:
    asked = {"to": "sharding=2", "format": "flex"} | options
    with pytest.raises(error, match=message):
        plan(
            SINGLE.checkpoint, tmp_path / "made", config=case_directory(SINGLE.name) / "config.json", **asked
        )


def test_muon_under_sharding_is_refused(tmp_path: Path) -> None:
    from tests.golden.test_muon import config_of

    name = "muon_fc_sh2_ema"
    source = case_directory(f"states/{name}") / "checkpoint-3"
    with pytest.raises(UnsupportedError, match="the optimizer is Muon; how stage1v2 divides"):
        plan(
            source,
            tmp_path / "made",
            format="flex",
            to="sharding=2",
            sharding_strategy="stage1v2",
            config=config_of(name, tmp_path),
        )


def test_states_that_the_trainer_does_not_ask_for_are_refused(tmp_path: Path) -> None:
    """amsgrad: the second moment's maximum, in files made of those of the trainer."""
    source = tmp_path / "amsgrad"
    shutil.copytree(SINGLE.checkpoint, source)
    run_paddle(AMSGRAD, source / "optimizer_state")
    (source / "saved_signal_0").touch()
    with pytest.raises(PlanError, match="the optimizer keeps moment2_max"):
        plan(
            source,
            tmp_path / "made",
            format="flex",
            to="tp=2",
            config=case_directory(SINGLE.name) / "config.json",
        )


def test_a_source_of_another_library_is_refused(tmp_path: Path) -> None:
    source = case_directory("small-families/nlp_qwen2_mp2pp2sh2_s1v2_meta") / "checkpoint-3"
    with pytest.raises(PlanError, match="--convention paddleformers"):
        plan(source, tmp_path / "made", format="flex", to="tp=2")


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("small-frozen/frozen_llama_single", "never restores bfloat16 parameters"),
        ("sh2_s1v1_meta_fp32", "asserts --amp_master_grad"),
    ],
)
def test_what_only_stage_1_v2_does_not_restore_or_asserts_is_said(
    case: str, said: str, tmp_path: Path
) -> None:
    source = case_directory(case) / "checkpoint-3"
    for strategy, told in (("stage1v2", True), ("stage1v1", False)):
        made = plan(source, tmp_path / "made", format="flex", to="sharding=2", sharding_strategy=strategy)
        assert any(said in remark for remark in made.targets[0].remarks) == told
