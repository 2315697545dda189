"""Check a target against its manifest, byte by byte."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

from paddle_reshard.pipeline.convert.manifest import Manifest, ManifestPart, parse_manifest
from paddle_reshard.pipeline.core.crc import ALGORITHM
from paddle_reshard.pipeline.core.errors import CheckpointError
from paddle_reshard.pipeline.core.events import Observer, Progress, StepStarted, ignore_events
from paddle_reshard.pipeline.core.file_names import MANIFEST
from paddle_reshard.pipeline.core.shown import Facts, Result, counted, readable_bytes
from paddle_reshard.pipeline.core.trainer_files import is_stray
from paddle_reshard.storage.checksum import source_checksum, stretches
from paddle_reshard.storage.local.source import kept_by_copies
from paddle_reshard.storage.store import ReadRange, Source

SMALL_FILE_BYTES = 1 << 20
"""Largest file that a quick check reads."""
SHOWN_DAMAGES = 20


@dataclass(frozen=True, slots=True)
class Damage:
    """A part that differs from the manifest, or a file or folder that the manifest does not list."""

    path: str
    byte_offset: int
    nbytes: int
    detail: str

    @property
    def stretch(self) -> str:
        """The range of bytes, for messages; empty for a folder."""
        return f", bytes {self.byte_offset} to {self.byte_offset + self.nbytes}" if self.nbytes else ""


@dataclass(frozen=True, slots=True, repr=False)
class IntegrityReport(Result):
    """The result of checking a target."""

    files: int
    parts: int
    read_bytes: int
    unchecked_bytes: int
    """Bytes of copied parts without an MD5, if the original source files were not given or have changed."""
    damages: tuple[Damage, ...]
    recorded_source: str
    """Location of the source, as recorded in the manifest. For display; it is never opened."""
    portion: str = ""
    """Which ranks' portion of which whole was checked, in words; empty: all of it."""

    @property
    def intact(self) -> bool:
        """Whether no damage was found."""
        return not self.damages

    def __bool__(self) -> bool:
        """Whether the target is intact, so that ``assert check(target)`` works as expected."""
        return self.intact

    def _in_short(self) -> str:
        return self.verdict

    @property
    def verdict(self) -> str:
        """The result in one line."""
        whole = "intact, as far as it was checked" if self.unchecked_bytes else "intact"
        verdict = whole if self.intact else f"damaged: {counted(len(self.damages), 'finding')}"
        read, unchecked = readable_bytes(self.read_bytes), readable_bytes(self.unchecked_bytes)
        rest = f"; {unchecked} could not be checked" if self.unchecked_bytes else ""
        of = f"; {self.portion}" if self.portion else ""
        return f"{verdict}; {self.files} files, {self.parts} parts ({read} read){rest}{of}"

    def facts(self) -> Facts:
        """The result and the first damages."""
        shown = [(f"{damage.path}{damage.stretch}", damage.detail) for damage in self.damages[:SHOWN_DAMAGES]]
        return [("result", self.verdict), *shown]


def manifest_of(target: Source) -> Manifest:
    """The manifest of a target; a :class:`CheckpointError` if it has none."""
    sizes = target.sizes()
    if MANIFEST not in sizes:
        raise CheckpointError(
            f"{target.location}: has no {MANIFEST}; it was not made by this package, or is incomplete"
        )
    return parse_manifest(target.read(MANIFEST, 0, sizes[MANIFEST]), f"{target.location}/{MANIFEST}")


def check_target(
    target: Source, manifest: Manifest, source: Source | None, observe: Observer = ignore_events
) -> IntegrityReport:
    """Compare every part of a target with its manifest.

    A part copied by the storage has no checksum. It is compared with its MD5, if the store reported one, otherwise with
    the range of ``source`` that it was copied from, if that file has not changed. ``source`` comes from the user; the
    location recorded in the manifest is ignored. ``observe`` receives progress in bytes.
    """
    damages = names_and_sizes(target, manifest)
    wrong = {damage.path for damage in damages}
    usable = _usable(manifest, source)
    read = unchecked = 0
    observe(StepStarted("comparing with the manifest", sum(manifest.files.values())))
    for part in manifest.parts:
        if part.path in wrong:
            observe(Progress(part.nbytes))
            continue
        detail = _check_part(target, part, source if part.copied and part.copied[0] in usable else None)
        observe(Progress(part.nbytes))
        if detail is None:
            unchecked += part.nbytes
            continue
        read += part.nbytes
        if detail:
            damages.append(Damage(part.path, part.byte_offset, part.nbytes, detail))
    return IntegrityReport(
        len(manifest.files),
        len(manifest.parts),
        read,
        unchecked,
        tuple(damages),
        manifest.source.location,
        portion=manifest.portion,
    )


