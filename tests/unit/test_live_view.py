"""What a terminal shows while a command runs: a terminal emulator reads it, and says what a person would see."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import click
import numpy as np
import pytest

from paddle_reshard.pipeline.cli.command import running
from paddle_reshard.pipeline.cli.main import cli
from paddle_reshard.pipeline.core.events import (
    Event,
    FilesRead,
    GroupEnded,
    Progress,
    StepEnded,
    StepStarted,
    Waiting,
    WorkerAssigned,
)
from paddle_reshard.pipeline.core.run_state import RunState
from paddle_reshard.pipeline.progress.live_view import ASCII, MOST_WORKERS, LiveView
from tests.conftest import COMMITTED, REPO
from tests.sized import in_groups

DEMO = COMMITTED / "mp2pp2sh2_s1v2_meta_ema" / "checkpoint-3"
GROUP_BYTES = 60_000
WORKERS = 2
PATIENCE_SECONDS = 60.0
GATED = f"""
import logging, os, sys, threading
import paddle_reshard
from paddle_reshard.pipeline.cli.main import main
from paddle_reshard.storage.local.source import LocalSource
from tests.sized import size_commands

gate = int(sys.argv.pop(1))
os.open(os.ttyname(0), os.O_RDWR)  # the first terminal that a session opens is the one that controls it
read_many = LocalSource.read_many

def read_when_let_in(self, reads):
    if threading.current_thread() is not threading.main_thread() and os.read(gate, 1) == b"w":
        logging.getLogger("paddle_reshard.storage").warning("slow: %s", "\\x1b[2J\\nname")
    read_many(self, reads)

