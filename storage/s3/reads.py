"""Ranged reads: botocore says where a file is and signs, and the standard library's HTTP client makes the request.

An index makes a small read for every array of a checkpoint. For each, botocore composes and parses everything anew, in
three times the processor time. What is unusual is left to botocore, and so is whatever the store refuses to permit: its
answer counts.
"""

from __future__ import annotations

import os
import select
import socket
import ssl
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cached_property
from http.client import BadStatusLine, HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, urlsplit

import botocore
from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    ConnectionClosedError,
    EndpointConnectionError,
    ReadTimeoutError,
    SSLError,
)
from botocore.httpsession import create_urllib3_context, get_cert_path
from botocore.parsers import ResponseParserError, create_parser
from botocore.utils import get_environ_proxies

from paddle_reshard.storage.remote.retry import DamagedBody

IDLE_SECONDS = 12.0
"""Unused connections are closed after this time, before servers and routers forget them."""
MOST_IDLE = 64
REFUSAL_BYTES = 1 << 20
"""A longer error is not read."""
_REFUSED = (301, 307, 400, 401, 403)
"""What a store may answer that botocore knows how to deal with: another region, another way to sign."""
_REGION = "x-amz-bucket-region"
_TOLD = {"ETag": "ETag", "ContentRange": "Content-Range"}
"""What is said of a body → its header."""
Place = tuple[str, str, int | None]
"""Scheme, host and port."""


class ReadAddress(NamedTuple):
    """Where a file is asked for."""

    place: Place
    url: str
    target: str
    """The path in the URL."""
    region: str
    """For which requests are signed."""


class Reads:
    """Reads ranges of files, over connections that are kept. Can be used by several threads.

    Parameters
    ----------
    client
        botocore's client for S3.
    credentials
        What its requests are signed with; ``None`` to sign none.
    verify
        Its authorities, as for botocore: a file, or whether certificates are checked.
    """

    def __init__(self, client: Any, credentials: Any, verify: bool | str) -> None:
        self.client, self.credentials, self.verify = client, credentials, verify
        self.is_usable = _is_usual(client)
        self._addresses: dict[tuple[str, str], ReadAddress] = {}
        self._regions: dict[str, str] = {}
        """Bucket → its region, where a store has said that it is another one."""
        self._idle: list[tuple[float, Place, HTTPConnection]] = []

    def read(
        self, buffer: memoryview, bucket: str, key: str, asked: Mapping[str, str]
    ) -> dict[str, Any] | None:
        """Fill ``buffer`` with the body of an answer; what the answer says of it, or ``None`` to leave it to botocore.

        Parameters
        ----------
        asked
            Headers: ``Range`` and the like.

        Raises
        ------
        DamagedBody
            If the body is shorter or longer than ``buffer``.
        ClientError
            If the store refuses the request, however it is signed.
        BotoCoreError
            If there is no answer.
        """
        try:
            at = self._address(bucket, key)
        except BotoCoreError:
            return None
        answer = self._exchange(at, asked, buffer)
        region = answer.headers.get(_REGION, at.region)
        if answer.status in _REFUSED and region != at.region:
            self._regions[bucket] = region
            answer = self._exchange(self._address(bucket, key), asked, buffer)
        if answer.status in _REFUSED:
            return None
        told: dict[str, Any] = {name: answer.headers.get(header) for name, header in _TOLD.items()}
        return {**told, "ResponseMetadata": {"HTTPStatusCode": answer.status}}

    def _exchange(self, at: ReadAddress, asked: Mapping[str, str], buffer: memoryview) -> HTTPResponse:
        """Make a request, and fill ``buffer`` unless botocore may know better."""
        with self._translated():
            connection, answer = self._ask(at, self._signed(at, asked))
            try:
                if answer.status >= 300 and answer.status not in _REFUSED:
                    raise self._refusal(answer)
                if answer.status < 300:
                    fill(buffer, answer, answer.headers.get("Content-Length"))
                self._give_back(at.place, connection, answer)
            except BaseException:
                connection.close()
                raise
        return answer

    def _address(self, bucket: str, key: str) -> ReadAddress:
        """Where a file is: found in a URL that botocore signs, and that is never used."""
        found = self._addresses.get((bucket, key))
        if found is None or found.region != self._regions.get(bucket, found.region):
            signed = self.client.generate_presigned_url("get_object", Params={"Bucket": bucket, "Key": key})
            url = urlsplit(signed)
            scope = dict(parse_qsl(url.query)).get("X-Amz-Credential", "///").split("/")
            place = url.scheme, str(url.hostname), url.port
            region = self._regions.get(bucket, scope[2])
            found = ReadAddress(place, signed.partition("?")[0], url.path, region)
            self._addresses[bucket, key] = found
        return found

    def _signed(self, at: ReadAddress, asked: Mapping[str, str]) -> dict[str, str]:
        """The headers of a request for a file."""
        if self.credentials is None:
            return dict(asked)
        request = AWSRequest("GET", at.url, headers=dict(asked))
        S3SigV4Auth(self.credentials.get_frozen_credentials(), "s3", at.region).add_auth(request)
        return dict(request.headers.items())

    def _refusal(self, answer: HTTPResponse) -> Exception:
        """The store's error, as botocore would raise it."""
        model = self.client.meta.service_model.operation_model("GetObject")
        body = answer.read(REFUSAL_BYTES)
        answered = {"status_code": answer.status, "headers": dict(answer.headers.items()), "body": body}
        try:
            return ClientError(create_parser("rest-xml").parse(answered, model.output_shape), model.name)
        except (ResponseParserError, ValueError, KeyError):
            return DamagedBody(f"the answer has status {answer.status} and is not well-formed")

    # ---------------------------------------------------------------------------------------- connections

    def _ask(self, at: ReadAddress, headers: Mapping[str, str]) -> tuple[HTTPConnection, HTTPResponse]:
        """Make a request; once more over a new connection, if a kept one was closed meanwhile."""
        connection = self._take(at.place)
        if connection is not None:
            with suppress(ConnectionError, BadStatusLine):
                return connection, _answer(connection, at.target, headers)
        connection = self._connect(at.place)
        return connection, _answer(connection, at.target, headers)

    def _take(self, place: Place) -> HTTPConnection | None:
        """An idle connection that is still open and silent."""
        while self._idle:
            try:
                since, of, connection = self._idle.pop()
            except IndexError:
                return None
            if of == place and time.monotonic() - since < IDLE_SECONDS and not _is_readable(connection):
                return connection
            connection.close()
        return None

    def close(self) -> None:
        """Close the idle connections."""
        while self._idle:
            with suppress(IndexError):
                self._idle.pop()[2].close()

    def _give_back(self, place: Place, connection: HTTPConnection, answer: HTTPResponse) -> None:
        if answer.isclosed() and connection.sock is not None and len(self._idle) < MOST_IDLE:
            self._idle.append((time.monotonic(), place, connection))
        else:
            connection.close()

    def _connect(self, place: Place) -> HTTPConnection:
        scheme, host, port = place
        config = self.client.meta.config
        if scheme == "https":
            made: HTTPConnection = HTTPSConnection(
                host, port, timeout=config.connect_timeout, context=self._tls
            )
        else:
            made = HTTPConnection(host, port, timeout=config.connect_timeout)
        try:
            made.connect()
        except ssl.SSLError:
            raise
        except OSError as error:
            raise EndpointConnectionError(endpoint_url=self._endpoint, error=error) from error
        made.sock.settimeout(config.read_timeout)
        return made

    @cached_property
    def _tls(self) -> ssl.SSLContext:
        """The context that botocore makes of its options."""
        context: ssl.SSLContext = create_urllib3_context()
        context.check_hostname = bool(self.verify)
        if self.verify:
            context.load_verify_locations(get_cert_path(self.verify))
        else:
            context.verify_mode = ssl.CERT_NONE
        certificate = self.client.meta.config.client_cert
        if certificate:
            context.load_cert_chain(*([certificate] if isinstance(certificate, str) else certificate))
        return context

    @property
    def _endpoint(self) -> str:
        """For messages."""
        return str(self.client.meta.endpoint_url)

    @contextmanager
    def _translated(self) -> Iterator[None]:
        """Failures of connections as those of botocore."""
        try:
            yield
        except ssl.SSLError as error:
            raise SSLError(endpoint_url=self._endpoint, error=error) from error
        except TimeoutError as error:
            raise ReadTimeoutError(endpoint_url=self._endpoint, error=error) from error
        except (OSError, HTTPException) as error:
            raise ConnectionClosedError(endpoint_url=self._endpoint, error=error) from error


