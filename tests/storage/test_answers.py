"""Stores that answer something else than was asked: each answer is read again, and none of it is ever used."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from http.server import ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from paddle_reshard.pipeline.core.errors import CheckpointError, TargetError
from paddle_reshard.storage.locate import open_source
from paddle_reshard.storage.remote.retry_counts import count_retries
from paddle_reshard.storage.s3 import uploads as requests
from paddle_reshard.storage.s3.folder import S3Folder
from paddle_reshard.storage.s3.uploads import PartCheck
from paddle_reshard.storage.store import Read
from tests.storage.servers import HOST, Quiet, serving
from tests.storage.test_reads import watch_botocore

CONTENT = random.Random(3).randbytes(1000)
TAG = '"0123456789abcdef0123456789abcdef"'
ENTRY = f"<Contents><Key>here/file</Key><Size>1000</Size><ETag>{TAG}</ETag></Contents>"
Told = tuple[int, dict[str, str], bytes]
"""Status, headers and body of an answer."""


class _Liar(ThreadingHTTPServer):
    """A store of one file. ``lie`` may change the next ``left`` answers to requests that are ``wanted``."""

    daemon_threads = True
    request_queue_size = 64
    left = 0
    wanted: Callable[[str], bool]
    lie: Callable[[Told, int, int], Told]
    asked: list[str]
    headers: list[dict[str, str]]
    """Of each request that was asked; names in lower case."""
    alone: threading.Lock

    @property
    def options(self) -> dict[str, Any]:
        return {"key": "k", "secret": "s", "endpoint_url": f"http://{HOST}:{self.server_address[1]}"}

    def tell(self, lie: Callable[[Told, int, int], Told], times: float, wanted: str) -> None:
        self.lie, self.left, self.wanted = lie, times, lambda path: wanted in path
        self.asked.clear()


class _Handler(Quiet):
    server: _Liar

    def answer(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.server.asked.append(self.path)
        self.server.headers.append({name.lower(): value for name, value in self.headers.items()})
        low, high = 0, len(CONTENT) - 1
        if "Range" in self.headers:
            low, high = map(int, self.headers["Range"].removeprefix("bytes=").split("-"))
        told = self.truth(low, high)
        with self.server.alone:
            lying = self.server.left > 0 and self.server.wanted(self.path)
            self.server.left -= lying
        self.tell(*(self.server.lie(told, low, high) if lying else told))

    do_GET = do_PUT = do_POST = do_DELETE = answer

    def truth(self, low: int, high: int) -> Told:
        query = parse_qs(urlsplit(self.path).query, keep_blank_values=True)
        if "list-type" in query:
            return 200, {}, f"<ListBucketResult><Prefix>here/</Prefix>{ENTRY}</ListBucketResult>".encode()
        if "uploads" in query:
            made = "<InitiateMultipartUploadResult><UploadId>u</UploadId></InitiateMultipartUploadResult>"
            return 200, {}, made.encode()
        if "uploadId" in query and self.command == "GET":
            part = f"<Part><PartNumber>1</PartNumber><Size>5</Size><ETag>{TAG}</ETag></Part>"
            return 200, {}, f"<ListPartsResult>{part}</ListPartsResult>".encode()
        if self.command == "GET":
            said = {"ETag": TAG, "Content-Range": f"bytes {low}-{high}/{len(CONTENT)}"}
            return 206, said, CONTENT[low : high + 1]
        return 200, {"ETag": TAG}, b""


@pytest.fixture
def liar() -> Iterator[_Liar]:
    server = _Liar((HOST, 0), _Handler)
    server.asked, server.headers, server.alone = [], [], threading.Lock()
    with serving(server):
        yield server


def _with(**headers: str) -> Callable[[Told, int, int], Told]:
    return lambda told, low, high: (told[0], {**told[1], **headers}, told[2])


def _placed(text: str) -> Callable[[Told, int, int], Told]:
    return lambda told, low, high: (206, {**told[1], "Content-Range": text.format(low, high)}, told[2])


def _from_another_place(told: Told, low: int, high: int) -> Told:
    """A whole answer of the right length, which says where it is from."""
    said = {"ETag": TAG, "Content-Range": f"bytes {low + 1}-{high + 1}/{len(CONTENT)}"}
    return 206, said, CONTENT[low + 1 : high + 2]


def _without(header: str) -> Callable[[Told, int, int], Told]:
    return lambda told, low, high: (told[0], {n: v for n, v in told[1].items() if n != header}, told[2])


WRONG = {
    "another place": _from_another_place,
    "no place": _without("Content-Range"),
    "another total": _placed("bytes {}-{}/999"),
    "an unknown total": _placed("bytes {}-{}/*"),
    "no numbers": _with(**{"Content-Range": "bytes \xb2-\xb3/\xb9"}),
    "another unit": _placed("lines {}-{}/1000"),
    "a whole file": lambda told, low, high: (200, {"ETag": TAG}, told[2]),
    "no content": lambda told, low, high: (203, told[1], told[2]),
    "fewer bytes": lambda told, low, high: (206, told[1], told[2][:-1]),
    "more bytes": lambda told, low, high: (206, told[1], told[2] + b"x"),
    "no version": _without("ETag"),
    "another version": _with(ETag=TAG.replace("0", "f")),
}


def _read(liar: _Liar, side_by_side: bool, knows: bool) -> None:
    """Read parts of the file, alone or together, from a store whose client has made a read before or has not."""
    source = open_source("s3://bucket/here", liar.options)
    if knows:
        lie, left = liar.lie, liar.left
        liar.left = 0
        source.read("file", 0, 1)
        liar.lie, liar.left = lie, left
        liar.asked.clear()
    starts = range(0, 900, 50) if side_by_side else [7]
    reads = [Read("file", start, memoryview(bytearray(40))) for start in starts]
    source.read_many(reads)
    assert [bytes(read.buffer) for read in reads] == [CONTENT[start : start + 40] for start in starts]


WAYS = pytest.mark.parametrize(
    ("side_by_side", "knows"),
    [(False, False), (False, True), (True, True)],
    ids=["first read", "later read", "side by side"],
)


@WAYS
@pytest.mark.parametrize("lie", WRONG.values(), ids=WRONG)
def test_an_answer_that_is_not_what_was_asked_is_read_again_and_never_believed(
    lie: Callable[[Told, int, int], Told], side_by_side: bool, knows: bool, liar: _Liar
) -> None:
    liar.tell(lie, 1, "here/file")
    _read(liar, side_by_side, knows)
    assert liar.left == 0
    liar.tell(lie, 10_000, "here/file")
    with pytest.raises(CheckpointError, match=r"^s3://bucket/here/file: ") as refused:
        _read(liar, side_by_side, knows)
    told = str(refused.value)
    if lie in (WRONG["no version"], WRONG["another version"]):
        assert told.endswith("here/file: changed while it was read") and not refused.value.retryable
    else:
        assert told.endswith("; gave up after 4 attempts")
    if lie is _from_another_place and not side_by_side:
        assert "the answer has 'bytes 8-47/1000', bytes 7-46/1000 were asked for" in told


def test_a_version_is_asked_for_twice_and_counted_once_before_the_source_is_accused(liar: _Liar) -> None:
    before = count_retries()
    liar.tell(WRONG["another version"], 100, "here/file")
    with pytest.raises(CheckpointError, match="changed while it was read"):
        _read(liar, False, False)
    assert sum("here/file" in path for path in liar.asked) == 2
    assert count_retries() - before == {"DamagedBody": 1}


def test_a_file_asked_for_as_a_whole_may_come_as_one(liar: _Liar) -> None:
    source = open_source("s3://bucket/here", liar.options)
    liar.tell(WRONG["a whole file"], 100, "here/file")
    assert [source.read("file", 0, 1000) for _ in range(2)] == [CONTENT, CONTENT]
    with pytest.raises(CheckpointError, match="status 200"):
        source.read("file", 0, 999)


# ------------------------------------------------------------------------------------------------ listings


def _listing(body: str) -> Callable[[Told, int, int], Told]:
    return lambda told, low, high: (200, {}, f"<ListBucketResult>{body}</ListBucketResult>".encode())


MORE = "<IsTruncated>true</IsTruncated>"
BAD_LISTINGS = {
    "leads back": (_listing(f"{ENTRY}{MORE}<NextContinuationToken>t</NextContinuationToken>"), "leads back"),
    "leads nowhere": (_listing(ENTRY + MORE), "does not say where"),
    "elsewhere": (_listing(ENTRY.replace("here/file", "there/file")), "names 'there/file'"),
    "a folder elsewhere": (_listing("<CommonPrefixes><Prefix>a/</Prefix></CommonPrefixes>"), "names 'a/'"),
    "no size": (_listing(ENTRY.replace("<Size>1000</Size>", "")), "no Size"),
    "a negative size": (_listing(ENTRY.replace("1000", "-1")), "no Size"),
    "no key": (_listing(ENTRY.replace("<Key>here/file</Key>", "")), "no Key"),
}


@pytest.mark.parametrize(("lie", "reason"), BAD_LISTINGS.values(), ids=BAD_LISTINGS)
def test_a_listing_ends_and_names_what_is_below_the_folder(
    lie: Callable[[Told, int, int], Told], reason: str, liar: _Liar
) -> None:
    liar.tell(lie, 100, "list-type")
    with pytest.raises(CheckpointError, match=reason):
        open_source("s3://bucket/here", liar.options)
    assert len(liar.asked) <= 6
    liar.tell(lie, 1 if "t</Next" not in reason else 2, "list-type")
    assert open_source("s3://bucket/here", liar.options).sizes() == {"file": 1000}


def test_a_listing_that_leads_back_later(liar: _Liar) -> None:
    """Two pages that name each other."""

    def lie(told: Told, low: int, high: int) -> Told:
        token = "b" if "continuation-token=a" in liar.asked[-1] else "a"
        return _listing(f"{ENTRY}{MORE}<NextContinuationToken>{token}</NextContinuationToken>")(
            told, low, high
        )

    liar.tell(lie, 10_000, "list-type")
    with pytest.raises(CheckpointError, match="leads back to an earlier one; gave up after 4 attempts"):
        open_source("s3://bucket/here", liar.options)
    assert len(liar.asked) < 10


# ------------------------------------------------------------------------------------------------- uploads


@pytest.fixture
def folder(liar: _Liar) -> S3Folder:
    return S3Folder("s3://bucket/here", liar.options, TargetError)


def _empty(told: Told, low: int, high: int) -> Told:
    return 200, {}, b""


def _nameless(root: str) -> Callable[[Told, int, int], Told]:
    return lambda told, low, high: (200, {}, f"<{root}><Part></Part></{root}>".encode())


SAYING_NOTHING: dict[str, tuple[str, Callable[[Told, int, int], Told], Callable[[S3Folder], object]]] = {
    "an upload": ("?uploads", _nameless("InitiateMultipartUploadResult"), lambda f: f.create_upload("a")),
    "an empty upload": ("?uploads", _empty, lambda f: f.create_upload("a")),
    "a part": ("partNumber", _empty, lambda f: requests.upload_part(f, "a", "u", 1, memoryview(b"part"),
        PartCheck.SIGNATURE)),
    "parts": ("uploadId", _nameless("ListPartsResult"), lambda f: requests.list_parts(f, "a", "u")),
    "a session": ("here/a", _empty, lambda f: f.put_if("a", b"content", None)),
    "a small file": ("here/a", _without("ETag"), lambda f: f.read_object("a")),
}  # fmt: skip


@pytest.mark.parametrize("knows", [False, True])
@pytest.mark.parametrize(("wanted", "lie", "ask"), SAYING_NOTHING.values(), ids=SAYING_NOTHING)
def test_a_success_that_says_nothing_is_none(
    wanted: str,
    lie: Callable[[Told, int, int], Told],
    ask: Callable[[S3Folder], object],
    knows: bool,
    liar: _Liar,
    folder: S3Folder,
) -> None:
    if knows:
        ask(folder)
    liar.tell(lie, 1, wanted)
    before = count_retries()
    folder.attempt("a", ask, folder)
    assert count_retries() - before == {"DamagedBody": 1}
    liar.tell(lie, 100, wanted)
    with pytest.raises(TargetError, match=r"the answer has no [A-Za-z]+; gave up after 4 attempts"):
        folder.attempt("a", ask, folder)


# ------------------------------------------------------------------------------------------------- headers


TOKEN = {"key": "k", "secret": "s", "token": "t"}
SSE_C = {"SSECustomerKey": "0" * 32, "SSECustomerAlgorithm": "AES256"}


@pytest.mark.parametrize(
    ("options", "wanted", "by_library"),
    [
        ({"key": "k", "secret": "s"}, {"if-match": TAG}, True),
        (TOKEN, {"x-amz-security-token": "t"}, True),
        ({"anon": True}, {}, True),
        ({**TOKEN, "local_expiry_check": True}, {}, True),
        ({**TOKEN, "requester_pays": True}, {"x-amz-request-payer": "requester"}, False),
        (
            {**TOKEN, "s3_additional_kwargs": SSE_C},
            {"x-amz-server-side-encryption-customer-algorithm": "AES256", "x-amz-security-token": "t"},
            False,
        ),
        ({**TOKEN, "config_kwargs": {"response_checksum_validation": "when_supported"}}, {}, False),
        ({**TOKEN, "config_kwargs": {"signature_version": "s3"}}, {}, False),
    ],
)
def test_reads_say_what_the_user_wants_of_every_request(
    options: dict[str, Any], wanted: dict[str, str], by_library: bool, liar: _Liar
) -> None:
    source = open_source("s3://bucket/here", {**options, "endpoint_url": liar.options["endpoint_url"]})
    liar.asked.clear()
    liar.headers.clear()
    by_botocore = watch_botocore(source)
    for start in (0, 10, 30):
        assert source.read("file", start, 10) == CONTENT[start : start + 10]
    assert len(by_botocore) == (0 if by_library else 3)
    for number, headers in enumerate(liar.headers):
        assert wanted.items() <= headers.items()
        assert headers["range"] == ("bytes=0-9", "bytes=10-19", "bytes=30-39")[number]
        assert ("authorization" in headers) == ("key" in options)
        assert ("if-match" in headers) == ("local_expiry_check" not in options)
        assert headers.get("x-amz-security-token") == options.get("token")
        assert "X-Amz" not in liar.asked[number]
