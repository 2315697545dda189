"""Checks with the real trainer: each name of a table is one, and the result is counted."""

import json
import signal
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from paddle_reshard import ReshardError
from tests.lab.laboratory import Laboratory
from tests.parity.lab import LabError, alone, say

DRIVER = Path(__file__).with_name("driver.py")


def check_all(names: Collection[str], check: Callable[[Laboratory, str], tuple[str, list[str]]]) -> int:
    """Let ``check`` tell of each name what was compared and what is wrong; the result is the exit status."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    failed = 0
    try:
        with alone(), Laboratory() as lab:
            for name in names:
                began = time.monotonic()
                try:
                    told, found = check(lab, name)
                except (LabError, ReshardError) as error:
                    told, found = "not compared", [str(error)]
                failed += bool(found)
                say(f"{'FAILED' if found else 'passed'}  {name} ({time.monotonic() - began:.1f} s): {told}")
                for difference in found[:8]:
                    say(f"        {difference}")
                if len(found) > 8:
                    say(f"        and {len(found) - 8} more")
    except LabError as error:
        say(f"parity: {error}")
        return 2
    say(f"{len(names) - failed} passed, {failed} failed")
    return 1 if failed else 0


def run_trainer(
    lab: Laboratory,
    name: str,
    out: Path,
    *,
    options: Sequence[str],
    ranks: int,
    arguments: Mapping[str, Any],
    model: Mapping[str, Any],
    timeout_seconds: float,
    environment: Mapping[str, str],
    driver: Path = DRIVER,
) -> list[str]:
    """Run a job under ``driver``, which starts it from the arguments of a command line; return the ranks' logs.

    The usual driver lets the trainer resume from a checkpoint (``--resume``) and dumps what it then holds.
    """
    command = [str(driver), "--case", name, "--out", str(out)]
    command += ["--args", json.dumps(dict(arguments)), "--model", json.dumps(dict(model)), *options]
    logs = out.parent / "logs"
    return lab.script(command, name, logs, ranks=ranks, seconds=timeout_seconds, environment=environment)
