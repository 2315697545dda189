"""How much memory does a process really have for itself?"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

SECONDS_BETWEEN_LOOKS = 0.005
PAUSE_PER_LOOK = 4
"""A pause lasts so many times as long as the look before it: the kernel walks all pages for one, and cores are few."""
ANY_BUDGET = "import paddle_reshard.pipeline.core.units as o; o.SMALLEST_BUDGET_BYTES = 0; "
RUN = "from paddle_reshard.pipeline.cli.main import main; main()"


def private_bytes(pid: int) -> int:
    """Bytes of pages that no other process has; 0 if the process has ended."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Private_"))


def run_watched(
    arguments: Sequence[object], watch: Callable[[int], dict[int, int]] | None = None
) -> dict[int, int]:
    """Run the command line, below the smallest budget too, and look at its memory all the time.

    Returns the most private bytes seen of each process: of the command itself, or of those that ``watch`` finds.
    """
    process = subprocess.Popen(
        [sys.executable, "-c", ANY_BUDGET + RUN, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    most: dict[int, int] = {}
    try:
        while process.poll() is None:
            began = time.monotonic()
            seen = watch(process.pid) if watch else {process.pid: private_bytes(process.pid)}
            most |= {pid: max(found, most.get(pid, 0)) for pid, found in seen.items()}
            time.sleep(max(SECONDS_BETWEEN_LOOKS, PAUSE_PER_LOOK * (time.monotonic() - began)))
    finally:
        process.kill()
        said, _ = process.communicate()
    assert process.returncode == 0, said
    return most
