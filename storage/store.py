"""What a store can do: protocols for reading and writing, and the base of all targets.

A *source* is read in ranges. A *target* is made in four steps, so that an unfinished target never looks finished:
``begin`` (every file with its size and the byte offsets of its parts), parts written in any order by any worker,
``finish`` (the files become whole), ``publish`` (completion markers, then the manifest).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

from paddle_reshard.pipeline.core.errors import FormatError
from paddle_reshard.pipeline.core.limits import most_bytes, too_large

if TYPE_CHECKING:
    from paddle_reshard.pipeline.core.part_limits import CopyLimits
    from paddle_reshard.storage.space import Room

OWN_PREFIX = ".paddle_reshard_"
"""Prefix of names that do not belong to a checkpoint."""


class Permission(NamedTuple):
    """What the location of a new checkpoint may hold, because the user says so; by default nothing."""

    overwrite: bool = False
    """A finished conversion, which is replaced if its manifest lists all that lies there."""
    resume: bool = False
    """An unfinished conversion, which is continued."""


@dataclass(frozen=True, slots=True)
class NewFile:
    """A file to be written. ``part_starts`` ascend from 0; an empty file has none."""

    path: str
    size_bytes: int
    part_starts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Receipt:
    """The receipt of a stored part."""

    path: str
    byte_offset: int
    nbytes: int
    tag: str = ""
    """The store's identifier of the part, or empty."""
    checksum: str = ""
    """CRC computed by the worker that wrote the part; empty for server-side copies."""
    md5: str = ""
    """MD5 reported by the store, or empty."""


@dataclass(frozen=True, slots=True)
class CopyRange:
    """A part of a target file that equals a range of a source file. Offsets in bytes."""

    path: str
    byte_offset: int
    nbytes: int
    source_path: str
    source_offset: int


@dataclass(frozen=True, slots=True)
class Openness:
    """Permissions, as permission bits of a file system. A process's umask is applied in addition."""

    files: int = 0o666
    folders: int = 0o777

    def __and__(self, other: Openness) -> Openness:
        """The permissions that both allow, plus the owner's own access during a conversion."""
        return Openness(self.files & other.files | 0o600, self.folders & other.folders | 0o700)


@dataclass(frozen=True, slots=True)
class Identity:
    """Identity of a conversion. Only exactly the same conversion may resume."""

    plan_id: str
    version: str
    source: str
    """Location, for messages."""
    files: Mapping[str, str]
    """File of the source → fingerprint that changes with the file."""
    request: Mapping[str, Any] | None = None
    """The original request, as stored by ``pipeline/request/record.py``; ``None`` if unknown."""
    target: int | None = None
    """Index among the targets of the conversion."""


@dataclass(frozen=True, slots=True)
class Record:
    """A completed unit of work: a line of the ledger."""

    unit: int
    """Number of a group; the numbers of carried files follow those of the groups."""
    receipts: tuple[Receipt, ...]
    drift: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Read:
    """A buffer to fill with the bytes of a file, starting at ``byte_offset``."""

    path: str
    byte_offset: int
    buffer: memoryview


@runtime_checkable
class ReadRange(Protocol):
    """Ranged reads from the files of one checkpoint. Can be pickled, and used by several threads."""

    def read_into(self, path: str, byte_offset: int, buffer: memoryview) -> None:
        """Fill all of ``buffer`` with the bytes of ``path``, starting at ``byte_offset``, or raise."""
        self.read_many([Read(path, byte_offset, buffer)])

    def read(self, path: str, byte_offset: int, nbytes: int) -> bytes:
        """Read exactly ``nbytes`` bytes of a file; refused, before memory is taken, if they are too many for it."""
        if nbytes > (most := most_bytes(path)):
            raise FormatError("too_large", path, None, too_large(nbytes, most))
        try:
            buffer = bytearray(nbytes)
        except MemoryError as error:
            raise MemoryError(f"{path}: {nbytes} bytes of it are needed at once") from error
        self.read_into(path, byte_offset, memoryview(buffer))
        return bytes(buffer)

    @abstractmethod
    def read_many(self, reads: Sequence[Read]) -> None:
        """Fill several buffers, or raise. Stores with high latency are asked for all of them concurrently."""

    def kept_open(self) -> AbstractContextManager[ReadRange]:
        """The same files for many reads by one thread, between which they may be kept open."""
        return nullcontext(self)


