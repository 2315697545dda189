"""Connections of the standard library's HTTP client to a store, kept for the next request.

Reads and what botocore asks share them, so a process opens half as many, and none waits for an acknowledgement. Where a
proxy is between, botocore makes all requests by itself.
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
from io import BytesIO
from typing import Any
from urllib.parse import urlsplit

from botocore.awsrequest import AWSResponse
from botocore.exceptions import ConnectionClosedError, EndpointConnectionError, ReadTimeoutError, SSLError
from botocore.httpsession import create_urllib3_context, get_cert_path
from botocore.utils import get_environ_proxies

IDLE_SECONDS = 12.0
"""Unused connections are closed after this time, before servers and routers forget them."""
MOST_IDLE = 64
Place = tuple[str, str, int | None]
"""Scheme, host and port."""


class Connections:
    """The connections of a client of botocore, whose timeouts and certificates count. Can be used by several threads.

    ``verify`` are its authorities, as for botocore: a file, or whether certificates are checked.
    """

    def __init__(self, client: Any, verify: bool | str) -> None:
        self.config, self.verify = client.meta.config, verify
        self.endpoint = str(client.meta.endpoint_url)
        """For messages."""
        self.are_direct = not (self.config.proxies or get_environ_proxies(self.endpoint))
        self._idle: list[tuple[float, Place, HTTPConnection]] = []

    def send(self, request: Any) -> AWSResponse | None:
        """Send an ``AWSPreparedRequest`` of botocore, and receive the whole answer; ``None`` to leave that to botocore.

        A ``BotoCoreError`` if there is no answer. Unlike a read, it is not asked for once more: it may have been
        carried out.
        """
        ranged = request.stream_output and "Range" in request.headers
        sendable = request.body is None or isinstance(request.body, (bytes, bytearray, memoryview))
        if not self.are_direct or ranged or not sendable or "Transfer-Encoding" in request.headers:
            return None
        url = urlsplit(request.url)
        place = url.scheme, str(url.hostname), url.port
        target = f"{url.path}?{url.query}" if url.query else url.path
        with self.translated():
            connection = self._take(place) or self._connect(place)
            answer = _answer(connection, request.method, target, request.headers, request.body)
            with closed_on_failure(connection):
                body = _Body(answer.read())
                self.give_back(place, connection, answer)
        return AWSResponse(request.url, answer.status, answer.headers, body)

    def ask(
        self, place: Place, target: str, headers: Mapping[str, str]
    ) -> tuple[HTTPConnection, HTTPResponse]:
        """Ask for a file; once more over a new connection, if a kept one was closed meanwhile."""
        connection = self._take(place)
        if connection is not None:
            with suppress(ConnectionError, BadStatusLine):
                return connection, _answer(connection, "GET", target, headers)
        connection = self._connect(place)
        return connection, _answer(connection, "GET", target, headers)

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

    def give_back(self, place: Place, connection: HTTPConnection, answer: HTTPResponse) -> None:
        """Keep a connection for the next request, if the answer was read to its end."""
        if answer.isclosed() and connection.sock is not None and len(self._idle) < MOST_IDLE:
            self._idle.append((time.monotonic(), place, connection))
        else:
            connection.close()

    def _connect(self, place: Place) -> HTTPConnection:
        scheme, host, port = place
        timeout = self.config.connect_timeout
        if scheme == "https":
            made: HTTPConnection = HTTPSConnection(host, port, timeout=timeout, context=self._tls)
        else:
            made = HTTPConnection(host, port, timeout=timeout)
        try:
            made.connect()
        except ssl.SSLError:
            raise
        except OSError as error:
            raise EndpointConnectionError(endpoint_url=self.endpoint, error=error) from error
        made.sock.settimeout(self.config.read_timeout)
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
        certificate = self.config.client_cert
        if certificate:
            context.load_cert_chain(*([certificate] if isinstance(certificate, str) else certificate))
        return context

    @contextmanager
    def translated(self) -> Iterator[None]:
        """Failures of connections as those of botocore."""
        try:
            yield
        except ssl.SSLError as error:
            raise SSLError(endpoint_url=self.endpoint, error=error) from error
        except TimeoutError as error:
            raise ReadTimeoutError(endpoint_url=self.endpoint, error=error) from error
        except (OSError, HTTPException) as error:
            raise ConnectionClosedError(endpoint_url=self.endpoint, error=error) from error


class _Body(BytesIO):
    """The body of an answer, as botocore reads it."""

    def stream(self) -> Iterator[bytes]:
        """All of it."""
        yield self.read()


def authorities(session: Any, given: bool | str | None) -> bool | str:
    """Whom botocore trusts: what was given, the session's bundle, or that of the environment."""
    found: bool | str | None = given
    if found is None:
        found = session.get_config_variable("ca_bundle") or os.environ.get("REQUESTS_CA_BUNDLE", True)
    return found


@contextmanager
def closed_on_failure(connection: HTTPConnection) -> Iterator[None]:
    """Closes a connection if what is done with it fails."""
    try:
        yield
    except BaseException:
        connection.close()
        raise


def _is_readable(connection: HTTPConnection) -> bool:
    """Whether an idle connection is being closed: nobody asked for what arrives."""
    poll = select.poll()
    poll.register(connection.sock, select.POLLIN)
    return bool(poll.poll(0))


def _answer(
    connection: HTTPConnection, method: str, target: str, headers: Mapping[str, str], body: Any = None
) -> HTTPResponse:
    """Make a request; the head of its answer. The connection is closed if there is none.

    A store may refuse a body, and close the connection, before it has received all of it: its answer counts.

    The head is acknowledged at once, where the system can be told to (Linux). A server that sends head and body one
    after the other waits for that, as Ceph's gateway does unless it is told otherwise, and by itself it comes after
    40 ms.
    """
    refused = (BrokenPipeError, ConnectionResetError) if body else ()
    with closed_on_failure(connection):
        with suppress(*refused):
            connection.request(method, target, body, dict(headers.items()))
        if hasattr(socket, "TCP_QUICKACK"):
            connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)
        return connection.getresponse()
