"""Measure commands, and format figures as tables.

Every contender is a process of its own, so that each pays for its own imports, memory and threads. Linux only: memory
and bytes come from ``/proc``.
"""

from __future__ import annotations

import json
import mmap
import os
import platform
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path

SAMPLE_SECONDS = 0.01
WATCH_SHARE = 0.05
"""Largest share of a processor that measuring may take. With many threads, as on Ray, samples are therefore taken less
often than every ``SAMPLE_SECONDS``."""
BLOCK_BYTES = 8 << 20
CLOCK_TICK_SECONDS = 0.01


@dataclass(frozen=True)
class Measured:
    """One run of one command."""

    seconds: float
    cpu_seconds: float
    private_bytes: int
    """Largest private (anonymous) memory of the process and its children together, sampled."""
    read_bytes: int
    written_bytes: int
    """Bytes moved by write calls, including in-kernel copies, without mapped pages; ``read_bytes`` likewise."""
    output: str


@dataclass(frozen=True)
class Verdict:
    """A goal and the measured value."""

    what: str
    goal: str
    measured: str
    met: bool | None
    """``None``: not measured."""
    at_limit: bool = False
    """Whether a figure that misses its goal is no worse than its limit, which decision 032 explains."""

    @classmethod
    def at_most(
        cls, what: str, goal: float, found: float, decimals: int = 2, limit: float | None = None
    ) -> Verdict:
        """A figure, the largest wanted and, if that cannot be reached, the largest that has been measured."""
        at_limit = limit is not None and bool(goal < found <= limit)
        return cls(what, f"≤ {goal:,}", f"{found:,.{decimals}f}", bool(found <= goal), at_limit)

    @classmethod
    def at_least(
        cls, what: str, goal: float, found: float, decimals: int = 2, limit: float | None = None
    ) -> Verdict:
        """A figure, the smallest wanted and, if that cannot be reached, the smallest that has been measured."""
        at_limit = limit is not None and bool(limit <= found < goal)
        return cls(what, f"≥ {goal:,}", f"{found:,.{decimals}f}", bool(found >= goal), at_limit)

    @property
    def row(self) -> tuple[str, ...]:
        """Its row of :func:`goals_table`."""
        met = "limit" if self.at_limit else {True: "yes", False: "**no**", None: "–"}[self.met]
        return self.what, self.goal, self.measured, met


class CommandFailed(Exception):
    """A measured command failed."""


def run(command: Sequence[str]) -> Measured:
    """Run a command to its end. Its standard output is kept, its errors are shown if it fails.

    It may keep the bytecode of what it imports, which installed packages have: to compile this package's modules takes
    as long as to import them.
    """
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        start = time.perf_counter()
        process = subprocess.Popen(command, stdout=output, stderr=errors, env=inherited)
        watch = _Watch(process.pid)
        watch.start()
        try:
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
            seconds = time.perf_counter() - start
            moved = _moved_bytes(process.pid)
        finally:
            watch.ended.set()
            watch.join()
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                process.wait()
        output.seek(0)
        errors.seek(0)
        if process.returncode != 0:
            message = errors.read().decode(errors="replace")[-2000:]
            raise CommandFailed(f"{' '.join(command)}: exit status {process.returncode}\n{message}")
        return Measured(seconds, watch.cpu_seconds, watch.peak, *moved, output.read().decode())


def inner_seconds(measured: Measured) -> Measured:
    """With the time that the command itself printed, without its imports."""
    seconds = float(measured.output.split("seconds ")[1].split()[0])
    return replace(measured, seconds=seconds)


def warm_memory(nbytes: int) -> None:
    """Make ``nbytes`` of memory available, for files and for processes.

    Memory that a virtual machine has not used for seconds may have been returned to its host, and takes longer to get
    back than to fill: ``cp`` of 3.8 GB then takes 1.1 or 4.5 s of system time.
    """
    block = bytes(BLOCK_BYTES)
    with mmap.mmap(-1, max(nbytes, 1), mmap.MAP_PRIVATE) as memory:
        for start in range(0, nbytes, BLOCK_BYTES):
            memory[start : start + BLOCK_BYTES] = block[: nbytes - start]


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def end_cleanly() -> None:
    """Let SIGTERM end this process after its cleanup."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))


class _Watch(threading.Thread):
    """Samples the memory and the time of a process and its children."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self.pid, self.ended, self.peak, self.cpu_seconds = pid, threading.Event(), 0, 0.0

    def run(self) -> None:
        last = False
        while True:
            started = time.thread_time()
            family = _family(self.pid)
            self.peak = max(self.peak, sum(map(_private_bytes, family)))
            self.cpu_seconds = max(self.cpu_seconds, sum(map(_cpu_seconds, family)))
            if last:
                return
            taken = time.thread_time() - started
            last = self.ended.wait(max(SAMPLE_SECONDS, taken / WATCH_SHARE))


def _family(pid: int) -> list[int]:
    """A process and its descendants."""
    found = [pid]
    for member in found:
        try:
            for children in Path(f"/proc/{member}/task").glob("*/children"):
                found += map(int, children.read_text().split())
        except OSError:
            continue
    return found


