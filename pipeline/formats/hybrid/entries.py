"""The entries of a rank's file: names and arrays in the order of the file, as columns.

A checkpoint may have hundreds of thousands of arrays, and all files are in memory until they are sorted into cells.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from paddle_reshard.pipeline.checkpoint.reading import Readable, index_tensor_file
from paddle_reshard.pipeline.formats.hybrid.arrays import ArrayColumns
from paddle_reshard.pipeline.model.optimizer_keys import MASTER_WEIGHTS
from paddle_reshard.storage.files.paddle_pickle import STRUCTURED_NAMES, ArrayRef

LR_SCHEDULER = "LR_Scheduler"
SPECIAL = (LR_SCHEDULER, MASTER_WEIGHTS, STRUCTURED_NAMES)
"""Entries that are accessed by name."""


class Entries:
    """Entries of a file: the name of each, what its array is called besides, and its value."""

    __slots__ = ("called", "names", "values")

    def __init__(self) -> None:
        self.names: list[str] = []
        self.called: list[str | None] = []  # nearly always the name of the entry
        self.values = ArrayColumns()

    def extend(self, names: Iterable[object], values: Sequence[object]) -> None:
        """Add entries."""
        self.names.extend(map(str, names))
        self.called += [value.name if isinstance(value, ArrayRef) else None for value in values]
        self.values.append_all(values)

    def items(self) -> Iterator[tuple[str, Any]]:
        """All entries, in the order of the file."""
        for number, (entry, called) in enumerate(zip(self.names, self.called, strict=True)):
            yield entry, self.values.get(number, called)

    def without(self, names: Collection[str]) -> Entries:
        """The entries except those with some names."""
        rows = [row for row, name in enumerate(self.names) if name not in names]
        if len(rows) == len(self.names):
            return self
        others = Entries()
        others.names, others.called = [self.names[row] for row in rows], [self.called[row] for row in rows]
        others.values = self.values.only(np.array(rows, dtype=np.int64))
        return others


class FileEntries:
    """The entries of a file, or of its ``master_weights``; they are removed from the given dict."""

    __slots__ = ("_entries", "_special")

    def __init__(self, root: dict[str, Any]) -> None:
        if isinstance(masters := root.get(MASTER_WEIGHTS), dict):
            root[MASTER_WEIGHTS] = FileEntries(masters)
        self._entries = Entries()
        self._special = {entry: root[entry] for entry in SPECIAL if entry in root}
        self._entries.extend(root, list(root.values()))
        root.clear()

    def __contains__(self, entry: str) -> bool:
        """Whether there is an entry of ``SPECIAL``."""
        return entry in self._special

    def get(self, entry: str, default: Any = None) -> Any:
        """An entry of ``SPECIAL``; ``master_weights`` is a ``FileEntries`` itself."""
        return self._special.get(entry, default)

    def items(self) -> Iterator[tuple[str, Any]]:
        """All entries, in the order of the file."""
        return self._entries.items()

    def names(self) -> Iterator[str]:
        """Names of the entries."""
        return iter(self._entries.names)

    def drained(self, but: Collection[str] = ()) -> Entries:
        """The entries except those named in ``but``; afterwards only those of ``SPECIAL`` remain."""
        drained, self._entries = self._entries.without(but), Entries()
        return drained


def index_rank_file(store: Readable, path: str, size_bytes: int) -> FileEntries:
    """The entries of a rank's file, with arrays as references."""
    return FileEntries(index_tensor_file(store, path, size_bytes))
