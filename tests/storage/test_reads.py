"""Reads from S3: by the standard library, or by botocore where something is unusual."""

import random
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

import fsspec
import pytest

from paddle_reshard.pipeline.core.errors import CheckpointError
from paddle_reshard.storage.locate import open_source
from paddle_reshard.storage.remote.folder import ObjectStamp
from paddle_reshard.storage.remote.retry_counts import count_retries
from paddle_reshard.storage.remote.source import FsspecSource
from paddle_reshard.storage.s3.folder import S3Folder
from paddle_reshard.storage.store import Read
from tests.storage.servers import HOST, Proxy, Store, first
from tests.storage.test_stores import NAMES


@pytest.fixture
def contents(store: Store, bucket: str) -> dict[str, bytes]:
    """Files whose names mean something in a URL, each in its own order of reading."""
    made = {name: random.Random(name).randbytes(10_000) for name in NAMES}
    for name, content in made.items():
        store.client.put_object(Bucket=bucket, Key=f"here/{name}", Body=content)
    return made


def watch_botocore(source: FsspecSource) -> list[object]:
    """Reads that botocore makes from now on."""
    seen: list[object] = []
    assert isinstance(source.folder, S3Folder)
    events = source.folder.client.botocore.meta.events
    events.register("before-call.s3.GetObject", lambda **_: seen.append(1))
    return seen


