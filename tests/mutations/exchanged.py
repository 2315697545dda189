"""What happens to checkpoints in which files of ranks have changed places.

Every exchange of two files and every reversal is tried, of each kind of files alone and of all together. What the files
hold is read by this suite's own reader, and whether a result is the same is decided by the bytes of its files: those of
the undisturbed checkpoint are compared with the truth elsewhere.

``python -m tests.mutations.exchanged`` tries all checkpoints of the corpus and writes the counts.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import combinations
from pathlib import Path
from typing import Any

import paddle_reshard
from paddle_reshard.pipeline.core.errors import ReshardError
from tests import oracle
from tests.conftest import case_names, checkpoint_of

COUNTS = Path(__file__).with_name("exchanged.json")
REFUSED, UNCHANGED, ALIKE = "refused", "unchanged", "alike"
_OF_SEVERAL_RANKS = re.compile(r"(mp|pp|sh|dp)\d")
_OTHER_FORMATS = re.compile(r"(^|_)(fc|uc|muon|tohf|auto)")
CASES = tuple(
    name
    for group in ("dense", "moe", "states", "families", "small-families")
    for name in case_names(group)
    if _OF_SEVERAL_RANKS.search(name) and not _OTHER_FORMATS.search(name.partition("/")[2])
    if name != "dense/dp2"  # whose ranks write one set of files
)
ANYWHERE: tuple[dict[str, Any], ...] = (
    {"format": "flex"},
    {"format": "flex", "replicas": "report", "allow_missing": ("*",)},
    {"format": "hybrid-plain", "to": "tp=1", "replicas": "report"},
)
"""Targets that hold everything, for ordinary sources, for those with copies that differ or with tensors in no file, and
for LoRA."""

_RANK_FILE = re.compile(r"((?:lora_)?model_state|optimizer|ema)\.(\w+)\.(?:pdparams|pdopt)")
_AXIS = re.compile(r"([a-z]+(?:_sharding)?)(\d+)")

Renamed = Mapping[str, str]
"""Name of a file → name of the file that gets its contents."""


def rank_files(folder: Path) -> dict[str, dict[str, str]]:
    """The kind of rank files, such as ``optimizer`` → the part of a name that says which rank → the name."""
    found: dict[str, dict[str, str]] = {}
    for path in sorted(folder.iterdir()):
        if match := _RANK_FILE.fullmatch(path.name):
            found.setdefault(match[1], {})[match[2]] = path.name
    return found


def permutations(folder: Path) -> Iterator[tuple[str, Renamed]]:
    """Every exchange of two files and every reversal, of each kind of files alone and of all together.

    With a description, as ``optimizer: shard00 <> shard01`` or ``all: tp reversed``.
    """
    kinds = rank_files(folder)
    groups = {kind: {kind: names} for kind, names in kinds.items()}
    if len(kinds) > 1:
        groups["all"] = kinds
    seen = set()
    for what, of_kinds in groups.items():
        for how, moved in _moves(sorted({rank for names in of_kinds.values() for rank in names})):
            renamed = {
                names[rank]: names[moved[rank]]
                for names in of_kinds.values()
                for rank in names
                if moved.get(rank, rank) != rank and moved[rank] in names
            }
            identity = frozenset(renamed.items())
            if renamed and set(renamed) == set(renamed.values()) and identity not in seen:
                seen.add(identity)
                yield f"{what}: {how}", renamed


def _moves(ranks: list[str]) -> Iterator[tuple[str, dict[str, str]]]:
    """Permutations of ranks: two exchanged, all reversed, and along one axis two exchanged or all reversed."""
    for one, other in combinations(ranks, 2):
        yield f"{one} <> {other}", {one: other, other: one}
    yield "reversed", dict(zip(ranks, reversed(ranks), strict=True))
    axes: dict[str, set[str]] = {}
    for rank in ranks:
        for axis, number in _AXIS.findall(rank):
            axes.setdefault(axis, set()).add(number)
    for axis, found in axes.items():
        numbers = sorted(found, key=int)
        swaps = [{one: other, other: one} for one, other in combinations(numbers, 2)]
        for swap in [*swaps, dict(zip(numbers, reversed(numbers), strict=True))]:
            how = f"{axis} {' <> '.join(swap)}" if len(swap) == 2 else f"{axis} reversed"
            yield how, {rank: _moved(rank, axis, swap) for rank in ranks}


def _moved(rank: str, axis: str, numbers: Mapping[str, str]) -> str:
    return _AXIS.sub(
        lambda found: found[1] + (numbers.get(found[2], found[2]) if found[1] == axis else found[2]), rank
    )


def permuted(folder: Path, renamed: Renamed, target: Path) -> Path:
    """A copy of a folder, some of its files under each other's names."""
    target.mkdir(parents=True)
    for path in folder.iterdir():
        if path.is_file():
            shutil.copy2(path, target / renamed.get(path.name, path.name))
    return target


