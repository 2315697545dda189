"""Commands that a signal ends: one sentence names the signal and what is kept, and the status shows the signal."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import paddle_reshard
from tests.conftest import REPO, case_directory
from tests.jobs.command import run

SOURCE = case_directory("mp2pp2sh2_s1v2_meta_ema") / "checkpoint-3"
SLOW = """
import itertools, signal, sys, time
how = sys.argv.pop(1)
# Whoever runs the tests may have been started with nohup.
signal.signal(signal.SIGHUP, signal.SIG_IGN if how == "nohup" else signal.SIG_DFL)
from paddle_reshard.clusters.inline import InlineEngine as Engine
import paddle_reshard
from tests.sized import size_commands
size_commands(100_000)
run = Engine.run

def slow(*arguments):
    for number, report in enumerate(run(*arguments)):
        yield report
        if number == 2:
            print("moving", flush=True)
            try:
                # In short sleeps: a signal just before a sleep begins does not shorten that one.
                for _ in range(20 if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else 1200):
                    time.sleep(0.05)
            except KeyboardInterrupt:
                if how == "as in Ray":  # whose waiting ends with an interrupt of its own
                    raise KeyboardInterrupt from None
                raise

Engine.run = slow
from paddle_reshard.pipeline.cli.main import main
main()
"""


def told_to_end(number: signal.Signals, target: Path, how: str = "plain") -> tuple[int, str]:
    """Status and stderr of a conversion that gets a signal while it moves groups."""
    command = [sys.executable, "-c", SLOW, how, "convert", SOURCE, target, "--to", "tp=1", "--quiet"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=REPO, **pipes) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "moving\n"
        process.send_signal(number)
        _, errors = process.communicate(timeout=120)
    return process.returncode, errors


@pytest.mark.parametrize(
    ("number", "how"),
    [
        (signal.SIGINT, "plain"),
        (signal.SIGTERM, "plain"),
        (signal.SIGHUP, "plain"),
        (signal.SIGTERM, "as in Ray"),
    ],
)
def test_kept_work_is_reported_and_resumed(number: signal.Signals, how: str, tmp_path: Path) -> None:
    status, said = told_to_end(number, tmp_path / "out", how)
    assert status == 128 + number
    target = tmp_path / "out"
    assert said.replace("\n\n", "\n") == (  # click ends the line of a ^C
        f"{target}: finished work is kept; the same command with --resume continues, paddle-reshard clean {target} "
        f"removes it\npaddle-reshard: interrupted by {number.name}\n"
    )
    assert not (tmp_path / "out").exists()
    cleaned = run("clean", tmp_path / "out", "--json")
    assert cleaned.returncode == 0
    assert '"removed": [' in cleaned.stdout
    assert list(tmp_path.iterdir()) == []


def test_a_hangup_that_is_ignored_stays_ignored(tmp_path: Path) -> None:
    assert told_to_end(signal.SIGHUP, tmp_path / "out", "nohup") == (0, "")
    assert paddle_reshard.check(tmp_path / "out").intact


def test_an_interrupt_before_a_command_begins_is_quiet(tmp_path: Path) -> None:
    (tmp_path / "click.py").write_text("import time\nprint('importing', flush=True)\ntime.sleep(60)\n")
    command = [sys.executable, "-m", "paddle_reshard", "inspect", SOURCE]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    with subprocess.Popen(command, cwd=REPO, env=environment, **pipes) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "importing\n"
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=120)
    assert (process.returncode, errors) == (130, "")
