"""Dist checkpoints: the folders of PaddleFormers' FlexCheckpoint, and the one of auto-parallel training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from paddle_reshard.pipeline.checkpoint.format import (
    LAYOUT,
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
    "paddle_version": FormatOption(
        "Paddle version that is to read the target: 3.0, 3.2, 3.3 (default), or 3.4 for pickles of protocol 5."
    ),
}
_BY_RANK: Mapping[str, FormatOption] = {
    "to": FormatOption(
        "topology of the job that is to resume from its ranks' own files, without resharding; any other job can read "
        "them too. Default: whole tensors, in files of about the same size."
    ),
    "sharding_strategy": SHARDING_STRATEGY,
    "layout": LAYOUT,
}


@dataclass(frozen=True)
class DistFormat(Format):
    """Data files, and metadata that say which box of which tensor each of their arrays is."""

    name: str
    help: str
    auto_parallel: bool
    """One folder, states under parameter names; else folders of PaddleFormers, structured names."""

    @property
    def starts_with_masters(self) -> str:
        """PaddleFormers loads master weights without other states; for auto-parallel training that is not known."""
        arguments = "--load_checkpoint_format flex_checkpoint --ignore_load_lr_and_optim true"
        return "" if self.auto_parallel else arguments

    @property
    def options(self) -> Mapping[str, FormatOption]:
        """Files, and by whose classes; auto-parallel training has parameter names too, and no files of ranks."""
        return {**_OPTIONS, "target_meta": TARGET_META} if self.auto_parallel else {**_BY_RANK, **_OPTIONS}

    @property
    def cannot_hold(self) -> tuple[str, ...]:
        """Auto-parallel training has no average."""
        return ("ema",) if self.auto_parallel else ()

    @property
    def holds_lora(self) -> bool:
        """FlexCheckpoint has, beside the base; auto-parallel training does not know it."""
        return not self.auto_parallel

    @property
    def special_optimizers(self) -> tuple[str, ...]:
        """PaddleFormers saves and loads Muon as FlexCheckpoint only (``trainer/training_args.py``)."""
        return () if self.auto_parallel else (MUON,)

    @property
    def by_table(self) -> bool:
        """Auto-parallel training names parameters."""
        return self.auto_parallel

    def loaded_with(self, library: str, strategy: str) -> Mapping[str, str | bool] | None:
        """Under any strategy by PaddleFormers; how auto-parallel training reads is not known."""
        if self.auto_parallel or library != "paddleformers":
            return None
        return {"save_checkpoint_format": "flex_checkpoint", "load_checkpoint_format": "flex_checkpoint"}

    def process_of(self, path: str) -> int | None:
        """The rank of the process in the job (``distributed/checkpoint/save_state_dict.py`` of Paddle).

        >>> FORMATS[0].process_of("model_state/3_0.distcp"), FORMATS[0].process_of("model_state/0.metadata")
        (3, None)
        """
        from paddle_reshard.pipeline.formats.flex.names import process_of

        return process_of(path)

    def recognises(self, files: SourceFiles) -> bool:
        """By the names of the folders; the files in them have the same names in both."""
        from paddle_reshard.pipeline.formats.flex.names import is_dist_file, is_paddleformers_folder

        return any(
            is_paddleformers_folder(path) != self.auto_parallel for path in files.sizes if is_dist_file(path)
        )

    def index(self, files: SourceFiles, tables: RuleTables, missing: MissingPolicy | None) -> Checkpoint:
        """Understand the metadata and the data files; which of the two it is, its folders tell."""
        from paddle_reshard.pipeline.formats.flex.index import index_flex

        return index_flex(files, tables)

    def request(self, asked: Mapping[str, Any]) -> FlexTarget | RankFlexRequest:
        """Number of files, version of Paddle and names; with a topology, its job too."""
        from paddle_reshard.pipeline.formats.flex.request import parse_by_rank, parse_flex

        return parse_by_rank(asked) if asked.get("to") else parse_flex(self.auto_parallel, asked)


FORMATS = (
    DistFormat(FLEX, "FlexCheckpoint", auto_parallel=False),
    DistFormat(AUTO_PARALLEL, "dist_ckpt of auto-parallel training", auto_parallel=True),
)
