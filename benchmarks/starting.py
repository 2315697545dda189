"""Start-up cost of commands, compared with ``python -c 'import numpy'``: in turns, medians of processor time.

``python -m benchmarks.starting [ROUNDS]``. Processor time does not depend on what else the machine is doing.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

CHECKPOINT = Path("tests/golden/cases/mp2pp2sh2_s1v2_meta_ema/checkpoint-3")
TARGET = "TARGET"
"""Stands for a folder that does not exist when a command starts."""
RUN = [sys.executable, "-c", "from paddle_reshard.pipeline.cli.main import main; main()"]
"""What the installed command runs."""
COMMANDS = {
    "import numpy": [sys.executable, "-c", "import numpy"],
    "--version": [*RUN, "--version"],
    "convert --help": [*RUN, "convert", "--help"],
    "wrong usage": [*RUN, "convert", "a", "b", "--to", "mp=2"],
    "inspect": [*RUN, "inspect", str(CHECKPOINT)],
    "convert 3 MB": [*RUN, "convert", str(CHECKPOINT), TARGET, "--to", "tp=2,pp=1,sharding=4", "--quiet"],
}


def seconds(command: list[str], environment: dict[str, str]) -> float:
    """Processor time of a command."""
    null = subprocess.DEVNULL
    with tempfile.TemporaryDirectory() as folder:
        words = [f"{folder}/T" if word == TARGET else word for word in command]
        process = subprocess.Popen(words, env=environment, stdout=null, stderr=null)
        _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    return used.ru_utime + used.ru_stime


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 15
    with tempfile.TemporaryDirectory() as bytecode:
        environment = {**os.environ, "PYTHONPYCACHEPREFIX": bytecode, "OPENBLAS_NUM_THREADS": "1"}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        for command in COMMANDS.values():
            seconds(command, environment)
        taken: dict[str, list[float]] = {name: [] for name in COMMANDS}
        for _ in range(rounds):
            for name, command in COMMANDS.items():
                taken[name].append(seconds(command, environment))
    unit = statistics.median(taken["import numpy"])
    for name, times in taken.items():
        median = statistics.median(times)
        print(f"{name:<16}{median:8.3f} s  {median / unit:5.2f}")


if __name__ == "__main__":
    main()
