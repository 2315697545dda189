"""An S3 server with users and permissions, and a proxy before it that fails on request."""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import json
import os
import socket
import ssl
import subprocess
import sys
import threading
import time
from base64 import b64decode
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from unittest import mock
from urllib.parse import parse_qsl, urlsplit
from xml.etree import ElementTree

import boto3
import botocore.session
from botocore.loaders import create_loader

HOST = "127.0.0.1"
START_SECONDS = 300.0
MOTO = """
import sys
from moto.server import main
from werkzeug.serving import WSGIRequestHandler

WSGIRequestHandler.protocol_version = "HTTP/1.1"  # connections stay open, as those of S3 do
main(sys.argv[1:])
"""
READ_ONLY = ["s3:GetObject", "s3:ListBucket"]


@dataclass(frozen=True)
class Store:
    """A running S3 server."""

    url: str
    key: str
    secret: str
    read_only: dict[str, Any]
    """Storage options of someone who may only look."""
    may_list: dict[str, Any]
    """Of someone who may not even read what is listed."""
    may_nothing: dict[str, Any]

    @property
    def options(self) -> dict[str, Any]:
        """Storage options of someone who may do everything."""
        return {"key": self.key, "secret": self.secret, "endpoint_url": self.url}

    @cached_property
    def client(self) -> Any:
        """boto3, to see what is in the store without the code under test."""
        return _client("s3", self.url, self.key, self.secret)


def _client(service: str, url: str, key: str, secret: str) -> Any:
    return boto3.client(
        service,
        endpoint_url=url,
        aws_access_key_id=key,
        aws_secret_access_key=secret,
        region_name="us-east-1",
    )


def described_once() -> contextlib.AbstractContextManager[object]:
    """Let all sessions of botocore share what describes S3: each would read it anew, longer than most requests take."""
    return mock.patch.object(botocore.session, "create_loader", cache(create_loader))


