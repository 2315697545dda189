"""Which URLs are opened, and which only if the user names their scheme."""

from __future__ import annotations

import sys
import zipfile
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import fsspec
import pytest
from click.testing import CliRunner

import paddle_reshard
from paddle_reshard.pipeline.cli.main import cli
from paddle_reshard.pipeline.core.errors import CheckpointError, ReshardError, UnsupportedError, UsageError
from paddle_reshard.storage.listing import open_root
from paddle_reshard.storage.locate import Access, open_file, open_source, open_target
from tests.conftest import COMMITTED

SOURCE = COMMITTED / "mp2pp2sh2_s1v2_meta_ema" / "checkpoint-3"
STRANGE = (
    "reference://x.json",
    "reference://::http://127.0.0.1:1/x.json",
    "http://127.0.0.1:1/c",
    "https://127.0.0.1:1/c",
    "simplecache::s3://bucket/c",
    "filecache::memory://c",
    "zip://c::file:///x.zip",
    "tar://c::memory://x.tar",
    "s3://bucket/a::http://127.0.0.1:1/c",
    "s3://bucket/a::memory",
    "memory://a::memory://b",
    "github://someone:thing@main/c",
    "git://c",
    "sftp://host/c",
    "ssh://host/c",
    "ftp://host/c",
    "smb://host/c",
    "webhdfs://host/c",
    "dir://c",
    "generic://c",
    "data://c",
    "no_such_thing://c",
)
NONE = ("://c", " s3://bucket/c", "1s3://bucket/c", "s3\n://bucket/c", "../x://c", "a/b://c", "\x1b[1m://c")


def opened(location: str, **more: Any) -> None:
    for function in (open_source, open_file, open_root):
        function(location, {}, **more)


@pytest.mark.parametrize("location", STRANGE)
def test_only_plain_stores_are_opened_unasked(location: str) -> None:
    before = set(sys.modules)
    for function in (open_source, open_file, open_root):
        with pytest.raises(
            UnsupportedError, match=r"--storage-options|begins with (s3|memory), which reads from no other"
        ):
            function(location, {})
    with pytest.raises(UnsupportedError, match=r"--storage-options|begins with"):
        open_target(location, Access({}))
    drivers = {name for name in set(sys.modules) - before if name.startswith("fsspec.implementations.")}
    assert not drivers  # not even their drivers are imported


@pytest.mark.parametrize("location", NONE)
def test_what_is_no_scheme_is_refused(location: str) -> None:
    with pytest.raises(ReshardError, match="is not the name of a scheme"):
        open_source(location, {})


@pytest.mark.parametrize("scheme", ["S3", "File", "MEMORY", "Gs"])
def test_schemes_are_written_small(scheme: str) -> None:
    with pytest.raises(
        UnsupportedError, match=f"'{scheme}' is not the name of a scheme; write {scheme.lower()}://"
    ):
        open_source(f"{scheme}://bucket/c", {})


@pytest.mark.parametrize(
    "location", ["s3:/bucket/c", "s3:bucket/c", "file:/c", "file:c", "memory:/c", "S3:/b"]
)
def test_a_slash_too_few_makes_no_folder_of_a_strange_name(
    location: str, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="a URL has two slashes"):
        paddle_reshard.convert(SOURCE, location, to="tp=1")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("location", ["file://host/c", "file://c", "local://c"])
def test_the_url_of_a_file_has_an_absolute_path(location: str) -> None:
    with pytest.raises(UsageError, match="three slashes"):
        open_source(location, {})


def test_a_folder_may_have_colons(tmp_path: Path) -> None:
    folder = tmp_path / "a::b"
    folder.mkdir()
    (folder / "c").write_bytes(b"c")
    for location in (str(folder), f"file://{folder}", f"local://{folder}"):
        assert open_source(location, {}).read("c", 0, 1) == b"c"