class Source(ReadRange, Protocol):
    """A checkpoint to read, in the state in which it was opened."""

    @property
    def location(self) -> str:
        """Location, for messages; contains no secret."""

    @property
    def folders(self) -> Sequence[str]:
        """Names of what is no file of a checkpoint: subfolders, and what a system left there (``is_stray``)."""

    @property
    def openness(self) -> Openness:
        """Upper bound for the target's permissions: those that all files and folders of the source allow."""

    def sizes(self) -> Mapping[str, int]:
        """Name of every file → size in bytes."""

    def versions(self) -> Mapping[str, str]:
        """Name of every file → fingerprint that changes with the file, taken when the source was opened."""

    def modified(self) -> Mapping[str, int]:
        """Name of every file → when it was last written, in nanoseconds since the epoch.

        Empty where that is not known: the time of an object is that of the end of its upload.
        """

    def check_unchanged(self) -> None:
        """Refuse if any file has changed since the source was opened."""


class WritePart(Protocol):
    """Writes parts of the files of a new checkpoint, in any order. Can be pickled."""

    @property
    def copies_in_flight(self) -> int:
        """Maximum number of concurrent copies."""

    def write_part(self, path: str, byte_offset: int, buffer: memoryview) -> Receipt:
        """Write a whole part; ``byte_offset`` is one of the offsets given to ``begin``."""

    def copy_part(self, copy: CopyRange, source: ReadRange) -> Receipt:
        """Have the storage copy one whole part from a source that ``TargetStore.copies_from`` has agreed to.

        A ``CheckpointError`` if the source file is no longer the one that was seen.
        """


class TargetStore(ABC):
    """A checkpoint to be made.

    As a context manager, it ends the session after an error. Finished work is kept for a later run to resume; if there
    is none, or the checkpoint itself was refused, everything is rolled back.
    """

    location: str
    """Final location, for messages; contains no secret."""
    smallest_part_bytes: int = 1
    """Minimum size of every part but the last of a file, in bytes."""
    most_parts: int | None = None
    """Maximum number of parts of a file."""
    unfinished: Identity | None
    """The unfinished conversion at this location when it was opened, or ``None``."""

    def room(self) -> Room | None:
        """Free space of the disk in bytes; ``None`` for a store without a limit."""
        return None

    def copies_from(self, source: Source) -> CopyLimits | None:
        """The ranges of a source that the storage can copy by itself, determined by a trial request if necessary."""
        return None

    @abstractmethod
    def published(self, manifest_path: str) -> bytes | None:
        """The manifest, if there is a complete checkpoint and no conversion in progress."""

    @abstractmethod
    def reopen(self) -> Source:
        """Open the published checkpoint for reading."""

    @abstractmethod
    def begin(
        self,
        files: Sequence[NewFile],
        identity: Identity,
        openness: Openness = Openness(),
    ) -> tuple[WritePart, Sequence[Record]]:
        """Prepare all files except the manifest, or resume an earlier run; the finished units.

        On a file system, nothing gets more permissions than ``openness``. A ``TargetError`` if the location holds
        something, another run is in progress, or the unfinished conversion is another one.
        """

    @abstractmethod
    def note(self, records: Sequence[Record]) -> None:
        """Record completed units in the ledger."""

    @abstractmethod
    def finish(self, receipts: Iterable[Receipt]) -> Source:
        """Complete the files after all parts are written, so that they can be read back."""

    def etags(self) -> Mapping[str, str]:
        """The store's identifiers of the contents of the files, as far as they are known. Call it after ``finish``."""
        return {}

    @abstractmethod
    def publish(self, manifest_path: str, manifest: bytes) -> None:
        """Publish the target, writing the manifest last."""

    @abstractmethod
    def clean(self) -> list[str]:
        """Remove what an unfinished conversion left behind, and nothing else. Returns its locations."""

    def __enter__(self) -> TargetStore:
        return self

    @abstractmethod
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
