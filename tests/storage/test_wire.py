"""HTTP over our own sockets and signatures of our own, against servers that send exactly these bytes, and botocore."""

from __future__ import annotations

import datetime
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock
from urllib.parse import quote

import pytest
from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials
from botocore.exceptions import ConnectionClosedError, IncompleteReadError, ReadTimeoutError, SSLError

from paddle_reshard.pipeline.core.errors import CheckpointError
from paddle_reshard.storage.locate import open_source
from paddle_reshard.storage.s3.routes import trusting
from paddle_reshard.storage.s3.signing import EMPTY_SHA256, UNSIGNED_PAYLOAD, Signature
from paddle_reshard.storage.s3.wire import Answer, Connections, Server

HOST = "127.0.0.1"
GET = b"GET /a HTTP/1.1\r\nhost: h\r\n\r\n"
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nETag: e\r\n\r\nhello"


@contextmanager
def answering(
    *scripts: list[bytes], tls: ssl.SSLContext | None = None
) -> Iterator[tuple[Server, list[bytes]]]:
    """A server that answers the requests of each connection with the given bytes, then closes it; what it received."""
    received: list[bytes] = []

    def serve() -> None:
        for script in scripts:
            connection, _ = listener.accept()
            try:
                with tls.wrap_socket(connection, server_side=True) if tls else connection as peer:
                    for answer in script:
                        received.append(peer.recv(1 << 16))
                        peer.sendall(answer)
            except OSError:  # the client has gone
                connection.close()

    with socket.create_server((HOST, 0)) as listener:
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield Server(HOST, listener.getsockname()[1], read_seconds=5), received
        thread.join(5)
        assert not thread.is_alive()


def test_a_body_of_the_expected_length_goes_into_the_buffer_and_connections_are_used_again() -> None:
    large = bytes(range(256)) * 100
    head = f"HTTP/1.1 206 Partial\r\ncontent-length: {len(large)}\r\n\r\n".encode()
    with answering([OK, head + large, OK]) as (server, received):
        connections, buffer = Connections(server), bytearray(len(large))
        assert connections.exchange(GET) == Answer(200, {"content-length": "5", "etag": "e"}, b"hello")
        assert connections.exchange(GET, into=memoryview(buffer)).filled == len(large)
        assert buffer == large
        # A body of another length stays away from the buffer.
        assert connections.exchange(GET, into=memoryview(bytearray(4))).filled == 5
    assert received == [GET] * 3


@pytest.mark.parametrize(
    ("answer", "wanted"),
    [
        (
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3;x=1\r\nhel\r\n2\r\nlo\r\n0\r\nt: 1\r\n\r\n",
            b"hello",
        ),
        (b"HTTP/1.1 200 OK\r\n\r\nto the end", b"to the end"),
        (b"HTTP/1.0 404 No\r\nContent-Length: 2\r\n\r\nno", b"no"),
        (b"HTTP/1.1 204 None\r\n\r\n", b""),
        (b"HTTP/1.1 100 Continue\r\n\r\n" + OK, b"hello"),
        (b"HTTP/1.1 200 OK\r\nx: " + b"y" * 20_000 + b"\r\nContent-Length: 1\r\n\r\nz", b"z"),
    ],
)
def test_all_kinds_of_answers(answer: bytes, wanted: bytes) -> None:
    with answering([answer]) as (server, _):
        assert Connections(server).exchange(GET).body == wanted


@pytest.mark.parametrize(
    ("answer", "failure"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhello", IncompleteReadError),
        (b"HTTP/1.1 200 OK\r\nContent-Le", ConnectionClosedError),
        (b"SSH-2.0 hello\r\n\r\n", ConnectionClosedError),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nhello\r\n", ConnectionClosedError),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-3\r\n", ConnectionClosedError),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nffffffffff\r\n", ConnectionClosedError),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999\r\n\r\n", ConnectionClosedError),
        (b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * (1 << 21), ConnectionClosedError),
        (b"HTTP/1.1 200 OK\r\nx: " + b"y" * 100_000, ConnectionClosedError),
    ],
)
def test_answers_that_are_cut_or_are_none(answer: bytes, failure: type[Exception]) -> None:
    with answering([answer]) as (server, _), pytest.raises(failure):
        Connections(server).exchange(GET)


def test_a_connection_that_ends_before_its_answer_is_opened_anew_once() -> None:
    with answering([OK, b""], [OK]) as (server, received):
        connections = Connections(server)
        for _ in range(2):
            assert connections.exchange(GET).body == b"hello"
    assert received == [GET] * 3
    with answering([b""], [b""]) as (server, _), pytest.raises(ConnectionClosedError):
        Connections(server).exchange(GET)


def test_requests_side_by_side_fail_one_by_one() -> None:
    missing = b"HTTP/1.1 404 No\r\nContent-Length: 2\r\n\r\nno"
    cut = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhel"
    answers = ([OK], [cut], [b""], [b"SSH-2.0\r\n\r\n"], [missing, OK])
    with answering(*answers) as (server, received):
        connections, buffers = Connections(server), [memoryview(bytearray(5)) for _ in range(5)]
        first, *broken, last = connections.exchange_together([GET] * 5, buffers)
        assert first is not None
        assert (first.status, first.filled, bytes(buffers[0])) == (200, 5, b"hello")
        assert broken == [None] * 3
        assert last is not None
        assert (last.status, last.body, bytes(buffers[4])) == (404, b"no", bytes(5))
        assert connections.exchange(GET).body == b"hello"  # over the last connection
    assert received == [GET] * 6


