"""Into which parts is every target file cut?

Parts tile every file. A part is *copied* by the storage from one range of one source file, or *made*: of values that
one group moves, literal bytes and zeros.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from paddle_reshard.pipeline.errors import UnsupportedError
from paddle_reshard.pipeline.geometry import Ints
from paddle_reshard.pipeline.planning.match import MOVE, Ops, hull
from paddle_reshard.pipeline.planning.ranges import merge

MADE = -1
NOBODY = -1
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

    What lies between the values of two owners (literal bytes, padding) goes to the part before it, but not to one
    that is copied. Where more than ``largest_fill`` bytes have no values they become parts of ``NOBODY``.

    Parameters
    ----------
    sizes, smallest, largest_fill
        For every file its bytes, the smallest part, and the largest part without values; the last is at least
        twice the smallest.

    Raises
    ------
    UnsupportedError
        If values of two owners lie between each other in a file.
    """
    blocks = _blocks(ops, owners, copied)
    file, start, stop = blocks["file"].astype(np.int64), blocks["start"].copy(), blocks["stop"].copy()
    made = blocks["source_file"] == MADE
    first = np.r_[True, file[1:] != file[:-1]][: len(file)]
    last = np.r_[first[1:], True][: len(file)]
    before = np.where(first, 0, np.r_[0, stop[:-1]][: len(file)])
    _check_apart(before, start, ops, file)
    after = np.where(last, sizes[file], np.r_[start[1:], 0][: len(file)])
    made_before = ~first & np.r_[False, made[:-1]][: len(file)]
    # A gap belongs to the made part before it, else to the made one after it, else to nobody.
    leading = (start > before) & ~made_before
    blocks["start"] = np.where(leading & made, before, start)
    lone = [_fill(file[leading & ~made], before[leading & ~made], start[leading & ~made])]
    trailing = last & ~made & (after > stop)
    lone.append(_fill(file[trailing], stop[trailing], after[trailing]))
    kept = np.maximum(stop, np.minimum(after, blocks["start"] + smallest[file]))
    split = made & (after - kept > largest_fill[file])
    blocks["stop"] = np.where(made, np.where(split, kept, after), stop)
    lone.append(_fill(file[split], kept[split], after[split]))
    empty = np.setdiff1d(np.flatnonzero(sizes), file)
    lone.append(_fill(empty, np.zeros(len(empty), dtype=np.int64), sizes[empty]))
    parts = np.concatenate([blocks, *(_in_pieces(fill, largest_fill) for fill in lone)])
    return parts[np.lexsort((parts["start"], parts["file"]))]


def _blocks(ops: Ops, owners: Ints, copied: Parts) -> Parts:
    """What has values: consecutive ranges of one owner as one, and the copied parts; sorted by file and start."""
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
    same = (pieces["file"][1:] == pieces["file"][:-1]) & (pieces["group"][1:] == pieces["group"][:-1])
    both_made = (pieces["source_file"][1:] == MADE) & (pieces["source_file"][:-1] == MADE)
    opens = np.r_[True, ~(same & both_made)][: len(pieces)]
    begin = np.flatnonzero(opens)
    blocks = pieces[begin]
    if len(blocks):
        blocks["stop"] = np.maximum.reduceat(pieces["stop"], begin)
    return blocks


def _check_apart(before: Ints, start: Ints, ops: Ops, file: Ints) -> None:
    if (start < before).any():
        at = int(np.flatnonzero(start < before)[0])
        raise UnsupportedError(
            f"target file {int(file[at])}: values that are made separately lie between each other at byte "
            f"{int(start[at])}; a tensor is stored there in an order that differs from its siblings'"
        )


def _fill(file: Ints, start: Ints, stop: Ints) -> Parts:
    rows = np.zeros(len(file), dtype=PART)
    rows["group"], rows["file"], rows["start"], rows["stop"] = NOBODY, file, start, stop
    rows["source_file"] = MADE
    return rows


def _in_pieces(parts: Parts, largest: Ints) -> Parts:
    """Parts cut evenly into pieces of at most ``largest[file]`` bytes."""
    return divided(parts, -(-part_sizes(parts) // largest[parts["file"]]))


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
        np.where(parts["source_file"] == MADE, parts["group"], NOBODY).tolist(),
        part_sizes(parts).tolist(),
        (parts["stop"] == sizes[parts["file"]]).tolist(),
        strict=True,
    )
    wanted = smallest.tolist()
    file, previous, current, grown_bytes = -1, NOBODY, NOBODY, 0
    for its_file, owner, nbytes, ends in rows:
        if its_file != file or owner == NOBODY:
            if NOBODY not in (previous, current) and grown_bytes < wanted[file]:
                joins.append((previous, current))
            file, previous, current, grown_bytes = its_file, NOBODY, NOBODY, 0
            if owner == NOBODY:
                continue
        if current != NOBODY and grown_bytes < wanted[file]:
            joins.append((current, owner))
        else:
            previous, grown_bytes = current, 0
        current = owner
        grown_bytes += nbytes
        if ends:
            previous = NOBODY
    return joins
