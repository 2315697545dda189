"""Claims and targets wherever they lie: on a disk, in memory, in an S3 store with conditional writes."""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

from paddle_reshard.pipeline.core.errors import ListingError
from paddle_reshard.storage.listing import CheckpointRoot, open_root
from tests.jobs.command import snapshot
from tests.limited import files_up_to
from tests.storage.servers import Store


@pytest.fixture(params=["disk", "memory", "s3"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[CheckpointRoot]:
    if request.param == "disk":
        yield open_root(str(tmp_path / "root"), {})
    elif request.param == "memory":
        yield open_root("memory://root", {})
        fsspec.filesystem("memory").store.clear()
    else:
        bucket, store = request.getfixturevalue("bucket"), request.getfixturevalue("store")
        yield open_root(f"s3://{bucket}/some/root/", store.options)


def test_a_root_is_empty_until_something_is_put_there(root: CheckpointRoot) -> None:
    assert not root.is_there()
    assert root.folders() == []
    assert root.files("checkpoint-3") == {}
    assert root.read("seen/x.json") is None
    assert root.remove("checkpoint-3", bool) is None
    root.replace("checkpoint-3/a", b"a")
    assert root.is_there()


def test_files_and_folders_are_listed_with_stamps_that_change(root: CheckpointRoot) -> None:
    root.replace("checkpoint-3/a", b"one")
    root.replace("checkpoint-3/b", b"two")
    root.replace("checkpoint-20/a", b"three")
    assert root.folders() == ["checkpoint-20", "checkpoint-3"]
    before = root.files("checkpoint-3")
    assert set(before) == {"a", "b"}
    assert root.files("checkpoint-3") == before
    root.replace("checkpoint-3/a", b"another")
    after = root.files("checkpoint-3")
    assert after["a"] != before["a"]
    assert after["b"] == before["b"]
    assert root.read("checkpoint-3/a") == b"another"
    assert root.at("checkpoint-3").endswith("root/checkpoint-3")


def test_a_full_disk_leaves_nothing_of_what_it_does_not_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = open_root(str(tmp_path), {})
    root.replace("records/x.json", b"old")

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ListingError, match="no space left on the disk"):
        root.replace("records/x.json", b"new")
    assert {path.name: path.read_bytes() for path in (tmp_path / "records").iterdir()} == {"x.json": b"old"}


def test_lines_of_a_log_keep_their_order(root: CheckpointRoot) -> None:
    """One file on a disk; in a store, where nothing can be appended, one object for each line."""
    for line in (b"1", b"2", b"3"):
        root.append("x/audit", line)
    assert root.read("x/audit.jsonl") in (b"1\n2\n3\n", None)
    objects = [root.read(f"x/audit/{name}") for name in sorted(root.files("x/audit"))]
    assert objects == ([] if root.read("x/audit.jsonl") else [b"1", b"2", b"3"])


def test_a_line_that_does_not_fit_is_an_error(tmp_path: Path) -> None:
    """Of a line that the rest of a disk does not hold, a write takes what fits, and says how much that was."""
    root = open_root(str(tmp_path), {})
    root.append("audit", b"12")
    with files_up_to(5), pytest.raises(ListingError, match="the file is larger than the limit"):
        root.append("audit", b"34567")


MANIFEST = b'{"format": "paddle-reshard manifest", "files": {"a": 1, "model_state/0_0.distcp": 1}}'


def _put(root: CheckpointRoot, folder: str) -> None:
    for name in ("a", "model_state/0_0.distcp"):
        root.replace(f"{folder}/{name}", b"x")
    root.replace(f"{folder}/paddle_reshard.json", MANIFEST)


def test_a_checkpoint_is_removed_and_nothing_else(root: CheckpointRoot) -> None:
    _put(root, "checkpoint-3")
    root.replace("checkpoint-30/a", b"x")
    for _ in range(2):
        assert root.remove("checkpoint-3", lambda manifest: manifest == MANIFEST) is None
        assert root.folders() == ["checkpoint-30"]
        assert root.files("checkpoint-3") == {}


@pytest.mark.parametrize(
    ("path", "data", "named"),
    [
        ("notes.txt", b"mine", "there is also notes.txt, which the manifest there does not list"),
        ("finetuned/config.json", b"mine", "there is also finetuned/"),
        ("a", b"changed by hand", "the size of a differs from the manifest"),
        ("paddle_reshard.json", b"{}", "its manifest is not the one that was written"),
    ],
)
def test_a_folder_that_is_not_exactly_what_was_made_is_kept(
    path: str, data: bytes, named: str, root: CheckpointRoot
) -> None:
    _put(root, "checkpoint-3")
    root.replace(f"checkpoint-3/{path}", data)
    before = root.files("checkpoint-3")
    for _ in range(2):
        reason = root.remove("checkpoint-3", lambda manifest: manifest == MANIFEST)
        assert named in str(reason)
        assert root.files("checkpoint-3") == before
        assert root.folders() == ["checkpoint-3"]


def test_a_folder_of_the_name_that_is_used_while_removing_is_kept(tmp_path: Path) -> None:
    root = open_root(str(tmp_path), {})
    _put(root, "checkpoint-3")
    root.replace(".checkpoint-3.removing/thesis.tex", b"years of work")
    before = sorted(tmp_path.rglob("*"))
    assert "is in the way" in str(root.remove("checkpoint-3", lambda manifest: manifest == MANIFEST))
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("cut", range(1, 4))
def test_a_removal_in_a_store_that_was_cut_short_is_finished(
    cut: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = fsspec.filesystem("memory")
    root = open_root(f"memory://cut-{secrets.token_hex(6)}", {})
    _put(root, "checkpoint-3")
    remove, left = type(memory).rm_file, [cut]

    def failing(self: object, path: str) -> None:
        left[0] -= 1
        if left[0] == 0:
            raise KeyboardInterrupt
        remove(self, path)

    with monkeypatch.context() as patched:
        patched.setattr(type(memory), "rm_file", failing)
        with pytest.raises(KeyboardInterrupt):
            root.remove("checkpoint-3", lambda manifest: manifest == MANIFEST)
    assert root.remove("checkpoint-3", lambda manifest: manifest == MANIFEST) is None
    assert root.files("checkpoint-3") == {}


def test_a_store_that_refuses_is_reported_in_one_sentence(store: Store, bucket: str) -> None:
    root = open_root(f"s3://{bucket}/root", store.read_only)
    with pytest.raises(ListingError, match="access denied") as refused:
        root.replace("seen/x.json", b"mine")
    assert store.read_only["secret"] not in str(refused.value)


def test_the_disk_keeps_no_working_files(tmp_path: Path) -> None:
    root = open_root(str(tmp_path), {})
    for data in (b"a", b"b", b"c"):
        root.replace("deep/seen/x.json", data)
    assert snapshot(tmp_path) == {"deep/seen/x.json": b"c"}
