"""Build a catalog from the metadata and data files of a dist checkpoint.

The metadata state which box of which tensor each array is, but not what a key means (:mod:`.names`), nor the order of
fused parts: with two tp ranks a fused ``[gate | up]`` is stored as ``[gate_0 | up_0 | gate_1 | up_1]``, which shows
only in the number of blocks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Final

import numpy as np

from paddle_reshard.pipeline.core.catalog import Catalog, File, check_catalog
from paddle_reshard.pipeline.core.errors import CheckpointError, CoverageError, UnsupportedError
from paddle_reshard.pipeline.core.geometry import Shape, padded
from paddle_reshard.pipeline.core.tensors import (
    PARAM,
    DType,
    Tensor,
    dtype_named,
    dtype_of_code,
    is_per_parameter,
)
from paddle_reshard.pipeline.formats.flex.boxes import Box
from paddle_reshard.pipeline.formats.flex.names import (
    FOLDERS,
    Name,
    auto_parallel_name,
    folder_of,
    is_state_dict,
    paddleformers_name,
)
from paddle_reshard.pipeline.formats.reading import TensorCollector, not_a_number
from paddle_reshard.pipeline.formats.writing import UNCUT
from paddle_reshard.pipeline.model.placement import TensorCut, in_words
from paddle_reshard.storage.files.dist_metadata import Columns, DistMetadata
from paddle_reshard.storage.files.paddle_pickle import ArrayRef

_FSDP_BUFFER: Final = "fuse_params_"
Names = Mapping[str, Sequence[Name]]
"""Path of a metadata file → ``(key, state)`` for each of its keys, in their order."""
Fused = tuple[int, tuple[int, ...]]
"""The dim along which parts are fused, and the ratio of their extents."""


@dataclass(frozen=True)
class DataFile:
    """The contents of a data file."""

    size_bytes: int
    arrays: Mapping[str, ArrayRef]
    parameter_names: Mapping[str, str]
    """Key → name of the saved tensor; empty if the file has no names."""


def not_fused(key: str) -> Fused | None:
    """For checkpoints whose tensors are stored in their logical order: nothing is fused."""
    return None


def read_names(metadata: Mapping[str, DistMetadata]) -> dict[str, list[Name]]:
    """The ``(key, state)`` of every stored key; in auto-parallel checkpoints, keys of states are parameter names.

    Refused are unknown keys, two keys that mean the same, and two metadata files in a folder.
    """
    by_folder: dict[str, str] = {}
    for path in sorted(metadata):
        other = by_folder.setdefault(folder_of(path), path)
        if other != path:
            raise CheckpointError(f"{path}: {other} describes the same folder; one of them is stale")
    names_of = {path: [_name(path, key, metadata[path]) for key in metadata[path].keys] for path in metadata}
    seen: dict[Name, tuple[str, str]] = {}
    for path, names in names_of.items():
        for key, name in zip(metadata[path].keys, names, strict=True):
            other, earlier = seen.setdefault(name, (path, key))
            if (other, earlier) != (path, key):
                raise CoverageError(
                    f"{name[0]} ({name[1]})", f"two keys mean it, {earlier} and {key}", (other, path)
                )
    return names_of


def _name(path: str, key: str, metadata: DistMetadata) -> Name:
    folder = folder_of(path).rpartition("/")[2]
    if key.startswith(_FSDP_BUFFER):
        raise UnsupportedError(
            f"{path}: {key} is a buffer into which FSDP (sharding fsdp) fuses parameters; no file tells which. Load it "
            "with the job that wrote it, and save it with another sharding strategy"
        )
    nested = metadata.flat_mapping.get(key, (key,))
    if ".".join(nested) != key:
        raise CheckpointError(
            f"{path}: {key} has the path {nested} in the nested dict, which does not spell the key"
        )
    if is_state_dict(path, metadata.flat_mapping.values()):
        return key, PARAM
    name = paddleformers_name(folder, key) if folder in FOLDERS else auto_parallel_name(nested)
    if name is None:
        raise CheckpointError(f"{path}: {key} is not a known parameter or optimizer state")
    return name


def catalog_flex(
    metadata: Mapping[str, DistMetadata],
    files: Mapping[str, DataFile],
    names: Names,
    fused: Callable[[str], Fused | None],
) -> tuple[Catalog, dict[str, int]]:
    """Build the catalog, and check that every array is as described and that they cover every tensor once.

    The second result: key of a tensor with fused parts → number of blocks in which it is stored.

    ``metadata`` and ``files`` are the contents of all ``.metadata`` files and of all data files, by path. Keys with the
    same name in ``names`` hold copies of a tensor. ``fused`` returns what is fused in the tensor of a key, or ``None``;
    blocks of fused parts are put in logical order. A ``CheckpointError`` names the file, the tensor and the two values.
    """
    _check_folders(metadata, files)
    builder = _FlexCatalogBuilder(files, fused)
    for path in sorted(metadata):
        builder.add_folder(path, metadata[path], names[path])
    catalog = builder.catalog()
    check_catalog(catalog)
    return catalog, builder.blocks


def _check_folders(metadata: Mapping[str, DistMetadata], files: Mapping[str, DataFile]) -> None:
    """Every folder has a metadata file, and data files of one kind that it names."""
    by_folder = {folder_of(path): path for path in metadata}
    for path, file in sorted(files.items()):
        described = by_folder.get(folder_of(path))
        if described is None:
            raise CheckpointError(f"{path}: a data file in a folder without a .metadata file")
        # A rank whose tensors were all saved by other ranks writes an empty file, which the metadata do not list.
        if file.arrays and path.rpartition("/")[2] not in metadata[described].files:
            raise CheckpointError(
                f"{path}: holds {len(file.arrays)} arrays, and {described} does not name it"
            )
    for folder in by_folder:
        kinds = {path.rpartition(".")[2] for path in files if folder_of(path) == folder}
        if len(kinds) > 1:
            raise CheckpointError(f"{folder}: data files of several kinds, {', '.join(sorted(kinds))}")


class _FlexCatalogBuilder:
    """Adds the arrays of all folders to the tensors that their metadata describe."""

    def __init__(self, files: Mapping[str, DataFile], fused: Callable[[str], Fused | None]) -> None:
        self.stored = TensorCollector(File(path, files[path].size_bytes) for path in sorted(files))
        self.files, self.fused = files, fused
        self.blocks: dict[str, int] = {}
        """Key of a tensor with fused parts → number of blocks in which it is stored."""
        self.copies = defaultdict[int, int](int)
        """Tensor → number of copies so far."""
        self.origins: list[Shape] = []
        """Offset of each array in its tensor, in elements; 0 along a dim that its cut accounts for."""

    def catalog(self) -> Catalog:
        fragments = self.stored.placements.fragments()
        origins = np.array(self.origins, dtype=np.int64).reshape(len(self.origins), -1)
        if len(origins):
            origin = np.repeat(origins, self.stored.placements.box_counts(), axis=0)
            fragments["offset"] = fragments["offset"] + origin
        return Catalog(self.stored.tensors, self.stored.files, fragments, {})

    def add_folder(self, path: str, metadata: DistMetadata, names: Sequence[Name]) -> None:
        tensors = self._tensors(path, metadata, names)
        bounds = pairwise(np.searchsorted(metadata.pieces["key"], range(len(metadata.keys) + 1)).tolist())
        cuts = [
            self._cut(tensor, metadata, metadata.pieces[start:stop])
            for (_, tensor), (start, stop) in zip(tensors, bounds, strict=True)
        ]
        first_copy = self._number_copies(metadata, [index for index, _ in tensors])
        paths = [_beside(path, file) for file in metadata.files]
        held = [dict(self.files[file].arrays) if file in self.files else {} for file in paths]
        pieces, copies = metadata.pieces.tolist(), defaultdict[int, int](int)
        for piece, file, _ in metadata.locations.tolist():
            key, box = pieces[piece][0], Box.of(metadata, pieces[piece])
            stored = paths[file]
            if stored not in self.files:
                raise CheckpointError(f"{path}: names {metadata.files[file]}, which is missing")
            array = held[file].pop(box.key, None)
            if array is None:
                raise CoverageError(box.key, f"{path} lists it in a file that does not hold it", (stored,))
            index, tensor = tensors[key]
            _check_array(tensor, array, box, stored)
            self._place(index, tensor, cuts[key], box, array, stored, first_copy[key] + copies[piece])
            copies[piece] += 1
        for stored, unlisted in zip(paths, held, strict=True):
            for key in unlisted:
                raise CoverageError(key, f"a file holds it, but {path} does not list it", (stored,))

    def _place(
        self, index: int, tensor: Tensor, cut: TensorCut, box: Box, array: ArrayRef, path: str, copy: int
    ) -> None:
        """Place an array in its tensor, whose index is given. Blocks of fused parts are told by their rank."""
        origin, rank = box.global_offset, 0
        if cut.dim is not None:
            rank = origin[cut.dim] // box.local_shape[cut.dim]
            origin = (*origin[: cut.dim], 0, *origin[cut.dim + 1 :])
        kind = box.kind(cut, tensor.dtype.itemsize, array.axes)
        self.stored.place(index, kind, tensor.dtype, rank, copy, path, array.byte_offset)
        self.origins.append(padded(origin, 0))

    def _cut(self, tensor: Tensor, metadata: DistMetadata, pieces: Columns) -> TensorCut:
        """How tensor parallelism cut the fused parts of a tensor; not at all if it is stored as a single block.

        A dim of 12 elements with shares ``(1, 1)`` that is stored in two blocks of 6 is
        ``[gate 0:3 | up 0:3 | gate 3:6 | up 3:6]``.
        """
        fused = None if is_per_parameter(tensor.state) else self.fused(tensor.key)
        if fused is None:
            return UNCUT
        dim, shares = fused
        if len(tensor.global_shape) <= dim:
            raise CoverageError(
                tensor.label,
                f"shape {tensor.global_shape}, but {len(shares)} parts are fused along dim {dim}",
            )
        starts = {metadata.shapes[offset][dim] for offset in pieces["global_offset"].tolist()}
        self.blocks[tensor.key] = len(starts)
        if len(starts) == 1:
            return UNCUT
        extents = {metadata.shapes[local][dim] for local in pieces["local_shape"].tolist()}
        block, rest = divmod(tensor.global_shape[dim], len(starts))
        if (
            rest
            or not block
            or block % sum(shares)
            or extents != {block}
            or any(start % block for start in starts)
        ):
            raise CoverageError(
                tensor.label,
                f"{in_words(shares)} lie along dim {dim}; its pieces begin at {sorted(starts)[:8]} and have "
                f"extents {sorted(extents)[:8]} there: not {len(starts)} equal blocks of these parts each",
            )
        return TensorCut(len(starts), dim, shares)

    def _number_copies(self, metadata: DistMetadata, tensors: Sequence[int]) -> list[int]:
        """Number of each key's first copy; keys with the same name are numbered in order."""
        of_piece = np.bincount(metadata.locations["piece"], minlength=len(metadata.pieces))
        most = np.zeros(len(metadata.keys), dtype=np.int64)
        np.maximum.at(most, metadata.pieces["key"], of_piece)
        first = []
        for tensor, copies in zip(tensors, most.tolist(), strict=True):
            first.append(self.copies[tensor])
            self.copies[tensor] += copies
        return first

    def _tensors(self, path: str, metadata: DistMetadata, names: Sequence[Name]) -> list[tuple[int, Tensor]]:
        """Index and tensor of each key."""
        shapes, dtypes = _global_shapes(path, metadata), _dtypes(path, metadata, self.files)
        tensors = []
        for (key, state), dtype, shape in zip(names, dtypes, shapes, strict=True):
            if is_per_parameter(state):
                if prod(shape) != 1:
                    raise not_a_number(key, state, shape, path)
                shape = (1,)
            index = self.stored.tensor(key, state, dtype, shape, path)
            tensors.append((index, self.stored.tensors[index]))
        return tensors


