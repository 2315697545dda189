"""Read the metadata of a hybrid-parallel checkpoint's files."""

from __future__ import annotations

from collections.abc import Collection

from paddle_reshard.pipeline.checkpoint.checkpoint import Checkpoint, MissingPolicy
from paddle_reshard.pipeline.checkpoint.reading import SourceFiles
from paddle_reshard.pipeline.core.errors import CheckpointError
from paddle_reshard.pipeline.core.file_names import MODEL_META
from paddle_reshard.pipeline.formats.hybrid.entries import index_rank_file
from paddle_reshard.pipeline.formats.hybrid.names import parse_rank_file
from paddle_reshard.pipeline.formats.hybrid.source import read_hybrid
from paddle_reshard.pipeline.formats.model_meta import parse_model_meta
from paddle_reshard.pipeline.model.rules.tables import RuleTables


def index_hybrid(files: SourceFiles, tables: RuleTables, missing: MissingPolicy | None) -> Checkpoint:
    """Read a hybrid-parallel checkpoint, also with weights in safetensors files next to hybrid optimizer states.

    Raises
    ------
    CheckpointError, PlanError
        If it is not one complete, consistent checkpoint that the rules cover.
    """
    sizes = files.sizes
    ranks = {path: size for path, size in sizes.items() if parse_rank_file(path) is not None}
    _refuse_unknown_tensor_files(files, ranks)
    meta = parse_model_meta(files.json(MODEL_META)) if MODEL_META in sizes else None
    roots = files.index_anywhere(index_rank_file, files.store, ranks)
    if files.safetensors:
        from paddle_reshard.pipeline.formats.hybrid.safetensors_weights import read_weights_and_states

        return read_weights_and_states(files, roots, meta, tables, missing)
    return read_hybrid(sizes, roots, meta, files.config(), tables, missing, files.adapter())


def _refuse_unknown_tensor_files(files: SourceFiles, ranks: Collection[str]) -> None:
    """Refuse files that could hold tensors and have an unknown name, and folders without files of tensors."""
    if unknown := [path for path in files.pickles if path not in ranks]:
        raise CheckpointError(f"{unknown[0]}: unknown name of a tensor file in a hybrid-parallel checkpoint")
    if not ranks:
        raise CheckpointError(
            f"{files.store.location}: no checkpoint found: no model_state or optimizer file, no .metadata, no "
            ".safetensors"
        )
