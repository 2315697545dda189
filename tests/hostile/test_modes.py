"""A target is at most as open as its source: who may not read the one may not read the other."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

import paddle_reshard
from tests.conftest import COMMITTED

SOUND = COMMITTED / "mp2pp2sh2_s1v2_meta_ema" / "checkpoint-3"


@pytest.fixture(autouse=True)
def _open_by_default() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


def copied(folder: Path, folder_mode: int, file_mode: int) -> Path:
    shutil.copytree(SOUND, folder)
    for path in folder.iterdir():
        path.chmod(file_mode)
    folder.chmod(folder_mode)
    return folder


def modes(root: Path) -> set[tuple[str, str]]:
    """Kind and permissions of everything below a folder, and of itself."""
    found = set()
    for path in (root, *root.rglob("*")):
        mode = path.lstat().st_mode
        found.add(("folder" if stat.S_ISDIR(mode) else "file", oct(stat.S_IMODE(mode))))
    return found


@pytest.mark.parametrize(
    ("folder_mode", "file_mode", "folder", "file"),
    [
        (0o700, 0o600, "0o700", "0o600"),
        (0o750, 0o640, "0o750", "0o640"),
        (0o777, 0o666, "0o755", "0o644"),
        (0o755, 0o444, "0o755", "0o644"),
        (0o700, 0o644, "0o700", "0o644"),
    ],
)
def test_a_target_is_at_most_as_open_as_its_source(
    folder_mode: int, file_mode: int, folder: str, file: str, tmp_path: Path
) -> None:
    source = copied(tmp_path / "c", folder_mode, file_mode)
    seen: set[tuple[str, str]] = set()

    def look(event: object) -> None:
        for staging in tmp_path.glob(".*.reshard"):
            seen.update(modes(staging))

    targets = {tmp_path / "hybrid": {"to": "tp=1"}, tmp_path / "flex": {"format": "flex"}}
    paddle_reshard.convert(source, targets, observe=look)
    for target in targets:
        assert modes(target) == {("folder", folder), ("file", file)}
    assert seen == {("folder", folder), ("file", file)}  # session, ledger and lock among them


def test_one_file_that_others_may_not_read_closes_all(tmp_path: Path) -> None:
    """Who cannot read all of the source cannot read what is made of all of it."""
    source = copied(tmp_path / "c", 0o755, 0o644)
    next(source.glob("optimizer.*")).chmod(0o600)
    paddle_reshard.convert(source, tmp_path / "t", to="tp=1")
    assert modes(tmp_path / "t") == {("folder", "0o755"), ("file", "0o600")}


def test_of_several_sources_the_closest_counts(tmp_path: Path) -> None:
    sources = [copied(tmp_path / "a", 0o750, 0o644), copied(tmp_path / "b", 0o755, 0o640)]
    paddle_reshard.average(sources, tmp_path / "t", uniform=True, to="tp=1")
    assert modes(tmp_path / "t") == {("folder", "0o750"), ("file", "0o640")}


def test_a_folder_of_the_source_that_is_closed_closes_the_target(tmp_path: Path) -> None:
    paddle_reshard.convert(SOUND, tmp_path / "c", format="flex")
    (tmp_path / "c" / "master_weight").chmod(0o700)
    paddle_reshard.convert(tmp_path / "c", tmp_path / "t", to="tp=1", config=SOUND / "config.json")
    assert modes(tmp_path / "t") == {("folder", "0o700"), ("file", "0o644")}
