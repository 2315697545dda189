"""What S3's answers mean, and what an earlier run has left: pure functions of values."""

import hashlib
from types import SimpleNamespace
from typing import Any

import pytest

from paddle_reshard.pipeline.core.errors import TargetError
from paddle_reshard.storage.remote.retry import DamagedBody
from paddle_reshard.storage.s3.target import Leftovers, check_limits, find_leftovers, kept_records
from paddle_reshard.storage.s3.uploads import (
    Taken,
    Upload,
    UploadedPart,
    complete_upload,
    copy_part,
    joined_etag,
    upload_part,
)
from paddle_reshard.storage.session.holder import Holder
from paddle_reshard.storage.session.ledger import Lock, Phase, SessionRecord
from paddle_reshard.storage.store import CopyRange, Identity, NewFile, Receipt, Record

MD5 = hashlib.md5(b"content").hexdigest()


@pytest.mark.parametrize(
    ("tag", "answer", "md5"),
    [
        (f'"{MD5}"', {}, MD5),
        (f'"{MD5}"', {"ServerSideEncryption": "AES256"}, MD5),
        (f'"{MD5}"', {"ServerSideEncryption": "aws:kms"}, ""),
        (f'"{MD5}"', {"SSECustomerAlgorithm": "AES256"}, ""),
        (f'"{MD5}-2"', {}, ""),
        ('"0x8D9"', {}, ""),
    ],
)
def test_an_etag_is_an_md5_only_where_it_can_be(tag: str, answer: dict[str, str], md5: str) -> None:
    assert Taken.of(tag, answer) == (tag, md5)


def test_the_etag_of_a_file_is_that_of_its_parts_digests() -> None:
    digests = [hashlib.md5(part) for part in (b"one", b"two")]
    receipts = [Receipt("a", 0, 3, md5=digest.hexdigest()) for digest in digests]
    whole = hashlib.md5(b"".join(digest.digest() for digest in digests)).hexdigest()
    assert joined_etag(receipts) == f'"{whole}-2"'
    assert joined_etag([*receipts, Receipt("a", 6, 3)]) is None


def test_a_part_is_found_by_where_it_starts() -> None:
    upload = Upload("u", (0, 10, 20), 25)
    assert [upload.part(start) for start in (0, 10, 20)] == [(1, 10), (2, 10), (3, 5)]
    for nowhere in (5, 25, -1):
        with pytest.raises(TargetError, match="no part starts"):
            upload.part(nowhere)


FILES = {"a": NewFile("a", 25, (0, 10, 20)), "b": NewFile("b", 4, (0,))}
LISTED = {"a": {1: UploadedPart(10, "x"), 2: UploadedPart(10, "y")}, "b": None}
IN_FIRST, IN_SECOND, IN_THIRD, IN_B = (
    Receipt("a", 0, 10, '"x"'), Receipt("a", 10, 10, '"y"'), Receipt("a", 20, 5, '"z"'), Receipt("b", 0, 4, '"w"')
)  # fmt: skip


@pytest.mark.parametrize(
    ("receipts", "completed", "kept"),
    [
        ((IN_FIRST, IN_SECOND), (), True),
        ((IN_FIRST, IN_THIRD), (), False),
        ((Receipt("a", 0, 10, '"other"'),), (), False),
        ((Receipt("a", 0, 9, '"x"'),), (), False),
        ((IN_B,), (), False),
        ((IN_B, IN_FIRST), ("b",), True),
        ((), (), True),
    ],
)
def test_work_is_kept_only_if_the_store_has_every_part_of_it(
    receipts: tuple[Receipt, ...], completed: tuple[str, ...], kept: bool
) -> None:
    record = Record(0, receipts)
    assert kept_records([record], completed, LISTED, FILES) == [record] * kept


def session(phase: Phase) -> SessionRecord:
    holder = Holder("gpu-1", "m1", "boot-1", "pid:[1]", 100, "5000")
    lock = Lock(holder, "n", 900.0, 60.0, held=False)
    uploads = {"a": "upload-a", "b": "upload-b", "c": "upload-c"}
    return SessionRecord(Identity("plan", "0.1.0", "s3://source", {}), lock, phase, "", uploads)


