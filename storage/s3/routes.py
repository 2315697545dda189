"""How to make requests to a bucket without the client of s3fs: learnt from the first request of each kind.

For every request, the client resolves the endpoint, checks the parameters, composes the headers, and sends it all
through its event loop: some 4 ms of processor time. So the client makes only the first request of each kind to a
bucket. From that request, just before it is signed, follows what all of its kind have in common: what is left of its
query and headers without what its own parameters add. Further requests add their own parameters to that, and are
signed with the client's credentials.

Whatever is unusual about the first request (a proxy, another kind of signature or of HTTP client, checksums that the
client computes) leaves all requests of that kind to the client.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import ssl
import threading
import time
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache
from typing import Any
from urllib.parse import quote, urlsplit
from weakref import WeakKeyDictionary

import botocore
from aiobotocore.config import AioConfig
from aiobotocore.httpsession import AIOHTTPSession
from botocore.awsrequest import HeadersDict
from botocore.exceptions import ClientError, NoCredentialsError
from botocore.handlers import decode_list_object_v2
from botocore.httpsession import create_urllib3_context, get_cert_path
from botocore.parsers import ResponseParserError, ResponseParserFactory
from botocore.serialize import create_serializer
from fsspec.asyn import sync

from paddle_reshard.storage.remote.retry import DamagedBody, response_of
from paddle_reshard.storage.s3.signing import EMPTY_SHA256, UNSIGNED_PAYLOAD, Signature
from paddle_reshard.storage.s3.wire import Answer, Connections, Server

GET, UPLOAD = "GetObject", "UploadPart"
ANSWER_BYTES = 64 << 20
"""A longer answer to anything but a read is refused: a listing has up to 1,000 keys of 1,024 bytes to a page."""
_LARGE_IN_FLIGHT = 32
"""How many bodies above a megabyte the client reads at a time: each connection buffers about 400 KiB."""
_CREDENTIALS_SECONDS = 30.0
"""How long credentials are used before the client is asked again; it renews them minutes before they expire."""
_FIRST_SECONDS = 1.0
"""How long requests wait for the first of their kind, before they go through the client too."""
_UNDERSTOOD = (404, 412)
"""A request that is refused with such a status was understood, and can be repeated like a successful one."""
_SIGNING = frozenset(
    {"authorization", "content-length", "x-amz-content-sha256", "x-amz-date", "x-amz-security-token"}
)
"""Headers that each request gets anew."""
_CHECKSUM = "x-amz-checksum-"
_LASTING_CHECKSUMS = frozenset({f"{_CHECKSUM}algorithm", f"{_CHECKSUM}type"})
"""They say how a whole file is checked, not what a body amounts to."""
_VALIDATION = f"{_CHECKSUM}mode"
"""Asks for a checksum of a body, which is not checked: ranges have none."""
_OF_A_BODY = ("content-md5", "x-amz-sdk-checksum-algorithm", "x-amz-trailer")
"""Headers of a body that the client checksums."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Noted:
    """A request as it was just before the client signed it, and how it was going to be signed."""

    url: str
    headers: Mapping[str, str]
    context: Mapping[str, Any]
    signer: Any
    signature: Mapping[str, Any]
    """Arguments of the signer's ``get_auth_instance``."""


class Credentials:
    """The credentials of a client, which may renew them at any time."""

    def __init__(self, loop: Any, noted: Noted, auth: Any) -> None:
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


async def _auth_of(noted: Noted) -> Any:
    return await noted.signer.get_auth_instance(**noted.signature)


@dataclass(frozen=True, slots=True)
class Own:
    """What the parameters of a single request add to it."""

    query: Mapping[str, str]
    """Name → value, not quoted."""
    headers: Mapping[str, str]
    """Names in lower case."""
    body: Any = b""


