"""What each worker of a cluster did; sent with the reports of groups and added up by the driver."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from paddle_reshard.pipeline.core.shown import counted, readable_bytes


@dataclass(frozen=True, slots=True)
class WorkerFigures:
    """What one worker did since its last report."""

    number: int
    host: str
    groups: int = 0
    """Groups that it ran, alone or with further workers."""
    read_bytes: int = 0
    written_bytes: int = 0
    busy_seconds: float = 0.0
    retries: Mapping[str, int] = field(default_factory=dict)
    """Failure of a store → how often a request was repeated because of it."""

    @property
    def name(self) -> str:
        """What the worker is called in events and reports."""
        return f"worker {self.number} on {self.host}"

    def in_words(self) -> str:
        """One line for people."""
        return (
            f"{counted(self.groups, 'group')}, {readable_bytes(self.read_bytes)} read, "
            f"{readable_bytes(self.written_bytes)} written, busy for {self.busy_seconds:.1f} s, on {self.host}"
        )


def add_figures(reported: Iterable[WorkerFigures]) -> tuple[WorkerFigures, ...]:
    """One entry for each worker and host: a worker that was replaced on another host has two.

    >>> add_figures([WorkerFigures(0, "a", 1, 5), WorkerFigures(0, "a", 2, 3)])[0].read_bytes
    8
    """
    sums: dict[tuple[int, str], WorkerFigures] = {}
    for figures in reported:
        worker = figures.number, figures.host
        so_far = sums.get(worker, WorkerFigures(*worker))
        sums[worker] = WorkerFigures(
            *worker,
            so_far.groups + figures.groups,
            so_far.read_bytes + figures.read_bytes,
            so_far.written_bytes + figures.written_bytes,
            so_far.busy_seconds + figures.busy_seconds,
            add_retries((so_far.retries, figures.retries)),
        )
    return tuple(sums[worker] for worker in sorted(sums))


def add_retries(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """The sum of the retries of several workers, most frequent failure first.

    >>> add_retries([{"SlowDown": 1}, {"Reset": 2, "SlowDown": 2}])
    {'SlowDown': 3, 'Reset': 2}
    """
    total: Counter[str] = Counter()
    for count in counts:
        total.update(count)
    return dict(sorted(total.items(), key=lambda entry: (-entry[1], entry[0])))
