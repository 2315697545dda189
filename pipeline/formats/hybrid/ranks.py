"""Sort the parsed files of all ranks into cells.

A *cell* is one (tp, pp) coordinate, or (tp, pp, ep) under expert parallelism: the scope in which parameter names are
unique. Every array gets a name ``(structured key, state)``. Missing or extra files, contradictory degrees, unknown
accumulators and names without a structured key are errors.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby, product
from math import prod
from typing import Any

from paddle_reshard.pipeline.checkpoint.checkpoint import checked_schedule
from paddle_reshard.pipeline.checkpoint.reading import PLAIN_STATES
from paddle_reshard.pipeline.core.errors import (
    WITHOUT_OPTIMIZER,
    CheckpointError,
    CoverageError,
    UnsupportedError,
    of_optimizer,
    unfinished,
)
from paddle_reshard.pipeline.core.file_names import MODEL_META
from paddle_reshard.pipeline.core.geometry import Shape
from paddle_reshard.pipeline.core.limits import MAX_RANKS
from paddle_reshard.pipeline.core.tensors import (
    EMA_MASTER_WEIGHT,
    EMA_PARAM,
    MASTER_WEIGHT,
    MEAN_MOMENT2,
    PARAM,
    DType,
    dtype_named,
    dtype_of_code,
    written_name,
)
from paddle_reshard.pipeline.core.topology import Topology
from paddle_reshard.pipeline.formats.hybrid import HYBRID
from paddle_reshard.pipeline.formats.hybrid.arrays import ArrayColumns, StoredArrays, array_of
from paddle_reshard.pipeline.formats.hybrid.entries import LR_SCHEDULER, SPECIAL, FileEntries
from paddle_reshard.pipeline.formats.hybrid.fused_buffers import FusedParameter, holds_buffers, unfuse
from paddle_reshard.pipeline.formats.hybrid.names import (
    EMA,
    LORA_MODEL_STATE,
    MODEL_STATE,
    OPTIMIZER,
    WEIGHTS,
    RankFile,
    parse_rank_file,
    piece_of,
    rank_file_name,
)
from paddle_reshard.pipeline.formats.jobs.keys import (
    LORA_PREFIX,
    cell_name,
    experts_of,
    first_keys,
    shift_expert,
)
from paddle_reshard.pipeline.formats.model_meta import CellMeta, ModelMeta
from paddle_reshard.pipeline.model.model import NamedTensor, predict_parameter_names
from paddle_reshard.pipeline.model.optimizer_keys import MASTER_WEIGHTS, SLICE_PREFIX, split_accumulator_key
from paddle_reshard.pipeline.model.rules.choose import choose_table, is_known, keys_in_model, keys_of_stages
from paddle_reshard.pipeline.model.rules.entries import Config, derived_sizes
from paddle_reshard.pipeline.model.rules.table import RuleTable
from paddle_reshard.pipeline.model.rules.tables import RuleTables
from paddle_reshard.storage.files.paddle_pickle import STRUCTURED_NAMES, ArrayRef

_META_AXES = {"tp": "mp_degree", "pp": "pp_degree", "shard": "sharding_degree", "ep": "ep_degree"}
_MOMENT1, _MOMENT2 = "moment1", written_name(MEAN_MOMENT2)
_SIGNAL = re.compile(r"save(?:d_signal|_signal_TMP)_(\d+)")
"""Signals of ranks; the second while the trainer merges an EMA, or for ever if it was interrupted then."""
_NUMBERED = re.compile(r"model\.\d+(?=\.)")
"""What begins the key of a LoRA job over stages in ``model_meta.json``."""


def expert_count(table: RuleTable, config: Config) -> int | None:
    """Number of routed experts in a layer."""
    return None if table.experts is None else derived_sizes(config).get(table.experts)


FACTS = {
    "holders": "holder",
    "shapes": "local shape",
    "dtypes": "dtype",
    "distributed": "is_distributed",
    "no_sync": "no_sync",
    "owners": "owner",
}
"""Fields of a cell that say something of each of its keys, and how messages name that."""


@dataclass(slots=True)
class StoredCell:
    """The contents of all files of one coordinate."""

    tp: int
    pp: int
    ep: int = 0
    """Expert rank, or data-parallel rank if file names have a part ``moe``."""
    names: dict[str, str] = field(default_factory=dict)
    """Structured key → parameter name, in model order."""
    told_by: str = MODEL_META
    """The file that tells the names."""
    holders: dict[str, str] = field(default_factory=dict)
    """Structured key → the first key with the same parameter name, under which the optimizer stores the tensor."""
    shapes: dict[str, Shape] = field(default_factory=dict)
    """Structured key → tensor-parallel local shape."""
    dtypes: dict[str, DType] = field(default_factory=dict)
    """Structured key → dtype of the parameter."""
    distributed: dict[str, bool] = field(default_factory=dict)
    """Structured key → ``is_distributed`` of ``model_meta.json``; empty without it."""
    no_sync: dict[str, bool] = field(default_factory=dict)
    """Structured key → ``no_sync`` of ``model_meta.json``, if it has this column."""
    owners: dict[str, int] = field(default_factory=dict)
    """Structured key → rank that stores its optimizer state, if ``model_meta.json`` lists owners."""
    arrays: StoredArrays = field(default_factory=StoredArrays)
    sliced: set[str] = field(default_factory=set)
    """Structured keys with an entry that is marked as a stage 3 slice."""
    master_spellings: set[bool] = field(default_factory=set)
    """Whether accumulators are named after master weights, if there are any (not in stages 2 and 3); all that occur."""
    optimizer: str = ""
    """The number at the end of accumulators: of the optimizers that the process built before; empty without any."""
    single: set[tuple[str, bool]] = field(default_factory=set)
    """``(moment, whether an array of it is a single number)``; every combination seen."""

    def label(self) -> str:
        """The cell as error messages name it."""
        return f"the cell tp={self.tp} pp={self.pp}" + (f" ep={self.ep}" if self.ep else "")

    def rename(self, keys: Mapping[str, str]) -> None:
        """Replace structured keys."""
        if not keys:
            return
        for field_name in ("names", *FACTS):
            facts = getattr(self, field_name)
            setattr(self, field_name, {keys.get(key, key): value for key, value in facts.items()})
        self.holders = {key: keys.get(first, first) for key, first in self.holders.items()}
        self.arrays = self.arrays.renamed(keys, {})
        self.sliced = {keys.get(key, key) for key in self.sliced}


@dataclass(frozen=True, slots=True)
class Ranks:
    """A hybrid-parallel checkpoint, cell by cell."""

    topology: Topology
    """``dp`` is 1 unless file names have a part ``moe``."""
    cells: tuple[StoredCell, ...]
    """Ordered by pp, then ep, then tp."""
    strategy: str | None
    """Stage 1 variant from ``model_meta.json``; ``None`` without the file."""
    comm_overlap: bool
    lr_scheduler: Any
    """The ``LR_Scheduler`` entry of the optimizer files, or ``None``."""
    with_meta: bool
    has_ema: bool
    has_lora: bool = False
    """Whether parameters are stored in ``lora_model_state`` files."""
    has_optimizer: bool = True
    """Whether there are optimizer files."""

    @property
    def stages(self) -> list[list[StoredCell]]:
        """The cells of each pipeline stage."""
        return [list(cells) for _, cells in groupby(self.cells, key=lambda cell: cell.pp)]


HALF_DTYPES = ("bfloat16", "float16")
"""Dtypes of parameters with master weights."""


def sort_ranks(
    paths: Mapping[str, int],
    entries: Mapping[str, FileEntries],
    meta: ModelMeta | None,
    tables: RuleTables,
    config: Config,
) -> Ranks:
    """Sort parsed files into cells.

    ``paths`` are those of the whole checkpoint with their sizes. ``entries`` are those of every tensor file; they are
    removed as they are read, so that the names of very many arrays are not in memory twice.
    """
    files = [file for path in sorted(paths) if (file := parse_rank_file(path))]
    weights = _kind_of_weights(files)
    if weights == LORA_MODEL_STATE and not any(file.kind == OPTIMIZER for file in files):
        meta = None  # of the job that has ended; the files of an adapter alone tell all of it
    meta = meta and _without_expert_ranks(meta)
    topology = _topology(files, meta)
    by_kind = {kind: [f for f in files if f.kind == kind] for kind in (weights, OPTIMIZER, EMA)}
    _check_kinds(paths, files, weights, by_kind, topology)
    if meta is None and _all_hold_all(by_kind[weights], entries, tables, config):
        topology = replace(topology, ep=1)
    files_of_cell: dict[tuple[int, int, int], list[RankFile]] = {}
    for file in files:
        files_of_cell.setdefault(_coordinates(file, topology), []).append(file)
    reader = _CellReader(entries, meta, topology, tables, config)
    cells = [
        reader.read(StoredCell(tp, pp, ep), files_of_cell[pp, ep, tp]) for pp, ep, tp in sorted(files_of_cell)
    ]
    _name_numbers(cells, topology)
    reader.check_complete(cells)
    of_cells = {} if meta is None else meta.cells
    return Ranks(
        topology=topology,
        cells=tuple(cells),
        strategy=_same("sharding_strategy", [m.strategy for m in of_cells.values()], MODEL_META),
        comm_overlap=bool(_same("enable_overlap", [m.comm_overlap for m in of_cells.values()], MODEL_META)),
        lr_scheduler=_lr_scheduler(by_kind[OPTIMIZER], entries),
        with_meta=meta is not None,
        has_ema=bool(by_kind[EMA]),
        has_lora=weights == LORA_MODEL_STATE,
        has_optimizer=bool(by_kind[OPTIMIZER]),
    )


def _check_kinds(
    paths: Mapping[str, int],
    files: list[RankFile],
    weights: str,
    by_kind: Mapping[str, list[RankFile]],
    topology: Topology,
) -> None:
    """Check that the files of each kind are those of a save, without one too many or too few."""
    if weights == LORA_MODEL_STATE and topology.tp > 1 and topology.pp == 1:
        raise UnsupportedError(
            f"LoRA with {topology}: without pipeline parallelism the trainer merges the tensors of all tp ranks into "
            f"one {LORA_MODEL_STATE}.pdparams, which is not supported; save with FlexCheckpoint, or with pp=2"
        )
    if not by_kind[weights]:
        raise CheckpointError(f"no {weights} file: not a hybrid-parallel training checkpoint")
    if not by_kind[OPTIMIZER]:
        _check_parameters_only(paths, files, weights)
    for kind, of_kind in by_kind.items():
        if of_kind:
            _check_files(kind, of_kind, topology)
    _check_signals(paths, topology)


def _name_numbers(cells: Sequence[StoredCell], topology: Topology) -> None:
    """Rename the second moments of AdamWMini, which are one number per parameter.

    If every first moment is a single number too, every parameter has one element, and the optimizer is AdamW.
    """
    single = {moment for cell in cells for moment in cell.single}
    if (_MOMENT1, False) not in single or (_MOMENT2, True) not in single or (_MOMENT2, False) in single:
        return
    if topology.tp > 1:
        raise UnsupportedError(
            f"{_MOMENT2} is one number per parameter, so the optimizer is AdamWMini. With {topology} each tp rank "
            "stores the number of its own piece, from which that of the whole parameter cannot be computed"
        )
    for cell in cells:
        cell.arrays = cell.arrays.renamed({}, {_MOMENT2: MEAN_MOMENT2})


def _check_parameters_only(paths: Mapping[str, int], files: Sequence[RankFile], weights: str) -> None:
    """Accept only parameters, as saved with ``ignore_save_lr_and_optim``; optimizer files may be missing otherwise.

    LoRA is saved so at the end of training, by jobs with sharding beside the ``model_meta.json`` of the whole job.
    """
    with_optimizer = PLAIN_STATES if weights == LORA_MODEL_STATE else (*PLAIN_STATES, MODEL_META)
    unexpected = [path for path in sorted(paths) if path in with_optimizer or _SIGNAL.fullmatch(path)]
    unexpected += [file.path for file in files if file.kind not in WEIGHTS or file.shard is not None]
    if unexpected:
        raise of_optimizer(
            CheckpointError(
                f"no {OPTIMIZER} file, but {unexpected[0]}, which the trainer only writes together with {OPTIMIZER} "
                f"files: files are missing; {WITHOUT_OPTIMIZER}"
            )
        )


def _kind_of_weights(files: list[RankFile]) -> str:
    """The kind of files that hold the parameters: of a model or of LoRA."""
    paths = {file.kind: file.path for file in files if file.kind in WEIGHTS}
    if len(paths) > 1:
        raise CheckpointError(
            f"{paths[MODEL_STATE]} belongs to full training and {paths[LORA_MODEL_STATE]} to LoRA training: a folder "
            "must hold a single checkpoint"
        )
    return next(iter(paths), MODEL_STATE)


def _without_expert_ranks(meta: ModelMeta) -> ModelMeta:
    """The same file without the degree of ``ep`` if no tensor is an expert rank's own.

    Qwen2-MoE of PaddleFormers 1.2 does not distribute its experts with ``--use_expert_parallel``: cells of ``ep`` are
    named all the same, and each describes all experts, which are sharded as everything else is.
    """
    if not all("_ep" in name for name in meta.cells):
        return meta
    alike: dict[str, CellMeta] = {}
    for name, cell in meta.cells.items():
        own = any(parameter.no_sync is not False for parameter in cell.parameters.values())
        if own or alike.setdefault(name.partition("_ep")[0], cell) != cell:
            return meta
    if not (meta.ep or 1) > 1 or not all(cell.parameters for cell in alike.values()):
        return meta
    return replace(meta, ep=1, moe_sharding=None, cells=alike)


def _all_hold_all(
    files: Sequence[RankFile], entries: Mapping[str, FileEntries], tables: RuleTables, config: Config
) -> bool:
    """Whether expert ranks are named and the class gives none of them experts of its own, as in
    :func:`_without_expert_ranks`: the files of a stage hold the same keys."""
    keys: dict[int, list[str]] = {}
    for file in files:
        held = list(entries[file.path].names())
        if file.ep is None or keys.setdefault(file.pp or 0, held) != held:
            return False
    held = [key for of_stage in keys.values() for key in of_stage if key != STRUCTURED_NAMES]
    if not is_known(tables, config, HYBRID):
        return False
    for in_model in (keys_in_model(tables, held, config), keys_of_stages(tables, config)):
        held = [in_model.get(key, key) for key in held]
    return choose_table(tables, held, config, HYBRID, stages_known=True).expert_axis is None


def _topology(files: list[RankFile], meta: ModelMeta | None) -> Topology:
    """Degree of each axis from the file names, checked against ``parallel_config``."""
    written = {} if meta is None else {"tp": meta.tp, "pp": meta.pp, "shard": meta.sharding, "ep": meta.ep}
    degrees = {}
    for axis in ("tp", "pp", "shard", "ep", "moe"):
        ranks = {rank for f in files if (rank := getattr(f, axis)) is not None}
        degrees[axis] = max(ranks, default=0) + 1
        if ranks and degrees[axis] == 1 and axis != "moe":
            part = "moe_sharding" if axis == "ep" else axis
            lacking = CheckpointError(
                f"file names have a part {part}00 but no {part}01: a part appears only if the degree is above 1, so "
                "the files of at least one rank are missing"
            )
            named = {file.kind for file in files if getattr(file, axis) is not None}
            raise of_optimizer(lacking) if named == {OPTIMIZER} else lacking
        if axis == "ep" and not ranks:  # file names have no expert rank with sharded saving
            degrees[axis] = written.get(axis) or 1
        if written.get(axis) not in (None, degrees[axis]):
            raise CheckpointError(
                f"{MODEL_META} says {_META_AXES[axis]}={written[axis]}, but the file names say {degrees[axis]}"
            )
    if degrees["ep"] > 1 and not any(file.kind == OPTIMIZER for file in files):
        degrees["shard"] = max(1, degrees["ep"] // degrees["tp"])  # no file tells how many more there are
    if degrees["ep"] > 1 and degrees["moe"] > 1:
        raise CheckpointError(
            f"file names distribute experts over {degrees['ep']} expert ranks and over {degrees['moe']} "
            "data-parallel ranks; only one of the two is possible"
        )
    if (ranks_named := prod(degrees[axis] for axis in ("tp", "pp", "shard", "moe"))) > MAX_RANKS:
        raise CheckpointError(
            f"file names and {MODEL_META} describe {ranks_named} ranks; at most {MAX_RANKS} are supported"
        )
    topology = Topology(
        tp=degrees["tp"], pp=degrees["pp"], sharding=degrees["shard"], ep=degrees["ep"], dp=degrees["moe"]
    )
    _check_expert_ranks(topology, meta)
    return topology


def _check_expert_ranks(topology: Topology, meta: ModelMeta | None) -> None:
    if topology.ep == 1:
        return
    if topology.ep % topology.tp or topology.sharding % topology.dense_sharding:
        raise CheckpointError(
            f"ep={topology.ep} is impossible with tp={topology.tp} and sharding={topology.sharding}: tp must divide "
            "ep, and ep must divide tp × sharding"
        )
    written = None if meta is None else meta.moe_sharding
    if written not in (None, topology.moe_sharding):
        raise CheckpointError(
            f"{MODEL_META} says moe_sharding_degree={written}, but {topology} implies {topology.moe_sharding}"
        )


def _coordinates(file: RankFile, topology: Topology) -> tuple[int, int, int]:
    """Coordinates ``(pp, ep, tp)`` of the cell that a file belongs to."""
    tp = file.tp or 0
    if file.ep is not None:  # without experts of their own, ranks beyond those of tp have copies
        return file.pp or 0, file.ep if topology.ep > 1 else file.ep // topology.tp, tp
    if file.moe is not None:
        return file.pp or 0, file.moe, tp
    return file.pp or 0, topology.expert_rank(tp, file.shard or 0), tp


def _names_of_all_ranks(kind: str, files: list[RankFile], topology: Topology) -> Iterator[str]:
    """The names of the files of every rank that writes one of this kind."""

    def ranks(degree: int) -> list[int | None]:
        return list(range(degree)) if degree > 1 else [None]

    sharded = kind not in WEIGHTS or any(f.shard is not None for f in files)
    if kind == MODEL_STATE and topology.ep > 1 and not sharded:
        # Every expert rank writes a whole cell.
        for pp, ep in product(ranks(topology.pp), range(topology.ep)):
            yield rank_file_name(kind, ep % topology.tp if topology.tp > 1 else None, pp, None, ep=ep)
        return
    moe = list(range(topology.dp)) if any(f.moe is not None for f in files) else [None]
    shards = ranks(topology.sharding if sharded else 1)
    for coordinates in product(ranks(topology.tp), ranks(topology.pp), shards, moe):
        yield rank_file_name(kind, *coordinates)


def _check_files(kind: str, files: list[RankFile], topology: Topology) -> None:
    """Check that every rank that writes a file of this kind has exactly one, and that there are no others."""
    held: dict[str, str] = {}
    for file in files:
        other = held.setdefault(
            rank_file_name(kind, file.tp, file.pp, file.shard, file.moe, file.ep), file.path
        )
        if other != file.path and None in (piece_of(other), piece_of(file.path)):
            raise CheckpointError(f"{other} and {file.path} are files of the same rank")
    what = f"tp={topology.tp} pp={topology.pp} sharding={topology.sharding}"
    what += f" ep={topology.ep}" if topology.ep > 1 else ""
    expected = set(_names_of_all_ranks(kind, files, topology))
    if missing := expected - held.keys():
        others = f"; {min(held.values())} is of other ranks" if missing == expected else ""
        lacking = CheckpointError(
            f"{len(missing)} of {len(expected)} {kind} files for {what} are missing: {min(missing)}{others}"
            + (f"; {WITHOUT_OPTIMIZER}" if kind == OPTIMIZER else "")
        )
        raise of_optimizer(lacking) if kind == OPTIMIZER else lacking
    if extra := held.keys() - expected:
        raise CheckpointError(
            f"{min(held[name] for name in extra)} does not belong to a checkpoint of {what}"
        )


def _check_signals(paths: Mapping[str, int], topology: Topology) -> None:
    signals = len({match[1] for path in paths if (match := _SIGNAL.fullmatch(path))})
    ranks = topology.world_size
    if signals and signals != ranks:
        raise unfinished(
            f"{signals} saved_signal_* files for {ranks} ranks: the trainer did not finish this checkpoint"
        )


def _same(what: str, values: list[Any], where: str) -> Any:
    """The value that all have in common; ``None`` if there are none."""
    for value in values:
        if value != values[0]:
            raise CheckpointError(
                f"{where}: {what} must be the same everywhere; found {values[0]!r} and {value!r}"
            )
    return values[0] if values else None


def _lr_scheduler(files: list[RankFile], roots: Mapping[str, FileEntries]) -> Any:
    states = {f.path: roots[f.path].get(LR_SCHEDULER) for f in files if LR_SCHEDULER in roots[f.path]}
    for path, state in states.items():
        checked_schedule(state, f"{path}: {LR_SCHEDULER}")
    # Data-parallel ranks above 0 write their own experts and nothing else.
    lacking = next((f.path for f in files if f.path not in states and not f.moe), None)
    if states and lacking is not None:
        raise CheckpointError(f"{next(iter(states))} has an {LR_SCHEDULER} entry, but {lacking} does not")
    return _same(LR_SCHEDULER, list(states.values()), "optimizer files")


@dataclass(frozen=True, slots=True)
class _CellReader:
    """Reads the files of one cell after the other."""

    entries: Mapping[str, FileEntries]
    """Path → entries of the file."""
    meta: ModelMeta | None
    topology: Topology
    tables: RuleTables
    config: Config

    def read(self, cell: StoredCell, files: list[RankFile]) -> StoredCell:
        """The cell with the contents of its files."""
        model_files = [f for f in files if f.kind in WEIGHTS]
        with_lora = any(f.kind == LORA_MODEL_STATE for f in files)
        optimizers = [f for f in files if f.kind == OPTIMIZER]
        if self.meta is None or with_lora:
            cell.told_by = model_files[0].path if model_files else ""
            _names_from_model_state(cell, model_files, self.entries)
            if len(cell.names) < len(cell.shapes):
                cell.names = self._predicted_names(cell, model_files[0], optimizers)
        if self.meta is not None:
            self._describe(cell, self.meta, with_lora)
        for file in model_files:
            entries = self.entries[file.path].drained([STRUCTURED_NAMES])
            held = entries.names
            if self.meta is not None and not with_lora:
                # A class renames keys as it saves weights, and not in model_meta.json.
                in_model = keys_in_model(self.tables, held, self.config)
                held = [in_model.get(key, key) for key in held]
            for key, written in zip(held, entries.names, strict=True):
                if key not in cell.names:
                    raise CheckpointError(f"{file.path}: {written} is not in {MODEL_META}")
            _add(cell, file, held, PARAM, entries.values)
        keys = first_keys(cell.names)
        cell.holders = {key: keys[name] for key, name in cell.names.items()}
        for file in optimizers:
            _add_optimizer(cell, file, self._unfused(cell, file, keys), keys)
        for file in (f for f in files if f.kind == EMA):
            _add_ema(cell, file, self.entries[file.path], keys)
        if self.meta is not None:
            _check_dtypes(cell, self.meta_name(cell))
            _complete_shapes(cell, self.meta.cells[self.meta_name(cell)].strategy)
        return cell

    def _table(self, keys: list[str]) -> RuleTable:
        return choose_table(self.tables, keys, self.config, HYBRID, stages_known=True)

    def _predicted_names(
        self, cell: StoredCell, weights: RankFile, optimizers: list[RankFile]
    ) -> dict[str, str]:
        """The first predicted names with which every optimizer entry of the cell can be parsed.

        They are those without and with sequence parallelism. Shapes are checked later, as for any other names.
        """
        keys, topology = list(cell.shapes), self.topology
        table, config = self._table(keys), self.config
        find = table.finder(config)
        rules = {key: find(key)[0] for key in keys}
        named = [NamedTensor(key, rule, rule.twin(config, key)) for key, rule in rules.items()]
        roots = [self.entries[f.path] for f in optimizers]
        entries = [entry for root in roots for entry, value in root.items() if array_of(value) is not None]
        for parallel in (False, True):
            names = predict_parameter_names(named, config, topology.pp, topology.tp, parallel, topology.ep)
            known = set(names.values())
            if all(split_accumulator_key(entry.removeprefix(SLICE_PREFIX), known) for entry in entries):
                return names
        raise of_optimizer(
            CheckpointError(
                f"{weights.path}: {STRUCTURED_NAMES} lacks parameter names, and the names predicted by the naming "
                "rules do not match the optimizer files"
            )
        )

    def check_complete(self, cells: Sequence[StoredCell]) -> None:
        """Check that ``model_meta.json`` describes no other cells."""
        described = set() if self.meta is None else {*self.meta.cells}
        if extra := sorted(described - {self.meta_name(cell) for cell in cells}):
            raise CheckpointError(
                f"{MODEL_META}: sharding_metas describes {extra[0]}, but no file belongs to that cell"
            )

    def meta_name(self, cell: StoredCell) -> str:
        """What ``model_meta.json`` calls a cell."""
        return cell_name(cell.tp, cell.pp, cell.ep if self.topology.ep > 1 else None)

    def _unfused(self, cell: StoredCell, file: RankFile, keys: Mapping[str, str]) -> FileEntries:
        """The entries of an optimizer file, with the fused buffers of stage 1 v1 split into parameters."""
        root = self.entries[file.path]
        masters = root.get(MASTER_WEIGHTS)
        if not isinstance(masters, FileEntries) or not holds_buffers(masters.names(), keys):
            return root
        if self.meta is not None or self.topology.ep > 1 or self.topology.dp > 1:
            raise UnsupportedError(
                f"{file.path}: fused buffers (stage1_tensor_fusion) are not supported together with {MODEL_META} or "
                "distributed experts: their contents could not be verified with a real checkpoint"
            )
        fused = [FusedParameter(key, name, cell.shapes[key], cell.dtypes[key]) for name, key in keys.items()]
        return unfuse(root, fused, file.shard or 0, self.topology.sharding, file.path)

    def _describe(self, cell: StoredCell, meta: ModelMeta, with_lora: bool) -> None:
        """Take names, shapes, dtypes and marks from ``model_meta.json``."""
        where = self.meta_name(cell)
        if where not in meta.cells:
            raise CheckpointError(f"{MODEL_META}: sharding_metas has no cell {where}")
        described = meta.cells[where]
        if with_lora:
            described = _adapter_meta(
                described, cell, where, keys_in_model(self.tables, cell.names, self.config)
            )
        first = 0
        if self.topology.dp > 1 and cell.ep > 0:
            first = self._first_expert(described, where, cell.ep)
        names = {shift_expert(key, first): name for key, name in described.names.items()}
        cell.names |= names
        cell.owners |= {
            key: described.owners[name] for key, name in names.items() if name in described.owners
        }
        for written, parameter in described.parameters.items():
            key = shift_expert(written, first)
            cell.shapes[key] = parameter.local_shape
            cell.dtypes[key] = parameter.dtype
            cell.distributed[key] = parameter.is_distributed
            if parameter.no_sync is not None:
                cell.no_sync[key] = parameter.no_sync

    def _first_expert(self, described: CellMeta, where: str, rank: int) -> int:
        """Number of the first expert of a data-parallel rank.

        PaddleNLP 3.0.0b4 distributes experts over data-parallel ranks in order, with the same parameter names on each,
        and ``model_meta.json`` describes rank 0 only. With 8 experts on 4 ranks, experts 0 and 1 of rank 0 stand for
        experts 4 and 5 of rank 2: the result is 4.
        """
        ranks, held = self.topology.dp, experts_of(described.names)
        count = expert_count(self._table(list(described.names)), self.config)
        if not held or len(held) == count:
            return 0
        if held != set(range(len(held))) or len(held) * ranks != count:
            raise CheckpointError(
                f"{MODEL_META}: {where} lists the experts {sorted(held)}, but {ranks} data-parallel ranks hold {count} "
                f"experts in total: the experts of rank {rank} cannot be determined"
            )
        return rank * len(held)


def _adapter_meta(described: CellMeta, cell: StoredCell, where: str, in_model: Mapping[str, str]) -> CellMeta:
    """The entries of the tensors that LoRA training stores, under the keys of the files.

    LoRA wraps the model. ``model_meta.json`` is written from the wrapper: its keys have a prefix, it lists the tensors
    of the base model too, and a class that renames keys in files of weights does not rename these.
    """
    written = {key: f"{LORA_PREFIX}{in_model.get(key, key)}" for key in cell.names}
    # The wrapper of a class with stages numbers the items of the pipeline: "model.3.self_attn.q_proj.lora_A".
    numbered = {name: key for key, name in described.names.items() if _NUMBERED.match(key)}
    for key, name in cell.names.items():
        if name in numbered and written[key].endswith(_NUMBERED.sub("", numbered[name])):
            written[key] = numbered[name]
        listed = described.names.get(written[key])
        if listed != name:
            raise CheckpointError(
                f"{key}: parameter name {name} in the file, but {listed!r} in {MODEL_META} ({where}, {written[key]})"
            )
    return replace(
        described,
        names=dict(cell.names),
        parameters={
            key: described.parameters[of] for key, of in written.items() if of in described.parameters
        },
    )


def _check_dtypes(cell: StoredCell, where: str) -> None:
    """Check the dtypes in ``model_meta.json`` against the arrays.

    A stored parameter has its own dtype. A parameter that is not stored is cast from its master weight, which only
    parameters of half precision have, to the dtype in ``model_meta.json``.
    """
    for key, dtype in cell.dtypes.items():
        for stored in cell.arrays.get((key, PARAM), ()):
            if stored.dtype() != dtype:
                raise CheckpointError(
                    f"{key}: {dtype.name} in {MODEL_META} ({where}), but {stored.dtype().name} in {stored.path}: the "
                    "files belong to different runs"
                )
        masters = cell.arrays.get((cell.holders.get(key, key), MASTER_WEIGHT))
        if masters and dtype.name not in HALF_DTYPES:
            raise CheckpointError(
                f"{key}: {dtype.name} in {MODEL_META} ({where}), but {masters[0].path} holds a master weight, which "
                f"only {' and '.join(HALF_DTYPES)} parameters have: the files belong to different runs"
            )


def _complete_shapes(cell: StoredCell, strategy: str) -> None:
    """Take shapes and dtypes that ``model_meta.json`` lacks from the arrays.

    A parameter that is not stored is bfloat16: sharded saving omits no others (PaddleNLP 3.0
    ``sharding_io.py:381-419``).
    """
    for key, holder in cell.holders.items():
        if key in cell.shapes:
            continue
        stored = cell.arrays.get((key, PARAM))
        masters = cell.arrays.get((holder, MASTER_WEIGHT))
        if stored:
            cell.shapes[key], cell.dtypes[key] = stored[0].array.shape, stored[0].dtype()
        elif masters and strategy == "stage1v1":
            cell.shapes[key], cell.dtypes[key] = masters[0].array.shape, dtype_named("bfloat16")
        else:
            raise UnsupportedError(
                f"{key}: {MODEL_META} has no param_meta (PaddleNLP 2.8 and older do not write it), and under "
                f"{strategy} no file shows its shape"
            )


def _names_from_model_state(
    cell: StoredCell, files: list[RankFile], roots: Mapping[str, FileEntries]
) -> None:
    for file in files:
        root = roots[file.path]
        table = root.get(STRUCTURED_NAMES)
        if not isinstance(table, dict | None):
            raise CheckpointError(f"{file.path}: {STRUCTURED_NAMES} is not a dict of names")
        for key, value in root.items():
            if key == STRUCTURED_NAMES:
                continue
            array = array_of(value)
            if array is None:
                raise CheckpointError(f"{file.path}: {key} is not an array")
            name = array.name if isinstance(array, ArrayRef) and array.name else (table or {}).get(key)
            if isinstance(name, str):
                cell.names[key] = name
            cell.shapes[key] = array.shape
            cell.dtypes[key] = dtype_of_code(array.dtype, f"{file.path}: {key}")


def _add(
    cell: StoredCell, file: RankFile, keys: Sequence[str], states: str | Sequence[str], arrays: ArrayColumns
) -> None:
    """Add arrays of a file, of which each is given the structured key, and the state, or that of all."""
    of_rows = [states] * len(keys) if isinstance(states, str) else states
    for row, value in arrays.others():
        if array_of(value) is None:
            raise CheckpointError(f"{file.path}: {keys[row]} ({of_rows[row]}) is not an array")
    twice = cell.arrays.add_file(keys, of_rows, (0, file.shard or 0, file.path), arrays)
    if twice is not None:
        raise CoverageError(f"{keys[twice]} ({of_rows[twice]})", "stored twice in one file", (file.path,))


def _key_of(cell: StoredCell, name: str, keys: Mapping[str, str], file: RankFile, what: str) -> str:
    """The structured key of an entry's parameter; records stage 3 slices in the cell."""
    bare = name.removeprefix(SLICE_PREFIX)
    if bare not in keys:
        raise CheckpointError(
            f"{file.path}: {what} {name} does not belong to any parameter of {cell.label()}: the files are of "
            f"different saves, or {MODEL_META} is missing"
        )
    if bare != name:
        cell.sliced.add(keys[bare])
    return keys[bare]


