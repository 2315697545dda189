"""Is a target still what its manifest says? Every byte is read, nothing else is asked."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

from paddle_reshard.pipeline.convert.manifest import Manifest, ManifestPart
from paddle_reshard.pipeline.core.errors import CheckpointError
from paddle_reshard.pipeline.core.events import Observer, Progress, StepStarted, ignore_events
from paddle_reshard.pipeline.core.file_names import MANIFEST
from paddle_reshard.pipeline.core.shown import Facts, Shown, readable_bytes
from paddle_reshard.storage.checksum import ALGORITHM, source_checksum, stretches
from paddle_reshard.storage.store import ReadRange, Source

SMALL_FILE_BYTES = 1 << 20
"""A file of at most this size is read where all are only looked at."""
SHOWN_DAMAGES = 20


@dataclass(frozen=True, slots=True)
class Damage:
    """A part of a target that is not what its manifest says, or a file or folder that it does not list."""

    path: str
    byte_offset: int
    nbytes: int
    detail: str

    @property
    def stretch(self) -> str:
        """Which bytes of the file, where that is not all of it."""
        return f", bytes {self.byte_offset} to {self.byte_offset + self.nbytes}" if self.nbytes else ""


@dataclass(frozen=True, slots=True, repr=False)
class IntegrityReport(Shown):
    """What was found in a target."""

    files: int
    parts: int
    read_bytes: int
    unchecked_bytes: int
    """Of parts that the storage copied, where it told no MD5 and no source was given that still has these files."""
    damages: tuple[Damage, ...]
    recorded_source: str
    """Where the manifest says that the source was. Text to show, never to be opened."""

    @property
    def intact(self) -> bool:
        """Whether nothing is wrong."""
        return not self.damages

    def __bool__(self) -> bool:
        """The report is true if the target is intact, so that ``assert check(target)`` means what it says."""
        return self.intact

    def _in_short(self) -> str:
        return self.verdict

    @property
    def verdict(self) -> str:
        """What came out, in a line."""
        whole = "intact, as far as it was checked" if self.unchecked_bytes else "intact"
        verdict = whole if self.intact else f"damaged: {len(self.damages)} findings"
        read, unchecked = readable_bytes(self.read_bytes), readable_bytes(self.unchecked_bytes)
        rest = f"; {unchecked} could not be checked" if self.unchecked_bytes else ""
        return f"{verdict}; {self.files} files, {self.parts} parts ({read} read){rest}"

    def facts(self) -> Facts:
        """Whether it is intact, and the first places where it is not."""
        shown = [(f"{one.path}{one.stretch}", one.detail) for one in self.damages[:SHOWN_DAMAGES]]
        return [("result", self.verdict), *shown]


def check_target(
    target: Source, manifest: Manifest, source: Source | None, observe: Observer = ignore_events
) -> IntegrityReport:
    """Compare every part of a target with its manifest.

    A part that the storage copied has no checksum. It is compared with the MD5 that the store told, else with the range
    of ``source`` that it was copied from, if that is still the same file. ``source`` is what a user has named; what the
    manifest says of its place is not looked at. ``observe`` is told how many bytes are done.
    """
    damages = _names_and_sizes(target, manifest)
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
        len(manifest.files), len(manifest.parts), read, unchecked, tuple(damages), manifest.source
    )


def check_target_quickly(target: Source, manifest: Manifest) -> tuple[Damage, ...]:
    """What is seen to be wrong with a target without reading all of it.

    Every name and size is looked at, every ETag that the manifest holds, and of small files every byte. A file with
    another ETag is read: a store gives a copy of the same bytes another one.
    """
    damages = _names_and_sizes(target, manifest)
    wrong = {damage.path for damage in damages}
    versions = target.versions()
    for part in manifest.parts:
        if part.path in wrong or not _is_worth_reading(part.path, manifest, versions.get(part.path, "")):
            continue
        if detail := _check_part(target, part, None):
            damages.append(Damage(part.path, part.byte_offset, part.nbytes, detail))
    return tuple(damages)


def _is_worth_reading(path: str, manifest: Manifest, version: str) -> bool:
    """Whether a glance reads a file: no ETag vouches for it, and it is small or has another ETag than it had."""
    etag = manifest.etags.get(path)
    if etag is not None:
        return etag.strip('"') != version.strip('"')
    return manifest.files[path] <= SMALL_FILE_BYTES


def _names_and_sizes(target: Source, manifest: Manifest) -> list[Damage]:
    """What is missing, has another size, or lies there and should not."""
    sizes = target.sizes()
    damages = [
        Damage(path, 0, size, _wrong_size(sizes.get(path), size))
        for path, size in manifest.files.items()
        if sizes.get(path) != size
    ]
    known = manifest.files.keys() | manifest.beside
    damages += [
        Damage(path, 0, size, "is not in the manifest: somebody put it here")
        for path, size in sorted(sizes.items())
        if path not in known
    ]
    damages += [
        Damage(f"{folder}/", 0, 0, "a folder that is not in the manifest: somebody put it here")
        for folder in target.folders
    ]
    if manifest.changed:
        damages.append(Damage(MANIFEST, 0, sizes.get(MANIFEST, 0), manifest.changed))
    return damages


def _wrong_size(found: int | None, wanted: int) -> str:
    """What is said of a file whose size is not the manifest's, in bytes; ``None``: it is not there."""
    if found is None:
        return f"missing; the manifest says {wanted} bytes"
    word = "truncated" if found < wanted else "longer than it was"
    return f"{word}: has {found} bytes, the manifest says {wanted}"


def _usable(manifest: Manifest, source: Source | None) -> set[str]:
    """Files of the source that are what they were when they were converted."""
    if source is None:
        return set()
    sizes, versions = source.sizes(), source.versions()
    return {
        path
        for path, size in manifest.source_files.items()
        if path in sizes and (sizes[path], versions[path]) == (size, manifest.source_versions.get(path))
    }


def _check_part(target: ReadRange, part: ManifestPart, source: ReadRange | None) -> str | None:
    """What is wrong with a part, ``""`` if nothing is, ``None`` if nobody can tell."""
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
    there = stretches(target, part.path, part.byte_offset, part.nbytes)
    return _compare(there, stretches(source, path, byte_offset, part.nbytes), part, path, byte_offset)


def _compare(
    there: Iterator[memoryview], wanted: Iterator[memoryview], part: ManifestPart, path: str, byte_offset: int
) -> str:
    """Where two stretches differ first, ``""`` if nowhere."""
    done = 0
    for one, two in zip(there, wanted, strict=True):
        if one != two:
            at = next(i for i, (a, b) in enumerate(zip(one, two, strict=True)) if a != b)
            return (
                f"byte {part.byte_offset + done + at} is {one[at]}, byte {byte_offset + done + at} of {path}, which it "
                f"was copied from, is {two[at]}"
            )
        done += len(one)
    return ""
