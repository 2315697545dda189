"""Find ranges of the target files that the storage itself can copy from source files.

A *run* is a range of a target file that equals one contiguous range of one source file, value for value. The bytes
between two runs, mostly literals, must be made. Stores may require a minimum size for a made part: runs are trimmed
until it is reached, at offsets that cut an op into two boxes.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection
from typing import NamedTuple

import numpy as np

from paddle_reshard.pipeline.core.catalog import ITEMSIZES, volumes
from paddle_reshard.pipeline.core.columns import Flags
from paddle_reshard.pipeline.core.numbers import Ints
from paddle_reshard.pipeline.core.part_limits import CopyLimits
from paddle_reshard.pipeline.planning.cut import dense, outermost, piece
from paddle_reshard.pipeline.planning.ops import MOVE, Ops, hull
from paddle_reshard.pipeline.planning.parts import NO_GROUP, PART, Parts, divided, part_sizes

CAST_FACTOR = 20
"""A run whose values must be read anyway, for a cast, is copied if it is this many times the minimum part size."""


class _CopyRuns(NamedTuple):
    """Runs, sorted by target file and start."""

    file: Ints
    start: Ints
    stop: Ints
    first: Ints
    """First op of each run."""
    least: Ints
    """Minimum bytes of a copy."""


def carve_copies(
    ops: Ops, smallest: Ints, limits: CopyLimits | None, mixed: Collection[int] = ()
) -> tuple[Ops, Parts]:
    """Remove from ``ops`` what the storage can copy; ``smallest`` is the minimum part size of every target file.

    Returns the ops of the bytes that are not copied, and the copied parts.

    Never copied: values of tensors in ``mixed``, which are computed, and values that are compared, which must be read.
    Values that are also cast for another target file must be read too: they are copied only in long runs, so that
    little has to be made between the copies. ``ops`` is emptied.
    """
    if limits is None or not len(ops):
        return ops, np.zeros(0, dtype=PART)
    compared, cast = np.zeros((2, int(ops["source_tensor"].max()) + 1), dtype=bool)
    compared[ops["source_tensor"][(ops["kind"] != MOVE) | np.isin(ops["tensor"], list(mixed))]] = True
    cast[ops["source_tensor"][ops["source_dtype"] != ops["target_dtype"]]] = True
    free = (ops["kind"] == MOVE) & ~compared[ops["source_tensor"]] & dense(ops)
    if not free.any():
        return ops, np.zeros(0, dtype=PART)
    ops, not_copied = ops.split(free)
    ops.reorder(np.lexsort((ops["target_byte"], ops["target_file"])))
    start, stop = hull(ops, "target")
    joined = _continues(ops, start, stop)
    run_of_op = np.cumsum(~joined) - 1
    first = np.flatnonzero(~joined)
    file = ops["target_file"][first].astype(np.int64)
    factor = np.where(cast[ops["source_tensor"][first]], CAST_FACTOR, 1)
    least = np.maximum(factor * smallest[file], limits.smallest_bytes)
    runs = _CopyRuns(file, start[first], stop[np.r_[first[1:], len(ops)] - 1], first, least)
    unit = _unit_bytes(ops)
    low, high = _trim(runs, start, unit, smallest)
    copied = _copied_parts(ops, runs, low, high, limits.largest_bytes)
    kept = _remainder(ops, start, stop, unit, low[run_of_op], high[run_of_op])
    return Ops.joined([not_copied, kept]), copied


def _continues(ops: Ops, start: Ints, stop: Ints) -> Flags:
    """Whether each op begins, on both sides, where the previous op ends."""
    source_start, source_stop = hull(ops, "source")
    follows = (start[1:] == stop[:-1]) & (source_start[1:] == source_stop[:-1])
    for side in ("source_file", "target_file"):
        follows &= ops[side][1:] == ops[side][:-1]
    return np.r_[False, follows]


def _unit_bytes(ops: Ops) -> Ints:
    """Bytes of one slab of each op's outermost dim: a cut at a multiple of this yields two boxes."""
    extents = volumes(ops) // ops.along_each("extents", outermost(ops, "target"))
    return np.asarray(extents * ITEMSIZES[ops["target_dtype"]], dtype=np.int64)


