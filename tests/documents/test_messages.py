"""The messages that the page on troubleshooting shows appear where it says."""

from __future__ import annotations

import json
import os
import re
import shlex
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from unittest import mock

import pytest

from paddle_reshard.pipeline.cli.ends import end_of
from tests.conftest import REPO, case_directory
from tests.documents.names import begin
from tests.jobs.command import copy_checkpoint, run_here

PAGE = REPO / "docs/guides/troubleshooting.md"
CHINESE = REPO / "docs/zh/guides/troubleshooting.md"
FOLDERS = ("clusters", "pipeline", "storage", "tasks")
ANSWERS = "Damage"
"""The heading of what is no error, but an answer of ``verify``."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a checkpoint."""
    copy_checkpoint(tmp_path / "checkpoint-1000")
    monkeypatch.chdir(tmp_path)
    return tmp_path


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


def of_two_runs(folder: Path) -> None:
    other = case_directory("dense/single") / "checkpoint-3/scheduler.pdparams"
    changed = other.read_bytes().replace(b"last_epoch", b"last_epocj")
    (folder / "checkpoint-1000/scheduler.pdparams").write_bytes(changed)


def beside_another_format(folder: Path) -> None:
    (folder / "checkpoint-1000/model.safetensors.index.json").write_text("{}")


def saved_again(folder: Path) -> None:
    for path in (folder / "checkpoint-1000").glob("saved_signal_*"):
        os.utime(path, (0, 0))


def unfinished(folder: Path) -> None:
    begin(folder / "checkpoint-1000", folder / "one", "tp=1")


def taken(folder: Path) -> None:
    """Begun by a process of another machine, which may still run."""
    unfinished(folder)
    session = folder / ".one.reshard/session.json"
    record = json.loads(session.read_bytes())
    record["lock"]["holder"] |= {"host": "gpu-7", "machine": "other", "pid": 4711}
    record["lock"] |= {"held": True, "renewed_at": time.time()}
    session.write_text(json.dumps(record))


def without_credentials(folder: Path) -> None:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        del os.environ[name]
    os.environ |= {"AWS_EC2_METADATA_DISABLED": "true", "HOME": str(folder)}


def exported_and_tied(folder: Path) -> None:
    assert run_here("convert", "checkpoint-1000", "model", "--format", "huggingface").returncode == 0
    config = folder / "model/config.json"
    config.write_text(
        config.read_text("utf-8").replace('"tie_word_embeddings": false', '"tie_word_embeddings": true')
    )


def exported(folder: Path, *removed: str, case: str = "checkpoint-1000", **changed: object) -> None:
    """A published model, whose config.json lacks some entries and has others."""
    assert run_here("convert", case, "model", "--format", "huggingface").returncode == 0
    config = folder / "model/config.json"
    entries = {**json.loads(config.read_bytes()), **changed}
    config.write_text(json.dumps({name: value for name, value in entries.items() if name not in removed}))
    (folder / "model/paddle_reshard.json").unlink()


def of_any_library(folder: Path) -> None:
    exported(folder, "paddleformers_version")


def with_a_score(folder: Path) -> None:
    exported(folder)
    path = folder / "model/model.safetensors"
    path.write_bytes(path.read_bytes().replace(b'"lm_head.weight"', b'"score.weight"  '))


def with_a_layer_more(folder: Path) -> None:
    case = case_directory("families/deepseek_v3_mtp_single") / "checkpoint-3"
    exported(folder, case=str(case), num_nextn_predict_layers=0)


def without_git_lfs(folder: Path) -> None:
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5368709120\n"
    (folder / "checkpoint-1000/model_state.tp00_pp00.pdparams").write_text(pointer)


def by_machine(folder: Path) -> None:
    for node in ("node0", "node1"):
        (folder / "run" / node).mkdir(parents=True)


def nothing(folder: Path) -> None:
    pass


