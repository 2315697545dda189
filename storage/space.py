"""What a disk has room for, and what names it takes."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

USUAL_NAME_BYTES = 255


@dataclass(frozen=True, slots=True)
class Room:
    """What the file system of a folder can take."""

    device: int
    """Tells file systems apart."""
    free_bytes: int | None
    """For this user; ``None`` where the file system does not say."""
    block_bytes: int
    """A file takes a multiple of it."""
    name_bytes: int
    """The longest name."""
    held_bytes: int
    """What lies below the folder already, in blocks that are really taken."""

    def taken_by(self, size_bytes: int) -> int:
        """What a file of a size takes."""
        return -(-size_bytes // self.block_bytes) * self.block_bytes


def room_for(folder: Path) -> Room:
    """What can be put into a folder, which need not be there yet."""
    there = next(above for above in (folder, *folder.parents) if above.is_dir())
    system = os.statvfs(there)
    return Room(
        device=there.stat().st_dev,
        free_bytes=system.f_bavail * system.f_frsize if system.f_blocks else None,
        block_bytes=max(1, system.f_frsize),
        name_bytes=system.f_namemax or USUAL_NAME_BYTES,
        held_bytes=_held(folder) if there == folder else 0,
    )


def _held(folder: Path) -> int:
    """Bytes in blocks of all files below a folder; a hole takes none."""
    return sum(
        os.lstat(os.path.join(where, name)).st_blocks * 512
        for where, _, names in os.walk(folder)
        for name in names
    )
