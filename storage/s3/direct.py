"""Reads and uploads of parts past the client of s3fs, at a fraction of its processor time.

For every request, the client resolves the endpoint, checks the parameters, composes the headers, and parses the answer
by its model; a body is copied several times on its way through its event loop. That is most of the processor time of
small reads, of which indexing takes hundreds of thousands, and of large bodies. So the client makes only the first
request of each kind to a bucket. All further requests repeat it with another key, range or part: signed with the
client's credentials, and sent and received over connections of our own (:mod:`.wire`).

Whatever is unusual about the first request (a proxy, another kind of signature or of HTTP client) leaves all requests
of that kind to the client.
"""

from __future__ import annotations

import asyncio
import hashlib
import io
import logging
import ssl
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qsl, quote, urlsplit
from weakref import WeakKeyDictionary

import botocore
from aiobotocore.config import AioConfig
from aiobotocore.httpsession import AIOHTTPSession
from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError
from botocore.httpsession import create_urllib3_context, get_cert_path
from botocore.parsers import create_parser
from fsspec.asyn import sync

from paddle_reshard.storage.remote.retry import DamagedBody, code_of
from paddle_reshard.storage.s3.signing import EMPTY_SHA256, UNSIGNED_PAYLOAD, Signature
from paddle_reshard.storage.s3.wire import Answer, Connections, Server

_CHUNK_BYTES = 1 << 20
_LARGE_BYTES = 1 << 20
_LARGE_IN_FLIGHT = 32
"""How many bodies above ``_LARGE_BYTES`` the client reads at a time: each connection buffers about 400 KiB."""
_CREDENTIALS_SECONDS = 30.0
"""How long credentials are used before the client is asked again; it renews them minutes before they expire."""
_GET, _UPLOAD = "GetObject", "UploadPart"
_METHODS = {_GET: "GET", _UPLOAD: "PUT"}
_PASSING = frozenset(
    {
        "authorization",
        "content-length",
        "content-md5",
        "if-match",
        "range",
        "x-amz-content-sha256",
        "x-amz-date",
        "x-amz-security-token",
    }
)
"""Headers that belong to a single request."""
_CHECKSUM = "x-amz-checksum-"
_ANSWERED = {
    "etag": "ETag",
    "x-amz-server-side-encryption": "ServerSideEncryption",
    "x-amz-server-side-encryption-customer-algorithm": "SSECustomerAlgorithm",
}
"""Header of the answer to a part → its name in the client's answer."""

_ALTERED = ("XAmzContentSHA256Mismatch", "BadDigest")
"""Error codes for a body whose SHA-256 is not the one that was signed."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Noted:
    """A request as it was just before the client signed it, and how it was going to be signed."""

    url: str
    headers: Mapping[str, str]
    context: Mapping[str, Any]
    signer: Any
    signature: Mapping[str, Any]
    """Arguments of the signer's ``get_auth_instance``."""


class _Credentials:
    """The credentials of a client, which may renew them at any time."""

    def __init__(self, loop: Any, noted: _Noted, auth: Any) -> None:
        self.loop, self.noted = loop, noted
        self._auth, self._asked = auth, time.monotonic()

    def signature(self) -> Signature:
        """Signs with the credentials that are valid at this moment."""
        if time.monotonic() - self._asked > _CREDENTIALS_SECONDS:
            self._auth = sync(self.loop, _auth_of, self.noted)
            self._asked = time.monotonic()
        found = self._auth.credentials
        if found is None:
            raise NoCredentialsError
        return Signature(
            found.access_key, found.secret_key, found.token, self._auth._region_name, self._auth._service_name
        )


async def _auth_of(noted: _Noted) -> Any:
    return await noted.signer.get_auth_instance(**noted.signature)


