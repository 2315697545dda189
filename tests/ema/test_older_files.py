"""``ema_state/`` as PaddleFormers wrote it before it had metadata: parameter names for keys, padding, all parameters.

Made of a real FlexCheckpoint of four ranks, whose own average is the truth.
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

from paddle_reshard import convert, verify
from paddle_reshard.pipeline.core.errors import CheckpointError, PlanError
from paddle_reshard.pipeline.training.async_ema import AsyncEma
from paddle_reshard.pipeline.training.resume import Piece, RankPieces
from paddle_reshard.pipeline.training.stretches import Weights
from tests import oracle
from tests.conftest import case_directory

CASE = "fc_moe_mp2sh2_s1v2_ema"
PADDING = np.zeros(100, np.float32)
EMBEDDING, NORM = "model.embed_tokens.weight", "model.norm.weight"
Root = dict[str, Any]


class Saved:
    """A tensor as ``paddle.save`` spells it."""

    def __init__(self, pair: tuple[str, np.ndarray]) -> None:
        self.pair = pair

    def __reduce__(self) -> tuple[Any, ...]:
        return tuple, (self.pair,)


def load(path: Path) -> Root:
    return pickle.loads(path.read_bytes())


def save(root: Root, path: Path) -> None:
    masters = {name: Saved(pair) for name, pair in root["master_weights"].items()}
    params = {key: Saved(pair) for key, pair in root.items() if isinstance(pair, tuple)}
    path.write_bytes(pickle.dumps({"master_weights": masters, **params}, protocol=4))


class Metadata(pickle.Unpickler):
    """Without Paddle's classes."""

    def find_class(self, module: str, name: str) -> Any:
        return type(name, (), {}) if module.startswith("paddle.") else super().find_class(module, name)


def at_end(checkpoint: Path, file_name: str) -> set[str]:
    """Keys of which a file holds the end of a flattened tensor."""
    with (checkpoint / "ema_state" / "0.metadata").open("rb") as file:
        places = Metadata(file).load().storage_metadata
    return {
        index.tensor_key
        for index, name in places.items()
        if name == file_name and index.is_flattened and index.flattened_range[1] == np.prod(index.local_shape)
    }


def older(rank: int, checkpoint: Path) -> Root:
    """A rank's file; tensors are pairs of the framework's name and the values."""
    cell = json.loads((checkpoint / "model_meta.json").read_text())["sharding_metas"][f"tp0{rank % 2}_pp00"]
    names = cell["structure_name_mapping"]
    ranks = [load(checkpoint / "ema_state" / f"{number}_0.distcp") for number in range(4)]
    padded, masters = at_end(checkpoint, f"{rank}_0.distcp"), {}
    for key, value in ranks[rank].items():
        if key.endswith(".w_0"):
            name = names[key.removesuffix(".w_0")]
            whole = np.concatenate([value, PADDING]) if key in padded else value
            masters[name] = (f"{name}_fp32_master_0", whole)
    masters["of_nothing.w_0"] = ("of_nothing.w_0_fp32_master_0", PADDING)
    routers = {key: value for root in ranks for key, value in root.items() if key.endswith("gate.weight")}
    params = {key: (name, routers.get(key, np.zeros(4, np.uint16))) for key, name in names.items()}
    return {"master_weights": masters, **params}


@pytest.fixture
def real() -> Path:
    return case_directory(f"small-flex/{CASE}")