LocalSource.read_many = read_when_let_in
size_commands({GROUP_BYTES})
main()
"""
"""The command line with small groups, each of which waits for a byte before it reads."""


class Terminal:
    """A terminal, as a person sees it."""

    def __init__(self, columns: int, rows: int) -> None:
        import pyte

        self.here, self.there = pty.openpty()
        self.screen = pyte.Screen(columns, rows)
        self._stream = pyte.ByteStream(self.screen)
        self.received = b""
        self.resize(columns, rows)

    def resize(self, columns: int, rows: int) -> None:
        fcntl.ioctl(self.there, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self.screen.resize(rows, columns)

    def lines(self) -> list[str]:
        """What is on it, without empty lines."""
        return [line.rstrip() for line in self.screen.display if line.strip()]

    def take(self, seconds: float) -> bool:
        """Whether something has arrived within this time; then it has been shown."""
        if not select.select([self.here], [], [], seconds)[0]:
            return False
        block = os.read(self.here, 1 << 16)
        self.received += block
        self._stream.feed(block)
        return True

    def wait_for(self, condition: Callable[[], bool]) -> None:
        until = time.monotonic() + PATIENCE_SECONDS
        while not condition():
            assert time.monotonic() < until, self.lines()
            self.take(0.1)


@contextmanager
def terminal(columns: int, rows: int) -> Iterator[Terminal]:
    made = Terminal(columns, rows)
    try:
        yield made
    finally:
        os.close(made.here)
        os.close(made.there)


def private_bytes(process: int) -> int:
    rollup = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) << 10 for line in rollup if line.startswith("Private_Dirty"))


def test_a_terminal_shows_where_a_real_conversion_is_and_is_clean_after_an_interrupt(tmp_path: Path) -> None:
    plan = in_groups(GROUP_BYTES).plan(DEMO, to="tp=1").plan
    of_group = np.zeros(plan.groups, dtype=np.int64)
    np.add.at(of_group, plan.parts["group"], plan.parts["stop"] - plan.parts["start"])
    reading, writing = os.pipe()
    # A terminal's size does not count where these are set, as readline does in the processes of a parallel run.
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    arguments = ("convert", DEMO, tmp_path / "made", "--to", "tp=1", "--workers", WORKERS)
    with terminal(80, 24) as shown:
        process = subprocess.Popen(
            [sys.executable, "-c", GATED, str(reading), *map(str, arguments)],
            stdin=shown.there,
            stdout=shown.there,
            stderr=shown.there,
            cwd=REPO,
            env={**environment, "TERM": "xterm-256color", "NO_COLOR": "1"},
            start_new_session=True,
            pass_fds=[reading],
        )
        try:

            def runs() -> list[int]:
                """The groups that workers run."""
                rows = [re.match(r"  thread_\d  group (\d+) ", line) for line in shown.lines()]
                return [int(row[1]) for row in rows if row]

            def done() -> int:
                found = re.search(r"(\d+) of \d+ groups", "\n".join(shown.lines()))
                return int(found[1]) if found else 0

            shown.wait_for(lambda: len(runs()) == WORKERS)
            before = done()
            os.write(writing, b"." * 30 + b"w")
            shown.wait_for(lambda: done() >= before + 31 and len(runs()) == WORKERS)
            lines = shown.lines()
            # Groups begin in order: all before the last that runs are done, but for those that run.
            ended = sorted(set(range(max(runs()))) - set(runs()))
            text = "\n".join(lines)
            assert f"{len(ended)} of {plan.groups} groups" in text
            moved, total = int(of_group[ended].sum()), plan.written_bytes
            assert f"  {moved / 1024:.1f} KiB of {total / 1024**2:.1f} MiB" in text
            assert f" {moved / total:4.0%}" in next(line for line in lines if line.startswith("▸ move"))
            assert re.search(rf"^✓ plan +[\d.]+ s .*{plan.groups} groups", text, re.MULTILINE)
            assert f"  {WORKERS} busy  " in text
            memory = re.search(r"memory  ([\d.]+) MiB of 1.0 GiB  ", text)
            assert memory is not None
            assert float(memory[1]) == pytest.approx(private_bytes(process.pid) / 1024**2, abs=16)
            # What is logged stands above, in one piece, and does nothing to the terminal.
            assert [line for line in lines if "slow" in line] == [lines[0]] == [r"slow: \x1b[2J\nname"]

            shown.resize(40, 7)
            # Of the workers one row is left, and none once the rate of the last ten seconds has a line of its own.
            shown.wait_for(lambda: len(shown.lines()) == 6 and len(runs()) < WORKERS)
            shown.wait_for(lambda: re.match("▸ move .*%$", shown.lines()[0]) is not None)

            os.write(shown.here, b"\x03")
            os.close(writing)  # groups that run read on
            writing = -1
            shown.wait_for(lambda: process.poll() is not None)
            while shown.take(0.1):
                pass
        finally:
            process.kill()
            process.wait()
            os.close(reading)
            if writing >= 0:
                os.close(writing)
        assert process.returncode == 130
        assert not shown.screen.cursor.hidden
        assert "interrupted by SIGINT" in "\n".join(shown.lines())
        assert not re.search("▸|memory|thread_", "\n".join(shown.lines()))
        assert not re.search(rb"\x1b\[[0-9;]*[34]\d[;m]", shown.received)  # no colour


# ------------------------------------------------------------------------------------------------------ a run


class Clock:
    seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


def drawn(view: LiveView, columns: int, rows: int) -> list[str]:
    lines = ["".join(text for text, _ in line) for line in view.lines(columns, rows)]
    assert len(lines) <= max(1, rows - 1)
    return lines


def run_of(workers: int, *further: Event) -> tuple[LiveView, Clock]:
    """A run whose every worker has ended a group, and runs the next since as many seconds as it has a number."""
    clock = Clock()
    view = LiveView(RunState(clock=clock), lambda: 300 << 20)
    view.state(StepStarted("plan"))
    view.state(FilesRead(12, 48))
    clock.seconds = 2.0
    view.state(StepEnded("plan", "9 groups"))
    view.state(StepStarted("move", 1000 << 20, 400, 1 << 30))
    view.state(Waiting("Ray and its workers"))
    for number in reversed(range(workers)):
        clock.seconds += 1.0
        name = f"worker {number} on node"
        view.state(WorkerAssigned(name, (range(number, number + 1),), 64 << 20))
        view.state(GroupEnded(number, name, 1.0, 0.0, 64 << 20, 2 << 20, 3 << 20, 1 << 20))
        view.state(Progress(3 << 20))
        view.state(WorkerAssigned(name, (range(number + 100, number + 102),), 96 << 20))
    for event in further:
        view.state(event)
    return view, clock


def test_many_workers_are_folded_into_those_that_take_the_longest() -> None:
    view, _ = run_of(64, WorkerAssigned("worker 63 on node", ()), WorkerAssigned("worker 5 on node", None))
    lines = drawn(view, 100, 50)
    (heading,) = [number for number, line in enumerate(lines) if "runs" in line]
    assert lines[heading].split()[:6] == ["62", "busy,", "1", "idle,", "1", "lost"]
    rows = [line.split() for line in lines[heading + 1 : -1]]
    assert len(rows) == MOST_WORKERS - 1
    assert [row[1] for row in rows] == [str(number) for number in range(62, 62 - len(rows), -1)]
    # ... of which each has run for as many seconds as have passed since
    assert " ".join(rows[0][4:]) == "2 groups from 162 1 min 02 s 96.0 MiB 1 2.0 MiB 3.0 MiB"
    assert lines[-1] == f"  … {64 - len(rows)} more, idle or busy for less long"
    figures = " ".join(lines)
    assert "192.0 MiB of 1000.0 MiB · 64.0 MiB copied by the store · 3.0 MiB/s · 4 min 25 s left" in figures
    assert "64 of 400 groups" in figures
    # Workers of a cluster have their own memory.
    assert "  fullest worker  96.0 MiB of 1.0 GiB  ━━─" in figures


@pytest.mark.parametrize("workers", [0, 1, 12, 64])
@pytest.mark.parametrize(("columns", "rows"), [(200, 60), (80, 24), (40, 10), (20, 5), (1, 1)])
def test_the_step_and_its_share_fit_every_terminal(columns: int, rows: int, workers: int) -> None:
    view, _ = run_of(workers)
    lines = drawn(view, columns, rows)
    current = lines[0] if rows < 10 else next(line for line in lines if line.startswith("▸"))
    assert current.startswith("▸ move ")
    assert current.endswith(f" {0.3 * workers:.0f}%") or columns < 20
    if columns >= 40:
        figures = [line for line in lines if " · " in line or " of " in line]
        assert max(map(len, [current, *figures])) <= columns
    if workers == 12 and rows >= 24:
        table = lines[-12:]
        assert [int(line.split()[1]) for line in table] == list(range(12))
        assert len({len(line) for line in lines[-13:]}) == 1
        assert max(map(len, table)) <= columns


def test_the_start_of_a_cluster_does_not_count_for_the_rate() -> None:
    view, clock = run_of(0)
    assert "waiting for Ray and its workers" in " ".join(drawn(view, 80, 24))
    clock.seconds += 60.0
    view.state(WorkerAssigned("worker 0 on node", (range(9),), 1 << 20))
    assert "waiting" not in " ".join(drawn(view, 80, 24))
    clock.seconds += 2.0
    view.state(Progress(100 << 20))
    assert "100.0 MiB of 1000.0 MiB · 50.0 MiB/s · 18.0 s left" in " ".join(drawn(view, 80, 24))


def test_retries_and_a_store_that_has_stopped_stand_out() -> None:
    retries = {"SlowDown": 2}
    clock = Clock()
    view = LiveView(RunState(lambda: retries, clock), lambda: 1, ASCII)
    view.state(StepStarted("comparing", 1000, 4, 1 << 30))
    retries["SlowDown"] = 5
    for _ in range(40):
        clock.seconds += 0.5
        view.state(Progress(10))
        lines = drawn(view, 80, 24)
    assert "  400 B of 1000 B | 20 B/s | 30.0 s left | 0 of 4 groups | 3 x SlowDown retried" in lines
    for _ in range(25):
        clock.seconds += 0.5
        lines = drawn(view, 80, 24)
    assert "lately 0 B/s" in " ".join(lines)
    assert all(line.isascii() for line in lines)


# --------------------------------------------------------------------------------- where nothing can be drawn


def test_a_terminal_gets_lines_if_nothing_can_be_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with terminal(400, 24) as shown, open(os.dup(shown.there), "w") as stream:  # a long path is one line
        monkeypatch.setattr(sys, "stderr", stream)
        monkeypatch.setenv("TERM", "dumb")
        monkeypatch.delenv("COLUMNS", raising=False)
        with pytest.raises(SystemExit) as ended:
            cli(["convert", str(DEMO), str(tmp_path / "made"), "--to", "tp=1"])
        while shown.take(0.0):
            pass
    assert ended.value.code == 0
    assert [line.split(":")[0] for line in shown.lines()] == ["plan", "move", "verify", "publish"]
    assert b"\x1b" not in shown.received


def test_what_is_printed_while_it_draws_goes_where_it_went(monkeypatch: pytest.MonkeyPatch) -> None:
    piped = io.StringIO()
    with terminal(80, 24) as shown, open(os.dup(shown.there), "w") as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        monkeypatch.setattr(sys, "stdout", piped)
        monkeypatch.setenv("TERM", "xterm-256color")
        with click.Context(click.Command("move")), running() as observe:
            observe(StepStarted("move", 100))
            observe(Progress(40))
            sys.stdout.write("an answer\n")
            sys.stderr.write("a warning\n")
        while shown.take(0.0):
            pass
    assert piped.getvalue() == "an answer\n"
    assert shown.lines() == ["a warning"]
    assert b"40%" in shown.received
