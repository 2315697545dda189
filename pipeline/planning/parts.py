"""Divide every target file into parts.

Parts tile a file. A part is *copied* by the storage from a range of a source file, or *made* by one group from values,
literal bytes and zeros.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from paddle_reshard.pipeline.core.columns import Flags
from paddle_reshard.pipeline.core.errors import UnsupportedError
from paddle_reshard.pipeline.core.numbers import Ints, numbered_within
from paddle_reshard.pipeline.core.sorting import order_by
from paddle_reshard.pipeline.planning.ops import MOVE, Ops, hull
from paddle_reshard.pipeline.planning.ranges import by_owner, merge

MADE = -1
NO_GROUP = -1
"""Owner of a part without values: literal bytes, zeros, or a copy. It is assigned to a group later."""

PART = np.dtype(
    [
        ("group", np.int32),
        ("file", np.int32),
        ("start", np.int64),
        ("stop", np.int64),
        ("source_file", np.int32),  # the file it is copied from, or MADE
        ("source_start", np.int64),  # first byte of the copied range in that file
    ]
)
Parts = npt.NDArray[np.void]


def part_sizes(parts: Parts) -> Ints:
    """Bytes of each part."""
    return np.asarray(parts["stop"] - parts["start"], dtype=np.int64)


def plan_parts(
    ops: Ops, owners: Ints, copied: Parts, sizes: Ints, smallest: Ints, largest_fill: Ints
) -> Parts:
    """All parts of all files, with ``owners`` as groups, sorted by file and start.

    A gap between the values of two owners (literal bytes, padding) goes to the part before it, or to the part after it
    if the one before is copied. Most of a gap longer than ``largest_fill`` becomes parts of ``NO_GROUP``.

    Values of owner 0 in [10, 20) and of owner 1 in [26, 30) of a file of 32 bytes give two parts::

        bytes    0      10      20    26    30  32
        owners   ······ 0000000 ····· 11111 ···
        parts    [──────────── 0 ────)[── 1 ───)

    ``sizes``, ``smallest`` and ``largest_fill`` are for every file its size, minimum part size, and largest part
    without values, in bytes; the last is at least twice the minimum part size. Values of two owners that interleave in
    a file are refused.
    """
    blocks = _blocks(ops, owners, copied, smallest, largest_fill)
    file = blocks["file"].astype(np.int64)
    made = blocks["source_file"] == MADE
    opens = np.r_[True, file[1:] != file[:-1]][: len(file)]
    closes = np.r_[opens[1:], True][: len(file)]
    before = np.where(opens, 0, np.r_[0, blocks["stop"][:-1]][: len(file)])
    _check_apart(blocks, before)
    filled = np.flatnonzero(sizes)
    empty = filled[~np.isin(filled, file)]
    last = np.flatnonzero(closes)
    # A gap before every block, a gap after the last block of every file, and files without any block.
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
    fills = fills.take(np.flatnonzero(fills["start"] < fills["stop"]))
    if not len(fills):
        return blocks
    parts = np.concatenate([blocks, divided(fills, -(-part_sizes(fills) // largest_fill[fills["file"]]))])
    return in_file_order(parts)


def in_file_order(parts: Parts) -> Parts:
    """The same parts, sorted by file and start."""
    # ``take`` copies whole rows, which an index does several times slower, field by field.
    return parts.take(order_by(parts["file"].astype(np.int64), np.ascontiguousarray(parts["start"])))


class _Gaps(NamedTuple):
    """Gaps between blocks; ``before`` and ``after`` are the neighbouring blocks, -1 for none."""

    file: Ints
    start: Ints
    stop: Ints
    before: Ints
    after: Ints


def _shared(gaps: _Gaps, blocks: Parts, made: Flags, smallest: Ints, largest_fill: Ints) -> tuple[Ints, Ints]:
    """Extend the blocks around every gap, in place; returns the ``(start, stop)`` of what remains of the gaps."""
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
    """Ranges with values, joined if neighbours have one owner, and copied parts; sorted by file and start."""
    parts = [copied]
    for rows in by_owner(owners):
        moves = ops["kind"][rows] == MOVE
        start, stop = (side[moves] for side in hull(ops[rows], "target"))
        owner, file = owners[rows][moves], ops["target_file"][rows][moves].astype(np.int64)
        if not len(owner):
            continue
        first, count = int(owner.min()), int(owner.max() - owner.min()) + 1
        key, low, high = merge(file * count + owner - first, start, stop)
        pieces = np.zeros(len(key), dtype=PART)
        pieces["group"], pieces["file"] = first + key % count, key // count
        pieces["start"], pieces["stop"], pieces["source_file"] = low, high, MADE
        parts.append(pieces)
    pieces = in_file_order(np.concatenate(parts))
    before, after = pieces[:-1], pieces[1:]
    same = (before["file"] == after["file"]) & (before["group"] == after["group"])
    same &= (before["source_file"] == MADE) & (after["source_file"] == MADE)
    same &= after["start"] - before["stop"] <= (largest_fill + 2 * smallest)[after["file"]]
    begin = np.flatnonzero(np.r_[True, ~same][: len(pieces)])
    blocks = pieces.take(begin)
    if len(blocks):
        blocks["stop"] = np.maximum.reduceat(pieces["stop"], begin)
    return blocks


def _check_apart(blocks: Parts, before: Ints) -> None:
    if (blocks["start"] < before).any():
        block = blocks[np.flatnonzero(blocks["start"] < before)[0]]
        raise UnsupportedError(
            f"target file {int(block['file'])}: values of two groups interleave at byte "
            f"{int(block['start'])}; a tensor there has a different dim order than its siblings"
        )


def _fill(file: Ints, start: Ints, stop: Ints) -> Parts:
    rows = np.zeros(len(file), dtype=PART)
    rows["group"], rows["file"], rows["start"], rows["stop"] = NO_GROUP, file, start, stop
    rows["source_file"] = MADE
    return rows


def divided(parts: Parts, counts: Ints) -> Parts:
    """Every part, cut evenly into ``counts`` pieces.

    A part of bytes [10, 20), cut into 3, becomes [10, 13), [13, 16) and [16, 20).
    """
    origin = np.repeat(np.arange(len(parts)), counts)
    within = numbered_within(counts)
    size, count = part_sizes(parts)[origin], counts[origin]
    pieces = parts.take(origin)
    start = size * within // count
    pieces["stop"] = pieces["start"] + size * (within + 1) // count
    pieces["start"] += start
    pieces["source_start"] += start
    return pieces


def small_parts(parts: Parts, sizes: Ints, smallest: Ints) -> list[tuple[int, int]]:
    """Pairs of owners to join, so that every part except the last of a file reaches the minimum size.

    A part that is too small is joined with the parts after it until it is large enough; before a part without an owner,
    with the part before it. With a minimum of 5, parts of 8, 2, 4 and 1 bytes of owners 0 to 3, followed by a copy,
    give the pairs (1, 2) and (2, 3). ``parts`` is sorted by file and start.
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
