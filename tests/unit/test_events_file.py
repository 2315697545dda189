"""``--events``: the stream of events of several commands, one after the other, in a file."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import COMMITTED
from tests.jobs.command import copy_checkpoint, run_here
from tests.unit.test_progress_events import commands_of, events_of

DEMO = COMMITTED / "mp2pp2sh2_s1v2_meta_ema" / "checkpoint-3"


def test_events_are_appended_whatever_is_printed(tmp_path: Path) -> None:
    log = tmp_path / "run.jsonl"
    target = tmp_path / "a\x1b[2Jb"
    silent = run_here("convert", DEMO, target, "--to", "tp=1", "--quiet", "--events", log)
    assert (silent.returncode, silent.stdout, silent.stderr) == (0, "", "")
    first = log.read_text("ascii")
    again = run_here("convert", DEMO, target, "--to", "tp=1", "--events", log)
    assert again.returncode == 1
    text = log.read_text("ascii")
    assert text.startswith(first)
    assert "\x1b" not in text
    converted, refused = commands_of(text)
    assert [event["step"] for event in converted if event["event"] == "step_ended"] == [
        *("plan", "move", "verify", "publish")
    ]
    (outcome,) = (event for event in converted if event["event"] == "outcome")
    assert [outcome[name] for name in ("outcome", "source", "target")] == [
        "converted",
        str(DEMO),
        str(target),
    ]
    assert outcome["plan_id"]
    assert (converted[-1]["status"], refused[-1]["kind"]) == (0, "TargetError")
    assert [event["outcome"] for event in refused if event["event"] == "outcome"] == ["refused"]
    assert refused[-1]["error"].replace("\x1b", r"\x1b") in again.stderr


def test_a_watch_writes_both(tmp_path: Path) -> None:
    log, run = tmp_path / "watch.jsonl", tmp_path / "run"
    copy_checkpoint(run / "checkpoint-3")
    arguments = ("watch", run, tmp_path / "out", "--to", "tp=1", "--once")
    done = run_here(*arguments, "--quiet", "--events", log)
    assert (done.returncode, done.stderr) == (0, "")
    events = events_of(log.read_text())
    assert [event["step"] for event in events if event["event"] == "step_ended"][-1] == "publish"
    assert [event["outcome"] for event in events if event["event"] == "outcome"] == ["converted"]
    said = [event["message"] for event in events if event["event"] == "message"]
    assert any("checkpoint-3: converted in " in line for line in said)
    assert "watch writes a log there" in run_here(*arguments, "--events", "-").stderr
    shown = run_here(*arguments, "--events", log)
    assert shown.stderr.count("1 converted before") == 1
    assert sum("1 converted before" in line for line in log.read_text().splitlines()) == 1


@pytest.mark.parametrize("name", [".", "missing/x"])
def test_a_file_that_cannot_be_written_is_wrong_usage(name: str, tmp_path: Path) -> None:
    done = run_here("convert", DEMO, tmp_path / "t", "--to", "tp=1", "--events", tmp_path / name)
    assert done.returncode == 2
    assert "--events" in done.stderr
    assert not (tmp_path / "t").exists()
