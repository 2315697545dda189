"""The contents of a folder of this machine, and the removal of exactly the chosen files."""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from paddle_reshard.pipeline.core.errors import ReshardError, TargetError
from paddle_reshard.pipeline.core.file_names import MANIFEST, TENSOR_FOLDERS
from paddle_reshard.pipeline.core.limits import MAX_MANIFEST_BYTES
from paddle_reshard.storage.os_errors import writing
from paddle_reshard.storage.plain import read_small
from paddle_reshard.storage.replaceable import Entry, EntryKind, objection, refuse_occupied, removal_order


def entries_of(folder: Path) -> list[Entry]:
    """Everything in a folder and in a checkpoint's own folders in it. Links are not followed."""
    entries = []
    for entry in os.scandir(folder):
        entries.append(_entry(entry, entry.name))
        if entry.name in TENSOR_FOLDERS and entry.is_dir(follow_symlinks=False):
            entries += [_entry(inner, f"{entry.name}/{inner.name}") for inner in os.scandir(entry.path)]
    return sorted(entries)


def _entry(entry: os.DirEntry[str], path: str) -> Entry:
    status = entry.stat(follow_symlinks=False)
    if stat.S_ISREG(status.st_mode):
        return Entry(path, EntryKind.FILE, status.st_size)
    kinds = ((stat.S_ISDIR, EntryKind.FOLDER), (stat.S_ISLNK, EntryKind.LINK))
    return Entry(path, next((kind for test, kind in kinds if test(status.st_mode)), EntryKind.OTHER))


def temporary_folder(purpose: str) -> Path:
    """The folder of this user for temporary files of one purpose, the same for every process that names it."""
    import tempfile  # conversions on a disk do without, and without what it loads

    digest = hashlib.sha256(purpose.encode()).hexdigest()[:16]
    return Path(tempfile.gettempdir()) / f"paddle_reshard-{os.getuid()}-{digest}"


def make_private(folder: Path) -> None:
    """Make a temporary folder that others can't enter, unless it exists.

    Raises
    ------
    TargetError
        If somebody else has made one of this name: what lies in it is not ours.
    """
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.is_symlink() or folder.stat().st_uid != os.getuid():
        raise TargetError(f"{folder}: belongs to a different user; set TMPDIR to another folder")


def check_writable(path: Path, failure: Callable[[str], ReshardError]) -> None:
    """Refuse a file that could never be written, before anything is done whose result it is to hold."""
    folder = path.absolute().parent
    if path.is_dir():
        raise failure(f"{path}: cannot be written: it is a folder; give the name of a file")
    if not folder.is_dir():
        raise failure(f"{path}: cannot be written: the folder {folder} does not exist")


@contextlib.contextmanager
def written_whole(path: Path, failure: Callable[[str], ReshardError]) -> Iterator[BinaryIO]:
    """A file to write that replaces an existing one, and appears as a whole or not at all; a link or pipe stays one."""
    with writing(path, failure):
        if path.is_symlink() or (path.exists() and not path.is_file()):  # /dev/stdout is both
            with path.open("wb") as file:
                yield file
            return
        unfinished = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        try:
            with unfinished.open("wb") as file:
                yield file
            unfinished.replace(path)
        except BaseException:
            with contextlib.suppress(OSError):  # on a read-only file system, even if there is nothing
                unfinished.unlink()
            raise


def read_manifest(folder: Path, entries: Iterable[Entry]) -> bytes | None:
    """The manifest in a folder; ``None`` if there is no plain file of this name, or one too large for a manifest."""
    found = (entry for entry in entries if entry.path == MANIFEST and entry.kind is EntryKind.FILE)
    is_there = any(entry.size_bytes <= MAX_MANIFEST_BYTES for entry in found)
    return read_small(folder / MANIFEST, MAX_MANIFEST_BYTES, TargetError) if is_there else None


def object_to(folder: Path) -> tuple[list[Entry], str | None]:
    """Everything in a folder, and why it may not be removed (``None`` if it may)."""
    entries = entries_of(folder)
    return entries, objection(entries, read_manifest(folder, entries))


def check_free(root: Path, overwrite: bool) -> bool:
    """Refuse a target that may not be written, as :func:`refuse_occupied` does; whether a checkpoint exists there."""
    if root.is_symlink():
        raise TargetError(f"{root}: is a link to {os.readlink(root)}; give the folder itself")
    if not os.path.lexists(root):
        return False
    if not root.is_dir():
        raise TargetError(f"{root}: exists and is not a folder")
    entries = entries_of(root)
    refuse_occupied(str(root), entries, read_manifest(root, entries), overwrite)
    return bool(entries)


def remove_files(folder: Path, paths: Iterable[str]) -> bool:
    """Remove exactly these files, and then the empty folders. Returns whether the folder itself was removed.

    Can be repeated after a kill.
    """
    for path in removal_order(paths):
        (folder / path).unlink(missing_ok=True)
    for inner in (*(folder / name for name in TENSOR_FOLDERS), folder):
        with contextlib.suppress(OSError):  # missing, or not empty
            inner.rmdir()
    return not os.path.lexists(folder)


def set_aside(folder: Path, target: Path) -> Path:
    """Move a folder next to ``target``, to a free name derived from it, where users find it."""
    number = 1
    while True:
        path = target.with_name(f"{target.name}.replaced" + (f"-{number}" if number > 1 else ""))
        try:
            path.mkdir()
        except FileExistsError:
            number += 1
            continue
        os.rename(folder, path)
        return path
