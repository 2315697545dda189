"""Hybrid-parallel checkpoints: ``model_state``, ``optimizer`` and ``ema`` of every rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from paddle_reshard.pipeline.layouts.checkpoint import Checkpoint, MissingPolicy
    from paddle_reshard.pipeline.layouts.reading import SourceFiles
    from paddle_reshard.pipeline.layouts.rules import RuleTable


@dataclass(frozen=True)
class HybridFormat:
    """What a rank holds, in a file of its own."""

    name: str
    sharded_saving: bool
    """Whether ``model_meta.json`` is written where the trainer does; it is read wherever it is."""
    loses_tensors: ClassVar[bool] = True
    index_as: ClassVar[None] = None

    def recognises(self, files: SourceFiles) -> bool:
        """Anything that is of no other format: what it lacks is told by :meth:`index`."""
        return True

    def index(
        self, files: SourceFiles, tables: Sequence[RuleTable], missing: MissingPolicy | None
    ) -> Checkpoint:
        """Understand the files of all ranks."""
        from paddle_reshard.pipeline.layouts.hybrid.index import index_hybrid

        return index_hybrid(files, tables, missing)


HYBRID = HybridFormat("hybrid", sharded_saving=True)
HYBRID_PLAIN = HybridFormat("hybrid-plain", sharded_saving=False)
