"""A training run that is watched."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

from tests.jobs.command import MAIN, run_here

INTERRUPTED = """
import functools, os, pathlib, signal, sys, time
from paddle_reshard.pipeline.core.events import GroupEnded, Progress
from paddle_reshard.pipeline.watch import runners

real, moment, told = runners.convert_with, sys.argv.pop(1), pathlib.Path(sys.argv.pop(1))

@functools.wraps(real)
def convert(locations, request, observe):
    def hang(event):
        observe(event)
        if moment == "within" and isinstance(event, Progress):
            told.touch()
            time.sleep(60)
    real(locations, request, hang)
    os.kill(os.getpid(), signal.SIGKILL)

runners.convert_with = convert
"""
"""A watcher that hangs once it has written something, or is killed right after its first conversion."""


class Run:
    """A training run and where its conversions go."""

    def __init__(self, root: Path) -> None:
        self.root, self.run, self.out = root, root / "run", root / "out"
        self.run.mkdir()

    def watch(self, *options: object, to: str = "tp=1") -> subprocess.CompletedProcess[str]:
        """One look, in this process; what is killed, or runs beside others, has a process of its own."""
        return run_here("watch", self.run, self.out, "--to", to, "--once", *options)

    def records(self) -> list[dict]:
        folder = self.out / ".paddle_reshard" / "seen"
        found = [json.loads(path.read_bytes()) for path in folder.glob("*.json")] if folder.is_dir() else []
        return sorted(found, key=lambda record: record["target"])

    def states(self) -> list[str]:
        return [record["state"] for record in self.records()]

    def converted(self) -> list[str]:
        return sorted(path.parent.name for path in self.out.glob("*/paddle_reshard.json"))

    def change_record(self, **entries: object) -> None:
        (path,) = (self.out / ".paddle_reshard" / "seen").glob("*.json")
        path.write_text(json.dumps({**json.loads(path.read_bytes()), **entries}))

    def start_interrupted(self, moment: str) -> subprocess.Popen[str]:
        """A watcher that hangs within its conversion, or is killed right after it."""
        options = [moment, self.root / "told", "watch", self.run, self.out, "--to", "tp=1", "--once"]
        command = [sys.executable, "-c", INTERRUPTED + MAIN, *map(str, options)]
        return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)

    def wait_for_begin(self) -> None:
        deadline = time.monotonic() + 120
        while not (self.root / "told").exists():
            assert time.monotonic() < deadline
            time.sleep(0.02)
