"""Every file of a target, whatever its format: the tensor files byte for byte, and what becomes of the others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from paddle_reshard.pipeline.catalog import Catalog
from paddle_reshard.pipeline.layouts.huggingface.sidecars import plan_huggingface_sidecars
from paddle_reshard.pipeline.layouts.huggingface.target import HuggingFaceTarget, layout_huggingface
from paddle_reshard.pipeline.layouts.hybrid.sidecars import plan_sidecars
from paddle_reshard.pipeline.layouts.hybrid.source import HybridCheckpoint
from paddle_reshard.pipeline.layouts.hybrid.target import (
    HybridTarget,
    TargetFiles,
    add_literal_files,
    layout_hybrid,
)

AnyTarget = HybridTarget | HuggingFaceTarget


@dataclass(frozen=True)
class LaidOut:
    """The files of a target, and what they are made of."""

    catalog: Catalog
    """Of the source, what goes into the target."""
    files: TargetFiles
    carried: tuple[str, ...]
    """Paths of files that go to the target byte for byte."""
    left: tuple[tuple[str, str], ...]
    """``(path, why it is not in the target)``."""
    left_states: tuple[str, ...]
    """States of tensors of which nothing is in the target, because its format has no place for them."""


def lay_out(
    source: HybridCheckpoint,
    wanted: HybridCheckpoint,
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
        sidecars = plan_huggingface_sidecars(sizes, folders, wanted.model.config, config, target)
        files = add_literal_files(laid_out.files, sidecars.written)
        return LaidOut(laid_out.catalog, files, sidecars.carried, sidecars.left, laid_out.left_states)
    sidecars = plan_sidecars(sizes, folders, wanted, config, target.topology)
    files = add_literal_files(layout_hybrid(wanted, target), sidecars.written)
    return LaidOut(source.catalog, files, sidecars.carried, sidecars.left, ())


def target_facts(target: AnyTarget) -> dict[str, str]:
    """What tells a target from others of the same source, in words."""
    if isinstance(target, HuggingFaceTarget):
        dtype = "as trained" if target.dtype is None else target.dtype.name
        return {"layout": "huggingface", "state": target.state, "dtype": dtype}
    return {"topology": str(target.topology), "sharding_strategy": target.strategy}
