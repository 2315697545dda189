"""Several folders seen as one source."""

from pathlib import Path

import pytest

from paddle_reshard.pipeline.core.errors import CheckpointError
from paddle_reshard.storage.local.source import LocalSource
from paddle_reshard.storage.store import Read, ReadRange
from paddle_reshard.storage.views import JoinedSource, Mount

FILES = {
    "": {"one": b"of the first", "ema.json": b"old"},
    "SRC0/": {"one": b"second"},
    "SRC10/": {"two": b"x"},
}
AVERAGE = {"ema.json": b"made here"}
WANTED = {"one": b"of the first", "SRC0/one": b"second", "SRC10/two": b"x", "ema.json": b"made here"}


@pytest.fixture
def folders(tmp_path: Path) -> dict[str, Path]:
    made = {prefix: tmp_path / (prefix.strip("/") or "main") for prefix in FILES}
    for prefix, folder in made.items():
        folder.mkdir()
        for name, content in FILES[prefix].items():
            (folder / name).write_bytes(content)
    return made


@pytest.fixture
def joined(folders: dict[str, Path]) -> JoinedSource:
    mounts = [
        Mount(prefix, LocalSource(folder), prefix and f"{folder}: ") for prefix, folder in folders.items()
    ]
    return JoinedSource(tuple(mounts), AVERAGE)


def test_every_file_is_read_from_where_it_lies(joined: JoinedSource) -> None:
    assert joined.sizes() == {path: len(content) for path, content in WANTED.items()}
    assert {path: joined.read(path, 0, len(content)) for path, content in WANTED.items()} == WANTED
    buffers = {path: bytearray(len(content) - 1) for path, content in WANTED.items()}
    joined.read_many([Read(path, 1, memoryview(buffer)) for path, buffer in buffers.items()])
    assert buffers == {path: content[1:] for path, content in WANTED.items()}
    for path, buffer in buffers.items():
        joined.read_into(path, 0, memoryview(buffer))
    assert buffers == {path: content[:-1] for path, content in WANTED.items()}


def test_it_is_where_the_first_is_and_says_which_version_each_file_has(
    joined: JoinedSource, folders: dict[str, Path]
) -> None:
    first, second = LocalSource(folders[""]), LocalSource(folders["SRC0/"])
    assert (joined.location, list(joined.folders)) == (first.location, list(first.folders))
    versions = joined.versions()
    assert versions.keys() == WANTED.keys()
    assert versions["one"] == first.versions()["one"]
    assert versions["SRC0/one"] == f"{folders['SRC0/']}: {second.versions()['one']}"
    assert versions["ema.json"] == "made here"


def test_it_is_as_open_as_the_least_open_of_them(joined: JoinedSource, folders: dict[str, Path]) -> None:
    (folders["SRC0/"] / "one").chmod(0o600)
    mounts = tuple(Mount(prefix, LocalSource(folder)) for prefix, folder in folders.items())
    assert JoinedSource(mounts).openness.files == 0o600


@pytest.mark.parametrize("prefix", FILES)
def test_a_change_in_any_of_them_is_noticed(
    joined: JoinedSource, folders: dict[str, Path], prefix: str
) -> None:
    joined.check_unchanged()
    name = next(iter(FILES[prefix]))
    (folders[prefix] / name).write_bytes(b"something of another length")
    with pytest.raises(CheckpointError, match=name):
        joined.check_unchanged()


def test_a_file_that_could_be_of_either_is_refused(folders: dict[str, Path]) -> None:
    with pytest.raises(CheckpointError, match="main: has a file with the path one, which the joined"):
        JoinedSource((Mount("", LocalSource(folders[""])), Mount("o", LocalSource(folders["SRC10/"]))))


def test_a_source_that_cannot_read_is_not_made() -> None:
    class Forgets(ReadRange):
        """Defines nothing."""

    with pytest.raises(TypeError, match="read_many"):
        Forgets()
