"""Who may resume or remove an unfinished conversion, and which error everybody else gets."""

import dataclasses
import hashlib
import json
import os
import shutil
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import fsspec
import pytest

import paddle_reshard
from paddle_reshard.pipeline.convert.manifest import describe_parts, format_manifest, manifest_head
from paddle_reshard.pipeline.core import version
from paddle_reshard.pipeline.core.errors import CheckpointError, FormatError, TargetError
from paddle_reshard.pipeline.core.events import Event, Progress, StepEnded
from paddle_reshard.pipeline.watch.decisions import Policy
from paddle_reshard.pipeline.watch.notices import Result
from paddle_reshard.pipeline.watch.runners import Conversion
from paddle_reshard.pipeline.watch.watcher import Watcher
from paddle_reshard.storage.checksum import checksum
from paddle_reshard.storage.local.source import LocalSource
from paddle_reshard.storage.session.ledger import ledger_line, parse_ledger
from paddle_reshard.storage.store import Receipt, Record
from tests.resume.conftest import SIZED, Driver, Stop, begin, stopping
from tests.storage.contents import in_bucket, in_folder, uploads, visible
from tests.storage.servers import Store

ONE = {"to": "tp=1", "workers": 1}


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "made" / "t"


@pytest.fixture
def unfinished(source: Path, target: Path) -> Path:
    """A target whose conversion has failed after two groups."""
    begin(source, target, **ONE)
    assert not target.exists()
    return target


def _session(target: Path) -> Path:
    return target.parent / f".{target.name}.reshard" / "session.json"


def _held_by(target: Path, **holder: Any) -> None:
    """Let a session be held by somebody else, whose last sign of life is now."""
    record = json.loads(_session(target).read_text())
    record["lock"]["holder"].update(holder)
    record["lock"].update(held=True, renewed_at=time.time())
    _session(target).write_text(json.dumps(record))