def _beside(path: str, file: str) -> str:
    """The path of a file in the folder of another."""
    return f"{path.rpartition('/')[0]}/{file}".removeprefix("/")


def _dtypes(path: str, metadata: DistMetadata, files: Mapping[str, DataFile]) -> list[DType]:
    """The dtype of each key; up to Paddle 2.6 it is not in the metadata, only in the arrays."""
    dtypes_of_keys: list[set[DType]] = [set() for _ in metadata.keys]
    pieces = metadata.pieces.tolist()
    for key, dtype, *_ in pieces:
        if dtype >= 0:
            dtypes_of_keys[key].add(dtype_named(metadata.dtypes[dtype]))
    without_dtype = metadata.locations[metadata.pieces["dtype"][metadata.locations["piece"]] < 0]
    for piece, file, _ in without_dtype.tolist():
        key, stored = pieces[piece][0], _beside(path, metadata.files[file])
        array = files[stored].arrays.get(metadata.keys[key]) if stored in files else None
        if array is not None:
            dtypes_of_keys[key].add(dtype_of_code(array.dtype, stored))
    for key, dtypes in zip(metadata.keys, dtypes_of_keys, strict=True):
        if len(dtypes) != 1:
            names = ", ".join(sorted(dtype.name for dtype in dtypes)) or "none"
            raise CoverageError(key, f"its pieces must have a single dtype; found {names}", (path,))
    return [dtypes.pop() for dtypes in dtypes_of_keys]


