"""Determine which entries of a checkpoint folder on a disk are files to read.

A checkpoint is untrusted. A link in it could carry another file of this machine into the target, a pipe could block
its reader forever, and a file that is skipped because it cannot be read would be missing later. So every entry is
checked before anything is opened, and an entry that is not a plain file is an error that names it.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from paddle_reshard.pipeline.core.errors import CheckpointError
from paddle_reshard.pipeline.core.file_names import TENSOR_FOLDERS
from paddle_reshard.pipeline.core.trainer_files import is_by_trainer, is_stray
from paddle_reshard.storage.plain import KINDS, UNWAITING


@dataclass(frozen=True, slots=True)
class FolderEntries:
    """The contents of a folder at the time of the check."""

    files: dict[str, Path]
    """Path of every file → resolved path, without links below the folder."""
    folders: list[str]
    """Names of what is not a checkpoint's own: folders, and files that are nobody's (``is_stray``)."""


def look(root: Path, names: Collection[str] | None, follow: bool) -> FolderEntries:
    """Check all entries of a folder and of a checkpoint's own folders in it; with ``names``, only these.

    A link is followed inside the folder, and from a snapshot of a Hugging Face cache to the blobs next to it
    (``snapshots/REVISION/FILE -> ../../blobs/HASH``). Any other link is followed only with ``follow``. Refused are
    entries that are neither files nor folders, links that lead nowhere or out of the folder, and a folder where a
    trainer writes a file.
    """
    real = Path(os.path.realpath(root))
    blobs = (real.parents[1] / "blobs",) if real.parent.name == "snapshots" else ()
    within = None if follow else (real, *blobs)
    entries = FolderEntries({}, [])
    for name in sorted(os.listdir(root)) if names is None else sorted(names):
        if names is not None and not os.path.lexists(root / name):
            continue
        if names is None and is_stray(
            name
        ):  # it may be gone or changed at any time, so nothing of it is kept
            entries.folders.append(name)
            continue
        resolved, is_folder = _resolve(root, name, within)
        if not is_folder:
            entries.files[name] = resolved
        elif name in TENSOR_FOLDERS:
            for inner in sorted(os.listdir(resolved)):
                path = f"{name}/{inner}"
                if is_stray(path):
                    entries.folders.append(path)
                    continue
                resolved_inner, is_inner_folder = _resolve(root, path, within)
                if is_inner_folder:
                    entries.folders.append(path)
                else:
                    entries.files[path] = resolved_inner
        else:
            entries.folders.append(name)
    return entries


def _resolve(root: Path, path: str, within: Collection[Path] | None) -> tuple[Path, bool]:
    """Resolved path of an entry, and whether it is a folder."""
    resolved = root / path
    status = _status(resolved, path)
    if stat.S_ISLNK(status.st_mode):
        leads_to, resolved = os.readlink(resolved), Path(os.path.realpath(resolved))
        try:
            status = os.lstat(resolved)
        except OSError as error:
            raise CheckpointError(
                f"{path}: is a link to {leads_to}, which cannot be read: {error.strerror}; the file may be needed: "
                "restore it, or remove the link"
            ) from None
        is_read = stat.S_ISREG(status.st_mode) or path in TENSOR_FOLDERS
        if is_read and within is not None and not any(w == resolved or w in resolved.parents for w in within):
            raise CheckpointError(
                f"{path}: is a link that leads out of the checkpoint, to {resolved}; if that is intended, "
                "follow such links with --allow-links"
            )
    if stat.S_ISDIR(status.st_mode):
        if is_by_trainer(path):
            raise CheckpointError(f"{path}: is a folder, and a trainer writes a file of this name")
        return resolved, True
    if not stat.S_ISREG(status.st_mode):
        kind = KINDS.get(stat.S_IFMT(status.st_mode), "a special file")
        raise CheckpointError(f"{path}: is {kind}, where only files and folders are read; remove it")
    return resolved, False


def _status(resolved: Path, path: str) -> os.stat_result:
    try:
        return os.lstat(resolved)
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: disappeared while it was read") from error


@contextmanager
def opened(resolved: Path, path: str) -> Iterator[int]:
    """Open a file for reading, without waiting for a pipe and without following a link created since the check.

    Refused if it is no longer a plain file, or no longer exists.
    """
    try:
        descriptor = os.open(resolved, os.O_RDONLY | UNWAITING)
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: disappeared while it was read") from error
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EPERM, errno.ELOOP, errno.ENXIO):
            raise
        raise CheckpointError(f"{path}: cannot be read: {os.strerror(error.errno)}") from error
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise CheckpointError(f"{path}: was a file when it was indexed and is not a file now")
        yield descriptor
    finally:
        os.close(descriptor)
