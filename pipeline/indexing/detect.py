"""What is in a folder? From its files to a checkpoint that is understood, whatever its format.

Only metadata are read: pickle opcodes, headers, JSON.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from paddle_reshard.pipeline.core.catalog import check_dtypes
from paddle_reshard.pipeline.core.errors import CheckpointError, CoverageError, PlanError
from paddle_reshard.pipeline.core.file_names import CONFIG, MODEL_META
from paddle_reshard.pipeline.indexing.small_files import check_steps
from paddle_reshard.pipeline.layouts.checkpoint import Checkpoint, MissingPolicy
from paddle_reshard.pipeline.layouts.flex.names import is_dist_file
from paddle_reshard.pipeline.layouts.hybrid.names import parse_rank_file
from paddle_reshard.pipeline.layouts.hybrid.source import read_hybrid
from paddle_reshard.pipeline.layouts.model_meta import parse_model_meta
from paddle_reshard.pipeline.layouts.reading import IndexFiles, index_tensor_file, read_json
from paddle_reshard.pipeline.layouts.rules import RuleTable
from paddle_reshard.storage.store import Source
from paddle_reshard.tasks.index import index_here, index_unified, index_weights, index_weights_and_states

TENSOR_SUFFIXES = (".pdparams", ".pdopt", ".distcp", ".pdmodel")
PLAIN_STATES = ("scheduler.pdparams", "scaler.pdparams")
"""Small states of the trainer that are not tensors of the model; carried byte for byte."""


def index_checkpoint(
    store: Source,
    tables: Sequence[RuleTable],
    config: Mapping[str, Any] | None = None,
    missing: MissingPolicy | None = None,
    index_files: IndexFiles = index_here,
) -> Checkpoint:
    """Understand a checkpoint from its metadata; no payload is read.

    Parameters
    ----------
    tables
        Rule tables to choose from.
    config
        The model's ``config.json``, for a checkpoint that has none.
    missing
        What is to become of tensors that no file holds; without it they are refused.
    index_files
        Where rank files are indexed. Files with a header take a request or two and are indexed here.

    Raises
    ------
    CheckpointError, PlanError
        If it is not one whole, consistent hybrid-parallel checkpoint that the rules cover.
    """
    _refuse_folder_of_checkpoints(store)
    checkpoint = _index(store, tables, config, missing, index_files)
    check_dtypes(checkpoint.catalog.tensors)
    check_steps(store, checkpoint.lr_scheduler)
    return checkpoint


def _index(
    store: Source,
    tables: Sequence[RuleTable],
    config: Mapping[str, Any] | None,
    missing: MissingPolicy | None,
    index_files: IndexFiles,
) -> Checkpoint:
    """By the format that the names of the files tell."""
    sizes = store.sizes()
    if any(map(is_dist_file, sizes)):
        from paddle_reshard.pipeline.layouts.flex.index import index_flex

        _refuse_other_tensor_files(store)
        _refuse_fillings(missing)
        return index_flex(store, sizes, read_config(store, config), tables, index_files)
    if any(path.endswith(".safetensors") for path in sizes):
        return _index_safetensors(store, tables, read_config(store, config), missing, index_files)
    _refuse_unknown_tensor_files(store)
    meta = parse_model_meta(read_json(store, MODEL_META, sizes)) if MODEL_META in sizes else None
    config = read_config(store, config)
    ranks = {path: size for path, size in sizes.items() if parse_rank_file(path) is not None}
    return read_hybrid(sizes, index_files(index_tensor_file, store, ranks), meta, config, tables, missing)


def read_config(store: Source, given: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """The checkpoint's own ``config.json``; the one that was given where it has none."""
    sizes = store.sizes()
    if CONFIG in sizes:
        return read_json(store, CONFIG, sizes)
    if given is None:
        # The trainers write none into a dist checkpoint: nobody need wait for it.
        error = PlanError if any(map(is_dist_file, sizes)) else CheckpointError
        raise error(f"{store.location}: {CONFIG} is missing; give that of the model with --config FILE")
    return given


def _refuse_folder_of_checkpoints(store: Source) -> None:
    """A run's folder is easily taken for one of its checkpoints."""
    inside = [name for name in sorted(store.folders) if name.startswith("checkpoint-")]
    if inside and not any(parse_rank_file(path) for path in store.sizes()):
        raise CheckpointError(
            f"{store.location}: holds checkpoints and is none itself; give one of them, like {inside[-1]}"
        )


def _index_safetensors(
    store: Source,
    tables: Sequence[RuleTable],
    config: Mapping[str, Any],
    missing: MissingPolicy | None,
    index_files: IndexFiles,
) -> Checkpoint:
    """A unified or Hugging Face checkpoint, or weights of the one beside optimizer states of hybrid ones."""
    from paddle_reshard.pipeline.layouts.unified.names import is_unified

    sizes = store.sizes()
    others = [path for path in sorted(sizes) if path.endswith(TENSOR_SUFFIXES) and path not in PLAIN_STATES]
    if is_unified(sizes) or not others:
        _refuse_fillings(missing)
    if is_unified(sizes):
        if others:
            raise CheckpointError(
                f"{others[0]}: a tensor file whose name has no meaning in a unified checkpoint"
            )
        return index_unified(store, sizes, config, tables)
    if others:
        _refuse_unknown_tensor_files(store)
        return index_weights_and_states(store, sizes, config, tables, missing, index_files)
    return index_weights(store, sizes, config, tables)


def _refuse_fillings(missing: MissingPolicy | None) -> None:
    """What was given would be dropped without a word."""
    if missing is not None and missing.filled:
        raise CoverageError(
            min(missing.filled), "given with --fill, and only hybrid checkpoints lose tensors; leave it out"
        )


def _refuse_other_tensor_files(store: Source) -> None:
    """One folder holds one checkpoint: beside the files of a dist checkpoint lie no others with tensors."""
    suffixes = (*TENSOR_SUFFIXES, ".safetensors")
    for path in sorted(store.sizes()):
        if path.endswith(suffixes) and not is_dist_file(path) and path not in PLAIN_STATES:
            raise CheckpointError(
                f"{path}: lies beside a FlexCheckpoint or auto-parallel checkpoint and is no part of it; move one "
                "of the two elsewhere"
            )


def _refuse_unknown_tensor_files(store: Source) -> None:
    """Every file that could hold tensors must be one whose meaning is known."""
    sizes = store.sizes()
    ranks = [path for path in sizes if parse_rank_file(path) is not None]
    unknown = [
        path
        for path in sorted(sizes)
        if path.endswith(TENSOR_SUFFIXES) and path not in ranks and path not in PLAIN_STATES
    ]
    if unknown:
        raise CheckpointError(
            f"{unknown[0]}: a tensor file whose name has no meaning in a hybrid-parallel checkpoint"
        )
    if not ranks:
        raise CheckpointError(
            f"{store.location}: holds no checkpoint: no model_state or optimizer file, no .metadata, no .safetensors"
        )