class _Slabs(NamedTuple):
    """Where runs can be cut: each op in a run is slabs of one size, in bytes."""

    starts: list[int]
    """First byte of each op."""
    units: list[int]
    """Size of its slabs."""
    firsts: list[int]
    """First op of each run, and one past the last of all."""

    def before(self, byte: int, run: int) -> int:
        """The last cut of a run at or before ``byte``."""
        op = bisect_right(self.starts, byte, lo=self.firsts[run], hi=self.firsts[run + 1]) - 1
        return byte - (byte - self.starts[op]) % self.units[op]

    def after(self, byte: int, run: int) -> int:
        """The first cut of a run at or after ``byte``."""
        op = bisect_right(self.starts, byte, lo=self.firsts[run], hi=self.firsts[run + 1]) - 1
        return byte + (self.starts[op] - byte) % self.units[op]


def _trim(runs: _CopyRuns, op_start: Ints, unit: Ints, smallest: Ints) -> tuple[Ints, Ints]:
    """The range ``[low, high)`` of every run that is copied; empty if none is.

    ``smallest`` is the minimum size in bytes of a made part between two copies, for each file.

    A 30 MiB file in a store whose parts have at least 5 MiB. Two runs could be copied, 2 + 1 MiB must be made::

        MiB       0    2    5         12   13   17            30
        runs      made [··············)    [··················)
        copied    made made [·········)    made [·············)
                  └─ 5 ───┘           └─ 5 ────┘

    The first made part is 3 MiB short, which it takes from the run after it. The second is 4 MiB short: the run after
    it can spare 12 MiB, the run before it only 2 MiB, so all 4 MiB come from the run after it.
    """
    slabs = _Slabs(op_start.tolist(), unit.tolist(), [*runs.first.tolist(), len(op_start)])
    low, high = runs.start.tolist(), runs.start.tolist()
    wanted, least = smallest.tolist(), runs.least.tolist()
    file, before, made_from = -1, -1, 0
    for run, (its_file, begin, end) in enumerate(
        zip(runs.file.tolist(), runs.start.tolist(), runs.stop.tolist(), strict=True)
    ):
        if its_file != file:
            file, before, made_from = its_file, -1, 0
        shortest = least[run]
        lack = wanted[file] - (begin - made_from)
        if begin > made_from and lack > 0:
            spare_here = end - begin - shortest
            spare_before = high[before] - low[before] - least[before] if before >= 0 else 0
            # Taken from the neighbour that can spare more; only the rest from the second one.
            from_here = min(lack, spare_here) if spare_here >= spare_before else max(0, lack - spare_before)
            from_here = from_here and slabs.after(begin + from_here, run) - begin
            from_before = max(0, lack - from_here)
            back = made_from
            if from_before and before >= 0:
                back = slabs.before(high[before] - from_before, before)
            if (
                spare_here < from_here
                or made_from - back < from_before
                or (from_before and back - low[before] < least[before])
            ):
                continue
            if from_before:
                high[before] = back
            begin += from_here
        if end - begin >= shortest:
            low[run], high[run] = begin, end
            before, made_from = run, end
    return np.array(low, dtype=np.int64), np.array(high, dtype=np.int64)


def _copied_parts(ops: Ops, runs: _CopyRuns, low: Ints, high: Ints, largest_bytes: int) -> Parts:
    """Parts of every copied range, of at most ``largest_bytes`` unless the minimum size requires more."""
    chosen = np.flatnonzero(high > low)
    first = ops[runs.first[chosen]]
    parts = np.zeros(len(chosen), dtype=PART)
    parts["group"], parts["file"], parts["source_file"] = NO_GROUP, runs.file[chosen], first["source_file"]
    parts["start"], parts["stop"] = low[chosen], high[chosen]
    parts["source_start"] = first["source_byte"] + low[chosen] - runs.start[chosen]
    return divided(parts, -(-part_sizes(parts) // np.maximum(largest_bytes, 2 * runs.least[chosen])))


def _remainder(ops: Ops, start: Ints, stop: Ints, unit: Ints, low: Ints, high: Ints) -> Ops:
    """The rest of every op outside ``[low, high)``: a head, a tail, both, or all of it."""
    count = (stop - start) // unit
    nothing = high <= low
    head = np.where(nothing, count, np.clip((low - start) // unit, 0, count))
    tail = np.where(nothing, 0, count - np.clip((high - start) // unit, 0, count))
    dim = outermost(ops, "target")
    heads, tails = np.flatnonzero(head > 0), np.flatnonzero(tail > 0)
    return Ops.joined(
        [
            piece(ops[heads], dim[heads], np.zeros(len(heads), dtype=np.int64), head[heads]),
            piece(ops[tails], dim[tails], (count - tail)[tails], tail[tails]),
        ]
    )
