"""Open the store of a path or URL.

This is the only module that turns a text into a store. The text always comes from the user, never from a file.
Schemes of plain stores are always allowed; schemes that read a file to find out what to open, that unpack, that cache
or that contact arbitrary web servers only if the user's storage options name them.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path, PurePath, PurePosixPath
from typing import TYPE_CHECKING, Any, NamedTuple

from paddle_reshard.pipeline.core.errors import (
    CheckpointError,
    ReshardError,
    TargetError,
    UnsupportedError,
    UsageError,
)
from paddle_reshard.pipeline.core.units import PathLike
from paddle_reshard.storage.local.source import LocalSource
from paddle_reshard.storage.schemes import PLAIN_SCHEMES, S3_SCHEMES
from paddle_reshard.storage.store import Permission, Source, TargetStore

if TYPE_CHECKING:
    from paddle_reshard.storage.remote.folder import FsspecFolder

StorageOptions = Mapping[str, Any]
_LOCAL_SCHEMES = ("file", "local")
SIDES = ("source", "target")
"""Names in storage options for what is for one store alone."""
_SCHEME = re.compile(r"[a-z][a-z0-9+._-]*")
_ONE_SLASH = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):/?(?!/)")


class Access(NamedTuple):
    """How the user lets a store be reached: ``open_source(location, *access)``."""

    options: StorageOptions
    """Options for fsspec; a mapping under the name of a scheme applies only to that scheme, and allows its URLs. They
    contain secrets."""
    links: bool = False
    """Whether links may lead out of a folder."""

    def __repr__(self) -> str:
        return f"Access(…, {self.links})"


def source_access(options: Mapping[str, Any]) -> Access:
    """How sources are reached, from the options of a conversion."""
    return _access(options, "source")


def target_access(options: Mapping[str, Any]) -> Access:
    """How targets are reached, from the options of a conversion."""
    return _access(options, "target")


def _access(options: Mapping[str, Any], side: str) -> Access:
    chosen = of_side(options.get("storage_options") or {}, side)
    return Access(chosen, bool(options.get("allow_links")))


def of_side(options: StorageOptions, side: str) -> StorageOptions:
    """The options of the ``source`` or ``target``: those under its name, or else those of both.

    No secret of one store is sent to the other.

    >>> of_side({"key": "k", "target": {"key": "t"}}, "source"), of_side({"key": "k", "target": {"key": "t"}}, "target")
    ({'key': 'k'}, {'key': 't'})
    """
    own = options.get(side, {name: value for name, value in options.items() if name not in SIDES})
    if not isinstance(own, Mapping):
        raise UsageError(f"storage options: {side}: an object with the options of that store is expected")
    return own


def open_source(location: str, options: StorageOptions, links: bool = False) -> Source:
    """Open a checkpoint: list its files and their sizes.

    ``options`` and ``links`` are those of :class:`Access`. A ``CheckpointError`` if it does not exist or
    cannot be read with these options; URLs are refused as in :func:`check_scheme`.
    """
    check_scheme(location, options)
    if is_local(location):
        return LocalSource(local_path(location), links=links)
    from paddle_reshard.storage.remote.source import FsspecSource

    return FsspecSource(open_folder(location, options, CheckpointError))


def open_file(location: str, options: StorageOptions) -> tuple[Source, str]:
    """Open a single file as :func:`open_source` does: a store that lists nothing else, and the file's name in it."""
    check_scheme(location, options)
    folder, _, name = location.rpartition("/")
    if is_local(location):
        path = local_path(location)
        store: Source = LocalSource(path.parent, {path.name})
        name = path.name
    else:
        from paddle_reshard.storage.remote.source import FsspecSource

        store = FsspecSource(open_folder(folder, options, CheckpointError), {name})
    if name not in store.sizes():
        where = location if is_local(location) else f"{store.location}/{name}"
        raise CheckpointError(f"{where}: no such file or folder")
    return store, name


def open_target(location: str, access: Access, permission: Permission = Permission()) -> TargetStore:
    """Check that a new checkpoint can be written to a location; nothing is written yet.

    A ``TargetError`` if the location holds something already, or cannot be written with these options; URLs are refused
    as in :func:`check_scheme`.
    """
    _refuse_hub(location)
    check_scheme(location, access.options)
    if is_local(location):
        from paddle_reshard.storage.local.target import LocalTarget

        return LocalTarget(local_path(location), permission)
    from paddle_reshard.storage.remote.target import StagedTarget

    folder = open_folder(location, access.options, TargetError)
    if "::" not in location and _scheme(location) in S3_SCHEMES:
        from paddle_reshard.storage.s3.folder import S3Folder
        from paddle_reshard.storage.s3.target import S3Target

        if isinstance(folder, S3Folder):
            return S3Target(folder, permission)
    return StagedTarget(folder, permission)


