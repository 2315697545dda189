"""FlexCheckpoint and auto-parallel checkpoints from end to end: read, written, loaded by Paddle itself."""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paddle_reshard import convert
from tests import oracle
from tests.conftest import case_directory
from tests.paddle_processes import run_paddle, run_ranks

SMALL = ("fc_moe_mp2sh2_s1v2_ema", "fc_pp2sh2_s1v2_tied")
REAL = (
    ("dense/fc_single", "dense/single"),
    ("dense/fc_mp2pp2", "dense/single"),
    ("dense/fc_sh2_s1v2", "dense/single"),
    ("dense/fc_mp2pp2sh2_s1v2", "dense/single"),
    ("dense/fc_sh2_s3_seg512", "dense/single"),
    ("dense/defaults_2ranks", "dense/single"),
    ("moe/moe_fc_single", "moe/moe_single"),
    ("moe/ep2_fc_sh2_s1v2", "moe/moe_single"),
    ("moe/ep2_fc_mp2", "moe/moe_single"),
)
"""A real FlexCheckpoint, and a checkpoint of the same model that has its ``config.json``."""


@dataclass(frozen=True)
class Case:
    checkpoint: Path
    config: Path

    @property
    def truth(self) -> oracle.Tensors:
        return oracle.read_truth(self.checkpoint.parent / "truth.safetensors")

    def expected(self, found: oracle.Tensors) -> oracle.Tensors:
        """The truth; of copies that had drifted apart between tp ranks, the one that the files hold."""
        other = self.checkpoint.parent / "truth_alt.safetensors"
        drifted = oracle.read_truth(other) if other.exists() else {}
        alternatives = {key.partition("@")[0]: value for key, value in drifted.items()}
        return {
            key: alternatives[key]
            if key in alternatives and key in found and alternatives[key].tobytes() == found[key].tobytes()
            else value
            for key, value in self.truth.items()
        }


def case_of(name: str, sibling: str) -> Case:
    return Case(case_directory(name) / "checkpoint-3", case_directory(sibling) / "checkpoint-3/config.json")


def read(checkpoint: Path, truth: oracle.Tensors) -> oracle.Tensors:
    shapes = {k: shape for k, shape in oracle.shapes_of(truth).items() if not k.endswith(".ema")}
    return oracle.read_checkpoint(checkpoint, shapes)


def files_of(folder: Path) -> dict[str, bytes]:
    """Every file but the manifest, which tells where the target came from."""
    paths = (path for path in folder.rglob("*") if path.is_file() and path.name != "paddle_reshard.json")
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


def unpickle(path: Path) -> Any:
    """Metadata by Paddle's own classes; Paddle has been imported by its loader before."""
    return pickle.loads(path.read_bytes())


# ------------------------------------------------------------------------------------------------- read


def check_against_truth(case: Case, target: Path) -> None:
    convert(case.checkpoint, target, to="tp=1", config=case.config)
    found = read(target, case.truth)
    oracle.assert_same_tensors(found, case.expected(found))


@pytest.mark.parametrize(("name", "sibling"), [*((f"small-flex/{name}", "") for name in SMALL), *REAL])
def test_a_real_flex_checkpoint_holds_the_truth(name: str, sibling: str, tmp_path: Path) -> None:
    own = case_directory(name)
    case = case_of(name, sibling) if sibling else Case(own / "checkpoint-3", own / "config.json")
    check_against_truth(case, tmp_path / "hybrid")


WAYS_TO_SAVE = {"safetensors": ".safetensors", "safetensors_as_distcp": ".distcp", "zero_cost": ".distcp"}