@dataclass(frozen=True, slots=True)
class Operation:
    """A kind of request, by the client's description of the service."""

    model: Any

    @property
    def name(self) -> str:
        """As the store names it."""
        return str(self.model.name)

    @property
    def method(self) -> str:
        """Of HTTP."""
        return str(self.model.http["method"])

    def own(self, request: Mapping[str, Any]) -> Own:
        """What a request adds to what is common to its kind: its parameters as the client writes them."""
        if isinstance(source := request.get("CopySource"), Mapping):
            request = {**request, "CopySource": quote(f"{source['Bucket']}/{source['Key']}", safe="/~")}
        made = create_serializer("rest-xml", include_validation=False).serialize_to_request(
            request, self.model
        )
        headers = {name.lower(): str(value) for name, value in made["headers"].items()}
        return Own({name: str(value) for name, value in made["query_string"].items()}, headers, made["body"])

    def parsed(self, answer: Answer) -> dict[str, Any]:
        """An answer as the client gives it.

        Raises
        ------
        ClientError
            If the store refuses the request; also in a body after all, where it began to answer before it was done.
        DamagedBody
            If the body is not what the store answers to such a request.
        """
        status = answer.status
        if status == 200 and _begins_error(answer.body):
            status = 500
        response = {"status_code": status, "headers": HeadersDict(answer.headers), "body": answer.body}
        try:
            parsed: dict[str, Any] = _parser().parse(response, self.model.output_shape)
        except ResponseParserError:
            raise DamagedBody(f"the answer to {self.name} is not well-formed") from None
        if status >= 300:
            raise ClientError(parsed, self.name)
        return parsed


@cache
def _parser() -> Any:
    """The client's parser, except that times stay texts: nobody reads them, and they take longer than the rest."""
    parsers = ResponseParserFactory()
    parsers.set_parser_defaults(timestamp_parser=str)
    return parsers.create_parser("rest-xml")


def _begins_error(body: bytes) -> bool:
    """Whether the root of some XML is an error."""
    start = body[:1024].lstrip()
    if start.startswith(b"<?"):
        start = start.partition(b"?>")[2].lstrip()
    return start.startswith((b"<Error>", b"<Error "))


@dataclass(frozen=True, slots=True)
class Route:
    """What requests of one kind to a bucket have in common."""

    operation: Operation
    path: str
    """The path up to the key."""
    host: str
    query: tuple[str, ...]
    """Pairs of name and value, quoted as they are sent."""
    headers: Mapping[str, str]
    context: Mapping[str, Any]
    """What the client noted about the first request."""
    credentials: Credentials | None
    """None: requests are not signed."""
    signs_payloads: bool | None
    """What the user has configured; ``None`` leaves it to the kind of request, as the client does."""
    connections: Connections

    def send(
        self,
        key: str,
        own: Own,
        body: memoryview | None = None,
        into: memoryview | None = None,
        sha256: str | None = None,
        most: int = 0,
    ) -> Answer:
        """Make a request. ``sha256`` replaces the true digest of the body.

        Raises
        ------
        ClientError
            If the store refuses it.
        """
        head, expect = self._head(key, own, body, sha256)
        again = self.operation.method != "POST"
        answer = self.connections.exchange(head, body, into, expect, again, most)
        if answer.status >= 300:
            self.operation.parsed(answer)
        return answer

    def request(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Make a request whose body and answer are short; the client's answer."""
        own = self.operation.own(request)
        has_body = self.operation.method in ("PUT", "POST")
        body = memoryview(own.body).cast("B") if has_body else None
        parsed = self.operation.parsed(self.send(request.get("Key", ""), own, body, most=ANSWER_BYTES))
        if self.operation.name == "ListObjectsV2":
            decode_list_object_v2(parsed, context=self.context)
        return parsed

    def send_together(
        self, requests: Sequence[tuple[str, Own]], buffers: Sequence[memoryview]
    ) -> list[Answer | None]:
        """Make requests without bodies side by side. ``None``: there is no answer."""
        heads = [self._head(key, own, None, None)[0] for key, own in requests]
        return self.connections.exchange_together(heads, buffers)

    def is_unsigned(self, headers: Mapping[str, str]) -> bool:
        """Whether the signature of a request with a body leaves its bytes to a checksum: over TLS, that is enough."""
        if self.signs_payloads is not None:
            return not self.signs_payloads
        checked = "content-md5" in headers or any(name.startswith(_CHECKSUM) for name in headers)
        return self.connections.server.tls is not None and checked

    def _head(self, key: str, own: Own, body: memoryview | None, sha256: str | None) -> tuple[bytes, bool]:
        """A request's signed head, and whether it asks for permission to send the body."""
        headers = {**self.headers, **own.headers}
        if body is not None:
            headers["content-length"] = str(len(body))
        path = self.path + quote(key, safe="/~")
        pairs = [
            *self.query,
            *(f"{quote(n, safe='-_.~')}={quote(v, safe='-_.~')}" for n, v in own.query.items()),
        ]
        query = "&".join(sorted(pairs, key=_name_of))
        method = self.operation.method
        if self.credentials is not None:
            digest = sha256 or self._digest(headers, body)
            signature = self.credentials.signature()
            headers = signature.signed(method, self.host, path, query, headers, digest)
        lines = [f"{method} {path}{'?' if query else ''}{query} HTTP/1.1", f"host: {self.host}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1"), "expect" in headers

    def _digest(self, headers: Mapping[str, str], body: memoryview | None) -> str:
        """What the signature says about the body."""
        if body is None:
            return UNSIGNED_PAYLOAD if self.signs_payloads is False else EMPTY_SHA256
        return UNSIGNED_PAYLOAD if self.is_unsigned(headers) else hashlib.sha256(body).hexdigest()


def _name_of(pair: str) -> str:
    return pair.partition("=")[0]


@dataclass(frozen=True, slots=True)
class Learnt:
    """What is known about the requests of a client."""

    routes: dict[tuple[str, str], Route | None] = field(default_factory=dict)
    """``(operation, bucket)`` → how to make such requests; ``None`` leaves them to the client."""
    operations: dict[str, Operation] = field(default_factory=dict)
    """The client's method → the kind of request that it makes."""
    connections: dict[Server, Connections] = field(default_factory=dict)
    contexts: dict[Any, ssl.SSLContext] = field(default_factory=dict)
    first: dict[tuple[str, str], threading.Lock] = field(default_factory=dict)
    """Held while the first request of a kind is made."""
    checks: dict[str, dict[Any, Any]] = field(default_factory=dict)
    """Bucket → what trials have found about its parts."""
    large: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(_LARGE_IN_FLIGHT))


