"""A source with one more file, which lies elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from paddle_reshard.pipeline.core.errors import CheckpointError
from paddle_reshard.storage.store import Read, ReadRange, Source


class SourceBeside(ReadRange):
    """A checkpoint, and a file that was given beside it, served under a path of its own.

    No storage copies from it by itself: all its bytes are read.
    """

    def __init__(self, source: Source, path: str, beside: Source, name: str) -> None:
        if path in source.sizes():
            raise CheckpointError(f"{source.location}: has a file of the path {path} itself")
        self.source, self.path, self.beside, self.name = source, path, beside, name
        self.location, self.folders = source.location, source.folders
        self.openness = source.openness & beside.openness

    def sizes(self) -> dict[str, int]:
        """Name of every file → size in bytes, as seen at the start."""
        return {**self.source.sizes(), self.path: self.beside.sizes()[self.name]}

    def versions(self) -> dict[str, str]:
        """Name of every file → a text that changes when the file does, as seen at the start."""
        return {**self.source.versions(), self.path: self.beside.versions()[self.name]}

    def read(self, path: str, byte_offset: int, nbytes: int) -> bytes:
        """Exactly ``nbytes`` bytes of a file."""
        if path == self.path:
            return self.beside.read(self.name, byte_offset, nbytes)
        return self.source.read(path, byte_offset, nbytes)

    def read_into(self, path: str, byte_offset: int, buffer: memoryview) -> None:
        """Fill ``buffer`` with the bytes of ``path`` from ``byte_offset`` on."""
        self.read_many([Read(path, byte_offset, buffer)])

    def read_many(self, reads: Sequence[Read]) -> None:
        """Fill several buffers, each from where its file lies."""
        self.source.read_many([read for read in reads if read.path != self.path])
        self.beside.read_many([replace(read, path=self.name) for read in reads if read.path == self.path])

    def check_unchanged(self) -> None:
        """Refuse if any file is not the one that was seen at the start."""
        self.source.check_unchanged()
        self.beside.check_unchanged()
