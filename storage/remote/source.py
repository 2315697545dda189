"""Checkpoints in a store that fsspec reaches."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

from paddle_reshard.pipeline.core.errors import CheckpointError
from paddle_reshard.pipeline.core.file_names import MANIFEST
from paddle_reshard.pipeline.core.trainer_files import is_stray
from paddle_reshard.storage.remote import retry
from paddle_reshard.storage.remote.folder import FsspecFolder
from paddle_reshard.storage.session.ledger import SESSION
from paddle_reshard.storage.store import OWN_PREFIX, Openness, Read, ReadRange

RANGE_BYTES = 8 << 20
"""A read is cut into requests of this size."""
NEAR_BYTES = 64 << 10
"""To read so many bytes that nobody wants takes a fraction of what a request takes."""
AHEAD_BYTES = 512 << 10
"""Length of a request for reads that follow each other so closely."""


class FsspecSource(ReadRange):
    """A checkpoint folder, read only, in the state in which it was listed.

    ``names`` restricts it to some of the files.
    """

    openness = Openness()
    """No limit: a store does not have permission bits."""

    def __init__(self, folder: FsspecFolder, names: Collection[str] | None = None) -> None:
        listing = folder.listing(retry.HURRIED)
        if not listing.files and not listing.folders:
            raise folder.failure(f"{folder.location}: no such folder, or it is empty")
        if names is None and SESSION in listing.files and MANIFEST not in listing.files:
            raise folder.failure(f"{folder.location}: an unfinished conversion, not a checkpoint")
        self.folder = folder
        self.location = folder.location
        self.stamps = {
            name: stamp
            for name, stamp in listing.files.items()
            if (not (name.startswith(OWN_PREFIX) or is_stray(name)) if names is None else name in names)
        }
        self.folders = [*listing.folders, *filter(is_stray, listing.files)] if names is None else []

    def __repr__(self) -> str:
        return f"FsspecSource({self.location!r})"

    def sizes(self) -> dict[str, int]:
        """Name of every file → size in bytes, as seen at the start."""
        return {path: stamp.size_bytes for path, stamp in self.stamps.items()}

    def versions(self) -> dict[str, str]:
        """Name of every file → the store's identifier of its version when the source was opened."""
        return {path: stamp.version for path, stamp in self.stamps.items()}

    def read_many(self, reads: Sequence[Read]) -> None:
        """Fill several buffers with concurrent requests of at most ``RANGE_BYTES``."""
        pieces = [piece for read in reads for piece in self._pieces(read)]
        if len(pieces) == 1:
            self._request(pieces[0])
        elif pieces:
            self.folder.for_each(self._request, pieces, self.folder.ranges_in_flight)

    @contextmanager
    def kept_open(self) -> Iterator[ReadRange]:
        """The same files for many reads by one thread: those that follow each other closely share requests."""
        yield _Ahead(self)

    def _pieces(self, read: Read) -> Iterator[Read]:
        """A read cut into requests; it must lie within the file as it was listed."""
        if read.path not in self.stamps:
            raise CheckpointError(f"{read.path}: did not exist when {self.location} was listed")
        stop, size_bytes = read.byte_offset + len(read.buffer), self.stamps[read.path].size_bytes
        if stop > size_bytes:
            raise CheckpointError(
                f"{read.path}: ends at byte {size_bytes}, but bytes up to {stop} were requested"
            )
        for start in range(0, len(read.buffer), RANGE_BYTES):
            yield Read(read.path, read.byte_offset + start, read.buffer[start : start + RANGE_BYTES])

    def _request(self, piece: Read) -> None:
        self.folder.attempt(
            piece.path,
            self.folder.read_range,
            piece.path,
            self.stamps[piece.path],
            piece.byte_offset,
            piece.buffer,
        )

    def modified(self) -> dict[str, int]:
        """Nothing: an object has the time at which its upload ended, whenever its content was written."""
        return {}

    def check_unchanged(self) -> None:
        """Refuse if any file has changed since the source was opened."""
        now = self.folder.listing().files
        for path, stamp in self.stamps.items():
            if path not in now:
                raise CheckpointError(f"{path}: disappeared while it was read")
            if now[path] != stamp:
                raise CheckpointError(
                    f"{path}: changed while it was read (size {stamp.size_bytes}, version {stamp.version} then, "
                    f"{now[path].size_bytes}, {now[path].version} now)"
                )


class _Ahead(ReadRange):
    """Single reads by one thread. One that begins where the last one of its file ended, or soon after, is answered from
    a longer request."""

    def __init__(self, source: FsspecSource) -> None:
        self.source = source
        self.path, self.start, self.wanted = "", 0, 0
        self.block = b""
        """The bytes of ``path`` from ``start``; those up to ``wanted`` were asked for."""

    def read_into(self, path: str, byte_offset: int, buffer: memoryview) -> None:
        """Fill ``buffer`` with the bytes of ``path`` from ``byte_offset`` on."""
        if len(buffer) > AHEAD_BYTES:
            self.source.read_into(path, byte_offset, buffer)
            return
        stop, inside = byte_offset + len(buffer), byte_offset - self.start
        follows = path == self.path and inside >= 0 and byte_offset <= self.wanted + NEAR_BYTES
        if not follows or stop > self.start + len(self.block):
            self._request(path, byte_offset, len(buffer), follows)
            inside = 0
        buffer[:] = self.block[inside : inside + len(buffer)]
        self.wanted = max(stop, self.wanted if follows else 0)

    def _request(self, path: str, byte_offset: int, nbytes: int, follows: bool) -> None:
        size_bytes = self.source.sizes().get(path, 0)
        if follows or size_bytes <= AHEAD_BYTES:
            nbytes = max(nbytes, min(AHEAD_BYTES, size_bytes - byte_offset))
        self.block = self.source.read(path, byte_offset, nbytes)
        self.path, self.start = path, byte_offset

    def read_many(self, reads: Sequence[Read]) -> None:
        """Fill several buffers, as the store does."""
        self.source.read_many(reads)
