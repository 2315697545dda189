"""What the guides show works: their commands are run, their messages appear, and the translations show the same."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.conftest import REPO
from tests.jobs.command import GOLDEN, copy_checkpoint, run_here
from tests.storage.servers import Store
from tests.unit.test_documents import code_blocks

DOCS = REPO / "docs"
GUIDES = (DOCS / "index.md", *sorted(set((DOCS / "guides").glob("*.md")) - {DOCS / "guides/index.md"}))
ON_A_CLUSTER = re.compile(r"\bHEAD\b|--cluster ray")
"""What no test has a place for: it is parsed by ``test_documents``, and run by ``make cluster`` with other names."""
DIFFERENT = 1


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with what the guides start from."""
    for name in ("checkpoint-1000", "run-7/checkpoint-1", "run-7/checkpoint-2"):
        copy_checkpoint(tmp_path / name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def bucket(store: Store, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The bucket ``training``, in the store that the environment names."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", store.url)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", store.key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", store.secret)
    store.client.create_bucket(Bucket="training")
    for path in GOLDEN.iterdir():
        store.client.upload_file(str(path), "training", f"run-7/checkpoint-1000/{path.name}")
    yield
    for found in store.client.list_objects_v2(Bucket="training")["Contents"]:
        store.client.delete_object(Bucket="training", Key=found["Key"])
    store.client.delete_bucket(Bucket="training")


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("guide", GUIDES, ids=lambda path: path.stem)
def test_commands_succeed(guide: Path, request: pytest.FixtureRequest) -> None:
    if "s3://training" in "".join(commands(guide)):
        request.getfixturevalue("bucket")
    for command in commands(guide):
        done = run_here(*shlex.split(command))
        allowed = (0, DIFFERENT) if command.startswith("diff ") else (0,)
        assert done.returncode in allowed, f"{command}: {done.stderr}"


def commands(guide: Path) -> list[str]:
    """The command lines of a page that need nothing but a disk and a bucket."""
    lines = [line for block in code_blocks(guide.read_text("utf-8"), "") for line in block.splitlines()]
    own = [line.removeprefix("paddle-reshard ") for line in lines if line.startswith("paddle-reshard ")]
    return [line for line in own if not ON_A_CLUSTER.search(line)]


@pytest.mark.usefixtures("folder")
def test_python_of_the_first_page_runs() -> None:
    (block,) = code_blocks((DOCS / "index.md").read_text("utf-8"), "python")
    exec(compile(block, "index.md", "exec"), {})


def corrupted(folder: Path) -> None:
    path = folder / "one/optimizer.pdopt"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def converted(folder: Path) -> None:
    assert run_here("convert", "checkpoint-1000", "one", "--to", "tp=1").returncode == 0


def converted_and_corrupted(folder: Path) -> None:
    converted(folder)
    corrupted(folder)


def without(*names: str) -> Callable[[Path], None]:
    def remove(folder: Path) -> None:
        for name in names:
            (folder / "checkpoint-1000" / name).unlink()

    return remove


def shortened(folder: Path) -> None:
    path = folder / "checkpoint-1000/optimizer.tp00_pp00_shard00.pdopt"
    path.write_bytes(path.read_bytes()[:-10])


def of_an_unknown_family(folder: Path) -> None:
    path = folder / "checkpoint-1000/config.json"
    path.write_text(re.sub(r'("model_type": )"\w+"', r'\1"mymodel"', path.read_text("utf-8")))


def nothing(folder: Path) -> None:
    pass


MISSING = "optimizer.tp00_pp01_shard01.pdopt"
SITUATIONS: dict[str, tuple[Callable[[Path], None], str]] = {
    "1 of 8 optimizer files": (without(MISSING), "inspect checkpoint-1000"),
    "7 saved_signal_* files": (without("saved_signal_3"), "inspect checkpoint-1000"),
    "config.json is missing": (without("config.json"), "plan checkpoint-1000 --to tp=1"),
    "at byte 213745: truncated": (shortened, "inspect checkpoint-1000"),
    "model type 'mymodel'": (of_an_unknown_family, "plan checkpoint-1000 --to tp=1"),
    "tp=4 does not divide": (nothing, "plan checkpoint-1000 --to tp=4"),
    "pp=9 exceeds": (nothing, "plan checkpoint-1000 --to pp=9"),
    "the format unified cannot hold": (nothing, "plan checkpoint-1000 --format unified"),
    "--memory 1MiB is below": (nothing, "plan checkpoint-1000 --to tp=1 --memory 1MiB"),
    "is not empty; choose another": (converted, "convert checkpoint-1000 one --to tp=1"),
    "crc64nvme is": (converted_and_corrupted, "verify one"),
    "different:": (converted_and_corrupted, "verify checkpoint-1000 one"),
}


@pytest.mark.parametrize("message", SITUATIONS)
def test_messages_appear(message: str, folder: Path) -> None:
    shown = [
        line
        for block in code_blocks((DOCS / "guides/troubleshooting.md").read_text("utf-8"), "text")
        for line in block.splitlines()
        if message in line
    ]
    make, command = SITUATIONS[message]
    make(folder)
    done = run_here(*shlex.split(command))
    assert done.returncode in (1, 2)
    assert len(shown) == 1
    assert shown[0] in done.stderr + done.stdout


@pytest.mark.parametrize("guide", GUIDES, ids=lambda path: path.stem)
def test_the_translation_shows_the_same_commands(guide: Path) -> None:
    translated = DOCS / "zh" / guide.relative_to(DOCS)
    for language in ("", "text", "python"):
        assert shown(translated, language) == shown(guide, language)


def shown(page: Path, language: str) -> list[str]:
    text = re.sub(r"^```\{toctree\}.*?^```$", "", page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    return code_blocks(text, language)
