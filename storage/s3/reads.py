"""Ranged reads from S3 that take half the processor time of the client's own.

For every request, the client resolves the endpoint, checks the parameters, composes the headers and parses the answer
by its model. That is most of the processor time of a small read, and indexing thousands of rank files takes hundreds of
thousands of small reads. So the client makes only the first read from a bucket. All further reads are copies of that
request with another key and range, signed by the client's signer and sent over its connections.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote
from weakref import WeakKeyDictionary

from aiobotocore.httpsession import AIOHTTPSession
from aiobotocore.response import AioStreamingBody
from botocore.awsrequest import AWSRequest
from botocore.exceptions import ClientError
from botocore.parsers import create_parser

from paddle_reshard.storage.remote.retry import DamagedBody

_OPERATION = "GetObject"
_CHUNK_BYTES = 1 << 20
_LARGE_BYTES = 1 << 20
_LARGE_IN_FLIGHT = 32
"""How many bodies above ``_LARGE_BYTES`` are read at a time: each connection buffers about 400 KiB."""


@dataclass(frozen=True, slots=True)
class _Signing:
    """A request as it was just before the client signed it."""

    url: str
    headers: Mapping[str, str]
    context: Mapping[str, Any]
    signer: Any


@dataclass(frozen=True, slots=True)
class _Route:
    """The common part of all reads from a bucket."""

    base_url: str
    """URL up to the key."""
    signing: _Signing
    send: Callable[[Any], Awaitable[Any]]

    async def get(self, request: Mapping[str, str]) -> tuple[AioStreamingBody, str]:
        """Send a request; the body of the answer, and the file's ETag."""
        headers = {name: request[field] for field, name in _CONDITIONS.items() if field in request}
        signed = AWSRequest(
            "GET", self.base_url + _quoted(request["Key"]), {**self.signing.headers, **headers}
        )
        signed.context.update(self.signing.context)
        signed.stream_output = True
        await self.signing.signer.sign(_OPERATION, signed)
        answer = await self.send(signed.prepare())
        if answer.status_code >= 300:
            response = {
                "status_code": answer.status_code,
                "headers": answer.headers,
                "body": await answer.content,
            }
            raise ClientError(create_parser("rest-xml").parse(response, None), _OPERATION)
        body = AioStreamingBody(answer.raw, answer.headers.get("content-length"))
        return body, answer.headers.get("etag", "")


_CONDITIONS = {"Range": "Range", "IfMatch": "If-Match"}
"""Parameter of a read, besides the key → its header."""


@dataclass(frozen=True, slots=True)
class _Reads:
    """What is known about the reads of a client."""

    routes: dict[str, _Route] = field(default_factory=dict)
    """Bucket → how to read from it."""
    large: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(_LARGE_IN_FLIGHT))


_clients: WeakKeyDictionary[Any, _Reads] = WeakKeyDictionary()
_signed: ContextVar[list[_Signing] | None] = ContextVar("_signed", default=None)
"""Collects the requests that the client signs for the running task; ``None`` to ignore them."""


async def read_body(file_system: Any, request: Mapping[str, str], buffer: memoryview) -> str:
    """Fill ``buffer`` with the body of the answer to a request; the file's ETag.

    Parameters
    ----------
    file_system
        The file system of s3fs; this must run on its loop.
    request
        ``Bucket``, ``Key``, ``Range`` and optionally ``IfMatch``.

    Raises
    ------
    DamagedBody
        If the body is shorter or longer than ``buffer``.
    OSError, ClientError, BotoCoreError
        As the client raises them.
    """
    await file_system.set_session()
    client = await file_system.get_s3(request["Bucket"])
    if client not in _clients:
        _clients[client] = _Reads()
        client.meta.events.register(f"before-sign.s3.{_OPERATION}", _note_signing)
    reads = _clients[client]
    async with reads.large if len(buffer) > _LARGE_BYTES else nullcontext():
        route = reads.routes.get(request["Bucket"])
        if route is not None:
            body, version = await route.get(request)
        else:
            body, version = await _get_first(file_system, client, request)
        try:
            await _fill(buffer, body)
        finally:
            body.close()
    return version


async def _fill(buffer: memoryview, body: Any) -> None:
    done = 0
    while chunk := await body.read(_CHUNK_BYTES):
        if done + len(chunk) > len(buffer):
            raise DamagedBody(f"the response has more than the requested {len(buffer)} bytes")
        buffer[done : done + len(chunk)] = chunk
        done += len(chunk)
    if done != len(buffer):
        raise DamagedBody(f"the response has {done} of the requested {len(buffer)} bytes")


async def _get_first(file_system: Any, client: Any, request: Mapping[str, str]) -> tuple[Any, str]:
    """Make a request through the client, and learn the bucket's route from it."""
    seen: list[_Signing] = []
    _signed.set(seen)
    try:
        answer = await file_system._call_s3("get_object", **request)
    finally:
        _signed.set(None)
    connections = getattr(getattr(client, "_endpoint", None), "http_session", None)
    tail = f"/{_quoted(request['Key'])}"
    # After a redirect, the last request counts. If anything looks unusual, the client makes all further reads too.
    if seen and seen[-1].url.endswith(tail) and isinstance(connections, AIOHTTPSession):
        base_url = seen[-1].url[: 1 - len(tail)]
        _clients[client].routes[request["Bucket"]] = _Route(base_url, seen[-1], connections.send)
    return answer["Body"], str(answer["ETag"])


def _note_signing(request: Any, request_signer: Any, **_: Any) -> None:
    seen = _signed.get()
    if seen is not None:
        headers = {k: v for k, v in request.headers.items() if k not in _CONDITIONS.values()}
        seen.append(_Signing(request.url, headers, dict(request.context), request_signer))


def _quoted(key: str) -> str:
    """A key as the client quotes it in a URL."""
    return quote(key, safe="/~")
