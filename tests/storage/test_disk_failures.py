"""An error of the operating system while moving: a clear sentence, finished work is kept, --resume continues."""

import errno
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import paddle_reshard
from paddle_reshard.pipeline.core.errors import CheckpointError, ReshardError
from paddle_reshard.pipeline.core.events import Event, Progress
from paddle_reshard.storage.local.source import LocalSource
from paddle_reshard.storage.os_errors import may_succeed_elsewhere
from paddle_reshard.storage.store import ReadRange
from tests.conftest import REPO
from tests.sized import in_groups
from tests.storage.contents import ONE_CARD, SMALL

FULL_IN_THE_MIDDLE = """
import json, logging, resource, sys
import paddle_reshard
from paddle_reshard.pipeline.core.events import Progress
from tests.sized import in_groups

convert = in_groups(500_000).convert
source, target = sys.argv[1:]
unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)

def observe(event):
    if isinstance(event, Progress) and event.done_bytes:
        resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, unlimited[1]))

logging.basicConfig()
try:
    convert(source, target, to="tp=1", workers=1, observe=observe)
except paddle_reshard.ReshardError as error:
    told = [type(error).__name__, str(error), error.retryable]
resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
moved = convert(source, target, to="tp=1", workers=1, resume=True).moved
print(json.dumps([*told, moved.resumed_groups, paddle_reshard.check(target).intact]))
"""


def test_a_disk_that_fills_up_is_reported_with_the_target_and_finished_work_is_kept(
    tmp_path: Path,
) -> None:
    """No file of the process may grow beyond 60 kB from the first group on (``setrlimit(2)``: EFBIG)."""
    done = subprocess.run(
        [sys.executable, "-c", FULL_IN_THE_MIDDLE, SMALL, "t"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(REPO)},
    )
    assert done.returncode == 0, done.stderr
    kind, told, retryable, resumed, intact = json.loads(done.stdout)
    assert (kind, retryable, intact) == ("TargetError", True, True)
    assert resumed > 0
    assert told.startswith("t: the file is larger than the limit of this process (ulimit -f)")
    assert f"({tmp_path}/.t.reshard/files/" in told
    assert "t: finished work is kept; the same command with --resume continues" in done.stderr


@pytest.mark.parametrize(
    ("code", "told"),
    [
        (errno.EIO, r"the disk failed \(input/output error\)"),
        (errno.ESTALE, "the network file system has lost the file"),
        (errno.ENOTCONN, os.strerror(errno.ENOTCONN).lower()),
    ],
)
def test_a_source_that_fails_while_it_is_read_is_named(
    code: int, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    convert = in_groups(500_000).convert
    really = os.preadv

    def preadv(*_: Any) -> int:
        raise OSError(code, os.strerror(code))

    def observe(event: Event) -> None:
        if isinstance(event, Progress) and event.done_bytes:
            monkeypatch.setattr(os, "preadv", preadv)

    with pytest.raises(CheckpointError, match=rf"^{SMALL}/\S+: {told}") as failed:
        convert(SMALL, tmp_path / "t", workers=1, observe=observe, **ONE_CARD)
    monkeypatch.setattr(os, "preadv", really)
    assert failed.value.retryable
    moved = convert(SMALL, tmp_path / "t", workers=1, resume=True, **ONE_CARD).moved
    assert moved.resumed_groups > 0
    assert paddle_reshard.check(tmp_path / "t").intact


def _error_of(source: ReadRange, code: int) -> ReshardError:
    with pytest.MonkeyPatch.context() as patch, pytest.raises(CheckpointError) as failed:
        patch.setattr(os, "preadv", lambda *_: (_ for _ in ()).throw(OSError(code, os.strerror(code))))
        source.read("config.json", 0, 1)
    return failed.value


def test_files_that_stay_open_fail_as_others_do() -> None:
    source = LocalSource(SMALL)
    known = _error_of(source, errno.EIO)
    with source.kept_open() as files:
        files.read("config.json", 0, 1)
        found = _error_of(files, errno.EIO)
    assert (str(found), found.retryable) == (str(known), True)
    assert may_succeed_elsewhere(found)


def test_another_machine_is_asked_where_it_may_see_the_disk_otherwise() -> None:
    source = LocalSource(SMALL)
    assert may_succeed_elsewhere(_error_of(source, errno.ESTALE))
    assert not may_succeed_elsewhere(_error_of(source, errno.ENOSPC))
    assert not may_succeed_elsewhere(CheckpointError("a refusal"))
    sent = pickle.loads(pickle.dumps(_error_of(source, errno.EDQUOT)))
    assert (type(sent), sent.retryable) == (CheckpointError, True)
    assert "the disk quota is used up" in str(sent)
