"""Checkpoints in folders of a local file system, read only."""

from __future__ import annotations

import os
import stat
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from paddle_reshard.pipeline.core.errors import CheckpointError
from paddle_reshard.pipeline.core.file_names import TENSOR_FOLDERS
from paddle_reshard.storage.local.entries import look, opened
from paddle_reshard.storage.os_errors import told, told_while_moving
from paddle_reshard.storage.store import Openness, Read, ReadRange


@dataclass(frozen=True, slots=True)
class FileStamp:
    """What tells one version of a file from another.

    Whoever writes into a file can give back its size and time of modification, but not ``changed_ns``, the time of
    change of its inode; whoever puts another file in its place brings another inode.
    """

    size_bytes: int
    modified_ns: int
    changed_ns: int
    inode: int
    """A network file system has the same on all machines; the number of its device is each machine's own."""

    @classmethod
    def of(cls, status: os.stat_result) -> FileStamp:
        """From what the file system says."""
        return cls(status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)

    def difference(self, status: os.stat_result) -> str | None:
        """What of a file is another than it was, with both values; ``None`` if nothing is.

        A file system in user space may give a file another inode number whenever it has forgotten the first one, so a
        number that is all that differs there says nothing.
        """
        now = FileStamp.of(status)
        if (self.size_bytes, self.modified_ns, self.changed_ns) != (
            now.size_bytes,
            now.modified_ns,
            now.changed_ns,
        ):
            return (
                f"size {self.size_bytes} then, {now.size_bytes} now; modified {self.modified_ns} ns then, "
                f"{now.modified_ns} now; changed {self.changed_ns} ns then, {now.changed_ns} now"
            )
        if self.inode != now.inode and not _in_user_space(status.st_dev):
            return f"inode {self.inode} then, {now.inode} now"
        return None


def _in_user_space(device: int) -> bool:
    """Whether a device is a FUSE mount, as far as the system tells (Linux ``proc(5)``, ``mountinfo``)."""
    number = f"{os.major(device)}:{os.minor(device)}"
    try:
        mounts = Path("/proc/self/mountinfo").read_text("utf-8", "replace").splitlines()
    except OSError:
        return False
    kinds = [line.partition(" - ")[2] for line in mounts if line.split(" ", 3)[2:3] == [number]]
    return any(kind.startswith("fuse") for kind in kinds)


class LocalSource(ReadRange):
    """A checkpoint folder, read only. ``names`` restricts it to some of the files.

    With ``links``, links that lead out of the folder are followed; those of ``names`` are, for somebody gave them.
    """

    def __init__(self, root: Path, names: Collection[str] | None = None, links: bool = False) -> None:
        self.root = Path(os.path.abspath(root))
        self.location = str(root)
        with told(self.root, self.location, CheckpointError):
            try:
                is_folder = stat.S_ISDIR(root.stat().st_mode)
            except FileNotFoundError:
                if root.is_symlink():
                    raise CheckpointError(
                        f"{root}: is a link to {os.readlink(root)}, which is not there"
                    ) from None
                raise CheckpointError(f"{root}: no such folder") from None
            if not is_folder:
                raise CheckpointError(f"{root}: is a file; give the folder of the checkpoint")
            found = look(self.root, names, links or names is not None)
            self.folders, self.places = found.folders, found.files
            seen = {path: _status(place) for path, place in found.files.items()}
            self.stamps: Mapping[str, FileStamp] = {path: FileStamp.of(s) for path, s in seen.items()}
            inner = {(self.root / path).parent for path in seen} | {self.root}
            folders = [_status(folder) for folder in inner] if names is None else []
            self.openness = _openness(seen.values(), folders)

    def sizes(self) -> dict[str, int]:
        """Name of every file → size in bytes, as seen at the start."""
        return {path: stamp.size_bytes for path, stamp in self.stamps.items()}

    def read(self, path: str, byte_offset: int, nbytes: int) -> bytes:
        """Exactly ``nbytes`` bytes of a file."""
        buffer = bytearray(nbytes)
        self.read_into(path, byte_offset, memoryview(buffer))
        return bytes(buffer)

    def read_into(self, path: str, byte_offset: int, buffer: memoryview) -> None:
        """Fill ``buffer`` with the bytes of ``path`` from ``byte_offset`` on."""
        self.read_many([Read(path, byte_offset, buffer)])

    def read_many(self, reads: Sequence[Read]) -> None:
        """Fill several buffers; a file is opened once for all reads of it that follow each other."""
        for path, of_file in groupby(reads, key=lambda read: read.path):
            with self.opened(path) as descriptor, self._told(path):
                for read in of_file:
                    _read_all(descriptor, read)

    @contextmanager
    def opened(self, path: str) -> Iterator[int]:
        """A file, open for reading; refused unless it is the one that was seen at the start."""
        if path not in self.places:
            raise CheckpointError(f"{path}: was not there when {self.location} was listed")
        with ExitStack() as held:
            with self._told(path):
                descriptor = held.enter_context(opened(self.places[path], path))
                self._check(path, os.fstat(descriptor))
            yield descriptor

    def _told(self, path: str) -> AbstractContextManager[None]:
        """What the file system refuses becomes a sentence about a file of the source."""
        return told_while_moving(self.places[path], f"{self.location}/{path}", CheckpointError)

    def _check(self, path: str, status: os.stat_result) -> None:
        if difference := self.stamps[path].difference(status):
            raise CheckpointError(f"{path}: changed while it was read ({difference})")

    def versions(self) -> dict[str, str]:
        """Name of every file → when it was changed last, as seen at the start."""
        return {path: f"modified {stamp.modified_ns} ns" for path, stamp in self.stamps.items()}

    def check_unchanged(self) -> None:
        """Refuse if any file is not the one that was seen at the start."""
        for path, place in self.places.items():
            with self._told(path):
                self._check(path, _status(place))


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
                f"{read.path}: ends at byte {read.byte_offset + done}, {len(read.buffer) - done} more were there when "
                "it was indexed"
            )
        done += count


def list_folder(root: Path) -> tuple[list[str], list[str]]:
    """Paths of the files in a folder of a checkpoint and in those of its own folders; names of other folders."""
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
        raise CheckpointError(f"{path.name}: vanished while it was read") from error
