"""The bytes that each rank of a hybrid-parallel job holds, and those of all files.

The same cells, slices and padding as in the files of its ranks, from counts: tensors that differ only in layer and
expert are of one kind, and a cell is a sequence of kinds.
"""

from __future__ import annotations

import hashlib
from typing import NamedTuple

import numpy as np

from paddle_reshard.pipeline.checkpoint.checkpoint import Checkpoint
from paddle_reshard.pipeline.checkpoint.format import RankBytes
from paddle_reshard.pipeline.core.errors import RuleError
from paddle_reshard.pipeline.core.numbers import Ints
from paddle_reshard.pipeline.core.topology import Topology
from paddle_reshard.pipeline.formats.jobs.cells import CellPlanner, PipelineItem, optimizer_list
from paddle_reshard.pipeline.formats.jobs.job import HybridJob
from paddle_reshard.pipeline.formats.jobs.keys import first_keys
from paddle_reshard.pipeline.formats.sharding import (
    buffers_of,
    hand_out,
    padded_elements,
    pieces_of_buffer,
    stage3_slice_elements,
)
from paddle_reshard.pipeline.model.model import ModelTensor, order_routers


class _Cell(NamedTuple):
    """The tensors of a cell, in the order of its parameters, by their kinds."""

    kinds: Ints
    first: Ints
    """Position of the first tensor with the same parameter name."""
    listed: Ints
    """Positions of the trained ones, in the order of the optimizer's list."""
    buffered: Ints
    """The same in the order in which they are cut among the sharding group."""
    chunks: Ints
    """Chunk of the virtual pipeline."""


class _OfCell(NamedTuple):
    fullest: RankBytes
    in_files: int


def job_bytes(checkpoint: Checkpoint, target: HybridJob) -> tuple[RankBytes, int]:
    """What the rank with most bytes on its card holds, and the bytes of the tensors in all files."""
    fullest, total = RankBytes(0, 0, 0, 0), 0
    for of_cell, count in _Sizes(checkpoint, target).cells():
        fullest = max(fullest, of_cell.fullest, key=lambda rank: rank.on_card)
        total += of_cell.in_files * count
    return fullest, total