@pytest.fixture(scope="module")
def saved_again(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``fc_single``, saved again by Paddle in other ways."""
    folder, real = tmp_path_factory.mktemp("again"), case_directory("dense/fc_single") / "checkpoint-3"
    for name in WAYS_TO_SAVE:
        shutil.copytree(
            real,
            folder / name,
            ignore=shutil.ignore_patterns("*.distcp", "*.metadata"),
            copy_function=shutil.copyfile,
        )
    run_paddle(SAVE_AGAIN, real, folder)
    for signal in folder.glob("*/saved_signal_*"):
        signal.touch()
    return folder


@pytest.mark.parametrize("name", WAYS_TO_SAVE)
def test_other_ways_to_save_mean_the_same(name: str, saved_again: Path, tmp_path: Path) -> None:
    """Data files of the safetensors kind, also as Paddle 3.4 calls them; and no bfloat16 parameters, as in zero-cost
    checkpoints."""
    case = case_of("dense/fc_single", "dense/single")
    kinds = {path.suffix for path in saved_again.glob(f"{name}/*/*_0.*")}
    assert kinds == {WAYS_TO_SAVE[name]}
    for number, source in enumerate((case.checkpoint, saved_again / name)):
        convert(source, tmp_path / str(number), to="tp=2", config=case.config)
    assert files_of(tmp_path / "0") == files_of(tmp_path / "1")


# ------------------------------------------------------------------------------------------------ written


@pytest.mark.parametrize("paddle_version", ["3.0", "3.2"])
def test_metadata_of_older_paddle(paddle_version: str, tmp_path: Path) -> None:
    source = case_directory("mp2_tied") / "checkpoint-3"
    convert(source, tmp_path / "there", format="flex", paddle_version=paddle_version)
    for name, of in (("straight", source), ("around", tmp_path / "there")):
        convert(of, tmp_path / name, to="tp=2,pp=2")
    assert files_of(tmp_path / "around") == files_of(tmp_path / "straight")


def test_one_file_per_folder_is_what_the_trainer_writes_on_one_card(tmp_path: Path) -> None:
    """Byte for byte in the values, and the same keys, in the same order, with the same metadata."""
    real, made = case_of("dense/fc_single", "dense/single").checkpoint, tmp_path / "made"
    convert(case_directory("dense/single") / "checkpoint-3", made, format="flex")
    assert set(files_of(made)) == {*files_of(real), "config.json"}
    for folder in ("model_state", "master_weight", "optimizer_state"):
        ours, theirs = (oracle.load_with_paddle(root / folder / "0_0.distcp") for root in (made, real))
        metadata = [unpickle(root / folder / "0.metadata") for root in (made, real)]
        assert metadata[0].state_dict_metadata == metadata[1].state_dict_metadata
        assert metadata[0].storage_metadata == metadata[1].storage_metadata
        assert metadata[0].flat_mapping == metadata[1].flat_mapping
        assert list(ours) == list(theirs)
        for key, value in theirs.items():
            if key != oracle.NAME_TABLE:
                assert ours[key].shape == value.shape, key
                assert ours[key].tobytes() == value.tobytes(), key
    for name in ("scheduler.pdparams", "trainer_state.bin"):
        assert (made / name).read_bytes() == (real / name).read_bytes()


def test_what_has_no_master_weights_has_an_empty_folder_of_them(tmp_path: Path) -> None:
    """The trainer writes it so, and its loader wants to find the folder."""
    convert(case_directory("sh2_s1v1_meta_fp32") / "checkpoint-3", tmp_path / "flex", format="flex")
    assert sorted(path.name for path in (tmp_path / "flex/master_weight").iterdir()) == [
        "0.metadata",
        "0_0.distcp",
    ]
    assert oracle.load_with_paddle(tmp_path / "flex/master_weight/0_0.distcp") == {oracle.NAME_TABLE: {}}
    assert unpickle(tmp_path / "flex/master_weight/0.metadata").state_dict_metadata == {}


def test_tied_weights_lie_under_both_keys_with_all_states(tmp_path: Path) -> None:
    """As two stages of the real trainer write them: a job of one stage looks for one of the keys, of two for both."""
    folder = case_directory("small-flex/fc_pp2sh2_s1v2_tied")
    convert(folder / "checkpoint-3", tmp_path / "flex", format="flex", config=folder / "config.json")
    assert keys_of(tmp_path / "flex") == keys_of(folder / "checkpoint-3")


def keys_of(checkpoint: Path) -> dict[str, set[str]]:
    return {
        path.parent.name: {
            key
            for data in path.parent.glob("*.distcp")
            for key in oracle.load_with_paddle(data)
            if key != oracle.NAME_TABLE
        }
        for path in checkpoint.glob("*/0.metadata")
    }


def test_a_schedule_that_only_optimizer_files_hold_gets_its_file(tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(case_directory("mp2_tied") / "checkpoint-3", source, copy_function=shutil.copyfile)
    wanted = oracle.load_with_paddle(source / "scheduler.pdparams")
    (source / "scheduler.pdparams").unlink()
    convert(source, tmp_path / "flex", format="flex")
    convert(tmp_path / "flex", tmp_path / "hybrid", to="tp=1")
    assert oracle.load_with_paddle(tmp_path / "flex/scheduler.pdparams") == wanted
    assert oracle.load_with_paddle(tmp_path / "hybrid/optimizer.pdopt")["LR_Scheduler"] == wanted


def test_files_are_filled_up_to_the_size_that_is_asked_for(tmp_path: Path) -> None:
    """With all of a tensor in a folder together; what is larger has a file of its own."""
    source = case_directory("mp2_tied") / "checkpoint-3"
    for limit, own in ((150_000, False), (40_000, True)):
        convert(source, tmp_path / str(limit), format="flex", max_shard_size=limit)
        for folder in ("model_state", "master_weight", "optimizer_state"):
            paths = sorted(
                (tmp_path / str(limit) / folder).glob("*.distcp"), key=lambda p: int(p.name.split("_")[0])
            )
            held = [sizes_by_key(path) for path in paths]
            assert len(held) > 1
            assert len(set().union(*held)) == sum(map(len, held)), "a tensor is in one file"
            totals = [sum(sizes.values()) for sizes in held]
            assert all(total <= limit or len(sizes) == 1 for total, sizes in zip(totals, held, strict=True))
            assert any(total > limit for total in totals) is (own and folder == "optimizer_state")
            for total, following in zip(totals, held[1:], strict=False):
                assert total + next(iter(following.values())) > limit, "the next tensor would have had room"


def sizes_by_key(path: Path) -> dict[str, int]:
    """Structured key → bytes of all its arrays in a data file, in order."""
    arrays = oracle.load_with_paddle(path)
    del arrays[oracle.NAME_TABLE]
    sizes: dict[str, int] = {}
    for name, array in arrays.items():
        key = name
        for state in ("moment1_0", "moment2_0", "beta1_pow_acc_0", "beta2_pow_acc_0", "w_0"):
            key = key.removesuffix(f".{state}")
        sizes[key] = sizes.get(key, 0) + array.nbytes
    return sizes


# ----------------------------------------------------------------------------------- loaded by Paddle itself

LOAD = """
import sys
import numpy as np
import paddle
loaded = 0
for folder, wanted in zip(sys.argv[1::2], sys.argv[2::2]):
    wanted = np.load(wanted)
    kinds = {"uint16": "bfloat16"}
    state = {k: paddle.zeros(wanted[k].shape, kinds.get(wanted[k].dtype.name, wanted[k].dtype.name)) for k in wanted}
    paddle.distributed.load_state_dict(state, folder)
    for key, tensor in state.items():
        assert tensor.numpy().tobytes() == wanted[key].tobytes(), (folder, key)
        loaded += 1
print("equal", loaded)
"""
LOAD_SHARDED = """
import os
import sys
import numpy as np
import paddle
from paddle.distributed.flex_checkpoint.dcp.sharded_weight import ShardedWeight
paddle.set_device("cpu")
paddle.Tensor.cuda = lambda self, *args, **more: self
paddle.distributed.init_parallel_env()
rank = paddle.distributed.get_rank()
loaded = 0
for folder, wanted in zip(sys.argv[1::2], sys.argv[2::2]):
    wanted, state, pieces = np.load(wanted), {}, {}
    for i, key in enumerate(wanted):
        whole = wanted[key]
        dims = [d for d, extent in enumerate(whole.shape) if extent > 1 and extent % 2 == 0]
        offset, more = [0] * whole.ndim, {}
        if i % 3 == 0 and whole.ndim == 2:  # as sharding cuts it: a ragged range of the flattening
            cut = whole.size // 2 + 5
            start, stop = ((0, cut), (cut, whole.size))[rank]
            piece, local = whole.ravel()[start:stop], whole.shape
            more = {"is_flattened": True, "flattened_range": slice(start, stop)}
        elif dims:
            dim = dims[i % len(dims)]
            piece = np.ascontiguousarray(np.split(whole, 2, axis=dim)[rank])
            offset[dim], local = rank * piece.shape[dim], piece.shape
        else:
            piece, local = whole, whole.shape
        kind = {"uint16": "bfloat16"}.get(whole.dtype.name, whole.dtype.name)
        pieces[key] = piece
        local_tensor = paddle.zeros(piece.shape, kind)
        state[key] = ShardedWeight(key, local_tensor, tuple(local), whole.shape, tuple(offset), **more)
    paddle.distributed.load_state_dict(state, folder)
    for key, piece in pieces.items():
        assert state[key].local_tensor.numpy().tobytes() == piece.tobytes(), (folder, key)
        loaded += 1
print("equal", loaded, flush=True)
os._exit(0)
"""
SAVE_AGAIN = """
import pathlib
import sys
import paddle
for folder in ("model_state", "master_weight", "optimizer_state"):
    state = {}
    for path in sorted(pathlib.Path(sys.argv[1], folder).glob("*.distcp")):
        state |= paddle.load(str(path))
    paddle.distributed.save_state_dict(state, f"{sys.argv[2]}/safetensors/{folder}", safetensors=True)
    renamed = pathlib.Path(sys.argv[2], "safetensors_as_distcp", folder)
    paddle.distributed.save_state_dict(state, str(renamed), safetensors=True)
    (renamed / "0_0.safetensors").rename(renamed / "0_0.distcp")
    metadata = paddle.load(str(renamed / "0.metadata"))
    for index in metadata.storage_metadata:
        metadata.storage_metadata[index] = "0_0.distcp"
    paddle.save(metadata, str(renamed / "0.metadata"))
    kept = {key: value for key, value in state.items() if value.dtype != paddle.bfloat16}
    paddle.distributed.save_state_dict(kept, f"{sys.argv[2]}/zero_cost/{folder}")
"""


def by_folder(truth: oracle.Tensors) -> dict[str, oracle.Tensors]:
    """The truth, spelled as the folders of PaddleFormers have it."""
    found: dict[str, oracle.Tensors] = {}
    for key, value in truth.items():
        if key.endswith(".ema_w_0"):
            folder, name = "ema_state", f"{key.removesuffix('.ema_w_0')}.w_0"
        elif key.endswith(".ema"):
            folder, name = "ema_state", key.removesuffix(".ema")
        elif key.endswith(".w_0"):
            folder, name = "master_weight", key
        else:
            states = (*oracle.MOMENTS, *oracle.POWERS)
            folder, name = "optimizer_state" if key.endswith(states) else "model_state", key
        found.setdefault(folder, {})[name] = value
    return found


@pytest.fixture(scope="module")
def made_checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[list[Path], int]]:
    """Folders with metadata and what they must hold, alternating; and how many tensors that is."""
    root = tmp_path_factory.mktemp("made")
    names = {name: case_directory(name) for name in ("mp2pp2sh2_s1v2_meta_ema", "sh2_s1v1_meta_fp32")}
    pairs: list[Path] = []
    count = 0
    for name, folder in names.items():
        convert(folder / "checkpoint-3", root / name, format="flex", max_shard_size="200KB")
        for state_folder, tensors in by_folder(oracle.read_truth(folder / "truth.safetensors")).items():
            np.savez(root / f"{name}-{state_folder}.npz", **tensors)
            pairs += [root / name / state_folder, root / f"{name}-{state_folder}.npz"]
            count += len(tensors)
    yield pairs, count
    shutil.rmtree(root)


@pytest.mark.full  # `test_flex_by_rank.py` has such a job in `make test`
def test_two_processes_load_their_boxes_and_ranges(made_checkpoints) -> None:
    """FlexCheckpoint's own loader over gloo; only the copy to a GPU that it makes on the way is left out."""
    pairs, count = made_checkpoints
    for text in run_ranks(2, LOAD_SHARDED, *pairs):
        assert text.strip().endswith(f"equal {count}"), text[-2000:]