MISSING = "optimizer.tp00_pp01_shard01.pdopt"
SITUATIONS: dict[str, tuple[Callable[[Path], None], str]] = {
    "1 of 8 optimizer files": (without(MISSING), "inspect checkpoint-1000"),
    "7 saved_signal_* files": (without("saved_signal_3"), "inspect checkpoint-1000"),
    "config.json is missing": (without("config.json"), "plan checkpoint-1000 --to tp=1"),
    "several rule tables fit": (of_any_library, "convert model two --to tp=1"),
    "score.weight: only": (with_a_score, "convert model two --to tp=1"),
    "is of multi-token prediction": (with_a_layer_more, "convert model two --to tp=1"),
    "is a Git LFS pointer": (without_git_lfs, "plan checkpoint-1000 --to tp=1"),
    "holds folders of machines": (by_machine, "inspect run"),
    "at byte 213745: truncated": (shortened, "plan checkpoint-1000 --to tp=1"),
    "model type 'mymodel'": (of_an_unknown_family, "plan checkpoint-1000 --to tp=1"),
    "tp=4 does not divide": (nothing, "plan checkpoint-1000 --to tp=4"),
    "pp=9 exceeds": (nothing, "plan checkpoint-1000 --to pp=9"),
    "the format unified cannot hold": (nothing, "plan checkpoint-1000 --format unified"),
    "--memory 1MiB is below": (nothing, "plan checkpoint-1000 --to tp=1 --memory 1MiB"),
    "different steps or runs": (of_two_runs, "inspect checkpoint-1000"),
    "another conversion is writing": (taken, "clean one"),
    "was started with --to tp=1": (unfinished, "convert checkpoint-1000 one --to tp=2 --resume"),
    "is no part of the checkpoint": (beside_another_format, "inspect checkpoint-1000"),
    "this step is saved again": (saved_again, "plan checkpoint-1000 --to tp=1"),
    "no credentials were found": (
        without_credentials,
        """inspect s3://training/checkpoint-1000 --storage-options '{"endpoint_url": "http://127.0.0.1:9"}'""",
    ),
    "config.json makes the two": (exported_and_tied, "convert model two --to tp=1"),
    "choose another target, or --overwrite": (converted, "convert checkpoint-1000 one --to tp=1"),
    "are SRC and DST exchanged": (converted, "convert one checkpoint-1000 --to tp=1"),
    "crc64nvme is": (converted_and_corrupted, "verify one"),
    "different:": (converted_and_corrupted, "verify checkpoint-1000 one"),
}


def shown(page: Path = PAGE) -> dict[str, str]:
    """Every message of a page, with the heading above it."""
    heading, block, found = "", False, {}
    for line in page.read_text("utf-8").splitlines():
        if line.startswith("```"):
            block = line == "```text"
        elif block:
            found[line] = heading
        elif line.startswith("##"):
            heading = line.lstrip("# ")
    return found


@cache
def kinds() -> set[str]:
    """Every class of errors in the sources."""
    sources = [path.read_text("utf-8") for folder in FOLDERS for path in (REPO / folder).rglob("*.py")]
    bases = dict(re.findall(r"^class (\w+)\((\w+)\):", "\n".join(sources), re.MULTILINE))
    found = {"ReshardError"}
    while further := {name for name, base in bases.items() if base in found} - found:
        found |= further
    return found


@pytest.mark.parametrize("message", SITUATIONS)
def test_messages_appear_with_the_heading_below_which_they_are(message: str, folder: Path) -> None:
    ((line, heading),) = ((line, heading) for line, heading in shown().items() if message in line)
    make, command = SITUATIONS[message]
    with mock.patch.dict(os.environ):
        make(folder)
        done = run_here(*shlex.split(command))
    assert done.returncode in (1, 2)
    assert line in done.stderr + done.stdout
    refused = done.stderr.splitlines()[-1:]
    assert heading == ANSWERS if not refused else refused[0].endswith(f" [{heading}]")


def test_every_message_of_the_page_is_made_to_appear() -> None:
    assert all(any(message in line for message in SITUATIONS) for line in shown())


@pytest.mark.parametrize("page", [PAGE, CHINESE], ids=["en", "zh"])
def test_every_kind_of_error_has_a_heading(page: Path) -> None:
    headings = {
        line.removeprefix("### ") for line in page.read_text("utf-8").splitlines() if line.startswith("### ")
    }
    foreseen = [error() for error in (OSError, PermissionError, ConnectionResetError, MemoryError, KeyError)]
    assert headings == kinds() | {end_of(error, 1).topic for error in foreseen}


def test_both_pages_have_the_same_messages_below_the_same_headings() -> None:
    english, chinese = (
        {line: heading for line, heading in shown(page).items() if heading in kinds()}
        for page in (PAGE, CHINESE)
    )
    assert english == chinese
    assert shown(PAGE).keys() == shown(CHINESE).keys()
