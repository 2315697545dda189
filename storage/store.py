"""What the rest of the package asks of storage: one small protocol per capability."""

from __future__ import annotations

from typing import Protocol


class ReadRange(Protocol):
    """Ranged reads from the files of one checkpoint."""

    def read_into(self, path: str, byte_offset: int, buffer: memoryview) -> None:
        """Fill ``buffer`` with the bytes of ``path`` from ``byte_offset`` on, all of it or raise."""


class WritePart(Protocol):
    """Positioned writes to the files of one new checkpoint, in any order."""

    def write_part(self, path: str, byte_offset: int, buffer: memoryview) -> None:
        """Write all of ``buffer`` into ``path`` at ``byte_offset``."""
