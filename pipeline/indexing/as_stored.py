"""List the arrays in the files of a checkpoint that no rule table explains."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from paddle_reshard.pipeline.checkpoint.reading import (
    IndexFiles,
    Readable,
    SourceFiles,
    index_safetensors,
    index_tensor_file,
)
from paddle_reshard.pipeline.core.errors import CheckpointError
from paddle_reshard.pipeline.core.stored import StoredTensor
from paddle_reshard.pipeline.core.tensors import (
    ACCUMULATORS,
    EMA_MASTER_WEIGHT,
    EMA_PARAM,
    MASTER_WEIGHT,
    PARAM,
    dtype_of_code,
)
from paddle_reshard.pipeline.core.trainer_files import is_of_average
from paddle_reshard.pipeline.formats.hybrid.names import parse_rank_file
from paddle_reshard.storage.files.paddle_pickle import ArrayRef, SplitArray
from paddle_reshard.storage.files.safetensors import is_safetensors

_ACCUMULATOR: Final = re.compile(
    rf".+[._/](?P<state>{'|'.join(sorted(ACCUMULATORS, key=len, reverse=True))})_0"
)
_MASTERS: Final = "master_weight"
_UNKNOWN: Final = "unknown"
_AXES: Final = {"tp": "tp", "pp": "pp", "shard": "sharding", "ep": "ep", "moe": "dp"}
"""Coordinate in a file name → axis."""


def stored_tensors(files: SourceFiles, index_files: IndexFiles) -> list[StoredTensor]:
    """Every array of every tensor file, sorted by file."""
    sizes = {path: files.sizes[path] for path in files.pickles}
    roots: Mapping[str, Any] = index_files(_index_arrays, files.store, sizes)
    tensors = [_stored(path, key, array) for path in sorted(roots) for key, array in _arrays(roots[path])]
    for path, payload in sorted(files.headers.items()):
        tensors += [_stored(path, key, array) for key, array in payload.tensors.items()]
    return tensors


def _index_arrays(store: Readable, path: str, size_bytes: int) -> Mapping[str, Any]:
    """The contents of a tensor file; later versions of Paddle call safetensors files ``.distcp`` too."""
    if path.endswith(".distcp") and is_safetensors(store.read(path, 0, min(size_bytes, 9)), size_bytes):
        return index_safetensors(store, path, size_bytes).tensors
    return index_tensor_file(store, path, size_bytes)


def degrees_by_names(files: SourceFiles) -> dict[str, int]:
    """Axis → degree, from the names of rank files; empty if any file is not named like one."""
    ranks = []
    for path in files.pickles:
        try:
            ranks.append(parse_rank_file(path))
        except CheckpointError:
            return {}
    if not ranks or None in ranks:
        return {}
    return {
        axis: max((getattr(rank, part) or 0 for rank in ranks), default=0) + 1 for part, axis in _AXES.items()
    }


def _arrays(entries: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, ArrayRef | SplitArray]]:
    for key, value in entries.items():
        if isinstance(value, tuple) and len(value) == 2:  # name and array
            value = value[1]
        if isinstance(value, ArrayRef | SplitArray):
            yield f"{prefix}{key}", value
        elif isinstance(value, dict):
            yield from _arrays(value, f"{prefix}{key}/")


def _stored(path: str, key: str, array: ArrayRef | SplitArray) -> StoredTensor:
    return StoredTensor(path, key, _state(path, key), array.shape, dtype_of_code(array.dtype, path).name)


def _state(path: str, key: str) -> str:
    """The state of an array, by its key and file; an unrecognised array of an optimizer file is ``unknown``.

    >>> _state("optimizer.pdopt", "linear_0.w_0_moment1_0"), _state("optimizer.pdopt", "master_weights/linear_0.w_0")
    ('moment1', 'master_weight')
    >>> _state("ema_state/0_0.distcp", "w"), _state("model_state.pdparams", "w")
    ('ema_param', 'param')
    >>> _state("optimizer.pdopt", "linear_0.w_0_speed_0")
    'unknown'
    """
    if is_of_average(path):
        return EMA_MASTER_WEIGHT if _MASTERS in key or key.endswith(".w_0") else EMA_PARAM
    if _MASTERS in path or key.startswith(_MASTERS):
        return MASTER_WEIGHT
    accumulator = _ACCUMULATOR.fullmatch(key)
    if accumulator is None:
        return _UNKNOWN if path.startswith("optimizer") else PARAM
    return accumulator["state"]
