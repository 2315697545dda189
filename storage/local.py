"""Checkpoints in folders of a local file system.

A new checkpoint is staged in a hidden folder beside its place and renamed there when it is whole, so that at
no moment an unfinished one can be taken for a finished one.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from paddle_reshard.pipeline.errors import CheckpointError, TargetError
from paddle_reshard.storage.store import NewFile, ReadRange, Receipt


@dataclass(frozen=True, slots=True)
class FileStamp:
    """What tells one version of a file from another."""

    size_bytes: int
    modified_ns: int


class LocalSource(ReadRange):
    """A checkpoint folder, read only."""

    def __init__(self, root: Path) -> None:
        if not root.is_dir():
            raise CheckpointError(f"{root}: no such folder")
        self.root = Path(os.path.abspath(root))
        self.location = str(root)
        entries = sorted(os.scandir(root), key=lambda entry: entry.name)
        self.stamps: Mapping[str, FileStamp] = {e.name: _stamp(Path(e.path)) for e in entries if e.is_file()}
        self.folders = [entry.name for entry in entries if entry.is_dir()]

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
        with open(self.root / path, "rb", buffering=0) as file:
            done = 0
            while done < len(buffer):
                count = os.preadv(file.fileno(), [buffer[done:]], byte_offset + done)
                if count == 0:
                    raise CheckpointError(
                        f"{path}: ends at byte {byte_offset + done}, {len(buffer) - done} more were there when "
                        "it was indexed"
                    )
                done += count

    def check_unchanged(self) -> None:
        """Refuse if any file is not the one that was seen at the start."""
        for path, stamp in self.stamps.items():
            now = _stamp(self.root / path)
            if now != stamp:
                raise CheckpointError(
                    f"{path}: changed while it was read (size {stamp.size_bytes} then, {now.size_bytes} now)"
                )


def _stamp(path: Path) -> FileStamp:
    try:
        status = path.stat()
    except FileNotFoundError as error:
        raise CheckpointError(f"{path.name}: vanished while it was read") from error
    return FileStamp(status.st_size, status.st_mtime_ns)


@dataclass(frozen=True, slots=True)
class LocalWriter:
    """Positioned writes into the staging folder."""

    staging: Path

    def write_part(self, path: str, byte_offset: int, buffer: memoryview) -> Receipt:
        """Write all of ``buffer`` into a file that was begun."""
        with open(self.staging / path, "r+b", buffering=0) as file:
            done = 0
            while done < len(buffer):
                done += os.pwrite(file.fileno(), buffer[done:], byte_offset + done)
        return Receipt(path, byte_offset, len(buffer))


class LocalTarget:
    """A new checkpoint folder, staged beside its place and renamed when it is whole."""

    smallest_part_bytes = 1

    def __init__(self, root: Path, overwrite: bool) -> None:
        check_free(root, overwrite)
        self.root = Path(os.path.abspath(root))
        self.location = str(root)
        self.overwrite = overwrite

    def __enter__(self) -> LocalTarget:
        self.root.parent.mkdir(parents=True, exist_ok=True)
        self.staging = Path(tempfile.mkdtemp(prefix=f".{self.root.name}.reshard-", dir=self.root.parent))
        self.staging.chmod(0o777 & ~_umask())
        return self

    def begin(self, files: Sequence[NewFile]) -> LocalWriter:
        """Make every file in its final size."""
        for new in files:
            with open(self.staging / new.path, "xb") as file:
                file.truncate(new.size_bytes)
        return LocalWriter(self.staging)

    def finish(self, receipts: Iterable[Receipt]) -> LocalSource:
        """Nothing is left to do for files on a disk but to look at them."""
        return LocalSource(self.staging)

    def publish(self, manifest_path: str, manifest: bytes) -> None:
        """Make everything durable, then put the folder in its place."""
        (self.staging / manifest_path).write_bytes(manifest)
        for path in (*self.staging.iterdir(), self.staging):
            _sync(path)
        check_free(self.root, self.overwrite)
        replaced: Path | None = None
        if self.root.is_dir() and any(self.root.iterdir()):
            replaced = Path(tempfile.mkdtemp(prefix=f".{self.root.name}.replaced-", dir=self.root.parent))
            os.rename(self.root, replaced)
        os.rename(self.staging, self.root)
        _sync(self.root.parent)
        if replaced is not None:
            shutil.rmtree(replaced)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        shutil.rmtree(self.staging, ignore_errors=True)


def check_free(root: Path, overwrite: bool) -> None:
    """Refuse a target that already holds something; with ``overwrite``, only what is no checkpoint."""
    if root.is_symlink() or (root.exists() and not root.is_dir()):
        raise TargetError(f"{root}: is there already and is not a folder")
    if not root.is_dir():
        return
    names = {entry.name for entry in root.iterdir()}
    if names and not overwrite:
        raise TargetError(f"{root}: is not empty; give another target, or --overwrite to replace it")
    if names and not any(name.startswith(("model_state.", "optimizer.")) for name in names):
        raise TargetError(f"{root}: --overwrite replaces a checkpoint, and this folder does not hold one")


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
