"""Checkpoints in folders of a local file system."""

from __future__ import annotations

import os
import stat
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path

from paddle_reshard.pipeline.core.errors import CheckpointError
from paddle_reshard.pipeline.core.file_names import TENSOR_FOLDERS
from paddle_reshard.storage.local.entries import look, opened
from paddle_reshard.storage.os_errors import translated, translated_while_moving
from paddle_reshard.storage.store import Openness, Read, ReadRange

FILES_KEPT_OPEN = 16
_CHANGED = ", changed "


@dataclass(frozen=True, slots=True)
class FileStamp:
    """Identifies a version of a file.

    A writer can restore a file's size and modification time, but not ``changed_ns``, the change time of its inode. A
    file that replaces another one has another inode.
    """

    size_bytes: int
    modified_ns: int
    changed_ns: int
    inode: int
    """On a network file system the inode is the same on all machines, the device number is not."""

    @classmethod
    def of(cls, status: os.stat_result) -> FileStamp:
        """From the status of a file."""
        return cls(status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)

    def difference(self, status: os.stat_result) -> str | None:
        """What has changed, with both values; ``None`` if the version is the same.

        A file system in user space may assign a new inode number whenever it has forgotten the old one, so a different
        number alone means nothing there.
        """
        now = FileStamp.of(status)
        if replace(now, inode=self.inode) != self:
            return (
                f"size {self.size_bytes} then, {now.size_bytes} now; modified {self.modified_ns} ns then, "
                f"{now.modified_ns} now; changed {self.changed_ns} ns then, {now.changed_ns} now"
            )
        if self.inode != now.inode and not _in_user_space(status.st_dev):
            return f"inode {self.inode} then, {now.inode} now"
        return None


def kept_by_copies(version: str) -> str:
    """The part of a file's version that a copy keeps which keeps times: all of it but change time and inode.

    >>> kept_by_copies("modified 7 ns, changed 9 ns, inode 3")
    'modified 7 ns'
    """
    return version.partition(_CHANGED)[0]


def _in_user_space(device: int) -> bool:
    """Whether a device is a FUSE mount; False where that is unknown."""
    return file_system(device).startswith("fuse")


class LocalSource(ReadRange):
    """A checkpoint folder, read only. ``names`` restricts it to some of the files.

    Links that lead out of the folder are followed with ``links``, and for ``names``, because the user gave those.
    """

    def __init__(self, root: Path, names: Collection[str] | None = None, links: bool = False) -> None:
        self.root = Path(os.path.abspath(root))
        self.location = str(root)
        with translated(self.root, self.location, CheckpointError):
            try:
                is_folder = stat.S_ISDIR(root.stat().st_mode)
            except FileNotFoundError:
                if root.is_symlink():
                    raise CheckpointError(
                        f"{root}: is a link to {os.readlink(root)}, which does not exist"
                    ) from None
                raise CheckpointError(f"{root}: no such folder") from None
            if not is_folder:
                raise CheckpointError(f"{root}: is a file; give the folder of the checkpoint")
            entries = look(self.root, names, links or names is not None)
            self.folders, self.resolved = entries.folders, entries.files
            seen = {path: _status(resolved) for path, resolved in entries.files.items()}
            self.stamps: Mapping[str, FileStamp] = {path: FileStamp.of(s) for path, s in seen.items()}
            inodes = {device for device in {s.st_dev for s in seen.values()} if not _in_user_space(device)}
            self.with_inodes = frozenset(path for path, s in seen.items() if s.st_dev in inodes)
            """Files whose inodes stay the same as long as they exist."""
            inner = {(self.root / path).parent for path in seen} | {self.root}
            folders = [_status(folder) for folder in inner] if names is None else []
            self.openness = _openness(seen.values(), folders)

    def sizes(self) -> dict[str, int]:
        """Name of every file → size in bytes, as seen at the start."""
        return {path: stamp.size_bytes for path, stamp in self.stamps.items()}

    def read_many(self, reads: Sequence[Read]) -> None:
        """Fill several buffers; consecutive reads of one file share its handle."""
        for path, of_file in groupby(reads, key=lambda read: read.path):
            with self.opened(path) as descriptor, self._translated(path):
                for read in of_file:
                    _read_all(descriptor, read)

    def read_opened(self, descriptor: int, read: Read) -> None:
        """Fill a buffer from a file that :meth:`opened` has opened."""
        try:
            _read_all(descriptor, read)
        except OSError:
            with self._translated(read.path):  # entered only for an error, because many reads are short
                raise

    @contextmanager
    def opened(self, path: str) -> Iterator[int]:
        """Open a file for reading; refused if it has changed since the source was opened."""
        if path not in self.resolved:
            raise CheckpointError(f"{path}: did not exist when {self.location} was listed")
        with ExitStack() as held:
            with self._translated(path):
                descriptor = held.enter_context(opened(self.resolved[path], path))
                self._check(path, os.fstat(descriptor))
            yield descriptor

    @contextmanager
    def kept_open(self) -> Iterator[ReadRange]:
        """The same files; the last few that are read stay open."""
        files = _OpenFiles(self)
        try:
            yield files
        finally:
            files.close()

    def _translated(self, path: str) -> AbstractContextManager[None]:
        """Convert errors of the operating system to sentences about a file of the source."""
        return translated_while_moving(self.resolved[path], f"{self.location}/{path}", CheckpointError)

    def _check(self, path: str, status: os.stat_result) -> None:
        if difference := self.stamps[path].difference(status):
            raise CheckpointError(f"{path}: changed while it was read ({difference})")

    def versions(self) -> dict[str, str]:
        """Name of every file → its times and its inode when the source was opened."""
        return {
            path: f"modified {stamp.modified_ns} ns{_CHANGED}{stamp.changed_ns} ns"
            + (f", inode {stamp.inode}" if path in self.with_inodes else "")
            for path, stamp in self.stamps.items()
        }

    def modified(self) -> dict[str, int]:
        """Name of every file → its modification time when the source was opened, in nanoseconds since the epoch."""
        return {path: stamp.modified_ns for path, stamp in self.stamps.items()}

    def check_unchanged(self) -> None:
        """Refuse if any file has changed since the source was opened."""
        for path, resolved in self.resolved.items():
            with self._translated(path):
                self._check(path, _status(resolved))


