"""Which pieces does every rank of a job ask a FlexCheckpoint for?

What PaddleFormers 1.2 and Paddle 3.3.1 ask for (``trainer/trainer.py``, ``sharded_state_dict`` of the optimizers), seen
of real jobs:

* **model_state**: the tp piece of every tensor of the rank's stage, and of its own experts. Under stage 1 v2 nothing in
  bfloat16, which is cast from the master weights; such tensors are written once, each piece in one of the files of the
  ranks that hold it.
* **master_weight**, **optimizer_state**, **ema_state**: of every parameter whose states the rank holds, the whole tp
  piece, or under stage 1 v2 and of what stage 3 cuts a range of its flattening, without padding; under stage 3 an empty
  one too. States that are one number for each parameter are copied to every rank that holds a part of it.

Pieces that several ranks ask for are in the file of each.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from paddle_reshard.pipeline.checkpoint.checkpoint import Checkpoint
from paddle_reshard.pipeline.checkpoint.training_job import coordinates_of, takes_from_masters
from paddle_reshard.pipeline.core.tensors import EMA_PARAM, PARAM, is_per_parameter
from paddle_reshard.pipeline.formats.flex.boxes import Box
from paddle_reshard.pipeline.formats.flex.names import PLACES, renumbered
from paddle_reshard.pipeline.formats.flex.target import (
    find,
    is_written,
    paddleformers_folders,
    states_elsewhere,
)
from paddle_reshard.pipeline.formats.flex.writer import DataArray, file_name
from paddle_reshard.pipeline.formats.jobs.cells import Cell, CellPlanner
from paddle_reshard.pipeline.formats.jobs.job import HybridJob
from paddle_reshard.pipeline.formats.writing import UNCUT, NewArray
from paddle_reshard.pipeline.model.model import ModelTensor

_OF_RANK = (PARAM, EMA_PARAM)
"""States of which a rank holds its tp piece, however the optimizer's are sharded."""


@dataclass(frozen=True, slots=True)
class _Rank:
    """A rank of the job."""

    number: int
    """As the launcher numbers it."""
    shard: int
    """Its place in its sharding group."""
    cell: Cell
    listed: Mapping[str, str]
    """Parameter name → the key under which the optimizer lists the parameter."""