@pytest.fixture
def checkpoint(real: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "checkpoint-3"
    shutil.copytree(real / "checkpoint-3", folder, copy_function=shutil.copyfile)
    shutil.rmtree(folder / "ema_state")
    (folder / "ema_state").mkdir()
    for rank in range(4):
        save(older(rank, real / "checkpoint-3"), folder / "ema_state" / f"{rank}_0.distcp")
    return folder


def test_it_holds_what_its_successor_holds(real: Path, checkpoint: Path, tmp_path: Path) -> None:
    assert verify(checkpoint, real / "checkpoint-3", config=real / "config.json").equal
    for source, target in ((checkpoint, "older"), (real / "checkpoint-3", "newer")):
        convert(source, tmp_path / target, to="tp=1", config=real / "config.json")
    older_file, newer_file = (tmp_path / name / "ema.pdopt" for name in ("older", "newer"))
    assert older_file.read_bytes() == newer_file.read_bytes()


def test_a_rank_of_another_topology_continues_from_it(real: Path, checkpoint: Path) -> None:
    whole = oracle.read_truth(real / "truth.safetensors")[f"{EMBEDDING}.ema_w_0"]
    (checkpoint / "model_meta.json").write_text("null")  # as a job without sharding leaves it
    held = Weights({"w": np.zeros(whole.shape, np.float32)})
    with AsyncEma(lambda: held, decay=0.9) as ema:
        ema.load(checkpoint, RankPieces({"w": Piece(EMBEDDING, whole.shape)}), config=real / "config.json")
        assert np.asarray(ema.state().master_weights["w"]).tobytes() == whole.tobytes()


def rank_that_holds(checkpoint: Path, key: str) -> Path:
    for path in sorted((checkpoint / "master_weight").glob("*.distcp")):
        if f"{key}.w_0" in load(path):
            return checkpoint / "ema_state" / path.name
    raise KeyError(key)


def without_its_entry(root: Root, key: str) -> None:
    del root["master_weights"][root[key][0]]


def of_another_size(root: Root, key: str) -> None:
    name, values = root["master_weights"][root[key][0]]
    root["master_weights"][root[key][0]] = (name, values[: values.size // 2])


def called_otherwise(root: Root, key: str) -> None:
    root[key] = ("linear_77.w_0", root[key][1])


def called_by_no_name(root: Root, key: str) -> None:
    """As the zero-cost checkpoint wrote it, without parameters in bfloat16; the norm's padding hides its name."""
    del root[key]


@pytest.mark.parametrize(
    ("key", "change", "told"),
    [
        (EMBEDDING, without_its_entry, f"embedding_0.w_0 is not in it, of which the rank holds {EMBEDDING}"),
        (EMBEDDING, of_another_size, r"embedding_0.w_0 is f4 \(\d+,\) in it, the rank's piece of"),
        (EMBEDDING, called_otherwise, f"{EMBEDDING}.w_0 is called embedding_0.w_0 and linear_77.w_0"),
        (NORM, called_by_no_name, f"{NORM}.w_0 is called by no name in the rank's files"),
    ],
)
def test_what_the_other_folders_do_not_settle_is_refused(
    real: Path, checkpoint: Path, tmp_path: Path, key: str, change: Callable[[Root, str], None], told: str
) -> None:
    path = rank_that_holds(checkpoint, key)
    root = load(path)
    change(root, key)
    save(root, path)
    with pytest.raises(PlanError, match=f"ema_state/{path.name}: an average under parameter names.*{told}"):
        convert(checkpoint, tmp_path / "target", to="tp=1", config=real / "config.json")
    assert not (tmp_path / "target").exists()


def test_a_rank_without_its_file_and_a_mixed_folder_are_refused(
    real: Path, checkpoint: Path, tmp_path: Path
) -> None:
    def refused(told: str) -> None:
        with pytest.raises((PlanError, CheckpointError), match=told):
            convert(checkpoint, tmp_path / "target", to="tp=1", config=real / "config.json")

    (checkpoint / "ema_state" / "3_0.distcp").rename(tmp_path / "3_0.distcp")
    refused("the rank that saved its values has no file of averages")
    (tmp_path / "3_0.distcp").rename(checkpoint / "ema_state" / "3_0.distcp")
    shutil.copy(real / "checkpoint-3" / "ema_state" / "0.metadata", checkpoint / "ema_state")
    refused("an average under parameter names beside one that has metadata")
