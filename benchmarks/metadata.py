"""How long does reading a large ``.metadata`` file take, beside ``pickle.load``?

    python -m benchmarks.metadata [--rounds 3] [--quick]

The files are written by Python's own ``pickle`` from classes that are declared as Paddle 3.3 declares them. Every
reading is a process of its own; seconds are those of reading, without imports.
"""

from __future__ import annotations

import argparse
import pickle
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.measure import (
    Measured,
    Verdict,
    alternate,
    inner_seconds,
    median,
    print_result,
    ratio_of_rounds,
    run,
    say,
    spread,
)
from paddle_reshard.storage.files.dist_metadata import parse_dist_metadata
from tests.dist_metadata_oracle import as_imported, classes_of, dumped, flattened, replicated

MIB = 1 << 20
GENERATION = "3.3"


@dataclass(frozen=True)
class Case:
    """A file to read."""

    name: str
    make: Callable[[Any, int, int], Any]
    keys: int
    ranks: int
    goal_seconds: float | None = None
    """Every opcode is looked at: 227 MiB take 4 s, where ``pickle.load`` takes 20."""


CASES = (
    Case("every tensor whole on every rank", replicated, 14_800, 264, goal_seconds=5),
    Case("every tensor cut over all ranks, flattened", flattened, 10_700, 128),
)


def write(number: int, keys: int, path: Path) -> None:
    """Write the file of a case, and say how many indexes it has."""
    case, classes = CASES[number], classes_of(GENERATION)
    metadata = case.make(classes, keys, case.ranks)
    path.write_bytes(dumped(metadata, classes))
    print(len(metadata.storage_metadata))


def read(path: Path) -> None:
    """Read a file as paddle-reshard does."""
    with path.open("rb") as file:

        def ranged(at: int, nbytes: int) -> bytes:
            file.seek(at)
            return file.read(nbytes)

        parse_dist_metadata(ranged, path.stat().st_size, path.name)


def unpickle(path: Path) -> None:
    """Read a file as Paddle does."""
    with as_imported(classes_of(GENERATION)), path.open("rb") as file:
        pickle.load(file)  # noqa: S301 -- written by this benchmark


READERS = {"read": read, "unpickle": unpickle}


def row(number: int, rounds: int, share: float, path: Path, verdicts: list[Verdict]) -> tuple[str, ...]:
    """Write the file of one case with a share of its keys, let it be read in turns, and judge the whole one."""
    case = CASES[number]
    me = [sys.executable, "-m", "benchmarks.metadata"]
    indexes = int(run([*me, "write", str(number), str(int(case.keys * share)), str(path)]).output)
    found = alternate(
        {reader: partial(timed, [*me, reader, str(path)]) for reader in READERS},
        rounds,
        say,
    )
    ours, theirs = found["read"], found["unpickle"]
    if case.goal_seconds and share == 1:
        what = f".metadata of {path.stat().st_size / MIB:.0f} MiB: seconds"
        verdicts.append(Verdict.at_most(what, case.goal_seconds, median(ours)))
    return (
        case.name,
        f"{path.stat().st_size / MIB:.0f}",
        f"{indexes:,}",
        spread(ours),
        f"{median(ours, 'private_bytes') / MIB:,.0f}",
        spread(theirs),
        f"{median(theirs, 'private_bytes') / MIB:,.0f}",
        f"{ratio_of_rounds(theirs, ours):.1f}",
    )


HEAD = (
    ".metadata",
    "MiB",
    "indexes",
    "ours (s)",
    "private MiB",
    "pickle.load (s)",
    "its private MiB",
    "times faster",
)


def timed(command: list[str]) -> Measured:
    """Run a reader."""
    return inner_seconds(run(command))


def main() -> None:
    if sys.argv[1:2] == ["write"]:
        write(int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
    elif sys.argv[1:] and sys.argv[1] in READERS:
        start = time.perf_counter()
        READERS[sys.argv[1]](Path(sys.argv[2]))
        print(f"seconds {time.perf_counter() - start}")
    else:
        parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
        parser.add_argument("--rounds", type=int, default=3, help="medians of so many")
        parser.add_argument("--quick", action="store_true", help="a twentieth of the keys, once")
        parser.add_argument("--json", action="store_true", help=argparse.SUPPRESS)
        given = parser.parse_args()
        rounds, share = (1, 0.05) if given.quick else (given.rounds, 1.0)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / ".metadata"
            verdicts: list[Verdict] = []
            rows = [row(number, rounds, share, path, verdicts) for number in range(len(CASES))]
        print_result(HEAD, rows, verdicts, given.json)


if __name__ == "__main__":
    main()