def authorities(session: Any, given: bool | str | None) -> bool | str:
    """Whom botocore trusts: what was given, the session's bundle, or that of the environment."""
    found: bool | str | None = given
    if found is None:
        found = session.get_config_variable("ca_bundle") or os.environ.get("REQUESTS_CA_BUNDLE", True)
    return found


def _is_usual(client: Any) -> bool:
    """Whether reads of a client are made, signed and checked in the usual way."""
    config = client.meta.config
    return (
        config.signature_version in ("s3v4", botocore.UNSIGNED)
        and not (config.proxies or get_environ_proxies(client.meta.endpoint_url))
        and getattr(config, "response_checksum_validation", "") == "when_required"
    )


def _is_readable(connection: HTTPConnection) -> bool:
    """Whether an idle connection is being closed: nobody asked for what arrives."""
    poll = select.poll()
    poll.register(connection.sock, select.POLLIN)
    return bool(poll.poll(0))


def _answer(connection: HTTPConnection, target: str, headers: Mapping[str, str]) -> HTTPResponse:
    """Make a request; the head of its answer. The connection is closed if there is none.

    The head is acknowledged at once, where the system can be told to (Linux). A server that sends head and body one
    after the other waits for that, as Ceph's gateway does unless it is told otherwise, and by itself it comes after
    40 ms.
    """
    try:
        connection.request("GET", target, headers=dict(headers))
        if hasattr(socket, "TCP_QUICKACK"):
            connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)
        return connection.getresponse()
    except BaseException:
        connection.close()
        raise


def fill(buffer: memoryview, body: Any, length: Any) -> None:
    """Receive a body that is as long as ``buffer``.

    Parameters
    ----------
    body
        Has ``readinto`` and ``read``.
    length
        As it was announced, if it was.

    Raises
    ------
    DamagedBody
        If it has another length.
    """
    if length is not None and str(length) != str(len(buffer)):
        raise DamagedBody(f"the response has {str(length)[:20]} of the requested {len(buffer)} bytes")
    done = 0
    while done < len(buffer) and (count := body.readinto(buffer[done:])):
        done += count
    if done < len(buffer) or (length is None and body.read(1)):
        more = "more than" if done == len(buffer) else f"{done} of"
        raise DamagedBody(f"the response has {more} the requested {len(buffer)} bytes")
