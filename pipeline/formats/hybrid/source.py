"""Build the catalog of logical tensors from the files of a hybrid-parallel checkpoint.

For every (structured key, state): join the slices of sharding within a cell, join the pieces of tensor parallelism
across cells by the rule table, and take the union over pipeline stages and expert ranks. Only references are joined:
the result is a catalog of fragments that is checked to cover every tensor exactly once.
"""

from __future__ import annotations

import re
from array import array as numbers_of
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, takewhile
from typing import Any

from paddle_reshard.pipeline.checkpoint.checkpoint import Checkpoint, Job, MissingPolicy
from paddle_reshard.pipeline.checkpoint.lora import check_matrices, with_base
from paddle_reshard.pipeline.checkpoint.stages import without_copies
from paddle_reshard.pipeline.core.catalog import Catalog, File, check_catalog
from paddle_reshard.pipeline.core.errors import CheckpointError, CoverageError, RuleError
from paddle_reshard.pipeline.core.file_names import CONFIG, MODEL_META
from paddle_reshard.pipeline.core.geometry import Shape
from paddle_reshard.pipeline.core.tensor_columns import Tensors
from paddle_reshard.pipeline.core.tensors import (
    ACCUMULATORS,
    EMA_MASTER_WEIGHT,
    EMA_PARAM,
    MASTER_WEIGHT,
    PARAM,
    DType,
    Tensor,
    is_per_parameter,
)
from paddle_reshard.pipeline.core.topology import Topology
from paddle_reshard.pipeline.formats.hybrid.arrays import StoredArray, StoredArrays
from paddle_reshard.pipeline.formats.hybrid.experts import (
    check_experts,
    expert_axis_of,
    join_cells,
    merged_names,
    number_experts,
)
from paddle_reshard.pipeline.formats.hybrid.format import HYBRID, HYBRID_PLAIN
from paddle_reshard.pipeline.formats.hybrid.names import LORA_MODEL_STATE
from paddle_reshard.pipeline.formats.hybrid.positions import RankFiles, expected_slices
from paddle_reshard.pipeline.formats.hybrid.ranks import HALF_DTYPES, Ranks, StoredCell, sort_ranks
from paddle_reshard.pipeline.formats.hybrid.sharding_group import (
    ShardingGroup,
    common_dtype,
    one_number,
    whole_in_model_state,
)
from paddle_reshard.pipeline.formats.jobs.keys import expert_of
from paddle_reshard.pipeline.formats.model_meta import ModelMeta
from paddle_reshard.pipeline.model.completeness import check_layers, lost
from paddle_reshard.pipeline.model.lora_config import Adapter
from paddle_reshard.pipeline.model.model import (
    Model,
    ModelTensor,
    NamedTensor,
    cut_of,
    lead_experts,
    predict_parameter_names,
)
from paddle_reshard.pipeline.model.placement import ArrayKind, Placements, TensorCut
from paddle_reshard.pipeline.model.rules.choose import (
    choose_table,
    is_known,
    keys_in_model,
    keys_of_stages,
    table_of_other_formats,
    what_is_known,
)
from paddle_reshard.pipeline.model.rules.entries import derived_sizes
from paddle_reshard.pipeline.model.rules.literal import StoredJob, StoredKey, stored_table
from paddle_reshard.pipeline.model.rules.rule import Rule, expected_shape
from paddle_reshard.pipeline.model.rules.table import RuleTable
from paddle_reshard.pipeline.model.rules.tables import RuleTables

AUTOMATIC_NAME = re.compile(r"(eager_tmp|generated_tensor)_\d+")
"""Name that Paddle generates for an unnamed tensor; the number counts such tensors in the process."""


