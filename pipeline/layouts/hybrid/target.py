"""What will every file of a hybrid-parallel checkpoint look like, byte for byte?

From the logical tensors of a source and the target job's choices to whole files: literal bytes, places for
values, zero padding. Names, order of keys and padding are the real trainer's.
"""

from __future__ import annotations

from array import array as numbers_of
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from math import prod
from typing import Any

import numpy as np

from paddle_reshard.pipeline.core.catalog import File
from paddle_reshard.pipeline.core.errors import CheckpointError, PlanError, RuleError, UnsupportedError
from paddle_reshard.pipeline.core.file_names import MODEL_META, SIGNAL_PREFIX
from paddle_reshard.pipeline.core.geometry import Ints, Shape
from paddle_reshard.pipeline.core.literals import Kept, Literals
from paddle_reshard.pipeline.core.tensors import (
    ACCUMULATORS,
    DTYPES,
    EMA_MASTER_WEIGHT,
    EMA_PARAM,
    MASTER_WEIGHT,
    PARAM,
)
from paddle_reshard.pipeline.core.topology import Topology, sharding_in_words
from paddle_reshard.pipeline.layouts.checkpoint import Checkpoint
from paddle_reshard.pipeline.layouts.files import LaidOut, TargetFiles, add_literal_files
from paddle_reshard.pipeline.layouts.format import Decision, Staged
from paddle_reshard.pipeline.layouts.formats import FORMATS, names_of
from paddle_reshard.pipeline.layouts.hybrid.format import HYBRID, HYBRID_PLAIN, HybridFormat
from paddle_reshard.pipeline.layouts.hybrid.names import (
    EMA,
    MODEL_STATE,
    OPTIMIZER,
    cell_name,
    rank_file_name,
)
from paddle_reshard.pipeline.layouts.hybrid.ranks import expert_of, first_keys, shift_expert
from paddle_reshard.pipeline.layouts.hybrid.segments import Segmentation, segment
from paddle_reshard.pipeline.layouts.hybrid.sharding import (
    FlatSlice,
    Parameter,
    ShardingOptions,
    Shares,
    share_out,
)
from paddle_reshard.pipeline.layouts.model import Model, ModelTensor, lead_experts, predict_parameter_names
from paddle_reshard.pipeline.layouts.model_meta import CellMeta, ParameterMeta, format_model_meta
from paddle_reshard.pipeline.layouts.optimizer_keys import SLICE_PREFIX, accumulator_key, master_tensor_name
from paddle_reshard.pipeline.layouts.placement import ArrayKind, Placements, TensorCut
from paddle_reshard.pipeline.layouts.sidecars import plan_sidecars
from paddle_reshard.pipeline.layouts.staged import check_tensors
from paddle_reshard.storage.formats.paddle_pickle import STRUCTURED_NAMES, ArraySlot, Entries, write_pickle


