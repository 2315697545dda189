"""Times of files: those of one save lie close together."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from itertools import pairwise

MINUTE_NS = 60 * 10**9
COPIED_BYTES_PER_S = 20_000_000
"""Slowest copy that is assumed when files of one save have later times, one after the other."""
FARTHER = 10
"""A file is named if its time is this many times farther from the others than they are from each other."""


def far_apart(paths: Iterable[str], times: Mapping[str, int], sizes: Mapping[str, int]) -> str:
    """The files that were written long before or after the others of their kind, in words; empty if there are none.

    All ranks write their files of one kind side by side, whatever else a job does meanwhile. Files are far apart if the
    gap is above a minute, ten times that between any others, and longer than it takes to copy the file after it.

    Parameters
    ----------
    times
        Path → when the file was last written, in nanoseconds since the epoch; empty if that is not known.
    sizes
        Path → size in bytes.
    """
    kinds: dict[str, list[str]] = {}
    for path in paths:
        if path in times:
            kinds.setdefault(re.sub(r"\d+", "0", path), []).append(path)
    return "; ".join(filter(None, (_apart(members, times, sizes) for members in kinds.values())))


def _apart(members: list[str], times: Mapping[str, int], sizes: Mapping[str, int]) -> str:
    """The smaller of the two sides of the longest gap."""
    ordered = sorted(members, key=lambda path: (times[path], path))
    gaps = [times[late] - times[early] for early, late in pairwise(ordered)]
    gap = max(gaps, default=0)
    number = gaps.index(gap) + 1 if gaps else 0
    sides = ordered[:number], ordered[number:]
    spread = max(times[side[-1]] - times[side[0]] for side in sides) if gaps else 0
    copying = sizes[ordered[number]] * 10**9 // COPIED_BYTES_PER_S
    if gap <= max(MINUTE_NS + copying, FARTHER * spread):
        return ""
    few, when = (sides[0], "before") if len(sides[0]) < len(sides[1]) else (sides[1], "after")
    named = few[0] if len(few) == 1 else f"{few[0]} … {few[-1]} ({len(few)} files)"
    others = "the other" if len(members) == 2 else "the others"
    return f"that {named} and {others} of the kind are of one save: last written {gap / 1e9:,.0f} s {when} {others}"