def read_hybrid(
    paths: Mapping[str, int],
    roots: Mapping[str, Any],
    meta: ModelMeta | None,
    config: Mapping[str, Any],
    tables: RuleTables,
    missing: MissingPolicy | None = None,
    adapter: Adapter | None = None,
) -> Checkpoint:
    """Interpret a checkpoint from the metadata of its files.

    Parameters
    ----------
    paths
        Every path of the checkpoint → size in bytes.
    roots
        Path of a tensor file → its unpickled root, with arrays as references.
    meta, config
        ``model_meta.json`` (or ``None``) and ``config.json``.
    tables
        Rule tables to choose from.
    missing
        How to treat tensors that no file holds; by default they are an error.
    adapter
        Contents of ``lora_config.json``, or ``None``.

    Raises
    ------
    CheckpointError, PlanError
        Naming the file, the tensor and the two values, if the checkpoint is incomplete or inconsistent, or cannot be
        interpreted exactly.
    """
    ranks = sort_ranks(paths, roots, meta, _Rules(tables, config))
    held = sorted(roots)
    del roots  # frees the names of all arrays, unless the caller keeps them
    table = _choose_table_and_rename(ranks, tables, config)
    cells = join_cells(ranks, lambda key: table.find(key, config)[0].shared_out)
    expert_axis = expert_axis_of(ranks)
    strategy = _strategy(ranks, cells)
    stored = _read_model(ranks, cells, expert_axis, table, config, adapter)
    check_experts(ranks, stored.tensors, _expert_count(table, config))
    if ranks.with_meta:
        _check_half_dtypes(stored.tensors, config)
    files = [File(path, paths[path]) for path in held]
    builder = _HybridCatalogBuilder(
        ranks, cells, stored, expert_axis, strategy, files, missing or MissingPolicy()
    )
    catalog = builder.catalog()
    check_catalog(catalog)
    tensors = tuple(replace(tensor, missing=tensor.key in builder.missing) for tensor in stored.tensors)
    model = replace(stored, tensors=tensors)
    return Checkpoint(
        format=HYBRID if ranks.with_meta else HYBRID_PLAIN,
        catalog=catalog,
        own_files=frozenset(
            [*(file.path for file in catalog.files), *([] if meta is None else [MODEL_META])]
        ),
        model=without_copies(model),
        job=_job_of(ranks, cells, model, strategy, expert_axis),
        has_ema=ranks.has_ema,
        has_optimizer=ranks.has_optimizer,
        adapter=adapter,
        unproven=builder.rank_files.in_words(),
    )


def _choose_table_and_rename(ranks: Ranks, tables: RuleTables, config: Mapping[str, Any]) -> RuleTable:
    """The rule table of the model; keys in cells become those that the table knows."""
    for cell in ranks.cells if ranks.has_lora or not ranks.with_meta else ():
        cell.rename(keys_in_model(tables, cell.names, config))
    for cell in ranks.cells if ranks.topology.pp > 1 else ():
        cell.rename(keys_of_stages(tables, config))
    table = _choose_table(ranks, tables, config)
    _name_shared_keys(ranks, table)
    if table.local_experts:
        number_experts(ranks, _expert_count(table, config))
    return table


def _job_of(
    ranks: Ranks, cells: Sequence[StoredCell], model: Model, strategy: str, expert_axis: str | None
) -> Job:
    """The job that saved the files."""
    sequence_parallel, names = _check_names(ranks, model)
    topology = ranks.topology
    return Job(
        topology=replace(topology, vpp=_vpp(cells, model)),
        strategy=strategy,
        comm_overlap=ranks.comm_overlap,
        sequence_parallel=sequence_parallel,
        names_predicted=names,
        lr_scheduler=ranks.lr_scheduler,
        expert_axis=expert_axis,
        unified_experts=_unified(ranks, model) if topology.ep > 1 else None,
    )


@dataclass(frozen=True, slots=True)
class _Rules:
    """Facts from the rule tables about a checkpoint whose files are incomplete."""

    tables: RuleTables
    config: Mapping[str, Any]

    def predict_names(self, keys: list[str], topology: Topology) -> list[dict[str, str]]:
        """Parameter names by the naming rules, without and with sequence parallelism."""
        table = choose_table(self.tables, keys, self.config, HYBRID, stages_known=True)
        named = [NamedTensor(key, *_named(table, key, self.config)) for key in keys]
        tp, pp, ep = topology.tp, topology.pp, topology.ep
        return [
            predict_parameter_names(named, self.config, pp, tp, parallel, ep) for parallel in (False, True)
        ]

    def keys_in_model(self, saved: Iterable[str]) -> Mapping[str, str]:
        """Keys in files of weights → what they are in the model, if its class renames them as it saves."""
        return keys_in_model(self.tables, saved, self.config)

    def count_experts(self, keys: list[str]) -> int | None:
        """Number of routed experts in a layer."""
        return _expert_count(
            choose_table(self.tables, keys, self.config, HYBRID, stages_known=True), self.config
        )