@pytest.mark.parametrize("scheme", ["s3", "memory"])
def test_a_long_range_is_read_in_several(
    scheme: str, store: Store, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = random.Random(scheme).randbytes(10_000)
    monkeypatch.setattr("paddle_reshard.storage.remote.source.RANGE_BYTES", 1_007)
    store.client.put_object(Bucket=bucket, Key="here/file", Body=content)
    fsspec.filesystem("memory").pipe_file(f"/{bucket}/here/file", content)
    source = open_source(f"{scheme}://{bucket}/here", store.options)
    assert source.read("file", 5, 9_990) == content[5:9_995]


def test_a_process_has_one_client_for_a_store(store: Store, bucket: str, contents: dict[str, bytes]) -> None:
    """However often its folders are opened, and by whichever thread."""
    options = {**store.options, "config_kwargs": {"retries": {"total_max_attempts": 1}}}
    source = open_source(f"s3://{bucket}/here", options)
    other = open_source(f"s3://{bucket}/here", options)
    with ThreadPoolExecutor(1) as elsewhere:
        third = elsewhere.submit(open_source, f"s3://{bucket}/here", options).result()
    clients = {each.folder.client for each in (source, other, third) if isinstance(each.folder, S3Folder)}
    assert len(clients) == 1
    assert options["config_kwargs"] == {"retries": {"total_max_attempts": 1}}


@pytest.mark.parametrize(
    ("step", "requests"),
    # One for the first read, and one for each 512 KiB where little is left out.
    [(70_000, 4), (126_000, 4), (200_000, 8)],
    ids=["close", "next to each other", "apart"],
)
def test_reads_that_follow_each_other_closely_share_requests(
    step: int, requests: int, store: Store, bucket: str, proxy: Proxy
) -> None:
    content = random.Random(step).randbytes(1_600_000)
    store.client.put_object(Bucket=bucket, Key="here/file", Body=content)
    source = open_source(f"s3://{bucket}/here", {**store.options, "endpoint_url": proxy.url})
    with source.kept_open() as files:
        asked = len(proxy.seen)
        for start in range(0, 1_500_000, step):
            assert files.read("file", start, 64 << 10) == content[start : start + (64 << 10)]
            assert files.read("file", start + 100, 9) == content[start + 100 : start + 109]
        assert len(proxy.seen) - asked == requests
        assert files.read("file", 1_000_000, 600_000) == content[1_000_000:]
        assert files.read("file", 1_599_999, 1) == content[-1:]
        with pytest.raises(CheckpointError, match="ends at byte 1600000"):
            files.read("file", 1_599_999, 2)
        with pytest.raises(CheckpointError, match="did not exist"):
            files.read("none", 0, 1)


@pytest.mark.parametrize("kind", ["slow_down", "internal", "short", "cut", "reset"])
def test_those_that_fail_are_read_again(
    kind: str, store: Store, bucket: str, contents: dict[str, bytes], proxy: Proxy
) -> None:
    source = open_source(f"s3://{bucket}/here", {**store.options, "endpoint_url": proxy.url})
    proxy.fault = first(3, kind, lambda method, path: path.endswith("plain.bin"))
    buffers = [memoryview(bytearray(100)) for _ in range(20)]
    source.read_many([Read("plain.bin", 7 * i, buffer) for i, buffer in enumerate(buffers)])
    assert buffers == [contents["plain.bin"][7 * i : 7 * i + 100] for i in range(20)]


@pytest.mark.parametrize(
    ("gone", "names"), [(False, ["plain.bin"]), (True, ["plain.bin"]), (False, ["50%", "plain.bin", "50%"])]
)
def test_a_file_that_changes_between_two_reads(
    gone: bool, names: list[str], store: Store, bucket: str, contents: dict[str, bytes]
) -> None:
    """Alone, or side by side with others."""
    source = open_source(f"s3://{bucket}/here", store.options)
    assert source.read("plain.bin", 0, 5) == contents["plain.bin"][:5]
    if gone:
        store.client.delete_object(Bucket=bucket, Key="here/plain.bin")
    else:
        store.client.put_object(Bucket=bucket, Key="here/plain.bin", Body=bytes(10_000))
    with pytest.raises(CheckpointError, match=r"plain\.bin: (changed while it was read|not found)") as found:
        source.read_many([Read(name, 5, memoryview(bytearray(5))) for name in names])
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


def test_a_store_that_permits_only_what_botocore_asks(
    store: Store, bucket: str, contents: dict[str, bytes], proxy: Proxy
) -> None:
    """It is asked once; what botocore is told then counts."""
    source = open_source(f"s3://{bucket}/here", {**store.options, "endpoint_url": proxy.url})
    by_botocore = watch_botocore(source)

    def fault(method: str, path: str) -> str | None:
        return "denied" if "plain" in path and "user-agent" not in proxy.headers[-1] else None

    proxy.fault = fault
    for start in (0, 10, 30):
        assert source.read("plain.bin", start, 10) == contents["plain.bin"][start : start + 10]
    assert len(by_botocore) == 3
    assert sum("plain" in path for _, path in proxy.seen) == 4


def test_a_bucket_in_another_region_is_asked_for_there(
    store: Store, bucket: str, contents: dict[str, bytes], proxy: Proxy
) -> None:
    source = open_source(f"s3://{bucket}/here", {**store.options, "endpoint_url": proxy.url})
    by_botocore = watch_botocore(source)
    proxy.fault = first(1, "elsewhere_region", lambda method, path: "plain" in path)
    for start in (0, 10, 30):
        assert source.read("plain.bin", start, 10) == contents["plain.bin"][start : start + 10]
    regions = [headers["authorization"].split("/")[2] for headers in proxy.headers[1:]]
    assert by_botocore == []
    assert regions[0] != "eu-west-1" and regions[1:] == 3 * ["eu-west-1"]


# ------------------------------------------------------------------------------------------------- connections


@contextmanager
def answering(*scripts: list[bytes]) -> Iterator[tuple[dict[str, Any], list[bytes]]]:
    """A server that answers the requests of each connection with the given bytes, then closes it; what it received."""
    received: list[bytes] = []

    def serve() -> None:
        for script in scripts:
            connection, _ = listener.accept()
            with suppress(OSError), connection:  # the client may have gone
                for answer in script:
                    received.append(connection.recv(1 << 16))
                    connection.sendall(answer)

    with socket.create_server((HOST, 0)) as listener:
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield {"anon": True, "endpoint_url": f"http://{HOST}:{listener.getsockname()[1]}"}, received
        thread.join(timeout=5)


HEAD = b'HTTP/1.1 206 Partial Content\r\nContent-Range: bytes 0-4/100\r\nETag: "e"\r\n'
HELLO = HEAD + b"Content-Length: 5\r\n\r\nhello"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n2\r\nhe\r\n3\r\nllo\r\n0\r\n\r\n"
TO_THE_END = HEAD + b"Connection: close\r\n\r\nhello"
CLOSING = HEAD + b"Connection: close\r\nContent-Length: 5\r\n\r\nhello"


def _five(options: dict[str, Any], times: int) -> None:
    folder = S3Folder("s3://bucket/here", options, CheckpointError)
    for _ in range(times):
        buffer = bytearray(5)
        folder.attempt("file", folder.read_range, "file", ObjectStamp(100, '"e"'), 0, memoryview(buffer))
        assert buffer == b"hello"


def test_connections_are_kept() -> None:
    with answering([HELLO, CHUNKED, HELLO, TO_THE_END], [CLOSING], [HELLO]) as (options, received):
        _five(options, 6)
        assert len(received) == 6


@pytest.mark.parametrize(
    ("answer", "retries"),
    [
        (b"", 0),  # closed before a byte of an answer: an idle connection may be
        (b"HTTP/1.1 2", 0),
        (b"nonsense\r\n\r\n", 0),
        (HEAD + b"Content-Length: 5\r\n\r\nhel", 1),
        (HEAD + b"Content-Length: \xb2\r\n\r\nhello", 1),
        (HEAD + b"Content-Length: 6\r\n\r\nhello!", 1),
        (HEAD + b"Content-Length: 4\r\n\r\nhell", 1),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n6\r\nhello!\r\n0\r\n\r\n", 1),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\nhello", 1),
        (HEAD + b"Connection: close\r\n\r\nhello!", 1),
        (HEAD + b"x: " + b"y" * 70_000 + b"\r\n\r\n", 1),
        (b"HTTP/1.1 500 Oops\r\nContent-Length: 3\r\n\r\n<a>", 1),
    ],
)
def test_an_answer_that_is_none_is_asked_for_again(answer: bytes, retries: int) -> None:
    with answering([HELLO, answer], [HELLO]) as (options, received):
        before = count_retries().total()
        _five(options, 2)
        assert count_retries().total() - before == retries
        assert len(received) == 3


