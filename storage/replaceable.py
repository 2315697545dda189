"""Decide whether the contents of a folder may be replaced or pruned: only if our manifest lists all of it.

``--overwrite`` and ``watch --keep`` share this decision, on disks and in object stores. What no manifest of ours lists
is somebody's: a trainer's checkpoint, whatever its files are called, above all.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from paddle_reshard.pipeline.core.errors import OccupiedError, TargetError
from paddle_reshard.pipeline.core.file_names import MANIFEST, TENSOR_FOLDERS
from paddle_reshard.storage.documents.manifest import own_manifest

SHOWN = 3
LONGEST_TOPOLOGY = 80
"""Number of characters of an entry of a manifest beyond which it is not shown."""


class EntryKind(str, Enum):
    """The kind of an entry."""

    FILE = "file"
    FOLDER = "folder"
    LINK = "link"
    OTHER = "special file"


@dataclass(frozen=True, slots=True, order=True)
class Entry:
    """An entry below a folder, by its relative path."""

    path: str
    kind: EntryKind
    size_bytes: int = 0

    def __str__(self) -> str:
        name = repr(self.path)[1:-1]
        return {
            EntryKind.FILE: name,
            EntryKind.FOLDER: f"{name}/",
            EntryKind.LINK: f"{name} (a link)",
            EntryKind.OTHER: f"{name} (a special file)",
        }[self.kind]


def listed_files(manifest: bytes | None) -> Mapping[str, int] | None:
    """Path of every file that our manifest lists → its size; ``None`` if it is not our manifest."""
    files = (own_manifest(manifest) or {}).get("files")
    return files if isinstance(files, dict) else None


def objection(entries: Sequence[Entry], manifest: bytes | None) -> str | None:
    """Why the contents of a folder may not be removed, naming the entries; ``None`` if they may.

    A file of another size than the manifest lists is not the one that was written: a trainer may have saved over it.

    ``entries`` are everything in the folder and in a checkpoint's own subfolders; ``manifest`` is the content of
    ``paddle_reshard.json``, if it exists.
    """
    listed = listed_files(manifest)
    if listed is None:
        return f"there is {_named(entries)}, which paddle-reshard did not write" if entries else None
    if foreign := [entry for entry in entries if not _is_listed(entry, listed)]:
        return f"there is also {_named(foreign)}, which the manifest there does not list"
    differing = [entry for entry in entries if entry.size_bytes != listed.get(entry.path, entry.size_bytes)]
    return f"the size of {_named(differing)} differs from the manifest there" if differing else None


def _is_listed(entry: Entry, listed: Collection[str]) -> bool:
    """Whether an entry is a file that a manifest lists, the manifest itself, or a folder in which such files lie."""
    if entry.kind is EntryKind.FOLDER:
        return entry.path in TENSOR_FOLDERS
    return entry.kind is EntryKind.FILE and (entry.path in listed or entry.path == MANIFEST)


def refuse_occupied(location: str, entries: Sequence[Entry], manifest: bytes | None, overwrite: bool) -> None:
    """Refuse a target that is not empty or, with ``overwrite``, of which our manifest does not list everything.

    Only the first of the two, and only where everything is ours, is a matter of permission.

    Raises
    ------
    OccupiedError
        If something lies there that we did not write.
    TargetError
        If only a finished conversion does.
    """
    if (reason := objection(entries, manifest)) is not None:
        raise OccupiedError(location, reason, overwrite)
    if entries and not overwrite:
        raise TargetError(
            f"{location}: is not empty: it is a finished conversion{_of_job(manifest)}; choose another target, or "
            "--overwrite to replace it"
        )


def _of_job(manifest: bytes | None) -> str:
    """Which job a conversion is for, by its manifest."""
    described = own_manifest(manifest) or {}
    for word, entry in (("with", "topology"), ("to", "layout")):
        if isinstance(what := described.get(entry), str) and len(what) <= LONGEST_TOPOLOGY:
            return f" {word} {what}"
    return ""


def _named(entries: Iterable[Entry]) -> str:
    """The first few entries, folders before files."""
    ordered = sorted(entries, key=lambda entry: (entry.kind is EntryKind.FILE, entry.path))
    shown = ", ".join(map(str, ordered[:SHOWN]))
    more = len(ordered) - SHOWN
    return f"{shown} and {more} more" if more > 0 else shown


def removal_order(paths: Iterable[str]) -> list[str]:
    """The order in which to remove the files of a conversion: the manifest, which lists the others, is last."""
    return sorted(paths, key=lambda path: (path == MANIFEST, path))
