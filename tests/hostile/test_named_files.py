"""Files of a checkpoint name other files. Only files listed next to them are opened, whatever the name."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import paddle_reshard
from paddle_reshard.pipeline.core.errors import ReshardError
from tests.conftest import COMMITTED

SOURCE = COMMITTED / "mp2pp2sh2_s1v2_meta_ema" / "checkpoint-3"
OUTSIDE = "outside"
"""Nothing in a folder of this name may be opened."""
_watchers: list[list[str]] = []
_hooked: list[bool] = []


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "open" and _watchers and isinstance(arguments[0], str):
        _watchers[-1].append(arguments[0])


@contextmanager
def opened_paths() -> Iterator[list[str]]:
    """Every path that this process opens meanwhile, as Python's audit events tell (PEP 578)."""
    if not _hooked:
        sys.addaudithook(_audit)
        _hooked.append(True)
    _watchers.append([])
    try:
        yield _watchers[-1]
    finally:
        _watchers.pop()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The same checkpoint in another format."""
    folder = tmp_path_factory.mktemp("made")

    def make(form: str) -> Path:
        target = folder / form
        if not target.exists():
            size = "500KB" if form == "flex" else None
            paddle_reshard.convert(SOURCE, target, format=form, max_shard_size=size, drop=["ema"])
        return target

    return make


def refused(folder: Path, target: Path) -> str:
    with opened_paths() as paths, pytest.raises(ReshardError) as error:
        paddle_reshard.convert(folder, target, to="tp=1")
    assert any(path.startswith(str(folder)) for path in paths)  # the hook does see what is opened
    assert [path for path in paths if OUTSIDE in path or path.startswith("/etc/hosts")] == []
    assert not target.exists()
    return str(error.value)


@pytest.mark.parametrize("name", ["../{0}/{1}", "{2}/{0}/{1}", "config.json"])
def test_a_weight_map_names_only_what_was_listed(
    name: str, made: Callable[[str], Path], tmp_path: Path
) -> None:
    """What it leads to outside is a good file, the very one that belongs in its place.

    What is no name of a file: ``test_safetensors.py`` in `unit`.
    """
    folder = tmp_path / "source"
    shutil.copytree(made("unified"), folder, copy_function=shutil.copyfile)
    index = folder / "model.safetensors.index.json"
    data = json.loads(index.read_text())
    (real,) = set(data["weight_map"].values())
    (tmp_path / OUTSIDE).mkdir()
    shutil.copy(folder / real, tmp_path / OUTSIDE / real)
    key = next(iter(data["weight_map"]))
    data["weight_map"][key] = name.format(OUTSIDE, real, tmp_path)
    index.write_text(json.dumps(data))
    assert "model.safetensors.index.json" in refused(folder, tmp_path / "t")
    (folder / real).unlink()
    data["weight_map"] = dict.fromkeys(data["weight_map"], name.format(OUTSIDE, real, tmp_path))
    index.write_text(json.dumps(data))
    refused(folder, tmp_path / "t")


@pytest.mark.parametrize("name", ["/etc/hosts", "../out.dis", "9_9.distcp", "1_0.distcp"])
def test_metadata_name_only_what_was_listed(name: str, made: Callable[[str], Path], tmp_path: Path) -> None:
    """Of the same length, so that the pickle stays whole; the last one is there and holds other tensors."""
    folder = tmp_path / "source"
    shutil.copytree(made("flex"), folder, copy_function=shutil.copyfile)
    shutil.copy(folder / "model_state" / "0_0.distcp", folder / "out.dis")
    metadata = next((folder / "model_state").glob("*.metadata"))
    content = metadata.read_bytes()
    assert content.count(b"0_0.distcp") == 1  # once, and remembered by the pickle
    metadata.write_bytes(content.replace(b"0_0.distcp", name.encode()))
    if not name.startswith(".."):
        (folder / "out.dis").unlink()
    refused(folder, tmp_path / "t")
