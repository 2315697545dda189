"""The moves of a target one by one: parts in any order, from other processes, and every way to get them wrong."""

import pickle
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import fsspec
import pytest

from paddle_reshard.pipeline.core.errors import TargetError, UnsupportedError
from paddle_reshard.storage.locate import Access, open_source, open_target
from paddle_reshard.storage.store import Identity, NewFile, Permission, Receipt, TargetStore, WritePart
from tests.storage.contents import in_bucket, in_memory, uploads, visible
from tests.storage.servers import Store

PART = 5 << 20
FILES = (
    NewFile("model_state.pdparams", 2 * PART + 7, (0, PART, 2 * PART)),
    NewFile("empty", 0, ()),
    NewFile("empty too", 0, (0,)),
    NewFile("saved_signal_0", 1, (0,)),
    NewFile("config.json", 2, (0,)),
)
CONTENTS = {
    "model_state.pdparams": b"abcde" * (2 << 20) + b"1234567",
    "empty": b"",
    "empty too": b"",
    "saved_signal_0": b"1",
    "config.json": b"{}",
}
assert [len(CONTENTS[new.path]) for new in FILES] == [new.size_bytes for new in FILES]


def _begin(target: TargetStore) -> WritePart:
    return target.begin(FILES, Identity("plan", "version", "source", {}))[0]


def _write(writer: WritePart, backwards: bool = True) -> list[Receipt]:
    receipts = []
    for new in FILES:
        for start, stop in pairwise((*new.part_starts, new.size_bytes) if new.size_bytes else ()):
            receipts.append(writer.write_part(new.path, start, memoryview(CONTENTS[new.path])[start:stop]))
    return receipts[::-1] if backwards else receipts


def _open(scheme: str, store: Store, bucket: str, overwrite: bool = False) -> TargetStore:
    options = store.options if scheme == "s3" else {}
    return open_target(f"{scheme}://{bucket}/c", Access(options), Permission(overwrite))


def _found(scheme: str, store: Store, bucket: str) -> dict[str, bytes]:
    return in_bucket(store, bucket, "c/") if scheme == "s3" else in_memory(f"/{bucket}/c")


@pytest.mark.parametrize("scheme", ["s3", "memory"])
def test_nothing_appears_before_its_time(scheme: str, store: Store, bucket: str) -> None:
    with _open(scheme, store, bucket) as target:
        writer = _begin(target)
        receipts = _write(pickle.loads(pickle.dumps(writer)))
        if scheme == "s3":
            assert visible(in_bucket(store, bucket)) == {}
            # A part that is written again replaces itself.
            again = writer.write_part("config.json", 0, memoryview(b"{}"))
            assert again in receipts
            receipts.append(again)
        source = target.finish(receipts)
        assert source.sizes() == {n: len(content) for n, content in CONTENTS.items() if n != "saved_signal_0"}
        assert (
            source.read("model_state.pdparams", PART - 3, 6)
            == CONTENTS["model_state.pdparams"][PART - 3 :][:6]
        )
        target.publish("paddle_reshard.json", b"{manifest}")
    assert _found(scheme, store, bucket) == {**CONTENTS, "paddle_reshard.json": b"{manifest}"}
    again = open_source(f"{scheme}://{bucket}/c", store.options)
    assert bytes(pickle.loads(pickle.dumps(again)).read("config.json", 0, 2)) == b"{}"


def _without(receipts: Sequence[Receipt], path: str, byte_offset: int) -> list[Receipt]:
    return [r for r in receipts if (r.path, r.byte_offset) != (path, byte_offset)]


@pytest.mark.parametrize("scheme", ["s3", "memory"])
def test_receipts_that_do_not_cover_every_file_are_refused(scheme: str, store: Store, bucket: str) -> None:
    with pytest.raises(TargetError, match="never written"), _open(scheme, store, bucket) as target:
        target.finish(_without(_write(_begin(target)), "model_state.pdparams", PART))
    for wrong in (
        Receipt("model_state.pdparams", PART, 3),
        Receipt("model_state.pdparams", PART + 1, PART),
        Receipt("other", 0, 1),
        Receipt("config.json", 0, 2, "another tag"),
    ):
        with pytest.raises(TargetError, match="not a part of it"), _open(scheme, store, bucket) as target:
            target.finish([*_write(_begin(target)), wrong])
    assert in_bucket(store, bucket) == {}
    assert uploads(store, bucket) == []


def test_parts_that_were_not_announced_are_refused(store: Store, bucket: str) -> None:
    with _open("s3", store, bucket) as target:
        writer = _begin(target)
        with pytest.raises(TargetError, match="no part starts at byte 1"):
            writer.write_part("model_state.pdparams", 1, memoryview(b"1"))
        with pytest.raises(TargetError, match="has 7 bytes, not 8"):
            writer.write_part("model_state.pdparams", 2 * PART, memoryview(b"12345678"))
    assert uploads(store, bucket) == []


def test_staged_parts_can_only_be_written_where_they_are_staged(bucket: str, tmp_path: Path) -> None:
    target = open_target(f"memory://{bucket}/c", Access({}))
    with target:
        writer = _begin(target)
    with pytest.raises(UnsupportedError, match="this worker runs on a different one"):
        writer.write_part("config.json", 0, memoryview(b"{}"))


def test_a_short_upload_is_noticed(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = type(fsspec.filesystem("memory"))
    put = memory.put_file

    def put_short(self: object, local: str, remote: str) -> None:
        Path(local).write_bytes(Path(local).read_bytes()[:-1])
        put(self, local, remote)

    with _open("memory", None, bucket) as target:
        receipts = _write(_begin(target))
        monkeypatch.setattr(memory, "put_file", put_short)
        with pytest.raises(TargetError, match="10485766 bytes in the store, 10485767 were written"):
            target.finish(receipts)
    assert fsspec.filesystem("memory").find("/") == []


@pytest.mark.parametrize("scheme", ["s3", "memory"])
def test_a_leftover_probe_is_ignored(scheme: str, store: Store, bucket: str) -> None:
    left = "c/.paddle_reshard_probe-1"
    store.client.put_object(Bucket=bucket, Key=left, Body=b"")
    fsspec.filesystem("memory").pipe_file(f"/{bucket}/{left}", b"")
    with _open(scheme, store, bucket) as target:
        target.finish(_write(_begin(target)))
        target.publish("paddle_reshard.json", b"{}")
    assert _found(scheme, store, bucket) == {**CONTENTS, "paddle_reshard.json": b"{}"}
