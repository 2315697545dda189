"""Unified checkpoints: whole tensors in safetensors files, in Paddle's own layout."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Final

from paddle_reshard.pipeline.checkpoint.format import Format, FormatOption

if TYPE_CHECKING:
    from paddle_reshard.pipeline.checkpoint.checkpoint import Checkpoint, MissingPolicy
    from paddle_reshard.pipeline.checkpoint.reading import SourceFiles
    from paddle_reshard.pipeline.formats.unified.target import UnifiedTarget
    from paddle_reshard.pipeline.model.rules.tables import RuleTables

UNIFIED: Final = "unified"

_CUT_BY_CLASS = frozenset({"ernie4_5_moe_vl"})
"""Families of PaddleFormers whose class says how tp cuts its tensors."""


class UnifiedFormat(Format):
    """Weights, master weights and optimizer states, each kind in files of its own."""

    name = UNIFIED
    help = "unified checkpoint"
    options: ClassVar[Mapping[str, FormatOption]] = {
        "files": FormatOption("number of files of each kind. Default: 1.")
    }
    cannot_hold: ClassVar[tuple[str, ...]] = ("ema",)

    def loaded_with(self, library: str, strategy: str) -> Mapping[str, str | bool]:
        """Under any strategy."""
        if library == "paddlenlp":
            return {"unified_checkpoint": True}
        return {
            "save_checkpoint_format": "unified_checkpoint",
            "load_checkpoint_format": "unified_checkpoint",
            "convert_from_hf": False,  # else the weights are transposed as those of other libraries, and do not fit
        }

    def lost_to_tp(self, family: str, library: str, recipe: str) -> str:
        """PaddleFormers' loader asks the class how to cut (1.2.0 ``trainer/unified_checkpoint/load_local.py:117``).

        Of the models that it trains only those of its recipes and ERNIE's vision models answer
        (``transformers/conversion_utils.py:1399``, ``transformers/ernie4_5_moe_vl/model/modeling_moe.py``).

        >>> [bool(FORMAT.lost_to_tp(family, "paddleformers", "")) for family in ("qwen3", "ernie4_5_moe_vl")]
        [True, False]
        """
        if library != "paddleformers" or recipe or family in _CUT_BY_CLASS:
            return ""
        return (
            "PaddleFormers 1.2 reads no unified checkpoint under tensor parallelism: its loader stops with "
            "NotImplementedError, as this class has no _get_tensor_parallel_mappings; such a job needs --format "
            "hybrid or flex"
        )

    def recognises(self, files: SourceFiles) -> bool:
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

    def index(self, files: SourceFiles, tables: RuleTables, missing: MissingPolicy | None) -> Checkpoint:
        """Understand the headers of all files."""
        from paddle_reshard.pipeline.checkpoint.checkpoint import MissingPolicy
        from paddle_reshard.pipeline.formats.unified.source import index_unified

        return index_unified(files, tables, missing or MissingPolicy())

    def request(self, asked: Mapping[str, Any]) -> UnifiedTarget:
        """Number of files; nothing of it depends on the source."""
        from paddle_reshard.pipeline.formats.unified.target import UnifiedTarget

        files = asked.get("files")
        return UnifiedTarget() if files is None else UnifiedTarget(files)


FORMAT = UnifiedFormat()