def _choose_table(ranks: Ranks, tables: RuleTables, config: Mapping[str, Any]) -> RuleTable:
    """The rule table of the model's family, or for an unknown family a table derived from the files."""
    if is_known(tables, config, HYBRID) or not _tells_itself(ranks):
        held = dict.fromkeys(key for cell in ranks.cells for key in cell.names)
        return choose_table(tables, held, config, HYBRID, stages_known=True)
    topology, common = ranks.topology, _held_by_all(ranks)
    keys: dict[str, StoredKey] = {}
    for stage, cells in groupby(join_cells(ranks), key=lambda cell: cell.pp):
        holding = list(cells)
        for key in merged_names([cell.names for cell in ranks.cells if cell.pp == stage]):
            cell = next(cell for cell in holding if key in cell.names)
            if key in keys:
                raise RuleError(
                    key,
                    f"stage {keys[key].stage} and stage {stage} hold it, and no rule table tells what that means for "
                    f"model type {config.get('model_type')!r}; write one and pass it with --rules FILE",
                )
            keys[key] = StoredKey(
                key,
                cell.names[key],
                None if cell.holders[key] == key else cell.holders[key],
                cell.distributed.get(key),
                stage,
                scalar=not cell.shapes[key],
                expert=key not in common,
            )
    job = StoredJob(topology.tp, topology.pp, topology.ep)
    return stored_table(
        keys.values(),
        config,
        ordered=True,
        job=job,
        of_family=table_of_other_formats(tables, keys, config),
        known=what_is_known(tables, config),
    )


def _tells_itself(ranks: Ranks) -> bool:
    """Whether all that the ranks of a stage hold in several ways is numbered experts under expert parallelism."""
    if ranks.has_lora or ranks.topology.dp > 1:
        return False
    common = _held_by_all(ranks)
    own = [key for cell in ranks.cells for key in cell.names if key not in common]
    return not own or (ranks.topology.ep > 1 and all(expert_of(key) is not None for key in own))


def _held_by_all(ranks: Ranks) -> set[str]:
    """Keys that every cell of their stage has."""
    stages = [list(cells) for _, cells in groupby(ranks.cells, key=lambda cell: cell.pp)]
    return {key for cells in stages for key in set.intersection(*(set(cell.names) for cell in cells))}


def _expert_count(table: RuleTable, config: Mapping[str, Any]) -> int | None:
    return None if table.experts is None else derived_sizes(config).get(table.experts)


def _named(table: RuleTable, key: str, config: Mapping[str, Any]) -> tuple[Rule, str | None]:
    rule, _ = table.find(key, config)
    return rule, rule.twin(config, key)


def _strategy(ranks: Ranks, cells: Sequence[StoredCell]) -> str:
    """The sharding strategy: from ``model_meta.json``, or recognised by the arrays.

    Stage 3 marks slices, and stores small tensors whole on every rank. Stages 2 and 3 name accumulators after the
    parameter even if there is a master weight. Stage 1 v2 stores 1-D slices only, v1 and stage 2 whole tensors. Without
    master weights, stage 2 has the same files as stage 1 v1.
    """
    if not ranks.has_optimizer:
        return "none"
    strategy = ranks.strategy or _strategy_of_files(ranks, cells)
    if ranks.topology.ep > 1 and strategy not in ("none", "stage1v2"):
        raise CheckpointError(
            f"{ranks.topology} with {strategy}: PaddleFormers' optimizer for expert parallelism only supports "
            "stage1v2, so the distribution over ranks is unknown"
        )
    return strategy


