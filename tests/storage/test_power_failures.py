"""What is renamed was flushed: a power failure leaves the target as it was planned, or nothing that looks like one."""

from __future__ import annotations

import mmap
import os
import pathlib
import uuid
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import fsspec
import pytest

from paddle_reshard.storage.local.target import LocalTarget
from paddle_reshard.storage.locate import Access, open_target
from paddle_reshard.storage.store import Identity, NewFile, Permission, Receipt, TargetStore
from paddle_reshard.tasks.ema_worker import Shared, _save, shared_bytes

FILES = (
    NewFile("model_state/0_0.distcp", 6, (0, 4)),
    NewFile("config.json", 2, (0,)),
    NewFile("saved_signal_0", 1, (0,)),
    NewFile("empty", 0, ()),
)


STAGED = ".target.reshard"


def write(target: TargetStore) -> list[Receipt]:
    writer, _ = target.begin(FILES, Identity("plan", "version", "source", {}))
    return [
        writer.write_part(new.path, start, memoryview(b"value")[: stop - start])
        for new in FILES
        for start, stop in pairwise((*new.part_starts, new.size_bytes) if new.size_bytes else ())
    ]


@pytest.fixture
def watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The calls to the kernel that decide what a power failure leaves, in order, with paths below ``tmp_path``."""
    calls: list[str] = []

    def noting(name: str, really: Callable[..., None]) -> Callable[..., None]:
        def call(what: Any, *to: Any, **more: Any) -> None:
            path = Path(os.readlink(f"/proc/self/fd/{what}") if name == "fsync" else what)
            really(what, *to, **more)
            calls.append(f"{name} {path.relative_to(tmp_path)}")

        return call

    for name in ("fsync", "rename", "replace", "unlink"):
        monkeypatch.setattr(os, name, noting(name, getattr(os, name)))
    if accessor := getattr(
        pathlib, "_NormalAccessor", None
    ):  # Python 3.10 keeps what os had when it was imported
        monkeypatch.setattr(accessor, "unlink", staticmethod(os.unlink))
    return calls


@pytest.fixture
def calls(tmp_path: Path, watched: list[str]) -> list[str]:
    """Those while a target is published."""
    with LocalTarget(tmp_path / "target") as target:
        target.finish(write(target))
        os.utime(tmp_path / STAGED / "files" / "saved_signal_0", (0, 0))
        watched.clear()
        target.publish("paddle_reshard.json", b"{}")
    return watched


def test_files_and_folders_are_flushed_before_the_rename(calls: list[str]) -> None:
    flushed = set(calls[: calls.index(f"rename {STAGED}/files")])
    paths = ("", *("/" + new.path for new in FILES), "/model_state", "/paddle_reshard.json")
    assert {f"fsync {STAGED}/files{path}" for path in paths} <= flushed


def test_the_session_says_that_it_publishes_before_the_rename(calls: list[str]) -> None:
    """And durably: the record is flushed before it takes the place of the one before it."""
    record = f"{STAGED}/session.json.new"
    assert calls.index(f"fsync {record}") < calls.index(f"replace {record}")
    assert calls.index(f"replace {record}") < calls.index(f"rename {STAGED}/files")


def test_the_rename_is_flushed_before_the_session_is_removed(calls: list[str]) -> None:
    renamed, removed = calls.index(f"rename {STAGED}/files"), calls.index(f"unlink {STAGED}/session.json")
    assert "fsync ." in calls[renamed:removed]


@pytest.mark.usefixtures("calls")
def test_signals_are_not_older_than_what_they_signal(tmp_path: Path) -> None:
    times = {new.path: os.stat(tmp_path / "target" / new.path).st_mtime_ns for new in FILES}
    assert times["saved_signal_0"] == max(times.values())


def test_the_average_of_a_rank_is_flushed_before_it_replaces_the_one_before(
    tmp_path: Path, watched: list[str]
) -> None:
    nbytes = shared_bytes(4)
    shared = Shared(mmap.mmap(-1, nbytes), nbytes)
    _save(shared, {"path": str(tmp_path / "ema.pdopt"), "literals": [], "slots": [(0, 0, 4)]})
    assert watched == ["fsync ema.pdopt.unfinished", "replace ema.pdopt.unfinished"]


def test_in_a_store_signals_appear_when_all_that_they_signal_is_there() -> None:
    """Where files appear one by one; the manifest, without which nothing is a finished target, is the last."""
    root = f"memory://{uuid.uuid4().hex}/target"
    folder = fsspec.filesystem("memory")
    with open_target(root, Access({}), Permission()) as target:
        target.finish(write(target))
        assert {path.rpartition("/")[2] for path in folder.find(root)} == {
            "0_0.distcp",
            "config.json",
            "empty",
        }
        target.publish("paddle_reshard.json", b"{}")
    created = {
        path.rpartition("/")[2]: entry["created"] for path, entry in folder.find(root, detail=True).items()
    }
    assert created["saved_signal_0"] > max(created[name] for name in ("0_0.distcp", "config.json", "empty"))
    assert max(created, key=lambda name: created[name]) == "paddle_reshard.json"
