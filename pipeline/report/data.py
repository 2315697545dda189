"""The content of a report, as values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from paddle_reshard.pipeline.report.command import Command
from paddle_reshard.pipeline.report.picture import Picture
from paddle_reshard.pipeline.report.run_record import RunData

GOOD, BAD, PLAIN = "good", "bad", "plain"


class Tile(NamedTuple):
    """A figure at the head of a report."""

    name: str
    value: str
    note: str = ""
    share: float | None = None
    """Between 0 and 1, drawn as a bar."""


class NextStep(NamedTuple):
    """A step that follows after a report: a sentence, and the command for it."""

    words: str
    command: str = ""
    """Ready for a shell; empty if there is none."""


class Made(NamedTuple):
    """When, where and by what a report was made."""

    at: float
    """Seconds since the epoch."""
    host: str
    command: Command | None = None
    """``None`` if Python code made it."""


class Left(NamedTuple):
    """Tensors, states or files that a target leaves out for one reason."""

    reason: str
    names: tuple[str, ...]
    """The first ones."""
    total: int
    target: str


class Table(NamedTuple):
    """Rows with a heading for each column."""

    title: str
    headings: tuple[str, ...]
    rows: tuple[tuple[str | int | float | None, ...], ...]
    more: int = 0
    """Rows that were omitted."""
    first: int = 100
    """Rows that are shown before one asks for more."""


class Bar(NamedTuple):
    """A line of a bar chart."""

    name: str
    value: float | None
    label: str


class Chart(NamedTuple):
    """A bar chart, from zero to the largest value."""

    title: str
    bars: tuple[Bar, ...]


class Grid(NamedTuple):
    """The ranks of a job: a row for each pipeline stage, a column for each tp rank."""

    title: str
    detail: str
    rows: int
    columns: int
    each: int
    """Ranks in a cell: a sharding group, and its data-parallel copies."""
    drawn: bool
    """Whether every rank is drawn, rather than counted."""
    marked: bool
    commands: tuple[str, ...] = ()
    """Lines to copy: how a checkpoint becomes one for this job, and how the job starts."""


@dataclass(frozen=True, slots=True)
class ReportData:
    """Everything that a report shows, already described in words where words are shown."""

    command: str
    version: str
    status: str
    tone: str
    """``GOOD``, ``BAD`` or ``PLAIN``."""
    sources: tuple[str, ...]
    """Locations, without credentials."""
    targets: tuple[str, ...]
    averaged: str = ""
    """How the sources are averaged, as in ``with weights 0.25, 0.75``; empty if they are not."""
    made: Made | None = None
    next_steps: tuple[NextStep, ...] = ()
    result: str = ""
    """What was found, in a sentence."""
    error: str = ""
    tiles: tuple[Tile, ...] = ()
    facts: tuple[tuple[str, str], ...] = ()
    remarks: tuple[str, ...] = ()
    left: tuple[Left, ...] = ()
    picture: Picture | None = None
    run: RunData | None = None
    budget_bytes: int | None = None
    footprint_bytes: int = 0
    """Part of the budget that a process needs for itself."""
    retries: Mapping[str, int] = field(default_factory=dict)
    grids: tuple[Grid, ...] = ()
    charts: tuple[Chart, ...] = ()
    findings: tuple[Table, ...] = ()
    """Tables of what one came for, above everything else."""
    tables: tuple[Table, ...] = ()