class _OpenFiles(ReadRange):
    """Files of a source, of which the last few that were read stay open."""

    def __init__(self, source: LocalSource) -> None:
        self.source = source
        self.open: dict[str, tuple[ExitStack, int]] = {}

    def read_many(self, reads: Sequence[Read]) -> None:
        """Fill several buffers."""
        for read in reads:
            self.source.read_opened(self._descriptor(read.path), read)

    def _descriptor(self, path: str) -> int:
        if path not in self.open:
            if len(self.open) == FILES_KEPT_OPEN:
                self.open.pop(next(iter(self.open)))[0].close()
            with ExitStack() as held:
                descriptor = held.enter_context(self.source.opened(path))
                self.open[path] = held.pop_all(), descriptor
        return self.open[path][1]

    def close(self) -> None:
        """Close all files."""
        while self.open:
            self.open.popitem()[1][0].close()


def _openness(files: Iterable[os.stat_result], folders: Iterable[os.stat_result]) -> Openness:
    """What all these files and folders allow."""
    openness = Openness()
    for file in files:
        openness &= Openness(files=file.st_mode & 0o666)
    for folder in folders:
        openness &= Openness(folders=folder.st_mode & 0o777)
    return openness


def _read_all(descriptor: int, read: Read) -> None:
    done = 0
    while done < len(read.buffer):
        count = os.preadv(descriptor, [read.buffer[done:]], read.byte_offset + done)
        if count == 0:
            raise CheckpointError(
                f"{read.path}: ends at byte {read.byte_offset + done}; it was at least {len(read.buffer) - done} bytes "
                "longer when it was indexed"
            )
        done += count


def list_folder(root: Path) -> tuple[list[str], list[str]]:
    """Paths of the files in a checkpoint's folder and in its own subfolders; names of all other folders."""
    files: list[str] = []
    folders: list[str] = []
    for entry in sorted(os.scandir(root), key=lambda entry: entry.name):
        if not entry.is_dir():
            files += [entry.name] if entry.is_file() else []
        elif entry.name in TENSOR_FOLDERS:
            for inner in sorted(os.scandir(entry.path), key=lambda inner: inner.name):
                (folders if inner.is_dir() else files).append(f"{entry.name}/{inner.name}")
        else:
            folders.append(entry.name)
    return files, folders


def _status(path: Path) -> os.stat_result:
    try:
        return path.stat()
    except FileNotFoundError as error:
        raise CheckpointError(f"{path.name}: disappeared while it was read") from error


def file_system(device: int) -> str:
    """The type of the file system with a device number, such as ``ext4``; empty if it is unknown.

    Linux ``proc(5)``, ``mountinfo``.
    """
    number = f"{os.major(device)}:{os.minor(device)}"
    try:
        mounts = Path("/proc/self/mountinfo").read_text("utf-8", "replace").splitlines()
    except OSError:
        return ""
    here = [mount for mount in mounts if mount.split(" ", 3)[2:3] == [number]]
    kinds = {mount.partition(" - ")[2].partition(" ")[0] for mount in here}
    return kinds.pop() if len(kinds) == 1 else ""
