"""How long does it take to index the rank files of a large job in an object store that answers late?

    python -m benchmarks.indexing [--latency 0.03] [--files 256] [--in-flight 16 32 64 128] [--workers 1 2]

A server of its own process on 127.0.0.1 answers as S3 does, each request after the latency: the files are those of a
70B model on 512 ranks (`benchmarks.synthetic`), whose payloads are zeros that lie nowhere. It checks no signature and
costs about a seventh of the client's processor time, so the client's is what counts.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

from benchmarks.planning import job
from benchmarks.synthetic import LLAMA_70B, EmptySource, files_of
from paddle_reshard.pipeline.checkpoint.reading import IndexFiles, Readable, index_tensor_file
from paddle_reshard.pipeline.formats.hybrid.names import parse_rank_file
from paddle_reshard.storage.locate import open_source
from paddle_reshard.storage.store import Source
from paddle_reshard.tasks import index

PLACE, PREFIX = "s3://checkpoints/one", "/checkpoints/one/"
ETAG = '"00000000000000000000000000000000"'
PAGE = 1000


# -------------------------------------------------------------------------------------------------- server


class Connection(asyncio.Protocol):
    """Answers listings and ranged reads, each after a while."""

    def __init__(self, source: EmptySource, latency_seconds: float) -> None:
        self.source, self.latency_seconds, self.received = source, latency_seconds, b""

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.received += data
        while b"\r\n\r\n" in self.received:
            head, _, self.received = self.received.partition(b"\r\n\r\n")
            asyncio.get_running_loop().call_later(self.latency_seconds, self.answer, head.decode())

    def answer(self, head: str) -> None:
        url = urlsplit(head.split(" ", 2)[1])
        if "list-type" in url.query:
            self.send(200, self.listing(parse_qs(url.query)).encode())
            return
        name = unquote(url.path).removeprefix(PREFIX)
        found = re.search(r"^range: bytes=(\d+)-(\d+)", head, re.IGNORECASE | re.MULTILINE)
        if found is None or name not in self.source.sizes():
            self.send(404, b"<Error><Code>NoSuchKey</Code></Error>")
            return
        start, stop = int(found[1]), int(found[2]) + 1
        said = f"Content-Range: bytes {start}-{stop - 1}/{self.source.sizes()[name]}\r\n"
        self.send(206, self.source.read(name, start, stop - start), said)

    def send(self, status: int, body: bytes, said: str = "") -> None:
        if not self.transport.is_closing():
            head = f"HTTP/1.1 {status} As asked\r\nContent-Length: {len(body)}\r\nETag: {ETAG}\r\n{said}\r\n"
            self.transport.write(head.encode() + body)

    def listing(self, query: dict[str, list[str]]) -> str:
        names = sorted(self.source.sizes()) if query["prefix"] == ["one/"] else []
        start = int(query.get("continuation-token", ["0"])[0])
        entries = "".join(
            f"<Contents><Key>one/{escape(name)}</Key><ETag>{escape(ETAG)}</ETag>"
            f"<Size>{self.source.sizes()[name]}</Size></Contents>"
            for name in names[start : start + PAGE]
        )
        more = start + PAGE < len(names)
        token = f"<NextContinuationToken>{start + PAGE}</NextContinuationToken>" if more else ""
        truncated = f"<IsTruncated>{str(more).lower()}</IsTruncated>"
        return f"<ListBucketResult>{truncated}{token}{entries}</ListBucketResult>"


async def serve(port: int, latency_seconds: float) -> None:
    files = files_of(LLAMA_70B, job(tp=8, pp=4, sharding=16))
    source = EmptySource(files, json.dumps(LLAMA_70B.config).encode())
    loop = asyncio.get_running_loop()
    server = await loop.create_server(
        lambda: Connection(source, latency_seconds), "127.0.0.1", port, backlog=1024
    )
    print("ready", flush=True)
    await server.serve_forever()


@contextlib.contextmanager
def running_server(latency_seconds: float) -> Iterator[str]:
    """The server's URL."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        sys.executable,
        "-m",
        "benchmarks.indexing",
        "--serve",
        str(port),
        "--latency",
        str(latency_seconds),
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    try:
        if process.stdout is None or not process.stdout.readline():
            raise RuntimeError("the server did not start")
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()


# -------------------------------------------------------------------------------------------------- client


def count_reads(store: Readable, path: str, size_bytes: int) -> int:
    """Index a file, and say how many reads that took."""
    reads = 0

    class Counted:
        def read(self, path: str, byte_offset: int, nbytes: int) -> bytes:
            nonlocal reads
            reads += 1
            return store.read(path, byte_offset, nbytes)

    index_tensor_file(Counted(), path, size_bytes)
    return reads


def measure(name: str, index_files: IndexFiles, source: Source, sizes: dict[str, int], reads: int) -> None:
    began, processor = time.perf_counter(), time.process_time()
    index_files(index_tensor_file, source, sizes)
    seconds, processor = time.perf_counter() - began, time.process_time() - processor
    print(
        f"{name:24} {seconds:6.1f} s  {reads / seconds:6.0f} requests/s  "
        f"{processor / reads * 1e3:.2f} ms of this process each",
        flush=True,
    )


def run(latency_seconds: float, files: int, at_a_time: list[int], workers: list[int]) -> None:
    with running_server(latency_seconds) as url:
        source = open_source(PLACE, {"key": "key", "secret": "secret", "endpoint_url": url})
        ranks = [path for path in source.sizes() if parse_rank_file(path) is not None]
        chosen = sorted(ranks, key=lambda path: -source.sizes()[path])[:files]
        sizes = {path: source.sizes()[path] for path in chosen}
        reads = sum(index.index_here(count_reads, source, sizes).values())
        print(f"{files} rank files, {reads} requests, {latency_seconds * 1e3:.0f} ms each")
        usual = index.FILES_IN_FLIGHT
        for in_flight in at_a_time:
            index.FILES_IN_FLIGHT = in_flight
            measure(f"here, {in_flight} in flight", index.index_here, source, sizes, reads)
        index.FILES_IN_FLIGHT = usual
        if workers:
            import ray

            from paddle_reshard.clusters.ray.engine import RayEngine

            ray.init(num_cpus=max(workers), include_dashboard=False, log_to_driver=False)
            for count in workers:
                on_ray = RayEngine(workers=count).indexing()
                on_ray(index_tensor_file, source, sizes)  # workers start
                measure(f"Ray, {count} workers", on_ray, source, sizes, reads)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--latency", type=float, default=0.03, metavar="SECONDS")
    parser.add_argument("--files", type=int, default=256)
    parser.add_argument("--in-flight", type=int, nargs="*", default=[16, 32, 64, 128], help="files at a time")
    parser.add_argument("--workers", type=int, nargs="*", default=[1, 2], help="on Ray; none: only here")
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        asyncio.run(serve(given.serve, given.latency))
    else:
        run(given.latency, given.files, given.in_flight, given.workers)