def _global_shapes(path: str, metadata: DistMetadata) -> list[Shape]:
    """The global shape of each key; up to Paddle 3.0 it is not in the metadata, but follows from the pieces."""
    shapes_of_keys: list[set[Shape]] = [set() for _ in metadata.keys]
    reached: dict[int, Shape] = {}
    for key, _, offset, local, whole, _ in metadata.pieces.tolist():
        if whole >= 0:
            shapes_of_keys[key].add(metadata.shapes[whole])
            continue
        end = tuple(o + n for o, n in zip(metadata.shapes[offset], metadata.shapes[local], strict=True))
        before = reached.get(key, end)
        if len(before) != len(end):
            raise CoverageError(metadata.keys[key], "its pieces differ in their number of dims", (path,))
        reached[key] = tuple(map(max, before, end))
    for key, end in reached.items():
        shapes_of_keys[key].add(end)
    for name, shapes in zip(metadata.keys, shapes_of_keys, strict=True):
        if len(shapes) != 1:
            raise CoverageError(
                name, f"its pieces have {len(shapes)} different global shapes: {sorted(shapes)[:4]}", (path,)
            )
    return [shapes.pop() for shapes in shapes_of_keys]


def _check_array(tensor: Tensor, array: ArrayRef, box: Box, stored: str) -> None:
    wanted = box.shape
    # Stored with one dim or none.
    a_number = box.flattened_range is None and prod(array.shape) == prod(wanted) == 1
    if array.shape != wanted and not a_number:
        raise CoverageError(tensor.label, f"shape {array.shape}, its metadata say {wanted}", (stored,))
    if array.dtype != tensor.dtype.code:
        raise CoverageError(
            tensor.label, f"stored as {array.dtype}, its metadata say {tensor.dtype.name}", (stored,)
        )
