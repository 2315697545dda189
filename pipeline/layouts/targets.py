"""Every target format: the tensor files byte for byte, and what becomes of the other files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from paddle_reshard.pipeline.layouts.checkpoint import Checkpoint
from paddle_reshard.pipeline.layouts.files import LaidOut, add_literal_files
from paddle_reshard.pipeline.layouts.huggingface.sidecars import plan_huggingface_sidecars
from paddle_reshard.pipeline.layouts.huggingface.target import HuggingFaceTarget, layout_huggingface
from paddle_reshard.pipeline.layouts.hybrid.sidecars import plan_sidecars
from paddle_reshard.pipeline.layouts.hybrid.target import HybridTarget, layout_hybrid

AnyTarget = HybridTarget | HuggingFaceTarget


def lay_out(
    source: Checkpoint,
    wanted: Checkpoint,
    target: AnyTarget,
    sizes: Mapping[str, int],
    folders: Sequence[str],
) -> LaidOut:
    """Lay out a target.

    Parameters
    ----------
    wanted
        The source as the target is to hold it: the same but for a vocabulary of another size.
    sizes, folders
        Path of every file of the source → size in bytes; names of folders in it.

    Raises
    ------
    PlanError
        If the source cannot become this target.
    """
    config = source.model.config
    if isinstance(target, HuggingFaceTarget):
        laid_out = layout_huggingface(source.catalog, wanted, target)
        sidecars = plan_huggingface_sidecars(sizes, folders, wanted, config, target)
        files = add_literal_files(laid_out.files, sidecars.written)
        return LaidOut(laid_out.catalog, files, sidecars.carried, sidecars.left, laid_out.left_states)
    sidecars = plan_sidecars(sizes, folders, wanted, config, target.topology)
    files = add_literal_files(layout_hybrid(wanted, target), sidecars.written)
    return LaidOut(source.catalog, files, sidecars.carried, sidecars.left)


def target_facts(target: AnyTarget) -> dict[str, str]:
    """What tells a target from others of the same source, in words."""
    if isinstance(target, HuggingFaceTarget):
        dtype = "as trained" if target.dtype is None else target.dtype.name
        return {"layout": "huggingface", "state": target.state, "dtype": dtype}
    return {"topology": str(target.topology), "sharding_strategy": target.strategy}
