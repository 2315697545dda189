"""Into which parts is every target file cut?

Parts tile every file. A part is *copied* by the storage from one range of one source file, or *made*: of values that
one group moves, literal bytes and zeros.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from paddle_reshard.pipeline.core.columns import Flags
from paddle_reshard.pipeline.core.errors import UnsupportedError
from paddle_reshard.pipeline.core.geometry import Ints
from paddle_reshard.pipeline.planning.ops import MOVE, Ops, hull
from paddle_reshard.pipeline.planning.ranges import merge

MADE = -1
NO_GROUP = -1
"""The owner of a part without values: literal bytes, zeros, or a copy."""

PART = np.dtype(
    [
        ("group", np.int32),
        ("file", np.int32),
        ("start", np.int64),
        ("stop", np.int64),
        ("source_file", np.int32),  # MADE, or the file that it is copied from
        ("source_start", np.int64),  # where the copied range begins there
    ]
)
Parts = npt.NDArray[np.void]


def part_sizes(parts: Parts) -> Ints:
    """Bytes of each part."""
    return np.asarray(parts["stop"] - parts["start"], dtype=np.int64)


def plan_parts(
    ops: Ops, owners: Ints, copied: Parts, sizes: Ints, smallest: Ints, largest_fill: Ints
) -> Parts:
    """All parts of all files, ``owners`` as their groups, sorted by file and start.

    What lies between the values of two owners (literal bytes, padding) goes to the part before it, or to the one
    after it if that before is copied. Where it is longer than ``largest_fill`` most of it becomes parts of
    ``NO_GROUP``.

    Parameters
    ----------
    sizes, smallest, largest_fill
        For every file its bytes, the smallest part, and the largest part without values; the last is at least
        twice the smallest.

    Raises
    ------
    UnsupportedError
        If values of two groups interleave in a file.
    """
    blocks = _blocks(ops, owners, copied, smallest, largest_fill)
    file = blocks["file"].astype(np.int64)
    made = blocks["source_file"] == MADE
    opens = np.r_[True, file[1:] != file[:-1]][: len(file)]
    closes = np.r_[opens[1:], True][: len(file)]
    before = np.where(opens, 0, np.r_[0, blocks["stop"][:-1]][: len(file)])
    _check_apart(blocks, before)
    empty = np.setdiff1d(np.flatnonzero(sizes), file)
    last = np.flatnonzero(closes)
    # One gap before every block, one after the last of every file, and files that are nothing else.
    none = np.full(len(empty), -1)
    gaps = _Gaps(
        file=np.r_[file, file[last], empty].astype(np.int64),
        start=np.r_[before, blocks["stop"][last], np.zeros(len(empty), dtype=np.int64)],
        stop=np.r_[blocks["start"], sizes[file[last]], sizes[empty]],
        before=np.r_[np.where(opens, -1, np.arange(len(file)) - 1), last, none].astype(np.int64),
        after=np.r_[np.arange(len(file)), np.full(len(last), -1), none].astype(np.int64),
    )
    start, stop = _shared(gaps, blocks, made, smallest, largest_fill)
    fills = _fill(gaps.file, start, stop)
    fills = fills[fills["start"] < fills["stop"]]
    parts = np.concatenate([blocks, divided(fills, -(-part_sizes(fills) // largest_fill[fills["file"]]))])
    return parts[np.lexsort((parts["start"], parts["file"]))]


class _Gaps(NamedTuple):
    """The gaps between blocks; ``before`` and ``after`` are the blocks around each, -1 for none."""

    file: Ints
    start: Ints
    stop: Ints
    before: Ints
    after: Ints


def _shared(gaps: _Gaps, blocks: Parts, made: Flags, smallest: Ints, largest_fill: Ints) -> tuple[Ints, Ints]:
    """Give every gap to the blocks around it, which are changed; what is left of it is nobody's."""
    of_before = (gaps.before >= 0) & np.r_[made, False][gaps.before]
    of_after = (gaps.after >= 0) & np.r_[made, False][gaps.after]
    size, some = gaps.stop - gaps.start, smallest[gaps.file]
    front = np.where(of_before, np.minimum(size, some), 0)
    back = np.where(of_after, np.minimum(size - front, some), 0)
    long = size - front - back > largest_fill[gaps.file]
    front = np.where(long, front, np.where(of_before, size, 0))
    back = np.where(long, back, np.where(of_after & ~of_before, size, 0))
    blocks["stop"][gaps.before[of_before]] += front[of_before]
    blocks["start"][gaps.after[of_after]] -= back[of_after]
    return gaps.start + front, gaps.stop - back


