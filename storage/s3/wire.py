"""HTTP/1.1 over blocking sockets, straight from and into buffers of the caller.

For large bodies, clients spend most of their time on copies, and for small ones on their own bookkeeping. Here a body
goes from the kernel, or from the TLS library, into the memory where it is needed, and from there when it is sent.
Connections are kept and used again. Failures are the exceptions of botocore, which :mod:`..remote.retry` classifies.
"""

from __future__ import annotations

import select
import socket
import ssl
import struct
import threading
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from botocore.exceptions import (
    BotoCoreError,
    ConnectionClosedError,
    ConnectTimeoutError,
    EndpointConnectionError,
    IncompleteReadError,
    ReadTimeoutError,
    SSLError,
)

HEAD_BYTES = 64 << 10
"""A longer head of an answer is refused."""
BODY_BYTES = 1 << 20
"""A longer body is refused, unless the caller's buffer is as long: what a store says besides values is short."""
SCRATCH_BYTES = 4 << 10
"""The first bytes of an answer, head included, are read into a scratch buffer of this size; a copy for the body."""
CONTINUE_SECONDS = 1.0
"""How long to wait for a server's permission to send a body; some servers never give it."""
IDLE_SECONDS = 12.0
"""Unused connections are closed after this time, before servers and routers forget them."""
MOST_IDLE = 64


@dataclass(frozen=True, slots=True)
class Server:
    """Where requests go, and how connections to it are made."""

    host: str
    port: int
    tls: ssl.SSLContext | None = None
    connect_seconds: float | None = 60.0
    read_seconds: float | None = 60.0

    @property
    def url(self) -> str:
        """For messages."""
        return f"{'http' if self.tls is None else 'https'}://{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to a request. ``body`` is what did not go into the caller's buffer."""

    status: int
    headers: Mapping[str, str]
    """Names in lower case."""
    body: bytes
    filled: int = 0
    """Bytes that are in the caller's buffer."""


class _Refused(Exception):
    """The peer ended the connection; ``silent`` if it did so before the first byte of an answer."""

    def __init__(self, silent: bool, cause: BaseException | None = None) -> None:
        super().__init__(silent, cause)
        self.silent, self.cause = silent, cause


class Malformed(Exception):
    """An answer that is not HTTP as we read it."""


_BROKEN = (OSError, BotoCoreError, Malformed, _Refused)
"""What a connection fails with."""