def test_reads_and_other_requests_share_connections() -> None:
    put = b'HTTP/1.1 200 OK\r\nContent-Length: 0\r\nETag: "e"\r\n\r\n'
    missing = b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n"
    with answering([HELLO, put, missing, HELLO]) as (options, received):
        folder = S3Folder("s3://bucket/here", options, CheckpointError)
        _five(folder.options, 1)
        folder.put("small", b"")
        assert folder.read_object("none") is None
        _five(folder.options, 1)
    assert [request.split()[0] for request in received] == [b"GET", b"PUT", b"GET", b"GET"]


def test_a_write_over_a_connection_that_was_closed_meanwhile_is_repeated_and_counted() -> None:
    """The store may have carried it out, so nothing is repeated beneath the retries."""
    put = b'HTTP/1.1 200 OK\r\nContent-Length: 0\r\nETag: "e"\r\n\r\n'
    with answering([HELLO, b""], [put]) as (options, received):
        before = count_retries().total()
        _five(options, 1)
        folder = S3Folder("s3://bucket/here", options, CheckpointError)
        folder.attempt("small", folder.put, "small", b"")
        assert count_retries().total() - before == 1
    assert [request.split()[0] for request in received] == [b"GET", b"PUT", b"PUT"]


def test_a_body_that_is_refused_before_all_of_it_has_arrived() -> None:
    """The answer counts, though the connection is gone."""
    refused = b"<Error><Code>AccessDenied</Code></Error>"
    answer = b"HTTP/1.1 403 Forbidden\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%s" % (
        len(refused),
        refused,
    )
    with answering([answer]) as (options, _):
        folder = S3Folder("s3://bucket/here", options, CheckpointError)
        with pytest.raises(CheckpointError, match="access denied"):
            folder.attempt("large", folder.put, "large", bytes(64 << 20))
