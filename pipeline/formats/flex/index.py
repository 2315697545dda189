"""Read the metadata of a dist checkpoint's files: ranged reads, no payload."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from paddle_reshard.pipeline.checkpoint.checkpoint import Checkpoint, MissingPolicy
from paddle_reshard.pipeline.checkpoint.reading import (
    Readable,
    SourceFiles,
    index_safetensors,
    index_tensor_file,
)
from paddle_reshard.pipeline.core.errors import CheckpointError, FormatError, UnsupportedError
from paddle_reshard.pipeline.core.file_names import MANIFEST, MODEL_META, SIGNAL_PREFIX
from paddle_reshard.pipeline.core.tensors import PARAM
from paddle_reshard.pipeline.core.upstream import NEWEST_PADDLE
from paddle_reshard.pipeline.formats.flex.checkpoint import read_flex
from paddle_reshard.pipeline.formats.flex.names import (
    DATA_FILES,
    EMA_STATE,
    METADATA,
    is_dist_file,
    version_of,
)
from paddle_reshard.pipeline.formats.flex.source import DataFile
from paddle_reshard.pipeline.model.model import Model
from paddle_reshard.pipeline.model.optimizers import muon_parameters
from paddle_reshard.pipeline.model.rules.tables import RuleTables
from paddle_reshard.storage.files.dist_metadata import DistMetadata, parse_dist_metadata
from paddle_reshard.storage.files.paddle_pickle import READ_AHEAD_BYTES, STRUCTURED_NAMES, ArrayRef

_MUON = "MuonSharding"
"""Paddle 3.4's stage 1 for Muon: matrices whole on one rank, everything else in slices as under v2."""
_OF_VERSIONS = (METADATA, DATA_FILES[0])
_MASTERS = "master_weights"
"""A section of older files of averages, of which the arrays have parameter names for keys."""


def index_flex(files: SourceFiles, tables: RuleTables, missing: MissingPolicy) -> Checkpoint:
    """A dist checkpoint: FlexCheckpoint folders, or the one of auto-parallel training."""
    store, sizes = files.store, files.sizes
    _refuse_other_tensor_files(files)
    config = files.config_if_any()  # the trainers write none into a dist checkpoint
    own = {path: size for path, size in sizes.items() if is_dist_file(path)}
    older = _older_versions(own)
    own = {path: size for path, size in own.items() if path not in older}
    described = {path: size for path, size in own.items() if path.endswith(METADATA)}
    held = {path: size for path, size in own.items() if path not in described}
    metadata: Mapping[str, DistMetadata] = files.index_here(_index_metadata, store, described)
    data_files = files.index_anywhere(_index_data_file, store, held)
    checkpoint = read_flex(
        metadata, data_files, config, tables, files.lr_scheduler(), missing, files.adapter()
    )
    # Jobs that keep an average say here which ranks wrote the checkpoint; one without sharding says nothing.
    if MODEL_META in sizes and store.read(MODEL_META, 0, min(sizes[MODEL_META], 5)) != b"null":
        _check_strategy(files.json(MODEL_META), checkpoint.model)
    own_files = (checkpoint.own_files | {MODEL_META} | older.keys()) & sizes.keys()
    return replace(
        checkpoint,
        own_files=own_files,
        not_carried=(*checkpoint.not_carried, *older.items()),
        newer=_newer(metadata),
        unproven=checkpoint.unproven or _not_finished(sizes, checkpoint),
    )


def _not_finished(paths: Collection[str], checkpoint: Checkpoint) -> str:
    """What a trainer's folder with parameters alone does not tell."""
    of_trainer = any(path.startswith("trainer_state.") for path in paths) and MANIFEST not in paths
    if not of_trainer or {*checkpoint.catalog.tensors.states} != {PARAM}:
        return ""
    if any(path.startswith(SIGNAL_PREFIX) for path in paths):
        return ""
    return (
        "the save may have died: parameters are all that it holds, and no saved_signal file marks it as finished; a "
        "job with ignore_save_lr_and_optim leaves the same files"
    )


