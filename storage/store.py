"""What the rest of the package asks of storage: one small protocol per capability.

A *source* is read in ranges. A *target* is made in four moves, so that at no moment an unfinished one looks
finished: ``begin`` (every file with its size and the byte offsets at which its parts start), parts written in
any order by any worker, ``finish`` (the files become whole), ``publish`` (completion markers, then the manifest,
then it is there).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from paddle_reshard.pipeline.core.part_limits import CopyLimits
    from paddle_reshard.storage.space import Room

OWN_PREFIX = ".paddle_reshard_"
"""Names that begin so are no files of a checkpoint."""


@dataclass(frozen=True, slots=True)
class NewFile:
    """A file that is to be made. ``part_starts`` ascend from 0; an empty file has none."""

    path: str
    size_bytes: int
    part_starts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Receipt:
    """What is known of a part that storage has taken."""

    path: str
    byte_offset: int
    nbytes: int
    tag: str = ""
    """The store's own word for it, empty where it has none."""
    checksum: str = ""
    """Of its bytes, taken by the worker that had them; empty for a part that the storage copied."""
    md5: str = ""
    """Of its bytes, as the store told it; empty where it did not."""


@dataclass(frozen=True, slots=True)
class CopyRange:
    """One whole part of a target file that is a range of a source file, in bytes."""

    path: str
    byte_offset: int
    nbytes: int
    source_path: str
    source_offset: int


@dataclass(frozen=True, slots=True)
class Openness:
    """Who may read, as permission bits of a file system; what a process's umask forbids is forbidden besides."""

    files: int = 0o666
    folders: int = 0o777

    def __and__(self, other: Openness) -> Openness:
        """What both allow; the owner may always go on with what is being made."""
        return Openness(self.files & other.files | 0o600, self.folders & other.folders | 0o700)


@dataclass(frozen=True, slots=True)
class Identity:
    """Which conversion this is: only the very same one may go on with what it left."""

    plan_id: str
    version: str
    source: str
    """Where it is, for people."""
    files: Mapping[str, str]
    """Every file of the source → a text that changes when the file does."""
    request: Mapping[str, Any] | None = None
    """What it was begun with, as ``pipeline/convert/resuming.py`` keeps it; ``None`` where that is not known."""
    target: int | None = None
    """Which of its targets this is."""


@dataclass(frozen=True, slots=True)
class Record:
    """A unit of work that is done: one line of the ledger."""

    unit: int
    """Number of a group; carried files are counted on after the last group."""
    receipts: tuple[Receipt, ...]
    drift: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Read:
    """A buffer to be filled with the bytes of a file from ``byte_offset`` on."""

    path: str
    byte_offset: int
    buffer: memoryview


class ReadRange(Protocol):
    """Ranged reads from the files of one checkpoint. Can be pickled, and used by several threads."""

    def read_into(self, path: str, byte_offset: int, buffer: memoryview) -> None:
        """Fill ``buffer`` with the bytes of ``path`` from ``byte_offset`` on, all of it or raise."""

    def read_many(self, reads: Sequence[Read]) -> None:
        """Fill several buffers, or raise; a store that answers late is asked for all of them at once."""
        for read in reads:
            self.read_into(read.path, read.byte_offset, read.buffer)


class Source(ReadRange, Protocol):
    """A checkpoint to read from, as it was seen when it was opened."""

    @property
    def location(self) -> str:
        """Where it is, for people; holds no secret."""

    @property
    def folders(self) -> Sequence[str]:
        """Names of folders inside."""

    @property
    def openness(self) -> Openness:
        """A target is at most as open as this: what every file and folder of the source allows."""

    def sizes(self) -> Mapping[str, int]:
        """Name of every file → size in bytes."""

    def read(self, path: str, byte_offset: int, nbytes: int) -> bytes:
        """Exactly ``nbytes`` bytes of a file."""

    def versions(self) -> Mapping[str, str]:
        """Name of every file → a text that changes when the file does, as seen at the start."""

    def check_unchanged(self) -> None:
        """Refuse if any file is not the one that was seen at the start."""


class WritePart(Protocol):
    """Writes parts of the files of one new checkpoint, in any order. Can be pickled."""

    @property
    def copies_in_flight(self) -> int:
        """How many parts may be copied at a time."""

    def write_part(self, path: str, byte_offset: int, buffer: memoryview) -> Receipt:
        """Write one whole part; ``byte_offset`` is where it was said to start."""

    def copy_part(self, copy: CopyRange, source: ReadRange) -> Receipt:
        """Have the storage copy one whole part from a source that ``Target.copies_from`` has agreed to.

        Raises
        ------
        CheckpointError
            If the source file is no longer the one that was seen.
        """


class Target(Protocol):
    """A checkpoint to be made.

    As a context, it ends the session when an error comes through: what is done is kept for a later run to go on
    with, unless nothing is, or the checkpoint itself was refused: then everything is taken back.
    """

    @property
    def location(self) -> str:
        """Where it will be, for people; holds no secret."""

    @property
    def smallest_part_bytes(self) -> int:
        """Every part but the last of a file must have at least this size."""

    @property
    def most_parts(self) -> int | None:
        """How many parts a file may have."""

    @property
    def unfinished(self) -> Identity | None:
        """The conversion that was begun here and has not ended, as it was when this was opened."""

    def room(self) -> Room | None:
        """What its disk can take; ``None`` for a store that has no end."""

    def copies_from(self, source: Source) -> CopyLimits | None:
        """Which stretches of a source the storage can copy by itself; found out by trying where that is needed."""

    def published(self, manifest_path: str) -> bytes | None:
        """The manifest, if a whole checkpoint is here and no conversion is under way."""

    def reopen(self) -> Source:
        """What is published here, to be read."""

    def begin(
        self,
        files: Sequence[NewFile],
        identity: Identity,
        openness: Openness = Openness(),
    ) -> tuple[WritePart, Sequence[Record]]:
        """Make room for all files but the manifest, or go on with what an earlier run has done.

        Whatever is made on a file system is at most as open as ``openness``.

        Raises
        ------
        TargetError
            If the place is occupied, another run is at work, or what was left is another conversion's.
        """

    def note(self, record: Record) -> None:
        """Remember that a unit is done."""

    def finish(self, receipts: Iterable[Receipt]) -> Source:
        """All parts are written: make the files whole, and let them be read back."""

    def etags(self) -> Mapping[str, str]:
        """What the store calls the content of each file, where it is known beforehand; after ``finish``."""

    def publish(self, manifest_path: str, manifest: bytes) -> None:
        """Write the manifest last; from now on the target is there."""

    def __enter__(self) -> Target: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
