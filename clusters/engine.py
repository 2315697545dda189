"""What the rest of the program asks of an engine, wherever it runs groups."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence
from functools import partial
from typing import ClassVar, TypeAlias

from paddle_reshard.pipeline.checkpoint.reading import IndexFiles
from paddle_reshard.pipeline.core.events import Observer, ignore_events
from paddle_reshard.pipeline.planning.work import RemainingGroups
from paddle_reshard.storage.store import ReadRange, WritePart
from paddle_reshard.tasks.group import GroupReport
from paddle_reshard.tasks.index import index_here

Batches: TypeAlias = Generator[Sequence[GroupReport], None, None]
"""The reports of groups that are done, a few at a time."""


class Engine(ABC):
    """Runs the groups of a plan, in any order. To close what it yields ends all of them.

    Only :meth:`run` and :meth:`compare` must be written. The others suit an engine whose groups run in other processes,
    and whose metadata are read in this one.
    """

    in_process: ClassVar[bool] = False
    """Whether groups run in this process, whose memory the plan and all metadata share with them then."""

    @abstractmethod
    def run(self, remaining: RemainingGroups, source: ReadRange, target: WritePart) -> Batches:
        """Make the parts of every group, and report groups as they are done."""

    @abstractmethod
    def compare(self, remaining: RemainingGroups, source: ReadRange) -> Batches:
        """Run only the comparisons of every group."""

    def observed(self, observe: Observer) -> Engine:
        """The same engine; ``observe`` is called with what it waits for, and with what each of its workers runs."""
        return self

    def reserving_metadata(self, tensors: int, pieces: int, peak_bytes: int, spare_bytes: int) -> Engine:
        """The same engine with the memory that remains next to the metadata of a plan.

        Parameters
        ----------
        tensors, pieces
            How many the plan has.
        peak_bytes
            Of its largest group.
        spare_bytes
            Part of a process's footprint that is free for metadata.

        Raises
        ------
        MemoryBudgetError
            If metadata and a group do not fit together.
        """
        return self

    def indexing(self, observe: Observer = ignore_events) -> IndexFiles:
        """The function that indexes the files of a source; ``observe`` receives the number of files read."""
        return partial(index_here, observe=observe)
