"""Every place that opens a file; what others have put in a folder is neither waited for nor read without end."""

from __future__ import annotations

import ast
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import paddle_reshard
from paddle_reshard.pipeline.core.errors import FormatError, ListingError, ReshardError
from paddle_reshard.pipeline.core.file_names import MANIFEST
from paddle_reshard.pipeline.core.limits import most_bytes
from paddle_reshard.storage.listing import open_root
from paddle_reshard.storage.local.source import LocalSource
from paddle_reshard.storage.remote.folder import FsspecFolder
from tests.conftest import case_directory

SMALL = case_directory("sh2_s1v1_meta_fp32") / "checkpoint-3"
ROOT = Path(__file__).parents[2]
FOLDERS = ("clusters", "pipeline", "storage", "tasks")

ALLOWED: dict[str, tuple[str, ...]] = {
    "the function itself: no link is followed, nothing is waited for, and what is read has a limit": (
        "storage/plain.py read_small",
        "storage/plain.py plain_opener",
    ),
    "opened with UNWAITING, or with plain_opener": (
        "storage/local/entries.py opened",
        "storage/local/target.py LocalWriter.write_part",
        "storage/local/target.py LocalWriter.copy_part",
        "storage/session/staging.py DiskSessionStore._open_lock",
        "storage/session/staging.py Staging.read_into",
        "storage/session/staging.py write_file",
        "storage/session/staging.py append_to_file",
        "storage/session/staging.py _make",
        "storage/session/staging.py sync",
    ),
    "the size is known, or asked for, before anything is read": (
        "storage/remote/folder.py FsspecFolder.read_range",
        "storage/remote/folder.py FsspecFolder.read_object",
    ),
    "the user names the file, which may be a pipe: <(command), /dev/stdin, /dev/stdout": (
        "pipeline/cli/commands/forwarded.py ConvertArguments.files",
        "pipeline/cli/commands/forwarded.py ConvertArguments.identify",
        "pipeline/cli/options.py read_object",
        "pipeline/convert/plan_file.py _opened",
        "pipeline/examine/comparing.py _finished_earlier",
        "pipeline/examine/fingerprint.py read_fingerprints",
        "pipeline/progress/events_as_json.py EventLog.append_to",
        "pipeline/request/given_file.py read_text",
        "storage/local/folders.py written_whole",
    ),
    "a new file in a private temporary folder, or that a random name makes ours": (
        "clusters/ray/jobs.py _runtime_env",
        "storage/listing.py LocalRoot.replace",
        "storage/s3/folder.py S3Folder.put_file",
    ),
    "a file of a training job, written by the job itself": (
        "pipeline/training/ema_callback.py _EmaCallback._save",
        "tasks/ema_worker.py _save",
    ),
    "a file of the kernel or of this package": (
        "clusters/container.py _text",
        "pipeline/cli/output.py GuardedStream._try",
        "pipeline/cli/output.py occupy_standard_files",
        "pipeline/core/heap.py private_bytes",
        "pipeline/model/rules/extends.py _shipped",
        "pipeline/model/rules/tables.py _texts",
        "pipeline/report/page.py _static",
        "storage/local/source.py file_system",
        "storage/session/holder.py this_process",
        "storage/session/holder.py process_start",
    ),
}
"""Why → module and function."""
OPENING = (
    "open",
    "fdopen",
    "read_bytes",
    "read_text",
    "write_bytes",
    "write_text",
    "cat_file",
    "memmap",
    "fromfile",
)
NAMED = re.compile(rf"\b({'|'.join(OPENING)})\(")
NOT_FILES = ("formatter.write_text", "build_opener(Stay).open")


def opened_in(tree: ast.Module) -> Iterator[str]:
    """Functions that open files: by any name that Python, ``os``, ``pathlib``, NumPy and fsspec have for it."""

    def visit(node: ast.AST, where: tuple[str, ...]) -> Iterator[str]:
        for inner in ast.iter_child_nodes(node):
            is_named = isinstance(inner, (ast.FunctionDef, ast.ClassDef))
            at = (*where, inner.name) if is_named else where  # type: ignore[attr-defined]
            if isinstance(inner, ast.Call) and opens(inner):
                yield ".".join(at)
            yield from visit(inner, at)

    def opens(call: ast.Call) -> bool:
        method = getattr(call.func, "attr", None) or getattr(call.func, "id", None)
        if method not in OPENING or (name := ast.unparse(call.func)) in NOT_FILES:
            return False
        owner = name.rpartition(".")[0]
        if method != "open":
            return bool(owner)
        if owner in ("", "os", "io", "fsspec"):
            return True
        mode = call.args[0] if call.args else None
        of_path = isinstance(mode, ast.Constant) or any(
            word.arg in ("mode", "encoding") for word in call.keywords
        )
        return of_path or (mode is None and owner not in ("self", "super()"))

    yield from visit(tree, ())


