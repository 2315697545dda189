"""Read the average of a rank's weights from a checkpoint of any topology.

A rank describes for each of its tensors which piece of which logical tensor it is. These pieces are the target of an
ordinary plan, with this process's memory in place of files, so only the bytes that they need are read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from paddle_reshard.pipeline.checkpoint.checkpoint import Checkpoint
from paddle_reshard.pipeline.checkpoint.files import TargetFiles
from paddle_reshard.pipeline.core.catalog import Catalog, File, Fragments
from paddle_reshard.pipeline.core.errors import CheckpointError
from paddle_reshard.pipeline.core.geometry import Shape
from paddle_reshard.pipeline.core.literals import Literals
from paddle_reshard.pipeline.core.tensors import EMA_MASTER_WEIGHT, EMA_PARAM, dtype_named
from paddle_reshard.pipeline.indexing.detect import index_checkpoint
from paddle_reshard.pipeline.indexing.finished import check_signals
from paddle_reshard.pipeline.model.placement import ArrayKind, Placements, TensorCut
from paddle_reshard.pipeline.model.rules.tables import RuleTables
from paddle_reshard.pipeline.planning.plan import Plan, plan_conversion
from paddle_reshard.pipeline.planning.settings import PlanSettings
from paddle_reshard.pipeline.planning.work import Works
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
    """Structured key of the parameter, ``model.layers.0.mlp.up_proj.weight``."""
    local_shape: Shape
    """Shape of the parameter on this rank, as cut by tensor parallelism."""
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
    """Degree of tensor parallelism."""
    tp_rank: int = 0


@dataclass(frozen=True, slots=True)
class Wanted:
    """A tensor of the average: its piece and its position in memory."""

    name: str
    """Name for messages."""
    master: bool
    """Whether it is the average of a master weight, not of a float32 parameter."""
    piece: Piece
    shape: Shape
    first_byte: int


def read_average(
    store: Source,
    tables: RuleTables,
    config: Mapping[str, Any] | None,
    wanted: Sequence[Wanted],
    rank: RankPieces,
    memory: npt.NDArray[np.uint8],
) -> None:
    """Fill ``memory`` with a rank's average, and the gaps between its tensors with zeros.

    If several ranks have written copies, the first is read.

    Raises
    ------
    CheckpointError, PlanError
        If the checkpoint is incomplete, holds no average of a tensor, or has it in a different shape.
    """
    checkpoint = index_checkpoint(store, tables, config)
    check_signals(store)
    if not checkpoint.has_ema:
        raise CheckpointError(f"{store.location}: contains no average of the weights to continue from")
    plan = _plan(checkpoint, wanted, rank, len(memory))
    target = MemoryWriter({MEMORY: HostMemory(memory, memory)})
    for work in Works(plan):
        run_group(work, store, target)


def _plan(checkpoint: Checkpoint, wanted: Sequence[Wanted], rank: RankPieces, nbytes: int) -> Plan:
    fragments = _fragments(checkpoint, wanted, rank)
    catalog = _restricted(checkpoint.catalog, fragments)
    filled = 4 * sum(map(_elements, wanted))
    files = TargetFiles((File(MEMORY, nbytes),), Literals(), ((0, 0, nbytes - filled),), fragments)
    settings = PlanSettings(BUDGET_BYTES, compare_replicas=False, allow_reread=True)
    return plan_conversion(catalog, files, (), settings)


def _elements(tensor: Wanted) -> int:
    """Number of elements of the parameter in a tensor, without padding."""
    total = prod(tensor.piece.local_shape)
    start, stop = tensor.piece.flat or (0, total)
    return max(0, min(stop, total) - start)


def _fragments(checkpoint: Checkpoint, wanted: Sequence[Wanted], rank: RankPieces) -> Fragments:
    """The requested boxes of the logical tensors, and their positions in memory."""
    known = {tensor.key: tensor for tensor in checkpoint.model.tensors}
    index = checkpoint.catalog.index()
    placements = Placements()
    for item in wanted:
        piece, state = item.piece, EMA_MASTER_WEIGHT if item.master else EMA_PARAM
        tensor = known.get(piece.key)
        number = None if tensor is None else index.get((tensor.tied_to or tensor.key, state))
        if tensor is None or number is None:
            raise CheckpointError(
                f"{piece.key} ({state}): the checkpoint contains no average of it, which {item.name} needs"
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
        if shape != item.shape:
            raise CheckpointError(
                f"{item.name}: has shape {item.shape} in this rank, but its piece of {piece.key} has {shape}"
            )
        kind = placements.kind(ArrayKind(local_shape, cut, FLOAT32.itemsize, piece.flat))
        placements.add(kind, rank.tp_rank, number, 0, item.first_byte, FLOAT32, 0)
    return placements.fragments()


def _restricted(catalog: Catalog, wanted: Fragments) -> Catalog:
    """A catalog with fragments of the first copies of the requested tensors only; tensors keep their indexes."""
    chosen = np.isin(catalog.fragments["tensor"], wanted["tensor"]) & (catalog.fragments["replica"] == 0)
    return Catalog(catalog.tensors, catalog.files, catalog.fragments[chosen], {})