def _strategy_of_files(ranks: Ranks, cells: Sequence[StoredCell]) -> str:
    if ranks.topology.sharding == 1:
        return "none"
    spellings = {spelling for cell in cells for spelling in cell.master_spellings}
    if len(spellings) > 1:
        raise CheckpointError(
            "some accumulators are named after master weights and some after parameters that have one"
        )
    shapes = {
        (cell.shapes[key], tuple(stored.array.shape for stored in arrays))
        for cell in cells
        for (key, state), arrays in cell.arrays.items()
        if not whole_in_model_state(state) and not is_per_parameter(state)
    }
    several_dims = any(len(shape) > 1 for _, array_shapes in shapes for shape in array_shapes)
    copies = any(len(local) > 1 and array_shapes.count(local) > 1 for local, array_shapes in shapes)
    if any(cell.sliced for cell in cells) or copies:
        return "stage3"
    if not any(len(local) > 1 for local, _ in shapes):
        raise CheckpointError(
            f"every parameter has one dim, so the sharding strategy cannot be determined without {MODEL_META}"
        )
    if spellings == {False}:
        return "stage2"
    return "stage1v1" if several_dims else "stage1v2"


def _vpp(cells: Sequence[StoredCell], model: Model) -> int:
    """The number of virtual stages: the most runs of consecutive decoder layers in any cell.

    Layers 0, 1, 4, 5 in a cell are two runs.
    """
    mtp = model.table.mtp_items
    layer_of = {t.key: None if t.rule.item in mtp else t.layer for t in model.tensors}
    runs = []
    for cell in cells:
        layers = sorted({layer for key in cell.names if (layer := layer_of[key]) is not None})
        runs.append(sum(1 for a, b in zip([-2, *layers], layers, strict=False) if b != a + 1))
    return max([1, *runs])


# --------------------------------------------------------------------------------------------- the model


def _name_shared_keys(ranks: Ranks, table: RuleTable) -> None:
    """Rename tensors that the last stage stores under a key of the first stage to the key of their own row."""
    keys = {rule.key_pp: rule.key for rule in table.rules if rule.key_pp}
    for cell in ranks.cells:
        if keys and 0 < cell.pp == ranks.topology.pp - 1:
            cell.rename(keys)


def _read_model(
    ranks: Ranks,
    cells: Sequence[StoredCell],
    expert_axis: str | None,
    table: RuleTable,
    config: Mapping[str, Any],
    adapter: Adapter | None,
) -> Model:
    tensors: dict[str, ModelTensor] = {}
    order = {key: position for position, key in enumerate(_keys_in_order(ranks.cells))}
    for cell in cells:
        for key in cell.names:
            tensor = _read_tensor(cell, key, ranks, expert_axis, table, config)
            known = tensors.setdefault(key, tensor)
            _check_agreement(known, tensor, cell)
    items = table.build_order(pp=1)
    ordered = sorted(
        tensors.values(),
        key=lambda t: (items[t.rule.item], _number(table, t), order[t.key]),
    )
    keys = set(tensors)
    tied = [replace(t, tied_to=t.tied_to if t.tied_to in keys else None) for t in ordered]
    _check_same_tensors(ranks, tensors)
    if ranks.has_lora:
        return _read_adapter(Model(tuple(tied), table, config), adapter)
    if table.counts_layers:
        check_layers(tied, table, config)
    return Model(tuple(lead_experts(tied, unified=False)), table, config)


def _number(table: RuleTable, tensor: ModelTensor) -> int:
    """Number of a tensor's item among those of its kind; the only one is before all numbered ones."""
    _, layer = table.place(tensor.rule.item, tensor.layer)
    return -1 if layer is None else layer


def _tied_to(
    cell: StoredCell, key: str, rule: Rule, config: Mapping[str, Any], pp: int, trained: bool
) -> str | None:
    """The key of the tensor with the same values and states.

    Under a name that the library sets, two tensors of a cell can be one parameter for the optimizer.
    """
    if rule.own_in_stages and pp > 1:
        return None
    holder = cell.holders[key]
    if rule.parameter_name is not None and holder != key and trained:
        return holder
    return rule.twin(config, key)


