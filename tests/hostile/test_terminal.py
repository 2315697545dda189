"""What others have named reaches a terminal or a log only as text that does nothing there."""

from __future__ import annotations

import json
import os
import shutil
import unicodedata
from pathlib import Path
from typing import Any

import pytest

from paddle_reshard.pipeline.cli.terminal import printable
from paddle_reshard.pipeline.convert.manifest import describe_parts
from paddle_reshard.storage.store import Receipt
from tests.hostile.damage import copied, copied_by_its_store, sound
from tests.jobs.command import run_here

CASE = "mp2pp2sh2_s1v2_meta_ema"
EVIL = "a\x1b]0;title\x07\x1b[2J[bold]b[/bold][link=x]\u202e:smile:\r\nforged: line\u200b\x9b31m"
SHOWN = r"a\x1b]0;title\x07\x1b[2J[bold]b[/bold][link=x]\u202e:smile:\r\nforged: line\u200b\x9b31m"


@pytest.fixture(autouse=True)
def _wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rich believes that nobody measures the width."""
    monkeypatch.setenv("COLUMNS", "400")


def run(*arguments: object) -> str:
    """Everything that a command prints, which is something unless an error gets away."""
    done = run_here(*arguments)
    assert done.stdout or done.stderr
    return done.stdout + done.stderr


def assert_harmless(told: str, shown: str = SHOWN) -> None:
    odd = {c for c in told if unicodedata.category(c) in ("Cc", "Cf", "Zl", "Zp") and c not in "\n\t"}
    assert not odd, told
    assert not [line for line in told.splitlines() if line.startswith("forged")]
    squeezed = "".join(told.split())  # tables may fold
    assert "".join(shown.split()) in squeezed, told


def test_the_location_in_a_manifest(tmp_path: Path) -> None:
    evil = copied_by_its_store(tmp_path, lambda manifest: manifest["source"].update(location=EVIL))
    assert_harmless(run("verify", evil))


def test_a_file_that_a_manifest_names(tmp_path: Path) -> None:
    """As one of many damages, in an error, and in JSON."""
    parts = describe_parts([Receipt(EVIL, 0, 7, "", "abc")], {})

    def name_it(manifest: dict[str, Any]) -> None:
        manifest["files"][EVIL] = 7
        manifest["parts"] |= parts

    told = copied_by_its_store(tmp_path, name_it)
    assert_harmless(run("verify", told))
    assert run("verify", told, "--json").isascii()


def test_a_file_of_a_checkpoint(tmp_path: Path) -> None:
    copied(CASE, tmp_path / "c")
    name = EVIL.replace("/", "|") + ".txt"
    (tmp_path / "c" / name).symlink_to("nowhere")
    assert_harmless(run("inspect", tmp_path / "c"), SHOWN.replace("/", "|"))
    (tmp_path / "c" / name).unlink()
    (tmp_path / "c" / os.fsdecode(b"rng_state_\xff[red].pth")).write_bytes(b"")
    for command in ("plan", "convert"):
        run(command, tmp_path / "c", tmp_path / "t", "--to", "tp=1")  # whatever it says of it


def test_a_checkpoint_in_a_folder_of_that_name(tmp_path: Path) -> None:
    folder = tmp_path / EVIL.replace("/", "|")
    copied(CASE, folder)
    shown = SHOWN.replace("/", "|")
    assert_harmless(run("inspect", folder), shown)
    assert_harmless(run("convert", folder, f"{folder}2", "--to", "tp=1"), shown)


def test_a_tensor(tmp_path: Path) -> None:
    """That no rule covers, so the error names it."""
    header = json.dumps({EVIL: {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    shutil.copy(sound(CASE) / "config.json", tmp_path)
    assert_harmless(run("inspect", tmp_path))


def test_a_log(tmp_path: Path) -> None:
    """Of a checkpoint that is refused with a link in its folder."""
    copied(CASE, tmp_path / "run" / "checkpoint-3")
    name = EVIL.replace("/", "|") + ".txt"
    (tmp_path / "run" / "checkpoint-3" / name).symlink_to("nowhere")
    watch = ("watch", tmp_path / "run", tmp_path / "out", "--to", "tp=1", "--once", "--settle", "0")
    assert_harmless(run(*watch), SHOWN.replace("/", "|"))


@pytest.mark.parametrize("text", ["plain", "größer", "模型.层", "a b", "…", "é"])
def test_other_text_is_printed_as_it_is(text: str) -> None:
    assert printable(text) == text


def test_what_is_no_character_is_spelled_out() -> None:
    assert printable(os.fsdecode(b"\xff")) == r"\udcff"
    assert printable("\u2028\ufeff\xad") == r"\u2028\ufeff\xad"
