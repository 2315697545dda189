"""Stores that fail: in passing, for good, and while the process is killed."""

import json
import re
from typing import Any

import pytest
from click.testing import CliRunner

import paddle_reshard
from paddle_reshard.pipeline.cli.main import cli
from paddle_reshard.pipeline.core.errors import ReshardError, TargetError
from paddle_reshard.storage.locate import Access, open_target
from paddle_reshard.storage.remote import retry
from paddle_reshard.storage.s3.folder import S3Folder
from paddle_reshard.storage.store import Identity, NewFile, Permission, TargetStore
from tests.sampling import exhaustive
from tests.storage.contents import (
    ONE_CARD,
    SMALL,
    assert_same_checkpoint,
    in_bucket,
    looks_finished,
    uploads,
    visible,
)
from tests.storage.servers import Fault, Proxy, Store, first

SILENT = ("hang", "stall")
CODES = {
    "slow_down": "SlowDown",
    "internal": "InternalError",
    "late": "InternalError",
    "short": "DamagedBody",
    "long": "DamagedBody",
}
SIGNAL = "saved_signal_0"


class Answer(Exception):
    """An error of botocore as this package looks at it."""

    def __init__(self, code: str, status: int) -> None:
        self.response = {"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}


REQUESTS: dict[str, Fault] = {
    "listing": lambda method, path: method == "GET" and "list-type" in path,
    "reading": lambda method, path: method == "GET" and "/here/" in path,
    "creating": lambda method, path: method == "POST" and path.endswith("?uploads"),
    "writing": lambda method, path: method == "PUT" and "partNumber" in path,
    "completing": lambda method, path: method == "POST" and "uploadId" in path,
    "completing a marker": lambda method, path: (
        method == "POST" and "uploadId" in path and "saved_signal" in path
    ),
    "aborting": lambda method, path: method == "DELETE" and "uploadId" in path,  # of the probe, every time
    "the manifest": lambda method, path: method == "PUT" and path.endswith("paddle_reshard.json"),
}


def _through(proxy: Proxy, store: Store, kind: str = "") -> dict[str, Any]:
    config = {"read_timeout": 1.0} if kind in SILENT else {}
    return {**store.options, "endpoint_url": proxy.url, "config_kwargs": config}


PASSING = [
    pytest.param(kind, wanted, marks=() if number < sampled else pytest.mark.exhaustive)
    for wanted, sampled, kinds in (
        ("listing", 1, ["cut", "slow_down"]),
        # What else happens to single reads is in test_reads.py.
        ("reading", 2, ["cut", "hang", "slow_down", "reset", "short", "long", "stall"]),
        ("creating", 1, ["slow_down"]),
        ("writing", 3, ["internal", "reset", "lose", "hang"]),
        ("completing", 2, ["late", "lose", "slow_down"]),
        ("aborting", 1, ["slow_down"]),
        ("the manifest", 1, ["lose", "internal"]),
    )
    for number, kind in enumerate(kinds)
]


@pytest.mark.parametrize(("kind", "wanted"), PASSING)
def test_failures_that_pass_are_retried_and_counted(
    kind: str,
    wanted: str,
    proxy: Proxy,
    store: Store,
    bucket: str,
    small_source: str,
    for_one_card: dict[str, bytes],
) -> None:
    proxy.fault = first(2, kind, REQUESTS[wanted])
    report = paddle_reshard.convert(
        small_source if wanted == "reading" else SMALL,
        f"s3://{bucket}/there",
        storage_options=_through(proxy, store, kind),
        **ONE_CARD,
    )
    counted = sum(report.moved.retries.values())
    # Where answers must come in a second, a busy machine may be too late once more. A read over a kept connection that
    # is closed instead of an answer is repeated once without being counted.
    silently = kind == "reset" and wanted == "reading"
    assert counted == 2 or (kind in SILENT and counted > 2) or (silently and counted < 2)
    if kind in CODES:
        assert report.moved.retries == {CODES[kind]: 2}
    assert_same_checkpoint(in_bucket(store, bucket, "there/"), for_one_card)
    assert uploads(store, bucket) == []


def test_retries_are_reported_but_do_not_affect_the_target(
    proxy: Proxy, store: Store, bucket: str, small_source: str
) -> None:
    made = []
    for fault in (first(3, "slow_down", REQUESTS["reading"]), lambda method, path: None):
        proxy.fault = fault
        options = json.dumps(_through(proxy, store))
        target = f"s3://{bucket}/there"
        arguments = ["convert", small_source, target, "--to", "tp=1", "--storage-options", options]
        told = CliRunner().invoke(cli, [*arguments, "--overwrite", *(["--json"] if made else [])])
        made.append((told.stdout, in_bucket(store, bucket, "there/")))
    assert re.search(r"^repeated\t3 × SlowDown$", made[0][0], re.MULTILINE)
    assert json.loads(made[1][0])["moved"]["retries"] == {}
    assert made[0][1] == made[1][1]


@pytest.mark.parametrize(
    ("kind", "wanted", "reason"),
    [
        ("slow_down", "reading", "is throttling requests"),
        ("cut", "reading", "response body was corrupted|payload|IncompleteRead"),
        ("reset", "writing", "Connection"),
        exhaustive("slow_down", "writing", "is throttling requests"),
        exhaustive("slow_down", "completing", "is throttling requests"),
        ("internal", "completing a marker", "InternalError"),
        ("internal", "the manifest", "InternalError"),
    ],
)
def test_failures_that_do_not_pass_end_it_and_leave_nothing_that_looks_finished(
    kind: str, wanted: str, reason: str, proxy: Proxy, store: Store, bucket: str, small_source: str
) -> None:
    proxy.fault = lambda method, path: kind if REQUESTS[wanted](method, path) else None
    with pytest.raises(ReshardError, match=f"(?i){reason}") as failure:
        paddle_reshard.convert(
            small_source if wanted == "reading" else SMALL,
            f"s3://{bucket}/there",
            storage_options=_through(proxy, store),
            **ONE_CARD,
        )
    assert "gave up after 4 attempts" in str(failure.value)
    # What is done when files have begun to appear is kept, to be gone on with or cleaned away.
    assert looks_finished(in_bucket(store, bucket, "there/")) == (
        [SIGNAL] if wanted == "the manifest" else []
    )
    paddle_reshard.clean(f"s3://{bucket}/there", storage_options=store.options)
    assert in_bucket(store, bucket, "there/") == {}
    assert uploads(store, bucket) == []


def test_what_cannot_be_cleaned_up_is_counted_in_a_warning(
    proxy: Proxy, store: Store, bucket: str, caplog: pytest.LogCaptureFixture
) -> None:
    def fault(method: str, path: str) -> str | None:
        aborting = method == "DELETE" and "probe" not in path
        return "slow_down" if aborting or REQUESTS["writing"](method, path) else None

    proxy.fault = fault
    with pytest.raises(TargetError, match="throttling requests"):
        paddle_reshard.convert(SMALL, f"s3://{bucket}/c", storage_options=_through(proxy, store), **ONE_CARD)
    left = uploads(store, bucket)
    assert (
        f"s3://{bucket}/c: {len(left) + 1} objects of an unfinished conversion could not be removed"
        in caplog.text
    )
    assert visible(in_bucket(store, bucket)) == {}
    paddle_reshard.clean(f"s3://{bucket}/c", storage_options=store.options)
    assert uploads(store, bucket) == [] and in_bucket(store, bucket) == {}


@pytest.mark.parametrize("cause", ["AccessDenied", "NoSuchBucket", "PreconditionFailed"])
def test_failures_that_only_repeat_are_not_retried(cause: str) -> None:
    calls = []

    def ask() -> None:
        calls.append(None)
        raise PermissionError("translated") from Answer(cause, 403)

    with pytest.raises(PermissionError):
        retry.call(retry.POLICY, ask)
    assert len(calls) == 1


def test_time_bounds_retries_too() -> None:
    policy = retry.RetryPolicy(attempts=1000, total_seconds=0.2, first_wait_seconds=0.05)
    calls = []

    def ask() -> None:
        calls.append(None)
        raise TimeoutError

    with pytest.raises(retry.GaveUp) as failure:
        retry.call(policy, ask)
    assert failure.value.attempts == len(calls) < 1000


@pytest.mark.parametrize("checks", [True, False])
def test_parts_carry_an_md5_only_where_the_store_takes_altered_bytes_otherwise(
    checks: bool, proxy: Proxy, store: Store, bucket: str, for_one_card: dict[str, bytes]
) -> None:
    proxy.checks_bodies = checks
    options = _through(proxy, store)
    report = paddle_reshard.convert(SMALL, f"s3://{bucket}/c", storage_options=options, **ONE_CARD)
    assert report.moved.retries == {}
    found = in_bucket(store, bucket, "c/")
    assert_same_checkpoint(found, for_one_card)
    tags = json.loads(found["paddle_reshard.json"])["etags"]
    assert len(tags) == len(found) - 1
    assert uploads(store, bucket) == []
    probes = (
        1 if checks else 2
    )  # a part as it should be, which has an MD5, and an altered one, which has none
    parts = proxy.with_md5[probes:]
    assert len(parts) >= len(tags)
    assert parts == [not checks] * len(parts)


def test_a_store_without_conditional_writes_is_written_all_the_same(
    store: Store, bucket: str, for_one_card: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    request = S3Folder.request

    def refuse(self: S3Folder, method: str, name: str, **parameters: Any) -> dict[str, Any]:
        if "IfNoneMatch" in parameters or "IfMatch" in parameters:
            raise OSError from Answer("NotImplemented", 501)
        return request(self, method, name, **parameters)

    monkeypatch.setattr(S3Folder, "request", refuse)
    paddle_reshard.convert(SMALL, f"s3://{bucket}/c", storage_options=store.options, **ONE_CARD)
    assert_same_checkpoint(in_bucket(store, bucket, "c/"), for_one_card)


def test_an_upload_that_is_gone_is_done_only_if_its_file_is_there(
    store: Store, bucket: str, for_one_card: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the answer was lost to the request that completed it: tests/resume/test_kills_on_s3.py."""
    request = S3Folder.request
    theirs = bytes(len(for_one_card["optimizer.pdopt"]))

    def lose(self: S3Folder, method: str, name: str, **parameters: Any) -> dict[str, Any]:
        if method != "complete_multipart_upload" or name != "optimizer.pdopt":
            return request(self, method, name, **parameters)
        request(self, "put_object", name, Body=theirs)
        raise FileNotFoundError from Answer("NoSuchUpload", 404)

    monkeypatch.setattr(S3Folder, "request", lose)
    with pytest.raises(TargetError, match="the upload no longer exists"):
        paddle_reshard.convert(SMALL, f"s3://{bucket}/c", storage_options=store.options, **ONE_CARD)
    assert paddle_reshard.clean(f"s3://{bucket}/c", storage_options=store.options)
    assert visible(in_bucket(store, bucket)) == {"c/optimizer.pdopt": theirs}


def test_a_store_without_a_list_of_uploads_serves_where_nothing_is_resumed(
    proxy: Proxy, store: Store, bucket: str
) -> None:
    proxy.fault = lambda method, path: "unknown" if method == "GET" and "uploads" in path else None
    options, place = _through(proxy, store), f"s3://{bucket}/there"
    asked = Identity("plan", "version", "source", {})
    new = [NewFile("config.json", 2, (0,))]

    def begin() -> TargetStore:
        return open_target(place, Access(options), Permission(resume=True))

    session = {"Bucket": bucket, "Key": "there/.paddle_reshard_session.json"}
    with begin() as target:
        target.begin(new, asked)
        left = store.client.get_object(**session)["Body"].read()
    store.client.put_object(**session, Body=left)  # as after a kill
    with pytest.raises(TargetError, match=r"no such request \(ListMultipartUploads\)"), begin() as target:
        target.begin(new, asked)
    proxy.fault = lambda method, path: None
    with begin() as target:
        writer, _ = target.begin(new, asked)
        target.finish([writer.write_part("config.json", 0, memoryview(b"{}"))])
        target.publish("paddle_reshard.json", b"{}")
    assert in_bucket(store, bucket, "there/")["config.json"] == b"{}"
