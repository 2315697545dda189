"""What becomes of a checkpoint under an AOA program?

A catalog goes in, a catalog comes out; no value is touched. Statements speak about keys: the parameter and all its
optimizer states and averages follow, in whatever order they stand. Boxes are cut, moved and transposed; a cast is a
parameter whose dtype differs from that of its fragments. Master weights, moments and averages keep theirs.

The single numbers that an optimizer keeps of a parameter (``beta1_pow_acc``) go to every part of a split. Those of
tensors that are joined become copies of one number, which the plan compares bit for bit.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from paddle_reshard.pipeline.aoa.follow import target_catalog
from paddle_reshard.pipeline.aoa.language import AoaProgram
from paddle_reshard.pipeline.aoa.run import Run
from paddle_reshard.pipeline.aoa.sources import Source
from paddle_reshard.pipeline.core.catalog import Catalog
from paddle_reshard.pipeline.core.tensors import Cast


@dataclass(frozen=True)
class AoaOutcome:
    """What a program makes of a checkpoint."""

    catalog: Catalog
    """The tensors of the target, made of the source's fragments."""
    created: tuple[str, ...]
    """Keys that the target has (``_ -> key``) and that no file holds. They are not in ``catalog``."""
    dropped: tuple[str, ...]
    """Names that statements drop (``name -> _``)."""
    idle: tuple[str, ...]
    """Where the statements stand that speak about no tensor of the source."""
    casts: frozenset[Cast]
    """What tensors are stored as, and what they become."""


def apply_aoa(
    catalog: Catalog,
    program: AoaProgram,
    *,
    wanted: Collection[str] | None = None,
    source_blocks: Mapping[str, int] | None = None,
    target_blocks: Mapping[str, int] | None = None,
    untied: Collection[str] = (),
    allow_created: bool = False,
) -> AoaOutcome:
    """Make the catalog of the target from that of the source.

    Keys that no statement speaks about stay as they are. Names that come to mean the same values are one tensor
    with aliases.

    Parameters
    ----------
    wanted
        All keys of the target, where they are known: these come out, and no others.
    source_blocks, target_blocks
        Key of a fused tensor → of how many blocks (``[gate_r | up_r]``) it is made: one for each tensor-parallel
        shard. 1 where not told.
    untied
        Keys that the target holds as tensors of their own, though their values are another's.
    allow_created
        Whether the target may have tensors that no file holds.

    Raises
    ------
    UsageError
        If a statement cannot be reversed or written out, naming its line.
    PlanError
        Naming file, line and tensor: one that does not exist, is made twice, is not used, or does not fit what is
        done with it; a cast that would round twice.
    UnsupportedError
        If tensors of the source are mixed of others.
    """
    source = Source(catalog)
    run = Run(source, program, wanted, source_blocks or {}, target_blocks or {})
    run.all()
    made = target_catalog(source, run.outputs(allow_created), frozenset(untied))
    return AoaOutcome(made, tuple(run.created), tuple(run.dropped), tuple(run.idle), made.casts())
