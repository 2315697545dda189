"""Free space and name limits of disks."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

USUAL_NAME_BYTES = 255


@dataclass(frozen=True, slots=True)
class Room:
    """Capacity of the file system of a folder."""

    device: int
    """Identifies the file system."""
    free_bytes: int | None
    """Free space for this user; ``None`` if the file system does not report it."""
    block_bytes: int
    """A file occupies a multiple of it."""
    name_bytes: int
    """Maximum length of a name."""
    held_bytes: int
    """Bytes of the allocated blocks of all files in the folder."""

    def taken_by(self, size_bytes: int) -> int:
        """Bytes that a file of a size occupies."""
        return -(-size_bytes // self.block_bytes) * self.block_bytes


def room_for(folder: Path) -> Room:
    """Capacity of the file system of a folder, which need not exist yet."""
    existing = next(above for above in (folder, *folder.parents) if above.is_dir())
    system = os.statvfs(existing)
    return Room(
        device=existing.stat().st_dev,
        free_bytes=system.f_bavail * system.f_frsize if system.f_blocks else None,
        block_bytes=max(1, system.f_frsize),
        name_bytes=system.f_namemax or USUAL_NAME_BYTES,
        held_bytes=_held(folder) if existing == folder else 0,
    )


def _held(folder: Path) -> int:
    """Bytes of the allocated blocks of all files below a folder; holes occupy none."""
    return sum(
        os.lstat(os.path.join(where, name)).st_blocks * 512
        for where, _, names in os.walk(folder)
        for name in names
    )
