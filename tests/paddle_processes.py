"""Programs that run in processes of their own with Paddle, which is imported once for all of them: two seconds each.

The processes are forks of one that has imported Paddle and done nothing else. This module is imported by each, so it
imports nothing of ours.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

REPO = Path(__file__).resolve().parents[1]
LONGEST_SECONDS = 200
_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["paddle", __name__])


class Started(NamedTuple):
    """A program that runs."""

    process: multiprocessing.process.BaseProcess
    output: Path

    def told(self) -> tuple[int | None, str]:
        """Wait until it ends: its status, and what it has printed. One that does not end is ended, without a status."""
        self.process.join(LONGEST_SECONDS)
        status = self.process.exitcode
        self.process.kill()
        text = self.output.read_text()
        self.output.unlink()
        return status, text


def start_paddle(program: str, *arguments: Path, **environment: str) -> Started:
    """Start a program, which finds the arguments in ``sys.argv``."""
    opened, output = tempfile.mkstemp(suffix=".txt")
    os.close(opened)
    variables = {**os.environ, "CUDA_VISIBLE_DEVICES": "", **environment}
    process = _FORKS.Process(target=_run, args=(program, list(map(str, arguments)), variables, output))
    process.start()
    return Started(process, Path(output))


def run_paddle(program: str, *arguments: Path) -> str:
    """What a program prints, which ends well."""
    status, told = start_paddle(program, *arguments).told()
    assert status == 0, told
    return told


def _run(program: str, arguments: list[str], variables: dict[str, str], output: str) -> None:
    os.environ.clear()
    os.environ.update(variables)
    os.chdir(REPO)
    with open(output, "w") as printed:
        for stream in (1, 2):
            os.dup2(printed.fileno(), stream)
    sys.argv = ["-c", *arguments]
    exec(program, {"__name__": "__main__"})