def _master_weights(file: RankFile, root: FileEntries) -> FileEntries:
    entry = root.get(MASTER_WEIGHTS, FileEntries({}))
    if not isinstance(entry, FileEntries):
        raise CheckpointError(f"{file.path}: master_weights is not a dict of arrays")
    return entry


def _add_optimizer(cell: StoredCell, file: RankFile, root: FileEntries, keys: Mapping[str, str]) -> None:
    stored = _master_weights(file, root).drained()
    trained = [_key_of(cell, name, keys, file, "master weight") for name in stored.names]
    _add(cell, file, trained, MASTER_WEIGHT, stored.values)
    masters = dict(zip(trained, stored.called, strict=True))  # key → the name that the array has besides
    stored = root.drained(SPECIAL)
    of_keys, states = _accumulators(cell, file, stored.names, keys, masters)
    _add(cell, file, of_keys, states, stored.values)
    shapes = set(zip(states, stored.values.shapes(), strict=True))
    cell.single |= {(state, prod(shape) == 1) for state, shape in shapes if state in (_MOMENT1, _MOMENT2)}


def _accumulators(
    cell: StoredCell,
    file: RankFile,
    entries: Sequence[str],
    keys: Mapping[str, str],
    masters: Mapping[str, str | None],
) -> tuple[list[str], list[str]]:
    """The structured key and the state of each entry of an optimizer; ``masters``: key → name of its master weight.

    An optimizer lists one accumulator of all parameters, then the next one of all: what comes before the ending of the
    name is the same again, and so is the key.
    """
    of_keys: list[str] = []
    states: list[str] = []
    first: list[str] = []  # of the first accumulator, what comes before the ending
    while (at := len(states)) < len(entries):
        key, state, begin = _accumulator(cell, file, entries[at], keys, masters)
        again, ending = 0, entries[at].removeprefix(begin)
        if len(first) == at and state == (states or [state])[0]:
            first.append(begin)
        else:
            stop = min(len(first), len(entries) - at)
            while again < stop and entries[at + again] == first[again] + ending:
                again += 1
        of_keys += of_keys[:again] or [key]
        states += [state] * max(again, 1)
    return of_keys, states