STRAYS = [("a", "upload-a"), ("other.bin", "upload-x"), (".paddle_reshard_probe-1", "upload-p")]
OURS = (STRAYS[0], STRAYS[2])
"""Another program's upload is none of a conversion's, wherever it is."""
VISIBLE = ["b", "notes.txt", ".paddle_reshard_session.json"]
OWN = (".paddle_reshard_session.json",)


def test_without_a_session_only_what_has_a_name_of_ours_is_removed() -> None:
    found = find_leftovers(None, VISIBLE, STRAYS)
    assert found == Leftovers(((".paddle_reshard_probe-1", "upload-p"),), (), OWN)


def test_while_parts_are_moved_no_file_is_a_conversions_own_yet() -> None:
    assert find_leftovers(session(Phase.MOVE), VISIBLE, STRAYS) == Leftovers(OURS, (), OWN)


def test_afterwards_files_whose_uploads_are_completed_are() -> None:
    found = find_leftovers(session(Phase.FINISH), [*VISIBLE, "a"], STRAYS)
    assert found == Leftovers(OURS, ("b",), OWN)
    assert found.names() == [
        "a (upload)", ".paddle_reshard_probe-1 (upload)", "b", ".paddle_reshard_session.json",
    ]  # fmt: skip


MIB = 1 << 20


@pytest.mark.parametrize(
    ("size_bytes", "part_starts", "told"),
    [
        (10 * MIB + 1, (0, 5 * MIB, 10 * MIB), None),
        (10 * MIB, (0, 5 * MIB - 1), "has parts of 5242879 to 5242881 bytes"),
        (6 << 30, (0,), "has parts of 6442450944 to 6442450944 bytes"),
        ((5 << 40) + 1, (0, 5 << 30), "an S3 object may have"),
        (10_001 * 5 * MIB, tuple(range(0, 10_001 * 5 * MIB, 5 * MIB)), "has 10001 parts"),
    ],
    ids=["a small last part", "a small first part", "a large part", "a large file", "many parts"],
)
def test_what_s3_would_refuse_when_all_is_uploaded_is_refused_before(
    size_bytes: int, part_starts: tuple[int, ...], told: str | None
) -> None:
    new = NewFile("a", size_bytes, part_starts)
    if told is None:
        check_limits(new)
    else:
        with pytest.raises(TargetError, match=told):
            check_limits(new)


class Store:
    """What is asked of a store, which gives one answer to everything."""

    def __init__(self, **answer: Any) -> None:
        self.answer = answer
        self.asked: dict[str, Any] = {}

    def request(self, what: str, name: str, **asked: Any) -> dict[str, Any]:
        self.asked = {"request": what, "name": name, **asked}
        return self.answer

    def key(self, name: str) -> tuple[str, str]:
        return "bucket", f"prefix/{name}"


def test_a_part_that_arrived_altered_is_sent_again() -> None:
    assert upload_part(Store(ETag=f'"{MD5}"'), "a", "upload-a", 2, memoryview(b"content")).md5 == MD5
    with pytest.raises(DamagedBody, match="part 2: the store has MD5"):
        upload_part(Store(ETag=f'"{MD5}"'), "a", "upload-a", 2, memoryview(b"Content"))


def test_an_upload_is_completed_with_its_parts_in_order() -> None:
    store = Store()
    complete_upload(store, "a", "upload-a", [Receipt("a", 0, 5, "x"), Receipt("a", 5, 5, "y")])
    parts = [{"PartNumber": 1, "ETag": "x"}, {"PartNumber": 2, "ETag": "y"}]
    assert store.asked["MultipartUpload"] == {"Parts": parts}


def test_a_copied_part_is_exactly_the_range_of_the_version_that_was_listed() -> None:
    """Both ends of a range of HTTP are included."""
    store = Store(CopyPartResult={"ETag": f'"{MD5}"'})
    source = SimpleNamespace(stamps={"b": SimpleNamespace(version='"v1"')})
    copy_part(store, "upload-a", 3, CopyRange("a", 0, 10, "b", 100), source, Store())
    assert (store.asked["CopySourceRange"], store.asked["PartNumber"]) == ("bytes=100-109", 3)
    assert store.asked["CopySource"] == {"Bucket": "bucket", "Key": "prefix/b"}
    assert store.asked["CopySourceIfMatch"] == '"v1"'
