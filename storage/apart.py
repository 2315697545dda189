"""Refuse a target that overlaps its source or another target, under whatever names they are given."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path, PurePath

from paddle_reshard.pipeline.core.errors import UsageError
from paddle_reshard.storage.local.source import list_folder
from paddle_reshard.storage.local.target import staging_folder
from paddle_reshard.storage.locate import is_local, local_path, place


def check_apart(source: str, target: str) -> None:
    """Refuse a target that is the source, lies inside it, or contains it.

    On a disk, the folder in which the target is staged counts as part of it, and every file of the source is resolved
    to its real path. ``source`` may be a single file.

    Raises
    ------
    UsageError
        Naming both.
    """
    what = "source and target"
    _refuse_nested(place(source), place(target), what)
    if is_local(source) and is_local(target):
        spots = [spot for spot in _spots(target) if os.path.lexists(spot)]
        for spot in _spots(target):
            _refuse_nested(place(source), _real(spot), what)
            _refuse_same_folder(local_path(source), spot, what)
        if spots:
            _refuse_shared_files(local_path(source), spots)


def check_targets_apart(one: str, two: str) -> None:
    """Refuse two targets if they are the same, one lies inside the other, or one is the other's staging folder.

    Raises
    ------
    UsageError
        Naming both.
    """
    what = "two targets"
    _refuse_nested(place(one), place(two), what)
    if is_local(one) and is_local(two):
        for a in _spots(one):
            for b in _spots(two):
                _refuse_nested(_real(a), _real(b), what)
                _refuse_same_folder(a, b, what)


def _real(path: Path) -> Path:
    return Path(os.path.realpath(path))


def _spots(location: str) -> list[Path]:
    """The folder of a target, and the folder in which it is staged."""
    root = Path(os.path.abspath(local_path(location)))
    return [root, staging_folder(root)] if root.name else [root]


def _refuse_nested(other: PurePath, target: PurePath, what: str) -> None:
    if other == target:
        raise UsageError(f"{target}: {what} are the same folder")
    if other in target.parents or target in other.parents:
        raise UsageError(f"{target} and {other}: {what} may not lie inside each other")


def _refuse_same_folder(other: Path, spot: Path, what: str) -> None:
    """Compare the folders by device and inode too: a folder may be mounted twice."""
    one, two = _identity(other), _identity(spot)
    chains = [{_identity(above) for above in (path, *path.parents)} for path in (_real(other), _real(spot))]
    if (two is not None and two in chains[0]) or (one is not None and one in chains[1]):
        raise UsageError(f"{spot}: {what} may not lie inside each other; this is {other} under another name")


def _refuse_shared_files(source: Path, spots: list[Path]) -> None:
    """Refuse files of the source that lie in a spot, reached by a symbolic link or by a hard link."""
    held = {identity: path for spot in spots for path in _files_below(spot) if (identity := _identity(path))}
    real_spots = [_real(spot) for spot in spots]
    for path in _files_of(source):
        real = _real(path)
        twin = held.get(_identity(path) or (-1, -1))
        if twin is not None or any(spot in real.parents for spot in real_spots):
            raise UsageError(
                f"{path}: is the file {twin or real}, which the target would replace; source and target may not share "
                "files"
            )


def _files_of(place: Path) -> Iterator[Path]:
    """The files of a checkpoint, or a single given file."""
    try:
        if place.is_dir():
            yield from (place / name for name in list_folder(place)[0])
        elif place.exists():
            yield place
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
