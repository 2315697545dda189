"""Read the metadata of a dist checkpoint's files: ranged reads, no payload."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from paddle_reshard.pipeline.errors import FormatError, UnsupportedError
from paddle_reshard.pipeline.layouts.checkpoint import Checkpoint
from paddle_reshard.pipeline.layouts.flex.checkpoint import DataFile, read_flex
from paddle_reshard.pipeline.layouts.flex.names import METADATA, is_dist_file
from paddle_reshard.pipeline.layouts.hybrid.names import MODEL_META
from paddle_reshard.pipeline.layouts.rules import RuleTable
from paddle_reshard.storage.formats.dist_metadata import DistMetadata, parse_dist_metadata
from paddle_reshard.storage.formats.paddle_pickle import STRUCTURED_NAMES, ArrayRef
from paddle_reshard.storage.formats.safetensors import parse_safetensors
from paddle_reshard.tasks.index import (
    FILES_IN_FLIGHT,
    Readable,
    index_tensor_file,
    read_json,
    read_lr_scheduler,
)

_T = TypeVar("_T")


def index_flex(
    store: Readable, sizes: Mapping[str, int], config: Mapping[str, Any], tables: Sequence[RuleTable]
) -> Checkpoint:
    """A dist checkpoint: FlexCheckpoint folders, or the one of auto-parallel training.

    Parameters
    ----------
    sizes
        Path of every file of the checkpoint → size in bytes.

    Raises
    ------
    CheckpointError, PlanError
        If it is not one whole, consistent checkpoint that the rules cover.
    """
    if MODEL_META in sizes:
        _refuse_muon(read_json(store, MODEL_META, sizes))
    own = {path: size for path, size in sizes.items() if is_dist_file(path)}
    described = {path: size for path, size in own.items() if path.endswith(METADATA)}
    held = {path: size for path, size in own.items() if path not in described}
    metadata = _side_by_side(described, partial(_index_metadata, store))
    files = _side_by_side(held, partial(_index_data_file, store))
    found = read_flex(metadata, files, config, tables, read_lr_scheduler(store, sizes))
    # Jobs that keep an average say here which ranks wrote the checkpoint.
    return replace(found, own_files=found.own_files | ({MODEL_META} & sizes.keys()))


def _refuse_muon(meta: Mapping[str, Any]) -> None:
    cells = meta.get("sharding_metas")
    for cell, entry in cells.items() if isinstance(cells, dict) else ():
        if isinstance(entry, dict) and entry.get("sharding_strategy") == "MuonSharding":
            raise UnsupportedError(f"{MODEL_META}: {cell}: states of the Muon optimizer are not read")


def _side_by_side(sizes: Mapping[str, int], index: Callable[[str, int], _T]) -> dict[str, _T]:
    """``index(path, size_bytes)`` of several files, for a store that answers late."""
    with ThreadPoolExecutor(FILES_IN_FLIGHT) as pool:
        return dict(zip(sizes, pool.map(index, sizes, sizes.values()), strict=True))


def _index_metadata(store: Readable, path: str, size_bytes: int) -> DistMetadata:
    return parse_dist_metadata(partial(store.read, path), size_bytes, path)


def _index_data_file(store: Readable, path: str, size_bytes: int) -> DataFile:
    if path.endswith(".safetensors"):
        payload = parse_safetensors(partial(store.read, path), size_bytes, path)
        return DataFile(size_bytes, payload.tensors, {})
    root = index_tensor_file(store, path, size_bytes)
    names = root.pop(STRUCTURED_NAMES, {})
    for key, value in root.items():
        if key == "master_weights" and isinstance(value, dict):
            raise UnsupportedError(
                f"{path}: an average under parameter names, as PaddleFormers wrote it before its metadata; no file "
                "says which rank had which slices. Load and save it once with the job that wrote it"
            )
        if not isinstance(value, ArrayRef):
            raise FormatError(
                "not_an_array", path, None, f"{key} holds a {type(value).__name__}, an array is expected"
            )
    return DataFile(size_bytes, root, names if isinstance(names, dict) else {})