def _read_adapter(held: Model, adapter: Adapter | None) -> Model:
    """The model of a LoRA checkpoint, whose files hold only the trained tensors."""
    if not held.has_lora:
        raise CheckpointError(f"{LORA_MODEL_STATE}: contains no LoRA matrices")
    check_matrices(held, adapter)
    items = {item.name: item for item in held.table.items}
    for tensor in held.tensors:
        numbers = held.table.numbers(items[tensor.rule.item], held.config)
        if numbers and tensor.layer not in numbers:
            raise CheckpointError(
                f"{tensor.key}: LoRA of layer {tensor.layer}, but config.json says that there are {len(numbers)}"
            )
    return with_base(held, adapter)


def _check_half_dtypes(tensors: Sequence[ModelTensor], config: Mapping[str, Any]) -> None:
    """Check that parameters with master weights are all bfloat16 or all float16, as ``config.json`` says.

    The trainers write the dtype of the model to ``config.json`` when they save.
    """
    tensor_of_dtype = {tensor.dtype.name: tensor for tensor in tensors if tensor.master}
    if len(tensor_of_dtype) > 1:
        first, second = list(tensor_of_dtype.values())[:2]
        raise CheckpointError(
            f"{MODEL_META} says that {first.key} is {first.dtype.name} and {second.key} {second.dtype.name}; all "
            "parameters with master weights must have the same dtype"
        )
    written = config.get("torch_dtype", config.get("dtype"))
    for name, tensor in tensor_of_dtype.items():
        if written in HALF_DTYPES and written != name:
            raise CheckpointError(
                f"{tensor.key}: {name} in {MODEL_META}, but the model is {written} in {CONFIG}: the files belong to "
                "different runs"
            )


def _keys_in_order(cells: Sequence[StoredCell]) -> list[str]:
    """All keys, those of a stage in model order.

    Cells are ordered as in :class:`Ranks`, which is the order of the experts, not by tp rank: with ``tp=2,ep=4``, the
    first tp rank has the expert ranks 0 and 2, the second 1 and 3.
    """
    stages = [list(of_stage) for _, of_stage in groupby(cells, key=lambda cell: cell.pp)]
    return [key for of_stage in stages for key in merged_names([cell.names for cell in of_stage])]


def _read_tensor(
    cell: StoredCell,
    key: str,
    ranks: Ranks,
    expert_axis: str | None,
    table: RuleTable,
    config: Mapping[str, Any],
) -> ModelTensor:
    tp = ranks.topology.tp
    rule, layer = table.find(key, config)
    if not rule.of_expert_rank:
        expert_axis = None
    cut = cut_of(rule, config, key, tp, expert_axis, ranks.topology.ep)
    shape = cut.global_shape(key, cell.shapes[key])
    expected = expected_shape(rule, config, key)
    if expected is not None and expected != shape:
        raise RuleError(
            key,
            f"config.json and the rule table expect the shape {expected}, but the files of tp={tp} ranks add up to "
            f"{shape} (a rank holds {cell.shapes[key]}, cut along dim {cut.dim})",
        )
    _check_marks(cell, key, rule, cut, expert_axis, ranks.topology, table)
    holder = cell.holders[key]
    states = tuple(name for name in ACCUMULATORS if (holder, name) in cell.arrays)
    return ModelTensor(
        key=key,
        rule=rule,
        layer=layer,
        global_shape=shape,
        dtype=cell.dtypes[key],
        accumulators=states,
        master=(holder, MASTER_WEIGHT) in cell.arrays,
        tied_to=_tied_to(cell, key, rule, config, ranks.topology.pp, bool(states)),
        automatic_name=None if states or not AUTOMATIC_NAME.fullmatch(cell.names[key]) else cell.names[key],
    )


