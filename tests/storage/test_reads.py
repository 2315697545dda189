"""Reads from S3: all but the first from a bucket are made like the first, without the client."""

import random
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar
from unittest import mock

import pytest

from paddle_reshard.pipeline.core.errors import CheckpointError
from paddle_reshard.storage.locate import open_source
from paddle_reshard.storage.remote.retry_counts import count_retries
from paddle_reshard.storage.remote.source import FsspecSource
from paddle_reshard.storage.store import Read
from tests.storage.servers import HOST, Proxy, Store, first

NAMES = ("plain.bin", "two words", "x+y=1", "50%", "50%25", "größe", "a&b", "~tilde", "q?versionId=1", "a#b")


@pytest.fixture
def contents(store: Store, bucket: str) -> dict[str, bytes]:
    """Files whose names mean something in a URL, each in its own order of reading."""
    made = {name: random.Random(name).randbytes(10_000) for name in NAMES}
    for name, content in made.items():
        store.client.put_object(Bucket=bucket, Key=f"here/{name}", Body=content)
    return made


def watch_client(source: FsspecSource) -> list[object]:
    """Reads that the client makes from now on."""
    seen: list[object] = []
    client = source.folder.open()[0].s3
    client.meta.events.register("before-call.s3.GetObject", lambda **_: seen.append(1))
    return seen


def test_ranges_of_files_of_any_name(store: Store, bucket: str, contents: dict[str, bytes]) -> None:
    source = open_source(f"s3://{bucket}/here", store.options)
    assert source.sizes() == {name: 10_000 for name in NAMES}
    through_client = watch_client(source)
    chosen = random.Random(1)
    for name, content in 3 * list(contents.items()):
        start = chosen.randrange(9_000)
        assert source.read(name, start, 777) == content[start : start + 777]
    assert len(through_client) <= 1


def test_a_process_has_one_client_for_a_store(store: Store, bucket: str, contents: dict[str, bytes]) -> None:
    """The client changes the options that it is given."""
    options = {**store.options, "config_kwargs": {"retries": {"total_max_attempts": 1}}}
    source = open_source(f"s3://{bucket}/here", options)
    before = source.folder.open()[0]
    source.read("plain.bin", 0, 5)
    assert source.folder.open()[0] is before
    assert options["config_kwargs"] == {"retries": {"total_max_attempts": 1}}


def test_a_folder_whose_name_means_something_in_a_url(store: Store, bucket: str) -> None:
    store.client.put_object(Bucket=bucket, Key="a b/100%/file", Body=b"0123456789")
    source = open_source(f"s3://{bucket}/a b/100%", store.options)
    assert [source.read("file", start, 3) for start in (0, 5)] == [b"012", b"567"]


def test_small_ranges_are_read_side_by_side(store: Store, bucket: str, contents: dict[str, bytes]) -> None:
    source = open_source(f"s3://{bucket}/here", store.options)
    source.read("plain.bin", 0, 5)
    wanted = [(name, start, 1 + start % 700) for name in NAMES for start in range(0, 9_000, 2_200)]
    reads = [Read(name, start, memoryview(bytearray(nbytes))) for name, start, nbytes in wanted]
    with mock.patch.object(threading.Thread, "start", side_effect=AssertionError("a thread")):
        source.read_many(reads)
    for (name, start, nbytes), read in zip(wanted, reads, strict=True):
        assert read.buffer == contents[name][start : start + nbytes]


@pytest.mark.parametrize("kind", ["slow_down", "internal", "short", "cut", "reset"])
def test_those_that_fail_are_read_again(
    kind: str, store: Store, bucket: str, contents: dict[str, bytes], proxy: Proxy
) -> None:
    source = open_source(f"s3://{bucket}/here", {**store.options, "endpoint_url": proxy.url})
    source.read("plain.bin", 0, 5)
    proxy.fault = first(3, kind, lambda method, path: path.endswith("plain.bin"))
    buffers = [memoryview(bytearray(100)) for _ in range(20)]
    source.read_many([Read("plain.bin", 7 * i, buffer) for i, buffer in enumerate(buffers)])
    assert buffers == [contents["plain.bin"][7 * i : 7 * i + 100] for i in range(20)]


def test_a_file_that_changes_before_ranges_are_read_side_by_side(
    store: Store, bucket: str, contents: dict[str, bytes]
) -> None:
    source = open_source(f"s3://{bucket}/here", store.options)
    source.read("plain.bin", 0, 5)
    store.client.put_object(Bucket=bucket, Key="here/plain.bin", Body=bytes(10_000))
    with pytest.raises(CheckpointError, match=r"plain\.bin: changed while it was read"):
        source.read_many([Read(name, 5, memoryview(bytearray(5))) for name in ("50%", "plain.bin", "50%")])


