"""The entries of a rank's file: names and arrays in the order of the file, as columns.

A checkpoint may have hundreds of thousands of arrays, and all files are in memory until they are sorted into cells.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from paddle_reshard.pipeline.checkpoint.reading import Readable, index_tensor_file
from paddle_reshard.pipeline.formats.hybrid.arrays import ArrayColumns
from paddle_reshard.pipeline.model.optimizer_keys import MASTER_WEIGHTS
from paddle_reshard.storage.files.paddle_pickle import STRUCTURED_NAMES, ArrayRef

LR_SCHEDULER = "LR_Scheduler"
SPECIAL = (LR_SCHEDULER, MASTER_WEIGHTS, STRUCTURED_NAMES)
"""Entries that are accessed by name."""


class FileEntries:
    """The entries of a file, or of its ``master_weights``; they are removed from the given dict."""

    __slots__ = ("_called", "_entries", "_special", "_values")

    def __init__(self, root: dict[str, Any]) -> None:
        self._entries: list[str] = []
        self._called: list[str | None] = []  # the names of arrays; nearly always those of their entries
        self._values = ArrayColumns()
        self._special: dict[str, Any] = {}
        for entry in list(root):
            self._add(entry, root.pop(entry))

    def _add(self, entry: str, value: object) -> None:
        if entry == MASTER_WEIGHTS and isinstance(value, dict):
            value = FileEntries(value)
        if entry in SPECIAL:
            self._special[entry] = value
        called = value.name if isinstance(value, ArrayRef) else None
        self._entries.append(str(entry))
        self._called.append(entry if called == entry else called)
        self._values.append(value)

    def __contains__(self, entry: str) -> bool:
        """Whether there is an entry of ``SPECIAL``."""
        return entry in self._special

    def get(self, entry: str, default: Any = None) -> Any:
        """An entry of ``SPECIAL``; ``master_weights`` is a ``FileEntries`` itself."""
        return self._special.get(entry, default)

    def items(self) -> Iterator[tuple[str, Any]]:
        """All entries, in the order of the file."""
        for number, (entry, called) in enumerate(zip(self._entries, self._called, strict=True)):
            yield entry, self._values.get(number, called)

    def names(self) -> Iterator[str]:
        """Names of the entries."""
        return iter(self._entries)

    def drained(self, but: Collection[str] = ()) -> Iterator[tuple[str, Any]]:
        """Iterate over the entries except those named in ``but``; afterwards only those of ``SPECIAL`` remain."""
        for entry, value in self.items():
            if entry not in but:
                yield entry, value
        self._entries, self._called, self._values = [], [], ArrayColumns()


def index_rank_file(store: Readable, path: str, size_bytes: int) -> FileEntries:
    """The entries of a rank's file, with arrays as references."""
    return FileEntries(index_tensor_file(store, path, size_bytes))
