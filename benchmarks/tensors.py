"""How long does a model of many tensors take before a byte moves, beside ``pickle.load`` of its files?

    python -m benchmarks.tensors [--rounds 3] [--quick]

The models have 256 experts in every layer and a few numbers in every tensor (`benchmarks.many`), so that their files
hold little but names and shapes. Every contender is a process of its own; seconds include imports.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.many import SINGLE_CARD, many, write_many
from benchmarks.measure import Verdict, alternate, median, print_result, ratio_of_rounds, run, say, spread
from paddle_reshard.pipeline.core.topology import Topology
from paddle_reshard.pipeline.formats.hybrid.target import HybridTarget
from tests.storage.servers import running_store

BUCKET = "checkpoints"
MIB = 1 << 20
QUICK = 0.05


@dataclass(frozen=True)
class Case:
    """A checkpoint, and what is asked of it."""

    name: str
    layers: int
    job: HybridTarget
    arguments: tuple[str, ...] = ("inspect",)
    goal_seconds: float | None = None
    limit_seconds: float | None = None
    """The most that has been measured, where the goal is not reached."""
    on_s3: bool = False
    """Whether it is read from an S3 server on this machine (moto); ``pickle.load`` reads files all the same."""


SHARDED = HybridTarget(Topology(sharding=512), "stage1v1", sharded_saving=False)
CASES = (
    Case("one card, 60 layers: `inspect`", 60, SINGLE_CARD, goal_seconds=3, limit_seconds=4.4),
    Case("the same: `plan --cards 64`", 60, SINGLE_CARD, ("plan", "--cards", "64")),
    Case("512 files of 2,000 arrays, and the parameters: `inspect`", 400, SHARDED),
    Case("the same: `plan --cards 512`", 400, SHARDED, ("plan", "--cards", "512")),
    Case("the same on S3: `inspect`", 400, SHARDED, on_s3=True),
)


UNPICKLE = """
import pathlib, pickle, sys
for path in sorted(pathlib.Path(sys.argv[1]).glob("*.pd*")):
    with path.open("rb") as file:
        pickle.load(file)
"""
"""All files, one after the other, as Paddle loads them, and nothing else."""


@contextlib.contextmanager
def stored(place: Path, *, on_s3: bool) -> Iterator[tuple[str, list[str]]]:
    """Where a checkpoint is read, and the options with which."""
    if not on_s3:
        yield str(place), []
        return
    with running_store() as store:
        store.client.create_bucket(Bucket=BUCKET)
        for path in place.iterdir():
            store.client.upload_file(str(path), BUCKET, path.name)
        yield f"s3://{BUCKET}", ["--storage-options", json.dumps(store.options)]


def row(case: Case, share: float, rounds: int, folder: Path, verdicts: list[Verdict]) -> tuple[str, ...]:
    """Write the checkpoint of one case with a share of its layers, let it be read in turns, and judge the whole one."""
    layers = max(1, round(case.layers * share))
    place = folder / f"{layers}-{case.job.topology}"
    if not place.exists():
        write_many(many(layers), place, case.job)
    command, *options = case.arguments
    with stored(place, on_s3=case.on_s3) as (location, access):
        inspecting = [sys.executable, "-m", "paddle_reshard", command, location, *options, *access]
        found = alternate(
            {
                "ours": partial(run, inspecting),
                "pickle": partial(run, [sys.executable, "-c", UNPICKLE, str(place)]),
            },
            rounds,
            say,
        )
    ours, theirs = found["ours"], found["pickle"]
    if case.goal_seconds and share == 1:
        what = f"many tensors, {case.name}: seconds"
        verdicts.append(Verdict.at_most(what, case.goal_seconds, median(ours), limit=case.limit_seconds))
    size = sum(path.stat().st_size for path in place.iterdir())
    return (
        case.name,
        f"{size / MIB:.0f}",
        spread(ours),
        f"{median(ours, 'cpu_seconds'):.2f}",
        f"{median(ours, 'private_bytes') / MIB:,.0f}",
        spread(theirs),
        f"{median(theirs, 'private_bytes') / MIB:,.0f}",
        f"{ratio_of_rounds(ours, theirs, 'cpu_seconds'):.1f}",
    )


HEAD = (
    "checkpoint",
    "MiB",
    "ours (s)",
    "CPU s",
    "private MiB",
    "pickle.load (s)",
    "its private MiB",
    "CPU ÷ its",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3, help="medians of so many")
    parser.add_argument("--quick", action="store_true", help="a twentieth of the layers, once")
    parser.add_argument("--json", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    rounds, share = (1, QUICK) if given.quick else (given.rounds, 1.0)
    verdicts: list[Verdict] = []
    with tempfile.TemporaryDirectory() as folder:
        rows = [row(case, share, rounds, Path(folder), verdicts) for case in CASES]
    print_result(HEAD, rows, verdicts, given.json)


if __name__ == "__main__":
    main()