def _check_marks(
    cell: StoredCell,
    key: str,
    rule: Rule,
    cut: TensorCut,
    expert_axis: str | None,
    topology: Topology,
    table: RuleTable,
) -> None:
    """Check the flags of a tensor in ``model_meta.json`` against the rules.

    ``expert_axis`` is the axis over which experts are distributed, or ``None`` if the tensor is not an expert's.
    """
    distributed = topology.tp > 1 and cut.dim is not None
    expected = rule.marked_distributed(distributed, topology.ep, of_rank=expert_axis in ("ep", "tp"))
    mark = cell.distributed.get(key, expected)
    if (topology.tp > 1 or topology.ep > 1) and mark != expected:
        raise RuleError(
            key,
            f"{MODEL_META} says is_distributed={mark}, but the rule table says that tp "
            f"{'cuts dim ' + str(cut.dim) if distributed else 'does not cut it'}",
        )
    if cell.no_sync.get(key, expert_axis == "ep") == (expert_axis == "ep"):
        return
    if cell.no_sync[key] and topology.ep > 1:
        raise RuleError(
            key,
            f"{MODEL_META} says no_sync=true: each rank of ep={topology.ep} has a tensor of its own under this key. "
            f"The rule table {table.family!r} does not know how they belong together, and nothing was read",
        )
    raise RuleError(
        key,
        f"{MODEL_META} says no_sync={cell.no_sync[key]} with {topology}; expected is no_sync=true for experts "
        "under expert parallelism, and false for everything else",
    )


def _check_agreement(known: ModelTensor, tensor: ModelTensor, cell: StoredCell) -> None:
    for what in ("global_shape", "dtype", "accumulators", "master"):
        a, b = getattr(known, what), getattr(tensor, what)
        if a != b:
            raise CoverageError(tensor.key, f"{what} is {a} in one cell and {b} in {cell.label()}")


def _check_same_tensors(ranks: Ranks, tensors: Mapping[str, ModelTensor]) -> None:
    """Check that all cells of a stage hold the same tensors under the same names, except for experts."""

    def common(cell: StoredCell) -> list[tuple[str, str]]:
        return [(key, name) for key, name in cell.names.items() if not tensors[key].rule.of_expert]

    for _, cells in groupby(ranks.cells, key=lambda c: c.pp):
        first, *others = cells
        held = common(first)
        for other in others:
            if held != common(other):
                differing = sorted(set(held) ^ set(common(other)))
                what = differing[0][0] if differing else "the order of keys"
                raise CoverageError(
                    what, f"{first.label()} and {other.label()} hold different tensors of the same stage"
                )


def _unified(ranks: Ranks, model: Model) -> bool | None:
    """Whether routers come before the experts of their layer; ``None`` if the order of tensors does not show it."""
    rules = {t.key: t.rule for t in model.tensors}
    for cell in ranks.cells:
        for key in cell.names:
            if rules[key].leads_if_unified:
                return True
            if rules[key].of_expert:
                return False if any(rule.leads_if_unified for rule in model.table.rules) else None
    return None


def _check_names(ranks: Ranks, model: Model) -> tuple[bool | None, str | None]:
    """Whether the source uses sequence parallelism, and the first name that breaks the naming rules.

    Each is ``None`` if it cannot be determined, or if there is none.
    """
    tp, pp, ep = ranks.topology.tp, ranks.topology.pp, ranks.topology.ep
    problems: dict[bool, str | None] = {}
    built = model.as_built(pp)
    position = {tensor.key: number for number, tensor in enumerate(built)}
    held = [
        [
            built[i]
            for i in sorted({position[key] for key in cell.names} | _base_positions(cell, ranks, model))
        ]
        for cell in ranks.cells
    ]
    for sequence_parallel in (False, True):
        problems[sequence_parallel] = None
        for cell, tensors in zip(ranks.cells, held, strict=True):
            predicted = predict_parameter_names(tensors, model.config, pp, tp, sequence_parallel, ep)
            wrong = [k for k in cell.names if predicted[k] != cell.names[k]]
            if wrong:
                problems[sequence_parallel] = (
                    f"{wrong[0]} has the parameter name {cell.names[wrong[0]]} in {cell.label()}, but "
                    f"{predicted[wrong[0]]} by the naming rules"
                )
                break
    fitting = [sp for sp, problem in problems.items() if problem is None]
    if len(fitting) == 1:
        return fitting[0], None
    return None, None if fitting else problems[False]