def test_every_place_that_opens_a_file_is_listed() -> None:
    found = {
        f"{path.relative_to(ROOT)} {function}"
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*.py")
        if NAMED.search(text := path.read_text("utf-8"))
        for function in opened_in(ast.parse(text))
    }
    allowed = {place for places in ALLOWED.values() for place in places}
    assert not found - allowed, (
        "read_small of storage/plain.py opens what others may have written; or say here why not"
    )
    assert not {place for place in allowed - found if (ROOT / place.split()[0]).exists()}


def test_a_new_place_is_noticed() -> None:
    for line in (
        "open(p)",
        "os.open(p, 0)",
        "Path(p).read_bytes()",
        "p.open('rb')",
        "p.open()",
        "fs.cat_file(p)",
    ):
        assert NAMED.search(line)
        assert [*opened_in(ast.parse(f"def new(p):\n    return {line}"))] == ["new"]


# ------------------------------------------------------------------------------- what others have put there


def _pipe(path: Path) -> None:
    os.mkfifo(path)


def _endless(path: Path) -> None:
    path.symlink_to("/dev/zero")


def _sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(3 << 30)


MANGLED: dict[str, tuple[Callable[[Path], None], str]] = {
    "a pipe": (_pipe, "is a pipe where"),
    "an endless device": (_endless, "is a link where"),
    "three gigabytes": (_sparse, f"3221225472 bytes; at most {most_bytes(MANIFEST)}"),
}


@pytest.mark.parametrize("kind", MANGLED)
def test_a_manifest_beside_targets_is_not_waited_for(kind: str, tmp_path: Path) -> None:
    make, said = MANGLED[kind]
    manifest = tmp_path / "targets" / "checkpoint-3" / MANIFEST
    manifest.parent.mkdir(parents=True)
    make(manifest)
    with pytest.raises(ListingError, match=said) as refusal:
        open_root(str(tmp_path / "targets"), {}).read(f"checkpoint-3/{MANIFEST}")
    assert str(manifest) in str(refusal.value)
    run = Path(shutil.copytree(SMALL, tmp_path / "run" / "checkpoint-3")).parent
    (listed,) = paddle_reshard.ls(run, targets=[tmp_path / "targets"]).checkpoints
    assert said in listed.converted_to[0] and listed.problem is None


@pytest.mark.parametrize("name", [MANIFEST, "trainer_state.json", "model_meta.json", "tokenizer.json"])
def test_a_small_file_of_a_source_has_a_limit(name: str, tmp_path: Path) -> None:
    _sparse(tmp_path / name)
    source = LocalSource(tmp_path)
    with pytest.raises(FormatError, match=rf"{name}: 3221225472 bytes; at most {most_bytes(name)}"):
        source.read(name, 0, source.sizes()[name])
    with pytest.raises(ListingError, match=rf"{name}: 3221225472 bytes; at most {most_bytes(name)}"):
        FsspecFolder(f"file://{tmp_path}", {}, ListingError).read_object(name)


@pytest.mark.parametrize("name", ["session.json", "ledger", "lock"])
def test_an_unfinished_session_is_opened_as_what_others_may_have_written(name: str, tmp_path: Path) -> None:
    hidden = tmp_path / ".new.reshard"
    hidden.mkdir()
    (hidden / "session.json").write_text("{}")
    (hidden / name).unlink(missing_ok=True)
    elsewhere = tmp_path / "elsewhere"
    (hidden / name).symlink_to(elsewhere)
    with pytest.raises(ReshardError):
        paddle_reshard.convert(SMALL, tmp_path / "new", to="tp=1")
    assert not elsewhere.exists()


def test_a_log_is_not_appended_to_a_link_or_a_pipe(tmp_path: Path) -> None:
    root, log = open_root(str(tmp_path), {}), tmp_path / "audit.jsonl"
    (tmp_path / "profile").write_text("export A=1\n")
    log.symlink_to("profile")
    with pytest.raises(ListingError):
        root.append("audit", b"{}")
    assert (tmp_path / "profile").read_text() == "export A=1\n"
    log.unlink()
    _pipe(log)
    with pytest.raises(ListingError):
        root.append("audit", b"{}")