def _accumulator(
    cell: StoredCell, file: RankFile, entry: str, keys: Mapping[str, str], masters: Mapping[str, str | None]
) -> tuple[str, str, str]:
    """The structured key and the state of an entry, and what comes before its ending; records how it is spelled."""
    if entry == "offload_buffer":
        detail = f"{file.path}: offload_buffer: offloaded optimizer state is not supported"
        raise of_optimizer(UnsupportedError(detail))
    bare = entry.removeprefix(SLICE_PREFIX)
    parts = split_accumulator_key(bare, keys)
    if parts is None:
        raise of_optimizer(
            CheckpointError(
                f"{file.path}: {entry} is not a known accumulator of a parameter of this cell; entries of unknown "
                f"meaning are not converted; {WITHOUT_OPTIMIZER}"
            )
        )
    name, accumulator, separate = parts
    key, (begin, _, number) = keys[name], entry.rpartition(f"_{accumulator}_")
    if number != (cell.optimizer or number):
        raise CheckpointError(
            f"{file.path}: {entry} ends with another number than the accumulators before it, which end with "
            f"_{cell.optimizer}: an optimizer gives all of them the same, and Paddle looks for each by its whole name"
        )
    cell.optimizer = number
    if bare != entry:
        cell.sliced.add(key)
    if key in masters:
        cell.master_spellings.add(separate)
        of_master = masters[key]
        if separate and of_master is not None and not f"{begin}_".startswith(f"{of_master}_"):
            raise CheckpointError(
                f"{file.path}: the master weight of {name} is named {of_master}, its accumulator {entry}: Paddle "
                "looks for accumulators by the name of the master weight, and would begin with new ones"
            )
    return key, accumulator, begin


def _add_ema(cell: StoredCell, file: RankFile, root: FileEntries, keys: Mapping[str, str]) -> None:
    stored = _master_weights(file, root).drained()
    masters = [_key_of(cell, name, keys, file, "EMA master weight") for name in stored.names]
    _add(cell, file, masters, EMA_MASTER_WEIGHT, stored.values)
    stored = root.drained([MASTER_WEIGHTS, STRUCTURED_NAMES])
    for key in stored.names:
        if key not in cell.names:
            raise CheckpointError(f"{file.path}: EMA entry {key} is not a structured key of this cell")
    _add(cell, file, stored.names, EMA_PARAM, stored.values)
