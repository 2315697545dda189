"""Estimate how long a plan would take on a number of workers.

A model, not a measurement. Groups are assigned in the order of the plan, each to the first free worker, as on a
cluster. A worker reads a group's bands, then writes its parts and has the storage make the copies; meanwhile it reads
the next group, and never holds more than two. The total rate of a store is shared evenly. Computation is ignored: it is
several times faster than any store.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heapreplace
from math import inf
from typing import NamedTuple

import numpy as np

from paddle_reshard.pipeline.core.columns import Flags
from paddle_reshard.pipeline.core.errors import UsageError
from paddle_reshard.pipeline.core.numbers import Ints
from paddle_reshard.pipeline.core.units import parse_size
from paddle_reshard.pipeline.planning.parts import MADE, part_sizes
from paddle_reshard.pipeline.planning.plan import Plan
from paddle_reshard.pipeline.planning.work import GROUPS_AT_A_TIME


@dataclass(frozen=True, slots=True)
class Rates:
    """The speed of workers and stores."""

    read_bytes_per_second: float = 1e9
    """One worker's rate."""
    write_bytes_per_second: float = 1e9
    """One worker's rate."""
    total_read_bytes_per_second: float = inf
    """Rate of the source's store for all workers together."""
    total_write_bytes_per_second: float = inf
    """Rate of the target's store for all workers together."""
    copy_bytes_per_second: float = 1e9
    """Rate of each copy made by the storage."""
    request_seconds: float = 0.02
    """Latency to the first byte of a response."""
    request_bytes: int = 8 << 20
    """Longer ranges are read in several requests."""
    requests_at_once: int = 16
    """Concurrent requests of one worker."""

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            if not value > 0 and not (name == "request_seconds" and value == 0):
                raise UsageError(f"{name.replace('_', ' ')} cannot be {value}")


_RATES = {
    "read": "read_bytes_per_second",
    "write": "write_bytes_per_second",
    "copy": "copy_bytes_per_second",
    "total-read": "total_read_bytes_per_second",
    "total-write": "total_write_bytes_per_second",
}
_LATENCY = "latency"


def parse_rates(text: str) -> Rates:
    """Rates as a user writes them: sizes per second, and the latency in seconds.

    >>> parse_rates("read=2GB,total-write=20GB,latency=0.1").read_bytes_per_second
    2000000000.0
    """
    rates: dict[str, float] = {}
    for entry in text.split(","):
        name, _, value = entry.strip().partition("=")
        if name == _LATENCY:
            rates["request_seconds"] = _seconds(value)
        elif name in _RATES:
            rates[_RATES[name]] = float(parse_size(value))
        else:
            raise UsageError(
                f"{entry.strip()!r} is not a rate; write NAME=RATE with {', '.join([*_RATES, _LATENCY])}"
            )
    return Rates(**rates)  # type: ignore[arg-type]


def _seconds(text: str) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise UsageError(f"{text!r} is not a number of seconds") from error


def least_seconds(read_bytes: int, written_bytes: int) -> float:
    """Time for which one worker reads, or writes if that is longer: it does both at once. Waiting is not counted.

    >>> least_seconds(3_000_000_000, 2_000_000_000)
    3.0
    """
    rates = Rates()
    return max(read_bytes / rates.read_bytes_per_second, written_bytes / rates.write_bytes_per_second)


@dataclass(frozen=True, slots=True)
class Simulation:
    """The estimated cost of a plan on ``workers`` workers."""

    workers: int
    seconds: float
    """Time until the last group is done."""
    busy_share: float
    """Share of the workers' time spent reading, or writing if that is more; 1 is perfect balance."""
    most_read_bytes: int
    """Bytes read by the worker that reads most."""
    most_written_bytes: int
    """Bytes written by the worker that writes most, including copies made by the storage."""
    peak_bytes: int
    """Largest memory of any worker, including the overhead of its process."""


def simulate(plan: Plan, workers: Sequence[int], rates: Rates) -> list[Simulation]:
    """Simulate a plan for each number of workers, of at least 1."""
    if bad := [count for count in workers if count < 1]:
        raise UsageError(f"{bad[0]} workers cannot run a plan")
    work = _work(plan, rates)
    return [_run(plan, work, count, rates) for count in workers]


class _Work(NamedTuple):
    """The work of each group."""

    read_bytes: Ints
    written_bytes: Ints
    copied_bytes: Ints
    read_rounds: Ints
    """Rounds of concurrent reads: how often the group waits for a response."""
    write_rounds: Ints
    """Rounds of concurrent writes."""


def _work(plan: Plan, rates: Rates) -> _Work:
    def per_group(groups: Ints, values: Ints | Flags) -> Ints:
        return np.bincount(groups, weights=values, minlength=plan.groups).astype(np.int64)

    bands, parts = plan.bands, plan.parts
    lengths, sizes = bands["stop"] - bands["start"], part_sizes(parts)
    made = parts["source_file"] == MADE
    reads = per_group(bands["group"], -(-lengths // rates.request_bytes))
    writes = per_group(parts["group"], sizes > 0)
    return _Work(
        per_group(bands["group"], lengths),
        per_group(parts["group"], sizes * made),
        per_group(parts["group"], sizes * ~made),
        *(-(-requests // rates.requests_at_once) for requests in (reads, writes)),
    )


def _run(plan: Plan, work: _Work, workers: int, rates: Rates) -> Simulation:
    read_rate = min(rates.read_bytes_per_second, rates.total_read_bytes_per_second / workers)
    write_rate = min(rates.write_bytes_per_second, rates.total_write_bytes_per_second / workers)
    reading = work.read_rounds * rates.request_seconds + work.read_bytes / read_rate
    writing = (
        work.write_rounds * rates.request_seconds
        + work.written_bytes / write_rate
        + work.copied_bytes / (rates.copy_bytes_per_second * rates.requests_at_once)
    )
    owner = np.zeros(plan.groups, dtype=np.int64)
    free = [(0.0, worker) for worker in range(workers)]
    heapify(free)
    ends = [0.0] * workers
    for group, (read_seconds, write_seconds) in enumerate(
        zip(reading.tolist(), writing.tolist(), strict=True)
    ):
        start, worker = free[0]
        owner[group] = worker
        was_read, before = start + read_seconds, ends[worker]
        ends[worker] = max(was_read, before) + write_seconds
        heapreplace(free, (max(was_read, before), worker))
    end = max(ends)
    read, written = (
        np.bincount(owner, weights=values, minlength=workers)
        for values in (work.read_bytes, work.written_bytes + work.copied_bytes)
    )
    return Simulation(
        workers=workers,
        seconds=end,
        busy_share=float(max(reading.sum(), writing.sum())) / (end * workers) if end else 1.0,
        most_read_bytes=int(read.max()),
        most_written_bytes=int(written.max()),
        peak_bytes=plan.memory_bytes(GROUPS_AT_A_TIME),
    )
