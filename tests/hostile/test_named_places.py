"""Manifests and claims name places. Nothing that they name is opened, followed or removed."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import paddle_reshard
from paddle_reshard.pipeline.cli.main import cli
from paddle_reshard.pipeline.core.errors import FormatError
from tests.hostile.damage import copied_by_its_store


class Listener:
    """A server that no request may reach."""

    def __init__(self) -> None:
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.port = self.socket.getsockname()[1]
        self.heard: list[bytes] = []
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        while True:
            try:
                connection, _ = self.socket.accept()
            except OSError:
                return
            with connection:
                self.heard.append(connection.recv(1 << 16))
                connection.sendall(b"HTTP/1.0 404 not here\r\ncontent-length: 0\r\n\r\n")


@pytest.fixture
def listener() -> Iterator[Listener]:
    made = Listener()
    yield made
    made.socket.close()


@pytest.mark.parametrize("address", ["http://127.0.0.1:{}/c", "reference://::http://127.0.0.1:{}/c.json"])
def test_no_address_of_a_manifest_is_asked(address: str, tmp_path: Path, listener: Listener) -> None:
    def name_it(manifest: dict[str, Any]) -> None:
        manifest["source"]["location"] = address.format(listener.port)

    target = copied_by_its_store(tmp_path, name_it)
    options = json.dumps({"headers": {"Authorization": "Bearer a-token"}})
    CliRunner().invoke(cli, ["verify", str(target), "--storage-options", options])
    assert listener.heard == []


def test_what_the_storage_copied_is_compared_with_the_source_that_a_user_names(
    tmp_path: Path,
) -> None:
    source, made = tmp_path / "source", copied_by_its_store(tmp_path)
    alone = paddle_reshard.check(made)
    assert (alone.intact, alone.unchecked_bytes) == (True, 100)
    assert alone.recorded_source == str(source)
    beside = paddle_reshard.check(made, source=source)
    assert (beside.intact, beside.unchecked_bytes) == (True, 0)
    told = CliRunner().invoke(cli, ["verify", str(made)]).output
    assert "intact, as far as it was checked" in told
    assert "--source SRC" in told
    assert CliRunner().invoke(cli, ["verify", str(made), "--source", str(source)]).exit_code == 0
    assert CliRunner().invoke(cli, ["verify", str(made), "--source", str(tmp_path / "no")]).exit_code == 2


def test_no_path_of_a_manifest_leads_out_of_the_source(tmp_path: Path) -> None:
    """One that claims to be of no size and no version, as a file that nobody has listed is."""
    secret = tmp_path / "secret"
    secret.write_bytes(bytes(1000))

    def name_it(manifest: dict[str, Any]) -> None:
        outside = f"{'../' * 20}{secret.relative_to('/')}"
        manifest["source"]["files"][outside] = manifest["source"]["versions"][outside] = None
        manifest["parts"]["b"]["copied"]["0"] = [outside, 0, ""]

    target = copied_by_its_store(tmp_path, name_it)
    with pytest.raises(FormatError, match="not a valid manifest"):
        paddle_reshard.check(target, source=tmp_path / "source")


@pytest.mark.parametrize("bad", [-1, 1.5, "7", None, True])
def test_sizes_in_a_manifest_are_whole_numbers(bad: object, tmp_path: Path) -> None:
    target = copied_by_its_store(tmp_path, lambda manifest: manifest["files"].update({"ghost": bad}))
    with pytest.raises(FormatError):
        paddle_reshard.check(target)


@pytest.mark.parametrize("target", ["../precious", "precious", "checkpoint-1/../../precious"])
def test_a_record_that_names_another_folder_removes_nothing(target: str, tmp_path: Path) -> None:
    """A watcher completes the removal of a killed watcher: of a target next to it, and of nothing else."""
    run, out, precious = tmp_path / "run", tmp_path / "out", tmp_path / "precious"
    for folder in (run, precious, out / "precious", out / ".paddle_reshard" / "seen"):
        folder.mkdir(parents=True)
    for folder in (precious, out / "precious"):
        (folder / "work").write_text("of years")
    record = {"target": target, "source_stamp": "", "since": time.time(), "state": "removing"}
    (out / ".paddle_reshard" / "seen" / "x.json").write_text(json.dumps(record))
    before = sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*"))
    CliRunner().invoke(cli, ["watch", str(run), str(out), "--to", "tp=1", "--once", "--keep", "1"])
    assert (precious / "work").read_text() == "of years"
    assert sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*")) == before
