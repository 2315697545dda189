"""Rehearse the conversion of a checkpoint of 671 billion parameters from 2,048 ranks to 512 on this machine.

    python -m benchmarks.rehearsal [--layers 4] [--workers 2]      (make rehearsal)

Everything is real except the bytes of the tensors, which come from arithmetic (``benchmarks.arithmetic``) and are
dropped once their checksums are taken. Real are: indexing the pickles of all rank files, the plan, Ray and its workers,
every group with its reads, moves, casts and comparisons, receipts, ledger, a kill of the driver in the middle and the
resumed run, the staged target, which is indexed, and the manifest. At the end the checksums of a sample of parts in the
manifest are compared with those of bytes made anew from coordinates in the layout of the target.

The matrices have 1/256 of their elements (every width is divided by 16) and groups 1/256 of their bytes, so that
tensors, files, fragments, groups and parts are as many as at full size. The whole model has 60 layers; its report goes
into ``benchmarks/rehearsal.md``, that of fewer layers is only printed.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.arithmetic import ArithmeticSource, write_boxes
from benchmarks.driver import private_ray
from benchmarks.measure import load, machine, table, write_figures
from benchmarks.planning import MIB, job, peak_bytes
from benchmarks.synthetic import MOE_671B, Dims, EmptySource, files_of, logical
from paddle_reshard.clusters.engine import Engine
from paddle_reshard.clusters.inline import InlineEngine
from paddle_reshard.clusters.ray.engine import RayEngine
from paddle_reshard.pipeline.changes.change import Altered
from paddle_reshard.pipeline.checkpoint.files import SourceListing
from paddle_reshard.pipeline.convert.manifest import parse_manifest
from paddle_reshard.pipeline.convert.plan import plan_checkpoint
from paddle_reshard.pipeline.convert.run import run_conversion
from paddle_reshard.pipeline.core.events import Progress, StepEnded, StepStarted
from paddle_reshard.pipeline.core.file_names import MANIFEST
from paddle_reshard.pipeline.formats.targets import lay_out
from paddle_reshard.pipeline.indexing.detect import index_checkpoint
from paddle_reshard.pipeline.model.rules.tables import shipped_tables
from paddle_reshard.pipeline.planning.settings import PlanSizes
from paddle_reshard.pipeline.request.options import ConvertOptions
from paddle_reshard.pipeline.request.parse import ConversionRequest, parse_request
from paddle_reshard.storage.checksum import checksum
from paddle_reshard.storage.local.target import LocalTarget
from paddle_reshard.storage.outputs import Outputs
from paddle_reshard.storage.session.ledger import check_receipts
from paddle_reshard.storage.space import Room
from paddle_reshard.storage.store import (
    CopyRange,
    Identity,
    NewFile,
    Openness,
    Permission,
    ReadRange,
    Receipt,
    Record,
    WritePart,
)
from paddle_reshard.tasks.index import index_here

REPO = Path(__file__).parents[1]
DOCUMENT = Path(__file__).with_suffix(".md")
WHOLE_LAYERS = MOE_671B.layers
THIN = 16
"""Every width of the model is divided by this, so that a matrix has 1/256 of its elements."""
WIDE = replace(MOE_671B, hidden=448, intermediate=1152, vocab=8080)
SIZES = PlanSizes(*(size // THIN**2 for size in (64 * MIB, 8 * MIB, 16 * MIB)))
SOURCE = job(tp=8, pp=4, sharding=64, buffer_mb=4)
OPTIONS: ConvertOptions = {
    "to": "tp=4,pp=4,sharding=32",
    "layout": {"comm_buffer_size_MB": 4},
    "memory": "1GiB",
}
SAMPLED_PARTS = 2_000


class Dropping(WritePart):
    """Takes the checksum of every part and drops it."""

    copies_in_flight = 1

    def write_part(self, path: str, byte_offset: int, buffer: memoryview) -> Receipt:
        return Receipt(path, byte_offset, len(buffer), checksum=checksum(buffer))

    def copy_part(self, copy: CopyRange, source: ReadRange) -> Receipt:
        raise NotImplementedError


class Rehearsed(LocalTarget):
    """A folder with a real session, ledger and manifest, whose files are empty, and read back as they were laid out."""

    def __init__(self, root: Path, resume: bool, read_back: EmptySource) -> None:
        super().__init__(root, Permission(resume=resume))
        self.read_back = read_back
        self.begin_seconds = 0.0

    def room(self) -> Room:
        return replace(super().room(), free_bytes=None)  # nothing is written, so nothing has to fit

    def begin(
        self, files: Sequence[NewFile], identity: Identity, openness: Openness = Openness()
    ) -> tuple[Any, Sequence[Record]]:
        started = time.process_time()
        _, records = super().begin(files, identity, openness)
        self.begin_seconds = time.process_time() - started
        return Dropping(), records

    def finish(self, receipts: Iterable[Receipt]) -> Any:
        check_receipts(self.location, self.files, receipts)
        return self.read_back


class Clock:
    """Processor and wall seconds of each step of this process."""

    def __init__(self) -> None:
        self.seconds: dict[str, tuple[float, float]] = {}
        self.running: dict[str, tuple[float, float]] = {}

    def start(self, step: str) -> None:
        self.running[step] = time.process_time(), time.perf_counter()

    def stop(self, step: str) -> None:
        cpu, wall = self.running.pop(step)
        self.seconds[step] = time.process_time() - cpu, time.perf_counter() - wall


def drive(folder: Path, layers: int, workers: int, kill_at: float) -> dict[str, Any]:
    """Run the conversion, or resume it, and kill this process at ``kill_at`` of its bytes unless that is 0."""
    clock, dims = Clock(), replace(WIDE, layers=layers)
    clock.start("lay out the source (simulated job)")
    source = source_of(folder, dims)
    clock.stop("lay out the source (simulated job)")
    clock.start("index")
    # Indexing looks at no value of a tensor, so there is no need to compute those next to what it reads.
    checkpoint = index_checkpoint(source.literals or source, shipped_tables(), index_files=index_here)
    clock.stop("index")
    clock.start("plan")
    request = replace(parse_request(OPTIONS), sizes=SIZES)
    conversion = plan_checkpoint(Altered.of(source, checkpoint), request)
    plan = conversion.plan
    plan.plan_id  # noqa: B018 -- computed once, and part of planning
    clock.stop("plan")
    (spec,) = (asked.target_for(checkpoint) for asked in request.target_requests)
    laid_out = lay_out(checkpoint, checkpoint, spec, SourceListing(source.sizes(), ()))
    read_back = EmptySource(laid_out.files, None)
    written = ArithmeticSource(folder / "written", read_back)
    if not written.folder.exists():
        write_boxes(written.folder, laid_out.files, checkpoint.catalog.tensors)
    del laid_out
    target = Rehearsed(folder / "T", (folder / ".T.reshard").exists(), read_back)
    moved = ledger_bytes = 0

    def observe(event: object) -> None:
        nonlocal moved, ledger_bytes
        if isinstance(event, StepStarted):
            clock.start(event.step)
            ledger_bytes = max(ledger_bytes, ledger_size(folder))
        elif isinstance(event, StepEnded):
            clock.stop(event.step)
        elif isinstance(event, Progress) and not event.before:
            moved += event.done_bytes
            if kill_at and moved > kill_at * plan.written_bytes:
                os.kill(os.getpid(), signal.SIGKILL)

    engine: Engine = InlineEngine() if not workers else RayEngine(workers=workers, memory_bytes=1 << 30)
    running = ConversionRequest(resume=target.permission.resume)
    report = run_conversion(conversion, Outputs([target]), engine, observe, running, index_here)
    manifest_bytes = (target.root / MANIFEST).read_bytes()
    clock.start("verify a sample")
    sampled = verify_sample(manifest_bytes, written)
    clock.stop("verify a sample")
    return {
        "fragments": len(checkpoint.catalog.fragments),
        "files": [len(plan.source_files), len(plan.target_files)],
        "groups": plan.groups,
        "moved": report.groups,
        "resumed": report.resumed_groups,
        "parts": len(plan.parts),
        "written_bytes": plan.written_bytes,
        "seconds": clock.seconds,
        "begin_seconds": target.begin_seconds,
        "manifest_bytes": len(manifest_bytes),
        "ledger_bytes": ledger_bytes,
        "sampled": sampled,
        "worker_seconds": sum(worker.busy_seconds for worker in report.workers),
        "peak_bytes": peak_bytes(),
    }


def source_of(folder: Path, dims: Dims) -> ArithmeticSource:
    """The source; its tables are written the first time."""
    files = files_of(dims, SOURCE)
    source = ArithmeticSource(folder / "read", EmptySource(files, json.dumps(dims.config).encode()))
    if not source.folder.exists():
        write_boxes(source.folder, files, logical(dims).catalog.tensors)
    return source


def verify_sample(data: bytes, written: ArithmeticSource) -> int:
    """Compare checksums of the manifest with those of bytes made from coordinates; the number of parts compared."""
    parts = parse_manifest(data, MANIFEST).parts
    chosen = np.random.default_rng(20261122).permutation(len(parts))[:SAMPLED_PARTS]
    for number in chosen.tolist():
        part = parts[number]
        found = checksum(written.read(part.path, part.byte_offset, part.nbytes))
        if found != part.checksum:
            raise SystemExit(f"{part.path}: {part.nbytes} bytes at {part.byte_offset} are wrong")
    return len(chosen)


def child(folder: Path, layers: int, workers: int, kill_at: float) -> dict[str, Any] | None:
    """Drive in a process of its own; ``None`` if it was killed as planned."""
    arguments = [str(folder), str(layers), str(workers), str(kill_at)]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.rehearsal", "--drive", *arguments],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(REPO)},
        check=False,
    )
    if kill_at:
        if done.returncode != -signal.SIGKILL:
            raise SystemExit(f"the driver was not killed: status {done.returncode}")
        return None
    if done.returncode:
        raise SystemExit(done.returncode)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def ledger_size(folder: Path) -> int:
    """Bytes of the ledger, 0 before it exists."""
    ledger = folder / ".T.reshard" / "ledger"
    return ledger.stat().st_size if ledger.exists() else 0


@dataclass(frozen=True)
class Rehearsal:
    """What a rehearsal found."""

    workers: int
    ledger_at_kill: int
    """Bytes."""
    seconds_to_kill: float
    seconds: float
    """Of the resumed run, from start to end of its process."""
    found: Mapping[str, Any]
    """What :func:`drive` answered in the resumed run."""

    @property
    def facts(self) -> dict[str, str]:
        """Name → figure."""
        found = self.found
        cpu, wall = found["seconds"]["move"]
        return {
            "files": " → ".join(f"{count:,}" for count in found["files"]),
            "fragments": f"{found['fragments']:,}",
            "groups, parts": f"{found['groups']:,}, {found['parts']:,}",
            "bytes moved, 1/256 of the real ones": f"{found['written_bytes'] / 1e9:.1f} GB",
            "groups in the ledger when the driver was killed": f"{found['resumed']:,}",
            "groups run after that": f"{found['moved']:,}",
            "groups per second": f"{found['moved'] / wall:,.0f}",
            "driver's processor time for each of them": f"{1000 * cpu / max(found['moved'], 1):.3f} ms",
            "driver's share of a core meanwhile": f"{cpu / wall:.2f}",
            "ledger at the kill, at the end": f"{self.ledger_at_kill / MIB:.1f}, {found['ledger_bytes'] / MIB:.1f} MiB",
            "opening the staged files and reading the ledger on resume": f"{found['begin_seconds']:.2f} s",
            "manifest": f"{found['manifest_bytes'] / MIB:.1f} MiB",
            "peak memory of the driver": f"{found['peak_bytes'] / MIB:,.0f} MiB",
            "parts verified by their checksums": f"{found['sampled']:,}",
            "until the kill, and the resumed run, in all": f"{self.seconds_to_kill:.0f} s, {self.seconds:.0f} s",
        }

    @property
    def steps(self) -> dict[str, str]:
        """Step of the resumed run → processor and wall seconds of the driver."""
        return {step: f"{cpu:.1f}, {wall:.1f}" for step, (cpu, wall) in self.found["seconds"].items()}

    @property
    def name(self) -> str:
        """Where groups ran."""
        return f"on Ray, {self.workers} workers" if self.workers else "in one process"


def report(rehearsals: Sequence[Rehearsal]) -> str:
    """What rehearsals found, as markdown."""

    def side_by_side(head: str, columns: Sequence[Mapping[str, str]]) -> str:
        rows = [(name, *(column[name] for column in columns)) for name in columns[0]]
        return table((head, *(rehearsal.name for rehearsal in rehearsals)), rows)

    return "\n\n".join(
        [
            side_by_side("", [rehearsal.facts for rehearsal in rehearsals]),
            side_by_side(
                "seconds of the driver in the resumed run: CPU, wall",
                [rehearsal.steps for rehearsal in rehearsals],
            ),
        ]
    )


def rehearse(folder: Path, layers: int, workers: int) -> Rehearsal:
    """Kill a driver in the middle, resume, verify."""
    started = time.perf_counter()
    child(folder, layers, workers, kill_at=0.5)
    killed = time.perf_counter()
    ledger_bytes = ledger_size(folder)
    found = child(folder, layers, workers, kill_at=0) or {}
    return Rehearsal(workers, ledger_bytes, killed - started, time.perf_counter() - killed, found)


def main() -> None:
    if sys.argv[1:2] == ["--drive"]:
        folder, layers, workers, kill_at = sys.argv[2:]
        run = partial(drive, Path(folder), int(layers), int(workers), float(kill_at))
        if int(workers):
            with private_ray(int(workers)):
                print(json.dumps(run()))
        else:
            print(json.dumps(run()))
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=WHOLE_LAYERS, help="at least 4; the whole model has 60")
    parser.add_argument("--workers", type=int, nargs="+", default=[2], help="0: without Ray")
    given = parser.parse_args()
    rehearsals = []
    with tempfile.TemporaryDirectory(prefix="rehearsal-") as scratch:
        facts = [*machine(Path(scratch)), load("before")]
        for workers in given.workers:
            with tempfile.TemporaryDirectory(dir=scratch) as folder:
                rehearsals.append(rehearse(Path(folder), given.layers, workers))
    facts += [load("after"), f"{given.layers} of the {WHOLE_LAYERS} layers"]
    text = "\n\n".join(["\n".join(f"- {fact}" for fact in facts), report(rehearsals)])
    if given.layers < WHOLE_LAYERS:
        print(text)
    else:
        write_figures(DOCUMENT, text, "rehearsal")
        print(f"{DOCUMENT} holds the figures")


if __name__ == "__main__":
    main()
