"""Kill a conversion at random moments, again and again, and see that nothing is ever lost or wrong.

    python -m benchmarks.chaos --kills 100 --size 1GB

The same command, ``paddle-reshard convert … --resume``, is started over and over. Most starts are killed (``kill -9``)
after a random time; when one reaches the end, its target must be byte for byte what an undisturbed run makes, and
the next target begins. After every kill the target must be absent or whole.
"""

from __future__ import annotations

import argparse
import hashlib
import random
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import paddle_reshard
from benchmarks.generate import generate, llama_of, parse_size

FOLDER = Path(".chaos")
SOURCE_TOPOLOGY = "tp=2,pp=2,sharding=2"
TARGETS = (["--to", "tp=1,sharding=4"], ["--to", "tp=4"], ["--to", "pp=4", "--overwrite"])
LONGEST_SECONDS = 600.0


@dataclass
class Outcome:
    """What was seen."""

    kills: int = 0
    ends: int = 0
    kept: int = 0
    """Kills after which something was left to go on with."""
    seconds: float = 0.0
    """Of the quickest run that nobody killed."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--size", default="1GB")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    chance = random.Random(arguments.seed)
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir()
    source = FOLDER / "source"
    try:
        generate(llama_of(parse_size(arguments.size)), source, SOURCE_TOPOLOGY, "stage1v2")
        size_bytes = sum(path.stat().st_size for path in source.iterdir())
        print(f"source: {SOURCE_TOPOLOGY}, {size_bytes / 1e9:.2f} GB", flush=True)
        for kind, options in enumerate(TARGETS):
            kills = arguments.kills // len(TARGETS) + (kind < arguments.kills % len(TARGETS))
            report(options, torment(source, FOLDER / f"target-{kind}", options, kills, chance))
    finally:
        shutil.rmtree(FOLDER, ignore_errors=True)


def torment(source: Path, target: Path, options: list[str], kills: int, chance: random.Random) -> Outcome:
    """Kill so many runs, and let all others end."""
    overwrite = "--overwrite" in options
    started = time.monotonic()
    run(source, target, [option for option in options if option != "--overwrite"])
    shortest = time.monotonic() - started
    wanted = contents(target)
    shutil.rmtree(target)
    old = source if overwrite else None
    seen = Outcome(seconds=shortest)
    while True:
        if not target.exists() and not staging(target).exists() and old is not None:
            shutil.copytree(old, target)
        fresh, started = not staging(target).exists(), time.monotonic()
        process = subprocess.Popen(
            command(source, target, options), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        try:
            told, _ = process.communicate(
                timeout=chance.uniform(0, 1.2 * seen.seconds) if seen.kills < kills else LONGEST_SECONDS
            )
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            seen.kills += 1
            seen.kept += staging(target).exists()
            if target.exists() and contents(target) not in (
                wanted,
                contents(source) if overwrite else wanted,
            ):
                raise SystemExit(f"after kill {seen.kills} an unfinished target is visible") from None
            continue
        if process.returncode != 0:
            raise SystemExit(f"after kill {seen.kills} it could not go on: {told.decode()}")
        if fresh:
            seen.seconds = min(seen.seconds, time.monotonic() - started)
        end(target, wanted, seen)
        if seen.kills >= kills:
            return seen


def end(target: Path, wanted: dict[str, str], seen: Outcome) -> None:
    """A run has ended: the target is what it should be, and nothing else is left."""
    if contents(target) != wanted:
        raise SystemExit(f"after kill {seen.kills} the target differs")
    if not paddle_reshard.check(target).intact:
        raise SystemExit(f"after kill {seen.kills} the target does not agree with its manifest")
    left = [path.name for path in target.parent.iterdir() if path.name.startswith(f".{target.name}")]
    if left:
        raise SystemExit(f"after kill {seen.kills} something is left: {left}")
    seen.ends += 1
    shutil.rmtree(target)


def command(source: Path, target: Path, options: list[str]) -> list[str]:
    return [
        sys.executable,
        "-m",
        "paddle_reshard",
        "convert",
        str(source),
        str(target),
        "--resume",
        "--json",
        *options,
    ]


def run(source: Path, target: Path, options: list[str]) -> None:
    subprocess.run(command(source, target, options), check=True, stdout=subprocess.DEVNULL)


def staging(target: Path) -> Path:
    return target.parent / f".{target.name}.reshard"


def contents(folder: Path) -> dict[str, str]:
    """Name → hash of every file."""
    return {
        path.name: hashlib.sha1(path.read_bytes(), usedforsecurity=False).hexdigest()
        for path in sorted(folder.iterdir())
    }


def report(options: list[str], seen: Outcome) -> None:
    print(
        f"{' '.join(options)}: {seen.kills} kills, {seen.kept} of them left a session; {seen.ends} targets were "
        f"finished, each byte for byte as an undisturbed run makes it ({seen.seconds:.1f} s)",
        flush=True,
    )


if __name__ == "__main__":
    main()
