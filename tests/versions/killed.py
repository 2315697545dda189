"""Kill ``publish`` or ``pull`` after each of its events, and run it again: ``python -m tests.versions.killed …``.

Prints a line for each event: its number, how the first and the second run ended, a digest of the safetensors files
that were in the target after the first, and the versions that were there. Each run is a
process of its own, forked from this one, which has imported everything and started no thread.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import paddle_reshard


def forked(act: Callable[[], object]) -> int:
    """Run a function in a process of its own; its exit status."""
    if (pid := os.fork()) == 0:
        act()
        os._exit(0)
    return os.waitpid(pid, 0)[1]


def killing(at: int) -> Callable[[object], None]:
    """An observer that kills its process at an event."""
    events = iter(range(at + 1, 0, -1))

    def observe(event: object) -> None:
        if next(events) == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    return observe


def main(command: str, start: Path, work: Path, step: int, *arguments: str) -> None:
    """Begin with a copy of ``start`` each time; what the second run makes is kept as ``<work>-<event>``."""
    act: Callable[..., Any] = getattr(paddle_reshard, command)
    places = [work / argument for argument in arguments]
    for at in range(0, 1000, step):
        shutil.rmtree(work, ignore_errors=True)
        shutil.copytree(start, work)
        killed = forked(lambda at=at: act(*places, observe=killing(at)))  # type: ignore[misc]
        seen = sorted(path.name for path in (work / arguments[-1]).glob("weight_v*"))
        held = hashlib.sha256()
        for path in sorted((work / arguments[-1]).glob("*.safetensors")):
            held.update(path.read_bytes())
        again = forked(lambda: act(*places))
        sys.stdout.write(" ".join([*map(str, (at, killed, again)), held.hexdigest(), *seen]) + "\n")
        sys.stdout.flush()
        shutil.move(work, work.with_name(f"{work.name}-{at}"))
        if killed == 0:
            break


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]), *sys.argv[5:])
