"""The versions in a folder, and the tensors of one of them: those of a full version, changed by each delta after it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from paddle_reshard.pipeline.core.errors import CheckpointError
from paddle_reshard.pipeline.core.file_names import MANIFEST, WEIGHT_INDEX
from paddle_reshard.pipeline.versions.coding import WINDOW_BYTES, Change, Window, open_change
from paddle_reshard.pipeline.versions.form import (
    CHECKSUMS,
    LATEST,
    DeltaForm,
    delta_form,
    pointed_version,
    version_name,
    version_number,
)
from paddle_reshard.storage.documents.manifest import own_manifest
from paddle_reshard.storage.files.paddle_pickle import ArrayRef
from paddle_reshard.storage.files.safetensors import SafetensorsPayload, parse_index, parse_safetensors
from paddle_reshard.storage.listing import CheckpointRoot
from paddle_reshard.storage.locate import Access, open_source
from paddle_reshard.storage.store import ReadRange, Source

SAFETENSORS = ".safetensors"
_READ_BYTES = 1 << 20
"""How much of a frame is read at a time."""


def numbers_of(root: CheckpointRoot) -> list[int]:
    """The versions in a folder, ascending."""
    return sorted(n for name in root.folders() if (n := version_number(name)) is not None)


def manifest_of(root: CheckpointRoot, number: int) -> dict[str, Any]:
    """The manifest of a version; empty without one of ours."""
    return own_manifest(root.read(f"{version_name(number)}/{MANIFEST}")) or {}


def newest_version(root: CheckpointRoot) -> int | None:
    """The version that :data:`~.form.LATEST` names, or without it the highest; ``None`` if there is none."""
    numbers = numbers_of(root)
    text = root.read(LATEST)
    if text is None:
        return numbers[-1] if numbers else None
    number = pointed_version(text, root.at(LATEST))
    if number not in numbers:
        raise CheckpointError(f"{root.at(LATEST)}: names {version_name(number)}, which is not there")
    return number


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor is: its file, and its bytes and shape in it."""

    path: str
    array: ArrayRef
    tag: str
    """Its dtype in the header."""

    @property
    def kind(self) -> tuple[str, str, tuple[int, ...]]:
        """File, dtype and shape of the tensor, which all versions of a chain have in common."""
        return self.path, self.tag, self.array.shape


@dataclass(frozen=True, slots=True)
class StoredModel:
    """The tensors of a folder of safetensors files."""

    source: Source
    places: Mapping[str, Place]
    """Key → place; files in the order of their names, tensors in the order of their bytes."""
    metadata: Mapping[str, Mapping[str, str]]
    """File → ``__metadata__`` of its header."""
    index: Mapping[str, object]
    """``metadata`` of the index; empty without one."""

    @property
    def others(self) -> dict[str, int]:
        """The files that hold no tensors, without manifest, and their sizes in bytes."""
        return {
            path: size
            for path, size in self.source.sizes().items()
            if not path.endswith(SAFETENSORS) and path != MANIFEST
        }

    def windows(self, key: str) -> Iterator[Window]:
        """The bytes of a tensor, in pieces of :data:`~.coding.WINDOW_BYTES`."""
        place = self.places[key]
        return self.stretch(place.path, place.array.byte_offset, place.array.nbytes)

    def stretch(self, path: str, start: int, nbytes: int) -> Iterator[Window]:
        """Bytes of a file, in such pieces."""
        for at in range(start, start + nbytes, WINDOW_BYTES):
            window = np.empty(min(WINDOW_BYTES, start + nbytes - at), np.uint8)
            self.source.read_into(path, at, window.data)
            yield window


def read_model(source: Source) -> StoredModel:
    """Read the headers of all safetensors files in a folder, and the index, which must agree with them."""
    places: dict[str, Place] = {}
    metadata: dict[str, Mapping[str, str]] = {}
    for path, size in sorted(source.sizes().items()):
        if path.endswith(SAFETENSORS):
            payload = _read_header(source, path, size)
            metadata[path] = payload.metadata
            for key, array in payload.tensors.items():
                if key in places:
                    raise CheckpointError(f"{source.location}: {key} is in {places[key].path} and in {path}")
                places[key] = Place(path, array, payload.tags[key])
    return StoredModel(source, places, metadata, _read_index(source, places))


def _read_header(source: Source, path: str, size_bytes: int) -> SafetensorsPayload:
    def read(start: int, nbytes: int) -> bytes:
        return source.read(path, start, nbytes)

    return parse_safetensors(read, size_bytes, f"{source.location}/{path}", fp8=True)


