"""``--log-file``: progress, warnings and errors of several commands, one after the other."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.conftest import COMMITTED
from tests.jobs.command import copy_checkpoint, run_here

DEMO = COMMITTED / "mp2pp2sh2_s1v2_meta_ema" / "checkpoint-3"


def test_a_log_is_appended_to_whatever_is_printed(tmp_path: Path) -> None:
    log = tmp_path / "run.log"
    target = tmp_path / "a\x1b[2Jb"
    silent = run_here("convert", DEMO, target, "--to", "tp=1", "--quiet", "--log-file", log)
    assert (silent.returncode, silent.stdout, silent.stderr) == (0, "", "")
    first = log.read_text("utf-8")
    again = run_here("convert", DEMO, target, "--to", "tp=1", "--log-file", log)
    assert again.returncode == 1
    text = log.read_text("utf-8")
    assert text.startswith(first)
    assert "\x1b" not in text
    line = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ (INFO|ERROR) \S.*"
    assert all(re.fullmatch(line, each) for each in text.splitlines())
    said = [each.partition(" ")[2] for each in text.splitlines()]
    assert [one.split(": ")[0] for one in said if one.startswith("INFO move")] == ["INFO move"]
    assert said[-1].startswith("ERROR ")
    assert said[-1].removeprefix("ERROR ") in again.stderr
    assert sum(one.endswith(": convert") for one in said) == 2


def test_a_watch_logs_to_both(tmp_path: Path) -> None:
    log, run = tmp_path / "watch.log", tmp_path / "run"
    copy_checkpoint(run / "checkpoint-3")
    arguments = ("watch", run, tmp_path / "out", "--to", "tp=1", "--once")
    done = run_here(*arguments, "--quiet", "--log-file", log)
    assert (done.returncode, done.stderr) == (0, "")
    assert "checkpoint-3: converted in " in log.read_text("utf-8")
    shown = run_here(*arguments, "--log-file", log)
    assert shown.stderr.count("1 converted before") == 1
    assert shown.stderr.splitlines()[-1] in log.read_text("utf-8")


@pytest.mark.parametrize("name", [".", "missing/x"])
def test_a_log_that_cannot_be_written_is_wrong_usage(name: str, tmp_path: Path) -> None:
    done = run_here("convert", DEMO, tmp_path / "t", "--to", "tp=1", "--log-file", tmp_path / name)
    assert done.returncode == 2
    assert "--log-file" in done.stderr
    assert not (tmp_path / "t").exists()
