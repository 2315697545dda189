"""Decide whether the contents of a folder may be replaced or pruned.

Only a checkpoint may be, and only if nothing else is in the folder: either our manifest lists every file, or a trainer
writes files of all these names. ``--overwrite``, ``watch --keep`` and ``clean`` share this decision, on disks and in
object stores.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from paddle_reshard.pipeline.core.file_names import MANIFEST, SIGNATURE, TENSOR_FOLDERS
from paddle_reshard.pipeline.core.trainer_files import is_by_product, is_by_trainer, is_tensor_file
from paddle_reshard.storage.documents.manifest import own_manifest

SHOWN = 3


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

    ``entries`` are everything in the folder and in a checkpoint's own subfolders; ``manifest`` is the content of
    ``paddle_reshard.json``, if it exists.
    """
    listed = listed_files(manifest)
    foreign = [entry for entry in entries if not _is_ours(entry, listed)]
    if foreign:
        what = "the manifest there does not list" if listed is not None else "no trainer writes"
        also = "" if len(foreign) == len(entries) else "also "
        return f"there is {also}{_named(foreign)}, which {what}"
    if entries and listed is None and not any(is_tensor_file(entry.path) for entry in entries):
        return f"there is {_named(entries)}, but no file with tensors: this is not a checkpoint"
    return None


def changed(entries: Sequence[Entry], manifest: bytes | None) -> str | None:
    """The files whose size differs from the manifest, as text; ``None`` if there are none."""
    listed = listed_files(manifest) or {}
    differing = [entry for entry in entries if entry.size_bytes != listed.get(entry.path, entry.size_bytes)]
    return f"the size of {_named(differing)} differs from the manifest" if differing else None


def _is_ours(entry: Entry, listed: Mapping[str, int] | None) -> bool:
    if entry.kind is EntryKind.FOLDER:
        return entry.path in TENSOR_FOLDERS
    if entry.kind is not EntryKind.FILE:
        return False
    if entry.path in (MANIFEST, SIGNATURE):
        return True
    if listed is None:
        return is_by_trainer(entry.path)
    return entry.path in listed or is_by_product(entry.path)


def _named(entries: Iterable[Entry]) -> str:
    """The first few entries, folders before files."""
    ordered = sorted(entries, key=lambda entry: (entry.kind is EntryKind.FILE, entry.path))
    shown = ", ".join(map(str, ordered[:SHOWN]))
    more = len(ordered) - SHOWN
    return f"{shown} and {more} more" if more > 0 else shown


def removal_order(paths: Iterable[str]) -> list[str]:
    """The order in which to remove the files of a checkpoint, so that a partly removed one is still recognised.

    The manifest is last, and the tensor files come just before it.
    """
    return sorted(paths, key=lambda path: (path == MANIFEST, is_tensor_file(path), path))
