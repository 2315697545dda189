"""What lies in a folder, and small files that only one process can create.

A *shelf* is a folder that holds checkpoints: on a disk, or below a URL that fsspec knows. Claims live in small
files of it. Creating one is exclusive: a hard link on a disk, a single PUT with ``If-None-Match`` in an object
store (multipart uploads are not exclusive everywhere, single PUTs are). The content of a new file is read back
afterwards, so a store that ignores the condition, or a lost answer to a request that was carried out, does not
fool the caller.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from paddle_reshard.pipeline.errors import ListingError
from paddle_reshard.storage.local import list_folder
from paddle_reshard.storage.locate import StorageOptions, _open_folder, check_scheme, is_local, local_path

if TYPE_CHECKING:
    from paddle_reshard.storage.fsspec_folder import FsspecFolder


class Shelf(Protocol):
    """A folder that holds checkpoints, and small files beside them. Paths are relative to it."""

    @property
    def location(self) -> str:
        """Path or URL."""

    def at(self, path: str) -> str:
        """Path or URL of something on the shelf."""

    def folders(self) -> list[str]:
        """Names of the folders directly on the shelf; none where the shelf is not there."""

    def files(self, folder: str) -> dict[str, str]:
        """Name of every file of the checkpoint in ``folder`` → a text that changes when the file does."""

    def read(self, path: str) -> bytes | None:
        """A small file, or ``None`` where there is none."""

    def create(self, path: str, data: bytes) -> bool:
        """Create a small file; of several processes that try, one gets ``True``. Data must be unlike theirs."""

    def replace(self, path: str, data: bytes) -> None:
        """Write a small file, whether or not it was there."""

    def remove(self, folder: str, first: str) -> None:
        """Remove a folder with all it holds, ``first`` before all others. Can be repeated."""


def open_shelf(location: str, options: StorageOptions, schemes: Collection[str] = ()) -> Shelf:
    """The shelf at a path or URL; it need not be there yet. ``options`` and ``schemes`` as in ``Access``."""
    check_scheme(location, schemes)
    return LocalShelf(local_path(location)) if is_local(location) else RemoteShelf(location, options)


class LocalShelf:
    """A shelf on a file system."""

    def __init__(self, root: Path) -> None:
        self.root = Path(os.path.abspath(root))
        self.location = str(self.root)

    def at(self, path: str) -> str:
        """Path of something on the shelf."""
        return str(self.root / path)

    def folders(self) -> list[str]:
        """Names of the folders on the shelf."""
        try:
            return sorted(entry.name for entry in os.scandir(self.root) if entry.is_dir())
        except FileNotFoundError:
            return []

    def files(self, folder: str) -> dict[str, str]:
        """Name of every file in a folder → its size and time of change."""
        stamps = {}
        try:
            for path in list_folder(self.root / folder)[0]:
                with contextlib.suppress(FileNotFoundError):
                    status = (self.root / folder / path).stat()
                    stamps[path] = f"{status.st_size}:{status.st_mtime_ns}"
        except (FileNotFoundError, NotADirectoryError):
            return {}
        return stamps

    def read(self, path: str) -> bytes | None:
        """A small file."""
        try:
            return (self.root / path).read_bytes()
        except FileNotFoundError:
            return None

    def create(self, path: str, data: bytes) -> bool:
        """Create a small file that appears with all its content, or not at all."""
        staged = self._stage(path, data)
        try:
            os.link(staged, self.root / path)
        except FileExistsError:
            return False
        except OSError:  # a file system without hard links
            return self._create_slowly(path, data)
        finally:
            staged.unlink()
        return True

    def _create_slowly(self, path: str, data: bytes) -> bool:
        try:
            with open(self.root / path, "xb") as file:
                file.write(data)
        except FileExistsError:
            return False
        return True

    def replace(self, path: str, data: bytes) -> None:
        """Write a small file that changes at once."""
        staged = self._stage(path, data)
        os.replace(staged, self.root / path)

    def _stage(self, path: str, data: bytes) -> Path:
        folder = (self.root / path).parent
        folder.mkdir(parents=True, exist_ok=True)
        descriptor, staged = tempfile.mkstemp(prefix=".", dir=folder)
        with open(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fchmod(file.fileno(), 0o644)
            os.fsync(file.fileno())
        return Path(staged)

    def remove(self, folder: str, first: str) -> None:
        """Take a folder out of sight, then delete it; what an earlier try left is deleted too."""
        away = self.root / f".{folder}.removing"
        _delete(away)
        with contextlib.suppress(FileNotFoundError):
            os.rename(self.root / folder, away)
        _delete(away)


def _delete(folder: Path) -> None:
    """Delete a folder, also while another process does."""
    while folder.is_dir():
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(folder)


class RemoteShelf:
    """A shelf below a URL."""

    def __init__(self, location: str, options: StorageOptions) -> None:
        self.url, self.options = location.rstrip("/"), options
        self.location = self._folder("").location

    def _folder(self, path: str) -> FsspecFolder:
        return _open_folder(self.at(path), self.options, ListingError)

    def _parent(self, path: str) -> tuple[FsspecFolder, str]:
        folder, _, name = path.rpartition("/")
        return self._folder(folder), name

    def at(self, path: str) -> str:
        """URL of something on the shelf."""
        from paddle_reshard.storage.fsspec_folder import below

        return below(self.url, path)

    def folders(self) -> list[str]:
        """Names of the folders on the shelf."""
        return list(self._folder("").listing().folders)

    def files(self, folder: str) -> dict[str, str]:
        """Name of every object in a folder → its size and the store's word for its version."""
        files = self._folder(folder).listing().files
        return {name: f"{stamp.size_bytes}:{stamp.version}" for name, stamp in files.items()}

    def read(self, path: str) -> bytes | None:
        """A small object."""
        folder, name = self._parent(path)

        def request() -> bytes | None:
            system, root = folder.open()
            try:
                return bytes(system.cat_file(f"{root}/{name}"))
            except FileNotFoundError:
                return None

        return folder.attempt(name, request)

    def create(self, path: str, data: bytes) -> bool:
        """Create a small object by one conditional PUT, and see whose it is."""
        folder, name = self._parent(path)
        folder.attempt(name, folder.put_new, name, data)
        return self.read(path) == data

    def replace(self, path: str, data: bytes) -> None:
        """Write a small object."""
        folder, name = self._parent(path)
        folder.attempt(name, folder.put, name, data)

    def remove(self, folder: str, first: str) -> None:
        """Delete ``first``, then everything in the folder."""
        place = self._folder(folder)
        place.attempt(first, place.delete, first)
        for name in place.listing().files:
            place.attempt(name, place.delete, name)
