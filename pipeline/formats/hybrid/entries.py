"""The entries of a rank's file: names and arrays in the order of the file, as columns.

A checkpoint may have hundreds of thousands of arrays, and all files are in memory until they are sorted into cells.
"""

from __future__ import annotations

from array import array as numbers_of
from collections.abc import Collection, Iterator
from typing import Any

from paddle_reshard.pipeline.checkpoint.reading import Readable, index_tensor_file
from paddle_reshard.pipeline.formats.hybrid.arrays import ArrayColumns
from paddle_reshard.pipeline.model.optimizer_keys import MASTER_WEIGHTS
from paddle_reshard.storage.files.paddle_pickle import STRUCTURED_NAMES, ArrayRef

LR_SCHEDULER = "LR_Scheduler"
SPECIAL = (LR_SCHEDULER, MASTER_WEIGHTS, STRUCTURED_NAMES)
"""Entries that are accessed by name."""

_UNNAMED, _LIKE_ENTRY = -1, -2
"""Codes for arrays without a name, and with the name of their entry; other names are numbered from 0."""


class _Texts:
    """An append-only list of texts."""

    __slots__ = ("_bytes", "_stops")

    def __init__(self) -> None:
        self._bytes, self._stops = bytearray(), numbers_of("q")

    def add(self, text: str) -> int:
        self._bytes += text.encode("utf-8", "surrogatepass")
        self._stops.append(len(self._bytes))
        return len(self._stops) - 1

    def __getitem__(self, number: int) -> str:
        start = self._stops[number - 1] if number else 0
        return self._bytes[start : self._stops[number]].decode("utf-8", "surrogatepass")


class FileEntries:
    """The entries of a file, or of its ``master_weights``; they are removed from the given dict."""

    __slots__ = ("_name", "_names", "_special", "_texts", "_values")

    def __init__(self, root: dict[str, Any] | None = None) -> None:
        self._texts, self._names = _Texts(), _Texts()
        self._values = ArrayColumns()
        self._name = numbers_of("i")
        self._special: dict[str, Any] = {}
        for entry in list(root or ()):
            self._add(entry, (root or {}).pop(entry))

    def _add(self, entry: str, value: object) -> None:
        if entry == MASTER_WEIGHTS and isinstance(value, dict):
            value = FileEntries(value)
        if entry in SPECIAL:
            self._special[entry] = value
        self._texts.add(str(entry))
        self._values.append(value)
        called = value.name if isinstance(value, ArrayRef) else None
        if called is None or called == entry:
            self._name.append(_UNNAMED if called is None else _LIKE_ENTRY)
        else:
            self._name.append(self._names.add(called))

    def __contains__(self, entry: str) -> bool:
        """Whether there is an entry of ``SPECIAL``."""
        return entry in self._special

    def get(self, entry: str, default: Any = None) -> Any:
        """An entry of ``SPECIAL``; ``master_weights`` is a ``FileEntries`` itself."""
        return self._special.get(entry, default)

    def items(self) -> Iterator[tuple[str, Any]]:
        """All entries, in the order of the file."""
        for number, name in enumerate(self._name):
            entry = self._texts[number]
            called = self._names[name] if name >= 0 else entry if name == _LIKE_ENTRY else None
            yield entry, self._values.get(number, called)

    def names(self) -> Iterator[str]:
        """Names of the entries."""
        return map(self._texts.__getitem__, range(len(self._name)))

    def plain(self) -> dict[str, Any]:
        """The entries as a dict, with ``master_weights`` as a nested dict."""
        return {
            entry: value.plain() if isinstance(value, FileEntries) else value for entry, value in self.items()
        }

    def drained(self, but: Collection[str] = ()) -> Iterator[tuple[str, Any]]:
        """Iterate over the entries except those named in ``but``; afterwards only those of ``SPECIAL`` remain."""
        for entry, value in self.items():
            if entry not in but:
                yield entry, value
        special = self._special
        self.__init__()  # type: ignore[misc]
        self._special = special


def index_rank_file(store: Readable, path: str, size_bytes: int) -> FileEntries:
    """The entries of a rank's file, with arrays as references."""
    return FileEntries(index_tensor_file(store, path, size_bytes))
