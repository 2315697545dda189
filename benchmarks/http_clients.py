"""What HTTP costs the client: processor time per gigabyte and per small request, of several clients in turns.

    python -m benchmarks.http_clients [--rounds 3] [--clients ours http.client ...] [--plain | --tls]

A server of its own process answers from memory and verifies nothing; its processor time does not count. Its
certificate is verified by every client. Each contender is a process of its own in every round: eight threads read
ranges of 8 MiB into buffers of the caller, upload parts of 16 MiB from such buffers, and read 64 KiB at a time. What
arrived is compared with what was asked for: the last read of every thread in each round, and a part that the server
has to answer with its checksum. Contenders that are not installed are named and left out.
"""

from __future__ import annotations

import argparse
import datetime
import http.client
import importlib.util
import io
import ipaddress
import json
import re
import resource
import socket
import ssl
import statistics
import subprocess
import sys
import tempfile
import threading
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from benchmarks.measure import load, machine, table

HOST, NAME = "127.0.0.1", "localhost"
CONTENT_BYTES = 64 << 20
READ_BYTES, PART_BYTES, SMALL_BYTES = 8 << 20, 16 << 20, 64 << 10
READS, PARTS, SMALLS, THREADS = 64, 32, 3000, 8


def content() -> bytes:
    """What the server has: no two ranges are alike."""
    word = 0x9E3779B97F4A7C15
    block = bytes((word * i >> 24) & 255 for i in range(65521))
    return (block * (CONTENT_BYTES // len(block) + 1))[:CONTENT_BYTES]


# -------------------------------------------------------------------------------------------------- server


def serve(certificate: Path) -> None:
    """Serve until the parent is gone; prints the ports without and with TLS."""
    whole = memoryview(content())
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    listeners = [socket.create_server((HOST, 0), backlog=256) for _ in range(2)]
    for listener, tls in zip(listeners, (None, context), strict=True):
        threading.Thread(target=_accept, args=(listener, tls, whole), daemon=True).start()
    print(*(listener.getsockname()[1] for listener in listeners), flush=True)
    sys.stdin.read()


def _accept(listener: socket.socket, tls: ssl.SSLContext | None, whole: memoryview) -> None:
    while True:
        connection, _ = listener.accept()
        threading.Thread(target=_connection, args=(connection, tls, whole), daemon=True).start()


def _connection(connection: socket.socket, tls: ssl.SSLContext | None, whole: memoryview) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    try:
        with tls.wrap_socket(connection, server_side=True) if tls else connection as peer:
            scratch = memoryview(bytearray(PART_BYTES))
            received = b""
            while True:
                while b"\r\n\r\n" not in received:
                    if not (some := peer.recv(1 << 16)):
                        return
                    received += some
                head, _, received = received.partition(b"\r\n\r\n")
                received = _answer(peer, head, received, scratch, whole)
    except OSError:
        return


def _answer(
    peer: socket.socket, head: bytes, received: bytes, scratch: memoryview, whole: memoryview
) -> bytes:
    """Answer one request; what was received of the next."""
    if head.startswith(b"PUT"):
        length = int(re.search(rb"content-length: *(\d+)", head, re.IGNORECASE)[1])
        done = min(len(received), length)
        scratch[:done] = received[:done]
        received = received[done:]
        while done < length:
            done += peer.recv_into(scratch[done:length])
        etag = zlib.crc32(scratch[:length]) if b"/check" in head else 0
        peer.sendall(f'HTTP/1.1 200 OK\r\nETag: "{etag}"\r\nContent-Length: 0\r\n\r\n'.encode())
        return received
    asked = re.search(rb"range: *bytes=(\d+)-(\d+)", head, re.IGNORECASE)
    start, stop = int(asked[1]), int(asked[2]) + 1
    answer = (
        f'HTTP/1.1 206 Partial Content\r\nETag: "e"\r\nContent-Length: {stop - start}\r\n'
        f"Last-Modified: Sun, 22 Nov 2026 00:00:00 GMT\r\n"
        f"Content-Range: bytes {start}-{stop - 1}/{len(whole)}\r\n\r\n"
    ).encode()
    if stop - start <= SMALL_BYTES:
        peer.sendall(answer + whole[start:stop])
    else:
        peer.sendall(answer)
        peer.sendall(whole[start:stop])
    return received


def make_certificate(path: Path) -> None:
    """A certificate for the server and its key, and that of the authority that signed it."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    now = datetime.datetime.now(datetime.timezone.utc)

    def made(name: str, key: Any, issuer: str, issuer_key: Any, *extensions: Any) -> Any:
        subject, by = (x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, n)]) for n in (name, issuer))
        builder = x509.CertificateBuilder(by, subject, key.public_key(), x509.random_serial_number())
        builder = builder.not_valid_before(now - datetime.timedelta(days=1))
        builder = builder.not_valid_after(now + datetime.timedelta(days=1))
        for extension in extensions:
            builder = builder.add_extension(extension, isinstance(extension, x509.BasicConstraints))
        return builder.sign(issuer_key, hashes.SHA256())

    authority, key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    names = x509.SubjectAlternativeName([x509.DNSName(NAME), x509.IPAddress(ipaddress.ip_address(HOST))])
    usage = x509.ExtendedKeyUsage([x509.ExtendedKeyUsageOID.SERVER_AUTH])
    pem = serialization.Encoding.PEM
    secret = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    root = made("authority", authority, "authority", authority, x509.BasicConstraints(True, None))
    path.with_suffix(".crt").write_bytes(root.public_bytes(pem))
    leaf = made(NAME, key, "authority", authority, names, x509.BasicConstraints(False, None), usage)
    path.write_bytes(leaf.public_bytes(pem) + secret)


# ------------------------------------------------------------------------------------------------- clients


class Client(Protocol):
    """A contender. Several threads use it at a time."""

    def read(self, start: int, buffer: memoryview) -> None: ...

    def upload(self, path: str, buffer: memoryview) -> str: ...


Address = tuple[int, Path | None]
"""Port, and the authority of the server's certificate; ``None``: no TLS."""


def _range(start: int, buffer: memoryview) -> str:
    return f"bytes={start}-{start + len(buffer) - 1}"


def _context(authority: Path) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(authority))


class Ours:
    """`storage/s3/wire.py`."""

    def __init__(self, port: int, authority: Path | None) -> None:
        from paddle_reshard.storage.s3.wire import Connections, Server

        self.connections = Connections(Server(NAME, port, _context(authority) if authority else None))

    def read(self, start: int, buffer: memoryview) -> None:
        head = f"GET /a HTTP/1.1\r\nhost: {NAME}\r\nrange: {_range(start, buffer)}\r\n\r\n".encode()
        if self.connections.exchange(head, into=buffer).filled != len(buffer):
            raise ValueError("not the length that was asked for")

    def upload(self, path: str, buffer: memoryview) -> str:
        head = f"PUT {path} HTTP/1.1\r\nhost: {NAME}\r\ncontent-length: {len(buffer)}\r\n\r\n".encode()
        return str(self.connections.exchange(head, buffer).headers["etag"])


class Standard:
    """`http.client`, which receives into the caller's buffer by `readinto`."""

    def __init__(self, port: int, authority: Path | None) -> None:
        self.port, self.context = port, _context(authority) if authority else None
        self.local = threading.local()

    def connection(self) -> http.client.HTTPConnection:
        if not hasattr(self.local, "connection"):
            self.local.connection = (
                http.client.HTTPSConnection(NAME, self.port, context=self.context)
                if self.context
                else http.client.HTTPConnection(NAME, self.port)
            )
        return self.local.connection

    def read(self, start: int, buffer: memoryview) -> None:
        connection = self.connection()
        connection.request("GET", "/a", headers={"range": _range(start, buffer)})
        answer = connection.getresponse()
        done = 0
        while done < len(buffer) and (count := answer.readinto(buffer[done:])):
            done += count
        answer.read()
        if done != len(buffer):
            raise ValueError("not the length that was asked for")

    def upload(self, path: str, buffer: memoryview) -> str:
        connection = self.connection()
        connection.putrequest("PUT", path)
        connection.putheader("content-length", str(len(buffer)))
        connection.endheaders()
        connection.sock.sendall(buffer)
        answer = connection.getresponse()
        answer.read()
        return str(answer.headers["etag"])


class InSteps:
    """A socket of the standard library's TLS over memory, filled by large receives: fewer system calls per record."""

    def __init__(self, connection: socket.socket, context: ssl.SSLContext, name: str) -> None:
        self.socket = connection
        self.incoming, self.outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.tls = context.wrap_bio(self.incoming, self.outgoing, server_hostname=name)
        self.scratch = memoryview(bytearray(256 << 10))
        while True:
            try:
                self.tls.do_handshake()
                break
            except ssl.SSLWantReadError:
                self._flush()
                self._more()
        self._flush()

    def _flush(self) -> None:
        if self.outgoing.pending:
            self.socket.sendall(self.outgoing.read())

    def _more(self) -> None:
        count = self.socket.recv_into(self.scratch)
        if count:
            self.incoming.write(self.scratch[:count])
        else:
            self.incoming.write_eof()

    def recv_into(self, buffer: memoryview) -> int:
        done = 0
        while done < len(buffer):
            try:
                count = self.tls.read(len(buffer) - done, buffer[done:])
            except ssl.SSLWantReadError:
                if done:
                    break
                self._more()
                continue
            if not count:
                break
            done += count
        return done

    def sendall(self, data: Any) -> None:
        view = memoryview(data).cast("B")
        for start in range(0, len(view), 256 << 10):
            self.tls.write(view[start : start + (256 << 10)])
            self._flush()

    def makefile(self, mode: str) -> Any:
        return io.BufferedReader(_Raw(self), 16 << 10)

    def close(self) -> None:
        self.socket.close()


class _Raw(io.RawIOBase):
    def __init__(self, below: InSteps) -> None:
        self.below = below

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        return self.below.recv_into(memoryview(buffer))


class StandardInSteps(Standard):
    """`http.client` over TLS in memory."""

    def connection(self) -> http.client.HTTPConnection:
        if self.context is None or hasattr(self.local, "connection"):
            return super().connection()
        self.local.connection = http.client.HTTPConnection(NAME, self.port)
        below = socket.create_connection((NAME, self.port))
        below.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.local.connection.sock = InSteps(below, self.context, NAME)
        return self.local.connection


class Urllib3:
    def __init__(self, port: int, authority: Path | None) -> None:
        import urllib3

        self.pool: Any = (
            urllib3.HTTPSConnectionPool(NAME, port, maxsize=THREADS, ca_certs=str(authority))
            if authority
            else urllib3.HTTPConnectionPool(NAME, port, maxsize=THREADS)
        )

    def read(self, start: int, buffer: memoryview) -> None:
        answer = self.pool.request(
            "GET", "/a", headers={"range": _range(start, buffer)}, preload_content=False
        )
        done = 0
        while done < len(buffer) and (some := answer.read(min(1 << 20, len(buffer) - done))):
            buffer[done : done + len(some)] = some
            done += len(some)
        answer.drain_conn()
        answer.release_conn()
        if done != len(buffer):
            raise ValueError("not the length that was asked for")

    def upload(self, path: str, buffer: memoryview) -> str:
        return str(self.pool.request("PUT", path, body=buffer).headers["etag"])


class PyCurl:
    def __init__(self, port: int, authority: Path | None) -> None:
        self.url = f"{'https' if authority else 'http'}://{NAME}:{port}"
        self.authority, self.local = authority, threading.local()

    def _curl(self) -> Any:
        import pycurl

        if not hasattr(self.local, "curl"):
            self.local.curl = pycurl.Curl()
        curl = self.local.curl
        curl.reset()
        curl.setopt(pycurl.BUFFERSIZE, 512 << 10)
        curl.setopt(pycurl.UPLOAD_BUFFERSIZE, 2 << 20)
        curl.setopt(pycurl.NOSIGNAL, 1)
        if self.authority:
            curl.setopt(pycurl.CAINFO, str(self.authority))
        return curl

    def read(self, start: int, buffer: memoryview) -> None:
        import pycurl

        done = 0

        def take(some: bytes) -> None:
            nonlocal done
            buffer[done : done + len(some)] = some
            done += len(some)

        curl = self._curl()
        curl.setopt(pycurl.URL, f"{self.url}/a")
        curl.setopt(pycurl.RANGE, _range(start, buffer).removeprefix("bytes="))
        curl.setopt(pycurl.WRITEFUNCTION, take)
        curl.perform()
        if done != len(buffer):
            raise ValueError("not the length that was asked for")

    def upload(self, path: str, buffer: memoryview) -> str:
        import pycurl

        done, heads = 0, io.BytesIO()

        def give(count: int) -> bytes:
            nonlocal done
            some = bytes(buffer[done : done + count])
            done += len(some)
            return some

        curl = self._curl()
        curl.setopt(pycurl.URL, self.url + path)
        curl.setopt(pycurl.UPLOAD, 1)
        curl.setopt(pycurl.INFILESIZE_LARGE, len(buffer))
        curl.setopt(pycurl.READFUNCTION, give)
        curl.setopt(pycurl.HTTPHEADER, ["expect:"])
        curl.setopt(pycurl.HEADERFUNCTION, heads.write)
        curl.setopt(pycurl.WRITEFUNCTION, lambda _: None)
        curl.perform()
        return re.search(r"etag: *(\S+)", heads.getvalue().decode(), re.IGNORECASE)[1]


class AwsCrtHttp:
    """`awscrt.http`: bodies arrive by callbacks, and are sent from a stream."""

    def __init__(self, port: int, authority: Path | None) -> None:
        from awscrt import io as crt

        self.port, self.local = port, threading.local()
        group = crt.EventLoopGroup(2)
        self.bootstrap = crt.ClientBootstrap(group, crt.DefaultHostResolver(group))
        self.tls = None
        if authority:
            options = crt.TlsContextOptions()
            options.override_default_trust_store_from_path(None, str(authority))
            self.tls = crt.ClientTlsContext(options)

    def connection(self) -> Any:
        from awscrt import http as crt

        if not hasattr(self.local, "connection"):
            options = None
            if self.tls:
                options = self.tls.new_connection_options()
                options.set_server_name(NAME)
            self.local.connection = crt.HttpClientConnection.new(
                NAME, self.port, self.bootstrap, tls_connection_options=options
            ).result()
        return self.local.connection

    def read(self, start: int, buffer: memoryview) -> None:
        from awscrt import http as crt

        done = 0

        def take(http_stream: Any, chunk: bytes, **_: Any) -> None:
            nonlocal done
            buffer[done : done + len(chunk)] = chunk
            done += len(chunk)

        headers = crt.HttpHeaders([("host", NAME), ("range", _range(start, buffer))])
        stream = self.connection().request(crt.HttpRequest("GET", "/a", headers), on_body=take)
        stream.activate()
        stream.completion_future.result()
        if done != len(buffer):
            raise ValueError("not the length that was asked for")

    def upload(self, path: str, buffer: memoryview) -> str:
        from awscrt import http as crt

        found: dict[str, str] = {}
        headers = crt.HttpHeaders([("host", NAME), ("content-length", str(len(buffer)))])
        request = crt.HttpRequest("PUT", path, headers, body_stream=_Stream(buffer))

        def note(http_stream: Any, status_code: int, headers: list[tuple[str, str]], **_: Any) -> None:
            found.update({name.lower(): value for name, value in headers})

        stream = self.connection().request(request, on_response=note)
        stream.activate()
        stream.completion_future.result()
        return found["etag"]


class _Stream(io.RawIOBase):
    """A buffer that reads as a file."""

    def __init__(self, buffer: memoryview) -> None:
        self.buffer, self.at = buffer, 0

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


class AwsCrtS3:
    """`awscrt.s3`: the client of the AWS SDK in C; bodies arrive in whole parts."""

    def __init__(self, port: int, authority: Path | None) -> None:
        from awscrt import io as crt
        from awscrt import s3

        group = crt.EventLoopGroup(2)
        self.bootstrap = crt.ClientBootstrap(group, crt.DefaultHostResolver(group))
        self.host, options = f"{NAME}:{port}", None
        if authority:
            chosen = crt.TlsContextOptions()
            chosen.override_default_trust_store_from_path(None, str(authority))
            options = crt.ClientTlsContext(chosen).new_connection_options()
        self.client = s3.S3Client(
            bootstrap=self.bootstrap,
            region="us-east-1",
            tls_mode=s3.S3RequestTlsMode.ENABLED if authority else s3.S3RequestTlsMode.DISABLED,
            tls_connection_options=options,
            part_size=PART_BYTES,
            throughput_target_gbps=10.0,
        )

    def _make(self, request: Any, operation: str, **more: Any) -> None:
        from awscrt import s3

        self.client.make_request(
            type=s3.S3RequestType.DEFAULT,
            operation_name=operation,
            request=request,
            **more,
        ).finished_future.result()

    def read(self, start: int, buffer: memoryview) -> None:
        from awscrt import http as crt

        done = 0

        def take(chunk: bytes, offset: int, **_: Any) -> None:
            nonlocal done
            buffer[done : done + len(chunk)] = chunk
            done += len(chunk)

        headers = crt.HttpHeaders([("host", self.host), ("range", _range(start, buffer))])
        self._make(crt.HttpRequest("GET", "/a", headers), "GetObject", on_body=take)
        if done != len(buffer):
            raise ValueError("not the length that was asked for")

    def upload(self, path: str, buffer: memoryview) -> str:
        from awscrt import http as crt

        found: dict[str, str] = {}
        headers = crt.HttpHeaders([("host", self.host), ("content-length", str(len(buffer)))])
        request = crt.HttpRequest("PUT", path, headers, body_stream=_Stream(buffer))

        def note(status_code: int, headers: list[tuple[str, str]], **_: Any) -> None:
            found.update({name.lower(): value for name, value in headers})

        self._make(request, "UploadPart", on_headers=note)
        return found["etag"]


class Obstore:
    """`obstore` over plain HTTP; its uploads copy the buffer."""

    def __init__(self, port: int, authority: Path | None) -> None:
        from obstore.store import HTTPStore

        options: dict[str, Any] = {"allow_http": True}
        if authority:
            options["root_certificate"] = authority.read_text()
        self.store = HTTPStore(f"{'https' if authority else 'http'}://{NAME}:{port}", client_options=options)

    def read(self, start: int, buffer: memoryview) -> None:
        import obstore

        buffer[:] = memoryview(obstore.get_range(self.store, "a", start=start, length=len(buffer)))

    def upload(self, path: str, buffer: memoryview) -> str:
        import obstore

        return str(obstore.put(self.store, path[1:], buffer, use_multipart=False)["e_tag"])


CLIENTS: dict[str, tuple[str, Callable[..., Client]]] = {
    "ours": ("paddle_reshard", Ours),
    "http.client": ("http", Standard),
    "http.client, TLS in memory": ("http", StandardInSteps),
    "urllib3": ("urllib3", Urllib3),
    "pycurl": ("pycurl", PyCurl),
    "awscrt.http": ("awscrt", AwsCrtHttp),
    "awscrt.s3": ("awscrt", AwsCrtS3),
    "obstore": ("obstore", Obstore),
}


# ------------------------------------------------------------------------------------------------- measure


def contend(name: str, port: int, authority: Path | None) -> dict[str, float]:
    """Run one contender; processor seconds per GB, and milliseconds per small read."""
    client, whole = CLIENTS[name][1](port, authority), content()
    buffers = [memoryview(bytearray(PART_BYTES)) for _ in range(THREADS)]
    part = memoryview(bytearray(whole[:PART_BYTES]))
    if client.upload("/check", part) != f'"{zlib.crc32(part)}"':
        raise ValueError(f"{name}: the server has received other bytes")

    def read(nbytes: int, count: int) -> Callable[[int], None]:
        def work(thread: int) -> None:
            buffer = buffers[thread][:nbytes]
            for number in range(thread, count, THREADS):
                start = (number * 1_234_577) % (CONTENT_BYTES - nbytes)
                client.read(start, buffer)
            if buffer != whole[start : start + nbytes]:
                raise ValueError(f"{name}: other bytes than were asked for")

        return work

    def upload(thread: int) -> None:
        for _ in range(thread, PARTS, THREADS):
            client.upload("/a", part)

    with ThreadPoolExecutor(THREADS) as pool:

        def measured(work: Callable[[int], None]) -> float:
            before = resource.getrusage(resource.RUSAGE_SELF)
            list(pool.map(work, range(THREADS)))
            after = resource.getrusage(resource.RUSAGE_SELF)
            return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

        measured(read(READ_BYTES, THREADS))  # connections are made, memory is touched
        return {
            "read": measured(read(READ_BYTES, READS)) / (READS * READ_BYTES / 1e9),
            "upload": measured(upload) / (PARTS * PART_BYTES / 1e9),
            "small": measured(read(SMALL_BYTES, SMALLS)) / SMALLS * 1e3,
        }


@contextmanager
def server(folder: Path) -> Iterator[tuple[int, int, Path]]:
    """Ports without and with TLS, and the authority of the certificate."""
    certificate = folder / "server.pem"
    make_certificate(certificate)
    command = [sys.executable, "-m", "benchmarks.http_clients", "--serve", str(certificate)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        plain, tls = map(int, process.stdout.readline().split())
        yield plain, tls, certificate.with_suffix(".crt")
        process.stdin.close()


def compare(names: list[str], rounds: int, kinds: list[bool]) -> str:
    """All contenders in turns; a table of medians."""
    found: dict[tuple[str, bool], list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as folder, server(Path(folder)) as (plain, tls, authority):
        for number in range(rounds):
            for secure in kinds:
                for name in names[number % len(names) :] + names[: number % len(names)]:
                    where = [str(tls), str(authority)] if secure else [str(plain)]
                    command = [sys.executable, "-m", "benchmarks.http_clients", "--contend", name, *where]
                    answer = subprocess.run(command, capture_output=True, text=True, check=False)
                    if answer.returncode:
                        print(f"{name} failed:\n{answer.stderr[-1500:]}", file=sys.stderr)
                        continue
                    figures = json.loads(answer.stdout)
                    found.setdefault((name, secure), []).append(figures)
                    shown = "  ".join(f"{what} {value:.2f}" for what, value in figures.items())
                    print(f"  {number + 1}/{rounds} {name}{', TLS' if secure else ''}: {shown}", flush=True)
    head = ["client"]
    for secure in kinds:
        head += [f"{what}{', TLS' if secure else ''}" for what in ("read", "upload", "64 KiB, ms")]
    rows = []
    for name in names:
        row = [name]
        for secure in kinds:
            runs = found.get((name, secure), [])
            row += [
                f"{statistics.median(run[what] for run in runs):.2f} "
                f"({min(run[what] for run in runs):.2f}–{max(run[what] for run in runs):.2f})"
                if runs
                else "failed"
                for what in ("read", "upload", "small")
            ]
        rows.append(row)
    return table(head, rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--clients", nargs="*", default=list(CLIENTS), choices=list(CLIENTS))
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--plain", action="store_true", help="only without TLS")
    only.add_argument("--tls", action="store_true", help="only with TLS")
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--contend", nargs="+", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        serve(given.serve)
        return
    if given.contend:
        name, port, *authority = given.contend
        print(json.dumps(contend(name, int(port), Path(authority[0]) if authority else None)))
        return
    names = [name for name in given.clients if importlib.util.find_spec(CLIENTS[name][0])]
    if absent := set(given.clients) - set(names):
        print(f"not installed: {', '.join(sorted(absent))}")
    kinds = [False] if given.plain else [True] if given.tls else [False, True]
    print(load("before"), flush=True)
    text = compare(names, given.rounds, kinds)
    print("\n".join(f"- {fact}" for fact in [*machine(Path(tempfile.gettempdir())), load("after")]))
    print(text)


if __name__ == "__main__":
    main()