def _older_versions(paths: Iterable[str]) -> dict[str, str]:
    """Files directly in the folder of all versions but the newest, which Paddle loads too → why they are not read."""
    versions = {path: number for path in paths if (number := version_of(path)) is not None}
    described = {number for path, number in versions.items() if path.endswith(METADATA)}
    newest = max(described, default=0)
    one = "give a folder of its files alone: mkdir v{0} && cp -p {0}.metadata *_{0}.* v{0}/"
    if len(described) > 1 and (odd := [path for path in sorted(versions) if not path.endswith(_OF_VERSIONS)]):
        raise CheckpointError(
            f"{odd[0]}: one of versions {min(described)} to {newest} (unique_id). Of safetensors files "
            "paddle.distributed.load_state_dict takes version 0, and of .distcp files the newest, unless it is told "
            f"which; {one.format(newest)}"
        )
    why = (
        f"of version {{0}} (unique_id); the newest, {newest}, is read, as paddle.distributed.load_state_dict does. "
        f"To read that one, {one}"
    )
    return {path: why.format(number) for path, number in sorted(versions.items()) if number < newest}


def _newer(metadata: Mapping[str, DistMetadata]) -> str:
    """Which attributes the metadata have that no proven version writes, all files together."""
    remarks = {name: value for path in sorted(metadata) for name, value in metadata[path].remarks.items()}
    if not remarks:
        return ""
    shown = ", ".join(f"{name} {value!r:.60}" for name, value in sorted(remarks.items()))
    return f"{METADATA} files have attributes that those of Paddle {NEWEST_PADDLE} lack: {shown}; none changes a value"


def _refuse_other_tensor_files(files: SourceFiles) -> None:
    """One folder holds one checkpoint: beside the files of a dist checkpoint lie no others with tensors."""
    for path in sorted({*files.pickles, *files.safetensors}):
        if not is_dist_file(path):
            raise CheckpointError(
                f"{path}: lies beside a FlexCheckpoint or auto-parallel checkpoint and is no part of it; move one "
                "of the two elsewhere"
            )


def _check_strategy(meta: Mapping[str, Any], model: Model) -> None:
    """The sharding of Muon, and no other, goes with its states."""
    cells, by_muon = meta.get("sharding_metas"), muon_parameters(model.tensors)
    for cell, entry in cells.items() if isinstance(cells, dict) else ():
        strategy = entry.get("sharding_strategy") if isinstance(entry, dict) else None
        if isinstance(strategy, str) and (strategy == _MUON) != bool(by_muon):
            kept = f"{by_muon[0]} has moment1 alone" if by_muon else "no tensor has moment1 alone"
            raise CheckpointError(
                f"{MODEL_META}: {cell} says that sharding_strategy is {strategy}, and {kept}, by which "
                "Muon's states are recognised: they are not of one run"
            )


def _index_metadata(store: Readable, path: str, size_bytes: int) -> DistMetadata:
    return parse_dist_metadata(partial(store.read, path), size_bytes, path)


@dataclass(frozen=True)
class _Begun:
    """A file whose beginning has been read, so that it is not asked for twice."""

    store: Readable
    begin: bytes

    def read(self, path: str, byte_offset: int, nbytes: int) -> bytes:
        end = byte_offset + nbytes
        return (
            self.begin[byte_offset:end]
            if end <= len(self.begin)
            else self.store.read(path, byte_offset, nbytes)
        )


def _index_data_file(store: Readable, path: str, size_bytes: int) -> DataFile:
    from paddle_reshard.storage.files.safetensors import is_safetensors

    # Paddle 3.3 gives the two kinds of files different suffixes; later versions call both .distcp.
    begun = _Begun(store, store.read(path, 0, min(size_bytes, READ_AHEAD_BYTES)))
    if path.endswith(".safetensors") or is_safetensors(begun.begin, size_bytes):
        return DataFile(size_bytes, index_safetensors(begun, path, size_bytes).tensors, {})
    root = index_tensor_file(begun, path, size_bytes)
    names = root.pop(STRUCTURED_NAMES, {})
    if isinstance(root.get(_MASTERS), dict):
        raise UnsupportedError(
            f"{path}: an average under parameter names, without metadata, as PaddleFormers wrote it before 1.2. Load "
            f"and save the checkpoint once with PaddleFormers 1.2, or move {EMA_STATE}/ elsewhere and convert the rest"
        )
    for key, value in root.items():
        if not isinstance(value, ArrayRef):
            raise FormatError(
                "not_an_array", path, None, f"{key} holds a {type(value).__name__}, an array is expected"
            )
    return DataFile(size_bytes, root, names if isinstance(names, dict) else {})
