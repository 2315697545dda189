"""How conversions scale with the cores of a machine, and what holds them back.

    make scaling                     sized to the machine, within eight minutes, printed
    make scaling ARGS=--write        and into benchmarks/scaling.md
    make scaling ARGS='--size 300MB' smaller

Each operation runs with 1, 2, 4, … cores, a worker thread for each, in a process that may use no other core: first on a
file system in memory, then on the disk of ``--disk``, then (if Ray is installed) with Ray's worker processes.

Four figures of a run tell where it waits. Beside it, as many independent processes as it has cores do the same with
small checkpoints: they share memory and disk, but no lock of Python's, so where they scale and threads do not, the lock
holds threads back. Processor time that grows with the cores is spent waiting for memory (or for a lock by spinning).
A disk that is slower than memory is the disk. What is left is what one thread does alone: start, index, plan, publish.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import log2
from pathlib import Path
from typing import Any

from benchmarks.generate import SOURCE, V2, generate, llama_of, parse_size
from benchmarks.measure import CommandFailed, end_cleanly, machine, run, say, table, write_figures

DOCUMENT = Path(__file__).with_suffix(".md")
PICTURE = Path(__file__).with_suffix(".svg")
MEMORY = Path("/dev/shm")
BYTES_PER_CORE = 512 << 20
SHARE_OF_MEMORY = 12
"""The checkpoint takes at most this part of the memory: it lies there up to three times, and processes need some."""
SMALL = 8
"""How many times smaller the checkpoints of independent processes are."""
LIMIT_SECONDS = 8 * 60
BUDGET = "4GiB"


@dataclass(frozen=True)
class Operation:
    """What is measured, as arguments of a function of ``paddle_reshard``."""

    name: str
    function: str
    arguments: dict[str, Any]
    sources: int = 1
    """How many of the prepared folders it reads: the source, and the source converted to other axes."""

    @property
    def writes(self) -> bool:
        return self.function in ("convert", "ema")


ALL_AXES = Operation("all axes", "convert", {"to": "tp=4,sharding=4", "sharding_strategy": V2})
OPERATIONS = (
    ALL_AXES,
    Operation("only pp", "convert", {"to": "tp=2,pp=4,sharding=2", "sharding_strategy": V2}),
    Operation("to Hugging Face", "convert", {"format": "huggingface"}),
    Operation("average of two", "ema", {"to": "tp=4,sharding=4", "uniform": True}, sources=2),
    Operation("verify A B", "verify", {}, sources=2),
    Operation("fingerprint", "fingerprint", {}),
)
ON_DISK = (ALL_AXES, OPERATIONS[1], OPERATIONS[2])


@dataclass(frozen=True)
class Run:
    """One operation with some cores."""

    cores: int
    seconds: float
    moving_seconds: float
    """Between the first and the last byte of a tensor."""
    cpu_seconds: float


def measured(operation: Operation, folders: Sequence[Path], target: Path, cores: int, **more: Any) -> Run:
    """Run an operation in a process of its own that may use the first ``cores`` cores."""
    shutil.rmtree(target, ignore_errors=True)
    found = run(_command(operation, folders, target, sorted(os.sched_getaffinity(0))[:cores], **more))
    shutil.rmtree(target, ignore_errors=True)
    return Run(cores, found.seconds, json.loads(found.output), found.cpu_seconds)


def independent(operation: Operation, folders: Sequence[Path], scratch: Path, cores: int) -> float:
    """Seconds that ``cores`` processes take, each on a core of its own, to do an operation at the same time."""
    targets = [scratch / f"independent-{number}" for number in range(cores)]
    started = time.perf_counter()
    running = [
        subprocess.Popen(_command(operation, folders, target, [core]), stdout=subprocess.DEVNULL)
        for target, core in zip(targets, sorted(os.sched_getaffinity(0)), strict=False)
    ]
    if any([process.wait() for process in running]):
        raise CommandFailed(f"{operation.name}: one of {cores} processes failed")
    seconds = time.perf_counter() - started
    for target in targets:
        shutil.rmtree(target, ignore_errors=True)
    return seconds


def _command(
    operation: Operation, folders: Sequence[Path], target: Path, cores: Sequence[int], **more: Any
) -> list[str]:
    arguments = {"memory": BUDGET, "workers": len(cores), **operation.arguments, **more}
    sources = list(map(str, folders[: operation.sources]))
    asked = {
        "function": operation.function,
        "sources": sources,
        "target": str(target) if operation.writes else None,
        "arguments": arguments,
        "cores": list(cores),
    }
    return [sys.executable, "-m", "benchmarks.scaling", "--one", json.dumps(asked)]


def one(text: str) -> None:
    """Run one operation in this process, and print how many seconds its groups took."""
    asked = json.loads(text)
    os.sched_setaffinity(0, asked["cores"])
    import paddle_reshard
    from paddle_reshard.pipeline.core.events import Event, Progress

    moments: list[float] = []

    def observe(event: Event) -> None:
        if isinstance(event, Progress):
            moments.append(time.perf_counter())

    sources, targets = asked["sources"], [asked["target"]] if asked["target"] else []
    operate = getattr(paddle_reshard, asked["function"])
    positional = [sources, *targets] if asked["function"] == "ema" else [*sources, *targets]
    result = operate(*positional, observe=observe, **asked["arguments"])
    if asked["function"] == "verify" and not result:
        sys.exit("the two checkpoints differ")
    print(moments[-1] - moments[0] if moments else 0.0)


# ------------------------------------------------------------------------------------------------ the whole


class Scaling:
    """All runs on one machine, until a time at which no further one is started."""

    def __init__(self, size_bytes: int, cores: Sequence[int], until: float) -> None:
        self.size_bytes, self.cores, self.until = size_bytes, cores, until
        self.left_out: list[str] = []

    def prepare(self, folder: Path, *, small: bool) -> list[Path]:
        """A checkpoint and the same in another topology, which the operations read."""
        size = self.size_bytes // SMALL if small else self.size_bytes
        source, other = folder / "source", folder / "other"
        say(f"writing {size / 1e9:.2f} GB to {folder}")
        generate(llama_of(size), source, SOURCE, V2)
        import paddle_reshard

        paddle_reshard.convert(source, other, memory=BUDGET, **ALL_AXES.arguments)
        return [source, other]

    def rows(self, operation: Operation, folders: Sequence[Path], scratch: Path, **more: Any) -> list[Run]:
        return self._until_late(
            operation.name, lambda cores: measured(operation, folders, scratch / "target", cores, **more)
        )

    def independents(self, operation: Operation, folders: Sequence[Path], scratch: Path) -> list[float]:
        name = f"{operation.name}, processes"
        return self._until_late(name, lambda cores: independent(operation, folders, scratch, cores))

    def _until_late(self, name: str, go: Callable[[int], Any]) -> list[Any]:
        """What ``go`` gives for each number of cores, all or none."""
        found = []
        for cores in self.cores:
            if time.monotonic() > self.until:
                self.left_out.append(name)
                return []
            found.append(go(cores))
            say(f"  {name}, {cores} cores: {found[-1]}")
        return found


def threads_table(cores: Sequence[int], found: dict[str, list[Run]], apart: dict[str, list[float]]) -> str:
    """Seconds, how many times faster, and what holds each operation back."""
    head = ("", *(f"{n} cores" if n > 1 else "1 core" for n in cores), "times as fast", "moving alone")
    head = (*head, "processes", "CPU s ÷ 1 core")
    rows = []
    for name, runs in found.items():
        first, last = runs[0], runs[-1]
        alone = first.moving_seconds / last.moving_seconds if last.moving_seconds else float("nan")
        separate = apart.get(name)
        rows.append(
            (
                name,
                *(f"{run.seconds:.2f}" for run in runs),
                f"{first.seconds / last.seconds:.1f}",
                f"{alone:.1f}",
                f"{cores[-1] * separate[0] / separate[-1]:.1f}" if separate else "–",
                f"{last.cpu_seconds / first.cpu_seconds:.2f}",
            )
        )
    return table(head, rows)


def picture(cores: Sequence[int], found: dict[str, list[Run]]) -> str:
    """How many times faster each operation is, as lines over the number of cores."""
    width, height, left, top = 640, 360, 48, 20
    right, bottom = 200, 40
    across, down = width - left - right, height - top - bottom
    highest = cores[-1]
    shades = ("#1f4e79", "#c0504d", "#6a8f3c", "#7d5ba6", "#d08a2e", "#3f8f8b")

    def at(count: float, times: float) -> tuple[float, float]:
        """Both axes are logarithmic: a doubling is as long everywhere."""
        whole = log2(max(highest, 2))
        return left + across * log2(count) / whole, top + down * (1 - log2(max(times, 0.5)) / whole)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        'font-size="12" role="img" aria-label="Times as fast over the number of cores">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for count in cores:
        x, y = at(count, count)
        parts += [
            f'<line x1="{left}" y1="{y:.1f}" x2="{left + across}" y2="{y:.1f}" stroke="#ddd"/>',
            f'<text x="{left - 8}" y="{y + 4:.1f}" text-anchor="end">{count}×</text>',
            f'<text x="{x:.1f}" y="{height - bottom + 18}" text-anchor="middle">{count}</text>',
        ]
    ideal = [at(1, 1), at(highest, highest)]
    drawn = {"as many times as cores": ("#999", ' stroke-dasharray="4 4"', ideal)}
    for shade, (name, runs) in zip(shades, found.items(), strict=False):
        drawn[name] = (shade, "", [at(run.cores, runs[0].seconds / run.seconds) for run in runs])
    y = float(height)
    for name in sorted(drawn, key=lambda name: -drawn[name][2][-1][1]):  # from the lowest label up
        shade, dashes, points = drawn[name]
        line = " ".join(f"{px:.1f},{py:.1f}" for px, py in points)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{shade}" stroke-width="2"{dashes}/>')
        y = min(points[-1][1] + 4, y - 15)
        parts.append(f'<text x="{left + across + 8}" y="{y:.1f}" fill="{shade}">{name}</text>')
    parts.append(f'<text x="{left + across / 2}" y="{height - 6}" text-anchor="middle">cores</text></svg>')
    return "\n".join(parts) + "\n"


def size_of(cores: int) -> int:
    """Bytes of a checkpoint that keeps all cores busy and fits the memory."""
    memory = int(Path("/proc/meminfo").read_text().split()[1]) << 10
    shared = shutil.disk_usage(MEMORY).free
    return min(cores * BYTES_PER_CORE, memory // SHARE_OF_MEMORY, shared // SHARE_OF_MEMORY * 3)


def doublings(cores: int) -> list[int]:
    """1, 2, 4, … and the number of cores."""
    return sorted({min(1 << power, cores) for power in range(cores.bit_length() + 1)})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--size", type=parse_size, help="of the checkpoint, as 4GB; sized to the machine")
    parser.add_argument(
        "--disk", type=Path, default=Path.cwd(), help="a folder on the disk (the current one)"
    )
    parser.add_argument("--figures", type=Path, help="also write table and picture into this folder")
    parser.add_argument("--write", action="store_true", help="put them into benchmarks/scaling.md")
    options = parser.parse_args()
    if options.one:
        one(options.one)
        return
    end_cleanly()
    available = len(os.sched_getaffinity(0))
    cores = doublings(available)
    size = options.size or size_of(available)
    scaling = Scaling(size, cores, time.monotonic() + LIMIT_SECONDS)
    with (
        tempfile.TemporaryDirectory(dir=MEMORY) as in_memory,
        tempfile.TemporaryDirectory(dir=options.disk, prefix=".scaling-") as on_disk,
    ):
        memory, disk = Path(in_memory), Path(on_disk)
        text, drawn = _figures(scaling, memory, disk)
        described = machine(disk)
    text = f"{chr(10).join(f'- {line}' for line in described)}\n\n{text}"
    print(text)
    if options.write:
        write_figures(DOCUMENT, text, "scaling")
        PICTURE.write_text(drawn)
    if options.figures:
        (options.figures / "scaling.md").write_text(text)
        (options.figures / "scaling.svg").write_text(drawn)


def _figures(scaling: Scaling, memory: Path, disk: Path) -> tuple[str, str]:
    """The tables, and the picture of what threads in memory gain."""
    cores = scaling.cores
    (memory / "small").mkdir()
    folders, small = scaling.prepare(memory, small=False), scaling.prepare(memory / "small", small=True)
    threads = {op.name: scaling.rows(op, folders, memory) for op in OPERATIONS}
    apart = {op.name: scaling.independents(op, small, memory) for op in OPERATIONS}
    on_disk_folders = scaling.prepare(disk, small=False)
    on_disk = {op.name: scaling.rows(op, on_disk_folders, disk) for op in ON_DISK}
    sections = [
        f"A checkpoint of {scaling.size_bytes / 1e9:.1f} GB in memory, seconds with threads:",
        threads_table(cores, _complete(threads), _complete(apart)),
        "The same on the disk, every file made durable:",
        threads_table(cores, _complete(on_disk), {}),
    ]
    if importlib.util.find_spec("ray"):
        with_ray = {ALL_AXES.name: scaling.rows(ALL_AXES, folders, memory, cluster="ray")}
        sections += [
            "In memory, with the worker processes of a private Ray, its start included:",
            threads_table(cores, _complete(with_ray), {}),
        ]
    if scaling.left_out:
        sections.append(f"Left out, since eight minutes were over: {', '.join(scaling.left_out)}.")
    return "\n\n".join(sections), picture(cores, _complete(threads))


def _complete(found: dict[str, list[Any]]) -> dict[str, list[Any]]:
    return {name: runs for name, runs in found.items() if runs}


if __name__ == "__main__":
    main()
