"""The record of a session is replaced on condition; not every store reads the condition as it is written."""

import hashlib
from collections.abc import Iterator
from http.server import ThreadingHTTPServer

import pytest

from paddle_reshard.pipeline.core.errors import TargetError
from paddle_reshard.storage.s3.folder import S3Folder
from tests.storage.servers import CHANGED, NO_SUCH_KEY, Quiet, serving


class _Object(ThreadingHTTPServer):
    """A store of one object."""

    daemon_threads = True
    quoted: bool
    """Whether an ETag in quotes is known; Ceph 16 takes it for another one."""
    content: bytes | None = None
    asked: list[str | None]
    """The condition of every write."""
    loses_answers = False
    """Whether a write is answered as one that came twice: done by the first, refused to the second."""
    encrypts = False
    """Whether ETags are no MD5, as where a store encrypts with a key."""

    @property
    def tag(self) -> str:
        algorithm = hashlib.sha256 if self.encrypts else hashlib.md5
        return algorithm(self.content or b"", usedforsecurity=False).hexdigest()[:32]

    def holds(self, match: str | None, none_match: str | None) -> bool:
        if none_match is not None:
            return self.content is None
        known = {f'"{self.tag}"', self.tag} if self.quoted else {self.tag}
        return match is None or (self.content is not None and match in known)


class _Handler(Quiet):
    server: _Object

    def answer(self, status: int, body: bytes = b"") -> None:
        self.tell(status, {"ETag": f'"{self.server.tag}"'}, body)

    def do_GET(self) -> None:
        content = self.server.content
        self.answer(404, NO_SUCH_KEY) if content is None else self.answer(200, content)

    def do_PUT(self) -> None:
        content = self.rfile.read(int(self.headers["Content-Length"]))
        match, none_match = self.headers.get("If-Match"), self.headers.get("If-None-Match")
        self.server.asked.append(match or none_match)
        if not self.server.holds(match, none_match):
            self.answer(412, CHANGED)
            return
        self.server.content = content
        self.answer(412, CHANGED) if self.server.loses_answers else self.answer(200)


@pytest.fixture(params=[True, False], ids=["quotes", "no quotes"])
def server(request: pytest.FixtureRequest) -> Iterator[_Object]:
    server = _Object(("127.0.0.1", 0), _Handler)
    server.quoted, server.asked = request.param, []
    with serving(server):
        yield server


@pytest.fixture
def folder(server: _Object) -> S3Folder:
    host, port = server.server_address[:2]
    options = {"key": "k", "secret": "s", "endpoint_url": f"http://{host!s}:{port}"}
    return S3Folder("s3://bucket/c", options, TargetError)


def test_an_object_is_replaced_if_it_is_the_one_that_was_read(server: _Object, folder: S3Folder) -> None:
    first = folder.put_if("a", b"one", None)
    assert folder.read_object("a") == (b"one", first)
    assert folder.put_if("a", b"two", first) == f'"{server.tag}"'
    assert server.content == b"two"
    plain = str(first).strip('"')
    assert server.asked == ["*", first] + [plain] * (not server.quoted)
    second, server.asked = f'"{server.tag}"', []
    folder.put_if("a", b"three", second)
    assert server.content == b"three"
    assert server.asked == [second if server.quoted else second.strip('"')], (
        "what the store takes is remembered"
    )


def test_an_object_of_another_writer_is_not_touched(server: _Object, folder: S3Folder) -> None:
    first = folder.put_if("a", b"one", None)
    server.content, server.asked = b"another's", []
    assert folder.put_if("a", b"two", None) is None
    assert folder.put_if("a", b"two", first) is None
    assert server.content == b"another's"
    assert server.asked == ["*", first], "it has changed: there is nothing to ask again"


def test_an_object_that_is_gone_is_not_made_anew(server: _Object, folder: S3Folder) -> None:
    first = folder.put_if("a", b"one", None)
    server.content = None
    assert folder.put_if("a", b"two", first) is None
    assert server.content is None


def test_a_write_whose_answer_was_lost_is_known_by_its_bytes(server: _Object, folder: S3Folder) -> None:
    server.loses_answers = True
    first = folder.put_if("a", b"one", None)
    assert first == f'"{server.tag}"'
    assert folder.put_if("a", b"two", first) == f'"{server.tag}"'
    assert server.content == b"two"


def test_so_is_a_new_file_whatever_its_etag_is(server: _Object, folder: S3Folder) -> None:
    server.loses_answers = server.encrypts = True
    assert folder.put_new("a", b"one")
    assert not folder.put_new("a", b"two")
    assert server.content == b"one"
