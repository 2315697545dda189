"""Kill a conversion at random moments, again and again, and see that nothing is ever lost or wrong.

    python -m benchmarks.chaos --kills 100 --size 1GB [--s3]

The same command, ``paddle-reshard convert … --resume``, is started over and over. Most starts are killed (``kill -9``)
after a random time; when one reaches the end, its target must be byte for byte what an undisturbed run makes, and
the next target begins. After every kill nothing that looks finished may be anything but whole.

With ``--s3`` source and targets lie on a Ceph server of its own (:mod:`benchmarks.s3`).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import paddle_reshard
from benchmarks.generate import generate, llama_of, parse_size

FOLDER = Path(".chaos")
SOURCE_TOPOLOGY = "tp=2,pp=2,sharding=2"
TARGETS = (["--to", "tp=1,sharding=4"], ["--to", "tp=4"], ["--to", "pp=4", "--overwrite"])
LONGEST_SECONDS = 600.0
SLOWER = 1.1
"""A kill before anything was begun says that runs take longer by now."""


class Place(Protocol):
    """Where a target is made."""

    location: str
    options: dict[str, Any]
    """What is needed to reach it."""

    def contents(self) -> dict[str, str]:
        """Name → hash of everything that is to be seen there."""

    def is_begun(self) -> bool:
        """Whether an unfinished conversion is there, to go on with."""

    def looks_finished(self, found: dict[str, str], wanted: dict[str, str]) -> bool:
        """Whether ``found`` could be taken for a checkpoint, and is not one of those ``wanted``."""

    def leftovers(self) -> list[str]:
        """What is there beside the target."""

    def fill(self, source: Path) -> None:
        """Put another checkpoint there."""

    def remove(self) -> None:
        """Remove the target."""


class Folder:
    """A target on a disk."""

    options: dict[str, Any] = {}  # noqa: RUF012

    def __init__(self, path: Path) -> None:
        self.path, self.location = path, str(path)

    def contents(self) -> dict[str, str]:
        return contents(self.path) if self.path.exists() else {}

    def is_begun(self) -> bool:
        return (self.path.parent / f".{self.path.name}.reshard").exists()

    def looks_finished(self, found: dict[str, str], wanted: dict[str, str]) -> bool:
        return bool(found) and found != wanted

    def leftovers(self) -> list[str]:
        return [
            path.name for path in self.path.parent.iterdir() if path.name.startswith(f".{self.path.name}")
        ]

    def fill(self, source: Path) -> None:
        shutil.copytree(source, self.path)

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)


class Prefix:
    """A target on S3. Objects appear one after the other, the trainer's markers and the manifest last."""

    def __init__(self, location: str, options: dict[str, Any]) -> None:
        import s3fs

        self.location, self.options = location, options
        self.store = s3fs.S3FileSystem(**options, use_listings_cache=False)

    def _objects(self) -> dict[str, str]:
        found = self.store.find(self.location, detail=True) if self.store.exists(self.location) else {}
        return {path.rsplit("/", 1)[1]: entry["ETag"] for path, entry in found.items()}

    def contents(self) -> dict[str, str]:
        return {name: tag for name, tag in self._objects().items() if not name.startswith(".paddle_reshard")}

    def is_begun(self) -> bool:
        return any(name.startswith(".paddle_reshard") for name in self._objects())

    def looks_finished(self, found: dict[str, str], wanted: dict[str, str]) -> bool:
        def marks(name: str) -> bool:
            return name == "paddle_reshard.json" or name.startswith("saved_signal_")

        def rest(of: dict[str, str]) -> dict[str, str]:
            return {name: tag for name, tag in of.items() if not marks(name)}

        return any(map(marks, found)) and rest(found) != rest(wanted)

    def leftovers(self) -> list[str]:
        bucket, prefix = self.location.removeprefix("s3://").split("/", 1)
        uploads = self.store.call_s3("list_multipart_uploads", Bucket=bucket, Prefix=f"{prefix}/")
        own = [name for name in self._objects() if name.startswith(".paddle_reshard")]
        return own + [upload["Key"] for upload in uploads.get("Uploads", [])]

    def fill(self, source: Path) -> None:
        self.store.put(f"{source}/", f"{self.location}/", recursive=True)

    def remove(self) -> None:
        if self.store.exists(self.location):
            self.store.rm(self.location, recursive=True)


