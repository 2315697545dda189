"""Dist checkpoints: the folders of PaddleFormers' FlexCheckpoint, and the one of auto-parallel training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from paddle_reshard.pipeline.layouts.checkpoint import Checkpoint, MissingPolicy
    from paddle_reshard.pipeline.layouts.reading import SourceFiles
    from paddle_reshard.pipeline.layouts.rules import RuleTable


@dataclass(frozen=True)
class DistFormat:
    """Data files, and metadata that say which box of which tensor each of their arrays is."""

    name: str
    auto_parallel: bool
    """One folder, states under parameter names; else folders of PaddleFormers, structured names."""
    loses_tensors: ClassVar[bool] = False
    index_as: ClassVar[None] = None

    def recognises(self, files: SourceFiles) -> bool:
        """By the names of the files, which are the same for both."""
        from paddle_reshard.pipeline.layouts.flex.names import is_dist_file

        return any(map(is_dist_file, files.sizes))

    def index(
        self, files: SourceFiles, tables: Sequence[RuleTable], missing: MissingPolicy | None
    ) -> Checkpoint:
        """Understand the metadata and the data files; which of the two it is, its folders tell."""
        from paddle_reshard.pipeline.layouts.flex.index import index_flex

        return index_flex(files, tables)


FLEX = DistFormat("flex", auto_parallel=False)
AUTO_PARALLEL = DistFormat("auto-parallel", auto_parallel=True)
