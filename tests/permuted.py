"""Checkpoints in which files of ranks have changed places."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Mapping
from itertools import combinations
from pathlib import Path

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