class _Sizes:
    """The bytes of cells and ranks of a target."""

    def __init__(self, checkpoint: Checkpoint, target: HybridJob) -> None:
        self.checkpoint, self.target = checkpoint, target
        self.topology: Topology = target.topology
        self.planner = CellPlanner(checkpoint.model, target)
        self.all = checkpoint.kinds
        self.elements = np.zeros(len(self.all.first), dtype=np.int64)
        """Elements of a rank's piece of a tensor of each kind, once a cell has one."""
        self.known: dict[tuple[bytes, bytes, int, bool], _OfCell] = {}
        self.checked: set[int] = set()

    def cells(self) -> list[tuple[_OfCell, int]]:
        """The sizes of all cells, and how many in a row are alike."""
        topology, target, model = self.topology, self.target, self.checkpoint.model
        found: list[tuple[_OfCell, int]] = []
        alike = target.names is None and target.expert_axis is None
        for pp, places in enumerate(self.planner.places_of_stages()):
            kinds = np.concatenate([self.all.of_places[place].kinds for place in places])
            experts = np.concatenate([self.all.of_places[place].experts for place in places])
            lengths = [len(model.of_places[place]) for place in places]
            chunks = np.repeat([self.planner.chunk[place] for place in places], lengths)
            for turn in range(target.cells_per_tp_rank):
                for tp in range(1 if alike else topology.tp):
                    ep = turn if target.expert_axis == "dp" else topology.expert_rank(tp, turn)
                    held = self._of_rank(places, kinds, experts, tp if target.expert_axis == "tp" else ep)
                    of = self._sizes(pp, tp, ep, turn, places, kinds[held], chunks[held], held)
                    found.append((of, topology.tp if alike else 1))
        return found

    def _of_rank(self, places: list[PipelineItem], kinds: Ints, experts: Ints, rank: int) -> Ints:
        """Positions of the tensors of a stage that a rank holds, as :class:`CellPlanner` finds them."""
        if self.target.expert_axis is None:
            return np.arange(len(kinds))
        each = self.planner.experts // self.target.expert_ranks
        held = np.flatnonzero((experts < 0) | (experts // each == rank))
        if self.target.expert_axis == "ep" and self.all.leads[kinds].any():
            mine = self._tensors(places, held)
            position = {tensor.key: number for tensor, number in zip(mine, held.tolist(), strict=True)}
            ordered = order_routers(mine, self.target.unified_experts)
            held = np.array([position[tensor.key] for tensor in ordered])
        return held

    def _tensors(self, places: list[PipelineItem], held: Ints) -> list[ModelTensor]:
        of_stage = [tensor for place in places for tensor in self.checkpoint.model.of_places[place]]
        return [of_stage[number] for number in held.tolist()]

    def _sizes(
        self,
        pp: int,
        tp: int,
        ep: int,
        turn: int,
        places: list[PipelineItem],
        kinds: Ints,
        chunks: Ints,
        held: Ints,
    ) -> _OfCell:
        """The sizes of a cell; cells with the same kinds in the same order are alike."""
        only_experts, offset = self.planner.only_experts(ep), turn % self.topology.dense_sharding
        shares_layers = self.topology.pp > 1 and bool(self.planner.tied)  # which are listed first
        if self.target.names is not None or shares_layers or self.all.shares_name[kinds].any():
            cell = self._by_name(pp, tp, ep, self._tensors(places, held), kinds, chunks)
            self._cut(cell.kinds)
            return self._of_cell(cell, offset, only_experts)
        key = kinds.tobytes(), chunks.tobytes(), offset, only_experts
        if key not in self.known:
            if not self._named(kinds):  # says why
                self.planner.names(tp, pp, ep, self._tensors(places, held))
            self._cut(kinds)
            listed = np.flatnonzero(self.all.trained[kinds])
            cell = _Cell(kinds, np.arange(len(kinds)), listed, listed, chunks)
            self.known[key] = self._of_cell(cell, offset, only_experts)
        return self.known[key]

    def _named(self, kinds: Ints) -> bool:
        """Whether it is known what the job calls its parameters."""
        topology, config = self.topology, self.checkpoint.model.config
        in_sequence = self.target.sequence_parallel
        try:
            self.checkpoint.model.table.check_names(topology.tp, topology.pp, topology.ep, in_sequence)
            for number in {*np.flatnonzero(np.bincount(kinds)).tolist()} - self.checked:
                tensor = self.all.first[number]
                cut = in_sequence and not tensor.rule.stays_whole(config, topology.tp, tensor.key)
                tensor.rule.class_for(topology.pp, topology.tp, cut, topology.ep)
                for discarded in tensor.rule.discards:
                    discarded.class_for(topology.tp, in_sequence)
                self.checked.add(number)
        except RuleError:
            return False
        return True

    def _by_name(
        self, pp: int, tp: int, ep: int, tensors: list[ModelTensor], kinds: Ints, chunks: Ints
    ) -> _Cell:
        """A cell in which tensors may share a parameter name."""
        built = self.planner.names(tp, pp, ep, tensors)
        position = {tensor.key: number for number, tensor in enumerate(tensors)}
        ordered = self.planner.as_listed(tensors)
        names = {tensor.key: built[tensor.key] for tensor in ordered}
        self._cut(kinds[[position[tensor.key] for tensor in ordered]])
        listed = optimizer_list(ordered, names)
        once = first_keys(names)
        by_chunk = self.target.sharding.comm_overlap and self.topology.vpp > 1
        buffered = optimizer_list(tensors, built) if by_chunk else listed
        first = np.empty(len(tensors), dtype=np.int64)
        for number, tensor in enumerate(tensors):
            first[number] = position[once[names[tensor.key]]]
        return _Cell(kinds, first, _positions(listed, position), _positions(buffered, position), chunks)

    def _cut(self, kinds: Ints) -> None:
        """Find the pieces of tensors of kinds that no cell had before, in the order of this one."""
        topology, model = self.topology, self.checkpoint.model
        if self.elements[kinds].all():
            return
        numbers, where = np.unique(kinds, return_index=True)
        for number in numbers[np.argsort(where)].tolist():
            tensor = self.all.first[number]
            if not self.elements[number]:
                cut = model.cut(tensor, topology.tp, self.target.expert_axis, topology.ep)
                shape = cut.local_shape(tensor.key, tensor.global_shape)
                self.elements[number] = np.prod(shape, dtype=np.int64)

    def _of_cell(self, cell: _Cell, offset: int, only_experts: bool) -> _OfCell:
        """The fullest rank of a sharding group, whose first rank in this cell is ``offset``, and the files of all."""
        topology, checkpoint, of = self.topology, self.checkpoint, self.all
        apart = topology.dense_sharding
        ranks = len(range(offset, topology.sharding, apart))
        states = np.zeros((ranks, 3), dtype=np.int64)
        owner = np.zeros(len(cell.kinds), dtype=np.int64)
        entries = cell.buffered
        latest = np.zeros(len(cell.kinds), dtype=np.int64)
        latest[entries] = np.arange(len(entries))
        last = latest[entries] == np.arange(len(entries))  # of one that is listed twice, the second counts
        kinds = cell.kinds[entries]
        if only_experts:
            last &= of.of_expert[kinds]
        if not checkpoint.has_optimizer:
            last[:] = False
        alone = of.of_expert_rank[kinds] & (topology.ep > 1)
        colors = of.colors[kinds] * (self.target.strategy == "stage1v2")
        group = colors * 2 + alone
        for number in np.flatnonzero(np.bincount(group)).tolist():
            mine = group == number
            degree = topology.moe_sharding if number % 2 else topology.sharding
            held, owners = self._states(kinds[mine], last[mine], cell.chunks[entries[mine]], degree)
            states += held if number % 2 else held[offset::apart]
            owner[entries[mine]] = owners
        sizes = self.elements[cell.kinds] * of.itemsize[cell.kinds]
        tensors, holders = self._model_state(cell, owner, offset)
        in_files = int(sizes[tensors].sum())
        if not only_experts:
            averages = of.ema_param[cell.kinds[tensors]] * self.elements[cell.kinds[tensors]]
            np.add.at(states[:, 2], holders, averages)
        if not checkpoint.has_ema:
            states[:, 2] = 0
        in_files += int(states.sum())
        parameters = self._parameters(cell, sizes)
        fullest = int(np.argmax(states[:, 0] + states[:, 1]))
        moments, masters, ema = states[fullest].tolist()
        return _OfCell(RankBytes(parameters, masters, moments, ema), in_files)

    def _parameters(self, cell: _Cell, sizes: Ints) -> int:
        """Every parameter once, also those that only a master weight in the files defines.

        Stage 3 leaves each rank a slice of the parameters that it cuts.
        """
        once = cell.first == np.arange(len(cell.first))
        if self.target.strategy == "stage3":
            sizes = sizes.copy()
            listed = np.unique(cell.listed)
            sizes[listed] = self._slices()[cell.kinds[listed]] * self.all.itemsize[cell.kinds[listed]]
        return int(sizes[once].sum())

    def _slices(self) -> Ints:
        """Elements of a rank's slice under stage 3, for each kind."""
        options, degree = self.target.sharding, self.topology.sharding
        return np.array(
            [
                stage3_slice_elements(elements, tensor.dtype, degree) if options.cuts(elements) else elements
                for elements, tensor in zip(self.elements.tolist(), self.all.first, strict=True)
            ],
            dtype=np.int64,
        )

    def _states(self, kinds: Ints, counted: Ints, chunks: Ints, degree: int) -> tuple[Ints, Ints]:
        """Bytes of moments, master weights and average on each of ``degree`` ranks that share parameters.

        And the rank that owns each parameter, of strategies that do not cut any.
        """
        columns = hashlib.sha256()
        for column in (kinds, counted, chunks, self.elements):
            columns.update(column.tobytes())
        known, key = self.all.shares, (columns.digest(), degree, self.target.strategy, self.target.sharding)
        if key not in known:
            known[key] = self._handed_out(kinds, counted, chunks, degree)
        return known[key]

    def _handed_out(self, kinds: Ints, counted: Ints, chunks: Ints, degree: int) -> tuple[Ints, Ints]:
        """As :meth:`_states`, found anew."""
        of, strategy, options = self.all, self.target.strategy, self.target.sharding
        elements = self.elements[kinds]
        rates = of.rates[kinds] * counted[:, None]
        numbers = of.numbers[kinds] * counted
        held = np.zeros((degree, 3), dtype=np.int64)
        owners = np.zeros(len(kinds), dtype=np.int64)
        if strategy == "stage1v2":
            sizes = elements * of.itemsize[kinds]
            together = chunks if options.comm_overlap else np.zeros_like(chunks)
            for buffer in buffers_of(sizes, of.dtypes[kinds], together, options.buffer_bytes):
                padded = padded_elements(elements[buffer], of.first[kinds[buffer[0]]].dtype, degree)
                number, rank, start, stop = pieces_of_buffer(padded, degree)
                pieces = rates[buffer][number] * (stop - start)[:, None]
                pieces[:, 0] += numbers[buffer][number]
                held += _sums(pieces, rank, degree)
        elif strategy == "stage3":
            held += (rates * self._slices()[kinds][:, None]).sum(axis=0)
            held[:, 0] += numbers.sum()
        else:
            if strategy != "none":
                by_size = strategy == "stage1v1" and options.sort_parameters
                owners[:] = hand_out(elements.tolist(), degree, largest_first=by_size)
            of_each = rates * elements[:, None]
            of_each[:, 0] += numbers
            held += _sums(of_each, owners, degree)
        return held, owners

    def _model_state(self, cell: _Cell, owner: Ints, offset: int) -> tuple[Ints, Ints]:
        """Tensors in the model_state files of a cell, and the rank with each among those of the cell."""
        of, kinds, topology = self.all, cell.kinds, self.topology
        stored = ~of.missing[kinds]
        if not self.planner.shares_parameters:
            tensors = np.flatnonzero(stored)
            return tensors, np.zeros(len(tensors), dtype=np.int64)
        tensors = np.flatnonzero(stored & ~of.as_masters[kinds])
        if not len(tensors):
            return tensors, tensors
        first = cell.first[tensors]
        if self.target.strategy == "stage1v1":
            ranks = owner[first]
        else:  # the rank of its place in the optimizer's list, or both of one that is listed twice
            places = np.arange(len(cell.listed))
            latest = np.zeros(len(kinds), dtype=np.int64)
            latest[cell.listed] = places
            ranks = latest[first] % topology.sharding
            again = places[latest[cell.listed] != places].tolist()
            for place in again:
                also = tensors[cell.first[tensors] == cell.listed[place]]
                tensors = np.concatenate([tensors, also])
                ranks = np.concatenate([ranks, np.full(len(also), place % topology.sharding)])
            if again:
                tensors, ranks = np.unique(np.stack([tensors, ranks]), axis=1)
        apart = topology.dense_sharding
        mine = ranks % apart == offset
        return tensors[mine], ranks[mine] // apart


def _sums(rows: Ints, groups: Ints, count: int) -> Ints:
    """The sums of the rows of each of so many groups; ``np.add.at`` takes several times as long."""
    sums = np.zeros((count, rows.shape[1]), dtype=np.int64)
    for number, column in enumerate(rows.T):
        if column.any():
            sums[:, number] = np.bincount(groups, column, count)  # in float64, which is exact up to 9 PB
    return sums


def _positions(tensors: list[ModelTensor], position: dict[str, int]) -> Ints:
    return np.array([position[tensor.key] for tensor in tensors], dtype=np.int64)