@dataclass(frozen=True, slots=True)
class _Route:
    """What requests of one kind to a bucket have in common."""

    operation: str
    path: str
    """The path up to the key."""
    host: str
    headers: Mapping[str, str]
    credentials: _Credentials | None
    """None: requests are not signed."""
    signs_payloads: bool | None
    """What the user has configured; ``None`` leaves it to the kind of request, as the client does."""
    connections: Connections

    def send(
        self,
        key: str,
        query: str = "",
        more: Mapping[str, str] | None = None,
        body: memoryview | None = None,
        into: memoryview | None = None,
        sha256: str | None = None,
    ) -> Answer:
        """Make a request. ``sha256`` replaces the true digest of the body.

        Raises
        ------
        ClientError
            If the store refuses it.
        """
        head, expect = self._head(key, query, more, body, sha256)
        answer = self.connections.exchange(head, body, into, expect)
        if answer.status >= 300:
            response = {"status_code": answer.status, "headers": answer.headers, "body": answer.body}
            raise ClientError(create_parser("rest-xml").parse(response, None), self.operation)
        return answer

    def send_together(
        self, requests: Sequence[tuple[str, Mapping[str, str]]], buffers: Sequence[memoryview]
    ) -> list[Answer | None]:
        """Make requests without bodies side by side: keys and headers. ``None``: there is no answer."""
        heads = [self._head(key, "", more, None, None)[0] for key, more in requests]
        return self.connections.exchange_together(heads, buffers)

    def _head(
        self,
        key: str,
        query: str,
        more: Mapping[str, str] | None,
        body: memoryview | None,
        sha256: str | None,
    ) -> tuple[bytes, bool]:
        """A request's signed head, and whether it asks for permission to send the body."""
        headers = {**self.headers, **(more or {})}
        if body is not None:
            headers["content-length"] = str(len(body))
        path = self.path + quote(key, safe="/~")
        method = _METHODS[self.operation]
        if self.credentials is not None:
            digest = sha256 or self._digest(headers, body)
            signature = self.credentials.signature()
            headers = signature.signed(method, self.host, path, query, headers, digest)
        lines = [f"{method} {path}{'?' if query else ''}{query} HTTP/1.1", f"host: {self.host}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1"), "expect" in headers

    def _digest(self, headers: Mapping[str, str], body: memoryview | None) -> str:
        """What the signature says about the body: over TLS, a checksum of it is enough."""
        checked = "content-md5" in headers or any(name.startswith(_CHECKSUM) for name in headers)
        by_default = self.connections.server.tls is None or body is None or not checked
        if not (by_default if self.signs_payloads is None else self.signs_payloads):
            return UNSIGNED_PAYLOAD
        return EMPTY_SHA256 if body is None else hashlib.sha256(body).hexdigest()


@dataclass(frozen=True, slots=True)
class _Learnt:
    """What is known about the requests of a client."""

    routes: dict[tuple[str, str], _Route | None] = field(default_factory=dict)
    """``(operation, bucket)`` → how to make such requests; ``None`` leaves them to the client."""
    connections: dict[Server, Connections] = field(default_factory=dict)
    contexts: dict[Any, ssl.SSLContext] = field(default_factory=dict)
    checks: dict[str, list[bool]] = field(default_factory=dict)
    """Bucket → whether altered parts are refused, once that is known."""
    large: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(_LARGE_IN_FLIGHT))


_clients: WeakKeyDictionary[Any, _Learnt] = WeakKeyDictionary()
_adding = threading.Lock()
_noted: ContextVar[list[_Noted] | None] = ContextVar("_noted", default=None)
"""Collects the requests that the client signs for the running task; ``None`` to ignore them."""


def read(file_system: Any, request: Mapping[str, str], buffer: memoryview) -> str:
    """Fill ``buffer`` with the body of the answer to a request; the file's ETag.

    Parameters
    ----------
    file_system
        The file system of s3fs.
    request
        ``Bucket``, ``Key``, ``Range`` and optionally ``IfMatch``.

    Raises
    ------
    DamagedBody
        If the body is shorter or longer than ``buffer``.
    OSError, ClientError, BotoCoreError
        As the client raises them.
    """
    client, route = _route(file_system, _GET, request["Bucket"])
    if route is None:
        version: str = sync(file_system.loop, _read_by_client, file_system, client, request, buffer)
        return version
    answer = route.send(request["Key"], more=_conditions(request), into=buffer)
    found = answer.filled or len(answer.body)
    if found != len(buffer):
        raise DamagedBody(f"the response has {found} of the requested {len(buffer)} bytes")
    if answer.body:  # its length was not known in advance
        buffer[:] = answer.body
    return answer.headers.get("etag", "")


def read_together(
    file_system: Any, requests: Sequence[Mapping[str, str]], buffers: Sequence[memoryview]
) -> list[str | None]:
    """As :func:`read`, over several connections at a time; ``None`` for a buffer that could not be filled.

    The requests are about one bucket.
    """
    _, route = _route(file_system, _GET, requests[0]["Bucket"])
    if route is None:
        return [None] * len(requests)
    wanted = [(request["Key"], _conditions(request)) for request in requests]
    return [
        answer.headers.get("etag", "")
        if answer is not None and answer.status < 300 and answer.filled == len(buffer)
        else None
        for answer, buffer in zip(route.send_together(wanted, buffers), buffers, strict=True)
    ]


def _conditions(request: Mapping[str, str]) -> dict[str, str]:
    """The headers of a ranged read."""
    more = {"range": request["Range"]}
    if "IfMatch" in request:
        more["if-match"] = request["IfMatch"]
    return more


