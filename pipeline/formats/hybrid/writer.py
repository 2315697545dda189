"""Lay out the files of every rank: their entries, in the trainer's order."""

from __future__ import annotations

from array import array as numbers_of
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import TypeAlias

import numpy as np

from paddle_reshard.pipeline.checkpoint.checkpoint import Checkpoint
from paddle_reshard.pipeline.checkpoint.files import TargetFiles
from paddle_reshard.pipeline.core.catalog import File
from paddle_reshard.pipeline.core.file_names import MODEL_META, SIGNAL_PREFIX
from paddle_reshard.pipeline.core.literals import LiteralTemplate
from paddle_reshard.pipeline.core.numbers import Ints
from paddle_reshard.pipeline.core.tensors import (
    ACCUMULATORS,
    DTYPES,
    EMA_MASTER_WEIGHT,
    EMA_PARAM,
    MASTER_WEIGHT,
    PARAM,
    is_per_parameter,
)
from paddle_reshard.pipeline.core.upstream import paddle_release
from paddle_reshard.pipeline.formats.hybrid.names import (
    EMA,
    LORA_MODEL_STATE,
    MODEL_STATE,
    OPTIMIZER,
    WEIGHTS,
    rank_file_name,
)
from paddle_reshard.pipeline.formats.jobs.cells import Cell, CellPlanner
from paddle_reshard.pipeline.formats.jobs.job import HybridJob
from paddle_reshard.pipeline.formats.sharding import FlatSlice
from paddle_reshard.pipeline.formats.writing import UNCUT, NewFiles, lacking
from paddle_reshard.pipeline.model.model import ModelTensor
from paddle_reshard.pipeline.model.optimizer_keys import (
    MASTER_WEIGHTS,
    SLICE_PREFIX,
    accumulator_ending,
    master_tensor_name,
)
from paddle_reshard.pipeline.model.placement import ArrayKind
from paddle_reshard.storage.files.paddle_pickle import STRUCTURED_NAMES
from paddle_reshard.storage.files.paddle_pickle_writer import ArraySlot, DictEntries, write_pickle