_clients: WeakKeyDictionary[Any, Learnt] = WeakKeyDictionary()
_adding = threading.Lock()
_noted: ContextVar[list[Noted] | None] = ContextVar("_noted", default=None)
"""Collects the requests that the client signs for the running task; ``None`` to ignore them."""


def learnt(client: Any) -> Learnt:
    """What is known about the requests of a client."""
    found = _clients.get(client)
    if found is None:
        with _adding:
            if client not in _clients:
                client.meta.events.register("before-sign.s3", _note)
                _clients[client] = Learnt()
            found = _clients[client]
    return found


def client_of(file_system: Any, bucket: str) -> Any:
    """The client for a bucket."""
    return _client_at_hand(file_system) or sync(file_system.loop, client_in_loop, file_system, bucket)


def operation_of(client: Any, method: str) -> Operation:
    """The kind of request that a method of a client makes."""
    operations = learnt(client).operations
    if method not in operations:
        name = client.meta.method_to_api_mapping[method]
        operations[method] = Operation(client.meta.service_model.operation_model(name))
    return operations[method]


def make(file_system: Any, method: str, request: Mapping[str, Any]) -> dict[str, Any]:
    """Make a request whose body and answer are short: the first of its kind through the client, others past it.

    Requests of a kind that is not known yet wait for the first of them, but not long.
    """
    client = client_of(file_system, request["Bucket"])
    known, which = learnt(client), (operation_of(client, method).name, request["Bucket"])
    if which not in known.routes:
        lock = known.first.setdefault(which, threading.Lock())
        alone = lock.acquire(timeout=_FIRST_SECONDS)
        try:
            if which not in known.routes:
                answer: dict[str, Any] = sync(
                    file_system.loop, learning, file_system, client, method, request
                )
                return answer
        finally:
            if alone:
                lock.release()
    route = known.routes[which]
    if route is None:
        answer = sync(file_system.loop, learning, file_system, client, method, request)
        return answer
    return route.request(request)


def _client_at_hand(file_system: Any) -> Any:
    """The only client of a file system, if there is one and its connections are open."""
    client = getattr(file_system, "_s3", None)
    if client is None or getattr(file_system, "cache_regions", True):
        return None
    session = getattr(getattr(client, "_endpoint", None), "http_session", None)
    return client if getattr(session, "_sessions", None) else None


