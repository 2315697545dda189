"""``--events``: one event a line on stderr or in a file, from the first step to the exit status."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paddle_reshard.pipeline.core.events import (
    FilesRead,
    GroupEnded,
    Progress,
    StepEnded,
    StepStarted,
    Waiting,
)
from paddle_reshard.pipeline.core.run_state import RunState
from paddle_reshard.pipeline.progress.events_as_json import ProgressEvents
from tests.conftest import COMMITTED, REPO
from tests.jobs.command import copy_checkpoint, run_here
from tests.published import hold

DEMO = COMMITTED / "mp2pp2sh2_s1v2_meta_ema" / "checkpoint-3"


def events_of(stderr: str) -> list[dict[str, Any]]:
    """Every line of one command, each as the published schema says; only the last is the end."""
    (events,) = commands_of(stderr)
    return events


def commands_of(text: str) -> list[list[dict[str, Any]]]:
    """The same for several commands, one after the other."""
    commands: list[list[dict[str, Any]]] = [[]]
    for line in text.splitlines():
        event = json.loads(line)
        hold(event, "progress-1")
        commands[-1].append(event)
        if event["event"] == "ended":
            commands.append([])
    assert not commands.pop()
    return commands


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]], dict[str, Any]]:
    """A target, the events of its conversion, and what it printed."""
    target = tmp_path_factory.mktemp("progress") / "tp1"
    done = run_here("convert", DEMO, target, "--to", "tp=1", "--json", "--events", "-")
    assert done.returncode == 0, done.stderr
    return target, events_of(done.stderr), json.loads(done.stdout)


def test_a_conversion_reports_steps_bytes_and_groups(converted: Any) -> None:
    _, events, answer = converted
    steps = [event["step"] for event in events if event["event"] == "step_started"]
    assert steps == ["plan", "move", "verify", "publish"]
    assert steps == [event["step"] for event in events if event["event"] == "step_ended"]
    (moved,) = (event for event in events if event["event"] == "step_ended" and event["step"] == "move")
    assert moved["done_groups"] == moved["total_groups"] == answer["moved"]["groups"] > 0
    assert moved["done_bytes"] == moved["total_bytes"] == answer["moved"]["written_bytes"]
    assert moved["bytes_per_second"] > 0
    assert moved["seconds_left"] == 0
    assert moved["worker"]
    assert moved["retries"] == 0
    end = events[-1]
    assert [end[name] for name in ("status", "error", "kind", "retryable")] == [0, None, None, False]


@pytest.mark.parametrize("command", ["verify", "check", "diff", "fingerprint", "plan", "ema"])
def test_other_commands_report_too_whatever_else_they_print(
    command: str, converted: Any, tmp_path: Path
) -> None:
    target = converted[0]
    arguments = {
        "verify": ("verify", DEMO, target),
        "check": ("verify", target),
        "diff": ("diff", DEMO, target, "--states", "param"),
        "fingerprint": ("fingerprint", target),
        "plan": ("plan", DEMO, "--to", "tp=1"),
        "ema": ("ema", target, target, tmp_path / "mean", "--uniform", "--to", "tp=1"),
    }
    done = run_here(*arguments[command], "--events=-", "--quiet")
    events = events_of(done.stderr)
    assert (done.returncode, done.stdout) == (0, "")
    assert events[0]["event"] == "step_started"
    read = [event for event in events[:-1] if event.get("done_bytes")]
    assert all(event["done_bytes"] <= event["total_bytes"] for event in read)
    assert bool(read) == (command != "plan")
    if command in ("verify", "diff", "fingerprint"):
        assert read[-1]["done_groups"] == read[-1]["total_groups"] > 0
        assert read[-1]["done_bytes"] == read[-1]["total_bytes"]
        assert read[-1]["bytes_per_second"] > 0
        assert read[-1]["seconds_left"] == 0


@pytest.mark.parametrize(
    ("arguments", "status", "kind"),
    [
        (("verify", DEMO, DEMO.parent), 2, "CoverageError"),
        (("convert", DEMO, "x", "--to", "tp=1", "--frmat", "flex"), 2, "UsageError"),
        (("fingerprint", REPO / "docs"), 1, "CheckpointError"),
    ],
    ids=["folder", "usage", "no checkpoint"],
)
def test_the_last_event_tells_why_a_command_failed(
    arguments: tuple[object, ...], status: int, kind: str
) -> None:
    done = run_here(*arguments, "--events", "-")
    last = events_of(done.stderr)[-1]
    assert (last["status"], last["kind"]) == (done.returncode, kind) == (status, kind)
    assert last["error"]


def test_progress_is_reported_once_a_second_and_a_change_of_step_at_once() -> None:
    now = [0.0]
    told: list[tuple[str, dict[str, Any]]] = []
    state = RunState(lambda: {"SlowDown": 5}, lambda: now[0])
    events = ProgressEvents(state, lambda event, **entries: told.append((event, entries)))

    def happen(*happened: Any) -> None:
        for event in happened:
            state(event)
            events(event)

    happen(StepStarted("plan"), FilesRead(1, 4), FilesRead(2, 4), StepEnded("plan", "3 groups"))
    happen(StepStarted("move", 100), Progress(40, before=True, groups=2), Waiting("Ray"))
    now[0] = 2.0
    happen(GroupEnded(7, "3", 0.5, 0.0, 9, 8, 20, 0, {"SlowDown": 2}), Progress(20), Progress(0))
    assert [event for event, _ in told] == [
        *("step_started", "progress", "step_ended", "step_started", "progress", "progress", "progress")
    ]
    assert [entries["detail"] for _, entries in told[1:3]] == ["1 of 4 files read", "3 groups"]
    # 20 bytes in 2 s, not 60: 40 were done by an earlier run
    assert told[-1][1] == {
        "step": "move", "detail": None, "seconds": 2.0, "done_bytes": 60, "total_bytes": 100,
        "done_groups": 3, "total_groups": None, "bytes_per_second": 10, "seconds_left": 4.0, "worker": "3",
        "retries": 2,
    }  # fmt: skip


# --- ``--events FILE``: of several commands, one after the other ----------------------------------------


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