def test_a_server_that_falls_silent_is_waited_for_once() -> None:
    with socket.create_server((HOST, 0)) as listener:
        connections = Connections(Server(HOST, listener.getsockname()[1], read_seconds=0.2))
        with mock.patch.object(Connections, "_give_back", autospec=True) as given_back:
            found = connections.exchange_together([GET] * 4, [memoryview(bytearray(5)) for _ in range(4)])
        assert found == [None] * 4
        assert given_back.call_count == 1


def test_a_body_is_sent_when_it_is_wanted_and_kept_when_it_is_refused() -> None:
    head = b"PUT /a HTTP/1.1\r\nexpect: 100-continue\r\ncontent-length: 4\r\n\r\n"
    refusal = b"HTTP/1.1 403 No\r\nContent-Length: 0\r\n\r\n"
    with answering([b"HTTP/1.1 100 Continue\r\n\r\n", OK]) as (server, received):
        answer = Connections(server).exchange(head, memoryview(b"body"), expect=True)
        assert (answer.status, received) == (200, [head, b"body"])
    with answering([refusal], [OK]) as (server, received):
        connections = Connections(server)
        assert connections.exchange(head, memoryview(b"body"), expect=True).status == 403
        assert connections.exchange(GET).status == 200  # over another connection
        assert received == [head, GET]


def test_a_server_that_falls_silent() -> None:
    with socket.create_server((HOST, 0)) as listener:
        server = Server(HOST, listener.getsockname()[1], read_seconds=0.05)
        with pytest.raises(ReadTimeoutError):
            Connections(server).exchange(GET)


# ----------------------------------------------------------------------------------------------------- TLS


def _https_store(certificate: Path) -> ThreadingHTTPServer:
    class Handler(BaseHTTPRequestHandler):
        """One object of 100 bytes, whatever is asked."""

        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: Any) -> None:
            return

        def do_GET(self) -> None:
            listing = "list-type" in self.path
            entry = "<Contents><Key>here/file</Key><Size>100</Size><ETag>&quot;e&quot;</ETag></Contents>"
            low, high = (
                (0, 0) if listing else map(int, self.headers["Range"].removeprefix("bytes=").split("-"))
            )
            body = f"<ListBucketResult>{entry}</ListBucketResult>".encode()
            body = body if listing else bytes(range(low, high + 1))
            self.send_response(200 if listing else 206)
            self.send_header("Content-Range", f"bytes {low}-{high}/100")
            self.send_header("ETag", '"e"')
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    server = ThreadingHTTPServer((HOST, 0), Handler)
    server.daemon_threads = True
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    return server


def test_a_store_whose_certificate_the_user_trusts_is_read_past_the_client(authority: Path) -> None:
    """An authority given for the client counts for our connections too; without it, there is no connection."""
    server = _https_store(authority)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    options = {"key": "k", "secret": "s", "endpoint_url": f"https://{HOST}:{server.server_address[1]}"}
    try:
        source = open_source("s3://bucket/here", {**options, "client_kwargs": {"verify": str(authority)}})
        through_client: list[object] = []
        client = source.folder.open()[0].s3
        client.meta.events.register("before-call.s3.GetObject", lambda **_: through_client.append(1))
        for start in range(0, 100, 10):
            assert source.read("file", start, 10) == bytes(range(start, start + 10))
        assert len(through_client) == 1
        # Our connections trust nobody else.
        trusting_nobody = Server(HOST, server.server_address[1], trusting(True, None, None))
        with pytest.raises(SSLError):
            Connections(trusting_nobody).exchange(GET)
        with pytest.raises(CheckpointError, match="TLS handshake failed"):
            open_source("s3://bucket/here", options)
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


# ---------------------------------------------------------------------------------------------- signatures


@pytest.mark.parametrize("token", [None, "token/+="])
@pytest.mark.parametrize("sha256", [EMPTY_SHA256, UNSIGNED_PAYLOAD])
@pytest.mark.parametrize("key", ["", "plain", "two words", "a/b", "50%25+&=#?", "größe~€"])
def test_signatures_are_those_of_botocore(token: str | None, sha256: str, key: str) -> None:
    query = "partNumber=3&uploadId=" + quote("2~x/y=", safe="-_.~") if "w" in key else ""
    headers = {"x-amz-b": ' a  "b', "range": "bytes=0-1", "x-amz-a": "", "expect": "100-continue"}
    method, host = ("PUT", "127.0.0.1:9000") if query else ("GET", "bucket.s3.amazonaws.com")
    path = "/bucket/" + quote(key, safe="/~")
    ours = Signature("id", "secret", token, "eu-west-1").signed(method, host, path, query, headers, sha256)
    theirs = AWSRequest(method, f"https://{host}{path}{'?' if query else ''}{query}", headers=headers)
    theirs.context["client_config"] = SimpleNamespace(s3={"payload_signing_enabled": sha256 == EMPTY_SHA256})
    when = datetime.datetime.strptime(ours["x-amz-date"], "%Y%m%dT%H%M%SZ")
    with mock.patch("botocore.auth.get_current_datetime", lambda: when):
        S3SigV4Auth(Credentials("id", "secret", token), "s3", "eu-west-1").add_auth(theirs)
    assert {name.lower(): value for name, value in theirs.headers.items()} == ours