class PiecesOfRanks:
    """The pieces of every rank of a job."""

    def __init__(self, checkpoint: Checkpoint, job: HybridJob) -> None:
        self.checkpoint, self.job = checkpoint, job
        self.index = checkpoint.catalog.index()
        self.shift = checkpoint.model.table.written_shift(checkpoint.model.config)
        self.planner = CellPlanner(checkpoint.model, job)
        self.ranks = sorted(self._ranks(), key=lambda rank: rank.number)
        self.folders = paddleformers_folders(checkpoint)
        self.elsewhere = states_elsewhere(checkpoint.model)
        self.with_lora = checkpoint.model.has_lora
        self.has_masters = any(tensor.master for tensor in checkpoint.model.tensors)

    def _ranks(self) -> Iterator[_Rank]:
        degrees = self.job.topology
        library = self.checkpoint.model.table.convention
        numbers = {coordinates_of(rank, degrees, library): rank for rank in range(degrees.world_size)}
        for cell in self.planner.cells():
            listed = {cell.names[tensor.key]: tensor.key for tensor in cell.parameters}
            for shard in cell.held:
                for dp in range(degrees.dp):
                    yield _Rank(numbers[cell.tp, cell.pp, shard, dp], shard, cell, listed)

    def _is_asked_for(self, tensor: ModelTensor, state: str) -> bool:
        """Whether the ranks that hold a state ask for it; without master weights the trainer has only parameters."""
        return state != PARAM or not (
            self.has_masters and takes_from_masters(tensor, self.job.strategy, self.with_lora)
        )

    def nbytes(self) -> int:
        """Bytes of all arrays."""
        shares = (share for folder in self.folders for share in self.of_folder(folder)[0])
        return sum(piece.nbytes for share in shares for piece in share)

    def of_folder(self, folder: str) -> tuple[list[list[DataArray]], dict[Box, list[int]]]:
        """The pieces in every rank's file, and box → the ranks that hold it, in the order of copies.

        As Paddle's ``balanced_dedup_key_in_dict`` does, the first copy of each box is that of the rank that has fewest
        of the first copies before it; what is written once is written there.
        """
        asked = [list(self._of_rank(rank, folder)) for rank in self.ranks]
        holding: dict[Box, list[int]] = {}
        for number, pieces in enumerate(asked):
            for piece, _ in pieces:
                holding.setdefault(piece.box, []).append(number)
        once = {piece.box for pieces in asked for piece, is_asked in pieces if not is_asked}
        first_copies = [0] * len(asked)
        holders: dict[Box, list[int]] = {}
        for box, ranks in holding.items():
            by_name = sorted(ranks, key=file_name)
            first = min(by_name, key=first_copies.__getitem__)
            first_copies[first] += 1
            others = [] if box in once else [rank for rank in by_name if rank != first]
            holders[box] = [first, *others]
        shares = [
            [piece for piece, is_asked in pieces if is_asked or holders[piece.box] == [number]]
            for number, pieces in enumerate(asked)
        ]
        return shares, holders

    def _of_rank(self, rank: _Rank, folder: str) -> Iterator[tuple[DataArray, bool]]:
        """The pieces that a rank holds of a folder, and whether it asks for them."""
        for state in [state for state, (of_state, _) in PLACES.items() if of_state == folder]:
            for tensor in self._holding(rank, state):
                written = is_written(tensor, state, self.index, self.elsewhere)
                if written and (piece := self._piece(rank, tensor, state)):
                    yield piece, self._is_asked_for(tensor, state)

    def _holding(self, rank: _Rank, state: str) -> Sequence[ModelTensor]:
        """The tensors of which a rank holds a state; tied ones under each of their keys."""
        cell = rank.cell
        if state in _OF_RANK:
            return cell.tensors
        held = {cell.names[tensor.key] for tensor in cell.held[rank.shard]}
        holding = [t for t in cell.tensors if t.trained and cell.names[t.key] in held]
        # Stage 3 puts parameters that it cuts first; under another stage all are cut, or none.
        return sorted(holding, key=lambda tensor: self._range(rank, tensor) is None)

    def _piece(self, rank: _Rank, tensor: ModelTensor, state: str) -> DataArray | None:
        """A rank's piece; ``None`` if its range of the tensor is all padding, of which stage 3 asks for nothing too."""
        cell = rank.cell
        stored = renumbered(tensor.key, self.shift) + PLACES[state][1]
        number = find(self.index, tensor, state)
        dtype = self.checkpoint.catalog.tensors[number].dtype
        local, cut = cell.local_shapes[tensor.key], cell.cuts[tensor.key]
        flat = None if state in _OF_RANK else self._range(rank, tensor)
        if flat is not None and flat[0] == flat[1] and self.job.strategy != "stage3":
            return None
        whole = tensor.global_shape
        if is_per_parameter(state):
            local, cut, flat, whole = (1,), UNCUT, None, (1,)
        offset = [0] * len(local)
        if cut.tp > 1 and cut.dim is not None:
            offset[cut.dim] = cell.tp * local[cut.dim]
        box = Box(stored, whole, tuple(offset), local, flat, dtype.name)
        array = NewArray(number, dtype, box.kind(cut, dtype.itemsize), cell.tp)
        return DataArray(box, (stored,), stored, array)

    def _range(self, rank: _Rank, tensor: ModelTensor) -> tuple[int, int] | None:
        """The range of the flattened tp piece whose states a rank holds, without padding; ``None``: all of it."""
        cell = rank.cell
        slice_ = cell.shares[rank.listed[cell.names[tensor.key]]][rank.shard]
        if slice_ is None:
            return None
        elements = prod(cell.local_shapes[tensor.key])
        return min(slice_.start, elements), min(slice_.stop, elements)