def upload_part(file_system: Any, request: Mapping[str, Any]) -> dict[str, Any]:
    """Upload a part; the client's answer, as far as it says how the part is stored.

    Parameters
    ----------
    file_system
        The file system of s3fs.
    request
        ``Bucket``, ``Key``, ``UploadId``, ``PartNumber``, ``Body`` (a buffer), and optionally ``ContentMD5``.
    """
    _, route = _route(file_system, _UPLOAD, request["Bucket"])
    if route is None:
        made: dict[str, Any] = sync(file_system.loop, _upload_by_client, file_system, request)
        return made
    more = {"content-md5": request["ContentMD5"]} if "ContentMD5" in request else None
    return _upload(route, request, more)


def known_checks(file_system: Any, bucket: str) -> list[bool]:
    """What :func:`refuses_altered_parts` has found for a bucket; empty before."""
    client, _ = _route(file_system, _UPLOAD, bucket)
    return _clients[client].checks.setdefault(bucket, [])


def refuses_altered_parts(file_system: Any, request: Mapping[str, Any]) -> bool:
    """Whether the store refuses a part whose bytes are not those whose SHA-256 was signed.

    Parameters
    ----------
    file_system
        The file system of s3fs; it has uploaded a part to this bucket before.
    request
        As for :func:`upload_part`. Unless the part is refused, it is stored.
    """
    _, route = _route(file_system, _UPLOAD, request["Bucket"])
    if route is None or route.credentials is None or route.signs_payloads is False:
        return False
    other = hashlib.sha256(b"other than " + bytes(request["Body"])).hexdigest()
    try:
        _upload(route, request, None, other)
    except ClientError as error:
        return code_of(error) in _ALTERED
    except BotoCoreError:
        return False
    return False


def _upload(
    route: _Route, request: Mapping[str, Any], more: Mapping[str, str] | None, sha256: str | None = None
) -> dict[str, Any]:
    query = f"partNumber={request['PartNumber']}&uploadId={quote(request['UploadId'], safe='-_.~')}"
    answer = route.send(request["Key"], query, more, memoryview(request["Body"]).cast("B"), sha256=sha256)
    found = {name: answer.headers[header] for header, name in _ANSWERED.items() if header in answer.headers}
    if "ETag" not in found:
        raise DamagedBody("the response to a part has no ETag")
    return found


class _Sent(io.RawIOBase):
    """A buffer that reads as a file, so that the client sends it without a copy."""

    def __init__(self, buffer: memoryview) -> None:
        self.buffer, self.at = buffer.cast("B"), 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self.at = offset + (0, self.at, len(self.buffer))[whence]
        return self.at

    def tell(self) -> int:
        return self.at

    def readinto(self, into: Any) -> int:
        piece = self.buffer[self.at : self.at + len(into)]
        into[: len(piece)] = piece
        self.at += len(piece)
        return len(piece)


# ------------------------------------------------------------------------------------------- by the client


def _route(file_system: Any, operation: str, bucket: str) -> tuple[Any, _Route | None]:
    """The client for a bucket, and the way past it if there is one."""
    client = _client_at_hand(file_system) or sync(file_system.loop, _client, file_system, bucket)
    if client not in _clients:
        with _adding:
            if client not in _clients:
                for each in (_GET, _UPLOAD):
                    client.meta.events.register(f"before-sign.s3.{each}", _note)
                _clients[client] = _Learnt()
    return client, _clients[client].routes.get((operation, bucket))


def _client_at_hand(file_system: Any) -> Any:
    """The only client of a file system, if there is one and its connections are open."""
    client = getattr(file_system, "_s3", None)
    if client is None or getattr(file_system, "cache_regions", True):
        return None
    session = getattr(getattr(client, "_endpoint", None), "http_session", None)
    return client if getattr(session, "_sessions", None) else None


async def _client(file_system: Any, bucket: str) -> Any:
    await file_system.set_session()
    return await file_system.get_s3(bucket)


async def _read_by_client(
    file_system: Any, client: Any, request: Mapping[str, str], buffer: memoryview
) -> str:
    async with _clients[client].large if len(buffer) > _LARGE_BYTES else nullcontext():
        answer = await _learning(file_system, client, "get_object", _GET, request)
        body = answer["Body"]
        try:
            await _fill(buffer, body)
        finally:
            body.close()
    return str(answer["ETag"])


async def _upload_by_client(file_system: Any, request: Mapping[str, Any]) -> dict[str, Any]:
    client = await _client(file_system, request["Bucket"])
    body = _Sent(memoryview(request["Body"]))
    return await _learning(file_system, client, "upload_part", _UPLOAD, {**request, "Body": body})


async def _fill(buffer: memoryview, body: Any) -> None:
    done = 0
    while chunk := await body.read(_CHUNK_BYTES):
        if done + len(chunk) > len(buffer):
            raise DamagedBody(f"the response has more than the requested {len(buffer)} bytes")
        buffer[done : done + len(chunk)] = chunk
        done += len(chunk)
    if done != len(buffer):
        raise DamagedBody(f"the response has {done} of the requested {len(buffer)} bytes")


