"""Which store does a path or URL belong to?"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path, PurePath, PurePosixPath
from typing import TYPE_CHECKING, Any

from paddle_reshard.pipeline.errors import CheckpointError, ReshardError, TargetError, UnsupportedError
from paddle_reshard.storage.local import LocalSource, LocalTarget
from paddle_reshard.storage.store import Source

if TYPE_CHECKING:
    from paddle_reshard.storage.fsspec_folder import FsspecFolder
    from paddle_reshard.storage.fsspec_target import StagedTarget
    from paddle_reshard.storage.s3 import S3Target

StorageOptions = Mapping[str, Any]
_LOCAL_SCHEMES = ("file", "local")


def open_source(location: str, options: StorageOptions) -> Source:
    """Look at a checkpoint: its files and their sizes.

    ``options`` go to fsspec, for a URL; a mapping under the name of a scheme concerns only that scheme.

    Raises
    ------
    CheckpointError
        If nothing is there, or it cannot be read with these options.
    """
    if is_local(location):
        return LocalSource(local_path(location))
    from paddle_reshard.storage.fsspec_source import FsspecSource

    return FsspecSource(_open_folder(location, options, CheckpointError))


def open_file(location: str, options: StorageOptions) -> tuple[Source, str]:
    """Look at one file: a store that shows nothing else, and the file's name in it.

    Raises
    ------
    CheckpointError
        If it is not there, or cannot be read with these options.
    """
    folder, _, name = location.rpartition("/")
    if is_local(location):
        path = local_path(location)
        store: Source = LocalSource(path.parent, {path.name})
        name = path.name
    else:
        from paddle_reshard.storage.fsspec_source import FsspecSource

        store = FsspecSource(_open_folder(folder, options, CheckpointError), {name})
    if name not in store.sizes():
        raise CheckpointError(f"{store.location}/{name}: no such file")
    return store, name


def open_target(
    location: str,
    overwrite: bool,
    options: StorageOptions,
    resume: bool = False,
    take_over: bool = False,
) -> LocalTarget | StagedTarget | S3Target:
    """Check that a place for a new checkpoint is free, and can be written; nothing is written yet.

    With ``resume`` it may hold an unfinished conversion; ``take_over``: also one whose process on another machine
    may still be alive.

    Raises
    ------
    TargetError
        If it holds something already, or cannot be written with these options.
    """
    if is_local(location):
        return LocalTarget(local_path(location), overwrite, resume, take_over)
    from paddle_reshard.storage.fsspec_target import StagedTarget
    from paddle_reshard.storage.s3 import S3Folder, S3Target

    folder = _open_folder(location, options, TargetError)
    if isinstance(folder, S3Folder):
        return S3Target(folder, overwrite, resume, take_over)
    return StagedTarget(folder, overwrite, resume, take_over)


def _open_folder(location: str, options: StorageOptions, failure: type[ReshardError]) -> FsspecFolder:
    """A folder of the store that a URL names. The drivers are imported here: local work does without them."""
    from paddle_reshard.storage.fsspec_folder import FsspecFolder, choose_options
    from paddle_reshard.storage.s3 import SCHEMES, S3Folder

    scheme = location.split("://", 1)[0]
    kind = S3Folder if scheme in SCHEMES else FsspecFolder
    folder = kind(location, choose_options(scheme, options), failure)
    folder.check_options()
    return folder


def is_local(location: str) -> bool:
    """Whether a location is a path on this machine's file system."""
    return "://" not in location or location.split("://", 1)[0] in _LOCAL_SCHEMES


def local_path(location: str) -> Path:
    """The path of a local location."""
    if not is_local(location):
        raise UnsupportedError(f"{location.split('://', 1)[0]}:// is not a local folder")
    return Path(location.split("://", 1)[-1])


def absolute(location: str) -> str:
    """A location that means the same from every working directory."""
    return str(local_path(location).absolute()) if is_local(location) else location


def place(location: str) -> PurePath:
    """A location as a path that can be compared with another, whatever the spelling; it is not to be opened."""
    if is_local(location):
        return local_path(location).resolve()
    from paddle_reshard.storage.fsspec_folder import without_secrets
    from paddle_reshard.storage.s3 import SCHEMES

    scheme, rest = without_secrets(location).split("://", 1)
    return PurePosixPath("//", "s3" if scheme in SCHEMES else scheme, rest.lstrip("/"))
