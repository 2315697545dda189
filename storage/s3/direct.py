"""Requests past the client of s3fs, at a fraction of its processor time (see :mod:`.routes`).

Reads and parts go straight into and from buffers of the caller; the client copies a body several times. All other
requests are composed and understood by the client's own description of the service, and fail with the exceptions of
s3fs.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

from botocore.exceptions import BotoCoreError, ClientError
from fsspec.asyn import sync
from s3fs.errors import translate_boto_error

from paddle_reshard.storage.remote.retry import DamagedBody, code_of
from paddle_reshard.storage.s3 import routes
from paddle_reshard.storage.s3.answers import text_of
from paddle_reshard.storage.s3.routes import GET, UPLOAD, Own, Route, client_of, learnt
from paddle_reshard.storage.s3.wire import Answer

_CHUNK_BYTES = 1 << 20
_LARGE_BYTES = 1 << 20
_OBJECT_BYTES = 1 << 30
"""A larger object is not read as a whole."""
_ANSWERED = {
    "etag": "ETag",
    "x-amz-server-side-encryption": "ServerSideEncryption",
    "x-amz-server-side-encryption-customer-algorithm": "SSECustomerAlgorithm",
}
"""Header of the answer to a part → its name in the client's answer."""
_OF_A_BODY = {"ETag": "etag", "ContentRange": "content-range"}
"""What is said of the body of an answer → its header."""
_OF_A_PART = {"ContentMD5": "content-md5", "ChecksumCRC64NVME": "x-amz-checksum-crc64nvme"}
"""Parameter of a part → its header."""
_ALTERED = ("BadDigest", "XAmzContentChecksumMismatch", "XAmzContentSHA256Mismatch")
"""Error codes for a body that is not the one that was signed, or whose checksum differs."""


