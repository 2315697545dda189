"""Parts that the storage copies: inside the kernel on a disk, by one request on S3, and never another version."""

import errno
import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest

import paddle_reshard
from paddle_reshard.pipeline.core.errors import CheckpointError, TargetError
from paddle_reshard.pipeline.core.events import Event, StepEnded
from paddle_reshard.storage.local.direct import BLOCK_BYTES
from paddle_reshard.storage.local.source import LocalSource
from paddle_reshard.storage.local.target import LocalWriter
from paddle_reshard.storage.locate import Access, open_source, open_target
from paddle_reshard.storage.remote.retry_counts import count_retries
from paddle_reshard.storage.s3 import target as s3
from paddle_reshard.storage.s3.folder import S3Folder
from paddle_reshard.storage.store import CopyRange, Identity, NewFile
from tests.properties.synthetic import Model, write_checkpoint
from tests.sampling import exhaustive
from tests.storage.contents import convert_locally, fill_bucket, in_bucket, uploads
from tests.storage.servers import Proxy, Store, first

MODEL = Model(
    hidden=1024, intermediate=16, vocab=3000, heads=1, kv_heads=1, layers=1, tied=True, bfloat16=False
)
"""Its embedding has 12 MB in each of three states, everything else is small."""
TO_TWO = {"to": "sharding=2", "sharding_strategy": "stage1v1"}


# ------------------------------------------------------------------------------------------------ on a disk


def _refuse(code: int) -> Any:
    def copy(*_: int) -> int:
        raise OSError(code, os.strerror(code))

    return copy


def _half(one: int, other: int, count: int, from_byte: int, to_byte: int) -> int:
    """Copies 1000 bytes the first time, and then no more."""
    if from_byte != 5:
        return 0
    return os.pwrite(other, os.pread(one, 1000, from_byte), to_byte)


@pytest.mark.parametrize(
    "copy",
    [os.copy_file_range, _half, *(_refuse(code) for code in (errno.EXDEV, errno.EINVAL, errno.ENOSYS)), None],
    ids=["kernel", "short", "EXDEV", "EINVAL", "ENOSYS", "missing"],
)
def test_a_part_is_copied_whatever_the_kernel_can(
    copy: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = os.urandom(BLOCK_BYTES + 77)
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "a").write_bytes(content)
    (tmp_path / "b").write_bytes(bytes(len(content)))
    if copy is None:
        monkeypatch.delattr(os, "copy_file_range")
    else:
        monkeypatch.setattr(os, "copy_file_range", copy)
    nbytes = len(content) - 12
    receipt = LocalWriter(tmp_path, "t").copy_part(
        CopyRange("b", 3, nbytes, "a", 5), LocalSource(tmp_path / "source")
    )
    assert (receipt.path, receipt.byte_offset, receipt.nbytes) == ("b", 3, nbytes)
    assert (tmp_path / "b").read_bytes() == bytes(3) + content[5:-7] + bytes(9)


