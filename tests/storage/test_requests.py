"""Requests to S3 that are no ranged reads: botocore makes them, with what the user wants of every one."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest

import paddle_reshard
from paddle_reshard.pipeline.core.errors import TargetError, UsageError
from paddle_reshard.storage.locate import open_folder
from paddle_reshard.storage.s3 import client
from paddle_reshard.storage.s3 import uploads as requests
from paddle_reshard.storage.s3.folder import S3Folder
from paddle_reshard.storage.store import Receipt
from tests.storage.contents import ONE_CARD, SMALL, assert_same_checkpoint, in_bucket
from tests.storage.servers import Proxy, Store, first


def folder_at(place: str, options: dict[str, Any]) -> S3Folder:
    folder = open_folder(f"s3://{place}", options, TargetError)
    assert isinstance(folder, S3Folder)
    return folder


def test_what_the_user_wants_of_every_upload_is_in_every_request(
    store: Store, bucket: str, proxy: Proxy
) -> None:
    wanted = {"ServerSideEncryption": "AES256", "StorageClass": "STANDARD_IA", "Metadata": {"team": "a b"}}
    options = {**store.options, "endpoint_url": proxy.url, "s3_additional_kwargs": wanted}
    folder = folder_at(f"{bucket}/c", {**options, "requester_pays": True})
    for name in ("one", "two"):
        folder.create_upload(name)
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


@pytest.mark.parametrize("when", ["when_supported", "when_required"])
def test_checksums_that_the_user_has_botocore_compute(
    when: str, store: Store, bucket: str, proxy: Proxy, for_one_card: dict[str, bytes]
) -> None:
    config = {"request_checksum_calculation": when}
    options = {**store.options, "endpoint_url": proxy.url, "config_kwargs": config}
    paddle_reshard.convert(SMALL, f"s3://{bucket}/c", storage_options=options, **ONE_CARD)
    assert_same_checkpoint(in_bucket(store, bucket, "c/"), for_one_card)
    sent = {name for headers in proxy.headers for name in headers if name.startswith("x-amz-checksum-")}
    assert bool(sent) == (when == "when_supported")


def test_a_session_of_another_library_is_refused(store: Store) -> None:
    with pytest.raises(UsageError, match="session: give a profile, or key, secret and token instead"):
        folder_at("bucket", {**store.options, "session": object()})


def test_a_bucket_in_another_region(store: Store, bucket: str, proxy: Proxy) -> None:
    """The first request of a worker may be a part, which botocore cannot rewind."""
    folder = folder_at(f"{bucket}/c", {**store.options, "endpoint_url": proxy.url})
    upload_id = folder_at(f"{bucket}/c", store.options).create_upload("a")
    proxy.fault = first(1, "elsewhere_region", lambda method, path: "partNumber" in path)
    taken = requests.upload_part(folder, "a", upload_id, 1, memoryview(b"part"), requests.PartCheck.SIGNATURE)
    requests.complete_upload(folder, "a", upload_id, [Receipt("a", 0, 4, taken.tag)])
    assert in_bucket(store, bucket, "c/") == {"a": b"part"}
    regions = [headers["authorization"].split("/")[2] for headers in proxy.headers]
    assert regions[0] != "eu-west-1" and set(regions[1:]) == {"eu-west-1"}


def test_only_public_names_of_the_libraries_are_used() -> None:
    """A release may change the others without a word."""
    used = []
    for path in Path(client.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if (
                isinstance(node, ast.Attribute)
                and node.attr.startswith("_")
                and not node.attr.startswith("__")
            ):
                used += [] if ast.unparse(node.value) in ("self", "super()") else [ast.unparse(node)]
            if isinstance(node, ast.ImportFrom) and not str(node.module).startswith("paddle_reshard"):
                used += [alias.name for alias in node.names if alias.name.startswith("_")]
    assert used == []