def request(file_system: Any, method: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Make a request whose body and answer are short; the client's answer.

    Parameters
    ----------
    file_system
        The file system of s3fs.
    method
        Of the client: ``put_object`` and the like.
    parameters
        ``Bucket`` and all others.

    Raises
    ------
    OSError
        If the store refuses it; its cause is botocore's exception.
    BotoCoreError
        If there is no answer.
    """
    try:
        return routes.make(file_system, method, parameters)
    except ClientError as error:
        raise translate_boto_error(error) from error


def read(file_system: Any, request: Mapping[str, str], buffer: memoryview) -> dict[str, Any]:
    """Fill ``buffer`` with the body of the answer to a request; what the answer says of it, as the client does.

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
    client, route = _route(file_system, GET, request["Bucket"])
    if route is None:
        told: dict[str, Any] = sync(file_system.loop, _read_by_client, file_system, client, request, buffer)
        return told
    answer = route.send(request["Key"], _of_a_range(request), into=buffer)
    found = answer.filled or len(answer.body)
    if found != len(buffer):
        raise DamagedBody(f"the response has {found} of the requested {len(buffer)} bytes")
    if answer.body:  # its length was not known in advance
        buffer[:] = answer.body
    return _told(answer)


def _told(answer: Answer) -> dict[str, Any]:
    """What the client would say of the body of an answer."""
    said = {name: answer.headers.get(header) for name, header in _OF_A_BODY.items()}
    return {**said, "ResponseMetadata": {"HTTPStatusCode": answer.status}}


def read_together(
    file_system: Any, requests: Sequence[Mapping[str, str]], buffers: Sequence[memoryview]
) -> list[dict[str, Any] | None]:
    """As :func:`read`, over several connections at a time; ``None`` for a buffer that could not be filled.

    The requests are about one bucket.
    """
    _, route = _route(file_system, GET, requests[0]["Bucket"])
    if route is None:
        return [None] * len(requests)
    wanted = [(request["Key"], _of_a_range(request)) for request in requests]
    return [
        _told(answer) if answer is not None and answer.status < 300 and answer.filled == len(buffer) else None
        for answer, buffer in zip(route.send_together(wanted, buffers), buffers, strict=True)
    ]


def _of_a_range(request: Mapping[str, str]) -> Own:
    headers = {"range": request["Range"]}
    if "IfMatch" in request:
        headers["if-match"] = request["IfMatch"]
    return Own({}, headers)


def read_object(file_system: Any, bucket: str, key: str) -> tuple[bytes, str]:
    """A whole small object and its ETag.

    Raises
    ------
    OSError
        If the store refuses it; its cause is botocore's exception.
    """
    client, route = _route(file_system, GET, bucket)
    if route is None:
        wanted = {"Bucket": bucket, "Key": key}
        found: tuple[bytes, str] = sync(file_system.loop, _object_by_client, file_system, client, wanted)
        return found
    try:
        answer = route.send(key, Own({}, {}), most=_OBJECT_BYTES)
    except ClientError as error:
        raise translate_boto_error(error) from error
    return answer.body, text_of(_told(answer), "ETag")


def upload_part(file_system: Any, request: Mapping[str, Any]) -> dict[str, Any]:
    """Upload a part; the client's answer, as far as it says how the part is stored.

    Parameters
    ----------
    file_system
        The file system of s3fs.
    request
        ``Bucket``, ``Key``, ``UploadId``, ``PartNumber``, ``Body`` (a buffer), and optionally ``ContentMD5`` and
        ``ChecksumCRC64NVME``.
    """
    _, route = _route(file_system, UPLOAD, request["Bucket"])
    if route is None:
        made: dict[str, Any] = sync(file_system.loop, _upload_by_client, file_system, request)
        return made
    return _upload(route, request)


def known_checks(file_system: Any, bucket: str) -> dict[Any, Any]:
    """What trials have found about parts that go to a bucket, for :mod:`.trials` to remember."""
    return learnt(client_of(file_system, bucket)).checks.setdefault(bucket, {})


def leaves_bytes_to_checksums(file_system: Any, bucket: str) -> bool:
    """Whether the signature of a part with a checksum would leave out its bytes, as far as is known."""
    _, route = _route(file_system, "CreateMultipartUpload", bucket)
    return route is not None and route.is_unsigned({header: "" for header in _OF_A_PART.values()})


def refuses_altered_part(file_system: Any, request: Mapping[str, Any]) -> bool:
    """Whether the store refuses a part whose bytes are not those of its checksum, or without one, of its signature.

    Parameters
    ----------
    file_system
        The file system of s3fs; it has uploaded a part to this bucket before.
    request
        As for :func:`upload_part`, with the checksum of other bytes if it has one. Unless the part is refused, it is
        stored.
    """
    _, route = _route(file_system, UPLOAD, request["Bucket"])
    if route is None:
        return False
    sha256 = None
    if not request.keys() & _OF_A_PART.keys():
        if route.credentials is None or route.signs_payloads is False:
            return False
        sha256 = hashlib.sha256(b"other than " + bytes(request["Body"])).hexdigest()
    try:
        _upload(route, request, sha256)
    except ClientError as error:
        return code_of(error) in _ALTERED
    except BotoCoreError:
        return False
    return False


def _upload(route: Route, request: Mapping[str, Any], sha256: str | None = None) -> dict[str, Any]:
    own = Own(
        {"partNumber": str(request["PartNumber"]), "uploadId": request["UploadId"]},
        {header: request[name] for name, header in _OF_A_PART.items() if name in request},
    )
    answer = route.send(request["Key"], own, memoryview(request["Body"]).cast("B"), sha256=sha256)
    return {name: answer.headers[header] for header, name in _ANSWERED.items() if header in answer.headers}


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


def _route(file_system: Any, operation: str, bucket: str) -> tuple[Any, Route | None]:
    """The client for a bucket, and the way past it if there is one."""
    client = client_of(file_system, bucket)
    return client, learnt(client).routes.get((operation, bucket))


async def _read_by_client(
    file_system: Any, client: Any, request: Mapping[str, str], buffer: memoryview
) -> dict[str, Any]:
    async with learnt(client).large if len(buffer) > _LARGE_BYTES else nullcontext():
        answer = await routes.learning(file_system, client, "get_object", request)
        body = answer["Body"]
        try:
            await _fill(buffer, body)
        finally:
            body.close()
    return answer


async def _object_by_client(file_system: Any, client: Any, request: Mapping[str, str]) -> tuple[bytes, str]:
    answer = await routes.learning(file_system, client, "get_object", request)
    body = answer["Body"]
    try:
        return await body.read(), text_of(answer, "ETag")
    finally:
        body.close()


async def _upload_by_client(file_system: Any, request: Mapping[str, Any]) -> dict[str, Any]:
    client = await routes.client_in_loop(file_system, request["Bucket"])
    body = _Sent(memoryview(request["Body"]))
    return await routes.learning(file_system, client, "upload_part", {**request, "Body": body})


async def _fill(buffer: memoryview, body: Any) -> None:
    done = 0
    while chunk := await body.read(_CHUNK_BYTES):
        if done + len(chunk) > len(buffer):
            raise DamagedBody(f"the response has more than the requested {len(buffer)} bytes")
        buffer[done : done + len(chunk)] = chunk
        done += len(chunk)
    if done != len(buffer):
        raise DamagedBody(f"the response has {done} of the requested {len(buffer)} bytes")
