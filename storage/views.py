"""Sources that are views of others: several as one, and one whose bytes are computed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property, reduce
from operator import and_

from paddle_reshard.pipeline.core.catalog import File
from paddle_reshard.pipeline.core.errors import CheckpointError
from paddle_reshard.pipeline.core.literals import Literals, LiteralsByFile
from paddle_reshard.storage.store import Openness, Read, ReadRange, Source


@dataclass(frozen=True, slots=True)
class Mount:
    """A store whose files appear below a prefix."""

    prefix: str
    source: Source
    version_prefix: str = ""
    """Prefix of its files' versions, where the prefix of the paths does not identify the store."""


@dataclass(frozen=True)
class JoinedSource(ReadRange):
    """Several stores as one. Its location and folders are those of the first.

    No storage can copy from it by itself, so all its bytes are read. For a series of checkpoints, its files are::

        config.json                  of the first, whose prefix is empty
        SRC0/model_state.pdparams    of the second, whose prefix is SRC0/
        ema.json                     made here, whatever the first has by this name

    Refused if a file of a store without a prefix has the prefix of another.
    """

    mounts: tuple[Mount, ...]
    made: Mapping[str, bytes] = field(default_factory=dict)
    """Path → content of small files that are in no store."""

    def __post_init__(self) -> None:
        prefixes = tuple(mount.prefix for mount in self.mounts if mount.prefix)
        for mount in self.mounts:
            if mount.prefix:
                continue
            for path in mount.source.sizes():
                if path.startswith(prefixes):
                    raise CheckpointError(
                        f"{mount.source.location}: has a file with the path {path}, which the joined source needs"
                    )

    @property
    def location(self) -> str:
        """The location of the first store."""
        return self.mounts[0].source.location

    @property
    def folders(self) -> Sequence[str]:
        """The folders of the first store."""
        return self.mounts[0].source.folders

    @property
    def openness(self) -> Openness:
        """Permissions that all stores allow."""
        return reduce(and_, (mount.source.openness for mount in self.mounts))

    def sizes(self) -> dict[str, int]:
        """Name of every file → size in bytes, as seen at the start."""
        of_mounts = {m.prefix + path: size for m in self.mounts for path, size in m.source.sizes().items()}
        return of_mounts | {path: len(content) for path, content in self.made.items()}

    def versions(self) -> dict[str, str]:
        """Name of every file → a text that changes with the file; for a small file given here, its content."""
        of_mounts = {
            mount.prefix + path: mount.version_prefix + version
            for mount in self.mounts
            for path, version in mount.source.versions().items()
        }
        return of_mounts | {path: content.decode() for path, content in self.made.items()}

    def modified(self) -> dict[str, int]:
        """Nothing: files of several stores, and files made here, are not one save."""
        return {}

    def check_unchanged(self) -> None:
        """Refuse if any file has changed since the source was opened."""
        for mount in self.mounts:
            mount.source.check_unchanged()

    def read_many(self, reads: Sequence[Read]) -> None:
        """Fill several buffers; each store gets all of its reads at once."""
        self.read_from([mount.source for mount in self.mounts], reads)

    @contextmanager
    def kept_open(self) -> Iterator[ReadRange]:
        """The same files; those of each store may be kept open."""
        with ExitStack() as held:
            yield _KeptOpen(self, [held.enter_context(mount.source.kept_open()) for mount in self.mounts])

    def read_from(self, stores: Sequence[ReadRange], reads: Sequence[Read]) -> None:
        """Fill several buffers, from these stores in place of those of the mounts."""
        owned: list[list[Read]] = [[] for _ in stores]
        for read in reads:
            if read.path in self.made:
                stop = read.byte_offset + len(read.buffer)
                read.buffer[:] = self.made[read.path][read.byte_offset : stop]
                continue
            number = self._number(read.path)
            inner = read.path.removeprefix(self.mounts[number].prefix)
            owned[number].append(Read(inner, read.byte_offset, read.buffer))
        for store, own in zip(stores, owned, strict=True):
            if own:
                store.read_many(own)

    def _number(self, path: str) -> int:
        """The store of a file: the store whose prefix begins the path, else the store without a prefix."""
        for number, mount in enumerate(self.mounts):
            if mount.prefix and path.startswith(mount.prefix):
                return number
        return next(number for number, mount in enumerate(self.mounts) if not mount.prefix)