@dataclass(frozen=True, slots=True)
class HybridTarget:
    """What the target job decides. Validated by :func:`check_target`."""

    topology: Topology
    strategy: str
    sharded_saving: bool = True
    """Write what the trainer writes with sharded saving on: ``model_meta.json`` under stage 1."""
    sharding: ShardingOptions = field(default_factory=ShardingOptions)
    sequence_parallel: bool = False
    segmentation: Segmentation | None = None
    """Which layers go to which stage; ``None``: as both trainers' model classes do."""
    names: Mapping[str, Mapping[str, str]] | None = None
    """Cell → structured key → parameter name, taken from a job of the target topology."""
    experts_over: str | None = None
    """``tp`` or ``dp``: give every such rank some of the experts, whole ones. Under ``ep`` that goes without saying."""
    unified_experts: bool = False
    """Use the unified layer of expert parallelism, in families that have another one too."""
    strategy_reason: str = "as asked for"
    """Why it is this strategy, in words."""

    @property
    def spread(self) -> str | None:
        """The axis over which whole experts are spread."""
        if self.topology.ep > 1:
            return "ep"
        ranks = {"tp": self.topology.tp, "dp": self.topology.dp, None: 1}[self.experts_over]
        return self.experts_over if ranks > 1 else None

    @property
    def turns(self) -> int:
        """How many cells a tp rank of a stage is, each with experts of its own."""
        return self.topology.dp if self.spread == "dp" else self.topology.dense_sharding

    @property
    def writes_meta(self) -> bool:
        """Whether the trainer would write ``model_meta.json``: stage 1 with sharded saving."""
        return self.sharded_saving and self.strategy.startswith("stage1")

    @property
    def format(self) -> HybridFormat:
        """Whether it may have ``model_meta.json``."""
        return HYBRID if self.sharded_saving else HYBRID_PLAIN

    @property
    def decisions(self) -> tuple[Decision, ...]:
        """The sharding strategy."""
        return (Decision("sharding", sharding_in_words(self.strategy), self.strategy_reason),)

    def in_words(self) -> str:
        """The target in a line, for people."""
        return f"{self.format.name}, {self.topology}, {sharding_in_words(self.strategy)}"

    def facts(self) -> dict[str, str]:
        """What tells it from other targets of the same source."""
        return {"topology": str(self.topology), "sharding_strategy": self.strategy}

    def data(self) -> dict[str, Any]:
        """What is asked of it and decided."""
        return {
            "format": self.format.name,
            "topology": asdict(self.topology),
            "sharding_strategy": self.strategy,
            "sharding_strategy_reason": self.strategy_reason,
            "model_meta": self.writes_meta,
        }

    def lay_out(
        self, source: Checkpoint, wanted: Checkpoint, sizes: Mapping[str, int], folders: Sequence[str]
    ) -> LaidOut:
        """All files of the target checkpoint, small ones too."""
        # The optimizer files of a hybrid checkpoint tell that there is nothing in them.
        weights_only = source.format not in (HYBRID.name, HYBRID_PLAIN.name)
        if weights_only and not any(tensor.trained for tensor in wanted.model.tensors):
            others = [format for format in FORMATS.values() if not isinstance(format, HybridFormat)]
            raise PlanError(
                "the source holds parameters only; a hybrid checkpoint is for a job to go on from, which needs their "
                f"master weights and optimizer states too. Write the weights with --format {names_of(others, 'or')}"
            )
        sidecars = plan_sidecars(sizes, folders, wanted, source.model.config, self.topology)
        files = add_literal_files(layout_hybrid(wanted, self), sidecars.written)
        return LaidOut(source.catalog, files, sidecars.carried, sidecars.left)

    def check_staged(self, staged: Staged) -> None:
        """Read it as a source: its topology and its tensors must be those that were planned."""
        found = staged.index()
        planned, read = self.topology, found.topology
        if read is not None and (read.tp, read.pp, read.sharding, read.ep) != (
            planned.tp,
            planned.pp,
            planned.sharding,
            planned.ep,
        ):
            raise CheckpointError(f"the staged target reads back as {read}, planned was {planned}")
        check_tensors(staged, found)


def check_target(target: HybridTarget) -> None:
    """Refuse what the trainer refuses, with its reason, and what this version does not write.

    Raises
    ------
    PlanError, UnsupportedError
    """
    topology, strategy = target.topology, target.strategy
    if topology.ep > 1:
        _check_expert_parallel(target)
    if target.spread == "dp":
        _check_experts_over_dp(target)
    if strategy in ("stage2", "stage3") and topology.pp > 1:
        raise PlanError(
            f"{strategy} with pp={topology.pp}: the trainer refuses sharding stage 2 and 3 with pipeline "
            "parallelism"
        )
    if strategy == "stage3" and topology.tp > 1:
        raise PlanError(
            f"stage3 with tp={topology.tp}: the trainer only supports tensor parallelism with sharding "
            "stage 1 and 2"
        )
    if strategy == "none" and topology.sharding > 1:
        raise PlanError(f"sharding={topology.sharding} needs a sharding strategy other than none")
    if strategy != "none" and topology.sharding == 1:
        raise PlanError(f"sharding strategy {strategy} needs sharding > 1 in the topology, it is 1")
    if target.sharding.comm_overlap and (strategy != "stage1v2" or topology.pp == 1):
        raise PlanError("comm_overlap belongs to stage1v2 with pp > 1")


def with_default_strategy(target: HybridTarget, source: Checkpoint) -> HybridTarget:
    """The target with the sharding strategy that nobody has asked for, and why it is that one.

    The source's own where the target job can have it, else what the trainer itself does.
    """
    if target.topology.sharding == 1:
        return replace(target, strategy="none", strategy_reason="sharding is 1")
    by_default, reason = _default_of_trainer(source)
    if source.strategy is None:
        return replace(
            target, strategy=by_default, strategy_reason=f"{reason}; what the source had is not known"
        )
    if source.strategy == "none":
        return replace(target, strategy=by_default, strategy_reason=f"{reason}; the source is not sharded")
    kept = replace(target, strategy=source.strategy, strategy_reason="as the source")
    try:
        check_target(kept)
    except PlanError as error:
        why = f"{reason}; not {source.strategy} as the source: {error}"
        return replace(target, strategy=by_default, strategy_reason=why)
    return kept