class HybridWriter:
    """Lays out all files of a target."""

    def __init__(self, checkpoint: Checkpoint, target: HybridJob) -> None:
        self.checkpoint, self.target, self.topology = checkpoint, target, target.topology
        self.planner = CellPlanner(checkpoint.model, target)
        self.written, self.saved = self.planner.written, self.planner.saved
        self.bytes = FileBytes(checkpoint, paddle_release(target.paddle_version).pickle_protocol)

    def layout(self) -> TargetFiles:
        """All files of the target.

        The files of tp ranks are laid out once where they differ only in the offsets of boxes.
        """
        cells: list[Cell] = []
        layouts: list[RankFileLayout] = []
        for cell in self.planner.cells():
            if not cells or not cell.differs_only_in_tp(cells[-1]):
                layouts = [layout for shard in cell.held for layout in self._rank_files(cell, shard)]
            for layout in layouts:
                # An expert rank has pieces of tensors only in jobs without tp.
                rank = cell.tp if self.topology.tp > 1 else cell.ep
                self.bytes.add(self._name(layout.kind, cell, layout.shard), layout, rank)
            cells.append(cell)
        described = self.planner.described(cells)
        if self.target.writes_meta:
            self.bytes.add_literal(MODEL_META, self.planner.meta(described))
        saving = 1 if self.target.expert_axis == "dp" else self.topology.dp
        for rank in range(self.topology.world_size // saving if self.checkpoint.has_optimizer else 0):
            self.bytes.add_literal(f"{SIGNAL_PREFIX}{rank}", b"1")
        return replace(
            self.bytes.target_files(),
            fills=tuple(self.bytes.fills),
            parameter_names={self.planner.name(c.tp, c.pp, c.ep): c.names for c in described},
        )

    def _rank_files(self, cell: Cell, shard: int) -> Iterator[RankFileLayout]:
        if shard in cell.model_state:
            yield self._model_state(cell, shard)
        if not self.checkpoint.has_optimizer:
            return
        yield self._optimizer(cell, shard)
        if self.checkpoint.has_ema:
            yield self._ema(cell, shard)

    def _name(self, kind: str, cell: Cell, shard: int | None) -> str:
        degrees = self.topology
        return rank_file_name(
            kind,
            cell.tp if degrees.tp > 1 else None,
            cell.pp if degrees.pp > 1 else None,
            shard if degrees.sharding > 1 else None,
            moe=cell.ep if self.target.expert_axis == "dp" else None,
            ep=cell.ep if kind in WEIGHTS and shard is None and degrees.ep > 1 else None,
        )

    def _model_state(self, cell: Cell, shard: int) -> RankFileLayout:
        rows, tensors = numbers_of("q"), cell.model_state[shard]
        add = self.bytes.adder(rows, cell, PARAM)

        def entries() -> Iterator[tuple[object, object]]:
            for t in tensors:
                yield self.saved[t.key], add(t.key, None, None)
            yield STRUCTURED_NAMES, {self.saved[t.key]: cell.names[t.key] for t in tensors}

        kind = LORA_MODEL_STATE if self.planner.with_lora else MODEL_STATE
        of_rank = shard if self.planner.shares_parameters else None
        return self.bytes.lay_out(kind, of_rank, entries(), rows)

    def _optimizer(self, cell: Cell, shard: int) -> RankFileLayout:
        """State by state, then the master weights.

        Of a dp rank above 0 only its experts, tensor by tensor (PaddleNLP 3.0.0b4 ``trainer.py:2534``).
        """
        held, only_experts = cell.held[shard], self.planner.only_experts(cell.ep)
        with_master = any(t.master for t in held)
        rows = numbers_of("q")
        held_by_any = {a for accumulators in {t.accumulators for t in cell.parameters} for a in accumulators}
        states = [
            (a, accumulator_ending(a), self.bytes.adder(rows, cell, a))
            for a in ACCUMULATORS
            if a in held_by_any
        ]
        pieces = [
            (t.key, t.accumulators, self._key_of_states(cell, t, shard), cell.shares[t.key][shard])
            for t in held
        ]
        pairs = (
            ((piece, state) for piece in pieces for state in states)
            if only_experts
            else ((piece, state) for state in states for piece in pieces)
        )

        def entries() -> Iterator[tuple[object, object]]:
            unnamed = {}
            if only_experts:
                yield MASTER_WEIGHTS, self._master_weights(rows, cell, shard, MASTER_WEIGHT)
            for (tensor, held_by, begins, flat), (accumulator, ending, add) in pairs:
                if accumulator in held_by:
                    key = begins + ending
                    yield key, add(tensor, flat, key if with_master else None)
                    if not with_master:
                        unnamed[key] = key
            if with_master and not only_experts:
                yield MASTER_WEIGHTS, self._master_weights(rows, cell, shard, MASTER_WEIGHT)
            if self.checkpoint.job.lr_scheduler is not None and not only_experts:
                yield "LR_Scheduler", self.checkpoint.job.lr_scheduler
            if not with_master:
                yield STRUCTURED_NAMES, unnamed

        return self.bytes.lay_out(OPTIMIZER, shard, entries(), rows)

    def _ema(self, cell: Cell, shard: int) -> RankFileLayout:
        with_master = any(t.master for t in cell.held[shard])
        plain = [t for t in cell.model_state.get(shard, ()) if self.bytes.has(t, EMA_PARAM)]
        if self.planner.only_experts(cell.ep):
            plain = []
        rows = numbers_of("q")

        def entries() -> Iterator[tuple[object, object]]:
            yield MASTER_WEIGHTS, self._master_weights(rows, cell, shard, EMA_MASTER_WEIGHT)
            add = self.bytes.adder(rows, cell, EMA_PARAM)
            for tensor in plain:
                name = cell.names[tensor.key] if with_master else None
                yield self.written[tensor.key], add(tensor.key, None, name)
            if not with_master:
                yield STRUCTURED_NAMES, {self.written[t.key]: cell.names[t.key] for t in plain}

        return self.bytes.lay_out(EMA, shard, entries(), rows)

    def _master_weights(self, rows: ArrayRows, cell: Cell, shard: int, state: str) -> DictEntries:
        add = self.bytes.adder(rows, cell, state)

        def entries() -> Iterator[tuple[object, object]]:
            for tensor in self._in_order_of_masters(cell, shard):
                if not tensor.master:
                    continue
                name = cell.names[tensor.key]
                entry = f"{SLICE_PREFIX}{name}" if self._is_stage3_slice(cell, tensor, shard) else name
                tensor_name = master_tensor_name(name) if self._separate_master_names() else name
                yield entry, add(tensor.key, cell.shares[tensor.key][shard], tensor_name)

        return DictEntries(entries())

    def _in_order_of_masters(self, cell: Cell, shard: int) -> list[ModelTensor]:
        """A rank's parameters: stage 2 creates master weights in order of size, others those of each color first."""
        if self.target.strategy == "stage2":
            return sorted(cell.held[shard], key=lambda t: prod(cell.local_shapes[t.key]))
        turn = {color: number for number, color in enumerate(self.checkpoint.model.table.colors)}
        return sorted(cell.held[shard], key=lambda t: turn.get(t.rule.color or "", len(turn)))

    def _separate_master_names(self) -> bool:
        """Whether master weights have names of their own; under stages 2 and 3 they have those of their parameters."""
        return self.target.strategy not in ("stage2", "stage3")

    def _is_stage3_slice(self, cell: Cell, tensor: ModelTensor, shard: int) -> bool:
        return self.target.strategy == "stage3" and cell.shares[tensor.key][shard] is not None

    def _key_of_states(self, cell: Cell, tensor: ModelTensor, shard: int) -> str:
        """What the keys of a parameter's states begin with."""
        name = cell.names[tensor.key]
        if tensor.master:
            return master_tensor_name(name) if self._separate_master_names() else name
        return f"{SLICE_PREFIX}{name}" if self._is_stage3_slice(cell, tensor, shard) else name


AddArray: TypeAlias = Callable[[str, FlatSlice | None, str | None], ArraySlot]
"""Takes the key of a parameter, a slice of its flattening or ``None`` for all of it, and the name of the array."""
ArrayRows: TypeAlias = "numbers_of[int]"
"""The arrays of a file that is being laid out, five numbers for each because there may be very many: its kind, its
tensor, the index of its dtype, the bytes of its values, and those of the zeros that follow them."""
_COLUMNS = 5


@dataclass(frozen=True, slots=True)
class RankFileLayout:
    """A rank's file without its tp coordinate: files of tp ranks differ only in the offsets of boxes."""

    kind: str
    shard: int | None
    size_bytes: int
    literals: LiteralTemplate
    fills: tuple[tuple[int, int], ...]
    """``(byte offset, number of zero bytes)``."""
    arrays: Ints
    """A row for each array: kind, tensor, byte offset, index of the dtype."""


class FileBytes(NewFiles):
    """Collects the files of a target."""

    def __init__(self, checkpoint: Checkpoint, pickle_protocol: int) -> None:
        super().__init__()
        self.pickle_protocol = pickle_protocol
        self.tensors = checkpoint.catalog.tensors
        self.dtypes = checkpoint.catalog.tensors.dtypes.tolist()
        """Index of the dtype of each tensor."""
        self.identity = {t.key: t.tied_to or t.key for t in checkpoint.model.tensors}
        self.fills: list[tuple[int, int, int]] = []

    def has(self, tensor: ModelTensor, state: str) -> bool:
        """Whether the source has a state of a tensor."""
        return self.tensors.find(self.identity[tensor.key], state) is not None

    def adder(self, rows: ArrayRows, cell: Cell, state: str) -> AddArray:
        """A function that adds an array of a ``state`` to a file: all that the cell has of a tensor, or a slice of its
        flattening.

        What is the same for all arrays of a state is looked up once, because there may be very many.
        """
        find, per_parameter = self.tensors.finder(state), is_per_parameter(state)
        identity, dtypes, kind_of = self.identity, self.dtypes, self.placements.kind

        def add(key: str, flat: FlatSlice | None, name: str | None) -> ArraySlot:
            number = find(identity[key])
            if number is None:
                raise lacking(key, state)
            dtype = DTYPES[dtypes[number]]
            whole, cut = ((1,), UNCUT) if per_parameter else (cell.local_shapes[key], cell.cuts[key])
            flat = None if per_parameter else flat
            shape = whole if flat is None else (flat.elements,)
            values = prod(whole) if flat is None else max(0, min(flat.stop, prod(whole)) - flat.start)
            kind = kind_of(ArrayKind(whole, cut, dtype.itemsize, flat))
            zeros = prod(shape) - values
            rows.extend((kind, number, dtypes[number], values * dtype.itemsize, zeros * dtype.itemsize))
            return ArraySlot(len(rows) // _COLUMNS - 1, dtype.code, shape, name)

        return add

    def lay_out(
        self, kind: str, shard: int | None, root: Iterator[tuple[object, object]], rows: ArrayRows
    ) -> RankFileLayout:
        """Lay out a file with these entries; iterating over ``root`` adds to ``rows``."""
        literals = self.literals.template(())
        size_bytes, slots = write_pickle(
            DictEntries(root), partial(self.literals.extend_template, literals), self.pickle_protocol
        )
        slot, byte_offset, _ = np.array(slots, dtype=np.int64).reshape(-1, 3).T
        in_file = np.array(rows, dtype=np.int64).reshape(-1, _COLUMNS)[slot]
        array_kind, tensor, dtype, values, zeros = in_file.T
        padded = zeros > 0
        fills = zip((byte_offset + values)[padded].tolist(), zeros[padded].tolist(), strict=True)
        arrays = np.column_stack([array_kind, tensor, byte_offset, dtype])
        return RankFileLayout(kind, shard, size_bytes, literals, tuple(fills), arrays)

    def add(self, path: str, layout: RankFileLayout, tp: int) -> None:
        """Add a laid-out file for a tp rank."""
        file = len(self.files)
        self.files.append(File(path, layout.size_bytes))
        self.literals.add_file(layout.literals, file)
        self.fills.extend((file, offset, nbytes) for offset, nbytes in layout.fills)
        self.placements.add_file(layout.arrays, tp, file)
