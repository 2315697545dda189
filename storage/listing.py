"""The checkpoints in a folder, and small files next to them.

A *checkpoint root* is a folder that holds checkpoints, on a disk or below a URL that fsspec knows.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
import uuid
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from paddle_reshard.pipeline.core.errors import ListingError
from paddle_reshard.pipeline.core.file_names import MANIFEST
from paddle_reshard.pipeline.core.limits import most_bytes
from paddle_reshard.pipeline.core.trainer_files import is_marker
from paddle_reshard.storage.local.folders import entries_of, read_manifest, remove_files
from paddle_reshard.storage.local.source import list_folder
from paddle_reshard.storage.locate import StorageOptions, check_scheme, is_local, local_path, open_folder
from paddle_reshard.storage.os_errors import translated
from paddle_reshard.storage.plain import read_small
from paddle_reshard.storage.replaceable import EntryKind, objection
from paddle_reshard.storage.session.staging import append_to_file
from paddle_reshard.storage.store import OWN_PREFIX

if TYPE_CHECKING:
    from paddle_reshard.storage.remote.folder import FsspecFolder


IsOurs = Callable[[bytes], bool]
"""Whether a manifest is the expected one."""
_REMOVING = f"{OWN_PREFIX}removing.json"
_NOT_OURS = "its manifest is not the one that was written"

Method = TypeVar("Method", bound=Callable[..., Any])


def _translated(method: Method) -> Method:
    """The method of a :class:`LocalRoot`, whose errors are sentences, as those of a :class:`RemoteRoot`."""

    @wraps(method)
    def call(self: LocalRoot, *args: Any) -> Any:
        with translated(self.root, self.location, ListingError):
            return method(self, *args)

    return cast(Method, call)


class LocalRoot:
    """A root on a file system."""

    def __init__(self, root: Path) -> None:
        self.root = Path(os.path.abspath(root))
        self.location = str(self.root)

    def at(self, path: str) -> str:
        """Path of something below the root."""
        return str(self.root / path)

    @_translated
    def is_there(self) -> bool:
        """Whether the folder exists."""
        return self.root.is_dir()

    @_translated
    def folders(self) -> list[str]:
        """Names of the folders directly below the root; none if the root does not exist."""
        try:
            return sorted(entry.name for entry in os.scandir(self.root) if entry.is_dir())
        except FileNotFoundError:
            return []

    @_translated
    def files(self, folder: str) -> dict[str, str]:
        """Name of every file in a folder → its size and modification time."""
        stamps = {}
        try:
            for path in list_folder(self.root / folder)[0]:
                with contextlib.suppress(FileNotFoundError):
                    status = (self.root / folder / path).stat()
                    stamps[path] = f"{status.st_size}:{status.st_mtime_ns}"
        except (FileNotFoundError, NotADirectoryError):
            return {}
        return stamps

    @_translated
    def read(self, path: str) -> bytes | None:
        """Contents of a small file; ``None`` if it does not exist."""
        try:
            return read_small(self.root / path, most_bytes(path), ListingError)
        except FileNotFoundError:
            return None

    @_translated
    def replace(self, path: str, data: bytes) -> None:
        """Write a small file atomically."""
        folder = (self.root / path).parent
        folder.mkdir(parents=True, exist_ok=True)
        descriptor, staged = tempfile.mkstemp(prefix=".", dir=folder)
        try:
            with open(descriptor, "wb") as file:
                file.write(data)
                file.flush()
                os.fchmod(file.fileno(), 0o644)
                os.fsync(file.fileno())
            os.replace(staged, self.root / path)
        except BaseException:
            os.unlink(staged)
            raise

    @_translated
    def append(self, path: str, line: bytes) -> None:
        """Add a line to the log ``<path>.jsonl``, in one write."""
        file = self.root / f"{path}.jsonl"
        file.parent.mkdir(parents=True, exist_ok=True)
        append_to_file(file, line + b"\n", 0o644)

    @_translated
    def remove(self, folder: str, is_ours: IsOurs) -> str | None:
        """Remove a converted checkpoint; the reason if this is refused. Can be repeated.

        Exactly the files that its manifest lists are removed, if the manifest ``is_ours`` and nothing else is in the
        folder. That is renamed first, so a partly removed checkpoint never looks complete.
        """
        path, hidden = self.root / folder, self.root / f".{folder}.removing"
        if os.path.lexists(hidden) and (reason := _remove(hidden, is_ours)) is not None:
            return f"{hidden} is in the way: {reason}"
        if not os.path.lexists(path):
            return None
        if (reason := _objection(path, is_ours)) is not None:
            return reason
        os.rename(path, hidden)
        reason = _remove(hidden, is_ours)
        if reason is not None and not os.path.lexists(path):
            os.rename(hidden, path)
        return reason


def _objection(folder: Path, is_ours: IsOurs) -> str | None:
    """Why a folder is not exactly a checkpoint made by this conversion; ``None`` if it is."""
    if folder.is_symlink() or not folder.is_dir():
        return "it is not a folder"
    entries = entries_of(folder)
    if all(entry.kind is EntryKind.FOLDER for entry in entries):  # all files are gone
        return objection(entries, None)
    manifest = read_manifest(folder, entries)
    if manifest is None or not is_ours(manifest):
        return _NOT_OURS
    return objection(entries, manifest)


def _remove(folder: Path, is_ours: IsOurs) -> str | None:
    if (reason := _objection(folder, is_ours)) is not None:
        return reason
    files = [entry.path for entry in entries_of(folder) if entry.kind is EntryKind.FILE]
    return None if remove_files(folder, files) else "files were added to it during the removal"


class RemoteRoot:
    """A root below a URL."""

    def __init__(self, location: str, options: StorageOptions) -> None:
        self.url, self.options = location.rstrip("/"), options
        self.location = self._folder("").location

    def _folder(self, path: str) -> FsspecFolder:
        return open_folder(self.at(path), self.options, ListingError)

    def _parent(self, path: str) -> tuple[FsspecFolder, str]:
        folder, _, name = path.rpartition("/")
        return self._folder(folder), name

    def at(self, path: str) -> str:
        """URL of something below the root."""
        from paddle_reshard.storage.remote.folder import below

        return below(self.url, path)

    def is_there(self) -> bool:
        """Whether any object is below the URL."""
        listing = self._folder("").listing()
        return bool(listing.folders or listing.files)

    def folders(self) -> list[str]:
        """Names of the folders directly below the root."""
        return list(self._folder("").listing().folders)

    def files(self, folder: str) -> dict[str, str]:
        """Name of every object in a folder → its size and the store's identifier of its version."""
        files = self._folder(folder).listing().files
        return {name: f"{stamp.size_bytes}:{stamp.version}" for name, stamp in files.items()}

    def read(self, path: str) -> bytes | None:
        """Contents of a small object; ``None`` if it does not exist."""
        folder, name = self._parent(path)
        content = folder.attempt(name, folder.read_object, name)
        return None if content is None else content[0]

    def replace(self, path: str, data: bytes) -> None:
        """Write a small object."""
        folder, name = self._parent(path)
        folder.attempt(name, folder.put, name, data)

    def append(self, path: str, line: bytes) -> None:
        """Add a line to the log below ``<path>/``: an object of its own, whose name sorts by time."""
        self.replace(f"{path}/{time.time_ns():020d}-{uuid.uuid4().hex[:8]}.json", line)

    def remove(self, folder: str, is_ours: IsOurs) -> str | None:
        """Remove a converted checkpoint as :meth:`LocalRoot.remove` does.

        The manifest is deleted first, then the trainer's markers, then all files that a copy of the manifest lists.
        """
        store = self._folder(folder)
        listing = store.listing()
        resumed = _REMOVING in listing.files
        if not resumed and not listing.files and not listing.folders:
            return None
        manifest = self.read(f"{folder}/{_REMOVING if resumed else MANIFEST}")
        if manifest is None or not is_ours(manifest):
            return _NOT_OURS
        entries = listing.entries()
        if (reason := objection(entries, manifest)) is not None:
            return reason
        if not resumed:
            store.attempt(_REMOVING, store.put, _REMOVING, manifest)
        names = [entry.path for entry in entries if entry.kind is EntryKind.FILE]
        for name in sorted(names, key=lambda n: (n != MANIFEST, not is_marker(n), n)):
            store.attempt(name, store.delete, name)
        store.attempt(_REMOVING, store.delete, _REMOVING)
        return None


CheckpointRoot = LocalRoot | RemoteRoot
"""A folder that holds checkpoints, and small files next to them. Paths are relative to it."""


def open_root(location: str, options: StorageOptions) -> CheckpointRoot:
    """The root at a path or URL; it need not exist yet. ``options`` as in ``Access``."""
    check_scheme(location, options)
    return LocalRoot(local_path(location)) if is_local(location) else RemoteRoot(location, options)
