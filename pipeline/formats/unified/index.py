"""Read the metadata of a unified checkpoint's files."""

from __future__ import annotations

from paddle_reshard.pipeline.checkpoint.checkpoint import Checkpoint
from paddle_reshard.pipeline.checkpoint.reading import SourceFiles
from paddle_reshard.pipeline.core.errors import CheckpointError
from paddle_reshard.pipeline.formats.unified.adapter import index_adapter
from paddle_reshard.pipeline.formats.unified.names import (
    MASTER_WEIGHTS,
    MODEL,
    OPTIMIZER,
    holds_adapter,
    index_name,
    is_unified,
)
from paddle_reshard.pipeline.formats.unified.source import read_unified
from paddle_reshard.pipeline.model.rules.tables import RuleTables
from paddle_reshard.storage.files.safetensors import Index


def index_unified(files: SourceFiles, tables: RuleTables) -> Checkpoint:
    """A unified checkpoint with optimizer states, or weights alone.

    Raises
    ------
    CheckpointError, PlanError
        If it is not one whole, consistent checkpoint that the rules cover.
    """
    if holds_adapter(files.safetensors):
        return index_adapter(files, tables)
    config = files.config()
    if files.pickles:
        raise CheckpointError(
            f"{files.pickles[0]}: a tensor file whose name has no meaning in a unified checkpoint"
        )
    with_states = is_unified(files.sizes)
    kinds = (MODEL, OPTIMIZER, MASTER_WEIGHTS) if with_states else (MODEL,)
    index_at = {index_name(kind): _index(files, kind) for kind in kinds}
    indexes = {path: index for path, index in index_at.items() if index is not None}
    lr_scheduler = files.lr_scheduler() if with_states else None
    return read_unified(files.sizes, files.headers, indexes, config, tables, lr_scheduler)


def _index(files: SourceFiles, kind: str) -> Index | None:
    """The index of a kind. That of optimizer states which are not merged names no files."""
    path = index_name(kind)
    if kind == OPTIMIZER and path in files.sizes and "weight_map" not in (facts := files.json(path)):
        return Index({}, {}, facts)
    return files.weight_index(path)