def outcomes(case: str, work: Path) -> dict[str, int]:
    """How many permutations are refused, change nothing, or exchange files that are alike.

    Raises
    ------
    AssertionError
        If any other is converted to something else.
    """
    folder = checkpoint_of(case)
    whole, options = _undisturbed(folder, work)
    counts: Counter[str] = Counter()
    nothing_tells, others = [], []
    for how, renamed in permutations(folder):
        source = permuted(folder, renamed, work / "exchanged")
        try:
            result = _converted(source, work / "converted", options)
            counts[UNCHANGED if result == whole else ALIKE] += 1
            if result != whole:
                (nothing_tells if _alike(folder, renamed) else others).append((how, result))
        except ReshardError:
            counts[REFUSED] += 1
        shutil.rmtree(source)
    assert not nothing_tells or "which rank wrote" in paddle_reshard.inspect(folder).alike
    for (
        how,
        result,
    ) in others:  # files that are alike changed places, and with them stages whose keys tell them
        assert any(result == told for _, told in nothing_tells), how
    return dict(counts)


def _converted(source: Path, target: Path, options: Mapping[str, Any]) -> dict[str, bytes]:
    """The tensor files of a conversion."""
    paddle_reshard.convert(source, target, **options)
    suffixes = (".distcp", ".metadata", ".pdparams", ".pdopt")
    held = [path for path in target.rglob("*") if path.suffix in suffixes]
    files = {str(path.relative_to(target)): path.read_bytes() for path in held}
    shutil.rmtree(target)
    return files


def _undisturbed(folder: Path, work: Path) -> tuple[dict[str, bytes], Mapping[str, Any]]:
    """The files that a checkpoint becomes, and how."""
    for number, options in enumerate(ANYWHERE[:-1]):
        try:
            return _converted(folder, work / f"undisturbed{number}", options), options
        except ReshardError:
            continue
    return _converted(folder, work / "undisturbed", ANYWHERE[-1]), ANYWHERE[-1]


def _alike(folder: Path, renamed: Renamed) -> bool:
    """Whether every file holds the same entries as the one whose place it takes, except for values."""
    held = oracle.structure(folder)
    return all(held[name] == held[other] for name, other in renamed.items())


def in_words(counts: Mapping[str, Mapping[str, int]]) -> str:
    """What ``README.md`` says of all checkpoints."""
    total = Counter[str]()
    for of_case in counts.values():
        total.update(of_case)
    return (
        f"{total.total():,} permutations of the files of {len(counts)} checkpoints: {total[REFUSED]:,} are refused, "
        f"{total[UNCHANGED]:,} change nothing, and {total[ALIKE]:,} exchange files that are alike."
    )


def main() -> None:
    """Try all checkpoints and write the counts."""
    counts = {}
    for case in CASES:
        with tempfile.TemporaryDirectory() as work:
            counts[case] = outcomes(case, Path(work))
        sys.stdout.write(f"{case} {counts[case]}\n")
    COUNTS.write_text(json.dumps(counts, indent=1, sort_keys=True) + "\n")
    sys.stdout.write(f"{in_words(counts)}\n")


if __name__ == "__main__":
    main()