class _Connection:
    """One socket, and what was received from it and not yet used."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.socket = _connect(server)
        self.wait_for_all = 0 if server.tls else socket.MSG_WAITALL
        self.scratch = memoryview(bytearray(SCRATCH_BYTES))
        self.rest = self.scratch[:0]
        self.idle_since = 0.0
        self.answered = False

    def close(self) -> None:
        self.socket.close()

    def is_usable(self) -> bool:
        """Whether an idle connection is still open and silent: bytes nobody asked for mean that it is being closed."""
        if time.monotonic() - self.idle_since > IDLE_SECONDS:
            return False
        return not _is_readable(self.socket, 0.0)

    # -------------------------------------------------------------------------------------------- sending

    def send(self, head: bytes, body: memoryview | None, expect: bool) -> bool:
        """Send a request. With ``expect``, the body follows only when the server asks for it. Whether all was sent."""
        if body is not None and not expect and len(body) <= SCRATCH_BYTES:
            head, body = head + body, None
        self.socket.sendall(head)
        if body is None:
            return True
        if expect and not self._may_continue():
            return False
        self.socket.sendall(body)
        return True

    def _may_continue(self) -> bool:
        """Whether the body is wanted; if not, the final answer has begun to arrive."""
        if self.server.tls is None:
            arrived = _is_readable(self.socket, CONTINUE_SECONDS)
        else:  # what makes the socket readable may be no more than a session ticket
            self.socket.settimeout(CONTINUE_SECONDS)
            try:
                arrived = self._receive_some()
            except TimeoutError:
                arrived = False
            finally:
                self.socket.settimeout(self.server.read_seconds)
        if not arrived:
            return True
        line = self._peek_line()
        if line.split(None, 2)[1:2] != [b"100"]:
            return False
        self._head()
        return True

    # ------------------------------------------------------------------------------------------ receiving

    def answer(self, into: memoryview | None, most: int = 0) -> tuple[Answer, bool]:
        """Read an answer; a successful one whose length is that of ``into`` goes there. Also: whether the connection
        may be used again."""
        status, headers = self._head()
        while status in (100, 102, 103):
            status, headers = self._head()
        lasting = headers.get("connection", "").lower() != "close"
        length = headers.get("content-length")
        if status in (204, 304):
            return Answer(status, headers, b""), lasting
        most = max(most, BODY_BYTES, 0 if into is None else len(into))
        if headers.get("transfer-encoding", "identity").lower() != "identity":
            return Answer(status, headers, _joined(self._chunks(most), most)), lasting
        if length is None or not _is_number(length):
            return Answer(status, headers, _joined(self._to_the_end(), most)), False
        wanted = int(length)
        if into is not None and status < 300:
            if wanted != len(into):
                return Answer(status, headers, b"", wanted), False
            self._fill(into)
            return Answer(status, headers, b"", wanted), lasting
        if wanted > most:
            raise Malformed(f"a body of {wanted} bytes, where at most {most} are expected")
        body = bytearray(wanted)
        self._fill(memoryview(body))
        return Answer(status, headers, bytes(body)), lasting

    def _receive(self, into: memoryview, flags: int = 0) -> int:
        return self.socket.recv_into(into, len(into), flags)

    def _receive_some(self) -> bool:
        """Receive into the scratch buffer, which is empty; False at the end of the stream."""
        count = self._receive(self.scratch)
        self.rest = self.scratch[:count]
        self.answered |= count > 0
        return count > 0

    def _fill(self, into: memoryview) -> None:
        done = min(len(self.rest), len(into))
        into[:done] = self.rest[:done]
        self.rest = self.rest[done:]
        while done < len(into):
            count = self._receive(into[done:], self.wait_for_all)
            if count == 0:
                raise IncompleteReadError(actual_bytes=done, expected_bytes=len(into))
            done += count

    def _peek_line(self) -> bytes:
        """The first line of what was received, which arrives whole."""
        if not len(self.rest) and not self._receive_some():
            raise _Refused(not self.answered)
        return bytes(self.rest).split(b"\r\n", 1)[0]

    def _until(self, mark: bytes) -> bytes:
        """What arrives before ``mark``, which is dropped."""
        found = b""
        while True:
            found += bytes(self.rest)
            before, ended, after = found.partition(mark)
            if ended:
                self.rest = self.rest[len(self.rest) - len(after) :]
                return before
            if len(found) > HEAD_BYTES:
                raise Malformed("the head of the answer does not end")
            self.rest = self.rest[:0]
            if not self._receive_some():
                raise _Refused(not self.answered)

    def _head(self) -> tuple[int, dict[str, str]]:
        status, *lines = self._until(b"\r\n\r\n").decode("latin-1").split("\r\n")
        version, _, rest = status.partition(" ")
        if not version.startswith("HTTP/1.") or not _is_number(rest[:3]):
            raise Malformed(f"the answer begins with {status[:80]!r}")
        headers = {}
        for line in lines:
            name, _, value = line.partition(":")
            headers[name.lower()] = value.strip()
        if rest.startswith("1"):  # not the answer itself
            self.answered = len(self.rest) > 0
        if version == "HTTP/1.0":
            headers.setdefault("connection", "close")
        return int(rest[:3]), headers

    def _chunks(self, most: int) -> Iterator[bytes]:
        while True:
            size = self._until(b"\r\n").split(b";")[0].strip()
            try:
                nbytes = int(size, 16)
            except ValueError:
                raise Malformed(f"a chunk of {size[:20]!r} bytes") from None
            if not nbytes:
                break
            if not 0 < nbytes <= most:
                raise Malformed(f"a chunk of {nbytes} bytes, where at most {most} are expected")
            chunk = bytearray(nbytes)
            self._fill(memoryview(chunk))
            yield bytes(chunk)
            self._until(b"\r\n")
        while self._until(b"\r\n"):  # trailers
            pass

    def _to_the_end(self) -> Iterator[bytes]:
        while True:
            yield bytes(self.rest)
            self.rest = self.rest[:0]
            if not self._receive_some():
                return


def _is_number(text: str) -> bool:
    """Whether a text has nothing but digits 0 to 9; ``²`` and the like are digits for Python alone."""
    return text.isascii() and text.isdigit()


def _joined(pieces: Iterator[bytes], most: int) -> bytes:
    """A body whose length is not announced."""
    body = bytearray()
    for piece in pieces:
        body += piece
        if len(body) > most:
            raise Malformed(f"a body of more than {most} bytes")
    return bytes(body)


@dataclass(eq=False)
class Connections:
    """Connections to a server, as many as there are requests at a time. Can be used by several threads."""

    server: Server
    _idle: list[_Connection] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        weakref.finalize(self, _close_all, self._idle)

    def exchange(
        self,
        head: bytes,
        body: memoryview | None = None,
        into: memoryview | None = None,
        expect: bool = False,
        again: bool = True,
        most: int = 0,
    ) -> Answer:
        """Send a request and read its answer.

        An idle connection may have been closed by the server meanwhile. If a connection ends before a byte of an
        answer, a request that may be made twice is sent once more over a new one.

        Parameters
        ----------
        head
            Request line and headers, up to and including the empty line.
        body
            What is sent after it.
        into
            Where the body of a successful answer of this very length goes.
        expect
            Whether the head asks for permission to send the body.
        again
            Whether the request may be made twice.
        most
            Bytes of a body that does not go into the caller's buffer, if more than ``BODY_BYTES`` are expected.

        Raises
        ------
        botocore.exceptions.ConnectionError, botocore.exceptions.HTTPClientError, IncompleteReadError
            If there is no connection, or it ends or stalls before the answer is complete.
        """
        with self._translated():
            connection = self._take()
            try:
                return self._exchange(connection, head, body, into, expect, most)
            except _Refused as refused:
                if not refused.silent or not again:
                    raise
            return self._exchange(_Connection(self.server), head, body, into, expect, most)

    def exchange_together(self, heads: Sequence[bytes], buffers: Sequence[memoryview]) -> list[Answer | None]:
        """Send requests without bodies, each over a connection of its own, then read their answers.

        The caller's thread waits for all of them at once, which takes less processor time than a thread for each.

        Parameters
        ----------
        heads
            As for :meth:`exchange`.
        buffers
            Where the bodies of successful answers go.

        Returns
        -------
        list of Answer or None
            ``None``: there is no connection, or it ended, stalled or sent no HTTP. Nothing is sent again.
        """
        taken: list[_Connection] = []
        answers: list[Answer | None] = [None] * len(heads)
        try:
            with suppress(*_BROKEN):
                for head in heads:
                    taken.append(self._take())
                    taken[-1].send(head, None, expect=False)
            for number, buffer in enumerate(buffers[: len(taken)]):
                lasting = False
                try:
                    answers[number], lasting = taken[number].answer(buffer)
                except (TimeoutError, BlockingIOError):  # the others would take as long, one after the other
                    break
                except _BROKEN:
                    continue
                finally:
                    self._give_back(taken[number], lasting)
        finally:
            for connection, answer in zip(taken, answers, strict=False):
                if answer is None:
                    connection.close()
        return answers

    def _exchange(
        self,
        connection: _Connection,
        head: bytes,
        body: memoryview | None,
        into: memoryview | None,
        expect: bool,
        most: int,
    ) -> Answer:
        lasting = False
        try:
            try:
                whole = connection.send(head, body, expect)
            except (BrokenPipeError, ConnectionResetError) as error:
                if not _is_readable(connection.socket, 0.0):
                    raise _Refused(True, error) from error
                whole = False  # the server has answered before it read everything
            try:
                answer, lasting = connection.answer(into, most)
            except ConnectionResetError as error:
                raise _Refused(not connection.answered, error) from error
            lasting = lasting and whole
            return answer
        finally:
            self._give_back(connection, lasting)

    def _take(self) -> _Connection:
        while True:
            with self._lock:
                connection = self._idle.pop() if self._idle else None
            if connection is None:
                return _Connection(self.server)
            if connection.is_usable():
                return connection
            connection.close()

    def _give_back(self, connection: _Connection, lasting: bool) -> None:
        connection.idle_since, connection.answered = time.monotonic(), False
        if lasting and not len(connection.rest):
            with self._lock:
                if len(self._idle) < MOST_IDLE:
                    self._idle.append(connection)
                    return
        connection.close()

    @contextmanager
    def _translated(self) -> Iterator[None]:
        """Failures of sockets as those of botocore's own clients."""
        url = self.server.url
        try:
            yield
        except _Refused as error:
            raise ConnectionClosedError(endpoint_url=url, error=error.cause or error) from error
        except Malformed as error:
            raise ConnectionClosedError(endpoint_url=url, error=error) from error
        except ssl.SSLError as error:
            raise SSLError(endpoint_url=url, error=error) from error
        except (TimeoutError, BlockingIOError) as error:
            raise ReadTimeoutError(endpoint_url=url, error=error) from error
        except OSError as error:
            raise ConnectionClosedError(endpoint_url=url, error=error) from error