def _default_of_trainer(source: Checkpoint) -> tuple[str, str]:
    """The stage 1 that the trainer does unless told otherwise, and why.

    PaddleFormers 1.2 cuts parameters (``trainer/training_args.py:1596``, ``split_param``), which it asserts is done
    with float32 gradients of half-precision parameters only (``:2339``, ``:1925``). PaddleNLP 3.0 does not
    (``:748``, ``sharding_parallel_config`` is empty).
    """
    if source.model.table.convention == "paddlenlp":
        return "stage1v1", "the default of PaddleNLP"
    if not any(tensor.master for tensor in source.model.tensors):
        return "stage1v1", "PaddleFormers has stage1v2 with master weights only"
    return "stage1v2", "the default of PaddleFormers"


def _check_expert_parallel(target: HybridTarget) -> None:
    """PaddleFormers 1.2.0's reasons.

    ``trainer/training_args.py:2793-2845``, ``utils/moe_hybrid_parallel_optimizer.py:355-363``,
    ``nn/moe_deepep/moe_gate.py:133``, and the groups of Paddle 3.3 ``fleet/base/topology.py:769-870``.
    """
    topology, ep = target.topology, target.topology.ep
    if topology.dp > 1:
        raise PlanError(
            f"ep={ep} with dp={topology.dp}: the trainer refuses expert parallelism with data parallelism, only "
            "sharding goes with it"
        )
    if target.strategy in ("stage2", "stage3"):
        raise PlanError(
            f"ep={ep} with {target.strategy}: the trainer's optimizer for expert parallelism only considers sharding "
            "stage 1"
        )
    if target.strategy == "stage1v1":
        raise PlanError(
            f"ep={ep} with stage1v1: the trainer asserts that hybrid expert parallel only supports ShardingV2; "
            "choose stage1v2"
        )
    if ep % topology.tp or topology.tp * topology.sharding % ep:
        raise PlanError(
            f"ep={ep} with tp={topology.tp}, sharding={topology.sharding}: expert ranks are the tp ranks of neighbours "
            "in a sharding group, so tp must divide ep, and ep must divide tp × sharding"
        )
    if topology.tp > 1 and not target.sequence_parallel:
        raise PlanError(
            f"ep={ep} with tp={topology.tp} without sequence parallelism: the trainer's router asserts "
            "sequence_parallel when tensor parallelism is used"
        )
    if target.sharding.comm_overlap:
        raise UnsupportedError(
            f"ep={ep} with comm_overlap: whether the pipeline engine keeps experts in buffers of their own is not known"
        )


def _check_experts_over_dp(target: HybridTarget) -> None:
    """PaddleNLP 3.0.0b4's ``use_expert_parallel``: ``transformers/moe_layer.py:150-180``."""
    topology = target.topology
    if topology.world_size == topology.dp:
        raise PlanError(
            f"experts over dp={topology.dp} and nothing else: the trainer does not set up its groups then, and every "
            "rank holds all experts; leave ep out"
        )
    if target.strategy in ("stage2", "stage3"):
        raise UnsupportedError(
            f"experts over dp={topology.dp} with {target.strategy} are not written by this version"
        )


def _check_experts(checkpoint: Checkpoint, target: HybridTarget) -> None:
    """Whether the model can spread its experts as the target asks for."""
    table, axis, topology = checkpoint.model.table, target.spread, target.topology
    if axis is None:
        if table.experts_over == "dp" and 1 < topology.dp < topology.world_size:
            raise PlanError(
                f"dp={topology.dp}: {table.convention}'s {table.family} spreads experts over data-parallel ranks "
                f"wherever there are other axes too; ask for ep={topology.dp}"
            )
        return
    ranks = {"ep": topology.ep, "tp": topology.tp, "dp": topology.dp}[axis]
    what = f"{axis}={ranks}"
    if table.experts_over != axis:
        raise PlanError(f"{what}: {table.convention}'s {table.family} does not spread experts over {axis}")
    experts = [t for t in checkpoint.model.tensors if t.rule.of_expert]
    count = len({expert_of(t.key) for t in experts})
    if count == 0 or count % ranks:
        raise PlanError(
            f"{what}: the layers have {count} experts of their own names, the trainer asserts that {axis} divides them"
        )
    plain = next((t.key for t in experts if not t.master), None)
    if axis == "ep" and topology.sharding > 1 and plain is not None:
        raise PlanError(
            f"{plain}: has no master weight; the trainer's stage1v2 under expert parallelism only supports "
            "amp_master_grad, and sharded saving would lose it"
        )