def test_every_command_refuses_what_is_not_named(tmp_path: Path) -> None:
    far, near = "http://127.0.0.1:1/c", str(SOURCE)
    for arguments in (
        ["inspect", far],
        ["plan", far, str(tmp_path / "t"), "--to", "tp=1"],
        ["convert", far, str(tmp_path / "t"), "--to", "tp=1"],
        ["convert", near, far, "--to", "tp=1"],
        ["convert", near, "--target", f"{far}:unified"],
        ["convert", near, str(tmp_path / "t"), "--to", "tp=1", "--fill", f"{far}/x.safetensors"],
        ["verify", near, far],
        ["verify", far],
        ["clean", far],
        ["ema", near, far, str(tmp_path / "t"), "--uniform", "--to", "tp=1"],
        ["watch", far, str(tmp_path / "t"), "--to", "tp=1", "--once"],
        ["submit", far, "s3://b/c", "--to", "tp=1"],
    ):
        done = CliRunner().invoke(cli, arguments)
        assert done.exit_code == (2 if arguments[0] == "verify" else 1), (arguments, done.output)
        assert "http:// is opened only if you name it: --storage-options '{\"http\": {}}'" in done.output, (
            arguments
        )
    assert list(tmp_path.iterdir()) == []


def test_a_scheme_that_is_named_is_opened(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "c.zip", "w") as packed:
        for path in SOURCE.iterdir():
            packed.write(path, f"inner/{path.name}")
    location = f"zip://inner::file://{tmp_path}/c.zip"
    with pytest.raises(UnsupportedError, match="zip::file, a chain of file systems"):
        paddle_reshard.inspect(location)
    assert paddle_reshard.inspect(location, storage_options={"zip": {}}).topology is not None
    done = CliRunner().invoke(
        cli, ["convert", location, str(tmp_path / "t"), "--to", "tp=1", "--storage-options", '{"zip": {}}']
    )
    assert done.exit_code == 0, done.output
    assert paddle_reshard.verify(SOURCE, tmp_path / "t").equal


@pytest.mark.parametrize(
    "options",
    [
        {"http": True},
        {"http": "yes", "zip": {}},
        {"https": {}},
        {"target": {"http": {}}},
        {"http": {}, "source": {}},
        {"client_kwargs": {"http": {}}},
    ],
)
def test_only_a_mapping_under_its_own_name_opens_a_scheme(options: dict[str, Any]) -> None:
    """Each side's options are for that side alone, and what lies deeper is the driver's."""
    with pytest.raises(UnsupportedError, match="http:// is opened only if you name it"):
        paddle_reshard.inspect("http://127.0.0.1:1/c", storage_options=options)


def test_a_web_server_which_lists_no_sizes_is_refused(tmp_path: Path) -> None:
    (tmp_path / "c").mkdir()
    (tmp_path / "c/config.json").write_text("{}")
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(SimpleHTTPRequestHandler, directory=str(tmp_path)))
    with server:
        Thread(target=server.serve_forever, daemon=True).start()
        with pytest.raises(CheckpointError, match=r"config\.json: the store lists no size of it"):
            open_source(f"http://127.0.0.1:{server.server_port}/c", {"http": {}})
        server.shutdown()


def test_a_chain_begins_with_what_reads_from_another() -> None:
    """Options of a plain store, which every user of it gives, are no consent to chains."""
    with pytest.raises(UnsupportedError, match="s3::memory, a chain of file systems, begins with s3"):
        open_source("s3://bucket/a::memory://b", {"s3": {"key": "k"}, "memory": {}})


@pytest.mark.parametrize(
    "location",
    ["reference://", "zip://c::reference://x.json", "filecache::memory://c", "blockcache::memory://c"],
)
def test_drivers_that_could_run_code_of_a_file_need_the_fsspec_that_does_not(
    location: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    named: dict[str, Any] = {link.partition("://")[0]: {} for link in location.split("::")}
    monkeypatch.setattr(fsspec, "__version__", "2025.3.0")
    with pytest.raises(UnsupportedError, match=r"needs fsspec 2026\.6 or later, and 2025\.3\.0 is"):
        open_source(location, named)
    monkeypatch.setattr(fsspec, "__version__", "2026.6.0")
    with pytest.raises(ReshardError, match=r"^(?!.*needs fsspec)"):  # there is nothing at these places
        open_source(location, named)