async def _learning(
    file_system: Any, client: Any, method: str, operation: str, request: Mapping[str, Any]
) -> dict[str, Any]:
    """Make a request through the client, and learn from it how to make others."""
    seen: list[_Noted] = []
    _noted.set(seen)
    try:
        answer: dict[str, Any] = await file_system._call_s3(method, **request)
    finally:
        _noted.set(None)
    which = operation, request["Bucket"]
    routes = _clients[client].routes
    if which not in routes:
        found = await _learn(file_system.loop, client, operation, request["Key"], seen)
        if isinstance(found, str):
            logger.info("%s requests to %s are left to the client: %s", operation, request["Bucket"], found)
        routes[which] = None if isinstance(found, str) else found
    return answer


async def _learn(loop: Any, client: Any, operation: str, key: str, seen: list[_Noted]) -> _Route | str:
    """How to repeat the last of the requests that were made (after a redirect, that one counts); or why not."""
    session = getattr(getattr(client, "_endpoint", None), "http_session", None)
    if not seen or type(session) is not AIOHTTPSession:
        return "its requests go an unusual way"
    noted = seen[-1]
    url = urlsplit(noted.url)
    tail = quote(key, safe="/~")
    known = {"partNumber", "uploadId"} if operation == _UPLOAD else set()
    if not url.path.endswith(f"/{tail}") or {name for name, _ in parse_qsl(url.query)} != known:
        return "its URLs have an unusual form"
    credentials = None
    if noted.signature["signature_version"] is not botocore.UNSIGNED:
        if noted.context.get("signing", {}).keys() & {"request_credentials", "identity_cache"}:
            return "each request has its own credentials"
        if noted.signature["signature_version"] != "s3v4":
            return f"signatures of the kind {noted.signature['signature_version']}"
        credentials = _Credentials(loop, noted, await _auth_of(noted))
    server = _server(client, session, noted.url)
    if isinstance(server, str):
        return server
    connections = _clients[client].connections.setdefault(server, Connections(server))
    s3 = getattr(noted.context.get("client_config"), "s3", None) or {}
    port = "" if url.port in (None, {"http": 80, "https": 443}[url.scheme]) else f":{url.port}"
    return _Route(
        operation=operation,
        path=url.path.removesuffix(tail),
        host=f"{server.host}{port}" if ":" not in server.host else f"[{server.host}]{port}",
        headers={**noted.headers, "accept": "*/*", "accept-encoding": "identity"},
        credentials=credentials,
        signs_payloads=s3.get("payload_signing_enabled"),
        connections=connections,
    )


def _server(client: Any, session: AIOHTTPSession, url: str) -> Server | str:
    """Where the requests of a client go; or why only the client can send them."""
    parts, config = urlsplit(url), client.meta.config
    if parts.scheme not in ("http", "https") or not parts.hostname:
        return f"the scheme {parts.scheme}"
    if session._proxy_config.proxy_url_for(url) is not None:
        return "a proxy"
    if getattr(config, "connector_args", None) != AioConfig().connector_args:
        return "connector_args"
    tls = None
    if parts.scheme == "https":
        contexts, which = _clients[client].contexts, (session._verify, session._cert_file, session._key_file)
        tls = contexts[which] = contexts.get(which) or _tls(*which)
    port = parts.port or {"http": 80, "https": 443}[parts.scheme]
    return Server(parts.hostname, port, tls, config.connect_timeout, config.read_timeout)


def _tls(verify: bool | str, certificate: str | None, private_key: str | None) -> ssl.SSLContext:
    """The context that the client makes of its options."""
    context: ssl.SSLContext = create_urllib3_context()
    context.check_hostname = bool(verify)
    if verify:
        if bundle := get_cert_path(verify):
            context.load_verify_locations(bundle)
    else:
        context.verify_mode = ssl.CERT_NONE
    if certificate:
        context.load_cert_chain(certificate, private_key)
    return context


def _note(
    request: Any, request_signer: Any, signing_name: str, region_name: str, signature_version: Any, **_: Any
) -> None:
    seen = _noted.get()
    if seen is None:
        return
    headers = {name.lower(): _text(value) for name, value in request.headers.items()}
    lasting = {
        name: value
        for name, value in headers.items()
        if name not in _PASSING and not name.startswith(_CHECKSUM)
    }
    signing = request.context.get("signing", {})
    signature = {
        "signing_name": signing.get("signing_name") or signing_name,
        "region_name": signing.get("region") or region_name,
        "signature_version": signature_version,
    }
    seen.append(_Noted(request.url, lasting, dict(request.context), request_signer, signature))


def _text(value: str | bytes) -> str:
    return value.decode("latin-1") if isinstance(value, bytes) else value