def layout_hybrid(checkpoint: Checkpoint, target: HybridTarget) -> TargetFiles:
    """Lay out all files of the target checkpoint.

    Raises
    ------
    PlanError
        If the model cannot take this topology, or a parameter name is not known.
    """
    check_target(target)
    _check_experts(checkpoint, target)
    # PaddleFormers' optimizer has only what is trained (1.2.0 trainer.py:3359), which its states tell if there are any.
    tensors = checkpoint.model.tensors
    told = checkpoint.model.table.convention == "paddleformers" and any(t.trained for t in tensors)
    untrained = [t.key for t in tensors if not t.trained and t.tied_to is None]
    if untrained and not told and target.strategy != "none":
        raise UnsupportedError(
            f"{untrained[0]} has no optimizer state: whether the target job counts frozen parameters when it "
            f"shares parameters out is not known, so {target.strategy} is not written for this model"
        )
    if target.names is None and checkpoint.names_predicted is not None:
        raise RuleError(
            "parameter names",
            f"{checkpoint.names_predicted}; names of the target cannot be predicted, take them from a job of "
            "the target topology with --target-meta model_meta.json",
        )
    return _Writer(checkpoint, target).layout()


@dataclass(slots=True)
class _Cell:
    """One coordinate of the target."""

    tp: int
    pp: int
    ep: int
    tensors: list[ModelTensor]
    names: Mapping[str, str]
    local_shapes: dict[str, Shape]
    cuts: dict[str, TensorCut]
    parameters: list[ModelTensor]
    """The optimizer's list: trained tensors, each parameter once."""
    shares: Shares
    """Of every parameter, what each rank of the sharding group stores; of an expert, its own cell's ranks only."""
    held: dict[int, list[ModelTensor]]
    """Rank of the sharding group, if it is of this cell → parameters of which its optimizer holds anything."""
    left: dict[int, list[ModelTensor]]
    """Rank of the sharding group → tensors of its model_state."""


@dataclass(frozen=True, slots=True)
class _Layout:
    """A file of one rank, its tp coordinate left open: tp ranks write the same but for where a box lies."""

    kind: str
    shard: int | None
    size_bytes: int
    literals: Kept
    fills: tuple[tuple[int, int], ...]
    """``(byte offset, number of zero bytes)``."""
    arrays: Ints
    """A row for each: kind of array, tensor, byte offset, number of the dtype."""


class _Arrays:
    """The arrays of a file that is being laid out; a file may have very many."""

    __slots__ = ("cell", "padding", "rows")

    def __init__(self, cell: _Cell) -> None:
        self.cell = cell
        self.rows = numbers_of("q")
        """Kind of array, tensor and number of the dtype, of one after the other."""
        self.padding: dict[int, tuple[int, int]] = {}
        """Number of an array → bytes of its values, and of the zeros that follow them."""


