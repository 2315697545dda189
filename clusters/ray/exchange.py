"""Divide a group among several workers.

Each worker loads some of the bands, then makes and writes some of the parts from the bands that these need, and makes
some of the comparisons. A *share* is the work of one worker: again a ``GroupWork``, with only the bands that it needs,
so whole and shared groups run the same code.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np

from paddle_reshard.pipeline.core.columns import Flags
from paddle_reshard.pipeline.core.numbers import Ints
from paddle_reshard.pipeline.planning.ops import MOVE
from paddle_reshard.pipeline.planning.work import GroupWork
from paddle_reshard.tasks.group import GroupReport, band_bytes, locate
from paddle_reshard.tasks.sums import added


@dataclass(frozen=True)
class Share:
    """The share of one worker in a group."""

    loads: tuple[int, ...]
    """Bands of the group that this worker loads."""
    needs: tuple[int, ...]
    """Bands of the group that ``work`` needs, in the order of its own bands."""
    work: GroupWork


def split_group(work: GroupWork, count: int) -> tuple[Share, ...]:
    """Divide a group among ``count`` workers, with similar numbers of bytes to load and to write.

    Every band, every part and every comparison belongs to exactly one worker.
    """
    loader = _deal(work.bands["stop"] - work.bands["start"], count)
    maker = _deal(work.parts["stop"] - work.parts["start"], count)
    moves = work.ops["kind"] == MOVE
    compares = work.ops["kind"] != MOVE
    first_band = locate(work.bands, work.ops, "source")
    second_band = first_band.copy()
    second_band[compares] = locate(work.bands, work.ops[compares], "target")
    worker = np.empty(len(work.ops), dtype=np.int64)
    worker[moves] = maker[locate(work.parts, work.ops[moves], "target")]
    worker[compares] = loader[first_band[compares]]
    return tuple(
        _share(work, loader == number, maker == number, worker == number, (first_band, second_band))
        for number in range(count)
    )


def _share(work: GroupWork, loads: Flags, parts: Flags, ops: Flags, bands_of_ops: tuple[Ints, Ints]) -> Share:
    needs = np.unique([bands[ops] for bands in bands_of_ops])
    number_of_part = np.cumsum(parts) - 1
    return Share(
        loads=tuple(np.flatnonzero(loads).tolist()),
        needs=tuple(needs.tolist()),
        work=replace(
            work,
            bands=work.bands[needs],
            parts=work.parts[parts],
            ops=work.ops[ops],
            literals=tuple(
                (int(number_of_part[part]), offset, content)
                for part, offset, content in work.literals
                if parts[part]
            ),
        ).to_send(),
    )


def _deal(sizes: Ints, count: int) -> Ints:
    """The worker of each item: the largest items first, each to the worker with the fewest bytes so far."""
    dealt = np.zeros(count, dtype=np.int64)
    worker = np.zeros(len(sizes), dtype=np.int64)
    for item in np.argsort(-sizes, kind="stable"):
        worker[item] = dealt.argmin()
        dealt[worker[item]] += sizes[item]
    return worker


def merge_reports(work: GroupWork, reports: Sequence[GroupReport]) -> GroupReport:
    """The report of a group from the reports of its shares. Every band was read once."""
    return GroupReport(
        group=work.group,
        read_bytes=band_bytes(work),
        written_bytes=sum(report.written_bytes for report in reports),
        receipts=tuple(chain.from_iterable(report.receipts for report in reports)),
        compared_elements=sum(report.compared_elements for report in reports),
        differences=tuple(chain.from_iterable(report.differences for report in reports)),
        figures=tuple(chain.from_iterable(report.figures for report in reports)),
        sums=added(chain.from_iterable(report.sums for report in reports)),
    )