def _close_all(connections: list[_Connection]) -> None:
    while connections:
        connections.pop().close()


def _connect(server: Server) -> socket.socket:
    """A new connection.

    Raises
    ------
    EndpointConnectionError, ConnectTimeoutError, SSLError
        If there is none.
    """
    try:
        connection = socket.create_connection((server.host, server.port), server.connect_seconds)
    except TimeoutError as error:
        raise ConnectTimeoutError(endpoint_url=server.url, error=error) from error
    except OSError as error:
        raise EndpointConnectionError(endpoint_url=server.url, error=error) from error
    try:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if server.tls is not None:
            connection = server.tls.wrap_socket(connection, server_hostname=server.host)
            connection.settimeout(server.read_seconds)
            return connection
        # The kernel measures the timeout, so that one system call may transfer a whole body.
        connection.settimeout(None)
        seconds = server.read_seconds or 0.0
        limit = struct.pack("@ll", int(seconds), int(seconds % 1 * 1e6))
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            connection.setsockopt(socket.SOL_SOCKET, option, limit)
        return connection
    except BaseException as error:
        connection.close()
        if isinstance(error, TimeoutError):
            raise ConnectTimeoutError(endpoint_url=server.url, error=error) from error
        raise


def _is_readable(connection: socket.socket, seconds: float) -> bool:
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    return bool(poll.poll(seconds * 1000))
