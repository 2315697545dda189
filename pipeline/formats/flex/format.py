"""Dist checkpoints: the folders of PaddleFormers' FlexCheckpoint, and the one of auto-parallel training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Final

from paddle_reshard.pipeline.checkpoint.format import (
    LAYOUT,
    PADDLE_VERSION,
    SHARDING_STRATEGY,
    TARGET_META,
    Format,
    FormatOption,
)
from paddle_reshard.pipeline.core.choices import MUON

if TYPE_CHECKING:
    from paddle_reshard.pipeline.checkpoint.checkpoint import Checkpoint, MissingPolicy
    from paddle_reshard.pipeline.checkpoint.reading import SourceFiles
    from paddle_reshard.pipeline.formats.flex.request import RankFlexRequest
    from paddle_reshard.pipeline.formats.flex.target import FlexTarget
    from paddle_reshard.pipeline.model.rules.tables import RuleTables

FLEX: Final = "flex"
AUTO_PARALLEL: Final = "auto-parallel"
_OPTIONS: Mapping[str, FormatOption] = {
    "files": FormatOption("maximum number of data files per folder. Default: as many as hold 4 GiB each."),
    "paddle_version": PADDLE_VERSION,
}
_BY_RANK: Mapping[str, FormatOption] = {
    "to": FormatOption(
        "topology of the job that is to resume from its ranks' own files, without resharding; any other job can read "
        "them too. Default: whole tensors, in files of about the same size."
    ),
    "sharding_strategy": SHARDING_STRATEGY,
    "layout": LAYOUT,
}


class DistFormat(Format):
    """Data files, and metadata that say which box of which tensor each of their arrays is."""

    def process_of(self, path: str) -> int | None:
        """The rank of the process in the job (``distributed/checkpoint/save_state_dict.py`` of Paddle).

        >>> FlexFormat().process_of("model_state/3_0.distcp"), FlexFormat().process_of("model_state/0.metadata")
        (3, None)
        """
        from paddle_reshard.pipeline.formats.flex.names import DATA_FILE

        match = DATA_FILE.fullmatch(path.rpartition("/")[2])
        return int(match["rank"]) if match else None

    def recognises(self, files: SourceFiles) -> bool:
        """By the names of the folders; the files in them have the same names in both."""
        from paddle_reshard.pipeline.formats.flex.names import is_dist_file, is_paddleformers_folder

        paths = filter(is_dist_file, files.sizes)
        return any(is_paddleformers_folder(path) == (self.name == FLEX) for path in paths)

    def index(self, files: SourceFiles, tables: RuleTables, missing: MissingPolicy | None) -> Checkpoint:
        """Understand the metadata and the data files; which of the two it is, its folders tell."""
        from paddle_reshard.pipeline.checkpoint.checkpoint import MissingPolicy
        from paddle_reshard.pipeline.formats.flex.index import index_flex

        return index_flex(files, tables, missing or MissingPolicy())

    def request(self, asked: Mapping[str, Any]) -> FlexTarget | RankFlexRequest:
        """Number of files, version of Paddle and names; with a topology, its job too."""
        from paddle_reshard.pipeline.formats.flex.request import parse_by_rank, parse_flex

        return parse_by_rank(asked) if asked.get("to") else parse_flex(self.name, asked)


class FlexFormat(DistFormat):
    """What PaddleFormers saves, under any strategy, LoRA beside its base, Muon nowhere else."""

    name = FLEX
    help = "FlexCheckpoint"
    options: ClassVar[Mapping[str, FormatOption]] = {**_BY_RANK, **_OPTIONS}
    starts_with_masters: ClassVar[str] = (
        "--load_checkpoint_format flex_checkpoint --ignore_load_lr_and_optim true"
    )
    holds_lora: ClassVar[bool] = True
    special_optimizers: ClassVar[tuple[str, ...]] = (MUON,)  # trainer/training_args.py

    def loaded_with(self, library: str, strategy: str) -> Mapping[str, str | bool] | None:
        """Under any strategy by PaddleFormers."""
        if library != "paddleformers":
            return None
        return {"save_checkpoint_format": "flex_checkpoint", "load_checkpoint_format": "flex_checkpoint"}


class AutoParallelFormat(DistFormat):
    """What auto-parallel training saves: one folder, states under parameter names, no average, no files of ranks."""

    name = AUTO_PARALLEL
    help = "dist_ckpt of auto-parallel training"
    options: ClassVar[Mapping[str, FormatOption]] = {**_OPTIONS, "target_meta": TARGET_META}
    cannot_hold: ClassVar[tuple[str, ...]] = ("ema",)
    by_table: ClassVar[bool] = True


FORMATS = (FlexFormat(), AutoParallelFormat())
