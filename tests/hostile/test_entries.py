"""Links, pipes, sockets and devices in a checkpoint: nothing outside of it is read, and nothing is dropped unsaid."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

import paddle_reshard
from paddle_reshard.pipeline.cli.main import cli
from paddle_reshard.pipeline.core.errors import CheckpointError
from paddle_reshard.storage.local.source import LocalSource
from paddle_reshard.storage.store import Read
from tests.conftest import COMMITTED

SOUND = COMMITTED / "mp2pp2sh2_s1v2_meta_ema" / "checkpoint-3"


@pytest.fixture
def source() -> Iterator[Path]:
    """A checkpoint of a short name: that of a socket may have 107 characters."""
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(SOUND, Path(folder) / "c", copy_function=shutil.copyfile)
        yield Path(folder) / "c"


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(str(path))


def _outside(path: Path) -> None:
    secret = path.parent.parent / "secret"
    secret.write_bytes(b"of somebody else")
    path.symlink_to(secret)


def _outside_by_a_detour(path: Path) -> None:
    """Through a folder of the checkpoint that is a link itself."""
    _outside(path.parent / "way")
    (path.parent / "way").unlink()
    (path.parent / "way").symlink_to("..")
    path.symlink_to("way/secret")


ODD: dict[str, tuple[Callable[[Path], object], str]] = {
    "a pipe": (os.mkfifo, "is a pipe"),
    "a socket": (_socket, "is a socket"),
    "a folder": (Path.mkdir, "is a folder, and a trainer writes a file of this name"),
    "dangling": (lambda path: path.symlink_to("nowhere"), "is a link to nowhere, which cannot be read"),
    "a loop": (
        lambda path: path.symlink_to(path.name),
        "is a link that leads to itself|is a link to .*, which cannot be read",
    ),
    "a device": (lambda path: path.symlink_to("/dev/zero"), "is a device"),
    "outside": (_outside, "is a link that leads out of the checkpoint, to .*secret; .*--allow-links"),
    "by a detour": (
        _outside_by_a_detour,
        "is a link that leads out of the checkpoint, to .*secret; .*--allow-links",
    ),
}


@pytest.mark.parametrize("name", ["scheduler.pdparams", "config.json", "model_state.tp00_pp00.pdparams"])
@pytest.mark.parametrize(("make", "told"), ODD.values(), ids=ODD)
def test_what_is_no_plain_file_is_refused_by_name(
    make: Callable[[Path], object], told: str, name: str, source: Path, tmp_path: Path
) -> None:
    (source / name).unlink(missing_ok=True)
    make(source / name)
    with pytest.raises(CheckpointError, match=rf"^{name}: {told}"):
        paddle_reshard.convert(source, tmp_path / "t", to="tp=1")
    assert not (tmp_path / "t").exists()


def test_a_tokenizer_that_is_a_file_of_the_machine_does_not_get_into_the_target(
    source: Path, tmp_path: Path
) -> None:
    _outside(source / "tokenizer.json")
    done = CliRunner().invoke(cli, ["convert", str(source), str(tmp_path / "t"), "--to", "tp=1"])
    assert done.exit_code == 1
    assert "tokenizer.json: is a link that leads out of the checkpoint" in done.output
    assert list(tmp_path.iterdir()) == []
    asked = ["convert", str(source), str(tmp_path / "t"), "--to", "tp=1", "--allow-links"]
    assert CliRunner().invoke(cli, asked).exit_code == 0
    assert (tmp_path / "t" / "tokenizer.json").read_bytes() == b"of somebody else"


def test_links_that_stay_inside_and_a_folder_that_is_one_are_fine(source: Path, tmp_path: Path) -> None:
    kept = source / "kept"
    kept.mkdir()
    for path in list(source.glob("*.pdopt")):
        path.rename(kept / path.name)
        path.symlink_to(f"kept/{path.name}")
    (source / "logs").symlink_to("/")  # no folder of a checkpoint: nobody looks into it
    (tmp_path / "link").symlink_to(source)
    paddle_reshard.convert(tmp_path / "link", tmp_path / "t", to="tp=1")
    assert paddle_reshard.verify(SOUND, tmp_path / "t").equal


def test_a_snapshot_of_a_hugging_face_cache(tmp_path: Path) -> None:
    """Its files are links to blobs beside the snapshots, and to nothing else."""
    paddle_reshard.convert(SOUND, tmp_path / "model", format="huggingface")
    repository = tmp_path / "models--one--model"
    snapshot, blobs = repository / "snapshots" / "0123abc", repository / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, path in enumerate(sorted((tmp_path / "model").iterdir())):
        shutil.copy(path, blobs / f"hash{number}")
        (snapshot / path.name).symlink_to(f"../../blobs/hash{number}")
    assert paddle_reshard.inspect(snapshot).format == "huggingface"
    (repository / "notes").write_text("mine")
    (snapshot / "notes").symlink_to("../../notes")
    with pytest.raises(CheckpointError, match="notes: is a link that leads out of the checkpoint"):
        paddle_reshard.inspect(snapshot)
    (snapshot / "notes").unlink()
    (blobs / "other").symlink_to(repository / "notes")
    (snapshot / "notes").symlink_to("../../blobs/other")
    with pytest.raises(CheckpointError, match="notes: is a link that leads out of the checkpoint"):
        paddle_reshard.inspect(snapshot)


def test_a_folder_of_tensors_that_lies_elsewhere(tmp_path: Path) -> None:
    paddle_reshard.convert(SOUND, tmp_path / "flex", format="flex")
    shutil.move(tmp_path / "flex" / "master_weight", tmp_path / "elsewhere")
    (tmp_path / "flex" / "master_weight").symlink_to("../elsewhere")
    with pytest.raises(CheckpointError, match="master_weight: is a link that leads out of the checkpoint"):
        paddle_reshard.inspect(tmp_path / "flex")
    assert paddle_reshard.inspect(tmp_path / "flex", allow_links=True).format == "flex"
    (tmp_path / "flex" / "master_weight").unlink()
    shutil.move(tmp_path / "elsewhere", tmp_path / "flex" / "master_weight")
    os.mkfifo(tmp_path / "flex" / "master_weight" / "9_0.distcp")
    with pytest.raises(CheckpointError, match=r"master_weight/9_0.distcp: is a pipe"):
        paddle_reshard.inspect(tmp_path / "flex")


def test_what_is_put_in_the_place_of_a_file_later_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "c").mkdir()
    file, secret = tmp_path / "c" / "a", tmp_path / "secret"
    for make in (os.mkfifo, lambda path: path.symlink_to(secret), lambda path: path.write_bytes(b"other")):
        file.unlink(missing_ok=True)
        file.write_bytes(b"public")
        secret.write_bytes(b"secret")
        source, buffer = LocalSource(tmp_path / "c"), bytearray(6)
        file.unlink()
        make(file)
        with pytest.raises(CheckpointError, match=r"^a: "):
            source.read_many([Read("a", 0, memoryview(buffer))])
        assert buffer == bytes(6)
