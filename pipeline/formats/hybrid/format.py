"""Hybrid-parallel checkpoints: ``model_state``, ``optimizer`` and ``ema`` of every rank."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final

from paddle_reshard.pipeline.checkpoint.format import (
    LAYOUT,
    PADDLE_VERSION,
    SHARDING_STRATEGY,
    TARGET_META,
    Format,
    FormatOption,
)
from paddle_reshard.pipeline.core.choices import ADAMW_MINI

if TYPE_CHECKING:
    from paddle_reshard.pipeline.checkpoint.checkpoint import Checkpoint, MissingPolicy
    from paddle_reshard.pipeline.checkpoint.reading import SourceFiles
    from paddle_reshard.pipeline.formats.hybrid.request import HybridRequest
    from paddle_reshard.pipeline.model.rules.tables import RuleTables

HYBRID: Final = "hybrid"
HYBRID_PLAIN: Final = "hybrid-plain"
_OPTIONS: Mapping[str, FormatOption] = {
    "to": FormatOption(
        "topology of the target job as axis=size,…: tp, pp, vpp, sharding, ep, dp; omitted axes "
        "are 1. Required."
    ),
    "sharding_strategy": SHARDING_STRATEGY,
    "layout": LAYOUT,
    "target_meta": TARGET_META,
    "paddle_version": PADDLE_VERSION,
}


@dataclass(frozen=True)
class HybridFormat(Format):
    """A set of files per rank."""

    name: str
    help: str
    sharded_saving: bool
    """Whether ``model_meta.json`` is written where the trainer does; it is read wherever it is."""
    options: ClassVar[Mapping[str, FormatOption]] = _OPTIONS
    needs_topology: ClassVar[bool] = True
    starts_with: ClassVar[str] = "--load_checkpoint_format sharding_io --ignore_load_lr_and_optim true"
    starts_with_masters: ClassVar[str] = (
        "--load_checkpoint_format sharding_io --load_sharded_model true --ignore_load_lr_and_optim true"
    )
    holds_lora: ClassVar[bool] = True
    special_optimizers: ClassVar[tuple[str, ...]] = (ADAMW_MINI,)
    by_table: ClassVar[bool] = True

    def loaded_with(self, library: str, strategy: str) -> Mapping[str, str | bool] | None:
        """By each rank, from a file of its own part, as ``model_meta.json`` lists them, or from a complete file.

        PaddleFormers' default, ``flex_checkpoint``, finds nothing in either (``trainer/trainer.py``).
        """
        own_part = self.sharded_saving and strategy in ("stage1v1", "stage1v2")
        if library == "paddlenlp":
            return {"save_sharded_model": True, "load_sharded_model": True} if own_part else {}
        reads = {"load_checkpoint_format": "sharding_io"}
        return (
            {"save_checkpoint_format": "sharding_io", **reads, "load_sharded_model": True}
            if own_part
            else reads
        )

    def loads(self, paths: Iterable[str]) -> bool:
        """Not parameters in safetensors files, which they save by default and look for as ``model_state`` alone.

        ``_load_from_checkpoint`` in PaddleFormers' ``trainer/trainer.py``: "do not support safetensors".
        """
        from paddle_reshard.pipeline.formats.hybrid.safetensors_weights import WEIGHTS_OF_RANK

        return not any(WEIGHTS_OF_RANK.fullmatch(path) for path in paths)

    def rank_of(self, path: str) -> Mapping[str, int] | None:
        """Every tensor file is one of a rank; ``ep`` is the expert rank.

        >>> FORMATS[0].rank_of("optimizer.tp00_pp01_shard03.pdopt"), FORMATS[0].rank_of("model.safetensors")
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

    def recognises(self, files: SourceFiles) -> bool:
        """Accept what no other format recognises; :meth:`index` reports what it lacks."""
        return True

    def index(self, files: SourceFiles, tables: RuleTables, missing: MissingPolicy | None) -> Checkpoint:
        """Read the metadata of all ranks' files."""
        from paddle_reshard.pipeline.formats.hybrid.source import index_hybrid

        return index_hybrid(files, tables, missing)

    def request(self, asked: Mapping[str, Any]) -> HybridRequest:
        """Topology, sharding strategy, layout, names and Paddle version of the target job."""
        from paddle_reshard.pipeline.formats.hybrid.request import HybridRequest

        return HybridRequest.of(asked, sharded_saving=self.sharded_saving)


FORMATS = (
    HybridFormat(
        HYBRID, "a set of files per rank, with model_meta.json if the trainer writes it", sharded_saving=True
    ),
    HybridFormat(HYBRID_PLAIN, "a set of files per rank, without model_meta.json", sharded_saving=False),
)
