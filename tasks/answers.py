"""The reports of several groups as one small message.

A driver receives hundreds of thousands of reports. As columns of plain values they are sent and unpacked ten times as
fast as objects, and each path and each figure of the worker is sent once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

from paddle_reshard.pipeline.core.errors import DriftError, ReshardError
from paddle_reshard.storage.store import Receipt
from paddle_reshard.tasks.figures import WorkerFigures
from paddle_reshard.tasks.group import GroupReport
from paddle_reshard.tasks.sums import Sum

_Totals = tuple[int, int, int, int, int]
"""Bytes read, written and copied, elements compared, and number of receipts of a group."""
_Receipt = tuple[int, int, int, str, str, str, str]
"""A receipt, with the number of its path."""


@dataclass(frozen=True, slots=True)
class BatchAnswer:
    """What a worker did with a batch: the groups that it finished, which are the first ones, and why it stopped."""

    groups: tuple[int, ...]
    totals: tuple[_Totals, ...]
    paths: tuple[str, ...]
    receipts: tuple[_Receipt, ...]
    """The receipts of all groups, in order."""
    differences: dict[int, tuple[DriftError, ...]]
    """Group → differences, for groups that have any."""
    sums: dict[int, tuple[tuple[int, int, int, int], ...]]
    """Group → what it adds to fingerprints, for groups that add any."""
    group_seconds: tuple[float, ...]
    """Time that each group took."""
    figures: WorkerFigures
    seconds: float
    """Time that the batch took."""
    failure: str = ""
    """Why the next group failed, if another worker may succeed."""
    refusal: ReshardError | None = None
    """Why the conversion cannot go on."""

    def reports(self) -> list[GroupReport]:
        """The reports of the finished groups; the first has the worker's figures."""
        receipts = self._receipts()
        figures: tuple[WorkerFigures, ...] = (self.figures,)
        reports = []
        worker = self.figures.name
        rows = zip(self.groups, self.totals, self.group_seconds, strict=True)
        for group, (read, written, copied, compared, count), seconds in rows:
            reports.append(
                GroupReport(
                    group,
                    read,
                    written,
                    tuple(next(receipts) for _ in range(count)),
                    compared,
                    self.differences.get(group, ()),
                    figures,
                    copied,
                    tuple(Sum(*values) for values in self.sums.get(group, ())),
                    worker=worker,
                    seconds=seconds,
                )
            )
            figures = ()
        return reports

    def _receipts(self) -> Iterator[Receipt]:
        paths = self.paths
        return (
            Receipt(paths[path], offset, nbytes, tag, checksum, md5, aside)
            for path, offset, nbytes, tag, checksum, md5, aside in self.receipts
        )


def answer_of(
    reports: Sequence[GroupReport],
    figures: WorkerFigures,
    seconds: float,
    failure: str = "",
    refusal: ReshardError | None = None,
) -> BatchAnswer:
    """The answer to a batch whose finished groups made ``reports``."""
    receipts = list(chain.from_iterable(report.receipts for report in reports))
    numbers = {path: number for number, path in enumerate(dict.fromkeys(r.path for r in receipts))}
    return BatchAnswer(
        tuple(report.group for report in reports),
        tuple(
            (r.read_bytes, r.written_bytes, r.copied_bytes, r.compared_elements, len(r.receipts))
            for r in reports
        ),
        tuple(numbers),
        tuple(
            (numbers[r.path], r.byte_offset, r.nbytes, r.tag, r.checksum, r.md5, r.aside) for r in receipts
        ),
        {report.group: report.differences for report in reports if report.differences},
        {report.group: tuple((*values,) for values in report.sums) for report in reports if report.sums},
        tuple(report.seconds for report in reports),
        figures,
        seconds,
        failure,
        refusal,
    )
