"""Parts over TLS: their CRC-64/NVME stands for their SHA-256, where the store refuses a wrong one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import paddle_reshard
from paddle_reshard.pipeline.core.errors import TargetError
from paddle_reshard.storage.locate import Access, open_source, open_target
from paddle_reshard.storage.remote.retry_counts import count_retries
from paddle_reshard.storage.s3.target import SMALLEST_PART_BYTES
from paddle_reshard.storage.s3.uploads import PartCheck
from paddle_reshard.storage.store import CopyRange, Identity, NewFile, Permission, Record
from tests.storage.contents import ONE_CARD, SMALL, assert_same_checkpoint, in_bucket, uploads
from tests.storage.servers import Proxy, Store, crc64nvme, first, running_proxy


@pytest.fixture
def secure(store: Store, authority: Path) -> Iterator[Proxy]:
    """A store behind TLS that checks signed bodies."""
    with running_proxy(store.url, authority) as proxy:
        proxy.checks_bodies = True
        yield proxy


def options_for(store: Store, proxy: Proxy, authority: Path) -> dict[str, Any]:
    return {**store.options, "endpoint_url": proxy.url, "client_kwargs": {"verify": str(authority)}}


def parts_of(proxy: Proxy) -> list[dict[str, str]]:
    """The headers of every part that is not one of a trial."""
    return [
        headers
        for (method, path), headers in zip(proxy.seen, proxy.headers, strict=True)
        if method == "PUT" and "partNumber" in path and "probe" not in path
    ]


@pytest.mark.parametrize("checksums", ["checked", "ends", "copies", ""])
def test_parts_are_checked_by_what_the_store_really_checks(
    checksums: str,
    secure: Proxy,
    store: Store,
    authority: Path,
    bucket: str,
    for_one_card: dict[str, bytes],
) -> None:
    secure.checksums = checksums
    options = options_for(store, secure, authority)
    report = paddle_reshard.convert(SMALL, f"s3://{bucket}/c", storage_options=options, **ONE_CARD)
    assert report.moved.retries == {}
    found = in_bucket(store, bucket, "c/")
    assert_same_checkpoint(found, for_one_card)
    assert len(json.loads(found["paddle_reshard.json"])["etags"]) == len(found) - 1
    assert uploads(store, bucket) == []
    parts = parts_of(secure)
    assert len(parts) >= len(found) - 1
    assert {"content-md5" in headers for headers in parts} == {False}
    assert {"x-amz-checksum-crc64nvme" in headers for headers in parts} == {checksums == "checked"}
    unsigned = {headers["x-amz-content-sha256"] == "UNSIGNED-PAYLOAD" for headers in parts}
    assert unsigned == {checksums == "checked"}


def test_a_part_that_changes_on_its_way_is_sent_again(
    secure: Proxy, store: Store, authority: Path, bucket: str, for_one_card: dict[str, bytes]
) -> None:
    secure.checksums = "checked"
    secure.fault = first(2, "flip", lambda method, path: "partNumber" in path and "optimizer" in path)
    options = options_for(store, secure, authority)
    before = count_retries()
    paddle_reshard.convert(SMALL, f"s3://{bucket}/c", storage_options=options, **ONE_CARD)
    assert count_retries() - before == {"BadDigest": 2}
    assert_same_checkpoint(in_bucket(store, bucket, "c/"), for_one_card)


def _begin(target: Any, nbytes: int) -> Any:
    files = [NewFile("a", nbytes, (0, SMALLEST_PART_BYTES))]
    return target.begin(files, Identity("plan", "version", "source", {}))


def test_copied_parts_have_a_trial_too_and_a_run_resumes_over_another_connection(
    secure: Proxy, store: Store, authority: Path, bucket: str
) -> None:
    secure.checksums = "checked"
    content = bytes(range(251)) * (SMALLEST_PART_BYTES // 251 + 20)
    store.client.put_object(Bucket=bucket, Key="s/a", Body=content)
    options = options_for(store, secure, authority)
    source = open_source(f"s3://{bucket}/s", options)
    nbytes, last = SMALLEST_PART_BYTES + 900, content[100:1000]
    with (
        pytest.raises(TargetError, match="interrupted"),
        open_target(f"s3://{bucket}/c", Access(options)) as target,
    ):
        assert target.copies_from(source)
        writer, _ = _begin(target, nbytes)
        assert (writer.check, writer.with_checksums) == (PartCheck.CHECKSUM, True)
        copied = writer.copy_part(CopyRange("a", 0, SMALLEST_PART_BYTES, "a", 0), source)
        target.note([Record(0, (copied,))])
        raise TargetError("interrupted")
    probes = [path for method, path in secure.seen if method == "COPY" and "probe" in path]
    assert len(probes) == 2  # whether ranges are copied, and whether checksums survive it
    assert not [name for name in in_bucket(store, bucket, "c/") if "probe" in name]

    plain = {"key": store.key, "secret": store.secret, "endpoint_url": store.url}
    with open_target(f"s3://{bucket}/c", Access(plain), Permission(resume=True)) as target:
        writer, records = _begin(target, nbytes)
        assert (writer.check, writer.with_checksums) == (PartCheck.MD5, True)
        receipt = writer.write_part("a", SMALLEST_PART_BYTES, memoryview(last))
        assert receipt.checksum == f"{crc64nvme(last):016x}"
        made = target.finish([*records[0].receipts, receipt])
        assert made.read("a", 0, nbytes) == content[:SMALLEST_PART_BYTES] + last