def _blocks(ops: Ops, owners: Ints, copied: Parts, smallest: Ints, largest_fill: Ints) -> Parts:
    """Ranges that have values, neighbours of one owner joined, and the copied parts; sorted by file and start."""
    moves = ops["kind"] == MOVE
    start, stop = (side[moves] for side in hull(ops, "target"))
    count = int(owners.max(initial=-1)) + 1
    key, low, high = merge(
        ops["target_file"][moves].astype(np.int64) * max(count, 1) + owners[moves], start, stop
    )
    pieces = np.zeros(len(key), dtype=PART)
    pieces["group"], pieces["file"] = key % max(count, 1), key // max(count, 1)
    pieces["start"], pieces["stop"], pieces["source_file"] = low, high, MADE
    pieces = np.concatenate([pieces, copied])
    pieces = pieces[np.lexsort((pieces["start"], pieces["file"]))]
    before, after = pieces[:-1], pieces[1:]
    same = (before["file"] == after["file"]) & (before["group"] == after["group"])
    same &= (before["source_file"] == MADE) & (after["source_file"] == MADE)
    same &= after["start"] - before["stop"] <= (largest_fill + 2 * smallest)[after["file"]]
    begin = np.flatnonzero(np.r_[True, ~same][: len(pieces)])
    blocks = pieces[begin]
    if len(blocks):
        blocks["stop"] = np.maximum.reduceat(pieces["stop"], begin)
    return blocks


def _check_apart(blocks: Parts, before: Ints) -> None:
    if (blocks["start"] < before).any():
        block = blocks[np.flatnonzero(blocks["start"] < before)[0]]
        raise UnsupportedError(
            f"target file {int(block['file'])}: values of two groups interleave at byte "
            f"{int(block['start'])}; a tensor is stored there in another order than its siblings"
        )


def _fill(file: Ints, start: Ints, stop: Ints) -> Parts:
    rows = np.zeros(len(file), dtype=PART)
    rows["group"], rows["file"], rows["start"], rows["stop"] = NO_GROUP, file, start, stop
    rows["source_file"] = MADE
    return rows


def divided(parts: Parts, counts: Ints) -> Parts:
    """Every part cut evenly into as many pieces as ``counts`` says."""
    origin = np.repeat(np.arange(len(parts)), counts)
    within = np.arange(len(origin)) - np.repeat(np.cumsum(counts) - counts, counts)
    size, count = part_sizes(parts)[origin], counts[origin]
    pieces = parts[origin]
    start = size * within // count
    pieces["stop"] = pieces["start"] + size * (within + 1) // count
    pieces["start"] += start
    pieces["source_start"] += start
    return pieces


def small_parts(parts: Parts, sizes: Ints, smallest: Ints) -> list[tuple[int, int]]:
    """Pairs of owners to join, so that every part but the last of a file reaches its smallest size.

    Along each file, owners are joined from a part that is too small onwards until it has grown large enough; before
    a part that is copied or without values, the other way round. ``parts`` is sorted by file and start.
    """
    joins: list[tuple[int, int]] = []
    rows = zip(
        parts["file"].tolist(),
        np.where(parts["source_file"] == MADE, parts["group"], NO_GROUP).tolist(),
        part_sizes(parts).tolist(),
        (parts["stop"] == sizes[parts["file"]]).tolist(),
        strict=True,
    )
    wanted = smallest.tolist()
    file, previous, current, grown_bytes = -1, NO_GROUP, NO_GROUP, 0
    for its_file, owner, nbytes, ends in rows:
        if its_file != file or owner == NO_GROUP:
            if NO_GROUP not in (previous, current) and grown_bytes < wanted[file]:
                joins.append((previous, current))
            file, previous, current, grown_bytes = its_file, NO_GROUP, NO_GROUP, 0
            if owner == NO_GROUP:
                continue
        if current != NO_GROUP and grown_bytes < wanted[file]:
            joins.append((current, owner))
        else:
            previous, grown_bytes = current, 0
        current = owner
        grown_bytes += nbytes
        if ends:
            previous = NO_GROUP
    return joins