def _read_index(source: Source, places: Mapping[str, Place]) -> Mapping[str, object]:
    size = source.sizes().get(WEIGHT_INDEX)
    if size is None:
        return {}
    where = f"{source.location}/{WEIGHT_INDEX}"
    index = parse_index(source.read(WEIGHT_INDEX, 0, size), where)
    for key in sorted(index.weight_map.keys() ^ places.keys()):
        there = (
            "is in no file" if key in index.weight_map else f"is in {places[key].path} and not in the index"
        )
        raise CheckpointError(f"{where}: {key} {there}")
    return index.metadata


@dataclass(frozen=True, slots=True)
class Delta:
    """A version that holds the changes since the version before."""

    form: DeltaForm
    model: StoredModel
    """Its frames, as one-dimensional tensors of bytes."""

    def checksum(self, key: str) -> str:
        """The checksum of the new bytes of a tensor that changed."""
        stated = self.model.metadata[self.model.places[key].path].get(key)
        if stated is None:
            raise CheckpointError(f"{self.where(key)}: __metadata__ has no checksum of it")
        return stated

    def where(self, key: str) -> str:
        """The location of a frame, for messages."""
        return f"{self.model.source.location}/{self.model.places[key].path}: {key}"

    def open(self, key: str, nbytes: int) -> Change:
        """The change of a tensor of this size."""
        place = self.model.places[key]

        return open_change(
            self.form.encoding, lambda: _Stored(self.model.source, place), nbytes, self.where(key)
        )


class _Stored:
    """The bytes of a tensor in a store, read from first to last."""

    def __init__(self, source: ReadRange, place: Place) -> None:
        self._source, self._path = source, place.path
        self._at, self._end = place.array.byte_offset, place.array.byte_offset + place.array.nbytes

    def read(self, size: int = -1) -> bytes:
        """The next bytes."""
        count = min(self._end - self._at, _READ_BYTES if size < 0 else size)
        data = self._source.read(self._path, self._at, count) if count else b""
        self._at += count
        return data


@dataclass(frozen=True, slots=True)
class Chain:
    """A version: a base, and the deltas that lead from it."""

    number: int
    base: StoredModel
    deltas: tuple[Delta, ...]

    def changed(self, key: str) -> tuple[Delta, ...]:
        """The deltas that change a tensor."""
        return tuple(delta for delta in self.deltas if key in delta.model.places)

    def windows(self, key: str) -> Iterator[Window]:
        """The bytes of a tensor in this version, in pieces of :data:`~.coding.WINDOW_BYTES`.

        Raises
        ------
        CheckpointError
            If a frame is damaged, or the bytes do not have the checksum that the last delta states. Then what was
            yielded before is wrong.
        """
        deltas = self.changed(key)
        hasher = CHECKSUMS[deltas[-1].form.checksum]() if deltas else None
        changes = [delta.open(key, self.base.places[key].array.nbytes) for delta in deltas]
        for window in self.base.windows(key):
            for change in changes:
                change.apply(window)
            if hasher is not None:
                hasher.update(window.data)
            yield window
        for change in changes:
            change.end()
        if hasher is not None and hasher.hexdigest() != deltas[-1].checksum(key):
            raise CheckpointError(
                f"{deltas[-1].where(key)}: {deltas[-1].form.checksum} of the new bytes is {hasher.hexdigest()}, and "
                f"the delta states {deltas[-1].checksum(key)}: it is damaged, or {self.base.source.location} is not "
                "what it was made from"
            )


@dataclass(frozen=True, slots=True)
class Versions:
    """The versions in a folder."""

    root: CheckpointRoot
    access: Access

    def open(self, number: int) -> StoredModel:
        """Read the headers of a version."""
        return read_model(open_source(self.root.at(version_name(number)), *self.access))

    def chain(self, number: int, start: tuple[int, StoredModel] | None = None) -> Chain:
        """The chain of a version: a full version, or the one to ``start`` from, and the deltas after it."""
        numbers = numbers_of(self.root)
        deltas: list[Delta] = []
        for at in range(number, 0, -1):
            if start is not None and at == start[0]:
                return _chain(number, start[1], deltas)
            if at not in numbers:
                raise CheckpointError(
                    f"{self.root.at(version_name(at))}: is missing, and {version_name(number)} is made from it"
                )
            model = self.open(at)
            form = delta_form(model.index, at, f"{model.source.location}/{WEIGHT_INDEX}")
            if form is None:
                return _chain(number, model, deltas)
            deltas.append(Delta(form, model))
        raise CheckpointError(
            f"{self.root.location}: {version_name(1)} is a delta of the model that the engine has begun with, which no "
            "version holds; publish a full version"
        )


def _chain(number: int, base: StoredModel, newest_first: Sequence[Delta]) -> Chain:
    """A chain, after its deltas have been compared with its base."""
    for delta in newest_first:
        for key in delta.model.places:
            if key not in base.places:
                raise CheckpointError(f"{delta.where(key)}: {base.source.location} has no such tensor")
            delta.checksum(key)
    return Chain(number, base, tuple(reversed(newest_first)))
