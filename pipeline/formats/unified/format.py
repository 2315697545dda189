"""Unified checkpoints: whole tensors in safetensors files, in Paddle's own layout."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from paddle_reshard.pipeline.checkpoint.format import MAX_SHARD_SIZE, Format, NotLoaded, Request
from paddle_reshard.pipeline.formats.unified import UNIFIED

if TYPE_CHECKING:
    from paddle_reshard.pipeline.checkpoint.checkpoint import Checkpoint, MissingPolicy
    from paddle_reshard.pipeline.checkpoint.reading import SourceFiles
    from paddle_reshard.pipeline.model.rules.tables import RuleTables


def _recognises(files: SourceFiles) -> bool:
    """By the names of files of states; weights alone by the layout that they say they are in (not ERNIE's)."""
    if not files.safetensors:
        return False
    from paddle_reshard.pipeline.formats.unified.names import holds_adapter, is_unified
    from paddle_reshard.pipeline.model.ernie import is_ernie_layout
    from paddle_reshard.pipeline.model.weights import PADDLE_LAYOUTS

    if is_unified(files.sizes) or holds_adapter(files.safetensors):
        return True
    if files.pickles:
        return False
    return any(
        header.metadata.get("format") in PADDLE_LAYOUTS and not is_ernie_layout(header.tensors)
        for header in files.headers.values()
    )


def _index(files: SourceFiles, tables: RuleTables, missing: MissingPolicy) -> Checkpoint:
    from paddle_reshard.pipeline.formats.unified.source import index_unified

    return index_unified(files, tables, missing)


def _request(asked: Mapping[str, Any]) -> Request:
    """Size of files; nothing of it depends on the source."""
    from paddle_reshard.pipeline.formats.unified.target import UnifiedTarget

    size = asked.get("max_shard_size")
    return UnifiedTarget() if size is None else UnifiedTarget(size.nbytes)


def _loaded_with(library: str, strategy: str) -> Mapping[str, str | bool]:
    """Under any strategy."""
    if library == "paddlenlp":
        return {"unified_checkpoint": True}
    return {
        "save_checkpoint_format": "unified_checkpoint",
        "load_checkpoint_format": "unified_checkpoint",
        "convert_from_hf": False,  # else the weights are transposed as those of other libraries, and do not fit
    }


def _not_loaded(checkpoint: Checkpoint) -> NotLoaded:
    from paddle_reshard.pipeline.formats.unified.names import sort_files
    from paddle_reshard.pipeline.formats.unified.source import has_tied_states_once
    from paddle_reshard.pipeline.formats.unified.target import not_loaded

    paths = [] if checkpoint.adapter else [file.path for file in checkpoint.catalog.files]
    several = any(file.number for file in sort_files(paths) if not file.of_rank)
    return not_loaded(checkpoint.model.table, has_tied_states_once(checkpoint), several)


FORMAT = Format(  # weights, master weights and optimizer states, each kind in files of its own
    name=UNIFIED,
    help="unified checkpoint",
    recognises=_recognises,
    index=_index,
    request=_request,
    options={"max_shard_size": MAX_SHARD_SIZE._replace(default="no limit")},
    cannot_hold=("ema",),
    loaded_with=_loaded_with,
    not_loaded=_not_loaded,
)
