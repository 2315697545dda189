"""What did each worker of a cluster do? Sent with the reports of groups, added up by the driver."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from paddle_reshard.pipeline.core.shown import readable_bytes


@dataclass(frozen=True, slots=True)
class WorkerFigures:
    """The work of one worker since its last report."""

    number: int
    host: str
    groups: int = 0
    """Groups that it ran, or had a share in."""
    read_bytes: int = 0
    written_bytes: int = 0
    busy_seconds: float = 0.0
    retries: Mapping[str, int] = field(default_factory=dict)
    """Failure of a store → how often a request was repeated for it."""

    def in_words(self) -> str:
        """In a line, for people."""
        return (
            f"{self.groups} groups, {readable_bytes(self.read_bytes)} read, "
            f"{readable_bytes(self.written_bytes)} written, busy for {self.busy_seconds:.1f} s, on {self.host}"
        )


def add_figures(reported: Iterable[WorkerFigures]) -> tuple[WorkerFigures, ...]:
    """One entry for each worker, by its number; a worker that was replaced on another host has two.

    >>> add_figures([WorkerFigures(0, "a", 1, 5), WorkerFigures(0, "a", 2, 3)])[0].read_bytes
    8
    """
    sums: dict[tuple[int, str], WorkerFigures] = {}
    for one in reported:
        worker = one.number, one.host
        so_far = sums.get(worker, WorkerFigures(*worker))
        sums[worker] = WorkerFigures(
            *worker,
            so_far.groups + one.groups,
            so_far.read_bytes + one.read_bytes,
            so_far.written_bytes + one.written_bytes,
            so_far.busy_seconds + one.busy_seconds,
            add_retries((so_far.retries, one.retries)),
        )
    return tuple(sums[worker] for worker in sorted(sums))


def add_retries(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Retries of several workers together, the most frequent failure first.

    >>> add_retries([{"SlowDown": 1}, {"Reset": 2, "SlowDown": 2}])
    {'SlowDown': 3, 'Reset': 2}
    """
    total: Counter[str] = Counter()
    for count in counts:
        total.update(count)
    return dict(sorted(total.items(), key=lambda entry: (-entry[1], entry[0])))
