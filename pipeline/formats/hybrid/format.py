"""Hybrid-parallel checkpoints: ``model_state``, ``optimizer`` and ``ema`` of every rank."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from paddle_reshard.pipeline.checkpoint.format import (
    PADDLE_VERSION,
    SHARDING_STRATEGY,
    Format,
    FormatOption,
    NotLoaded,
    Request,
)
from paddle_reshard.pipeline.core.choices import ADAMW_MINI
from paddle_reshard.pipeline.formats.hybrid import HYBRID, HYBRID_PLAIN

if TYPE_CHECKING:
    from paddle_reshard.pipeline.checkpoint.checkpoint import Checkpoint, MissingPolicy
    from paddle_reshard.pipeline.checkpoint.reading import SourceFiles
    from paddle_reshard.pipeline.model.rules.tables import RuleTables


def _index(files: SourceFiles, tables: RuleTables, missing: MissingPolicy) -> Checkpoint:
    from paddle_reshard.pipeline.formats.hybrid.index import index_hybrid

    return index_hybrid(files, tables, missing)


def _request(sharded_saving: bool, asked: Mapping[str, Any]) -> Request:
    from paddle_reshard.pipeline.formats.hybrid.target import HybridRequest

    return HybridRequest.of(asked, sharded_saving=sharded_saving)


def _loaded_with(sharded_saving: bool, library: str, strategy: str) -> Mapping[str, str | bool] | None:
    """By each rank, from a file of its own part, as ``model_meta.json`` lists them, or from a complete file.

    PaddleFormers' default, ``flex_checkpoint``, finds nothing in either (``trainer/trainer.py``).
    """
    own_part = sharded_saving and strategy in ("stage1v1", "stage1v2")
    if library == "paddlenlp":
        return {"save_sharded_model": True, "load_sharded_model": True} if own_part else {}
    reads = {"load_checkpoint_format": "sharding_io"}
    return (
        {"save_checkpoint_format": "sharding_io", **reads, "load_sharded_model": True} if own_part else reads
    )


def _not_loaded(sharded_saving: bool, checkpoint: Checkpoint) -> NotLoaded:
    """Parameters in safetensors files, which the trainer saves by default and looks for as ``model_state`` alone, and
    states that its loader of parts does not know.

    ``_load_from_checkpoint`` in PaddleFormers' ``trainer/trainer.py``: "do not support safetensors".
    """
    from paddle_reshard.pipeline.checkpoint.training_job import not_read_by_part
    from paddle_reshard.pipeline.formats.hybrid.names import WEIGHTS_OF_RANK, hybrid_name

    own = min(filter(WEIGHTS_OF_RANK.fullmatch, checkpoint.own_files), default=None)
    if own is None:
        library, strategy = checkpoint.model.table.convention, checkpoint.job.strategy or "none"
        arguments = _loaded_with(sharded_saving, library, strategy) or {}
        return NotLoaded(not_read_by_part(arguments, library, checkpoint.model.kinds_of_states))
    return NotLoaded(
        f"the trainer looks for {hybrid_name(own)} and loads no {own}, which it writes with save_to_hf, its default; "
        "convert it, also to its own topology: paddle-reshard convert … --to, or resume"
    )


def _rank_of(path: str) -> Mapping[str, int] | None:
    """Every tensor file is one of a rank; ``ep`` is the expert rank.

    >>> _rank_of("optimizer.tp00_pp01_shard03.pdopt"), _rank_of("model.safetensors")
    ({'tp': 0, 'pp': 1, 'sharding': 3}, None)
    """
    from paddle_reshard.pipeline.core.errors import CheckpointError
    from paddle_reshard.pipeline.formats.hybrid.names import parse_rank_file

    try:
        file = parse_rank_file(path)
    except CheckpointError:
        return None
    if file is None:
        return None
    named = {"tp": file.tp, "pp": file.pp, "sharding": file.shard, "dp": file.moe, "ep": file.ep}
    return {axis: rank for axis, rank in named.items() if rank is not None}


def _hybrid(name: str, help: str, sharded_saving: bool) -> Format:
    """A set of files per rank.

    ``model_meta.json`` is read wherever it is, and written with ``sharded_saving`` where the trainer does.
    """
    return Format(
        name=name,
        help=help,
        recognises=lambda files: True,  # what no other format recognises; index_hybrid says what it lacks
        index=_index,
        request=partial(_request, sharded_saving),
        options={
            "to": FormatOption(
                "topology of the target job as axis=size,…: tp, pp, vpp, sharding, ep, dp; omitted axes "
                "are 1. Required. For convert and plan also a number of cards: the nearest topology of those that "
                "plan --cards lists."
            ),
            "sharding_strategy": SHARDING_STRATEGY,
            "layout": FormatOption(
                "JSON with settings of the target job that its topology does not determine: "
                "comm_buffer_size_MB, comm_overlap, sort_parameters, stage3_segment_size, "
                "sequence_parallel, segmentation, experts_over_tp, use_unified_moe, convention; or the "
                "model_meta.json of such a job, which supplies parameter names, with or without settings "
                "added to it."
            ),
            "paddle_version": PADDLE_VERSION,
        },
        needs_topology=True,
        starts_with="--load_checkpoint_format sharding_io --ignore_load_lr_and_optim true",
        starts_with_masters=(
            "--load_checkpoint_format sharding_io --load_sharded_model true --ignore_load_lr_and_optim true"
        ),
        holds_lora=True,
        special_optimizers=(ADAMW_MINI,),
        by_table=True,
        loaded_with=partial(_loaded_with, sharded_saving),
        not_loaded=partial(_not_loaded, sharded_saving),
        rank_of=_rank_of,
    )


FORMATS = (
    _hybrid(HYBRID, "a set of files per rank, with model_meta.json if the trainer writes it", True),
    _hybrid(HYBRID_PLAIN, "a set of files per rank, without model_meta.json", False),
)
