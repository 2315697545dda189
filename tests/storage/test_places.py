"""What is read is never what is written over; places, names and disks that cannot hold a target are refused first."""

import os
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import fsspec
import pytest

import paddle_reshard
from paddle_reshard.pipeline.core.errors import ReshardError, TargetError, UsageError
from paddle_reshard.pipeline.core.events import Event, Progress
from tests.jobs.command import run_here
from tests.sized import in_groups
from tests.storage.contents import ONE_CARD, SMALL, fill_memory
from tests.storage.test_replacing import tree

MAIN = [sys.executable, "-m", "paddle_reshard"]


# --------------------------------------------------------------------------------------------------- no place at all


@pytest.mark.parametrize("empty", ["", " ", "\t\n", "file://"])
@pytest.mark.parametrize(
    "command",
    [
        "convert {source} {empty} --to tp=1 --overwrite",
        "convert {source} {empty} --to tp=1 --resume",
        "plan {source} {empty} --to tp=1",
        "convert {empty} a --to tp=1",
        "ema {source} {source} {empty} --uniform --to tp=1 --overwrite",
        "watch {source} {empty} --to tp=1 --once --overwrite",
        "submit {source} {empty} --to tp=1 --overwrite --address http://127.0.0.1:9",
        "clean {empty}",
    ],
)
def test_an_empty_location_is_wrong_usage_of_every_command(
    command: str, empty: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``convert SRC "$UNSET"`` means no folder, and least of all this one."""
    shutil.copytree(SMALL, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    before = tree(tmp_path)
    done = run_here(*(word.format(source=SMALL, empty=empty) for word in command.split()))
    assert done.returncode == 2
    assert "is a variable not set?" in done.stderr or (empty, "three slashes" in done.stderr) == (
        "file://",
        True,
    )
    assert tree(tmp_path) == before


def test_an_empty_location_of_a_plan_or_of_several_targets_is_wrong_usage(tmp_path: Path) -> None:
    for empty in ("", " ", "\t\n", "file://"):
        with pytest.raises(UsageError, match="is a variable not set"):
            paddle_reshard.plan(SMALL, empty, overwrite=True, **ONE_CARD)
        with pytest.raises(UsageError, match="is a variable not set"):
            paddle_reshard.convert(SMALL, {tmp_path / "a": {"to": "tp=1"}, empty: {"to": "tp=2"}})
    assert list(tmp_path.iterdir()) == []


# --------------------------------------------------------------------------------------- the source and the target


def _copy(folder: Path) -> Path:
    shutil.copytree(SMALL, folder)
    return folder


def _refused(source: Path, target: Path, below: Path, told: str) -> None:
    before = tree(below)
    for options in ({"overwrite": True}, {"resume": True}, {}):
        with pytest.raises(ReshardError, match=told):
            paddle_reshard.convert(source, target, **options, **ONE_CARD)
        with pytest.raises(ReshardError, match=told):
            paddle_reshard.average([SMALL, source], target, uniform=True, **options, **ONE_CARD)
    assert tree(below) == before


@pytest.mark.parametrize(
    ("source", "target"),
    [
        (".foo.reshard", "foo"),
        (".foo.reshard/files", "foo"),
        ("foo", "foo/."),
        ("foo", "foo/inside"),
        ("foo/inside", "foo"),
        ("foo", "link"),
        ("foo", "link/inside"),
    ],
)
def test_a_target_that_is_the_source_by_any_name_is_refused(source: str, target: str, tmp_path: Path) -> None:
    _copy(tmp_path / source)
    (tmp_path / "link").symlink_to("foo")
    _refused(tmp_path / source, tmp_path / target, tmp_path, "source and target")


@pytest.mark.parametrize("how", [os.symlink, os.link])
@pytest.mark.parametrize("where", ["t", ".t.reshard/files"])
def test_a_source_whose_files_lie_in_the_target_is_refused(how: Any, where: str, tmp_path: Path) -> None:
    old = _copy(tmp_path / where)
    source = tmp_path / "source"
    source.mkdir()
    for path in old.iterdir():
        how(path, source / path.name)
    _refused(source, tmp_path / "t", tmp_path, "share files|outside|link")
    assert (old / "config.json").exists()


def test_targets_that_are_one_by_any_name_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "link").symlink_to("a")
    for one, two in (("a", "link"), ("a", "a/b"), ("a", ".a.reshard"), (".a.reshard/files", "a")):
        with pytest.raises(UsageError, match="two targets"):
            paddle_reshard.convert(SMALL, {tmp_path / one: {"to": "tp=1"}, tmp_path / two: {"to": "tp=2"}})
    assert tree(tmp_path) == {"a": "folder", "link": "a"}


def test_a_file_to_fill_with_is_protected_too(tmp_path: Path) -> None:
    fill = tmp_path / "t" / "model.safetensors"
    fill.parent.mkdir()
    fill.write_bytes(b"theirs")
    with pytest.raises(UsageError, match="may not be inside each other"):
        paddle_reshard.convert(SMALL, tmp_path / "t", fill=fill, overwrite=True, **ONE_CARD)
    assert fill.exists()


@pytest.mark.parametrize("target", ["s", "s/", "s/inside", ""])
def test_prefixes_of_a_store_are_locations_too(target: str, bucket: str) -> None:
    fill_memory(f"/{bucket}/s", SMALL)
    with pytest.raises(UsageError, match="source and target"):
        paddle_reshard.convert(
            f"memory://{bucket}/s", f"memory://{bucket}/{target}", overwrite=True, **ONE_CARD
        )


# ------------------------------------------------------------------------------------------------- names of a source


@pytest.mark.parametrize(
    ("key", "told"),
    [
        ("n" * 300 + ".model", "which has 306 bytes"),
        ("é" * 128 + ".model", "which has 262 bytes"),
    ],
)
def test_a_name_that_no_disk_takes_is_refused_before_anything_is_made(
    key: str, told: str, bucket: str, tmp_path: Path
) -> None:
    fill_memory(f"/{bucket}/c", SMALL)
    memory = fsspec.filesystem("memory")
    memory.store[f"/{bucket}/c/{key}"] = memory.store[f"/{bucket}/c/config.json"]
    for attempt in (paddle_reshard.plan, paddle_reshard.convert):
        with pytest.raises(TargetError, match=told):
            attempt(f"memory://{bucket}/c", tmp_path / "made" / "t", **ONE_CARD)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("key", ["..", ".", "a\0b"])
def test_a_name_that_leads_elsewhere_is_not_carried(key: str, bucket: str, tmp_path: Path) -> None:
    fill_memory(f"/{bucket}/c", SMALL)
    memory = fsspec.filesystem("memory")
    memory.store[f"/{bucket}/c/{key}"] = memory.store[f"/{bucket}/c/config.json"]
    report = paddle_reshard.convert(f"memory://{bucket}/c", tmp_path / "t", **ONE_CARD)
    assert key in dict(report.plan.targets[0].not_carried)
    assert [path.name for path in tmp_path.iterdir()] == ["t"]


# --------------------------------------------------------------------------------------------------- full disks


def _with_free(monkeypatch: pytest.MonkeyPatch, free_bytes: int, *, all_bytes: int | None = None) -> None:
    """Let the operating system say that so much is free, of so much."""
    real = os.statvfs

    def told(path: Any) -> os.statvfs_result:
        found = list(real(path))
        found[1] = found[0] or 4096
        found[2] = found[2] if all_bytes is None else all_bytes // found[1]
        found[3] = found[4] = free_bytes // found[1]
        return os.statvfs_result(found)

    monkeypatch.setattr(os, "statvfs", told)


def test_a_disk_without_room_is_refused_before_the_first_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = paddle_reshard.plan(SMALL, tmp_path / "t", **ONE_CARD).plan.written_bytes
    _with_free(monkeypatch, written // 2)
    for attempt in (paddle_reshard.plan, paddle_reshard.convert):
        with pytest.raises(TargetError, match=r"needs \d+ bytes, but the disk has \d+ bytes free") as e:
            attempt(SMALL, tmp_path / "t", **ONE_CARD)
        numbers = [int(word) for word in str(e.value).split() if word.isdigit()]
        assert written <= numbers[0] <= written + 4096 * 40
        assert written // 2 - 4096 < numbers[1] <= written // 2
        assert e.value.retryable
    with pytest.raises(TargetError, match="bytes free"):
        paddle_reshard.convert(SMALL, tmp_path / "t", resume=True, **ONE_CARD)
    with pytest.raises(TargetError, match="bytes free"):
        paddle_reshard.average([SMALL, SMALL], tmp_path / "t", uniform=True, **ONE_CARD)
    with pytest.raises(TargetError, match="bytes free"):
        paddle_reshard.convert(SMALL, "memory://staged/t", **ONE_CARD)  # what is staged lies on a disk too
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_reports_no_space_at_all_is_written_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _with_free(monkeypatch, 0, all_bytes=0)
    paddle_reshard.convert(SMALL, tmp_path / "t", **ONE_CARD)
    assert paddle_reshard.check(tmp_path / "t").intact


def test_targets_on_one_disk_share_its_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = paddle_reshard.plan(SMALL, tmp_path / "t", **ONE_CARD).plan.written_bytes
    _with_free(monkeypatch, written * 3 // 2)
    paddle_reshard.plan(SMALL, tmp_path / "a", **ONE_CARD)
    with pytest.raises(TargetError, match=f"{tmp_path}/a, {tmp_path}/b: needs"):
        paddle_reshard.plan(SMALL, {tmp_path / "a": {"to": "tp=1"}, tmp_path / "b": {"to": "tp=2"}})


def test_what_is_staged_already_counts_as_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = in_groups(1_000_000)
    written = small.plan(SMALL, tmp_path / "t", **ONE_CARD).plan.written_bytes
    with pytest.raises(OSError, match="No space left"):
        small.convert(SMALL, tmp_path / "t", workers=1, observe=_full_after(written // 2), **ONE_CARD)
    _with_free(monkeypatch, written * 3 // 4)
    small.convert(SMALL, tmp_path / "t", workers=1, resume=True, **ONE_CARD)
    assert paddle_reshard.check(tmp_path / "t").intact


def _full_after(nbytes: int) -> Any:
    """An observer in whose run the disk is full when so much is written."""
    left = nbytes

    def observe(event: Event) -> None:
        nonlocal left
        if isinstance(event, Progress):
            left -= event.done_bytes
            if left <= 0:
                raise OSError(28, "No space left on device")

    return observe


def _nothing_may_grow() -> None:
    """A process that can make files, and write nothing into them: so is a disk that is full."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))


@pytest.mark.parametrize(
    "arguments",
    [
        ["plan", SMALL, "--to", "tp=1", "--save"],
        ["plan", SMALL, "--to", "tp=1", "--report"],
        ["fingerprint", SMALL, "--output"],
        ["verify", SMALL, "--resume"],
    ],
    ids=lambda arguments: f"{arguments[0]}{arguments[-1]}",
)
def test_a_file_that_does_not_fit_is_not_left_in_part(arguments: list[Any], tmp_path: Path) -> None:
    done = subprocess.run(
        [*MAIN, *arguments, tmp_path / "file"], preexec_fn=_nothing_may_grow, capture_output=True, text=True
    )
    assert done.returncode in (1, 2)
    assert f"{tmp_path}/file: cannot be written: the file is larger than the limit of this" in done.stderr
    assert "; give another file" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_cleaning_needs_no_space(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No space left"):
        paddle_reshard.convert(SMALL, tmp_path / "t", observe=_full_after(1), **ONE_CARD)
    assert (tmp_path / ".t.reshard" / "session.json").exists()
    done = subprocess.run(
        [*MAIN, "clean", tmp_path / "t"], preexec_fn=_nothing_may_grow, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_disk_too_full_to_give_the_lock_back_does_not_keep_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same process resumes as soon as there is space."""
    really = os.open

    def full(path: Any, *args: Any, **kwargs: Any) -> int:
        if str(path).endswith("session.json.new"):
            raise OSError(28, "No space left on device", str(path))
        return really(path, *args, **kwargs)

    def observe(event: Event) -> None:
        if isinstance(event, Progress) and event.done_bytes:
            monkeypatch.setattr(os, "open", full)
            raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        paddle_reshard.convert(SMALL, tmp_path / "t", observe=observe, **ONE_CARD)
    monkeypatch.setattr(os, "open", really)
    assert '"held": true' in (tmp_path / ".t.reshard" / "session.json").read_text()
    moved = paddle_reshard.convert(SMALL, tmp_path / "t", resume=True, **ONE_CARD).moved
    assert moved.resumed_groups > 0
    assert paddle_reshard.check(tmp_path / "t").intact