@dataclass
class Outcome:
    """What was seen."""

    kills: int = 0
    ends: int = 0
    kept: int = 0
    """Kills after which something was left to go on with."""
    seconds: float = 0.0
    """Of a run that nobody kills, as far as is known."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--size", default="1GB")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--s3", action="store_true", help="source and targets on a Ceph server of its own")
    arguments = parser.parse_args()
    chance = random.Random(arguments.seed)
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir()
    source = FOLDER / "source"
    try:
        generate(llama_of(parse_size(arguments.size)), source, SOURCE_TOPOLOGY, "stage1v2")
        size_bytes = sum(path.stat().st_size for path in source.iterdir())
        print(f"source: {SOURCE_TOPOLOGY}, {size_bytes / 1e9:.2f} GB", flush=True)
        with on_s3(source) if arguments.s3 else on_disk(source) as (location, places):
            for number, (place, options) in enumerate(zip(places, TARGETS, strict=False)):
                kills = arguments.kills // len(places) + (number < arguments.kills % len(places))
                report(options, torment(source, location, place, options, kills, chance))
    finally:
        shutil.rmtree(FOLDER, ignore_errors=True)


@contextmanager
def on_disk(source: Path) -> Iterator[tuple[str, Sequence[Place]]]:
    """Where the source is, and where targets go."""
    yield str(source), [Folder(FOLDER / f"target-{number}") for number in range(len(TARGETS))]


@contextmanager
def on_s3(source: Path) -> Iterator[tuple[str, Sequence[Place]]]:
    """The same on S3; a checkpoint there is not replaced as a whole, so that nothing is overwritten."""
    from benchmarks.s3 import BUCKET, Ceph

    ceph = Ceph(Path(".s3") / "ceph")
    options = {name: value for name, value in ceph.options("writer").items() if name != "use_listings_cache"}
    try:
        ceph.start()
        there = Prefix(f"s3://{BUCKET}/source", options)
        there.store.mkdir(BUCKET)
        there.fill(source)
        kinds = [kind for kind in TARGETS if "--overwrite" not in kind]
        yield there.location, [Prefix(f"s3://{BUCKET}/target-{i}", options) for i in range(len(kinds))]
    finally:
        ceph.stop()
        shutil.rmtree(ceph.home / "state", ignore_errors=True)


def torment(
    local: Path, source: str, place: Place, options: list[str], kills: int, chance: random.Random
) -> Outcome:
    """Kill so many runs, and let all others end; ``local`` is the source, or a copy of it on this disk."""
    old = contents(local) if "--overwrite" in options else None
    command = command_of(source, place, options)
    started = time.monotonic()
    fresh_options = [option for option in options if option != "--overwrite"]
    subprocess.run(command_of(source, place, fresh_options), check=True, stdout=subprocess.DEVNULL)
    seen = Outcome(seconds=time.monotonic() - started)
    wanted = place.contents()
    place.remove()
    while True:
        if old is not None and not place.is_begun() and not place.contents():
            place.fill(local)
        fresh, started = not place.is_begun(), time.monotonic()
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        try:
            told, _ = process.communicate(
                timeout=chance.uniform(0, 1.2 * seen.seconds) if seen.kills < kills else LONGEST_SECONDS
            )
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            seen.kills += 1
            if place.is_begun():
                seen.kept += 1
            else:
                seen.seconds *= SLOWER
            found = place.contents()
            if found != old and place.looks_finished(found, wanted):
                raise SystemExit(f"after kill {seen.kills} an unfinished target is visible") from None
            continue
        if process.returncode != 0:
            raise SystemExit(f"after kill {seen.kills} it could not go on: {told.decode()}")
        if fresh:
            seen.seconds = time.monotonic() - started
        end(place, wanted, seen)
        if seen.kills >= kills:
            return seen


def end(place: Place, wanted: dict[str, str], seen: Outcome) -> None:
    """A run has ended: the target is what it should be, and nothing else is left."""
    if place.contents() != wanted:
        raise SystemExit(f"after kill {seen.kills} the target differs")
    if not paddle_reshard.check(place.location, storage_options=place.options).intact:
        raise SystemExit(f"after kill {seen.kills} the target does not agree with its manifest")
    if left := place.leftovers():
        raise SystemExit(f"after kill {seen.kills} something is left: {left}")
    seen.ends += 1
    place.remove()


def command_of(source: str, place: Place, options: list[str]) -> list[str]:
    """The command line that is killed, and started again."""
    start = [sys.executable, "-m", "paddle_reshard", "convert", source, place.location]
    reach = ["--storage-options", json.dumps(place.options)] if place.options else []
    return [*start, "--resume", "--json", *reach, *options]


def contents(folder: Path) -> dict[str, str]:
    """Name → hash of every file."""
    return {
        path.name: hashlib.sha1(path.read_bytes(), usedforsecurity=False).hexdigest()
        for path in sorted(folder.iterdir())
    }


def report(options: list[str], seen: Outcome) -> None:
    print(
        f"{' '.join(options)}: {seen.kills} kills, {seen.kept} of them left a session; {seen.ends} targets were "
        f"finished, each byte for byte as an undisturbed run makes it (about {seen.seconds:.1f} s)",
        flush=True,
    )


if __name__ == "__main__":
    main()