class _Writer:
    """Builds the files of one target, one after another."""

    def __init__(self, checkpoint: Checkpoint, target: HybridTarget) -> None:
        self.checkpoint, self.target = checkpoint, target
        self.model: Model = checkpoint.model
        self.topology = target.topology
        self.tensor_index = checkpoint.catalog.index()
        self.tensors = checkpoint.catalog.tensors
        self.identity = {t.key: t.tied_to or t.key for t in self.model.tensors}
        self.expert = {t.key: expert_of(t.key) for t in self.model.tensors if t.rule.of_expert}
        self.experts = len(set(self.expert.values()))
        self.tied = {key for t in self.model.tensors if t.tied_to for key in (t.key, t.tied_to)}
        under_pp = self.topology.pp > 1
        self.written = {t.key: (under_pp and t.rule.key_pp) or t.key for t in self.model.tensors}
        self.files: list[File] = []
        self.literals = Literals()
        self.fills: list[tuple[int, int, int]] = []
        self.placements = Placements()

    def layout(self) -> TargetFiles:
        cells: list[_Cell] = []
        for pp, tensors in enumerate(self._stages()):
            for turn in range(self.target.turns):
                layouts: list[_Layout] = []
                for tp in range(self.topology.tp):
                    cell = self._cell(tp, pp, turn, tensors, cells[-1] if tp else None)
                    if not tp or cell.names != cells[-1].names:
                        layouts = [layout for shard in cell.held for layout in self._rank_files(cell, shard)]
                    for layout in layouts:
                        self._file(layout, cell)
                    cells.append(cell)
        if self.target.spread == "dp":  # the trainer describes the first data-parallel rank only
            cells = [cell for cell in cells if cell.ep == 0]
        # As the trainer gathers them: all tp ranks and stages of a neighbour, then the next one's.
        cells.sort(key=lambda cell: cell.ep // self.topology.tp)
        if self.target.writes_meta:
            metas = {self._cell_name(cell.tp, cell.pp, cell.ep): self._cell_meta(cell) for cell in cells}
            text = format_model_meta(self.model.table.convention, self.topology, metas)
            self._literal_file(MODEL_META, text.encode())
        saving = 1 if self.target.spread == "dp" else self.topology.dp
        for rank in range(self.topology.world_size // saving):
            self._literal_file(f"{SIGNAL_PREFIX}{rank}", b"1")
        return TargetFiles(
            tuple(self.files),
            self.literals,
            tuple(self.fills),
            self.placements.fragments(),
            {self._cell_name(c.tp, c.pp, c.ep): c.names for c in cells},
        )

    def _cell_name(self, tp: int, pp: int, ep: int) -> str:
        return cell_name(tp, pp, ep if self.topology.ep > 1 else None)

    # -- which tensors, names and slices

    def _stages(self) -> list[list[ModelTensor]]:
        """The tensors of every stage, in model order."""
        items = list(dict.fromkeys((tensor.rule.item, tensor.layer) for tensor in self.model.tensors))
        described = {item.name: item for item in self.model.table.items}
        place = segment(
            [described[name] for name, _ in items],
            self.topology.pp,
            self.topology.vpp,
            self.target.segmentation,
        )
        self.chunk = {item: chunk for item, (_, chunk) in zip(items, place, strict=True)}
        stage_of = {item: stage for item, (stage, _) in zip(items, place, strict=True)}
        stages: list[list[ModelTensor]] = [[] for _ in range(self.topology.pp)]
        for tensor in self.model.tensors:
            stages[stage_of[tensor.rule.item, tensor.layer]].append(tensor)
        return stages

    def _cell(self, tp: int, pp: int, turn: int, tensors: list[ModelTensor], sibling: _Cell | None) -> _Cell:
        """``sibling`` is the cell of another tp rank of the stage; given names and spread experts can differ."""
        ep = turn if self.target.spread == "dp" else self.topology.expert_rank(tp, turn)
        if sibling is not None and self.target.names is None and self.target.spread is None:
            return replace(sibling, tp=tp)
        tensors = self._of_rank(tensors, tp, ep)
        names = self._names(tp, pp, ep, tensors)
        if self.topology.pp > 1:
            # Layers are named as they are built, but a stage lists the layers that it shares with another
            # stage first: PipelineLayer makes shared_layers before all others (Paddle 3.3.1 pp_layers.py:509).
            tensors = sorted(tensors, key=lambda t: t.key not in self.tied)
            names = {t.key: names[t.key] for t in tensors}
        cuts = {t.key: self.model.cut(t, self.topology.tp, self.target.spread) for t in tensors}
        local = {t.key: cuts[t.key].local_shape(t.key, t.global_shape) for t in tensors}
        seen: set[str] = set()
        parameters = []
        for tensor in tensors:
            if tensor.trained and names[tensor.key] not in seen:
                parameters.append(tensor)
            seen.add(names[tensor.key])
        shares = self._shares(parameters, local, turn)
        apart = self.topology.dense_sharding
        held: dict[int, list[ModelTensor]] = {
            shard: [] for shard in range(turn % apart, self.topology.sharding, apart)
        }
        for tensor in parameters:
            if self._only_experts(ep) and not tensor.rule.of_expert:
                continue
            for shard in shares[tensor.key].keys() & held.keys():
                held[shard].append(tensor)
        cell = _Cell(tp, pp, ep, tensors, names, local, cuts, parameters, shares, held, {})
        cell.left = self._model_state_tensors(cell)
        return cell

    def _only_experts(self, ep: int) -> bool:
        """Whether the optimizer files of a cell hold nothing but experts: data-parallel rank 0 writes the rest."""
        return self.target.spread == "dp" and ep > 0

    def _of_rank(self, tensors: list[ModelTensor], tp: int, ep: int) -> list[ModelTensor]:
        """The tensors of a stage that a rank holds: of the experts, those of its turn."""
        spread = self.target.spread
        if spread is None:
            return tensors
        rank = tp if spread == "tp" else ep
        each = (
            self.experts // {"ep": self.topology.ep, "tp": self.topology.tp, "dp": self.topology.dp}[spread]
        )
        mine = range(rank * each, (rank + 1) * each)
        held = [t for t in tensors if not t.rule.of_expert or self.expert[t.key] in mine]
        return lead_experts(held, self.target.unified_experts) if spread == "ep" else held

    def _shares(self, parameters: Sequence[ModelTensor], local: Mapping[str, Shape], turn: int) -> Shares:
        """Experts under expert parallelism have buffers of their own, cut for the ranks that hold the same ones."""
        listed = {
            alone: [
                Parameter(t.key, prod(local[t.key]), t.dtype, self.chunk[t.rule.item, t.layer])
                for t in parameters
                if (self.topology.ep > 1 and t.rule.of_expert) == alone
            ]
            for alone in (False, True)
        }
        strategy, options = self.target.strategy, self.target.sharding
        shares = share_out(strategy, listed[False], self.topology.sharding, options)
        of_experts = share_out(strategy, listed[True], self.topology.moe_sharding, options)
        for key, ranks in of_experts.items():
            shares[key] = {rank * self.topology.dense_sharding + turn: piece for rank, piece in ranks.items()}
        return shares

    def _names(self, tp: int, pp: int, ep: int, tensors: list[ModelTensor]) -> Mapping[str, str]:
        if self.target.names is None:
            topology, parallel = self.topology, self.target.sequence_parallel
            return predict_parameter_names(tensors, topology.pp, topology.tp, parallel, topology.ep)
        where = self._cell_name(tp, pp, ep)
        given = self.target.names.get(where, {})
        if self.target.spread == "dp":
            given = {shift_expert(key, ep * self.experts // self.topology.dp): n for key, n in given.items()}
        keys = {t.key: self.written[t.key] for t in tensors}
        if set(given) != set(keys.values()):
            odd = sorted(set(given) ^ set(keys.values()))
            raise RuleError(
                odd[0] if odd else where,
                f"the target's model_meta.json and the segmentation disagree about the cell {where}",
            )
        return {key: given[written] for key, written in keys.items()}

    # -- which files

    def _rank_files(self, cell: _Cell, shard: int) -> Iterator[_Layout]:
        if self.target.writes_meta:
            yield self._model_state(cell, shard, cell.left[shard])
        elif shard < self.topology.dense_sharding:
            yield self._model_state(cell, None, cell.left[shard])
        yield (self._experts if self._only_experts(cell.ep) else self._optimizer)(cell, shard)
        if self.checkpoint.has_ema:
            yield self._ema(cell, shard)

    def _model_state_tensors(self, cell: _Cell) -> dict[int, list[ModelTensor]]:
        """What each rank's model_state holds: everything on rank 0, or what sharded saving leaves.

        bf16 parameters with a master weight are left out; of the rest, v1 keeps the owner's, v2 hands the
        optimizer's list out round robin, and what the optimizer does not know goes to rank 0 (PaddleNLP
        3.0 ``sharding_io.py:73-106``; PaddleFormers 1.2 does so only where it is told to, and else loses it).
        """
        stored = [t for t in cell.tensors if not t.missing]
        if not self.target.writes_meta:
            return {shard: stored if shard < self.topology.dense_sharding else [] for shard in cell.held}
        left: dict[int, list[ModelTensor]] = {shard: [] for shard in range(self.topology.sharding)}
        listed = {t.key: place for place, t in enumerate(cell.parameters)}
        first_key = first_keys(cell.names)
        for tensor in stored:
            if tensor.master and tensor.dtype.name == "bfloat16":
                continue
            key = first_key[cell.names[tensor.key]]
            if key not in listed:
                owner = 0
            elif self.target.strategy == "stage1v1":
                (owner,) = cell.shares[key]
            else:
                owner = listed[key] % self.topology.sharding
            left[owner].append(tensor)
        return left

    def _name(self, kind: str, cell: _Cell, shard: int | None) -> str:
        degrees = self.topology
        return rank_file_name(
            kind,
            cell.tp if degrees.tp > 1 else None,
            cell.pp if degrees.pp > 1 else None,
            shard if degrees.sharding > 1 else None,
            moe=cell.ep if self.target.spread == "dp" else None,
            ep=cell.ep if kind == MODEL_STATE and shard is None and degrees.ep > 1 else None,
        )

    def _model_state(self, cell: _Cell, shard: int | None, tensors: Sequence[ModelTensor]) -> _Layout:
        arrays = _Arrays(cell)

        def entries() -> Iterator[tuple[object, object]]:
            for t in tensors:
                yield self.written[t.key], self._array(arrays, t, PARAM, cell.local_shapes[t.key], None, None)
            yield STRUCTURED_NAMES, {self.written[t.key]: cell.names[t.key] for t in tensors}

        return self._layout(MODEL_STATE, shard, entries(), arrays)

    def _optimizer(self, cell: _Cell, shard: int) -> _Layout:
        accumulators = [a for a in ACCUMULATORS if any(a in t.accumulators for t in cell.parameters)]
        held = self._of_shard(cell, shard)
        with_master = any(t.master for t in held)
        arrays = _Arrays(cell)
        keys = (
            (a, t, self._accumulator_key(cell, t, a, shard))
            for a in accumulators
            for t in held
            if a in t.accumulators
        )

        def entries() -> Iterator[tuple[object, object]]:
            unnamed = {}
            for accumulator, tensor, key in keys:
                yield key, self._piece(arrays, tensor, accumulator, shard, key if with_master else None)
                if not with_master:
                    unnamed[key] = key
            if with_master:
                yield "master_weights", self._master_weights(arrays, shard, MASTER_WEIGHT)
            if self.checkpoint.lr_scheduler is not None:
                yield "LR_Scheduler", self.checkpoint.lr_scheduler
            if not with_master:
                yield STRUCTURED_NAMES, unnamed

        return self._layout(OPTIMIZER, shard, entries(), arrays)

    def _experts(self, cell: _Cell, shard: int) -> _Layout:
        """What a data-parallel rank above 0 writes: its experts (PaddleNLP 3.0.0b4 ``trainer.py:2534``)."""
        held = self._of_shard(cell, shard)
        with_master = any(t.master for t in held)
        arrays = _Arrays(cell)

        def entries() -> Iterator[tuple[object, object]]:
            yield "master_weights", self._master_weights(arrays, shard, MASTER_WEIGHT)
            unnamed = {}
            for tensor in held:
                for accumulator in tensor.accumulators:
                    key = self._accumulator_key(cell, tensor, accumulator, shard)
                    yield key, self._piece(arrays, tensor, accumulator, shard, key if with_master else None)
                    if not with_master:
                        unnamed[key] = key
            if not with_master:
                yield STRUCTURED_NAMES, unnamed

        return self._layout(OPTIMIZER, shard, entries(), arrays)

    def _ema(self, cell: _Cell, shard: int) -> _Layout:
        with_master = any(t.master for t in self._of_shard(cell, shard))
        plain = [t for t in cell.left[shard] if (self.identity[t.key], EMA_PARAM) in self.tensor_index]
        if self._only_experts(cell.ep):
            plain = []
        arrays = _Arrays(cell)

        def entries() -> Iterator[tuple[object, object]]:
            yield "master_weights", self._master_weights(arrays, shard, EMA_MASTER_WEIGHT)
            for tensor in plain:
                name = cell.names[tensor.key] if with_master else None
                shape = cell.local_shapes[tensor.key]
                yield self.written[tensor.key], self._array(arrays, tensor, EMA_PARAM, shape, None, name)
            if not with_master:
                yield STRUCTURED_NAMES, {self.written[t.key]: cell.names[t.key] for t in plain}

        return self._layout(EMA, shard, entries(), arrays)

    def _master_weights(self, arrays: _Arrays, shard: int, state: str) -> Entries:
        cell = arrays.cell

        def entries() -> Iterator[tuple[object, object]]:
            for tensor in self._of_shard_by_master(cell, shard):
                if not tensor.master:
                    continue
                name = cell.names[tensor.key]
                entry = f"{SLICE_PREFIX}{name}" if self._is_stage3_slice(cell, tensor, shard) else name
                tensor_name = master_tensor_name(name) if self._separate_master_names() else name
                yield entry, self._piece(arrays, tensor, state, shard, tensor_name)

        return Entries(entries())

    def _separate_master_names(self) -> bool:
        """Stage 2 and 3 give a master weight the name of its parameter, accumulators follow."""
        return self.target.strategy not in ("stage2", "stage3")

    def _is_stage3_slice(self, cell: _Cell, tensor: ModelTensor, shard: int) -> bool:
        return self.target.strategy == "stage3" and cell.shares[tensor.key][shard] is not None

    def _accumulator_key(self, cell: _Cell, tensor: ModelTensor, accumulator: str, shard: int) -> str:
        name = cell.names[tensor.key]
        if not tensor.master and self._is_stage3_slice(cell, tensor, shard):
            name = f"{SLICE_PREFIX}{name}"
        return accumulator_key(name, accumulator, tensor.master and self._separate_master_names())

    def _of_shard(self, cell: _Cell, shard: int) -> list[ModelTensor]:
        """Parameters of which the rank's optimizer holds anything, in the order of its accumulators.

        Stage 3 puts the parameters that it cuts first.
        """
        return sorted(cell.held[shard], key=lambda t: cell.shares[t.key][shard] is None)

    def _of_shard_by_master(self, cell: _Cell, shard: int) -> list[ModelTensor]:
        """The same in the order of its master weights: stage 2 makes them in order of size."""
        held = self._of_shard(cell, shard)
        if self.target.strategy != "stage2":
            return held
        return sorted(held, key=lambda t: prod(cell.local_shapes[t.key]))

    def _piece(
        self, arrays: _Arrays, tensor: ModelTensor, state: str, shard: int, name: str | None
    ) -> ArraySlot:
        """What a rank of the sharding group stores of a state of a parameter."""
        if _is_number(state):
            return self._array(arrays, tensor, state, (1,), None, name)
        cell = arrays.cell
        return self._array(
            arrays, tensor, state, cell.local_shapes[tensor.key], cell.shares[tensor.key][shard], name
        )

    def _cell_meta(self, cell: _Cell) -> CellMeta:
        return CellMeta(
            strategy=self.target.strategy,
            comm_overlap=self.target.sharding.comm_overlap,
            names={self.written[key]: name for key, name in cell.names.items()},
            parameters={
                self.written[tensor.key]: ParameterMeta(
                    local_shape=cell.local_shapes[tensor.key],
                    dtype=tensor.dtype,
                    is_distributed=self._is_distributed(cell, tensor),
                    no_sync=self.target.spread == "ep" and tensor.rule.of_expert,
                )
                for tensor in cell.tensors
            },
            owners={cell.names[key]: rank for key, (rank, *_) in cell.shares.items()}
            if self.target.strategy == "stage1v1"
            else {},
        )

    def _is_distributed(self, cell: _Cell, tensor: ModelTensor) -> bool:
        if self.target.spread in ("ep", "tp") and tensor.rule.of_expert:
            return True
        cut = self.topology.tp > 1 and cell.cuts[tensor.key].dim is not None
        return tensor.rule.marked_distributed(cut, self.topology.ep)

    # -- bytes

    def _array(
        self,
        arrays: _Arrays,
        tensor: ModelTensor,
        state: str,
        shape: Shape,
        flat: FlatSlice | None,
        name: str | None,
    ) -> ArraySlot:
        """One more array of a file: all of ``shape``, or a slice of its flattening."""
        place = self.tensor_index.get((self.identity[tensor.key], state))
        if place is None:
            raise PlanError(f"{tensor.key} ({state}): the target needs it, the source does not have it")
        dtype = self.tensors.dtype(place)
        slot = len(arrays.rows) // 3
        cut = TensorCut(1, None) if _is_number(state) else arrays.cell.cuts[tensor.key]
        stretch = None if flat is None else (flat.start, flat.stop)
        kind = self.placements.kind(ArrayKind(shape, cut, dtype.itemsize, stretch))
        arrays.rows.extend((kind, place, DTYPES.index(dtype)))
        if flat is None:
            return ArraySlot(slot, dtype.code, shape, name)
        elements = max(0, min(flat.stop, prod(shape)) - flat.start)
        if elements < flat.elements:
            lacking = flat.elements - elements
            arrays.padding[slot] = (elements * dtype.itemsize, lacking * dtype.itemsize)
        return ArraySlot(slot, dtype.code, (flat.elements,), name)

    def _literal_file(self, path: str, content: bytes) -> None:
        self.files.append(File(path, len(content)))
        self.literals.add(len(self.files) - 1, 0, content)

    def _layout(
        self, kind: str, shard: int | None, root: Iterator[tuple[object, object]], arrays: _Arrays
    ) -> _Layout:
        literals = self.literals.keep(())
        size_bytes, slots = write_pickle(Entries(root), partial(self.literals.keep_also, literals))
        slot, byte_offset, _ = np.array(slots, dtype=np.int64).reshape(-1, 3).T
        rows = np.array(arrays.rows, dtype=np.int64).reshape(-1, 3)[slot]
        places = np.column_stack([rows[:, 0], rows[:, 1], byte_offset, rows[:, 2]])
        padded = np.flatnonzero(np.isin(slot, list(arrays.padding)))
        fills = [
            (start + values, zeros)
            for start, (values, zeros) in zip(
                byte_offset[padded].tolist(),
                (arrays.padding[number] for number in slot[padded].tolist()),
                strict=True,
            )
        ]
        return _Layout(kind, shard, size_bytes, literals, tuple(fills), places)

    def _file(self, layout: _Layout, cell: _Cell) -> None:
        file = len(self.files)
        self.files.append(File(self._name(layout.kind, cell, layout.shard), layout.size_bytes))
        self.literals.place(layout.literals, file)
        self.fills.extend((file, offset, nbytes) for offset, nbytes in layout.fills)
        self.placements.add_file(layout.arrays, cell.tp, file)


def _is_number(state: str) -> bool:
    """Whether a state is one number for each parameter."""
    return state in ACCUMULATORS and ACCUMULATORS[state].per_parameter
