"""Checkpoints of Paddle 3.4, whose files are pickles of protocol 5, compared with those of Paddle 3.3 and earlier."""

from __future__ import annotations

import pickle
import shutil
from pathlib import Path

import pytest

import paddle_reshard
from paddle_reshard.storage.files.paddle_pickle import STRUCTURED_NAMES
from tests import oracle, protocol5
from tests.conftest import case_directory
from tests.golden.test_flex import Case, case_of, check_against_truth, unpickle

pytestmark = pytest.mark.filterwarnings("ignore:numpy.core:DeprecationWarning")


def checkpoint(name: str) -> Path:
    return case_directory(f"states/{name}") / "checkpoint-3"


SAME_TOPOLOGY = {
    "p5_single": "tp=1", "p5_fp32_single": "tp=1", "p5_mid_single": "tp=1", "p5_lora_single": "tp=1",
    "p5_sh2_s1v2_meta": "sharding=2",
}  # fmt: skip
"""Cases of writable arrays and NumPy 1, and their own topologies."""


def files_of(folder: Path) -> dict[str, bytes]:
    """All pickles of Paddle's."""
    suffixes = (".pdparams", ".pdopt", ".distcp", ".metadata")
    found = (path for path in folder.rglob("*") if path.name.endswith(suffixes))
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in found}


@pytest.mark.parametrize("name", SAME_TOPOLOGY)
def test_for_paddle_3_4_every_file_is_the_one_that_it_writes_itself(name: str, tmp_path: Path) -> None:
    source = checkpoint(name)
    paddle_reshard.convert(source, tmp_path / "made", to=SAME_TOPOLOGY[name], paddle_version="3.4")
    assert files_of(tmp_path / "made") == files_of(source)


def test_a_flex_checkpoint_for_paddle_3_4_is_what_pickle_writes_of_its_objects(tmp_path: Path) -> None:
    """Opened with Paddle's own classes, and by its loader, which makes tensors of the arrays."""
    source = case_directory("dense/mp2pp2sh2_s1v2_meta_ema") / "checkpoint-3"
    paddle_reshard.convert(
        source, tmp_path / "flex", format="flex", max_shard_size="200KB", paddle_version="3.4"
    )
    found = [path for path in (tmp_path / "flex").rglob("*") if path.suffix in (".distcp", ".metadata")]
    made = sorted(found, key=lambda path: path.suffix)  # Paddle's loader first, which imports Paddle
    assert len(made) > 8  # of four folders
    for path in made:
        loaded = oracle.load_with_paddle(path) if path.suffix == ".distcp" else {}
        again = unpickle(path)
        assert protocol5.dumps(again) == path.read_bytes()
        assert all(
            value.tobytes() == again[key].tobytes()
            for key, value in loaded.items()
            if key != STRUCTURED_NAMES
        )


def test_a_version_that_is_not_known_is_wrong_usage(tmp_path: Path) -> None:
    for options in ({"to": "tp=1"}, {"format": "flex"}):
        with pytest.raises(paddle_reshard.UsageError, match=r"--paddle-version 3\.5: .* 3\.3, 3\.4"):
            paddle_reshard.convert(
                checkpoint("p5_single"), tmp_path / "made", paddle_version="3.5", **options
            )


def saved_again(source: Path, target: Path) -> Path:
    """The same checkpoint with every pickle of Paddle's written with protocol 5, by Paddle's own classes."""
    oracle.load_with_paddle(next(source.rglob("*.distcp")))  # imports Paddle
    shutil.copytree(source, target, copy_function=shutil.copyfile)
    for path in target.rglob("*"):
        if path.suffix in (".distcp", ".metadata", ".pdparams"):
            path.write_bytes(pickle.dumps(pickle.loads(path.read_bytes()), 5))
            assert path.read_bytes()[:2] == b"\x80\x05"
    return target


@pytest.mark.parametrize("name", ["fc_mp2pp2sh2_s1v2", "fc_sh2_s3_seg512"])
def test_a_flex_checkpoint_of_protocol_5_holds_the_truth(name: str, tmp_path: Path) -> None:
    case = case_of(f"dense/{name}", "dense/single")
    again = tmp_path / "case"
    again.mkdir()
    for path in case.checkpoint.parent.glob("truth*"):
        shutil.copy(path, again)
    made = Case(saved_again(case.checkpoint, again / "checkpoint-3"), case.config)
    check_against_truth(made, tmp_path / "one")


def test_attributes_of_a_later_paddle_are_listed_once_and_change_nothing(tmp_path: Path) -> None:
    case = case_of("dense/fc_single", "dense/single")
    shutil.copytree(case.checkpoint, tmp_path / "checkpoint-3", copy_function=shutil.copyfile)
    shutil.copy(case.checkpoint.parent / "truth.safetensors", tmp_path)
    oracle.load_with_paddle(next(case.checkpoint.rglob("*.distcp")))  # imports Paddle
    for path in tmp_path.rglob("*.metadata"):
        metadata = unpickle(path)
        metadata.__dict__.update(checkpoint_version="2.1", paddle_commit_id=None, paddle_says_so=None)
        path.write_bytes(pickle.dumps(metadata, 5))
    later = Case(tmp_path / "checkpoint-3", case.config)
    facts = [
        value
        for name, value in paddle_reshard.inspect(later.checkpoint, config=later.config).facts()
        if name == "newer"
    ]
    assert facts == [
        ".metadata files have attributes that those of Paddle 3.4 lack: checkpoint_version '2.1', "
        "paddle_commit_id None, paddle_says_so None; none changes a value"
    ]
    check_against_truth(later, tmp_path / "one")