def test_a_failed_run_says_how_to_resume(
    source: Path, target: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(KeyboardInterrupt):
        SIZED.convert(source, target, observe=stopping(2, KeyboardInterrupt()), **ONE)
    assert f"--resume continues, paddle-reshard clean {target} removes it" in caplog.text
    with pytest.raises(TargetError, match=f"unfinished conversion of {source}; .*--resume.*clean {target}"):
        SIZED.convert(source, target, **ONE)
    moved = SIZED.convert(source, target, resume=True, **ONE).moved
    assert (moved.groups, moved.resumed_groups) == (2, 2)
    assert paddle_reshard.check(target).intact


def test_resuming_what_is_done_does_nothing(source: Path, target: Path) -> None:
    SIZED.convert(source, target, resume=True, **ONE)
    before = {path.name: path.stat().st_mtime_ns for path in target.iterdir()}
    moved = SIZED.convert(source, target, resume=True, **ONE).moved
    assert (moved.groups, moved.resumed_groups, moved.written_bytes) == (0, 4, 0)
    assert {path.name: path.stat().st_mtime_ns for path in target.iterdir()} == before
    with pytest.raises(TargetError, match="not empty"):
        SIZED.convert(source, target, resume=True, to="tp=2")


# ------------------------------------------------------------------------------------------- another conversion


def test_another_source_is_refused(source: Path, unfinished: Path) -> None:
    name = "trainer_state.bin"
    status = (source / name).stat()
    os.utime(source / name, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    try:
        with pytest.raises(
            TargetError,
            match=f"{name} of the source was .*{status.st_mtime_ns} ns,.* is .*{status.st_mtime_ns + 1} ns,",
        ):
            SIZED.convert(source, unfinished, resume=True, **ONE)
    finally:
        os.utime(source / name, ns=(status.st_atime_ns, status.st_mtime_ns))
    with pytest.raises(TargetError, match=f"{name} of the source was .* changed {status.st_ctime_ns} ns"):
        SIZED.convert(source, unfinished, resume=True, **ONE)


@pytest.mark.parametrize("asked", [{}, ONE], ids=["no options", "the same options"])
def test_a_finished_target_is_not_that_of_a_source_replaced_with_sizes_and_times(
    asked: dict[str, Any], source: Path, target: Path, tmp_path: Path
) -> None:
    copied = Path(shutil.copytree(source, tmp_path / "source"))
    SIZED.convert(copied, target, **ONE)
    SIZED.convert(copied, target, resume=True, **ONE)
    file = copied / "optimizer.tp00.pdopt"
    file.rename(tmp_path / "former")
    shutil.copy2(tmp_path / "former", file)
    with pytest.raises(TargetError, match=r"optimizer\.tp00\.pdopt of the source was .* inode|not empty"):
        SIZED.convert(copied, target, resume=True, **asked)


def test_another_version_is_refused(source: Path, unfinished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(version, "__version__", "9.9")
    with pytest.raises(TargetError, match=r"started by version 0\.1\.0 .*, this is version 9\.9"):
        SIZED.convert(source, unfinished, resume=True, **ONE)


def test_a_torn_line_of_the_ledger_does_not_count() -> None:
    records = [Record(0, (Receipt("a", 0, 5, "", "12"),), ("drift",)), Record(1, ())]
    lines = b"".join(map(ledger_line, records))
    for cut in range(len(lines) + 1):
        whole = lines[:cut].count(b"\n")
        found, good_bytes = parse_ledger(lines[:cut])
        assert found == records[:whole]
        assert good_bytes == (lines[:cut].rfind(b"\n") + 1)
    assert parse_ledger(b"\0" * 9 + lines) == ([], 0)


def test_allowed_drift_is_still_reported(source: Path, target: Path) -> None:
    """What a ledger says of an earlier run is in the manifest of the one that ends."""
    begin(source, target, replicas="report", **ONE)
    ledger = _session(target).with_name("ledger")
    records = parse_ledger(ledger.read_bytes())[0]
    records[0] = dataclasses.replace(records[0], drift=("one tensor: differs",))
    ledger.write_bytes(b"".join(map(ledger_line, records)))
    report = SIZED.convert(source, target, resume=True, replicas="report", **ONE)
    assert report.moved.replica_drift == ("one tensor: differs",)
    assert json.loads((target / "paddle_reshard.json").read_text())["source"]["replica_drift"]


# ------------------------------------------------------------------------------------------------ the lock


def test_a_second_live_run_is_refused(source: Path, target: Path) -> None:
    def observe(event: Event) -> None:
        if isinstance(event, Progress):
            for resume in (False, True):
                with pytest.raises(
                    TargetError, match=f"another conversion is writing it: process {os.getpid()}"
                ):
                    SIZED.convert(source, target, resume=resume, **ONE)
            with pytest.raises(TargetError, match=f"process {os.getpid()} on"):
                paddle_reshard.clean(target)

    SIZED.convert(source, target, observe=observe, **ONE)
    assert paddle_reshard.check(target).intact


@pytest.mark.parametrize("alive", [False, True])
def test_the_lock_of_a_process_elsewhere_is_waited_for(
    alive: bool, source: Path, unfinished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And refused if it is renewed meanwhile. The clock of the test is the one that waits."""
    _held_by(unfinished, host="gpu-7", machine="other", pid=4711)
    told = r"process 4711 on gpu-7.*its lock expires in \d+ s, for which --resume waits"
    for attempt in (
        partial(SIZED.convert, source, unfinished, **ONE),
        partial(paddle_reshard.clean, unfinished),
    ):
        with pytest.raises(TargetError, match=told):
            attempt()
    waited: list[float] = []

    def sleep(seconds: float) -> None:
        waited.append(seconds)
        record = json.loads(_session(unfinished).read_text())
        record["lock"]["renewed_at"] += 20 if alive else -seconds
        _session(unfinished).write_text(json.dumps(record))

    monkeypatch.setattr("paddle_reshard.pipeline.convert.conversion.sleep", sleep)
    if alive:
        with pytest.raises(TargetError, match=told):
            SIZED.convert(source, unfinished, resume=True, **ONE)
    else:
        assert SIZED.convert(source, unfinished, resume=True, **ONE).moved.resumed_groups == 2
    assert len(waited) == 1
    assert 100 < waited[0] <= 121


def test_a_process_of_this_host_that_has_ended_frees_it_at_once(source: Path, unfinished: Path) -> None:
    _held_by(unfinished, started="long ago")
    assert SIZED.convert(source, unfinished, resume=True, **ONE).moved.resumed_groups == 2


@pytest.mark.parametrize("scheme", ["file", "s3"])
def test_a_run_that_was_taken_over_stops(
    scheme: str, source: Path, target: Path, store: Store, bucket: str
) -> None:
    """It finds out when it next writes its session, and takes nothing back: that is the other one's now."""
    where = str(target) if scheme == "file" else f"s3://{bucket}/t"
    key = "t/.paddle_reshard_session.json"

    def observe(event: Event) -> None:
        if isinstance(event, Progress):
            if scheme == "file":
                _held_by(target, host="gpu-7", pid=4711)
                return
            record = json.loads(store.client.get_object(Bucket=bucket, Key=key)["Body"].read())
            record["lock"]["holder"].update(host="gpu-7", pid=4711)
            store.client.put_object(Bucket=bucket, Key=key, Body=json.dumps(record).encode())

    with pytest.raises(TargetError, match="lock is lost: taken over by process 4711 on gpu-7"):
        SIZED.convert(source, where, observe=observe, storage_options=store.options, **ONE)
    if scheme == "file":
        assert not target.exists() and _session(target).exists()
    else:
        assert visible(in_bucket(store, bucket)) == {}
        assert key in in_bucket(store, bucket) and uploads(store, bucket)


# ------------------------------------------------------------------------------------------------- cleaning


def test_cleaning_removes_what_is_unfinished_and_nothing_else(source: Path, unfinished: Path) -> None:
    folder = _session(unfinished).parent
    assert paddle_reshard.clean(unfinished) == (str(folder),)
    assert list(unfinished.parent.iterdir()) == []
    assert paddle_reshard.clean(unfinished) == ()
    SIZED.convert(source, unfinished, **ONE)
    made = in_folder(unfinished)
    assert paddle_reshard.clean(unfinished) == ()
    assert in_folder(unfinished) == made


@pytest.mark.parametrize(
    ("of", "nth", "after"),
    [
        ("create_multipart_upload [^.]", 2, True),  # no session has its id
        ("upload_part", 2, False),
        ("complete_multipart_upload", 2, False),
        ("put_object paddle_reshard", 1, False),
    ],
)
def test_cleaning_a_bucket(
    of: str, nth: int, after: bool, driver: Driver, store: Store, bucket: str, source: Path
) -> None:
    request = {"storage_options": store.options}
    driver.convert(source, f"s3://{bucket}/t", request=request, of=of, kill_at=nth, after=after)
    begun = len(uploads(store, bucket))
    assert begun or of == "put_object paddle_reshard"
    theirs = ["t/evaluation.parquet", "t/model_state/theirs.bin", "t2/theirs"]
    for key in theirs:  # another program writes here too
        store.client.create_multipart_upload(Bucket=bucket, Key=key)
    store.client.put_object(Bucket=bucket, Key="t2/theirs", Body=b"")
    cleaned = paddle_reshard.clean(f"s3://{bucket}/t", storage_options=store.options)
    # What the process had asked for as it was killed may begin a moment later.
    assert sum(name.endswith(" (upload)") for name in cleaned) >= begun
    assert in_bucket(store, bucket) == {"t2/theirs": b""}
    assert sorted(uploads(store, bucket)) == theirs


# -------------------------------------------------------------------------------------------- one target alone


@pytest.mark.parametrize(
    ("content", "error", "message"),
    [
        (None, CheckpointError, "has no paddle_reshard.json"),
        ("{", FormatError, "not valid JSON"),
        ("[]", FormatError, "not a paddle-reshard manifest"),
        ('{"format": "paddle-reshard manifest", "version": "0.0.9"}', FormatError, "has generation None"),
        ('{"format": "paddle-reshard manifest", "generation": 2}', FormatError, "not a valid manifest"),
        (
            '{"format": "paddle-reshard manifest", "generation": 2, "additional_files": [], "parts": {}, '
            '"files": {"a": 7}, "source": {"location": "", "files": {}, "versions": {}}}',
            FormatError,
            "a: its parts add up to 0 of 7 bytes",
        ),
    ],
)
def test_a_target_without_a_whole_manifest_is_refused(
    content: str | None, error: type[Exception], message: str, tmp_path: Path
) -> None:
    if content is not None:
        (tmp_path / "paddle_reshard.json").write_text(content)
    with pytest.raises(error, match=message):
        paddle_reshard.check(tmp_path)


def test_the_manifest_does_not_depend_on_order(source: Path, tmp_path: Path) -> None:
    made = []
    for workers in (1, 3):
        target = tmp_path / str(workers)
        SIZED.convert(source, target, to="tp=1", workers=workers)
        made.append((target / "paddle_reshard.json").read_bytes())
    assert made[0] == made[1]


# ------------------------------------------------------------------------------------------------- the watcher


@pytest.mark.parametrize(
    ("before", "told"), [("tp=1", " written; 2 groups, "), ("tp=2", "started with --to tp=2")]
)
def test_a_watcher_resumes_where_it_can_and_restarts_otherwise(
    before: str, told: str, source: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run, out = tmp_path / "run", tmp_path / "out"
    shutil.copytree(source, run / "checkpoint-3", copy_function=shutil.copyfile)
    begin(run / "checkpoint-3", out / "checkpoint-3", to=before, workers=1)
    conversion = Conversion(SIZED.request({"to": "tp=1", "workers": 1}), lambda one, other: "an-id")
    with caplog.at_level("INFO"):
        results = Watcher(str(run), str(out), conversion, Policy(settle_seconds=0)).once()
    assert results == {"checkpoint-3": Result.CONVERTED}
    assert told in caplog.text
    assert paddle_reshard.check(out / "checkpoint-3").intact


# --------------------------------------------------------------------------------------- parts that were copied


def test_copied_parts_are_compared_with_their_source(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    for folder in (source, target):
        folder.mkdir()
    content = os.urandom(300)
    (source / "a").write_bytes(content)
    (target / "b").write_bytes(content[100:200] + b"made")
    told = LocalSource(source)
    described = {
        **manifest_head("1"),
        "files": {"b": 104},
        "source": {"location": str(source), "files": told.sizes(), "versions": told.versions()},
        "parts": describe_parts(
            [Receipt("b", 100, 4, "", checksum(b"made")), Receipt("b", 0, 100)], {("b", 0): ("a", 100)}
        ),
    }
    (target / "paddle_reshard.json").write_bytes(format_manifest(described))
    found = paddle_reshard.check(target, source=source)
    assert (found.intact, found.parts, found.read_bytes, found.unchecked_bytes) == (True, 2, 104, 0)
    flipped = bytearray((target / "b").read_bytes())
    flipped[50] ^= 1
    (target / "b").write_bytes(flipped)
    (damage,) = paddle_reshard.check(target, source=source).damages
    assert (
        f"byte 50 is {flipped[50]}, byte 150 of a, which it was copied from, is {content[150]}"
        in damage.detail
    )
    (source / "a").write_bytes(content + b"more")
    found = paddle_reshard.check(target, source=source)
    assert (found.intact, found.read_bytes, found.unchecked_bytes) == (True, 4, 100)


def test_a_part_that_a_store_copied_is_compared_with_its_md5(tmp_path: Path) -> None:
    content = b"0123456789"
    (tmp_path / "b").write_bytes(content)
    md5 = hashlib.md5(content, usedforsecurity=False).hexdigest()
    described = {
        **manifest_head("1"),
        "files": {"b": 10},
        "source": {"location": str(tmp_path / "gone"), "files": {}, "versions": {}},
        "parts": describe_parts([Receipt("b", 0, 10, md5=md5)], {("b", 0): ("a", 0)}),
    }
    (tmp_path / "paddle_reshard.json").write_bytes(format_manifest(described))
    assert paddle_reshard.check(tmp_path).intact
    (tmp_path / "b").write_bytes(b"0123456780")
    assert "MD5 is" in paddle_reshard.check(tmp_path).damages[0].detail


# ------------------------------------------------------------------------------------------------ other stores


@pytest.mark.parametrize("step", ["move", "verify"])
def test_other_stores_resume_from_files_staged_here(
    step: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def observe(event: Event) -> None:
        if isinstance(event, StepEnded) and event.step == step:
            raise Stop

    with pytest.raises(Stop):
        SIZED.convert(source, "memory://resumed/t", observe=observe, **ONE)
    with pytest.raises(TargetError, match="--resume continues"):
        SIZED.convert(source, "memory://resumed/t", **ONE)
    moved = SIZED.convert(source, "memory://resumed/t", resume=True, **ONE).moved
    assert (moved.groups, moved.resumed_groups) == (0, 4)
    assert paddle_reshard.check("memory://resumed/t").intact
    assert list(tmp_path.iterdir()) == []
    fsspec.filesystem("memory").rm("/resumed", recursive=True)