@dataclass(frozen=True, slots=True)
class _KeptOpen(ReadRange):
    """A joined source whose stores keep files open."""

    joined: JoinedSource
    stores: Sequence[ReadRange]

    def read_many(self, reads: Sequence[Read]) -> None:
        """Fill several buffers; each store gets all of its reads at once."""
        self.joined.read_from(self.stores, reads)


class ComputedSource(ReadRange):
    """Base of sources that read as if something were done to the files of another; they differ in what reads give.

    The storage cannot copy from them.
    """

    inner: Source

    @property
    def location(self) -> str:
        """Location of what is stored."""
        return self.inner.location

    @property
    def folders(self) -> Sequence[str]:
        """Names of subfolders."""
        return self.inner.folders

    @property
    def openness(self) -> Openness:
        """Openness of what is stored."""
        return self.inner.openness

    def sizes(self) -> Mapping[str, int]:
        """Name of every file → size in bytes, as it is read."""
        return self.inner.sizes()

    def versions(self) -> Mapping[str, str]:
        """Name of every file → fingerprint of what is stored."""
        return self.inner.versions()

    def modified(self) -> Mapping[str, int]:
        """Times of what is stored."""
        return self.inner.modified()

    def check_unchanged(self) -> None:
        """Refuse if any file has changed since the source was opened."""
        self.inner.check_unchanged()


@dataclass(frozen=True)
class PartialSource(ComputedSource):
    """A checkpoint without some of its files."""

    inner: Source
    without: frozenset[str]

    def sizes(self) -> Mapping[str, int]:
        """Name of every other file → size in bytes."""
        return {path: size for path, size in self.inner.sizes().items() if path not in self.without}

    def versions(self) -> Mapping[str, str]:
        """Name of every other file → fingerprint of what is stored."""
        return {path: version for path, version in self.inner.versions().items() if path not in self.without}

    def modified(self) -> Mapping[str, int]:
        """Times of the other files."""
        return {path: time for path, time in self.inner.modified().items() if path not in self.without}

    def read_many(self, reads: Sequence[Read]) -> None:
        """Fill several buffers."""
        self.inner.read_many(reads)


@dataclass(frozen=True)
class CompletedSource(ComputedSource):
    """Some files of a checkpoint, with the others as they are planned: their metadata, and zeros for all values."""

    inner: Source
    files: tuple[File, ...]
    literals: Literals

    def sizes(self) -> Mapping[str, int]:
        """Name of every file → size in bytes, as it is stored or planned."""
        return {file.path: file.size_bytes for file in self.files} | dict(self.inner.sizes())

    def read_many(self, reads: Sequence[Read]) -> None:
        """Fill several buffers, those of files that are planned one by one."""
        stored = self.inner.sizes()
        self.inner.read_many([read for read in reads if read.path in stored])
        for read in reads:
            if read.path not in stored:
                self._fill(read)

    def _fill(self, read: Read) -> None:
        """Fill a buffer with what is planned of a file."""
        start, nbytes = read.byte_offset, len(read.buffer)
        read.buffer[:] = bytes(nbytes)
        for _, at, content in self._planned.of_ranges([(self._numbers[read.path], start, start + nbytes)]):
            read.buffer[at : at + len(content)] = content

    @cached_property
    def _planned(self) -> LiteralsByFile:
        return self.literals.by_file()

    @cached_property
    def _numbers(self) -> dict[str, int]:
        return {file.path: number for number, file in enumerate(self.files)}
