"""Checkpoints in a store that fsspec reaches."""

from __future__ import annotations

from collections.abc import Collection

from paddle_reshard.pipeline.errors import CheckpointError
from paddle_reshard.storage import retry
from paddle_reshard.storage.fsspec_folder import FsspecFolder, ObjectStamp

RANGE_BYTES = 8 << 20
"""A read is cut into requests of this size."""
RANGES_IN_FLIGHT = 8
"""Requests of one read that are made at a time, where the file system can."""


class FsspecSource:
    """A checkpoint folder, read only, as it was when it was listed.

    ``names`` restricts it to some of the files.
    """

    def __init__(self, folder: FsspecFolder, names: Collection[str] | None = None) -> None:
        listing = folder.listing(retry.HURRIED)
        if not listing.files and not listing.folders:
            raise folder.failure(f"{folder.location}: nothing is there")
        self.folder = folder
        self.location = folder.location
        self.stamps = {n: stamp for n, stamp in listing.files.items() if names is None or n in names}
        self.folders = list(listing.folders) if names is None else []

    def __repr__(self) -> str:
        return f"FsspecSource({self.location!r})"

    def sizes(self) -> dict[str, int]:
        """Name of every file → size in bytes, as seen at the start."""
        return {path: stamp.size_bytes for path, stamp in self.stamps.items()}

    def read(self, path: str, byte_offset: int, nbytes: int) -> bytes:
        """Exactly ``nbytes`` bytes of a file."""
        buffer = bytearray(nbytes)
        self.read_into(path, byte_offset, memoryview(buffer))
        return bytes(buffer)

    def read_into(self, path: str, byte_offset: int, buffer: memoryview) -> None:
        """Fill ``buffer`` with the bytes of ``path`` from ``byte_offset`` on, by several requests at a time."""
        stamp = self._stamp(path)
        if byte_offset + len(buffer) > stamp.size_bytes:
            raise CheckpointError(
                f"{path}: ends at byte {stamp.size_bytes}, bytes up to {byte_offset + len(buffer)} were asked for"
            )
        starts = range(0, len(buffer), RANGE_BYTES)

        def read_one(start: int) -> None:
            piece = buffer[start : start + RANGE_BYTES]
            self.folder.attempt(path, self.folder.read_range, path, stamp, byte_offset + start, piece)

        if len(starts) == 1:
            read_one(0)
        else:
            self.folder.for_each(read_one, starts, RANGES_IN_FLIGHT)

    def _stamp(self, path: str) -> ObjectStamp:
        if path not in self.stamps:
            raise CheckpointError(f"{path}: was not there when {self.location} was listed")
        return self.stamps[path]

    def check_unchanged(self) -> None:
        """Refuse if any file is not the one that was seen at the start."""
        now = self.folder.listing().files
        for path, stamp in self.stamps.items():
            if path not in now:
                raise CheckpointError(f"{path}: vanished while it was read")
            if now[path] != stamp:
                raise CheckpointError(
                    f"{path}: changed while it was read (size {stamp.size_bytes}, version {stamp.version} then, "
                    f"{now[path].size_bytes}, {now[path].version} now)"
                )
