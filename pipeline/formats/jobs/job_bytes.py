"""The bytes that each rank of a hybrid-parallel job holds, and those of all files.

The same cells, slices and padding as in the files of its ranks, without their bytes: a second where laying out takes
several.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from paddle_reshard.pipeline.checkpoint.checkpoint import Checkpoint
from paddle_reshard.pipeline.checkpoint.format import RankBytes
from paddle_reshard.pipeline.formats.jobs.cells import Cell, CellPlanner
from paddle_reshard.pipeline.formats.jobs.job import HybridJob
from paddle_reshard.pipeline.formats.jobs.keys import first_keys
from paddle_reshard.pipeline.model.model import ModelTensor


def job_bytes(checkpoint: Checkpoint, target: HybridJob) -> tuple[RankBytes, int]:
    """What the rank with most bytes on its card holds, and the bytes of the tensors in all files."""
    sizes = _Sizes(checkpoint, target)
    fullest, total = RankBytes(0, 0, 0, 0), 0
    before: Cell | None = None
    of_cell, in_files = fullest, 0
    for cell in sizes.planner.cells():
        if before is None or not cell.differs_only_in_tp(before):
            ranks = sizes.of_ranks(cell)
            of_cell = max(ranks, key=lambda rank: rank.on_card)
            in_files = sizes.in_files(cell, ranks)
        fullest = max(fullest, of_cell, key=lambda rank: rank.on_card)
        total += in_files
        before = cell
    return fullest, total


class _Sizes:
    """The bytes of cells and ranks of a target."""

    def __init__(self, checkpoint: Checkpoint, target: HybridJob) -> None:
        self.checkpoint, self.target = checkpoint, target
        self.planner = CellPlanner(checkpoint.model, target)

    def of_ranks(self, cell: Cell) -> list[RankBytes]:
        """What each rank of the sharding group holds."""
        whole = 0 if self.target.strategy == "stage3" else self._parameters(cell, 0)
        return [self._of_rank(cell, shard, whole or self._parameters(cell, shard)) for shard in cell.held]

    def _of_rank(self, cell: Cell, shard: int, parameters: int) -> RankBytes:
        masters = moments = ema = 0
        of_states = self.checkpoint.bytes_of_states
        for tensor in cell.held[shard] if self.checkpoint.has_optimizer else ():
            elements, of = self._elements(cell, tensor.key, shard), of_states[tensor.key]
            moments += of.numbers + of.moments * elements
            masters += of.master * elements
            ema += of.ema * elements
        plain = () if self.planner.only_experts(cell.ep) else cell.model_state.get(shard, ())
        if self.checkpoint.has_ema:
            ema += sum(of_states[t.key].ema_param * prod(cell.local_shapes[t.key]) for t in plain)
        return RankBytes(parameters, masters, moments, ema if self.checkpoint.has_ema else 0)

    def in_files(self, cell: Cell, ranks: Sequence[RankBytes]) -> int:
        """Bytes of the tensors in all files of a cell."""
        states = sum(rank.master_weights + rank.moments + rank.ema for rank in ranks)
        return states + sum(_bytes(cell, t) for tensors in cell.model_state.values() for t in tensors)

    def _parameters(self, cell: Cell, shard: int) -> int:
        """Every parameter once, also those that only a master weight in the files defines.

        Stage 3 leaves each rank a slice of the parameters that it cuts.
        """
        slices = self.target.strategy == "stage3"
        once = first_keys(cell.names)  # of tied tensors, the first
        total = 0
        for tensor in cell.tensors:
            if once[cell.names[tensor.key]] != tensor.key:
                continue
            if slices and tensor.key in cell.shares:
                total += tensor.dtype.itemsize * self._elements(cell, tensor.key, shard)
            else:
                total += _bytes(cell, tensor)
        return total

    def _elements(self, cell: Cell, key: str, shard: int) -> int:
        """Elements of a parameter, padding included, whose states a rank of the sharding group stores."""
        flat = cell.shares[key][shard]
        return prod(cell.local_shapes[key]) if flat is None else flat.elements


def _bytes(cell: Cell, tensor: ModelTensor) -> int:
    return tensor.dtype.itemsize * prod(cell.local_shapes[tensor.key])
