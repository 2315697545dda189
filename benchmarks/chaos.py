"""Kill a conversion repeatedly at random moments, and check that nothing is ever lost or wrong.

    python -m benchmarks.chaos --kills 100 --size 1GB [--s3]

The same command, ``paddle-reshard convert … --resume``, is started again and again. Most runs are killed (``kill -9``)
after a random time. When a run completes, its target must equal that of an undisturbed run byte for byte, and the next
target is started. After every kill, a target that looks finished must be complete.

With ``--s3``, source and targets are on a private Ceph server (:mod:`benchmarks.s3`).
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
from benchmarks.generate import SOURCE, V2, generate, llama_of, parse_size

FOLDER = Path(".chaos")
TARGETS = (["--to", "tp=1,sharding=4"], ["--to", "tp=4"], ["--to", "pp=4", "--overwrite"])
LONGEST_SECONDS = 600.0
SLOWER = 1.1
"""Factor for the expected duration of a run after a kill that came too early."""


class TargetLocation(Protocol):
    """The location of a target."""

    location: str
    options: dict[str, Any]
    """Storage options."""

    def contents(self) -> dict[str, str]:
        """Name → hash of every visible file."""

    def is_unfinished(self) -> bool:
        """Whether there is an unfinished conversion to resume."""

    def looks_finished(self, found: dict[str, str], wanted: dict[str, str]) -> bool:
        """Whether ``found`` looks like a finished checkpoint but differs from ``wanted``."""

    def leftovers(self) -> list[str]:
        """Remains next to the target."""

    def fill(self, source: Path) -> None:
        """Copy another checkpoint to it."""

    def remove(self) -> None:
        """Remove the target."""


class Folder:
    """A target on a disk."""

    options: dict[str, Any] = {}  # noqa: RUF012

    def __init__(self, path: Path) -> None:
        self.path, self.location = path, str(path)

    def contents(self) -> dict[str, str]:
        return contents(self.path) if self.path.exists() else {}

    def is_unfinished(self) -> bool:
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

    def is_unfinished(self) -> bool:
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
    """Results for one target."""

    kills: int = 0
    ends: int = 0
    kept: int = 0
    """Kills after which there was work to resume."""
    seconds: float = 0.0
    """Estimated duration of an undisturbed run."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--size", default="1GB")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--s3", action="store_true", help="source and targets on a private Ceph server")
    arguments = parser.parse_args()
    chance = random.Random(arguments.seed)
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir()
    source = FOLDER / "source"
    try:
        generate(llama_of(parse_size(arguments.size)), source, SOURCE, V2)
        size_bytes = sum(path.stat().st_size for path in source.iterdir())
        print(f"source: {SOURCE}, {size_bytes / 1e9:.2f} GB", flush=True)
        with on_s3(source) if arguments.s3 else on_disk(source) as (location, targets):
            for number, (target, options) in enumerate(zip(targets, TARGETS, strict=False)):
                kills = arguments.kills // len(targets) + (number < arguments.kills % len(targets))
                report(options, kill_repeatedly(source, location, target, options, kills, chance))
    finally:
        shutil.rmtree(FOLDER, ignore_errors=True)


@contextmanager
def on_disk(source: Path) -> Iterator[tuple[str, Sequence[TargetLocation]]]:
    """The location of the source, and the targets."""
    yield str(source), [Folder(FOLDER / f"target-{number}") for number in range(len(TARGETS))]


@contextmanager
def on_s3(source: Path) -> Iterator[tuple[str, Sequence[TargetLocation]]]:
    """The same on S3. Nothing is overwritten, because a checkpoint on S3 cannot be replaced at once."""
    from benchmarks.s3 import BUCKET, Ceph

    ceph = Ceph(Path(".s3") / "ceph")
    options = {name: value for name, value in ceph.options("writer").items() if name != "use_listings_cache"}
    try:
        ceph.start()
        remote = Prefix(f"s3://{BUCKET}/source", options)
        remote.store.mkdir(BUCKET)
        remote.fill(source)
        kinds = [kind for kind in TARGETS if "--overwrite" not in kind]
        yield remote.location, [Prefix(f"s3://{BUCKET}/target-{i}", options) for i in range(len(kinds))]
    finally:
        ceph.stop()
        shutil.rmtree(ceph.home / "state", ignore_errors=True)


def kill_repeatedly(
    local: Path, source: str, target: TargetLocation, options: list[str], kills: int, chance: random.Random
) -> Outcome:
    """Kill ``kills`` runs and let all others complete. ``local`` is the source, or a local copy of it."""
    old = contents(local) if "--overwrite" in options else None
    command = command_of(source, target, options)
    started = time.monotonic()
    fresh_options = [option for option in options if option != "--overwrite"]
    subprocess.run(command_of(source, target, fresh_options), check=True, stdout=subprocess.DEVNULL)
    seen = Outcome(seconds=time.monotonic() - started)
    wanted = target.contents()
    target.remove()
    while True:
        if old is not None and not target.is_unfinished() and not target.contents():
            target.fill(local)
        fresh, started = not target.is_unfinished(), time.monotonic()
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        try:
            output, _ = process.communicate(
                timeout=chance.uniform(0, 1.2 * seen.seconds) if seen.kills < kills else LONGEST_SECONDS
            )
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            seen.kills += 1
            if target.is_unfinished():
                seen.kept += 1
            else:
                seen.seconds *= SLOWER
            found = target.contents()
            if found != old and target.looks_finished(found, wanted):
                raise SystemExit(f"after kill {seen.kills} an unfinished target is visible") from None
            continue
        if process.returncode != 0:
            raise SystemExit(f"after kill {seen.kills} it could not resume: {output.decode()}")
        if fresh:
            seen.seconds = time.monotonic() - started
        end(target, wanted, seen)
        if seen.kills >= kills:
            return seen


def end(target: TargetLocation, wanted: dict[str, str], seen: Outcome) -> None:
    """Check the target of a completed run: it must be correct, without any leftovers."""
    if target.contents() != wanted:
        raise SystemExit(f"after kill {seen.kills} the target differs")
    if not paddle_reshard.check(target.location, storage_options=target.options).intact:
        raise SystemExit(f"after kill {seen.kills} the target contradicts its manifest")
    if leftovers := target.leftovers():
        raise SystemExit(f"after kill {seen.kills} there are leftovers: {leftovers}")
    seen.ends += 1
    target.remove()


def command_of(source: str, target: TargetLocation, options: list[str]) -> list[str]:
    """The command line to kill and start again."""
    start = [sys.executable, "-m", "paddle_reshard", "convert", source, target.location]
    access = ["--storage-options", json.dumps(target.options)] if target.options else []
    return [*start, "--resume", "--json", *access, *options]


def contents(folder: Path) -> dict[str, str]:
    """Name → hash of every file."""
    return {
        path.name: hashlib.sha1(path.read_bytes(), usedforsecurity=False).hexdigest()
        for path in sorted(folder.iterdir())
    }


def report(options: list[str], seen: Outcome) -> None:
    print(
        f"{' '.join(options)}: {seen.kills} kills, {seen.kept} of them with a session to resume; {seen.ends} targets "
        f"completed, each equal to that of an undisturbed run, byte for byte (about {seen.seconds:.1f} s)",
        flush=True,
    )


if __name__ == "__main__":
    main()
