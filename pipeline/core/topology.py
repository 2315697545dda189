"""Topologies: the ranks of a job and their coordinates.

An *axis* belongs to a topology (a *dim* to a tensor). ``vpp`` is not an axis of ranks: it cuts the layers
of one pipeline rank into chunks, and is kept beside the axes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from math import prod
from numbers import Integral
from typing import Literal, get_args

from paddle_reshard.pipeline.core.errors import UsageError
from paddle_reshard.pipeline.core.limits import MAX_PARTS, MAX_RANKS
from paddle_reshard.pipeline.core.suggest import did_you_mean

Strategy = Literal["none", "stage1v1", "stage1v2", "stage2", "stage3"]
STRATEGIES: tuple[Strategy, ...] = get_args(Strategy)


_NUMBER = re.compile(r"-?[0-9]+(\.[0-9]*)?")


def number_of_cards(given: object) -> int | None:
    """The number of cards that a user gives in place of a topology; ``None`` if it is none.

    >>> number_of_cards("4"), number_of_cards("tp=2,pp=2")
    (4, None)

    Raises
    ------
    UsageError
        If no job has so many.
    """
    text = str(given).strip()
    if not isinstance(given, str | Integral) or not _NUMBER.fullmatch(text):
        return None
    if "." in text:
        raise UsageError(f"{text[:40]} cards: a number of cards is a whole number, as in 4")
    if len(text) > len(str(MAX_RANKS)) or not 1 <= int(text) <= MAX_RANKS:
        raise UsageError(f"{text[:40]} cards: a job has 1 to {MAX_RANKS}")
    return int(text)


def _unknown(axis: str, given: object, known: list[str]) -> UsageError:
    help = did_you_mean(axis, known)
    if glued := re.fullmatch(rf"({'|'.join(known)})[ :]?(\d+)", axis):
        help = f"; write {glued[1]}={glued[2]}"
    if _NUMBER.fullmatch(axis):
        help = f"; a number of cards is given alone, --to {axis}"
    if axis == "cp":
        help = ". Ranks of context parallelism are sharding ranks: give the job's sharding_parallel_size as sharding"
    return UsageError(f"unknown axis {axis!r} in topology {given!r}; axes are {', '.join(known)}{help}")


@dataclass(frozen=True, slots=True)
class Topology:
    """Sizes of the axes of a training job; an axis that is not used has size 1."""

    tp: int = 1
    pp: int = 1
    vpp: int = 1
    sharding: int = 1
    ep: int = 1
    dp: int = 1

    def __post_init__(self) -> None:
        for field in fields(self):
            size = getattr(self, field.name)
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise UsageError(f"axis {field.name} has size {size!r}; sizes are whole numbers from 1")
        if self.world_size > MAX_RANKS or self.ep > MAX_RANKS:
            size = max(self.world_size, self.ep)
            raise UsageError(
                f"a topology of {size} ranks; at most {MAX_RANKS} are supported, make its axes smaller"
            )
        if self.vpp > MAX_PARTS:
            raise UsageError(f"axis vpp has size {self.vpp}; at most {MAX_PARTS} are supported")

    @classmethod
    def parse(cls, text: str) -> Topology:
        """Read ``tp=2,pp=2,sharding=2``; omitted axes are 1.

        >>> Topology.parse("tp=2,sharding=4").world_size
        8
        """
        if (cards := number_of_cards(text)) is not None:
            raise UsageError(
                f"{cards} is a number of cards, which stands for a topology only as --to of convert and plan with one "
                f"target, and as --cards of resume; write axes, such as tp=2,pp=2: plan SRC --cards {cards} lists "
                "what is possible"
            )
        known = [field.name for field in fields(cls)]
        sizes: dict[str, int] = {}
        for item in text.split(","):
            axis, _, size = (part.strip() for part in item.partition("="))
            if axis not in known:
                raise _unknown(axis, text, known)
            if not (size.isascii() and size.isdigit() and len(size) < 10):
                raise UsageError(f"axis {axis!r} in topology {text!r} needs a whole number, not {size!r}")
            if axis in sizes:
                raise UsageError(f"axis {axis!r} is given twice in topology {text!r}")
            sizes[axis] = int(size)
        return cls(**sizes)

    @classmethod
    def of(cls, given: str | int | Mapping[str, int] | Topology) -> Topology:
        """The topology that a user gives as text, as a mapping of axes, or as it is.

        >>> Topology.of({"tp": 2, "sharding": 4}) == Topology.of("tp=2,sharding=4")
        True
        """
        if isinstance(given, Topology):
            return given
        if isinstance(given, str | Integral):
            return cls.parse(str(given))
        if not isinstance(given, Mapping):
            raise UsageError(f"{given!r} is no topology; give tp=2,pp=2 as text or as a mapping")
        known = [field.name for field in fields(cls)]
        for axis in given:
            if axis not in known:
                raise _unknown(str(axis), dict(given), known)
        return cls(**given)

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return prod((self.tp, self.pp, self.sharding, self.dp))

    @property
    def dense_sharding(self) -> int:
        """Under ``ep``: how many neighbours of a sharding group hold other experts each.

        The ``ep`` ranks that share the experts of a layer out are the ``tp`` ranks of that many neighbours.
        """
        return max(1, self.ep // self.tp)

    @property
    def moe_sharding(self) -> int:
        """Ranks of a sharding group that hold the same experts and share their optimizer state."""
        return self.sharding // self.dense_sharding

    def expert_rank(self, tp: int, shard: int) -> int:
        """Which of the ``ep`` shares of experts a rank holds (Paddle 3.3 ``fleet/base/topology.py:769-870``)."""
        return (shard % self.dense_sharding) * self.tp + tp if self.ep > 1 else 0

    def __str__(self) -> str:
        parts = [f"{f.name}={getattr(self, f.name)}" for f in fields(self) if getattr(self, f.name) > 1]
        return ",".join(parts) or "tp=1"


def sharding_in_words(strategy: str | None) -> str:
    """A sharding strategy, for people."""
    return "no sharding" if strategy in (None, "none") else str(strategy)
