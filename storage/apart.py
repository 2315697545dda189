"""Refuse a target that overlaps its source or another target, under whatever names they are given."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path, PurePath

from paddle_reshard.pipeline.core.errors import UsageError
from paddle_reshard.storage.local.source import list_folder
from paddle_reshard.storage.local.target import staging_folder
from paddle_reshard.storage.locate import comparable_path, is_local, local_path


def check_apart(source: str, target: str) -> None:
    """Refuse a target that is the source, is inside it, or contains it.

    On a disk, the folder in which the target is staged counts as part of it, and every file of the source is resolved
    to its real path. ``source`` may be a single file.
    """
    what = "source and target"
    _refuse_nested(comparable_path(source), comparable_path(target), what)
    if is_local(source) and is_local(target):
        folders = _folders_of_target(target)
        _refuse_overlap([local_path(source)], folders, what)
        if existing := [folder for folder in folders if os.path.lexists(folder)]:
            _refuse_shared_files(local_path(source), existing)


def check_targets_apart(first: str, second: str) -> None:
    """Refuse two targets if they are the same, one is inside the other, or one is the staging folder of the other."""
    what = "two targets"
    _refuse_nested(comparable_path(first), comparable_path(second), what)
    if is_local(first) and is_local(second):
        _refuse_overlap(_folders_of_target(first), _folders_of_target(second), what)


def _real(path: Path) -> Path:
    return Path(os.path.realpath(path))


def _folders_of_target(location: str) -> list[Path]:
    """The folder of a target, and the folder in which it is staged."""
    root = Path(os.path.abspath(local_path(location)))
    return [root, staging_folder(root)] if root.name else [root]


def _refuse_overlap(firsts: list[Path], seconds: list[Path], what: str) -> None:
    for first in firsts:
        for second in seconds:
            _refuse_nested(_real(first), _real(second), what)
            _refuse_same_folder(first, second, what)


def _refuse_nested(first: PurePath, second: PurePath, what: str) -> None:
    if first == second:
        raise UsageError(f"{second}: {what} are the same folder")
    if first in second.parents or second in first.parents:
        raise UsageError(f"{second} and {first}: {what} may not be inside each other")


def _refuse_same_folder(first: Path, second: Path, what: str) -> None:
    """Compare the folders by device and inode too: a folder may be mounted twice."""
    identities = _identity(first), _identity(second)
    chains = [{_identity(above) for above in (path, *path.parents)} for path in (_real(first), _real(second))]
    if any(
        identity is not None and identity in chain
        for identity, chain in zip(identities, chains[::-1], strict=True)
    ):
        raise UsageError(f"{second}: {what} may not be inside each other; this is a second name of {first}")


def _refuse_shared_files(source: Path, folders: list[Path]) -> None:
    """Refuse files of the source that are in the target's folders, by a symbolic link or a hard link."""
    files = {
        identity: path for folder in folders for path in _files_below(folder) if (identity := _identity(path))
    }
    real_folders = [_real(folder) for folder in folders]
    for path in _files_of(source):
        real = _real(path)
        twin = files.get(_identity(path) or (-1, -1))
        if twin is not None or any(folder in real.parents for folder in real_folders):
            raise UsageError(
                f"{path}: is the file {twin or real}, which the target would replace; source and target may not share "
                "files"
            )


def _files_of(path: Path) -> Iterator[Path]:
    """The files of a checkpoint, or a single file."""
    try:
        if path.is_dir():
            yield from (path / name for name in list_folder(path)[0])
        elif path.exists():
            yield path
    except OSError:  # opening it reports what is wrong
        return


def _files_below(folder: Path) -> Iterator[Path]:
    """The files of the checkpoint at a target, of the staged one, and of one set aside."""
    for inner in (folder, folder / "files", folder / "replaced"):
        yield from _files_of(inner)


def _identity(path: Path) -> tuple[int, int] | None:
    """Device and inode: they identify a file or folder under any name."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino
