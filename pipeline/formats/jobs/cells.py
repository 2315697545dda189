"""Determine the tensors, parameter names and slices of every cell of a hybrid-parallel job.

A *cell* is a coordinate of the target that writes files: a tp rank of a stage, and a rank of the expert group if
experts are distributed. The ranks of its sharding group share its optimizer states::

    tp=2, pp=2, sharding=3      4 cells, the optimizer states of each in 3 files
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

from paddle_reshard.pipeline.core.errors import PlanError, RuleError
from paddle_reshard.pipeline.core.geometry import Shape
from paddle_reshard.pipeline.core.tensors import MTP
from paddle_reshard.pipeline.formats.jobs.job import HybridJob
from paddle_reshard.pipeline.formats.jobs.keys import LORA_PREFIX, cell_name, first_keys, shift_expert
from paddle_reshard.pipeline.formats.jobs.segments import segment
from paddle_reshard.pipeline.formats.model_meta import CellMeta, ParameterMeta, format_model_meta
from paddle_reshard.pipeline.formats.sharding import Parameter, Shares, partition_parameters
from paddle_reshard.pipeline.model.model import (
    Model,
    ModelTensor,
    check_given_names,
    expert_of,
    order_routers,
    predict_parameter_names,
)
from paddle_reshard.pipeline.model.placement import TensorCut
from paddle_reshard.pipeline.model.rules.choose import class_with_another_head
from paddle_reshard.pipeline.model.rules.entries import config_entry, count_entry
from paddle_reshard.pipeline.model.rules.items import LAYERS, Item, mtp_entry
from paddle_reshard.pipeline.model.rules.table import renamed_prefix

PipelineItem = tuple[str, int | None]
"""Kind of an item of a pipeline, and its number among those of its kind."""


@dataclass(slots=True)
class Cell:
    """One coordinate of the target."""

    tp: int
    pp: int
    ep: int
    tensors: list[ModelTensor]
    names: Mapping[str, str]
    local_shapes: dict[str, Shape]
    cuts: dict[str, TensorCut]
    parameters: list[ModelTensor]
    """The trained tensors in the order of the optimizer's list, each parameter once."""
    shares: Shares
    """Parameter → rank of the sharding group → slice that it stores; for experts only ranks of this cell."""
    held: dict[int, list[ModelTensor]]
    """Rank of the sharding group, if it belongs to this cell → parameters with states in its optimizer, in the order
    of its accumulators: stage 3 puts those that it cuts first."""
    model_state: dict[int, list[ModelTensor]]
    """Rank of the sharding group, if it writes a model_state file for this cell → the tensors in it."""

    def differs_only_in_tp(self, other: Cell) -> bool:
        """Whether all but the tp rank is the same, as it is for most tp ranks of a stage."""
        return replace(self, tp=other.tp) == other


def optimizer_list(tensors: Sequence[ModelTensor], names: Mapping[str, str]) -> list[ModelTensor]:
    """The trained tensors of a cell in the order of its optimizer; the first of two with one name stands there twice.

    Two tensors that would be one parameter by accident are refused.
    """
    first: dict[str, ModelTensor] = {}
    listed = []
    for tensor in tensors:
        known = first.setdefault(names[tensor.key], tensor)
        alone = tensor.rule.parameter_name is None or tensor.is_alias
        if not tensor.trained or (known is not tensor and alone):
            continue
        if known is not tensor and tensor.tied_to != known.key:
            raise PlanError(
                f"{tensor.key} and {known.key} have the same parameter name {names[tensor.key]} in a job that has both "
                "in one stage: its optimizer would keep one value and one set of states for the two. Choose stages "
                "that hold one of them each"
            )
        listed.append(known)
    return listed


class CellPlanner:
    """Determines what every cell of a target holds."""

    def __init__(self, model: Model, target: HybridJob) -> None:
        self.model, self.target, self.topology = model, target, target.topology
        self.expert = model.experts
        self.experts = len(model.expert_numbers)
        tied = [t for t in model.tied if t.is_alias and not t.rule.is_own(self.topology.pp)]
        item_of = {t.key: t.item for t in model.tensors} if tied else {}
        self.tied = {
            key for t in tied if item_of[t.tied_to or ""] != t.item for key in (t.key, t.tied_to or "")
        }
        """The tensors of layers that two stages share."""
        if model.table.described and tied:
            # An item of its pipeline is one layer, which is shared with all that it holds.
            shared = {item_of[key] for key in self.tied}
            self.tied |= {t.key for t in model.tensors if t.item in shared}
        self.with_lora = model.has_lora
        self.shares_parameters = target.writes_meta and not self.with_lora
        """Whether each rank of a sharding group writes a share of the parameters, rather than the first all of them."""

    @cached_property
    def written(self) -> dict[str, str]:
        """Key of a tensor → its key in the target; for keys in files of weights, see ``saved``."""
        under_pp = self.topology.pp > 1
        written = {t.key: (under_pp and t.rule.key_pp) or t.key for t in self.model.tensors}
        if self.target.expert_axis == "ep" and self.model.table.local_experts:
            return {key: self._own_number(of_pipeline) for key, of_pipeline in written.items()}
        return written

    @cached_property
    def saved(self) -> dict[str, str]:
        """The same for files of weights, which a class can rename as it saves them."""
        # From shares that the class itself has renamed the trainer of PaddleFormers 1.2.0 does not resume ("cannot find
        # visual.patch_embed.proj.weight", sharding_io.py); from these it does.
        renames = {} if self.shares_parameters else self.model.table.saved_prefixes
        if not renames:
            return self.written
        return {key: renamed_prefix(written, renames) for key, written in self.written.items()}

    def _own_number(self, key: str) -> str:
        """The key with the number that a rank gives the expert, which numbers its own from 0 on."""
        expert = expert_of(key)
        if expert is None:
            return key
        return shift_expert(key, expert % (self.experts // self.topology.ep) - expert)

    def cells(self) -> Iterator[Cell]:
        """All cells, the tp axis varying fastest."""
        for pp, tensors in enumerate(self._stages()):
            for turn in range(self.target.cells_per_tp_rank):
                cell: Cell | None = None
                for tp in range(self.topology.tp):
                    cell = self._cell(tp, pp, turn, tensors, cell)
                    yield cell

    def name(self, tp: int, pp: int, ep: int) -> str:
        """Name of a cell in ``model_meta.json``."""
        return cell_name(tp, pp, ep if self.topology.ep > 1 else None)

    def meta_key(self, key: str) -> str:
        """The key of a tensor in ``model_meta.json``."""
        return f"{LORA_PREFIX if self.with_lora else ''}{self.written[key]}"

    def only_experts(self, ep: int) -> bool:
        """Whether the optimizer files of a cell hold only experts: data-parallel rank 0 writes everything else."""
        return self.target.expert_axis == "dp" and ep > 0

    def described(self, cells: Sequence[Cell]) -> list[Cell]:
        """The cells that ``model_meta.json`` lists, in its order."""
        if self.target.expert_axis == "dp":  # the trainer lists data-parallel rank 0 only
            cells = [cell for cell in cells if cell.ep == 0]
        # The trainer gathers all tp ranks and stages of a rank in the expert group before the next rank.
        return sorted(cells, key=lambda cell: cell.ep // self.topology.tp)

    def meta(self, described: Sequence[Cell]) -> bytes:
        """Contents of ``model_meta.json``."""
        metas: dict[str, CellMeta] = {}
        before: Cell | None = None
        for cell in described:
            if before is None or not cell.differs_only_in_tp(before):
                meta = self._cell_meta(cell)
            metas[self.name(cell.tp, cell.pp, cell.ep)], before = meta, cell
        return format_model_meta(self.model.table.convention, self.topology, metas).encode()

    def _stages(self) -> list[list[ModelTensor]]:
        """The tensors of every stage, in the order in which it builds them."""
        of_places = self.model.of_places
        return [
            [tensor for place in stage for tensor in of_places[place]] for stage in self.places_of_stages()
        ]

    def places_of_stages(self) -> list[list[PipelineItem]]:
        """The pipeline items of every stage, in the order in which it builds them."""
        held = self.model.places_as_built(self.topology.pp)
        table, items = self.model.table, self._items(held)
        described = {item.name: item for item in table.items}
        if self.topology.pp > 1:
            self._check_mtp_stages(described)
        in_pipeline = self._with_empty_layers(items)
        empty = Item("", "" if table.empty is None else table.empty.layer_class)
        positions = segment(
            [empty if item is None else described[item[0]] for item in in_pipeline],
            self.topology.pp,
            self.topology.vpp,
            self.target.segmentation,
            table.stages(self.model.config),
        )
        placed = [
            (item, place) for item, place in zip(in_pipeline, positions, strict=True) if item is not None
        ]
        self.chunk = {item: chunk for item, (_, chunk) in placed}
        stage_of = {item: stage for item, (stage, _) in placed}
        stages: list[list[PipelineItem]] = [[] for _ in range(self.topology.pp)]
        for place in held:
            stages[stage_of[place]].append(place)
        if [] in stages:
            raise PlanError(
                f"pp={self.topology.pp}: stage {stages.index([])} would consist of empty layers; what a job saves of "
                "it has not been seen"
            )
        return stages

    def _items(self, held: list[PipelineItem]) -> list[PipelineItem]:
        """All pipeline items, as kind and decoder layer; an adapter may have no tensors in some of them."""
        table, config = self.model.table, self.model.config
        if not self.model.has_lora or not isinstance(config_entry(config, LAYERS), int):
            return held
        used = {rule.item for rule in table.rules if rule.applies(config)}
        return [
            (item.name, layer)
            for item in table.items
            if item.name in used and (item.layer_class or self.topology.pp == 1)
            for layer in table.numbers(item, config)
        ]

    def _with_empty_layers(self, items: Sequence[PipelineItem]) -> list[PipelineItem | None]:
        """The items, and ``None`` for each layer without parameters that the config puts between them in a pipeline."""
        table, config = self.model.table, self.model.config
        if table.empty is None or self.topology.pp == 1:
            return list(items)
        behind = config_entry(config, table.empty.after) or ()
        tail = config_entry(config, table.empty.tail) or 0
        repeated = next(item.name for item in table.items if item.repeated)
        pipeline_items: list[PipelineItem | None] = []
        for item in items:
            if item[0] == table.empty.before:
                pipeline_items += [None] * (tail - count_entry(config, mtp_entry(config)))
            pipeline_items.append(item)
            if item[0] == repeated and item[1] in behind:
                pipeline_items.append(None)
        return pipeline_items

    def _check_mtp_stages(self, described: Mapping[str, Item]) -> None:
        table = self.model.table
        if not any(item.layer_class for item in table.items):
            of = class_with_another_head(self.model.config) or table.family
            raise PlanError(f"pp={self.topology.pp}: {table.library} has no pipeline class of {of}; use pp=1")
        if not any(item.mtp and not item.layer_class for item in described.values()):
            return
        tensors = self.model.as_built(self.topology.pp)
        lost = next((t.key for t in tensors if (i := described[t.rule.item]).mtp and not i.layer_class), None)
        if lost is not None:
            raise PlanError(
                f"{lost}: with pp={self.topology.pp}, {table.convention}'s pipeline class of {table.family} has no "
                f"multi-token prediction; omit it with --drop {MTP}"
            )

    def _cell(self, tp: int, pp: int, turn: int, tensors: list[ModelTensor], sibling: Cell | None) -> Cell:
        """The cell of a coordinate.

        ``sibling`` is the same cell of the previous tp rank; it differs only if parameter names were given, or if
        experts are distributed.
        """
        ep = turn if self.target.expert_axis == "dp" else self.topology.expert_rank(tp, turn)
        if sibling is not None and self.target.names is None and self.target.expert_axis is None:
            return replace(sibling, tp=tp)
        tensors = self._of_rank(tensors, tp, ep)
        names = self.names(tp, pp, ep, tensors)
        built, tensors = tensors, self.as_listed(tensors)
        names = {t.key: names[t.key] for t in tensors}
        cuts, local = self._cut(tensors)
        listed = optimizer_list(tensors, names)
        parameters = list({tensor.key: tensor for tensor in listed}.values())
        # A chunk of a virtual pipeline lists a shared layer where it lies in the chunk (pp_layers.py:1045), and the
        # engine makes buffers of each chunk.
        by_chunk = self.target.sharding.comm_overlap and self.topology.vpp > 1
        shares = self._shares(optimizer_list(built, names) if by_chunk else listed, local, turn)
        apart = self.topology.dense_sharding
        held: dict[int, list[ModelTensor]] = {
            shard: [] for shard in range(turn % apart, self.topology.sharding, apart)
        }
        only_experts = self.only_experts(ep)
        for tensor in parameters:
            if only_experts and not tensor.rule.of_expert:
                continue
            for shard in shares[tensor.key].keys() & held.keys():
                held[shard].append(tensor)
        held = {
            shard: sorted(of_shard, key=lambda t: shares[t.key][shard] is None)
            for shard, of_shard in held.items()
        }
        cell = Cell(tp, pp, ep, tensors, names, local, cuts, parameters, shares, held, {})
        cell.model_state = self._model_state_tensors(cell, listed)
        return cell

    def _cut(self, tensors: Sequence[ModelTensor]) -> tuple[dict[str, TensorCut], dict[str, Shape]]:
        """How tp cuts each tensor, and the shape of a piece; those of one row and shape are found once."""
        over, topology = self.target.expert_axis, self.topology
        of_alike: dict[tuple[int, Shape], tuple[TensorCut, Shape]] = {}
        cuts, local = {}, {}
        for tensor in tensors:
            alike = id(tensor.rule), tensor.global_shape
            if alike not in of_alike:
                cut = self.model.cut(tensor, topology.tp, over, topology.ep)
                of_alike[alike] = cut, cut.local_shape(tensor.key, tensor.global_shape)
            cuts[tensor.key], local[tensor.key] = of_alike[alike]
        return cuts, local

    def _of_rank(self, tensors: list[ModelTensor], tp: int, ep: int) -> list[ModelTensor]:
        """The tensors of a stage that a rank holds.

        With 8 experts over ``ep=4``, expert rank 1 holds experts 2 and 3.
        """
        axis = self.target.expert_axis
        if axis is None:
            return tensors
        rank = tp if axis == "tp" else ep
        each = self.experts // self.target.expert_ranks
        mine = range(rank * each, (rank + 1) * each)
        expert = self.expert
        held = [t for t in tensors if t.key not in expert or expert[t.key] in mine]
        return order_routers(held, self.target.unified_experts) if axis == "ep" else held

    def _shares(self, parameters: Sequence[ModelTensor], local: Mapping[str, Shape], turn: int) -> Shares:
        """Slices of every parameter; with expert parallelism, experts are cut separately, by ``moe_sharding`` ranks.

        Under stage 1 v2 the parameters of each color are cut separately too.
        """
        topology, strategy, options = self.topology, self.target.strategy, self.target.sharding
        listed: dict[tuple[bool, str | None], list[Parameter]] = {}
        places, chunks = self.model.places, self.chunk
        for t in parameters:
            apart = (
                topology.ep > 1 and t.rule.of_expert_rank,
                t.rule.color if strategy == "stage1v2" else None,
            )
            listed.setdefault(apart, []).append(
                Parameter(t.key, prod(local[t.key]), t.dtype, chunks[places[t.key]])
            )
        shares: Shares = {}
        for (alone, _), together in sorted(listed.items(), key=lambda of: of[0][0]):
            degree = topology.moe_sharding if alone else topology.sharding
            for key, ranks in partition_parameters(strategy, together, degree, options).items():
                shares[key] = (
                    {rank * topology.dense_sharding + turn: piece for rank, piece in ranks.items()}
                    if alone
                    else ranks
                )
        return shares

    def as_listed(self, tensors: list[ModelTensor]) -> list[ModelTensor]:
        """The tensors of a cell in the order of its parameters, which are named in that of ``tensors``.

        Layers are named as they are built, but a stage lists the layers that it shares with another stage first:
        PipelineLayer makes shared_layers before all others (Paddle 3.3.1 pp_layers.py:509).
        """
        return sorted(tensors, key=lambda t: t.key not in self.tied) if self.topology.pp > 1 else tensors

    def names(self, tp: int, pp: int, ep: int, tensors: list[ModelTensor]) -> Mapping[str, str]:
        """Key → parameter name of the tensors of a cell, in the order in which they are built."""
        if self.target.names is None:
            topology, parallel = self.topology, self.target.sequence_parallel
            self.model.table.check_names(topology.tp, topology.pp, topology.ep, parallel)
            return predict_parameter_names(
                tensors, self.model.config, topology.pp, topology.tp, parallel, topology.ep
            )
        where = self.name(tp, pp, ep)
        given = self.target.names.get(where, {})
        if self.target.expert_axis == "dp":
            given = {shift_expert(key, ep * self.experts // self.topology.dp): n for key, n in given.items()}
        keys = {t.key: self.meta_key(t.key) for t in tensors}
        if set(given) != set(keys.values()):
            differing = sorted(set(given) ^ set(keys.values()))
            raise RuleError(
                differing[0] if differing else where,
                f"the target's model_meta.json and the segmentation disagree about the cell {where}",
            )
        names = {key: given[written] for key, written in keys.items()}
        check_given_names(tensors, names)
        return names

    def _model_state_tensors(self, cell: Cell, listed: Sequence[ModelTensor]) -> dict[int, list[ModelTensor]]:
        """Rank of the sharding group → tensors in its model_state file; ``listed`` is the optimizer's list.

        Without ``model_meta.json``, and for LoRA, the first rank of the cell stores everything. Sharded saving omits
        bfloat16 parameters with a master weight. The owner stores the remaining trained parameters under v1; v2
        distributes them round robin. Tensors that are not trained go to rank 0 (PaddleNLP 3.0
        ``sharding_io.py:73-106``; PaddleFormers 1.2 loses them by default). Experts over ep have a group of their own,
        whose tensors come last (``merge_model_state``).
        """
        stored = [t for t in cell.tensors if not t.missing]
        if not self.shares_parameters:
            return {min(cell.held): stored}
        held_by: dict[int, list[ModelTensor]] = {shard: [] for shard in cell.held}
        positions: dict[str, list[int]] = {}
        for position, tensor in enumerate(listed):
            positions.setdefault(tensor.key, []).append(position)
        first_key = first_keys(cell.names)
        for tensor in sorted(stored, key=lambda t: self.target.expert_axis == "ep" and t.rule.of_expert_rank):
            if tensor.master and tensor.dtype.name == "bfloat16":
                continue
            key = first_key[cell.names[tensor.key]]
            owners = {position % self.topology.sharding for position in positions.get(key, [0])}
            if key in positions and self.target.strategy == "stage1v1":
                owners = {*cell.shares[key]}
            for owner in owners & held_by.keys():
                held_by[owner].append(tensor)
        return held_by

    def _cell_meta(self, cell: Cell) -> CellMeta:
        return CellMeta(
            strategy=self.target.strategy,
            comm_overlap=self.target.sharding.comm_overlap,
            names={self.meta_key(key): name for key, name in cell.names.items()},
            parameters={
                self.meta_key(tensor.key): ParameterMeta(
                    local_shape=cell.local_shapes[tensor.key],
                    dtype=tensor.dtype,
                    is_distributed=tensor.rule.marked_distributed(
                        self.topology.tp > 1 and cell.cuts[tensor.key].dim is not None,
                        self.topology.ep,
                        of_rank=self.target.expert_axis in ("ep", "tp") and tensor.rule.of_expert_rank,
                    ),
                    no_sync=self.target.expert_axis == "ep" and tensor.rule.of_expert_rank,
                )
                for tensor in cell.tensors
            },
            owners={cell.names[key]: rank for key, (rank, *_) in cell.shares.items()}
            if self.target.strategy == "stage1v1"
            else {},
        )