def _private_bytes(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon:"))


def _cpu_seconds(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


def _moved_bytes(pid: int) -> tuple[int, int]:
    """Bytes read and written by a process that has ended and has not been waited for."""
    counts = dict(line.split(": ") for line in Path(f"/proc/{pid}/io").read_text().splitlines())
    return int(counts["rchar"]), int(counts["wchar"])


# -------------------------------------------------------------------------------------------- side by side


def alternate(
    contenders: Mapping[str, Callable[[], Measured]], rounds: int, say: Callable[[str], None]
) -> dict[str, list[Measured]]:
    """Run contenders in turns, so that disturbances of the machine affect all of them.

    The order differs from round to round (and is the same in every run), so that the caches and the disk are not always
    left by the same predecessor.
    """
    runs: dict[str, list[Measured]] = {name: [] for name in contenders}
    order, shuffle = list(contenders), random.Random(0).shuffle
    for number in range(rounds):
        shuffle(order)
        for name in order:
            os.sync()  # no contender pays for the writes of its predecessor
            runs[name].append(contenders[name]())
            say(f"  {number + 1}/{rounds} {name}: {runs[name][-1].seconds:.2f} s")
    return runs


def median(runs: Sequence[Measured], what: str = "seconds") -> float:
    """The median of one figure."""
    return statistics.median(getattr(run, what) for run in runs)


def spread(runs: Sequence[Measured]) -> str:
    """Median, smallest and largest time."""
    times = [run.seconds for run in runs]
    if len(times) == 1:
        return f"{times[0]:.2f}"
    return f"{statistics.median(times):.2f} ({min(times):.2f}–{max(times):.2f})"


def ratio_of_rounds(runs: Sequence[Measured], baseline: Sequence[Measured], what: str = "seconds") -> float:
    """The median over rounds of a contender's time divided by the baseline's in the same round.

    ``what`` may be ``"cpu_seconds"``, of which a short run may have none that were counted.
    """
    pairs = ((getattr(run, what), getattr(base, what)) for run, base in zip(runs, baseline, strict=True))
    return statistics.median(mine / max(other, CLOCK_TICK_SECONDS) for mine, other in pairs)


# ------------------------------------------------------------------------------------------------- machine


def machine(directory: Path) -> list[str]:
    """A description of the machine. The disk rates are measured now, in ``directory``."""
    memory = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    gib = int(memory["MemTotal"].split()[0]) / (1 << 20)
    model = [
        line.split(":")[1].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if "model name" in line
    ]
    write, read = _disk_rates(directory)
    kind = subprocess.run(
        ["findmnt", "-n", "-o", "FSTYPE", "-T", directory], capture_output=True, text=True, check=True
    ).stdout.strip()
    return [
        f"{len(os.sched_getaffinity(0))} cores ({model[0] if model else platform.machine()}), {gib:.0f} GiB memory, "
        f"Linux {platform.release().split('-')[0]}, {kind}",
        f"disk: 1 GiB written and made durable at {write:.2f} GB/s, read back from the page cache at {read:.2f} GB/s",
        f"Python {platform.python_version()}, numpy {metadata.version('numpy')}, "
        f"paddle-reshard {metadata.version('paddle-reshard')}",
    ]


def load(when: str) -> str:
    """The machine's load: concurrent work slows down everything that needs the processor."""
    one, five, fifteen = os.getloadavg()
    return f"load average {when} the run: {one:.1f}, {five:.1f}, {fifteen:.1f}"


def _disk_rates(directory: Path) -> tuple[float, float]:
    """GB/s of writing 1 GiB with fsync, and of reading it again."""
    block, count = os.urandom(BLOCK_BYTES), (1 << 30) // BLOCK_BYTES
    with tempfile.NamedTemporaryFile(dir=directory, buffering=0) as file:
        start = time.perf_counter()
        for _ in range(count):
            file.write(block)
        os.fsync(file.fileno())
        written = time.perf_counter()
        buffer = bytearray(BLOCK_BYTES)
        for index in range(count):
            os.preadv(file.fileno(), [buffer], index * BLOCK_BYTES)
        read = time.perf_counter()
    return (1 << 30) / (written - start) / 1e9, (1 << 30) / (read - written) / 1e9


# --------------------------------------------------------------------------------------------------- tables


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A markdown table whose columns also line up in plain text."""
    cells = [list(head), *map(list, rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(head))]

    def line(row: Sequence[str]) -> str:
        first, *rest = (
            cell.ljust(w) if i == 0 else cell.rjust(w)
            for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        )
        return f"| {' | '.join([first, *rest])} |"

    rule = [("-" * w) if i == 0 else ("-" * (w - 1) + ":") for i, w in enumerate(widths)]
    return "\n".join([line(cells[0]), line(rule), *map(line, cells[1:])])


def goals_table(verdicts: Sequence[Verdict]) -> str:
    """Goals beside what was measured, as markdown."""
    return table(("goal", "wanted", "measured", "met"), [verdict.row for verdict in verdicts])


def print_result(
    head: Sequence[str], rows: Sequence[Sequence[str]], verdicts: Sequence[Verdict], as_json: bool
) -> None:
    """Print what a benchmark found: as JSON for another benchmark, which judges it with its own figures."""
    text = table(head, rows)
    if as_json:
        print(json.dumps({"table": text, "verdicts": [asdict(verdict) for verdict in verdicts]}))
    else:
        print(text)
        if verdicts:
            print(f"\n{goals_table(verdicts)}")


def write_figures(document: Path, figures: str, what: str = "figures") -> None:
    """Replace the text between the two marks of a document by figures; a document may have several such sections."""
    begin, end = f"<!-- {what}: written by the run, do not edit -->", f"<!-- end of {what} -->"
    before, rest = document.read_text("utf-8").split(begin)
    _, after = rest.split(end)
    document.write_text(f"{before}{begin}\n\n{figures.strip()}\n\n{end}{after}", "utf-8")
