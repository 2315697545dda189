"""The places of one side of a conversion: its ranks, or its files where ranks have none of their own.

A place of rank files is a rank, or several neighbouring ranks if there are more than ``MOST_PLACES``. A file that
several ranks share, such as the parameters of a sharding group, belongs to the rank that writes it: the first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from paddle_reshard.pipeline.core.topology import Topology
from paddle_reshard.pipeline.formats.registry import rank_of_file

MOST_PLACES = 4096
"""Places of a checkpoint that are distinguished."""


@dataclass(frozen=True, slots=True)
class Block:
    """Neighbouring places of one checkpoint."""

    title: str
    detail: str
    axes: Mapping[str, int] | None
    """Size of ``dp``, ``pp``, ``sharding``, ``tp`` and ``ep``; ``None`` if the places are files."""
    first: int
    """Number of its first place."""
    count: int
    each: int = 1
    """Ranks, or files, of a place; the last may have fewer."""


@dataclass(frozen=True, slots=True)
class Side:
    """All places of a side, numbered through."""

    blocks: tuple[Block, ...]
    labels: tuple[str, ...]
    """Path of the file, or of the first, for places that are files; empty for ranks."""
    places: tuple[int, ...]
    """Place of each file; −1 for files without tensors."""

    @property
    def count(self) -> int:
        """Number of places."""
        return len(self.labels)

    @property
    def files(self) -> list[int]:
        """Number of tensor files of each place."""
        files = Counter(self.places)
        return [files[place] for place in range(self.count)]


class Described(NamedTuple):
    """A checkpoint of a side, by what its files have in common."""

    prefix: str
    """What the paths of its files begin with."""
    title: str
    detail: str
    topology: Topology | None


def arrange(paths: Sequence[str], holding: Collection[int], checkpoints: Sequence[Described]) -> Side:
    """The places of the files at ``paths``, of which those with the numbers ``holding`` hold tensors.

    The checkpoint of a file is the one with the longest prefix that fits. If files of ranks name coordinates beyond
    the topology, or there is none, the coordinates determine the axes.
    """
    owners = {index: _owner(paths[index], checkpoints) for index in sorted(holding)}
    side = Side((), (), (-1,) * len(paths))
    for number, described in enumerate(checkpoints):
        own = [index for index, owner in owners.items() if owner == number]
        names = {index: paths[index][len(described.prefix) :] for index in own}
        ranks = {index: rank for index in own if (rank := rank_of_file(names[index])) is not None}
        if ranks:
            side = _with_ranks(side, described, ranks)
        side = _with_files(side, described, {index: names[index] for index in own if index not in ranks})
    return side


def _owner(path: str, checkpoints: Sequence[Described]) -> int:
    fitting = [n for n, described in enumerate(checkpoints) if path.startswith(described.prefix)]
    return max(fitting, key=lambda number: len(checkpoints[number].prefix))


def _with_ranks(side: Side, described: Described, ranks: Mapping[int, Mapping[str, int]]) -> Side:
    axes = _axes(described.topology, list(ranks.values()))
    world = axes["dp"] * axes["pp"] * axes["sharding"] * axes["tp"]
    each = -(-world // MOST_PLACES)
    places = {index: _number(rank, axes) // each for index, rank in ranks.items()}
    return _added(side, described, axes, [""] * -(-world // each), each, places)


def _with_files(side: Side, described: Described, names: Mapping[int, str]) -> Side:
    if not names:
        return side
    each = -(-len(names) // MOST_PLACES)
    order = sorted(names, key=names.__getitem__)
    labels = [names[index] for index in order[::each]]
    places = {index: position // each for position, index in enumerate(order)}
    return _added(side, described, None, labels, each, places)


def _added(
    side: Side,
    described: Described,
    axes: Mapping[str, int] | None,
    labels: Sequence[str],
    each: int,
    places: Mapping[int, int],
) -> Side:
    first = side.count
    of_files = list(side.places)
    for index, place in places.items():
        of_files[index] = first + place
    block = Block(described.title, described.detail, axes, first, len(labels), each)
    return Side((*side.blocks, block), (*side.labels, *labels), tuple(of_files))


def _axes(topology: Topology | None, ranks: Sequence[Mapping[str, int]]) -> dict[str, int]:
    """The sizes of the axes that distinguish ranks. Data-parallel ranks count only if they have files of their own."""
    named = {
        axis: 1 + max((rank.get(axis, 0) for rank in ranks), default=0)
        for axis in ("dp", "pp", "sharding", "tp", "ep")
    }
    if topology is None:
        return named
    if named["dp"] == 1:
        topology = replace(topology, dp=1)
    return {axis: max(getattr(topology, axis), 1 if axis == "ep" else named[axis]) for axis in named}


def _number(rank: Mapping[str, int], axes: Mapping[str, int]) -> int:
    """The number of a rank, in the trainer's order: tp varies fastest, dp slowest.

    >>> _number({"tp": 1, "pp": 1}, {"dp": 1, "pp": 2, "sharding": 2, "tp": 2, "ep": 1})
    5
    """
    tp = rank.get("tp", 0)
    # A file that names an expert rank alone is written by the first rank that holds these experts.
    shard = rank["sharding"] if "sharding" in rank else rank.get("ep", 0) // axes["tp"] % axes["sharding"]
    return ((rank.get("dp", 0) * axes["pp"] + rank.get("pp", 0)) * axes["sharding"] + shard) * axes["tp"] + tp