async def client_in_loop(file_system: Any, bucket: str) -> Any:
    """The client for a bucket, within the event loop."""
    await file_system.set_session()
    return await file_system.get_s3(bucket)


async def learning(file_system: Any, client: Any, method: str, request: Mapping[str, Any]) -> dict[str, Any]:
    """Make a request through the client, and learn from it how to make others."""
    which = operation_of(client, method).name, request["Bucket"]
    routes = learnt(client).routes
    if which in routes:
        answer: dict[str, Any] = await file_system._call_s3(method, **request)
        return answer
    seen: list[Noted] = []
    _noted.set(seen)
    understood = False
    try:
        answer = await file_system._call_s3(method, **request)
        understood = True
    except Exception as error:
        status = response_of(error).get("ResponseMetadata", {}).get("HTTPStatusCode")
        understood = status in _UNDERSTOOD
        raise
    finally:
        _noted.set(None)
        if understood and which not in routes:
            found = await _learn(file_system.loop, client, operation_of(client, method), request, seen)
            if isinstance(found, str):
                logger.info("%s requests to %s are left to the client: %s", *which, found)
            routes[which] = None if isinstance(found, str) else found
    return answer


async def _learn(
    loop: Any, client: Any, operation: Operation, request: Mapping[str, Any], seen: list[Noted]
) -> Route | str:
    """How to repeat the last of the requests that were made (after a redirect, that one counts); or why not."""
    if operation.method == "HEAD":
        return "their answers name the length of a body that does not follow"
    session = getattr(getattr(client, "_endpoint", None), "http_session", None)
    if not seen or type(session) is not AIOHTTPSession:
        return "its requests go an unusual way"
    noted = seen[-1]
    url = urlsplit(noted.url)
    tail = quote(request.get("Key", ""), safe="/~")
    if not url.path.endswith(f"/{tail}" if tail else ""):
        return "its URLs have an unusual form"
    own = operation.own({name: value for name, value in request.items() if name != "Body"})
    lasting = {
        name: value
        for name, value in noted.headers.items()
        if name not in _SIGNING and name not in own.headers and name != _VALIDATION
    }
    computed = [n for n in lasting if n.startswith(_CHECKSUM) and n not in _LASTING_CHECKSUMS]
    if computed or any(name in lasting for name in _OF_A_BODY):
        return "the client checksums the body"
    credentials = None
    if noted.signature["signature_version"] is not botocore.UNSIGNED:
        if noted.context.get("signing", {}).keys() & {"request_credentials", "identity_cache"}:
            return "each request has its own credentials"
        if noted.signature["signature_version"] != "s3v4":
            return f"signatures of the kind {noted.signature['signature_version']}"
        credentials = Credentials(loop, noted, await _auth_of(noted))
    server = _server(client, session, noted.url)
    if isinstance(server, str):
        return server
    connections = learnt(client).connections.setdefault(server, Connections(server))
    s3 = getattr(noted.context.get("client_config"), "s3", None) or {}
    port = "" if url.port in (None, {"http": 80, "https": 443}[url.scheme]) else f":{url.port}"
    return Route(
        operation=operation,
        path=url.path.removesuffix(tail),
        host=f"{server.host}{port}" if ":" not in server.host else f"[{server.host}]{port}",
        query=tuple(pair for pair in url.query.split("&") if pair and _name_of(pair) not in own.query),
        headers={**lasting, "accept": "*/*", "accept-encoding": "identity"},
        context=noted.context,
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
        contexts, which = learnt(client).contexts, (session._verify, session._cert_file, session._key_file)
        tls = contexts[which] = contexts.get(which) or trusting(*which)
    port = parts.port or {"http": 80, "https": 443}[parts.scheme]
    return Server(parts.hostname, port, tls, config.connect_timeout, config.read_timeout)


def trusting(verify: bool | str, certificate: str | None, private_key: str | None) -> ssl.SSLContext:
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
    signing = request.context.get("signing", {})
    signature = {
        "signing_name": signing.get("signing_name") or signing_name,
        "region_name": signing.get("region") or region_name,
        "signature_version": signature_version,
    }
    seen.append(Noted(request.url, headers, dict(request.context), request_signer, signature))


def _text(value: str | bytes) -> str:
    return value.decode("latin-1") if isinstance(value, bytes) else value