@pytest.mark.parametrize("gone", [False, True])
def test_a_file_that_changes_between_two_reads(
    gone: bool, store: Store, bucket: str, contents: dict[str, bytes]
) -> None:
    source = open_source(f"s3://{bucket}/here", store.options)
    assert source.read("plain.bin", 0, 5) == contents["plain.bin"][:5]
    if gone:
        store.client.delete_object(Bucket=bucket, Key="here/plain.bin")
    else:
        store.client.put_object(Bucket=bucket, Key="here/plain.bin", Body=bytes(10_000))
    with pytest.raises(CheckpointError, match=r"plain\.bin: (changed while it was read|not found)") as found:
        source.read("plain.bin", 5, 5)
    assert not found.value.retryable


def test_what_one_user_may_read_another_may_not(
    store: Store, bucket: str, contents: dict[str, bytes]
) -> None:
    place = f"s3://{bucket}/here"
    one, other = open_source(place, store.options), open_source(place, store.may_list)
    assert one.read("plain.bin", 0, 5) == contents["plain.bin"][:5]
    with pytest.raises(CheckpointError, match="access denied"):
        other.read("plain.bin", 0, 5)
    assert one.read("plain.bin", 5, 5) == contents["plain.bin"][5:10]


@pytest.mark.parametrize(
    ("kind", "failure"),
    [("slow_down", "SlowDown"), ("internal", "InternalError"), ("short", "DamagedBody")],
)
def test_failures_that_pass(
    kind: str, failure: str, store: Store, bucket: str, contents: dict[str, bytes], proxy: Proxy
) -> None:
    source = open_source(f"s3://{bucket}/here", {**store.options, "endpoint_url": proxy.url})
    assert source.read("plain.bin", 0, 5) == contents["plain.bin"][:5]
    proxy.fault = first(2, kind, lambda method, path: path.endswith("plain.bin"))
    before, asked = count_retries(), len(proxy.seen)
    assert source.read("plain.bin", 5, 5) == contents["plain.bin"][5:10]
    assert count_retries() - before == {failure: 2}
    assert len(proxy.seen) == asked + 3


def test_a_permanent_failure_is_reported_with_its_code(
    store: Store, bucket: str, contents: dict[str, bytes], proxy: Proxy
) -> None:
    source = open_source(f"s3://{bucket}/here", {**store.options, "endpoint_url": proxy.url})
    source.read("plain.bin", 0, 5)
    proxy.fault = lambda method, path: "slow_down"
    with pytest.raises(
        CheckpointError, match=r"plain\.bin: the store is throttling requests; gave up after 4 attempts"
    ):
        source.read("plain.bin", 5, 5)


# ------------------------------------------------------------------------------------------------- headers


class _Recorder(BaseHTTPRequestHandler):
    """A store that holds one file of zeros and remembers what it was asked."""

    protocol_version = "HTTP/1.1"
    asked: ClassVar[list[dict[str, str]]] = []

    def log_message(self, format: str, *args: Any) -> None:
        return

    def do_GET(self) -> None:
        if "list-type" in self.path:
            body = (
                b"<ListBucketResult><Contents><Key>here/file</Key><Size>100</Size><ETag>&quot;e&quot;</ETag>"
                b"</Contents></ListBucketResult>"
            )
            self.send_response(200)
        else:
            self.asked.append({name.lower(): value for name, value in self.headers.items()})
            low, high = self.headers["Range"].removeprefix("bytes=").split("-")
            body = bytes(int(high) - int(low) + 1)
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {low}-{high}/100")
        self.send_header("ETag", '"e"')
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture
def recorder() -> Iterator[str]:
    _Recorder.asked.clear()
    server = ThreadingHTTPServer((HOST, 0), _Recorder)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield f"http://{HOST}:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({"key": "k", "secret": "s"}, {"if-match": '"e"'}),
        ({"key": "k", "secret": "s", "token": "t"}, {"x-amz-security-token": "t"}),
        ({"key": "k", "secret": "s", "requester_pays": True}, {"x-amz-request-payer": "requester"}),
        (
            {
                "key": "k",
                "secret": "s",
                "s3_additional_kwargs": {"SSECustomerKey": "0" * 32, "SSECustomerAlgorithm": "AES256"},
            },
            {"x-amz-server-side-encryption-customer-algorithm": "AES256"},
        ),
        ({"anon": True}, {}),
    ],
)
def test_later_requests_say_what_the_first_one_did(
    options: dict[str, Any], wanted: dict[str, str], recorder: str
) -> None:
    source = open_source("s3://bucket/here", {**options, "endpoint_url": recorder})
    through_client = watch_client(source)
    for start in (0, 10, 30):
        assert source.read("file", start, 10) == bytes(10)
    assert len(through_client) == 1
    one, *others = _Recorder.asked
    assert len(others) == 2
    assert wanted.items() <= one.items()
    for number, other in enumerate(others):
        assert other["range"] == ("bytes=10-19", "bytes=30-39")[number]
        assert ("authorization" in other) == ("key" in options)
        assert "key" not in options or other["authorization"] != one["authorization"]
        assert _lasting(other) == _lasting(one)


def _lasting(headers: dict[str, str]) -> dict[str, str]:
    passing = ("range", "authorization", "x-amz-date", "amz-sdk-invocation-id", "amz-sdk-request")
    return {name: value for name, value in headers.items() if name not in passing}
