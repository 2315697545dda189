"""Build the catalog of logical tensors from the files of a hybrid-parallel checkpoint.

For every (structured key, state): join the slices of sharding within a cell, join the pieces of tensor parallelism
across cells by the rule table, and take the union over pipeline stages and expert ranks. Only references are joined:
the result is a catalog of fragments that is checked to cover every tensor exactly once.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise, takewhile

import numpy as np

from paddle_reshard.pipeline.checkpoint.checkpoint import Checkpoint, Job, MissingPolicy
from paddle_reshard.pipeline.checkpoint.lora import check_matrices, with_base
from paddle_reshard.pipeline.checkpoint.parameter_names import (
    CellNames,
    as_in_a_fresh_process,
    begun_elsewhere,
)
from paddle_reshard.pipeline.checkpoint.stages import without_copies
from paddle_reshard.pipeline.core.catalog import Catalog, File, check_catalog
from paddle_reshard.pipeline.core.errors import CheckpointError, CoverageError, RuleError, of_optimizer
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
    is_per_parameter,
)
from paddle_reshard.pipeline.formats.hybrid import HYBRID, HYBRID_PLAIN
from paddle_reshard.pipeline.formats.hybrid.arrays import StoredArray, StoredArrays
from paddle_reshard.pipeline.formats.hybrid.entries import FileEntries
from paddle_reshard.pipeline.formats.hybrid.experts import (
    check_experts,
    expert_axis_of,
    join_cells,
    merged_names,
    number_experts,
)
from paddle_reshard.pipeline.formats.hybrid.names import LORA_MODEL_STATE, OPTIMIZER, rank_file_name
from paddle_reshard.pipeline.formats.hybrid.positions import RankFiles, expected_slices, shown_in_file
from paddle_reshard.pipeline.formats.hybrid.ranks import (
    HALF_DTYPES,
    Ranks,
    StoredCell,
    expert_count,
    sort_ranks,
)
from paddle_reshard.pipeline.formats.hybrid.sharding_group import (
    ShardingGroup,
    one_number,
    whole_in_model_state,
)
from paddle_reshard.pipeline.formats.hybrid.whole import WholeArrays
from paddle_reshard.pipeline.formats.model_meta import ModelMeta
from paddle_reshard.pipeline.formats.reading import TensorCollector, common_dtype, not_held
from paddle_reshard.pipeline.formats.writing import UNCUT
from paddle_reshard.pipeline.model.completeness import completed, lost
from paddle_reshard.pipeline.model.lora_config import Adapter
from paddle_reshard.pipeline.model.model import (
    Model,
    ModelTensor,
    cut_of,
    expert_of,
    order_routers,
    predict_parameter_names,
)
from paddle_reshard.pipeline.model.placement import ArrayKind, TensorCut
from paddle_reshard.pipeline.model.rules.choose import (
    DESCRIBE,
    choose_table,
    is_known,
    keys_in_model,
    keys_of_stages,
    table_of_other_formats,
    what_is_known,
)
from paddle_reshard.pipeline.model.rules.entries import Config
from paddle_reshard.pipeline.model.rules.literal import StoredJob, StoredKey, stored_table
from paddle_reshard.pipeline.model.rules.rule import Rule, expected_shape
from paddle_reshard.pipeline.model.rules.table import RuleTable
from paddle_reshard.pipeline.model.rules.tables import RuleTables

_BLOCK_TENSORS = 1 << 14
"""Tensors of which the arrays are looked at together."""
AUTOMATIC_NAME = re.compile(r"(eager_tmp|generated_tensor)_\d+")
"""Name that Paddle generates for an unnamed tensor; the number counts such tensors in the process."""


def read_hybrid(
    paths: Mapping[str, int],
    roots: Mapping[str, FileEntries],
    meta: ModelMeta | None,
    config: Config,
    tables: RuleTables,
    missing: MissingPolicy,
    adapter: Adapter | None = None,
) -> Checkpoint:
    """Interpret a checkpoint from the metadata of its files, as :func:`~.hybrid.index.index_hybrid`.

    Parameters
    ----------
    paths
        Every path of the checkpoint → size in bytes.
    roots
        Path of a tensor file → its entries.
    meta
        Contents of ``model_meta.json``, if it exists; ``adapter`` is the same of ``lora_config.json``.
    missing
        How to treat tensors that no file holds.
    """
    ranks = sort_ranks(paths, roots, meta, tables, config)
    files = [File(path, paths[path]) for path in sorted(roots)]
    del roots  # frees the names of all arrays, unless the caller keeps them
    source = _Source(ranks, _choose_table_and_rename(ranks, tables, config), config)
    strategy = source.strategy()
    stored = source.model(adapter, missing)
    source.check_files_of_states(stored, strategy, missing)
    check_experts(ranks, source.expert_axis, stored.tensors, expert_count(source.table, config))
    if ranks.with_meta:
        _check_half_dtypes(stored.tensors, config)
    builder = _HybridCatalogBuilder(source, stored, strategy, files, missing)
    catalog = builder.catalog()
    check_catalog(catalog)
    tensors = tuple(
        tensor
        if tensor.missing == (lacks := tensor.key in builder.missing)
        else replace(tensor, missing=lacks)
        for tensor in stored.tensors
    )
    model = replace(stored, tensors=tensors)
    job = source.job(model, strategy)
    return Checkpoint(
        format=HYBRID if ranks.with_meta else HYBRID_PLAIN,
        catalog=catalog,
        own_files=frozenset([*(file.path for file in files), *([] if meta is None else [MODEL_META])]),
        model=without_copies(model),
        job=job,
        has_ema=ranks.has_ema,
        has_optimizer=ranks.has_optimizer,
        adapter=adapter,
        unproven=begun_elsewhere(job.names),
        alike=builder.rank_files.in_words(),
    )


def _choose_table_and_rename(ranks: Ranks, tables: RuleTables, config: Config) -> RuleTable:
    """The rule table of the model; keys in cells become those that the table knows."""
    for cell in ranks.cells if ranks.has_lora or not ranks.with_meta else ():
        cell.rename(keys_in_model(tables, cell.names, config))
    for cell in ranks.cells if ranks.topology.pp > 1 else ():
        cell.rename(keys_of_stages(tables, config))
    table = _choose_table(ranks, tables, config)
    if table.described is not None:
        common, topology = _held_by_all(ranks), ranks.topology
        # Experts that only some ranks have tell by their keys how they are distributed.
        listed = any(cell.names.keys() - common for cell in ranks.cells)
        table.check_shown({"tp": topology.tp, "ep": 1 if listed else topology.ep})
    # The last stage stores some tensors under a key of the first stage; each becomes the key of its own row.
    shared = {rule.key_pp: rule.key for rule in table.rules if rule.key_pp}
    for cell in ranks.cells:
        if 0 < cell.pp == ranks.topology.pp - 1:
            cell.rename(shared)
    if table.local_experts:
        number_experts(ranks, expert_count(table, config))
    return table


def _choose_table(ranks: Ranks, tables: RuleTables, config: Config) -> RuleTable:
    """The rule table of the model's family, or for an unknown family a table derived from the files."""
    if is_known(tables, config, HYBRID) or not _tells_itself(ranks):
        held = dict.fromkeys(key for cell in ranks.cells for key in cell.names)
        return choose_table(tables, held, config, HYBRID, stages_known=True)
    topology, common = ranks.topology, _held_by_all(ranks)
    keys: dict[str, StoredKey] = {}
    joined = join_cells(ranks)
    for stage, cells in enumerate(ranks.stages):
        for key in merged_names([cell.names for cell in cells]):
            cell = next(cell for cell in joined if cell.pp == stage and key in cell.names)
            if key in keys:
                raise RuleError(
                    key,
                    f"stage {keys[key].stage} and stage {stage} hold it, and no rule table tells what that means for "
                    f"model type {config.get('model_type')!r}; {DESCRIBE}",
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
    return stored_table(
        keys.values(),
        config,
        ordered=True,
        job=StoredJob(topology.tp, topology.pp, topology.ep),
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
    return {key for cells in ranks.stages for key in set.intersection(*(set(cell.names) for cell in cells))}


class _Source:
    """The cells of a checkpoint, by the rule table of its model."""

    def __init__(self, ranks: Ranks, table: RuleTable, config: Config) -> None:
        self.ranks, self.table, self.config = ranks, table, config
        self.find = table.finder(config)
        self._alike: dict[int, tuple[Rule, TensorCut, Shape | None]] = {}
        self._accumulators: dict[tuple[str, ...], tuple[str, ...]] = {}
        """All states that files hold of a tensor → those that are accumulators."""
        self.cells = join_cells(ranks, lambda key: self.find(key)[0].shared_out)
        """Of each stage and tp rank, all cells joined into one."""
        self.expert_axis = expert_axis_of(ranks)

    def strategy(self) -> str:
        """The sharding strategy: from ``model_meta.json``, or recognised by the arrays.

        Stage 3 marks slices, and stores small tensors whole on every rank. Stages 2 and 3 name accumulators after the
        parameter even if there is a master weight. Stage 1 v2 stores 1-D slices only, v1 and stage 2 whole tensors.
        Without master weights, stage 2 has the same files as stage 1 v1.
        """
        if not self.ranks.has_optimizer:
            return "none"
        strategy = self.ranks.strategy or self._strategy_of_files()
        if self.ranks.topology.ep > 1 and strategy not in ("none", "stage1v2"):
            raise CheckpointError(
                f"{self.ranks.topology} with {strategy}: PaddleFormers' optimizer for expert parallelism only supports "
                "stage1v2, so the distribution over ranks is unknown"
            )
        return strategy

    def _strategy_of_files(self) -> str:
        if self.ranks.topology.sharding == 1:
            return "none"
        spellings = {spelling for cell in self.cells for spelling in cell.master_spellings}
        if len(spellings) > 1:
            raise CheckpointError(
                "some accumulators are named after master weights and some after parameters that have one"
            )
        shapes = {
            (cell.shapes[key], tuple(stored.array.shape for stored in arrays))
            for cell in self.cells
            for (key, state), arrays in cell.arrays.entries()
            if not whole_in_model_state(state) and not is_per_parameter(state)
        }
        several_dims = any(len(shape) > 1 for _, array_shapes in shapes for shape in array_shapes)
        copies = any(len(local) > 1 and array_shapes.count(local) > 1 for local, array_shapes in shapes)
        if any(cell.sliced for cell in self.cells) or copies:
            return "stage3"
        if not shapes:
            raise CheckpointError(
                "the optimizer keeps no states, as SGD does, so the files of its ranks do not tell the sharding "
                f"strategy, which {MODEL_META} would: save with --save_checkpoint_format sharding_io, or without "
                "sharding"
            )
        if not any(len(local) > 1 for local, _ in shapes):
            raise CheckpointError(
                f"every parameter has one dim, so the sharding strategy cannot be determined without {MODEL_META}"
            )
        if spellings == {False}:
            return "stage2"
        return "stage1v1" if several_dims else "stage1v2"

    def job(self, model: Model, strategy: str) -> Job:
        """The job that saved the files."""
        sequence_parallel, problem, names = _check_names(self.ranks, model)
        topology = self.ranks.topology
        return Job(
            topology=replace(topology, vpp=_vpp(self.cells, model)),
            strategy=strategy,
            comm_overlap=self.ranks.comm_overlap,
            sequence_parallel=sequence_parallel,
            names_predicted=problem,
            names=names,
            lr_scheduler=self.ranks.lr_scheduler,
            expert_axis=self.expert_axis,
            unified_experts=_unified(self.ranks, model) if topology.ep > 1 else None,
        )

    def model(self, adapter: Adapter | None, policy: MissingPolicy) -> Model:
        """The tensors of all cells, in model order."""
        tensors: dict[str, ModelTensor] = {}
        order = {key: position for position, key in enumerate(_keys_in_order(self.ranks))}
        for cell in self.cells:
            states = cell.arrays.states_by_key()
            for key in cell.names:
                tensor = self._tensor(cell, key, states.get(cell.holders[key], ()))
                if (known := tensors.setdefault(key, tensor)) is not tensor:
                    _check_agreement(known, tensor, cell)
        table, items = self.table, self.table.build_order(pp=1)

        @cache
        def place(item: str, layer: int | None) -> tuple[int, int]:
            """The only item of its kind is before all numbered ones."""
            _, number = table.place(item, layer)
            return items[item], -1 if number is None else number

        ordered = sorted(tensors.values(), key=lambda t: (place(*t.item), order[t.key]))
        tied = [
            replace(t, tied_to=None) if t.tied_to is not None and t.tied_to not in tensors else t
            for t in ordered
        ]
        _check_same_tensors(self.ranks, tensors)
        if self.ranks.has_lora:
            return _read_adapter(Model(tuple(tied), table, self.config), adapter)
        model = Model(tuple(order_routers(tied, unified=False)), table, self.config)
        return completed(model, policy.lets_lack, mtp=not policy.drops_mtp)

    def check_files_of_states(self, model: Model, strategy: str, policy: MissingPolicy) -> None:
        """Refuse optimizer files without a state beside others that have some: those of a stage, or of a rank.

        A rank may have none under stage 1 v1 and stage 2, which keep parameters whole, if there are few: then no
        parameter lacks its states. Slices that a rank lacks are missed otherwise.
        """
        states = {tensor.key for tensor in model.tensors if tensor.trained}
        trains = {cell.pp for cell in self.cells if not states.isdisjoint(cell.names)}
        for cell in self.cells if trains else ():
            empty = self._shards_without_states(cell) if strategy in ("stage1v1", "stage2") else []
            if cell.pp in trains and not empty:
                continue
            lacking = (key for key in cell.names if key not in states and not policy.lets_lack_states(key))
            if keys := [key for key in lacking if not self.find(key)[0].untrained]:
                of, shard = self.ranks.topology, min(empty, default=0)
                path = rank_file_name(
                    OPTIMIZER,
                    cell.tp if of.tp > 1 else None,
                    cell.pp if of.pp > 1 else None,
                    shard if of.sharding > 1 else None,
                )
                also = "" if cell.pp in trains else ", nor does any other file of its pipeline stage"
                error = CoverageError(
                    f"{keys[0]} (optimizer states)",
                    f"{path} holds no states{also}, and other files do. Take the files of one whole save; if the job "
                    f"froze what has none, say so with --allow-missing {' '.join(map(repr, _patterns(keys)))}",
                )
                raise of_optimizer(error)

    def _shards_without_states(self, cell: StoredCell) -> list[int]:
        held = {
            stored.shard
            for (_, state), arrays in cell.arrays.entries()
            for stored in arrays
            if state not in (PARAM, EMA_PARAM, EMA_MASTER_WEIGHT)
        }
        return [shard for shard in range(self.ranks.topology.sharding) if shard not in held]

    def _tensor(self, cell: StoredCell, key: str, held: tuple[str, ...]) -> ModelTensor:
        topology = self.ranks.topology
        rule, layer = self.find(key)
        cut, expected = self.cut_and_shape(rule, key)
        shape = cut.global_shape(key, cell.shapes[key])
        if expected is not None and expected != shape:
            raise RuleError(
                key,
                f"{rule.who_expects(self.config)} the shape {expected}, but the files of tp={topology.tp} ranks add up "
                f"to {shape} (a rank holds {cell.shapes[key]}, cut along dim {cut.dim})",
            )
        self._check_marks(cell, key, rule, cut)
        holder, name = cell.holders[key], cell.names[key]
        if held not in self._accumulators:
            self._accumulators[held] = tuple(state for state in ACCUMULATORS if state in held)
        states = self._accumulators[held]
        return ModelTensor(
            key=key,
            rule=rule,
            layer=layer,
            global_shape=shape,
            dtype=cell.dtypes[key],
            accumulators=states,
            master=MASTER_WEIGHT in held,
            tied_to=self._tied_to(key, rule, holder, bool(states)),
            automatic_name=None if states or not AUTOMATIC_NAME.fullmatch(name) else name,
        )

    def _tied_to(self, key: str, rule: Rule, holder: str, trained: bool) -> str | None:
        """The key of the tensor with the same values and states.

        Under a name that the library sets, two tensors of a cell can be one parameter for the optimizer.
        """
        if rule.is_own(self.ranks.topology.pp):
            return None
        if rule.parameter_name is not None and holder != key and trained:
            return holder
        return rule.twin(self.config, key)

    def cut_and_shape(self, rule: Rule, key: str) -> tuple[TensorCut, Shape | None]:
        """How the job cuts a tensor of a row, and the shape that it has by the config: one object for the whole row."""
        known = self._alike.get(id(rule))
        if known is None:
            topology = self.ranks.topology
            axis = self.expert_axis if rule.of_expert_rank else None
            cut = cut_of(rule, self.config, key, topology.tp, axis, topology.ep)
            known = self._alike[id(rule)] = rule, cut, expected_shape(rule, self.config, key)
        return known[1:]

    def _check_marks(self, cell: StoredCell, key: str, rule: Rule, cut: TensorCut) -> None:
        """Check the flags of a tensor in ``model_meta.json`` against the rules."""
        topology = self.ranks.topology
        expert_axis = self.expert_axis if rule.of_expert_rank else None
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
                f"{MODEL_META} says no_sync=true: each rank of ep={topology.ep} has a tensor of its own under this "
                f"key. The rule table {self.table.family!r} does not know how they belong together, and nothing was "
                "read",
            )
        raise RuleError(
            key,
            f"{MODEL_META} says no_sync={cell.no_sync[key]} with {topology}; expected is no_sync=true for experts "
            "under expert parallelism, and false for everything else",
        )


def _patterns(keys: Iterable[str]) -> list[str]:
    """Patterns of keys, one for all of a layer: ``model.norm.weight model.layers.0.*``."""
    return list(dict.fromkeys(re.sub(r"(\.\d+\.).*", r"\1*", key) for key in keys))


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


def _check_half_dtypes(tensors: Sequence[ModelTensor], config: Config) -> None:
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


def _keys_in_order(ranks: Ranks) -> list[str]:
    """All keys, those of a stage in model order.

    The order of cells is that of the experts, not of tp ranks: with ``tp=2,ep=4``, the first tp rank has the expert
    ranks 0 and 2, the second 1 and 3.
    """
    return [key for cells in ranks.stages for key in merged_names([cell.names for cell in cells])]


def _check_agreement(known: ModelTensor, tensor: ModelTensor, cell: StoredCell) -> None:
    for what in ("global_shape", "dtype", "accumulators", "master"):
        a, b = getattr(known, what), getattr(tensor, what)
        if a != b:
            raise CoverageError(tensor.key, f"{what} is {a} in one cell and {b} in {cell.label()}")


def _check_same_tensors(ranks: Ranks, tensors: Mapping[str, ModelTensor]) -> None:
    """Check that all cells of a stage hold the same tensors under the same names, except for experts."""

    def common(cell: StoredCell) -> list[tuple[str, str]]:
        return [(key, name) for key, name in cell.names.items() if not tensors[key].rule.of_expert]

    for first, *others in ranks.stages:
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


def _check_names(ranks: Ranks, model: Model) -> tuple[bool | None, str | None, tuple[CellNames, ...]]:
    """Whether the source uses sequence parallelism, the first name that breaks the naming rules, and all names.

    The first two are ``None`` if it cannot be determined, or if there is none. Names are compared with those of the
    job, with sequence parallelism or without, that fits better.
    """
    tp, pp, ep = ranks.topology.tp, ranks.topology.pp, ranks.topology.ep
    built = model.as_built(pp)
    position = {tensor.key: number for number, tensor in enumerate(built)}
    held = [
        [
            built[n]
            for n in sorted({position[key] for key in cell.names} | _base_positions(cell, ranks, model))
        ]
        for cell in ranks.cells
    ]

    def predicted(sequence_parallel: bool) -> list[dict[str, str]]:
        return [
            predict_parameter_names(tensors, model.config, pp, tp, sequence_parallel, ep) for tensors in held
        ]

    rules = {parallel: predicted(parallel) for parallel in ((False, True) if tp > 1 else (False,))}
    odd = {
        parallel: sum(
            of_cell[key] != name
            for cell, of_cell in zip(ranks.cells, by_rules, strict=True)
            for key, name in as_in_a_fresh_process(cell.names, of_cell).items()
        )
        for parallel, by_rules in rules.items()
    }
    closest = min(odd, key=odd.__getitem__)
    problem = _first_problem(ranks, model, rules[closest]) if odd[closest] else None
    determined = problem is None and odd.get(not closest, 0) > 0
    names = tuple(_of_states(ranks.cells, model, rules[closest]))
    return closest if determined else None, problem, names


def _first_problem(ranks: Ranks, model: Model, rules: Sequence[Mapping[str, str]]) -> str:
    """The first name that is not the one of the naming rules, which are given for each cell."""
    apart = {head: words for words, head in model.tied_by_config.items()}
    cell, key, by_rules = next(
        (cell, key, predicted[key])
        for cell, predicted in zip(ranks.cells, rules, strict=True)
        for key, name in as_in_a_fresh_process(cell.names, predicted).items()
        if predicted[key] != name
    )
    if key in apart:
        return (
            f"{key} has a parameter name of its own in {cell.label()}, {cell.names[key]}, but config.json makes it one "
            f"tensor with {apart[key]} (tie_word_embeddings); with false there both are converted"
        )
    return f"{key} has the parameter name {cell.names[key]} in {cell.label()}, but {by_rules} by the naming rules"


def _of_states(
    cells: Sequence[StoredCell], model: Model, rules: Sequence[Mapping[str, str]]
) -> Iterator[CellNames]:
    """The names in each cell under which optimizer states are stored; tp ranks have the same, held once."""
    stored = {tensor.key for tensor in model.tensors if tensor.accumulators or tensor.master}
    before: Mapping[str, str] = {}
    for cell, of_cell in zip(cells, rules, strict=True):
        held = {key: name for key, name in cell.names.items() if key in stored}
        before = names = before if held == before else held
        predicted = {key: of_cell[key] for key in names}
        rules_say = names if names == predicted else predicted
        yield CellNames(cell.label(), cell.told_by, names, rules_say, cell.optimizer)


def _base_positions(cell: StoredCell, ranks: Ranks, model: Model) -> set[int]:
    """Positions, in build order, of tensors of a cell that no file lists: of the base model in a LoRA job, or missing.

    They advance the counters in parameter names.
    """
    if not any(tensor.missing for tensor in model.tensors):
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


class _HybridCatalogBuilder:
    """Adds the arrays of all cells to the tensors that they are pieces of."""

    def __init__(
        self, source: _Source, model: Model, strategy: str, files: list[File], policy: MissingPolicy
    ) -> None:
        self.source, self.model, self.policy = source, model, policy
        self.topology = source.ranks.topology
        slices = expected_slices(strategy, source.ranks, source.cells, model, _vpp(source.cells, model))
        self.groups = [
            ShardingGroup(strategy, self.topology.sharding, of_cell, _listed_twice(cell, model))
            for cell, of_cell in zip(source.cells, slices, strict=True)
        ]
        self.rank_files = RankFiles(len(files))
        self.missing: set[str] = set()
        self.by_key = {tensor.key: tensor for tensor in model.tensors}
        self.kinds: dict[tuple[Shape, int, int, tuple[int, int] | None, Shape | None], int] = {}
        """What an array's :class:`ArrayKind` is made of, with the id of its cut, → the number of the kind."""
        self.aliases = model.aliases
        self.stored = TensorCollector(files, self.aliases, max(self.topology.tp, self.topology.ep))

    def catalog(self) -> Catalog:
        for cell, group in zip(self.source.cells, self.groups, strict=True):
            self._add_cell(cell, group)
            cell.arrays = StoredArrays()  # large, and not used again
        implied = self._imply()
        _check_states(self.model, self.source.ranks.has_ema, self.stored.tensors)
        return self.stored.catalog(implied)

    def _add_cell(self, cell: StoredCell, group: ShardingGroup) -> None:
        """Add the arrays of a cell in their order: at once where each is all of a tensor, as those of many others."""
        single = {t.key: t for t in self.model.tensors if t.tied_to is None and t.key not in self.aliases}
        whole = WholeArrays(cell, group, single, self._cut, self.stored)
        for begin in range(0, len(cell.arrays), _BLOCK_TENSORS):
            lone = cell.arrays.lone(begin, begin + _BLOCK_TENSORS)
            fit, columns = whole.among(lone)
            ends = [*(np.flatnonzero(np.diff(fit)) + 1).tolist(), len(fit)]
            for first, stop in pairwise([0, *ends]):
                run = slice(first, stop)
                if fit[first] and whole.add(lone.of(run), columns.of(run), self.rank_files):
                    continue
                for (key, state), arrays in cell.arrays.entries(begin + first, begin + stop):
                    self._add(cell, group, key, state, arrays)

    def _cut(self, tensor: ModelTensor) -> TensorCut:
        return self.source.cut_and_shape(tensor.rule, tensor.key)[0]

    def _tensor(self, key: str, state: str, dtype: DType, shape: Shape, where: str) -> int:
        return self.stored.tensor(self.by_key[key].tied_to or key, state, dtype, shape, where)

    def _add(
        self, cell: StoredCell, group: ShardingGroup, key: str, state: str, arrays: list[StoredArray]
    ) -> None:
        dtype = arrays[0].dtype()
        if len(arrays) > 1:
            common_dtype(key, state, [(array.dtype(), array.path) for array in arrays])
        if is_per_parameter(state):
            self._add_per_parameter(key, state, dtype, arrays)
            return
        tensor = self.by_key[key]
        cut, _ = self.source.cut_and_shape(tensor.rule, key)
        index = self._tensor(key, state, dtype, tensor.global_shape, arrays[0].path)
        rank = cell.tp if cut.dim is not None else 0
        shown, local_shape = shown_in_file(cell, tensor, state), cell.shapes[key]
        for number, copy in group.copies(cell, key, state, arrays):
            if tensor.rule.shared_out and self.topology.ep > 1:
                # One of the two is 0: a cell that is joined of several has no ep of its own.
                rank = cell.ep + number
            replica = self.stored.copy(index, rank)
            for path, byte_offset, flat, axes in copy:
                start, stop = flat or (0, 0)
                seen = start if shown == key else stop - start
                self.rank_files.add(self.stored.file(path), state, shown, seen, key, start, rank)
                alike = local_shape, id(cut), dtype.itemsize, flat, axes
                kind = self.kinds.get(alike)
                if kind is None:
                    kind = self.stored.placements.kind(ArrayKind(local_shape, cut, *alike[2:]))
                    self.kinds[alike] = kind
                self.stored.place_as(index, kind, dtype, rank, replica, path, byte_offset)

    def _add_per_parameter(self, key: str, state: str, dtype: DType, arrays: list[StoredArray]) -> None:
        kind = self.stored.placements.kind(ArrayKind((1,), UNCUT, dtype.itemsize))
        for array in arrays:
            byte_offset = one_number(key, state, array).byte_offset
            index = self._tensor(key, state, dtype, (1,), array.path)
            self.stored.place_as(index, kind, dtype, 0, self.stored.copy(index, 0), array.path, byte_offset)

    def _imply(self) -> dict[int, int]:
        """Tensors that no file holds → their source: the format defines such parameters as casts of master weights."""
        implied = {}
        for tensor in self.model.tensors:
            identity = tensor.tied_to or tensor.key
            if tensor.missing:  # of the base model of an adapter, or allowed
                self.missing.add(tensor.key)
            elif self.stored.tensors.find(identity, PARAM) is None:
                master = self.stored.tensors.find(identity, MASTER_WEIGHT)
                if master is not None:
                    index = self._tensor(tensor.key, PARAM, tensor.dtype, tensor.global_shape, MODEL_META)
                    implied[index] = master
                elif self.policy.reports or self.policy.lets_lack(tensor.key):
                    self.missing.add(tensor.key)
                else:
                    raise lost(tensor)
        return implied


def _listed_twice(cell: StoredCell, model: Model) -> frozenset[str]:
    """Keys of parameters to which the library gives one name, under which the optimizer lists both."""
    named = {t.key for t in model.tensors if t.rule.parameter_name is not None and not t.is_alias}
    of_two = {cell.holders[key] for key in cell.names if key in named and cell.holders[key] != key}
    return frozenset(key for key in cell.names if key in named and cell.holders[key] in of_two)


def _check_states(model: Model, has_ema: bool, tensors: Tensors) -> None:
    """Check that all trained tensors have the same optimizer states, and an average if any tensor has."""
    trained = [t for t in model.tensors if t.trained and t.tied_to is None]
    wanted = {name for t in trained for name in t.accumulators}
    for tensor in trained:
        lacking = sorted(wanted - set(tensor.accumulators))
        if lacking:
            raise not_held(tensor.key, lacking[0])
        if has_ema:
            state = EMA_MASTER_WEIGHT if tensor.master else EMA_PARAM
            if tensors.find(tensor.key, state) is None:
                raise not_held(tensor.key, state)