def _base_positions(cell: StoredCell, ranks: Ranks, model: Model) -> set[int]:
    """Positions, in build order, of the base model's tensors in a cell of a LoRA job.

    No file lists them, but they advance the counters in parameter names.
    """
    if not ranks.has_lora:
        return set()
    if ranks.topology.pp == 1:
        return {position for position, tensor in enumerate(model.as_built(1)) if tensor.missing}
    tensors, last = model.as_built(ranks.topology.pp), cell.pp == ranks.topology.pp - 1
    layers = {tensor.item for tensor in tensors if tensor.key in cell.names and tensor.layer is not None}
    mtp = model.table.mtp_items
    ahead = {item.name for item in takewhile(lambda item: not item.repeated, model.table.items)}
    return {
        position
        for position, tensor in enumerate(tensors)
        if tensor.missing
        and (
            tensor.item in layers
            or (tensor.layer is None and (cell.pp == 0 if tensor.rule.item in ahead else last))
            or (tensor.rule.item in mtp and last)
        )
    }


# ------------------------------------------------------------------------------------------- the catalog


class _HybridCatalogBuilder:
    """Collects tensors and fragment rows, numbering the copies of each tensor."""

    def __init__(
        self,
        ranks: Ranks,
        cells: Sequence[StoredCell],
        model: Model,
        expert_axis: str | None,
        strategy: str,
        files: list[File],
        policy: MissingPolicy,
    ) -> None:
        self.ranks, self.cells, self.model, self.expert_axis = ranks, cells, model, expert_axis
        self.files, self.policy, self.tp = files, policy, ranks.topology.tp
        self.groups = [
            ShardingGroup(strategy, ranks.topology.sharding, slices, _listed_twice(cell, model))
            for cell, slices in zip(cells, expected_slices(strategy, ranks, cells, model), strict=True)
        ]
        self.rank_files = RankFiles()
        self.missing: set[str] = set()
        self.file_index = {file.path: i for i, file in enumerate(files)}
        self.by_key = {tensor.key: tensor for tensor in model.tensors}
        self.ranks_of_cut = max(self.tp, ranks.topology.ep)
        self.cuts: dict[str, TensorCut] = {}  # the same for all states of a tensor
        self.tensors = Tensors()
        self.copies = numbers_of("i")
        """Copies of its piece that a rank has contributed, at index ``tensor * ranks_of_cut + rank``."""
        self.placements = Placements()
        self.aliases: dict[str, tuple[str, ...]] = {}
        for tensor in model.tensors:
            if tensor.tied_to is not None:
                self.aliases[tensor.tied_to] = (*self.aliases.get(tensor.tied_to, ()), tensor.key)

    def catalog(self) -> Catalog:
        for cell, group in zip(self.cells, self.groups, strict=True):
            for (key, state), arrays in cell.arrays.items():
                self._add(cell, group, key, state, arrays)
            cell.arrays = StoredArrays()  # large, and not used again
        implied = self._imply()
        _check_states(self.model, self.ranks.has_ema, self.tensors)
        return Catalog(self.tensors, tuple(self.files), self.placements.fragments(), implied)

    def _identity(self, key: str) -> str:
        tied_to = self.by_key[key].tied_to
        return key if tied_to is None else tied_to

    def _tensor(self, key: str, state: str, dtype: DType, shape: Shape, where: str) -> int:
        identity = self._identity(key)
        number = self.tensors.find(identity, state)
        if number is None:
            aliases = self.aliases.get(identity, ()) if state in (PARAM, EMA_PARAM) else ()
            self.copies.extend([0] * self.ranks_of_cut)
            return self.tensors.add(Tensor(identity, state, dtype, shape, aliases))
        if (self.tensors.dtype(number), self.tensors.shape(number)) != (dtype, shape):
            tensor = self.tensors[number]
            raise CoverageError(
                tensor.label,
                f"{tensor.dtype.name} {tensor.global_shape} in one file, {dtype.name} {shape} in another",
                (where,),
            )
        return number

    def _add(
        self, cell: StoredCell, group: ShardingGroup, key: str, state: str, arrays: list[StoredArray]
    ) -> None:
        dtype = common_dtype(key, state, arrays)
        if is_per_parameter(state):
            self._add_per_parameter(key, state, dtype, arrays)
            return
        tensor = self.by_key[key]
        if key not in self.cuts:
            self.cuts[key] = self.model.cut(tensor, self.tp, self.expert_axis, self.ranks.topology.ep)
        cut = self.cuts[key]
        index = self._tensor(key, state, dtype, tensor.global_shape, arrays[0].path)
        rank = cell.tp if cut.dim is not None else 0
        shown = _shown(cell, tensor, state)
        for number, copy in enumerate(group.copies(cell, key, state, arrays)):
            rank = number if tensor.rule.shared_out and self.ranks.topology.ep > 1 else rank
            replica = self._replica(index, rank)
            for array in copy:
                start, stop = array.flat or (0, 0)
                seen = start if shown == key else stop - start
                self.rank_files.add(array.path, (state, shown, seen), (state, key, start, rank))
                kind = self.placements.kind(
                    ArrayKind(cell.shapes[key], cut, dtype.itemsize, array.flat, array.axes)
                )
                file = self.file_index[array.path]
                self.placements.add(kind, rank, index, file, array.byte_offset, dtype, replica)

    def _replica(self, tensor: int, rank: int) -> int:
        """Number of the copy that the next piece of a rank belongs to; 0 is the first.

        A copy is complete once every rank has contributed its piece.
        """
        index = tensor * self.ranks_of_cut + rank
        self.copies[index] += 1
        return self.copies[index] - 1

    def _add_per_parameter(self, key: str, state: str, dtype: DType, arrays: list[StoredArray]) -> None:
        for stored in arrays:
            array = one_number(key, state, stored)
            index = self._tensor(key, state, dtype, (1,), stored.path)
            kind = self.placements.kind(ArrayKind((1,), TensorCut(1, None), dtype.itemsize))
            replica = self._replica(index, 0)
            self.placements.add(
                kind, 0, index, self.file_index[stored.path], array.byte_offset, dtype, replica
            )

    def _imply(self) -> dict[int, int]:
        """Tensors that no file holds → their source: the format defines such parameters as casts of master weights."""
        implied = {}
        for tensor in self.model.tensors:
            identity = self._identity(tensor.key)
            if tensor.missing:  # of the base model of an adapter
                self.missing.add(tensor.key)
                continue
            if self.tensors.find(identity, PARAM) is not None:
                continue
            master = self.tensors.find(identity, MASTER_WEIGHT)
            if master is None:
                if not (self.policy.fills or self.policy.allows(tensor.key)):
                    raise lost(tensor)
                self.missing.add(tensor.key)
                continue
            index = self._tensor(tensor.key, PARAM, tensor.dtype, tensor.global_shape, MODEL_META)
            implied[index] = master
        return implied


