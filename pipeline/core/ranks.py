"""Some of the ranks of a job, as users name them: ``8-15``."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import groupby

from paddle_reshard.pipeline.core.errors import UsageError
from paddle_reshard.pipeline.core.limits import MAX_RANKS

_RANGE = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?", re.ASCII)


def parse_ranks(given: str | Iterable[int]) -> tuple[int, ...]:
    """The numbers of ranks, each once and in order.

    >>> parse_ranks("8-10,2"), parse_ranks(range(2))
    ((2, 8, 9, 10), (0, 1))
    """
    if not isinstance(given, str):
        given = ",".join(map(str, given))
    ranks: set[int] = set()
    for item in given.split(","):
        match = _RANGE.fullmatch(item.strip())
        first, last = (0, -1) if match is None else (int(match[1]), int(match[2] or match[1]))
        if not first <= last < MAX_RANKS:
            raise UsageError(f"--ranks {given}: {item.strip()!r} are no ranks; write 8-15, or 0,2,4-7")
        ranks.update(range(first, last + 1))
    return tuple(sorted(ranks))


def ranks_in_words(ranks: Sequence[int]) -> str:
    """Ranks as :func:`parse_ranks` reads them.

    >>> ranks_in_words((2, 8, 9, 10))
    '2,8-10'
    """
    runs = []
    for _, run in groupby(enumerate(ranks), lambda pair: pair[1] - pair[0]):
        numbers = [number for _, number in run]
        runs.append(str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]}-{numbers[-1]}")
    return ",".join(runs)