def test_a_disk_that_fails_is_not_worked_around(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").write_bytes(b"abc")
    monkeypatch.setattr(os, "copy_file_range", _refuse(errno.EIO))
    told = (
        rf"^t: the disk failed \(input/output error\) \({tmp_path}/a\), while {tmp_path}/a was copied there"
    )
    with pytest.raises(TargetError, match=told):
        LocalWriter(tmp_path, "t").copy_part(CopyRange("a", 0, 1, "a", 2), LocalSource(tmp_path))


def test_a_source_that_became_shorter_is_refused(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "a").write_bytes(bytes(100))
    (tmp_path / "b").write_bytes(bytes(100))
    source = LocalSource(tmp_path / "source")
    (tmp_path / "source" / "a").write_bytes(bytes(50))
    with pytest.raises(CheckpointError, match=r"a: changed while it was read \(size 100 then, 50 now"):
        LocalWriter(tmp_path, "t").copy_part(CopyRange("b", 0, 80, "a", 10), source)


# ---------------------------------------------------------------------------------------------------- on S3


@pytest.fixture(scope="module")
def large(store: Store, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """A checkpoint with parts that can be copied: the bucket that holds it, and its folder."""
    folder = tmp_path_factory.mktemp("large") / "checkpoint-3"
    write_checkpoint(MODEL, folder)
    bucket = "large-source"
    store.client.create_bucket(Bucket=bucket)
    fill_bucket(store, bucket, "here/", folder)
    return f"s3://{bucket}/here", folder


def test_s3_copies_what_does_not_change(
    store: Store, bucket: str, large: tuple[str, Path], tmp_path: Path
) -> None:
    source, folder = large
    report = paddle_reshard.convert(source, f"s3://{bucket}/c", storage_options=store.options, **TO_TWO)
    # Two of the three arrays: the third one is compared with its tied copy, and has to be read for that.
    assert report.moved.copied_bytes == report.plan.plan.copied_bytes > 2 * s3.SMALLEST_PART_BYTES
    assert report.moved.copied_bytes + report.moved.read_bytes < 0.8 * report.moved.written_bytes
    wanted = convert_locally(folder, tmp_path / "local", **TO_TWO)
    found = in_bucket(store, bucket, "c/")
    assert found.keys() == wanted.keys()
    assert [name for name in wanted if found[name] != wanted[name]] == ["paddle_reshard.json"]
    assert uploads(store, bucket) == []


def _open(store: Store, bucket: str, **options: Any) -> Any:
    return open_target(f"s3://{bucket}/c", Access({**store.options, **options}))


def test_who_copies_from_whom(
    store: Store, bucket: str, large: tuple[str, Path], small_source: str, proxy: Proxy
) -> None:
    source, folder = large
    here = open_source(source, store.options)
    target = _open(store, bucket)
    assert target.copies_from(here) == s3.COPIES
    assert uploads(store, bucket) == []
    assert in_bucket(store, bucket) == {}
    # Nothing there is large enough to be a part.
    assert target.copies_from(open_source(small_source, store.options)) is None
    assert target.copies_from(LocalSource(folder)) is None
    # Another server, as far as addresses tell.
    assert _open(store, bucket, endpoint_url=proxy.url).copies_from(here) is None
    assert open_target(f"memory://{bucket}/c", Access({})).copies_from(here) is None


def test_a_store_that_cannot_copy_is_found_out(
    store: Store, bucket: str, large: tuple[str, Path], proxy: Proxy
) -> None:
    options = {**store.options, "endpoint_url": proxy.url}
    here = open_source(large[0], options)
    target = open_target(f"s3://{bucket}/c", Access(options))
    assert target.copies_from(here) == s3.COPIES
    proxy.fault = lambda method, path: "internal" if "partNumber=1" in path else None
    assert target.copies_from(here) is None
    assert uploads(store, bucket) == []


def _begun(target: Any, nbytes: int) -> Any:
    """A writer to one file of two parts."""
    files = [NewFile("a", nbytes, (0, s3.SMALLEST_PART_BYTES))]
    writer, _ = target.begin(files, Identity("plan", "version", "source", {}))
    return pickle.loads(pickle.dumps(writer))


def test_a_copy_is_of_the_version_that_was_seen(store: Store, bucket: str, proxy: Proxy) -> None:
    """The request says which one is meant; this server does not look at that, so a proxy refuses in its place."""
    content = os.urandom(s3.SMALLEST_PART_BYTES + 1000)
    store.client.put_object(Bucket=bucket, Key="s/a", Body=content)
    options = {**store.options, "endpoint_url": proxy.url}
    source = open_source(f"s3://{bucket}/s", options)
    target = open_target(f"s3://{bucket}/c", Access(options))
    with pytest.raises(CheckpointError, match=r"s/a: changed while it was read$"), target:
        writer = _begun(target, len(content))
        again = writer.copy_part(CopyRange("a", 0, s3.SMALLEST_PART_BYTES, "a", 7), source)
        assert writer.copy_part(CopyRange("a", 0, s3.SMALLEST_PART_BYTES, "a", 7), source) == again
        with pytest.raises(TargetError, match="the part at 0 has 5242880 bytes, not 3"):
            writer.copy_part(CopyRange("a", 0, 3, "a", 7), source)
        proxy.fault = lambda method, path: "changed" if "partNumber" in path else None
        writer.copy_part(CopyRange("a", 0, s3.SMALLEST_PART_BYTES, "a", 7), source)
    asked = [
        headers.get("x-amz-copy-source-if-match")
        for headers in proxy.headers
        if "x-amz-copy-source" in headers
    ]
    assert asked == [store.client.head_object(Bucket=bucket, Key="s/a")["ETag"]] * 3


def test_a_source_that_changes_under_its_copies_is_found_before_publishing(
    store: Store, bucket: str, large: tuple[str, Path]
) -> None:
    """Also where a store copies whatever is there."""
    fill_bucket(store, bucket, "here/", large[1])
    name = "optimizer.pdopt"
    changed = bytearray((large[1] / name).read_bytes())
    changed[-1000] ^= 1

    def change(event: Event) -> None:
        if isinstance(event, StepEnded) and event.step == "move":
            store.client.put_object(Bucket=bucket, Key=f"here/{name}", Body=bytes(changed))

    with pytest.raises(CheckpointError, match="changed while it was read"):
        paddle_reshard.convert(
            f"s3://{bucket}/here", f"s3://{bucket}/c", storage_options=store.options, observe=change, **TO_TWO
        )
    assert in_bucket(store, bucket, "c/") == {}
    assert uploads(store, bucket) == []


@pytest.mark.parametrize("kind", ["late", "lose", *map(exhaustive, ("slow_down", "reset", "cut"))])
def test_copies_that_fail_are_repeated_and_counted(
    kind: str, store: Store, bucket: str, proxy: Proxy
) -> None:
    content = os.urandom(s3.SMALLEST_PART_BYTES + 1000)
    store.client.put_object(Bucket=bucket, Key="s/a", Body=content)
    options = {**store.options, "endpoint_url": proxy.url}
    source = open_source(f"s3://{bucket}/s", options)
    with open_target(f"s3://{bucket}/c", Access(options)) as target:
        writer = _begun(target, s3.SMALLEST_PART_BYTES + 900)
        proxy.fault = first(2, kind, lambda method, path: method == "COPY")
        before = count_retries().total()
        receipts = [
            writer.copy_part(CopyRange("a", 0, s3.SMALLEST_PART_BYTES, "a", 9), source),
            writer.copy_part(CopyRange("a", s3.SMALLEST_PART_BYTES, 900, "a", 100), source),
        ]
        assert count_retries().total() - before == 2
        made = target.finish(receipts)
        assert (
            made.read("a", 0, len(content) - 100)
            == content[9 : s3.SMALLEST_PART_BYTES + 9] + content[100:1000]
        )


def _other(tag: str) -> str:
    """The ETag of an encrypted part: it looks like an MD5, and is none."""
    return f'"{tag.strip(chr(34))[::-1]}"'


def _encrypt_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The store encrypts with a key, and says so, as S3 does with SSE-KMS; this server cannot."""
    request = S3Folder.request

    def encrypted(self: S3Folder, method: str, name: str, **parameters: Any) -> dict[str, Any]:
        if method == "complete_multipart_upload":
            parts = parameters["MultipartUpload"]["Parts"]
            parts = [{**part, "ETag": _other(part["ETag"])} for part in parts]
            parameters["MultipartUpload"] = {"Parts": parts}
        answer = request(self, method, name, **parameters)
        told = [answer] if method == "upload_part" else answer.get("Parts", [])
        told = [answer["CopyPartResult"]] if method == "upload_part_copy" else told
        for each in told:
            each["ETag"] = _other(each["ETag"])
        return {**answer, "ServerSideEncryption": "aws:kms"}

    monkeypatch.setattr(S3Folder, "request", encrypted)


@pytest.mark.full
def test_parts_that_are_encrypted_are_copied_and_their_etags_taken_for_nothing(
    store: Store,
    bucket: str,
    large: tuple[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source, target = f"s3://{bucket}/here", f"s3://{bucket}/c"
    fill_bucket(store, bucket, "here/", large[1])
    _encrypt_parts(monkeypatch)
    report = paddle_reshard.convert(source, target, storage_options=store.options, **TO_TWO)
    assert report.moved.copied_bytes > 2 * s3.SMALLEST_PART_BYTES
    found = in_bucket(store, bucket, "c/")
    wanted = convert_locally(large[1], tmp_path / "local", **TO_TWO)
    assert [name for name in wanted if found[name] != wanted[name]] == ["paddle_reshard.json"]
    assert json.loads(found["paddle_reshard.json"])["etags"] == {}
    # Copies are compared with their source, and not with what looks like an MD5.
    checked = paddle_reshard.check(target, source=source, storage_options=store.options)
    assert checked.intact
    assert checked.unchecked_bytes == 0
    store.client.delete_object(Bucket=bucket, Key="here/optimizer.pdopt")
    checked = paddle_reshard.check(target, source=source, storage_options=store.options)
    assert checked.intact
    assert checked.unchecked_bytes == report.moved.copied_bytes
