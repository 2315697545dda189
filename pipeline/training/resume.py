"""Read the average of a rank's weights from a checkpoint of any topology.

The pieces of logical tensors that a rank averages are the target of an ordinary plan, with this process's memory in
place of files, so only the bytes that they need are read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from paddle_reshard.pipeline.checkpoint.checkpoint import Checkpoint
from paddle_reshard.pipeline.checkpoint.files import TargetFiles
from paddle_reshard.pipeline.core.catalog import File, Fragments, volumes
from paddle_reshard.pipeline.core.errors import CheckpointError, UsageError
from paddle_reshard.pipeline.core.geometry import Shape
from paddle_reshard.pipeline.core.literals import Literals
from paddle_reshard.pipeline.core.tensors import EMA_MASTER_WEIGHT, EMA_PARAM, dtype_named
from paddle_reshard.pipeline.indexing.detect import index_checkpoint
from paddle_reshard.pipeline.indexing.finished import check_signals
from paddle_reshard.pipeline.model.placement import ArrayKind, Placements, TensorCut
from paddle_reshard.pipeline.model.rules.tables import RuleTables
from paddle_reshard.pipeline.planning.plan import plan_conversion
from paddle_reshard.pipeline.planning.settings import PlanSettings
from paddle_reshard.pipeline.planning.work import RemainingGroups
from paddle_reshard.pipeline.training.layout import needed_of
from paddle_reshard.pipeline.training.stretches import Stretches
from paddle_reshard.pipeline.training.tensors import HostMemory, MemoryWriter
from paddle_reshard.storage.store import Source
from paddle_reshard.tasks.run_group import run_group

FLOAT32 = dtype_named("float32")
BUDGET_BYTES = 512 << 20
"""Memory budget of reading in addition to the average itself, including this process's own footprint."""
MEMORY = "the average"
"""Path of the memory among files."""


@dataclass(frozen=True, slots=True)
class Piece:
    """The piece of a parameter that a tensor of this rank is."""

    key: str
    """Structured key, ``model.layers.0.mlp.up_proj.weight``."""
    local_shape: Shape
    """Shape on this rank, as cut by tensor parallelism."""
    flat: tuple[int, int] | None = None
    """The tensor is one-dimensional and holds ``[start, stop)`` of the flattened parameter, followed by padding.
    ``None``: the whole parameter."""
    whole: bool = False
    """Tensor parallelism does not cut this parameter: an expert of an expert-parallel job."""


@dataclass(frozen=True)
class RankPieces:
    """The pieces of logical tensors that a rank holds."""

    master_weights: Mapping[str, Piece] = field(default_factory=dict)
    """Name of a master weight in the optimizer → its piece. Parameters without an entry are whole."""
    tp: int = 1
    tp_rank: int = 0


def read_average(
    store: Source,
    tables: RuleTables,
    config: Mapping[str, Any] | None,
    stretches: Stretches,
    rank: RankPieces,
    memory: npt.NDArray[np.uint8],
) -> None:
    """Fill ``memory`` with a rank's average, and the gaps between its tensors with zeros.

    If several ranks have written copies, the first is read.

    Raises
    ------
    CheckpointError, PlanError
        If the checkpoint is incomplete, holds no average of a tensor, or has it in a different shape.
    UsageError
        If ``rank`` lacks a master weight.
    """
    checkpoint = index_checkpoint(store, tables, config)
    check_signals(store)
    if not checkpoint.has_ema:
        raise CheckpointError(f"{store.location}: contains no average of the weights to continue from")
    fragments = _fragments(checkpoint, stretches, rank)
    gaps = len(memory) - FLOAT32.itemsize * int(volumes(fragments).sum())
    files = TargetFiles((File(MEMORY, len(memory)),), Literals(), ((0, 0, gaps),), fragments)
    settings = PlanSettings(BUDGET_BYTES, compare_replicas=False)
    plan = plan_conversion(needed_of(checkpoint.catalog, fragments), files, (), settings)
    target = MemoryWriter({MEMORY: HostMemory(memory, memory)})
    for work in RemainingGroups(plan):
        run_group(work, store, target)


def _fragments(checkpoint: Checkpoint, stretches: Stretches, rank: RankPieces) -> Fragments:
    """The boxes of the logical tensors that a rank averages, and their positions in memory."""
    known = {tensor.key: tensor for tensor in checkpoint.model.tensors}
    index = checkpoint.catalog.index()
    placements = Placements()
    for (group, name), stretch in stretches.items():
        piece = rank.master_weights.get(name) if group else Piece(name, stretch.shape)
        if piece is None:
            raise UsageError(f"{name}: the RankPieces do not say which parameter it belongs to")
        state = EMA_MASTER_WEIGHT if group else EMA_PARAM
        tensor = known.get(piece.key)
        number = None if tensor is None else index.get((tensor.tied_to or tensor.key, state))
        if tensor is None or number is None:
            raise CheckpointError(
                f"{piece.key} ({state}): the checkpoint contains no average of it, which {name} needs"
            )
        cut = TensorCut(1, None) if piece.whole else checkpoint.model.cut(tensor, rank.tp)
        local_shape = cut.local_shape(tensor.key, tensor.global_shape)
        if local_shape != piece.local_shape:
            how = "uncut" if piece.whole else f"cut by tp={rank.tp}"
            raise CheckpointError(
                f"{piece.key}: has shape {tensor.global_shape} in the checkpoint and {local_shape} {how}, "
                f"but {piece.local_shape} in this rank"
            )
        shape = piece.local_shape if piece.flat is None else (piece.flat[1] - piece.flat[0],)
        if shape != stretch.shape:
            raise CheckpointError(
                f"{name}: has shape {stretch.shape} in this rank, but its piece of {piece.key} has {shape}"
            )
        kind = placements.kind(ArrayKind(local_shape, cut, FLOAT32.itemsize, piece.flat))
        first_byte = FLOAT32.itemsize * stretch.start
        placements.add(kind, rank.tp_rank, number, 0, first_byte, FLOAT32, 0)
    return placements.fragments()