def check_target_quickly(target: Source, manifest: Manifest) -> tuple[Damage, ...]:
    """Damage that can be found without reading all of a target.

    Checks every name, every size, every ETag in the manifest, and every byte of small files without an ETag. A file
    whose ETag differs is read: a copy of the same bytes can have a new ETag.
    """
    damages = names_and_sizes(target, manifest)
    wrong = {damage.path for damage in damages}
    versions = target.versions()
    for part in manifest.parts:
        if part.path in wrong or not _is_worth_reading(part.path, manifest, versions.get(part.path, "")):
            continue
        if detail := _check_part(target, part, None):
            damages.append(Damage(part.path, part.byte_offset, part.nbytes, detail))
    return tuple(damages)


def _is_worth_reading(path: str, manifest: Manifest, version: str) -> bool:
    """Whether a quick check reads a file: its ETag has changed, or it has none and is small."""
    etag = manifest.etags.get(path)
    if etag is not None:
        return etag.strip('"') != version.strip('"')
    return manifest.files[path] <= SMALL_FILE_BYTES


def names_and_sizes(target: Source, manifest: Manifest) -> list[Damage]:
    """Files that are missing or have the wrong size, and files and folders that should not exist."""
    sizes = target.sizes()
    damages = [
        Damage(path, 0, size, _wrong_size(sizes.get(path), size))
        for path, size in manifest.files.items()
        if sizes.get(path) != size
    ]
    known = manifest.files.keys() | manifest.additional_files
    damages += [
        Damage(path, 0, size, "is not in the manifest: it was added later")
        for path, size in sorted(sizes.items())
        if path not in known
    ]
    damages += [
        Damage(f"{folder}/", 0, 0, "a folder that is not in the manifest: it was added later")
        for folder in target.folders
        if not is_stray(folder)
    ]
    if manifest.changed:
        damages.append(Damage(MANIFEST, 0, sizes.get(MANIFEST, 0), manifest.changed))
    return damages


def _wrong_size(found: int | None, wanted: int) -> str:
    """The message for a file with the wrong size in bytes; ``None`` if it is missing."""
    if found is None:
        return f"missing; the manifest says {wanted} bytes"
    word = "truncated" if found < wanted else "longer than it was"
    return f"{word}: has {found} bytes, the manifest says {wanted}"


def _usable(manifest: Manifest, source: Source | None) -> set[str]:
    """Files of the source that have not changed since they were converted."""
    if source is None:
        return set()
    sizes, versions = source.sizes(), source.versions()
    return {
        path
        for path, size in manifest.source.files.items()
        if path in sizes
        and sizes[path] == size
        and kept_by_copies(versions[path]) == kept_by_copies(manifest.source.versions.get(path, ""))
    }


def _check_part(target: ReadRange, part: ManifestPart, source: ReadRange | None) -> str | None:
    """The damage of a part; ``""`` if it is intact, ``None`` if it cannot be checked."""
    if part.checksum is not None:
        found = source_checksum(target, part.path, part.byte_offset, part.nbytes)
        return "" if found == part.checksum else f"{ALGORITHM} is {found}, the manifest says {part.checksum}"
    if part.copied is None:
        raise CheckpointError(
            f"{part.path}: the part at byte {part.byte_offset} has neither checksum nor source"
        )
    path, byte_offset, md5 = part.copied
    if md5:
        digest = hashlib.md5(usedforsecurity=False)
        for block in stretches(target, part.path, part.byte_offset, part.nbytes):
            digest.update(block)
        return "" if digest.hexdigest() == md5 else f"MD5 is {digest.hexdigest()}, the manifest says {md5}"
    if source is None:
        return None
    stored = stretches(target, part.path, part.byte_offset, part.nbytes)
    return _compare(stored, stretches(source, path, byte_offset, part.nbytes), part, path, byte_offset)


def _compare(
    stored: Iterator[memoryview],
    wanted: Iterator[memoryview],
    part: ManifestPart,
    path: str,
    byte_offset: int,
) -> str:
    """The first byte at which a part differs from its source; ``""`` if they are equal."""
    done = 0
    for a, b in zip(stored, wanted, strict=True):
        if a != b:
            at = next(i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y)
            return (
                f"byte {part.byte_offset + done + at} is {a[at]}, byte {byte_offset + done + at} of {path}, which it "
                f"was copied from, is {b[at]}"
            )
        done += len(a)
    return ""
