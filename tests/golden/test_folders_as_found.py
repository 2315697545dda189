"""Folders as people have them: what others left beside the trainer's files, or put in their place.

The oracles are the same folder without that, the files of the hub's own library, and the truth of real checkpoints.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

import paddle_reshard
from paddle_reshard.pipeline.core.errors import ReshardError
from tests.conftest import case_directory

APPLE_DOUBLE = b"\x00\x05\x16\x07\x00\x02\x00\x00Mac OS X        " + bytes(100)
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:%s\nsize 14000000000\n" % (b"4d" * 32)
PAGE = b'<!DOCTYPE html>\n<html class=""><head><title>Sign in</title></head></html>\n'
HYBRID = "mp2pp2_sp"
FLEX = "small-flex/fc_pp2sh2_s1v2_tied"


def copy_of(case: str, to: Path) -> Path:
    (source,) = (path for path in case_directory(case).iterdir() if path.is_dir())
    shutil.copytree(source, to, copy_function=shutil.copyfile)
    if not (to / "config.json").exists():
        shutil.copyfile(source.parent / "config.json", to / "config.json")
    return to


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in several files, with an index."""
    folder = tmp_path_factory.mktemp("model")
    source = copy_of(HYBRID, folder / "source")
    paddle_reshard.convert(source, folder / "model", format="huggingface", max_shard_size="200KB")
    (folder / "model/paddle_reshard.json").unlink()
    assert len([*(folder / "model").glob("*.safetensors")]) > 1
    return folder / "model"


def leave_strays(folder: Path) -> Iterator[str]:
    """What macOS, NFS, a NAS and a notebook leave; the names of all."""
    inside = [folder, *(path for path in folder.iterdir() if path.is_dir())]
    for place in inside:
        prefix = "" if place is folder else f"{place.name}/"
        for path in [path for path in place.iterdir() if path.is_file()]:
            (place / f"._{path.name}").write_bytes(APPLE_DOUBLE)
            yield f"{prefix}._{path.name}"
        for name in (".DS_Store", ".nfs000000000a1b2c3d00000001"):
            (place / name).write_bytes(b"\x00\x00\x00\x01Bud1")
            yield prefix + name
        for name in ("@eaDir", ".ipynb_checkpoints"):
            (place / name).mkdir()
            (place / name / "model.safetensors").write_bytes(b"")
            yield prefix + name


def files_of(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != "paddle_reshard.json"
    }


@pytest.mark.parametrize("source", [FLEX, "model", HYBRID])
def test_what_a_system_left_beside_the_files_is_nobodys(model: Path, tmp_path: Path, source: str) -> None:
    clean = tmp_path / "clean"
    if source == "model":
        shutil.copytree(model, clean)
    else:
        copy_of(source, clean)
    littered = Path(shutil.copytree(clean, tmp_path / "littered"))
    strays = {*leave_strays(littered)}
    wanted = {"to": "tp=1"}
    paddle_reshard.convert(clean, tmp_path / "a", **wanted)
    result = paddle_reshard.convert(littered, tmp_path / "b", **wanted)
    assert files_of(tmp_path / "a") == files_of(tmp_path / "b")
    left = {path: reason for path, reason in result.plan.targets[0].not_carried if path in strays}
    assert left.keys() == strays and len({*left.values()}) == 1
    assert strays <= {path for path, _ in paddle_reshard.inspect(littered).left_out}


def test_what_a_system_left_in_a_target_is_no_damage(model: Path, tmp_path: Path) -> None:
    paddle_reshard.convert(model, tmp_path / "out", to="tp=1")
    assert [*leave_strays(tmp_path / "out")]
    assert paddle_reshard.check(tmp_path / "out")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (POINTER, "is a Git LFS pointer to a file of 14000000000 bytes.*git lfs pull"),
        (PAGE, "is an HTML page.*download it again"),
        (b"Entry not found", "is the answer 'Entry not found' of a server"),
        (b"", "is empty; copy or download it again"),
        (bytes(70000), "begins with zeros only"),
    ],
    ids=["pointer", "page", "answer", "empty", "zeros"],
)
def test_what_lies_in_place_of_a_file_is_named(
    model: Path, tmp_path: Path, content: bytes, said: str
) -> None:
    hub, flex, hybrid = (tmp_path / name for name in ("hub", "flex", "hybrid"))
    shutil.copytree(model, hub)
    copy_of(FLEX, flex)
    copy_of(HYBRID, hybrid)
    replaced = (
        next(hub.glob("model-00001-of-*.safetensors")),
        hub / "model.safetensors.index.json",
        hub / "config.json",
        flex / "model_state/0.metadata",
        hybrid / "model_state.tp00_pp00.pdparams",
    )
    for path in replaced:
        sound = path.read_bytes()
        path.write_bytes(content)
        folder = flex if path.is_relative_to(flex) else path.parent
        for read in (paddle_reshard.inspect, lambda where: paddle_reshard.plan(where, to="tp=1")):
            with pytest.raises(ReshardError, match=rf"{path.name}: {said}"):
                read(folder)
        path.write_bytes(sound)


def test_the_folders_of_machines_are_known_and_brought_together_as_it_says(tmp_path: Path) -> None:
    whole = copy_of(HYBRID, tmp_path / "whole")
    for path in [*whole.iterdir()]:
        of_all = "_pp" not in path.name
        for stage in (0, 1):
            if of_all or f"_pp0{stage}" in path.name:
                (tmp_path / f"run/node{stage}").mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, tmp_path / f"run/node{stage}/{path.name}")
    with pytest.raises(ReshardError, match=r"folders of machines, node0 to node1.*cp -rnp node\*/\* whole/"):
        paddle_reshard.inspect(tmp_path / "run")
    together = tmp_path / "together"
    together.mkdir()
    for path in sorted((tmp_path / "run").glob("node*/*")):
        if not (together / path.name).exists():
            shutil.copy2(path, together / path.name)
    assert paddle_reshard.inspect(together).states == paddle_reshard.inspect(whole).states
