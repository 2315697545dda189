"""Requests to S3 that are neither reads nor parts: all but the first of each kind are made without the client."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

import paddle_reshard
from paddle_reshard.pipeline.core.errors import TargetError
from paddle_reshard.storage.locate import open_folder
from paddle_reshard.storage.remote.retry_counts import count_retries
from paddle_reshard.storage.s3 import uploads as requests
from paddle_reshard.storage.s3.folder import S3Folder
from paddle_reshard.storage.store import Receipt
from tests.storage.contents import ONE_CARD, SMALL, assert_same_checkpoint, in_bucket, uploads
from tests.storage.servers import Proxy, Store, first
from tests.storage.test_reads import NAMES


def watch_client(folder: S3Folder) -> Counter[str]:
    """How many requests of each kind the client makes from now on."""
    seen: Counter[str] = Counter()
    events = folder.open()[0].s3.meta.events
    events.register("before-call.s3", lambda model, **_: seen.update([model.name]))
    return seen


def folder_at(place: str, options: dict[str, Any]) -> S3Folder:
    folder = open_folder(f"s3://{place}", options, TargetError)
    assert isinstance(folder, S3Folder)
    return folder


def test_a_conversion_makes_one_request_of_each_kind_through_the_client(
    store: Store, bucket: str, small_source: str, for_one_card: dict[str, bytes]
) -> None:
    # Options that no other test has: a client that nothing was learnt from.
    options = {**store.options, "config_kwargs": {"user_agent_extra": bucket}}
    seen = watch_client(folder_at(bucket, options))
    paddle_reshard.convert(small_source, f"s3://{bucket}/c", storage_options=options, **ONE_CARD)
    assert_same_checkpoint(in_bucket(store, bucket, "c/"), for_one_card)
    two_buckets = ("ListObjectsV2", "GetObject")
    assert seen == {
        name: 2 if name in two_buckets else 1
        for name in (
            *two_buckets,
            "CreateMultipartUpload",
            "AbortMultipartUpload",
            "UploadPart",
            "CompleteMultipartUpload",
            "PutObject",
            "DeleteObject",
        )
    }


def test_files_of_any_name(store: Store, bucket: str) -> None:
    folder = folder_at(f"{bucket}/a b/100%+", store.options)
    for number, name in enumerate(NAMES):
        folder.put(name, f"{number}".encode())
        assert folder.read_object(name) == (f"{number}".encode(), folder.listing().files[name].version)
        assert [folder.put_new(name, content) for content in (b"another", f"{number}".encode())] == [
            False,
            True,
        ]
        upload_id = requests.create_upload(folder, f"{name} whole")
        assert uploads(store, bucket) == [f"a b/100%+/{name} whole"]
        assert requests.list_uploads(folder) == [(f"{name} whole", upload_id)]
        taken = requests.upload_part(folder, f"{name} whole", upload_id, 1, memoryview(b"part"))
        assert requests.list_parts(folder, f"{name} whole", upload_id) == {
            1: requests.Part(4, taken.tag.strip('"'))
        }
        receipt = Receipt(name, 0, 4, taken.tag)
        requests.complete_upload(folder, f"{name} whole", upload_id, [receipt])
        assert requests.list_parts(folder, f"{name} whole", upload_id) is None
    assert folder.listing().files.keys() == {*NAMES, *(f"{name} whole" for name in NAMES)}
    assert in_bucket(store, bucket, "a b/100%+/").keys() == folder.listing().files.keys()
    for name in NAMES:
        folder.delete(name)
        assert folder.read_object(name) is None
    assert folder.listing().files.keys() == {f"{name} whole" for name in NAMES}


def test_what_the_user_wants_of_every_upload_is_in_every_request(
    store: Store, bucket: str, proxy: Proxy
) -> None:
    wanted = {"ServerSideEncryption": "AES256", "StorageClass": "STANDARD_IA", "Metadata": {"team": "a b"}}
    options = {**store.options, "endpoint_url": proxy.url, "s3_additional_kwargs": wanted}
    folder = folder_at(f"{bucket}/c", {**options, "requester_pays": True})
    for name in ("one", "two"):
        requests.create_upload(folder, name)
        folder.put(f"{name}.json", b"{}")
    methods = [method for method, _ in proxy.seen]
    for kind in ("POST", "PUT"):
        one, other = (
            headers for method, headers in zip(methods, proxy.headers, strict=True) if method == kind
        )
        assert _lasting(other) == _lasting(one)
        assert other["authorization"] != one["authorization"]
        assert (other["x-amz-storage-class"], other["x-amz-meta-team"]) == ("STANDARD_IA", "a b")
        assert other["x-amz-server-side-encryption"] == "AES256"
        assert other["x-amz-request-payer"] == "requester"


def _lasting(headers: dict[str, str]) -> dict[str, str]:
    passing = ("authorization", "x-amz-date", "amz-sdk-invocation-id", "amz-sdk-request")
    return {name: value for name, value in headers.items() if name not in passing}


def test_checksums_that_the_user_has_the_client_compute_are_left_to_it(
    store: Store, bucket: str, for_one_card: dict[str, bytes]
) -> None:
    options = {**store.options, "config_kwargs": {"request_checksum_calculation": "when_supported"}}
    seen = watch_client(folder_at(bucket, options))
    paddle_reshard.convert(SMALL, f"s3://{bucket}/c", storage_options=options, **ONE_CARD)
    assert_same_checkpoint(in_bucket(store, bucket, "c/"), for_one_card)
    assert seen["UploadPart"] > len(for_one_card) - 2
    assert seen["CompleteMultipartUpload"] == 1


def test_a_digest_that_a_handler_adds_to_each_body_is_not_repeated(store: Store, bucket: str) -> None:
    """As buckets with object lock want it."""
    folder = folder_at(bucket, {**store.options, "config_kwargs": {"user_agent_extra": "digests"}})
    seen = watch_client(folder)

    def add(params: dict[str, Any], **_: object) -> None:
        params["headers"]["Content-MD5"] = requests.base64_md5(params["body"].getvalue())

    folder.open()[0].s3.meta.events.register("before-call.s3.PutObject", add)
    for content in (b"one", b"another"):
        folder.request("put_object", "a", Body=content)
        assert in_bucket(store, bucket, "") == {"a": content}
    assert seen["PutObject"] == 2


@pytest.mark.parametrize("kind", ["slow_down", "late", "reset", "lose"])
def test_a_completion_that_fails_is_repeated_and_counted(
    kind: str, store: Store, bucket: str, proxy: Proxy
) -> None:
    folder = folder_at(f"{bucket}/c", {**store.options, "endpoint_url": proxy.url})

    def complete(name: str) -> None:
        upload_id = requests.create_upload(folder, name)
        taken = requests.upload_part(folder, name, upload_id, 1, memoryview(b"part"))
        receipt = Receipt(name, 0, 4, taken.tag)
        folder.attempt(name, requests.complete_upload, folder, name, upload_id, [receipt])

    complete("first")
    proxy.fault = first(1, kind, lambda method, path: method == "POST" and "uploadId" in path)
    before = sum(count_retries().values())
    complete("second")
    assert sum(count_retries().values()) - before == 1
    assert in_bucket(store, bucket, "c/") == {"first": b"part", "second": b"part"}


def _requests(folder: S3Folder) -> list[Callable[[], object]]:
    return [
        lambda: folder.put("x", b"content"),
        lambda: folder.delete("x"),
        lambda: requests.create_upload(folder, "x"),
        lambda: folder.level(None),
        lambda: folder.read_object("y"),
    ]


@pytest.mark.parametrize("kind", ["denied", "slow_down", "changed"])
def test_refusals_read_the_same_whoever_made_the_request(
    kind: str, store: Store, bucket: str, proxy: Proxy
) -> None:
    options = {**store.options, "endpoint_url": proxy.url}
    told = []
    for knows in (False, True):
        config = {"config_kwargs": {"user_agent_extra": f"{kind} {knows}"}}
        folder = folder_at(f"{bucket}/c", {**options, **config})
        requests_made = _requests(folder)
        folder.put("y", b"")
        for make in requests_made if knows else ():
            make()
        seen = watch_client(folder)
        proxy.fault = lambda method, path: kind
        for make in requests_made:
            with pytest.raises(TargetError) as refused:
                folder.attempt("x", make)
            told.append(str(refused.value))
        proxy.fault = lambda method, path: None
        assert bool(seen) == (not knows)
    assert told[:5] == told[5:]