def _refuse_hub(location: str) -> None:
    """Refuse a target on the Hugging Face Hub (docs/decisions/028-no-targets-on-the-hub.md)."""
    if location.startswith("hf://"):
        name = "/".join(location.removeprefix("hf://").rstrip("/").split("/")[:2])
        raise UnsupportedError(
            f"{location}: targets on the Hugging Face Hub are not supported, because its file system commits each file "
            f"on its own; convert into a folder, and publish that in one commit: hf upload {name} FOLDER"
        )


def check_scheme(location: str, options: StorageOptions) -> None:
    """Refuse a URL whose scheme is neither plain nor named by the options: ``{"sftp": {…}}``.

    fsspec reads ``a::b://…`` as a chain, a file system inside a file of another. All its schemes are checked, and it
    begins with one that is not plain.

    Raises
    ------
    UnsupportedError
        If a scheme is not allowed.
    UsageError
        If a text resembles a URL but is malformed, and would otherwise name a folder.
    """
    first, mark, rest = location.partition("://")
    if not mark:
        slip = _ONE_SLASH.match(location)
        if slip and slip[1].lower() in PLAIN_SCHEMES:
            raise UsageError(
                f"{location}: a URL has two slashes, {slip[1].lower()}://…; a folder of this name is ./{location}"
            )
        return
    if first in _LOCAL_SCHEMES:
        if not rest.startswith("/"):
            raise UsageError(f"{location}: the URL of a file has three slashes, {first}:///path")
        return
    links = [link.partition("://")[0] for link in location.split("::")]
    for name in links:
        if not _SCHEME.fullmatch(name):
            hint = f"; write {name.lower()}://" if _SCHEME.fullmatch(name.lower()) else ""
            raise UnsupportedError(f"{name!r} is not the name of a scheme{hint}")
    what = f"{'::'.join(links)}, a chain of file systems," if len(links) > 1 else f"{links[0]}://"
    if len(links) > 1 and links[0] in PLAIN_SCHEMES:
        raise UnsupportedError(f"{what} begins with {links[0]}, which reads from no other")
    strange = [name for name in links if name not in PLAIN_SCHEMES]
    if not all(isinstance(options.get(name), Mapping) for name in strange):
        named = json.dumps({name: {} for name in strange})
        raise UnsupportedError(
            f"{what} is opened only if you name it: --storage-options '{named}', with its options if it needs any; "
            f"plain stores are {', '.join(sorted(PLAIN_SCHEMES))}"
        )


def open_folder(
    location: str, options: StorageOptions, failure: Callable[[str], ReshardError]
) -> FsspecFolder:
    """The folder that a URL names. The drivers are imported here, because local work does not need them."""
    from paddle_reshard.storage.remote.folder import FsspecFolder, choose_options

    scheme = _scheme(location)
    if "::" in location:  # fsspec finds the options of each link by its scheme
        folder = FsspecFolder(location, dict(options), failure)
    elif scheme not in S3_SCHEMES:
        folder = FsspecFolder(location, choose_options(scheme, options), failure)
    else:
        from paddle_reshard.storage.s3.folder import S3Folder

        folder = S3Folder(location, choose_options(scheme, options), failure)
    folder.check_options()
    return folder


def _scheme(location: str) -> str:
    return location.split("://", 1)[0]


def is_local(location: str) -> bool:
    """Whether a location is a path of the local file system."""
    return "://" not in location or _scheme(location) in _LOCAL_SCHEMES


def local_path(location: str) -> Path:
    """The path of a local location."""
    if not is_local(location):
        raise UnsupportedError(f"{_scheme(location)}:// is not a local folder")
    path = location.split("://", 1)[-1]
    if not path.strip():
        raise UsageError(f"{location!r}: SRC or DST is empty; is a variable not set?")
    return Path(path)


def absolute(location: str) -> str:
    """A location made independent of the working directory."""
    return str(local_path(location).absolute()) if is_local(location) else location


def shown_location(location: PathLike) -> str:
    """A location as a manifest may show it: absolute, and without user, password and query."""
    text = os.fspath(location)
    if is_local(text):
        return absolute(text)
    from paddle_reshard.storage.remote.folder import without_secrets

    return without_secrets(text)


def comparable_path(location: str) -> PurePath:
    """A location as a path that is the same for every spelling of it. It is never opened."""
    if is_local(location):
        return Path(os.path.realpath(local_path(location)))
    from paddle_reshard.storage.remote.folder import without_secrets

    scheme, rest = without_secrets(location).split("://", 1)
    return PurePosixPath("//", "s3" if scheme in S3_SCHEMES else scheme, rest.lstrip("/"))
