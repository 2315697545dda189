"""From the metadata and the data files of a dist checkpoint to its tensors.

The format says itself which box of which tensor each array is, so no rule of tensor parallelism is needed, only
what a key means. PaddleFormers spreads a checkpoint over folders with metadata each::

    model_state/      <key>                   parameters
    master_weight/    <key>.w_0
    optimizer_state/  <key>.moment1_0 ...
    ema_state/        <key>.w_0, <key>        averages of master weights, and of parameters without one

Auto-parallel training writes one folder of nested dicts whose paths the metadata tells: ``("model", key)`` and
``("optimizer", name)``, where ``name`` is an accumulator of a *parameter name*, or
``("optimizer", "master_weights", parameter name)``.

A tensor here is what the format calls one. For fused tensors that tensor parallelism cut part by part
(``[gate_0 | up_0 | gate_1 | up_1]``) this is not the logical tensor, and the metadata does not tell.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Final

import numpy as np

from paddle_reshard.pipeline.catalog import Catalog, File, check_catalog
from paddle_reshard.pipeline.errors import CheckpointError, CoverageError
from paddle_reshard.pipeline.geometry import Shape, padded
from paddle_reshard.pipeline.layouts.placement import ArrayKind, Placements, TensorCut
from paddle_reshard.pipeline.tensors import (
    ACCUMULATORS,
    EMA_MASTER_WEIGHT,
    EMA_PARAM,
    MASTER_WEIGHT,
    PARAM,
    DType,
    Tensor,
    dtype_named,
    dtype_of_code,
)
from paddle_reshard.storage.formats.dist_metadata import DistMetadata
from paddle_reshard.storage.formats.paddle_pickle import ArrayRef

FOLDERS: Final = ("model_state", "master_weight", "optimizer_state", "ema_state")
"""Folders of PaddleFormers (``paddleformers/utils/env.py:166-169``)."""

_STATES: Final = "|".join(sorted(ACCUMULATORS, key=len, reverse=True))
_ACCUMULATOR: Final = re.compile(rf"(?P<key>.+)\.(?P<state>{_STATES})_0")
_MASTER: Final = re.compile(r"(?P<key>.+)\.w_0")
_AUTO_ACCUMULATOR: Final = re.compile(
    rf"(?P<key>.+?)(?:\.dist)?(?:_fp32_master_\d+)?_(?P<state>{_STATES})_\d+"
)
_AUTO_MASTER: Final = re.compile(r"(?P<key>.+)_fp32_master_\d+")

Name = tuple[str, str]
"""``(key, state)`` of a tensor."""


@dataclass(frozen=True)
class FlexCheckpoint:
    """A dist checkpoint, understood."""

    catalog: Catalog
    """The tensors as the format has them."""
    by_parameter_name: frozenset[str]
    """Keys of ``catalog`` that are parameter names: optimizer states of auto-parallel training."""
    has_ema: bool


def read_flex(
    sizes: Mapping[str, int],
    metadata: Mapping[str, DistMetadata],
    arrays: Mapping[str, Mapping[str, ArrayRef]],
) -> FlexCheckpoint:
    """Understand a checkpoint from its metadata and the indexes of its data files.

    Parameters
    ----------
    sizes
        Path of every data file → size in bytes.
    metadata
        Path of every ``.metadata`` file → what it says.
    arrays
        Path of every data file → key → its array.

    Raises
    ------
    CheckpointError
        Naming the file, the tensor and the two values: two metadata files in one folder, a data file that is
        missing or that no metadata names, an array that is missing, left over, or of another shape or dtype than
        its metadata say, a key that means nothing known, a hole or an overlap.
    """
    _check_folders(metadata, arrays)
    cataloguer = _Cataloguer(sizes)
    for path in sorted(metadata):
        cataloguer.add_folder(path, metadata[path], arrays)
    catalog = cataloguer.catalog()
    check_catalog(catalog)
    states = {tensor.state for tensor in catalog.tensors}
    return FlexCheckpoint(
        catalog, frozenset(cataloguer.by_parameter_name), bool(states & {EMA_PARAM, EMA_MASTER_WEIGHT})
    )


def _folder(path: str) -> str:
    return path.rpartition("/")[0]


def _check_folders(
    metadata: Mapping[str, DistMetadata], arrays: Mapping[str, Mapping[str, ArrayRef]]
) -> None:
    """Every folder has one metadata file, and data files of one kind that it names."""
    by_folder: dict[str, str] = {}
    for path in sorted(metadata):
        other = by_folder.setdefault(_folder(path), path)
        if other != path:
            raise CheckpointError(f"{path}: {other} describes the same folder; one of them is stale")
    for path in sorted(arrays):
        described = by_folder.get(_folder(path))
        if described is None:
            raise CheckpointError(f"{path}: a data file in a folder without a .metadata file")
        # A rank whose tensors other ranks saved leaves an empty file, which the metadata do not name.
        if arrays[path] and path.rpartition("/")[2] not in metadata[described].files:
            raise CheckpointError(
                f"{path}: holds {len(arrays[path])} arrays, and {described} does not name it"
            )
    for folder in by_folder:
        kinds = {path.rpartition(".")[2] for path in arrays if _folder(path) == folder}
        if len(kinds) > 1:
            raise CheckpointError(f"{folder}: data files of several kinds, {', '.join(sorted(kinds))}")


def paddleformers_name(folder: str, key: str) -> Name | None:
    """What a key in a folder of PaddleFormers is; ``None``: nothing known.

    >>> paddleformers_name("optimizer_state", "model.norm.weight.beta1_pow_acc_0")
    ('model.norm.weight', 'beta1_pow_acc')
    >>> paddleformers_name("ema_state", "model.norm.weight.w_0")
    ('model.norm.weight', 'ema_master_weight')
    """
    if folder == "model_state":
        return key, PARAM
    master = _MASTER.fullmatch(key)
    if folder == "ema_state":
        return (master["key"], EMA_MASTER_WEIGHT) if master else (key, EMA_PARAM)
    if folder == "master_weight":
        return (master["key"], MASTER_WEIGHT) if master else None
    accumulator = _ACCUMULATOR.fullmatch(key)
    return (accumulator["key"], accumulator["state"]) if accumulator else None


def auto_parallel_name(path: tuple[str, ...]) -> Name | None:
    """What a path in the nested dict of auto-parallel training is; ``None``: nothing known.

    >>> auto_parallel_name(("optimizer", "linear_0.w_0.dist_moment1_0"))
    ('linear_0.w_0', 'moment1')
    >>> auto_parallel_name(("optimizer", "linear_0.w_0_fp32_master_0_moment1_0"))
    ('linear_0.w_0', 'moment1')
    >>> auto_parallel_name(("optimizer", "master_weights", "linear_0.w_0"))
    ('linear_0.w_0', 'master_weight')
    """
    if len(path) == 2 and path[0] == "model":
        return path[1], PARAM
    if len(path) == 3 and path[:2] == ("optimizer", "master_weights"):
        return path[2].removesuffix(".dist"), MASTER_WEIGHT
    if len(path) == 2 and path[0] == "optimizer":
        accumulator = _AUTO_ACCUMULATOR.fullmatch(path[1])
        if accumulator:
            return accumulator["key"], accumulator["state"]
        master = _AUTO_MASTER.fullmatch(path[1])
        return (master["key"], MASTER_WEIGHT) if master else None
    return None


class _Cataloguer:
    """Collects the tensors and arrays of all folders."""

    def __init__(self, sizes: Mapping[str, int]) -> None:
        self.files = [File(path, sizes[path]) for path in sorted(sizes)]
        self.file_index = {file.path: i for i, file in enumerate(self.files)}
        self.tensors: dict[Name, Tensor] = {}
        self.by_parameter_name: set[str] = set()
        self.placements = Placements()
        self.origins: list[Shape] = []
        """Where each array begins in its tensor, in elements."""

    def catalog(self) -> Catalog:
        fragments = self.placements.fragments()
        origins = np.array(self.origins, dtype=np.int64).reshape(len(self.origins), -1)
        if len(origins):
            fragments["offset"] += np.repeat(origins, self.placements.box_counts(), axis=0)
        return Catalog(tuple(self.tensors.values()), tuple(self.files), fragments, {})

    def add_folder(
        self, path: str, metadata: DistMetadata, arrays: Mapping[str, Mapping[str, ArrayRef]]
    ) -> None:
        folder = _folder(path)
        names = self._names(path, metadata)
        tensors = self._tensors(path, metadata, names, arrays)
        held = {file: dict(arrays.get(_joined(folder, file), {})) for file in metadata.files}
        pieces, copies = metadata.pieces.tolist(), defaultdict[int, int](int)
        for piece, file, _ in metadata.places.tolist():
            key, _, offset, local, _, flat = pieces[piece]
            stored = _joined(folder, metadata.files[file])
            if stored not in self.file_index:
                raise CheckpointError(f"{path}: names {metadata.files[file]}, which is missing")
            array = held[metadata.files[file]].pop(metadata.keys[key], None)
            if array is None:
                raise CoverageError(
                    metadata.keys[key], f"{path} places it in a file that does not hold it", (stored,)
                )
            index, tensor = tensors[key]
            flattened = metadata.shapes[flat] if flat >= 0 else None
            _check_array(tensor, array, metadata.shapes[local], flattened, stored)
            kind = self.placements.kind(
                ArrayKind(
                    metadata.shapes[local],
                    TensorCut(1, None),
                    tensor.dtype.itemsize,
                    (flattened[0], flattened[1]) if flattened else None,
                    array.fortran,
                )
            )
            replica = copies[piece]
            copies[piece] += 1
            self.placements.add(
                kind, 0, index, self.file_index[stored], array.byte_offset, tensor.dtype, replica
            )
            self.origins.append(padded(metadata.shapes[offset], 0))
        for file, left in held.items():
            if left:
                raise CoverageError(
                    next(iter(left)), f"a file holds it, and {path} does not say so", (_joined(folder, file),)
                )

    def _names(self, path: str, metadata: DistMetadata) -> list[Name]:
        """What each key is."""
        folder = _folder(path).rpartition("/")[2]
        names = []
        for key in metadata.keys:
            nested = metadata.flat_mapping.get(key, (key,))
            if ".".join(nested) != key:
                raise CheckpointError(f"{path}: {key} is said to be {nested} in the nested dict")
            name = paddleformers_name(folder, key) if folder in FOLDERS else auto_parallel_name(nested)
            if name is None:
                raise CheckpointError(f"{path}: {key} is no parameter and no optimizer state that is known")
            if folder not in FOLDERS and name[1] != PARAM:
                self.by_parameter_name.add(name[0])
            names.append(name)
        return names

    def _tensors(
        self,
        path: str,
        metadata: DistMetadata,
        names: list[Name],
        arrays: Mapping[str, Mapping[str, ArrayRef]],
    ) -> list[tuple[int, Tensor]]:
        """Index and tensor of each key."""
        shapes = _global_shapes(path, metadata)
        dtypes = self._dtypes(path, metadata, arrays)
        found = []
        for (key, state), dtype, shape in zip(names, dtypes, shapes, strict=True):
            tensor = Tensor(key, state, dtype, shape)
            if (key, state) in self.tensors:
                raise CoverageError(tensor.label, "two keys mean the same tensor", (path,))
            found.append((len(self.tensors), tensor))
            self.tensors[key, state] = tensor
        return found

    def _dtypes(
        self, path: str, metadata: DistMetadata, arrays: Mapping[str, Mapping[str, ArrayRef]]
    ) -> list[DType]:
        """The dtype of each key; up to Paddle 2.6 only the arrays tell it."""
        said: list[set[DType]] = [set() for _ in metadata.keys]
        pieces = metadata.pieces.tolist()
        for key, dtype, *_ in pieces:
            if dtype >= 0:
                said[key].add(dtype_named(metadata.dtypes[dtype]))
        for piece, file, _ in metadata.places.tolist():
            key, dtype, *_ = pieces[piece]
            stored = _joined(_folder(path), metadata.files[file])
            array = arrays.get(stored, {}).get(metadata.keys[key])
            if dtype < 0 and array is not None:
                said[key].add(dtype_of_code(array.dtype, stored))
        for key, dtypes in zip(metadata.keys, said, strict=True):
            if len(dtypes) != 1:
                told = ", ".join(sorted(dtype.name for dtype in dtypes)) or "nothing"
                raise CoverageError(key, f"its pieces are of one dtype, these say {told}", (path,))
        return [dtypes.pop() for dtypes in said]


def _joined(folder: str, file: str) -> str:
    return f"{folder}/{file}" if folder else file


def _global_shapes(path: str, metadata: DistMetadata) -> list[Shape]:
    """The whole shape of each key; up to Paddle 3.0 the metadata do not tell it, the pieces do."""
    said: list[set[Shape]] = [set() for _ in metadata.keys]
    reached: list[Shape | None] = [None] * len(metadata.keys)
    for key, _, offset, local, whole, _ in metadata.pieces.tolist():
        if whole >= 0:
            said[key].add(metadata.shapes[whole])
            continue
        end = tuple(o + n for o, n in zip(metadata.shapes[offset], metadata.shapes[local], strict=True))
        before = reached[key]
        if before is not None and len(before) != len(end):
            raise CoverageError(metadata.keys[key], "its pieces differ in their number of dims", (path,))
        reached[key] = end if before is None else tuple(map(max, before, end))
    for shapes, end_or_none in zip(said, reached, strict=True):
        if end_or_none is not None:
            shapes.add(end_or_none)
    for key, shapes in zip(metadata.keys, said, strict=True):
        if len(shapes) != 1:
            raise CoverageError(
                key, f"its pieces are of {len(shapes)} whole shapes: {sorted(shapes)[:4]}", (path,)
            )
    return [shapes.pop() for shapes in said]


def _check_array(tensor: Tensor, array: ArrayRef, local: Shape, flat: Shape | None, stored: str) -> None:
    wanted = local if flat is None else (flat[1] - flat[0],)
    a_number = flat is None and prod(array.shape) == prod(local) == 1  # stored with one dim or none
    if array.shape != wanted and not a_number:
        raise CoverageError(tensor.label, f"shape {array.shape}, its metadata say {wanted}", (stored,))
    if array.dtype != tensor.dtype.code:
        raise CoverageError(
            tensor.label, f"stored as {array.dtype}, its metadata say {tensor.dtype.name}", (stored,)
        )
