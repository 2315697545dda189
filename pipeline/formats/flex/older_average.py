"""Derive metadata for an ``ema_state/`` folder without any, as PaddleFormers wrote it before 1.2.

A rank's file holds ``{"master_weights": {parameter name: its master weights' average}, <key>: parameter, ...}``
(``EMABuffer.save`` of ``trainer/utils/zero_cost_checkpoint.py``). The same rank's file in ``master_weight/`` holds the
master weights, and the metadata in that folder describe which piece of which tensor each is. The average of a piece is
therefore stored under the parameter name of its key. That name is in the rank's own files: with the arrays of the
parameters in the average, or with the master weight. ``master_weight/`` lacks the padding at the end of sliced tensors.

The averages cover every tensor because the master weights do. Further arrays in a file are copies of another rank's,
slices that contain only padding, or averages of bfloat16 parameters whose master weight has an average too.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Final

from paddle_reshard.pipeline.core.errors import CheckpointError, UnsupportedError
from paddle_reshard.pipeline.formats.flex.boxes import Box, describe_boxes
from paddle_reshard.pipeline.formats.flex.names import (
    EMA_STATE,
    MASTER_WEIGHTS,
    METADATA,
    MODEL_STATE,
    folder_of,
)
from paddle_reshard.pipeline.formats.flex.source import DataFile
from paddle_reshard.storage.files.dist_metadata import DistMetadata
from paddle_reshard.storage.files.paddle_pickle import ArrayRef

_MASTER_NAME: Final = re.compile(r"(?P<name>.+)_fp32_master_\d+")
_SUFFIX: Final = ".w_0"


@dataclass(frozen=True)
class OlderAverage:
    """The contents of a rank's file."""

    size_bytes: int
    master_weights: Mapping[str, ArrayRef]
    """Parameter name → average of its master weight."""
    params: Mapping[str, ArrayRef]
    """Structured key → average of the parameter."""


def describe_older_average(
    averages: Mapping[str, OlderAverage],
    metadata: Mapping[str, DistMetadata],
    files: Mapping[str, DataFile],
) -> tuple[dict[str, DistMetadata], dict[str, DataFile], tuple[tuple[str, str], ...]]:
    """Metadata for the folder, its files without padding, and the arrays that are not converted, with reasons.

    ``averages`` are the files in that format by their paths, ``metadata`` and ``files`` those of all other folders. An
    ``UnsupportedError`` names a file and a tensor that do not follow from the other folders.
    """
    first = min(averages)
    above = folder_of(first).removesuffix(EMA_STATE)
    masters, model = (
        _metadata_of(metadata, f"{above}{name}", first) for name in (MASTER_WEIGHTS, MODEL_STATE)
    )
    folder = f"{above}{EMA_STATE}"
    if any(folder_of(path) != folder for path in averages) or any(folder_of(p) == folder for p in metadata):
        raise CheckpointError(f"{first}: an average under parameter names beside one that has metadata")
    of_masters, of_model = list(_stored(masters)), list(_stored(model, "float32"))
    trained = {piece.key for piece, _ in of_masters}
    stored = [*of_masters, *(box for box in of_model if f"{box[0].key}{_SUFFIX}" not in trained)]
    arrays_of: dict[str, dict[str, ArrayRef]] = {path: {} for path in averages}
    files_of: dict[Box, list[str]] = {}
    for piece, file in stored:
        path = f"{folder}/{file}"
        files_of.setdefault(piece, []).append(file)
        average = averages.get(path)
        if average is None:
            raise _unclear(path, piece.key, "the rank that saved its values has no file of averages")
        saved = files.get(f"{above}{MASTER_WEIGHTS}/{file}") if piece.key in trained else None
        names = {} if saved is None else saved.parameter_names
        arrays_of[path][piece.key] = _array(path, piece, average, piece.key in trained, names)
    described = {path: DataFile(averages[path].size_bytes, arrays, {}) for path, arrays in arrays_of.items()}
    what = "of its arrays: copies of what other ranks hold, padding, or averages of bfloat16 parameters"
    not_carried = tuple(
        (path, f"{count} {what}")
        for path, average in sorted(averages.items())
        if (count := len(average.master_weights) + len(average.params) - len(arrays_of[path]))
    )
    return {f"{folder}/0{METADATA}": describe_boxes(files_of)}, described, not_carried


def _metadata_of(metadata: Mapping[str, DistMetadata], folder: str, path: str) -> DistMetadata:
    for metadata_path, folder_metadata in metadata.items():
        if folder_of(metadata_path) == folder:
            return folder_metadata
    raise _unclear(path, folder, "has no metadata, which would tell the slices")


def _unclear(path: str, what: str, why: str) -> UnsupportedError:
    return UnsupportedError(
        f"{path}: an average under parameter names, as PaddleFormers wrote it before its metadata, and {what} {why}. "
        "Load and save it once with the job that wrote it"
    )


def _stored(metadata: DistMetadata, dtype: str | None = None) -> Iterator[tuple[Box, str]]:
    """Every piece and the file that holds it; with ``dtype`` only pieces of this dtype."""
    pieces = metadata.pieces.tolist()
    for number, file, _ in metadata.locations.tolist():
        dtype_index = pieces[number][1]
        if dtype is not None and (dtype_index < 0 or metadata.dtypes[dtype_index] != dtype):
            continue
        yield Box.of(metadata, pieces[number]), metadata.files[file]


def _array(path: str, piece: Box, average: OlderAverage, master: bool, names: Mapping[str, str]) -> ArrayRef:
    """The array of a piece in the rank's file, without padding."""
    if master:
        name = _parameter_name(path, piece.key, average, names)
        array = average.master_weights.get(name)
    else:
        name, array = piece.key, average.params.get(piece.key)
    if array is None:
        raise _unclear(path, name, f"is not in it, of which the rank holds {piece.key}")
    elements, held = piece.elements, prod(array.shape)
    at_end = piece.flattened_range is not None and piece.flattened_range[1] == prod(piece.local_shape)
    longer = at_end and master and len(array.shape) == 1 and held > elements
    if array.dtype != "f4" or array.axes is not None or not (array.shape == piece.shape or longer):
        raise _unclear(
            path,
            name,
            f"is {array.dtype} {array.shape} in it, the rank's piece of {piece.key} is f4 {piece.shape}",
        )
    return replace(array, shape=piece.shape)


def _parameter_name(path: str, key: str, average: OlderAverage, saved: Mapping[str, str]) -> str:
    """Name, in the rank's process, of the parameter whose master weight has this key."""
    master = _MASTER_NAME.fullmatch(saved.get(key, ""))
    parameter = average.params.get(key.removesuffix(_SUFFIX))
    names = {master["name"]} if master else set()
    if parameter is not None and parameter.name is not None:
        names.add(parameter.name)
    if len(names) != 1:
        raise _unclear(
            path, key, f"is called {' and '.join(sorted(names)) or 'by no name'} in the rank's files"
        )
    return names.pop()
