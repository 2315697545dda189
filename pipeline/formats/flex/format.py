"""Dist checkpoints: the folders of PaddleFormers' FlexCheckpoint, and the one of auto-parallel training."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from paddle_reshard.pipeline.checkpoint.format import (
    MAX_SHARD_SIZE,
    PADDLE_VERSION,
    SHARDING_STRATEGY,
    Format,
    FormatOption,
    NotLoaded,
    Request,
)
from paddle_reshard.pipeline.core.choices import MUON
from paddle_reshard.pipeline.core.errors import UsageError
from paddle_reshard.pipeline.formats.flex import AUTO_PARALLEL, FLEX

if TYPE_CHECKING:
    from paddle_reshard.pipeline.checkpoint.checkpoint import Checkpoint, MissingPolicy
    from paddle_reshard.pipeline.checkpoint.reading import SourceFiles
    from paddle_reshard.pipeline.model.rules.tables import RuleTables

_OPTIONS: Mapping[str, FormatOption] = {
    "max_shard_size": MAX_SHARD_SIZE._replace(default="4GiB"),
    "paddle_version": PADDLE_VERSION,
}
_BY_RANK: Mapping[str, FormatOption] = {
    "to": FormatOption(
        "topology of the job that is to resume from its ranks' own files, without resharding; any other job can read "
        "them too. Default: whole tensors."
    ),
    "sharding_strategy": SHARDING_STRATEGY,
    "layout": FormatOption("the settings alone."),
}


def _process_of(path: str) -> int | None:
    """The rank of the process in the job (``distributed/checkpoint/save_state_dict.py`` of Paddle).

    >>> _process_of("model_state/3_0.distcp"), _process_of("model_state/0.metadata")
    (3, None)
    """
    from paddle_reshard.pipeline.formats.flex.names import DATA_FILE

    match = DATA_FILE.fullmatch(path.rpartition("/")[2])
    return int(match["rank"]) if match else None


def _recognises(by_paddleformers: bool, files: SourceFiles) -> bool:
    """By the names of the folders; the files in them have the same names in both."""
    from paddle_reshard.pipeline.formats.flex.names import is_dist_file, is_paddleformers_folder

    return any(
        is_paddleformers_folder(path) == by_paddleformers for path in filter(is_dist_file, files.sizes)
    )


def _index(files: SourceFiles, tables: RuleTables, missing: MissingPolicy) -> Checkpoint:
    """Which of the two it is, its folders tell."""
    from paddle_reshard.pipeline.formats.flex.index import index_flex

    return index_flex(files, tables, missing)


def _not_loaded(checkpoint: Checkpoint) -> NotLoaded:
    from paddle_reshard.pipeline.formats.flex.checkpoint import not_loaded

    return not_loaded(checkpoint)


def _request(name: str, asked: Mapping[str, Any]) -> Request:
    """With a topology, the files are those of its ranks."""
    if name == FLEX and asked.get("names") is not None:
        raise UsageError(
            "--layout has the parameter names of a model_meta.json, and a FlexCheckpoint stores none; omit "
            "sharding_metas"
        )
    if asked.get("to"):
        from paddle_reshard.pipeline.formats.flex.rank_target import parse_by_rank

        return parse_by_rank(asked)
    from paddle_reshard.pipeline.formats.flex.target import parse_flex

    return parse_flex(name, asked)


FORMATS = (
    Format(  # what PaddleFormers saves, under any strategy, LoRA beside its base, Muon nowhere else
        name=FLEX,
        help="FlexCheckpoint",
        recognises=partial(_recognises, True),
        index=_index,
        request=partial(_request, FLEX),
        options={**_BY_RANK, **_OPTIONS},
        starts_with_masters="--load_checkpoint_format flex_checkpoint --ignore_load_lr_and_optim true",
        holds_lora=True,
        special_optimizers=(MUON,),  # trainer/training_args.py
        loaded_with=lambda library, strategy: (
            {"save_checkpoint_format": "flex_checkpoint", "load_checkpoint_format": "flex_checkpoint"}
            if library == "paddleformers"
            else None
        ),
        not_loaded=_not_loaded,
        process_of=_process_of,
    ),
    Format(  # what auto-parallel training saves: one folder, states under parameter names, no files of ranks
        name=AUTO_PARALLEL,
        help="dist_ckpt of auto-parallel training",
        recognises=partial(_recognises, False),
        index=_index,
        request=partial(_request, AUTO_PARALLEL),
        options={**_OPTIONS, "layout": FormatOption("the model_meta.json alone.")},
        cannot_hold=("ema",),
        by_table=True,
        process_of=_process_of,
    ),
)