def _listed_twice(cell: StoredCell, model: Model) -> frozenset[str]:
    """Keys of parameters to which the library gives one name, under which the optimizer lists both."""
    named = {t.key for t in model.tensors if t.rule.parameter_name is not None and not t.is_alias}
    of_two = {cell.holders[key] for key in cell.names if key in named and cell.holders[key] != key}
    return frozenset(key for key in cell.names if key in named and cell.holders[key] in of_two)


def _shown(cell: StoredCell, tensor: ModelTensor, state: str) -> str:
    """What tells which tensor a state belongs to: its key, or only the name of a parameter, which each cell has anew.

    Master weights belong to the parameters that they are compared with. Other states are in the same file as these,
    but averages are not.
    """
    of_optimizer = state not in (PARAM, EMA_PARAM, EMA_MASTER_WEIGHT)
    by_value = of_optimizer and tensor.master and (tensor.key, PARAM) in cell.arrays
    return tensor.key if by_value or state in (PARAM, EMA_PARAM) else cell.names[tensor.key]


def _check_states(model: Model, has_ema: bool, tensors: Tensors) -> None:
    """Check that all trained tensors have the same optimizer states, and an average if any tensor has."""
    trained = [t for t in model.tensors if t.trained and t.tied_to is None]
    wanted = {name for t in trained for name in t.accumulators}
    for tensor in trained:
        lacking = sorted(wanted - set(tensor.accumulators))
        if lacking:
            raise CoverageError(
                f"{tensor.key} ({lacking[0]})", "no file holds it, but other parameters have it"
            )
        if has_ema:
            state = EMA_MASTER_WEIGHT if tensor.master else EMA_PARAM
            if tensors.find(tensor.key, state) is None:
                raise CoverageError(
                    f"{tensor.key} ({state})", "no EMA file holds it, but other parameters have it"
                )
