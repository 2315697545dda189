"""What a log says while a conversion runs."""

import fcntl
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import paddle_reshard
from paddle_reshard.pipeline.core.events import FilesRead, Progress, StepEnded, StepStarted, Waiting
from paddle_reshard.pipeline.core.run_state import RunState
from paddle_reshard.pipeline.progress.stream import Stream
from paddle_reshard.pipeline.request import progress_lines
from paddle_reshard.pipeline.request.progress_lines import ProgressLines
from tests.conftest import COMMITTED

SMALL = COMMITTED / "mp2pp2sh2_s1v2_meta_ema" / "checkpoint-3"
MANIFEST = "paddle_reshard.json"


def lines_of(write: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> Stream:
    """A stream of events that one observer writes as lines."""
    stream = Stream(RunState(clock=clock))
    lines = ProgressLines(stream.state, write)
    stream.observers.append(lines)
    stream.clocks.append(lines.tick)
    return stream


def test_a_long_step_reports_its_progress_periodically() -> None:
    told: list[str] = []
    now = [100.0]
    observe = lines_of(told.append, lambda: now[0])
    observe(StepStarted("plan"))
    observe(Progress(7))
    observe(StepEnded("plan", "3 groups"))
    observe(StepStarted("move", 100 << 20))
    for second in range(1, 26):
        now[0] = 100.0 + second
        observe(Progress(2 << 20))
    observe(StepEnded("move", "done"))
    assert told == [
        "plan: 3 groups",
        "move: 4.0 MiB of 100.0 MiB, 4 %, 2.0 MiB/s, 48 s left",
        "move: 24.0 MiB of 100.0 MiB, 24 %, 2.0 MiB/s, 38 s left",
        "move: 44.0 MiB of 100.0 MiB, 44 %, 2.0 MiB/s, 28 s left",
        "move: done; 25.0 s, 2.0 MiB/s",
    ]


def test_steps_that_move_nothing_report_files_read_or_what_they_wait_for() -> None:
    told: list[str] = []
    now = [0.0]
    observe = lines_of(told.append, lambda: now[0])
    observe(StepStarted("plan"))
    now[0] = 3.0
    observe(FilesRead(120, 4096))
    observe(StepStarted("move", 100 << 20))
    observe(Progress(40 << 20, before=True))
    observe(Waiting("Ray and its workers"))
    now[0] = 13.0
    observe(Progress(0))
    now[0] = 23.0
    observe(Progress(20 << 20))  # 20 MiB in 20 s: what an earlier run has done was not done in this time
    observe(StepEnded("move", "done"))
    assert told == [
        "plan: 120 of 4096 files read, 3.0 s so far",
        "move: waiting for Ray and its workers, 10.0 s so far",
        "move: 60.0 MiB of 100.0 MiB, 60 %, 1.0 MiB/s, 40 s left",
        "move: done; 20.0 s, 1.0 MiB/s",
    ]


def test_files_that_are_read_are_counted() -> None:
    ranks = len([*SMALL.glob("*.pdparams"), *SMALL.glob("*.pdopt")]) - len([*SMALL.glob("scheduler.*")])
    for act, options in ((paddle_reshard.inspect, {}), (paddle_reshard.plan, {"to": "tp=1"})):
        events: list[object] = []
        act(SMALL, **options, observe=events.append)
        files = [event for event in events if isinstance(event, FilesRead)]
        assert files == [FilesRead(done, ranks) for done in range(1, ranks + 1)]


def test_slow_cleaning_is_reported(tmp_path: Path) -> None:
    """Somebody else holds the lock of the session for a while."""
    folder = tmp_path / ".t.reshard"
    folder.mkdir()
    lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(lock, fcntl.LOCK_EX)
    command = [sys.executable, "-m", "paddle_reshard", "clean", str(tmp_path / "t")]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    try:
        assert process.stderr is not None
        assert select.select([process.stderr], [], [], 60)[0]
        line = process.stderr.readline()
        assert line.startswith("looking for an unfinished conversion: ")
    finally:
        os.close(lock)
        process.communicate(timeout=300)
    assert process.returncode == 0


def test_a_script_asks_for_the_lines_of_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[object] = []
    report = paddle_reshard.convert(SMALL, tmp_path / "made", to="tp=1", progress=True, observe=events.append)
    steps = [event.step for event in events if isinstance(event, StepEnded)]
    assert [line.partition(":")[0] for line in capsys.readouterr().err.splitlines()] == steps
    made = [path for path in (tmp_path / "made").iterdir() if path.name != MANIFEST]
    assert report.written_bytes == sum(path.stat().st_size for path in made)
    monkeypatch.setattr(progress_lines, "PATIENCE_SECONDS", 0.0)
    assert paddle_reshard.verify(SMALL, tmp_path / "made", progress=True)
    assert capsys.readouterr().err.startswith("comparing: ")
    assert paddle_reshard.verify(SMALL, tmp_path / "made")
    assert not capsys.readouterr().err