@contextlib.contextmanager
def running_store() -> Iterator[Store]:
    """Start moto with its checks of permissions on, make two users, and stop it in the end."""
    with socket.socket() as free:
        free.bind((HOST, 0))
        port = free.getsockname()[1]
    process = subprocess.Popen(
        [sys.executable, "-c", MOTO, "-H", HOST, "-p", str(port)],
        env={**os.environ, "INITIAL_NO_AUTH_ACTION_COUNT": "3"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        _wait_for(port, process)
        url = f"http://{HOST}:{port}"
        key, secret = _make_user(_client("iam", url, "first", "calls"), "writer", ["*"])
        iam = _client("iam", url, key, secret)
        others = [
            dict(zip(("key", "secret"), _make_user(iam, name, actions), strict=True), endpoint_url=url)
            for name, actions in (
                ("reader", READ_ONLY),
                ("lister", ["s3:ListBucket"]),
                ("nobody", ["s3:GetBucketLocation"]),
            )
        ]
        with described_once():
            yield Store(url, key, secret, *others)
    finally:
        process.terminate()
        process.wait()


def _wait_for(port: int, process: subprocess.Popen[bytes]) -> None:
    ends = time.monotonic() + START_SECONDS
    while True:
        try:
            socket.create_connection((HOST, port)).close()
        except OSError:
            assert process.poll() is None, "the S3 server ended at once"
            assert time.monotonic() < ends, "the S3 server does not answer"
            time.sleep(0.05)
        else:
            return


def _make_user(iam: Any, name: str, actions: list[str]) -> tuple[str, str]:
    statement = {"Effect": "Allow", "Action": actions, "Resource": "*"}
    policy = {"Version": "2012-10-17", "Statement": [statement]}
    iam.create_user(UserName=name)
    pair = iam.create_access_key(UserName=name)["AccessKey"]
    iam.put_user_policy(UserName=name, PolicyName="policy", PolicyDocument=json.dumps(policy))
    return pair["AccessKeyId"], pair["SecretAccessKey"]


# -------------------------------------------------------------------------------------------------- proxy


Fault = Callable[[str, str], str | None]
SLOW_DOWN = b"<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"
INTERNAL = b"<Error><Code>InternalError</Code><Message>We encountered an internal error.</Message></Error>"
CHANGED = b"<Error><Code>PreconditionFailed</Code><Message>A condition did not hold.</Message></Error>"
UNKNOWN = b"<Error><Code>NotImplemented</Code><Message>Not implemented.</Message></Error>"
DENIED = b"<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"
ALTERED = (
    b"<Error><Code>XAmzContentSHA256Mismatch</Code><Message>The digest does not match.</Message></Error>"
)
BAD_DIGEST = b"<Error><Code>BadDigest</Code><Message>The CRC64NVME did not match.</Message></Error>"
MISMATCH = b"<Error><Code>InvalidRequest</Code><Message>Checksum Type mismatch occurred</Message></Error>"
ELSEWHERE = (
    b"<Error><Code>PermanentRedirect</Code><Message>The bucket is in another region.</Message></Error>"
)
ANSWERS = {
    "elsewhere_region": (301, ELSEWHERE),
    "slow_down": (503, SLOW_DOWN),
    "internal": (500, INTERNAL),
    "late": (200, INTERNAL),
    "changed": (412, CHANGED),
    "altered": (400, ALTERED),
    "denied": (403, DENIED),
    "unknown": (501, UNKNOWN),
    "bad_digest": (400, BAD_DIGEST),
    "mismatch": (400, MISMATCH),
}


NO_SUCH_KEY = b"<Error><Code>NoSuchKey</Code><Message>There is no such key.</Message></Error>"
NO_PARTS = b"<ListPartsResult><IsTruncated>false</IsTruncated></ListPartsResult>"
DIALECTS: dict[str, dict[str, tuple[int, bytes]]] = {
    "minio": {},
    "ceph": {"GET": (404, NO_SUCH_KEY), "POST": (500, INTERNAL)},
    "seaweedfs": {"GET": (200, NO_PARTS)},
}
"""What stores say of an upload that was completed or aborted. Ceph's answers were seen on 16.2.15."""


def _crc_table() -> list[int]:
    """By the polynomial of CRC-64/NVME, lowest bit first."""
    table = []
    for byte in range(256):
        for _ in range(8):
            byte = byte >> 1 ^ (0x9A6C9329AC4BC9B5 if byte & 1 else 0)
        table.append(byte)
    return table


CRC_TABLE = _crc_table()


def crc64nvme(content: bytes) -> int:
    """CRC-64/NVME, byte by byte."""
    value = 0xFFFFFFFFFFFFFFFF
    for byte in content:
        value = value >> 8 ^ CRC_TABLE[(value ^ byte) & 0xFF]
    return value ^ 0xFFFFFFFFFFFFFFFF


@dataclass
class Proxy:
    """Passes requests on. ``fault(method, path)`` names what goes wrong with a request, or None.

    ``flip``: a bit of the body changes on its way. ``slow_down``, ``internal``: the answer. ``late``: the answer
    ``internal``, but with status 200, as S3 does where it began to answer before it was done. ``reset``: the connection
    is closed instead of an answer. ``lose``: the same, after the store has done what was asked. ``cut``: half of the
    body that was announced. ``short``, ``long``: a whole body of one byte less or more. ``stall``: half of the body,
    then nothing; ``hang``: nothing at all, for as long as the proxy lives. The
    method of a part that the store copies is ``COPY``.
    """

    url: str = ""
    fault: Fault = lambda method, path: None
    dialect: Mapping[str, tuple[int, bytes]] = field(default_factory=dict)
    """Method → status and body instead of a 404 to a request about an upload."""
    checks_bodies: bool = False
    """Whether a body whose SHA-256 is not the one that was signed is refused, as by most stores, but not by moto."""
    checksums: str = ""
    """What the proxy makes of CRC-64/NVME. ``checked``: of a part, a wrong one is refused, and so is any in an upload
    that was not created for checksums. ``ends``: the same, but such an upload cannot be completed. ``copies``: the
    same, but nothing is copied into one."""
    created_for_checksums: set[str] = field(default_factory=set)
    """Ids of uploads."""
    with_md5: list[bool] = field(default_factory=list)
    """Whether each part that was taken had a Content-MD5."""
    seen: list[tuple[str, str]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    """Of each request seen; names in lower case."""
    closing: threading.Event = field(default_factory=threading.Event)


def first(count: int, kind: str, wanted: Fault) -> Fault:
    """The first ``count`` requests that are ``wanted`` fail."""
    lock, left = threading.Lock(), [count]

    def fault(method: str, path: str) -> str | None:
        with lock:
            if left[0] == 0 or not wanted(method, path):
                return None
            left[0] -= 1
            return kind

    return fault


class Quiet(BaseHTTPRequestHandler):
    """What answers requests, and writes nothing on a terminal."""

    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        return

    def tell(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)


class _Server(ThreadingHTTPServer):
    proxy: Proxy
    upstream: str
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that was killed is what some tests are about."""


class _Handler(Quiet):
    server: _Server
    disable_nagle_algorithm = True

    def pass_on(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        method = "COPY" if "x-amz-copy-source" in self.headers else self.command
        self.server.proxy.seen.append((method, self.path))
        self.server.proxy.headers.append({name.lower(): value for name, value in self.headers.items()})
        kind = self.server.proxy.fault(method, self.path)
        if kind == "flip":  # on its way
            body, kind = bytes([body[0] ^ 1]) + body[1:], None
        if self.server.proxy.checks_bodies and self.is_altered(body):
            kind = "altered"
        elif self.server.proxy.checksums and (wrong := self.wrong_checksum(body)):
            kind = wrong
        elif method == "PUT" and "partNumber" in self.path:
            self.server.proxy.with_md5.append("Content-MD5" in self.headers)
        if kind in ANSWERS:
            said = {"x-amz-bucket-region": "eu-west-1"} if kind == "elsewhere_region" else {}
            self.answer(ANSWERS[kind][0], said, ANSWERS[kind][1])
        elif kind == "reset":
            self.close_connection = True
        elif kind == "hang":
            self.server.proxy.closing.wait()
            self.close_connection = True
        else:
            self.forward(body, kind)

    def is_altered(self, body: bytes) -> bool:
        signed = self.headers.get("x-amz-content-sha256", "")
        return len(signed) == 64 and hashlib.sha256(body).hexdigest() != signed

    def wrong_checksum(self, body: bytes) -> str:
        """Why a request is refused for its checksum; empty if it is not."""
        query = dict(parse_qsl(urlsplit(self.path).query))
        made_for = query.get("uploadId") in self.server.proxy.created_for_checksums
        found = self.headers.get("x-amz-checksum-crc64nvme")
        kind = "copies" if "x-amz-copy-source" in self.headers else "ends" if self.command == "POST" else ""
        if made_for and self.server.proxy.checksums == kind:
            return "mismatch"
        if found is None or "partNumber" not in query:
            return ""
        if not made_for:
            return "mismatch"
        return "" if b64decode(found) == crc64nvme(body).to_bytes(8, "big") else "bad_digest"

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = pass_on

    def forward(self, body: bytes, kind: str | None) -> None:
        connection = http.client.HTTPConnection(self.server.upstream)
        try:
            headers = {name: value for name, value in self.headers.items() if name.lower() != "expect"}
            connection.request(self.command, self.path, body, headers)
            answer = connection.getresponse()
            content = answer.read()
        finally:
            connection.close()
        if self.headers.get("x-amz-checksum-algorithm") == "CRC64NVME" and answer.status == 200:
            made = ElementTree.fromstring(content).findtext("{*}UploadId")
            self.server.proxy.created_for_checksums.add(str(made))
        if kind == "lose":
            self.close_connection = True
            return
        dialect = self.server.proxy.dialect
        if answer.status == 404 and "uploadId=" in self.path and self.command in dialect:
            self.answer(dialect[self.command][0], {}, dialect[self.command][1])
            return
        if kind in ("short", "long"):
            content = content[:-1] if kind == "short" else content + b"x"
        self.answer(answer.status, dict(answer.getheaders()), content, kind)

    def answer(self, status: int, headers: dict[str, str], content: bytes, kind: str | None = None) -> None:
        broken = kind in ("cut", "stall")
        self.send_response_only(status)
        for name, value in headers.items():
            if name.lower() not in ("content-length", "connection", "transfer-encoding"):
                self.send_header(name, value)
        length = headers.get("Content-Length") if self.command == "HEAD" else str(len(content))
        self.send_header("Content-Length", length or "0")
        self.end_headers()
        self.wfile.write(content[: len(content) // 2] if broken else content)
        if kind == "stall":
            self.server.proxy.closing.wait()
        self.close_connection = self.close_connection or broken


@contextlib.contextmanager
def serving(server: ThreadingHTTPServer) -> Iterator[None]:
    """Have a server answer, in a thread of this process."""
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextlib.contextmanager
def running_proxy(store_url: str, certificate: Path | None = None) -> Iterator[Proxy]:
    """A proxy before a store, in this process; over TLS if it has a certificate."""
    proxy = Proxy()
    server = _Server((HOST, 0), _Handler)
    if certificate is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate)
        server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    server.proxy, server.upstream = proxy, store_url.removeprefix("http://")
    proxy.url = f"{'https' if certificate else 'http'}://{HOST}:{server.server_address[1]}"
    with serving(server):
        try:
            yield proxy
        finally:
            proxy.closing.set()
