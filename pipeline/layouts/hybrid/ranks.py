"""What does every rank's file set say, cell by cell?

A *cell* is one (tp, pp) coordinate: the scope in which a parameter name has a meaning. This module sorts the
parsed files into cells, names every array by ``(structured key, state)``, and refuses what does not fit:
missing or extra files, contradicting degrees, unknown accumulators, names without a structured key.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from paddle_reshard.pipeline.errors import CheckpointError, CoverageError, UnsupportedError
from paddle_reshard.pipeline.geometry import Shape
from paddle_reshard.pipeline.layouts.hybrid.meta import ModelMeta
from paddle_reshard.pipeline.layouts.hybrid.names import (
    EMA,
    MODEL_META,
    MODEL_STATE,
    OPTIMIZER,
    SLICE_PREFIX,
    RankFile,
    cell_name,
    parse_rank_file,
    rank_file_name,
    split_accumulator_key,
)
from paddle_reshard.pipeline.tensors import (
    EMA_MASTER_WEIGHT,
    EMA_PARAM,
    MASTER_WEIGHT,
    PARAM,
    DType,
    dtype_named,
    dtype_of_code,
)
from paddle_reshard.storage.formats.paddle_pickle import STRUCTURED_NAMES, ArrayRef, SplitArray

Array = ArrayRef | SplitArray
TensorId = tuple[str, str]
PredictNames = Callable[[list[str], int, int], list[dict[str, str]]]
"""``(structured keys of a cell in model order, tp, pp)`` → candidates for their parameter names."""
_AXES = ("tp", "pp", "shard")
_META_AXES = {"tp": "mp_degree", "pp": "pp_degree", "shard": "sharding_degree"}
_LR_SCHEDULER = "LR_Scheduler"
_SIGNAL = re.compile(r"saved_signal_\d+")


@dataclass(frozen=True, slots=True)
class StoredArray:
    """One array of one rank's file."""

    shard: int
    path: str
    array: Array

    def dtype(self) -> DType:
        """What its elements are."""
        return dtype_of_code(self.array.dtype, self.path)


@dataclass(slots=True)
class Cell:
    """Everything that the files of one (tp, pp) coordinate say."""

    tp: int
    pp: int
    names: dict[str, str] = field(default_factory=dict)
    """Structured key → parameter name, in model order."""
    shapes: dict[str, Shape] = field(default_factory=dict)
    """Structured key → tensor-parallel local shape."""
    dtypes: dict[str, DType] = field(default_factory=dict)
    """Structured key → dtype of the parameter."""
    distributed: dict[str, bool] = field(default_factory=dict)
    """Structured key → ``is_distributed`` of ``model_meta.json``; empty without it."""
    owners: dict[str, int] = field(default_factory=dict)
    """Structured key → rank that holds its optimizer state, where ``model_meta.json`` says so."""
    arrays: dict[TensorId, list[StoredArray]] = field(default_factory=dict)
    """(structured key, state) → arrays, by ascending shard."""
    sliced: set[str] = field(default_factory=set)
    """Structured keys of which an entry is marked as a stage 3 slice."""
    master_spellings: set[bool] = field(default_factory=set)
    """Whether accumulators of parameters with master weights are named after those (stage 2 and 3 do not)."""
    trained: list[str] = field(default_factory=list)
    """One structured key per parameter that the optimizer holds."""

    def rename(self, keys: Mapping[str, str]) -> None:
        """Replace structured keys."""
        self.names = {keys.get(key, key): name for key, name in self.names.items()}
        self.shapes = {keys.get(key, key): shape for key, shape in self.shapes.items()}
        self.dtypes = {keys.get(key, key): dtype for key, dtype in self.dtypes.items()}
        self.distributed = {keys.get(key, key): cut for key, cut in self.distributed.items()}
        self.owners = {keys.get(key, key): rank for key, rank in self.owners.items()}
        self.arrays = {(keys.get(key, key), state): stored for (key, state), stored in self.arrays.items()}
        self.sliced = {keys.get(key, key) for key in self.sliced}
        self.trained = [keys.get(key, key) for key in self.trained]


@dataclass(frozen=True, slots=True)
class Ranks:
    """A hybrid-parallel checkpoint as its files describe it."""

    tp: int
    pp: int
    sharding: int
    cells: tuple[Cell, ...]
    strategy: str | None
    """Stage 1 variant by ``model_meta.json``; ``None`` without it."""
    comm_overlap: bool
    lr_scheduler: Any
    """The ``LR_Scheduler`` entry of the optimizer files, or ``None`` if they have none."""
    with_meta: bool
    has_ema: bool


def first_keys(names: Mapping[str, str]) -> dict[str, str]:
    """Parameter name → structured key under which a cell's optimizer holds it: the first one of that name."""
    keys: dict[str, str] = {}
    for key, name in names.items():
        keys.setdefault(name, key)
    return keys


def sort_ranks(
    paths: Mapping[str, int],
    roots: Mapping[str, Any],
    meta: ModelMeta | None,
    predict_names: PredictNames,
) -> Ranks:
    """Sort parsed files into cells.

    Parameters
    ----------
    paths
        Every path of the checkpoint → size in bytes.
    roots
        Path of a tensor file → what its pickle holds, arrays as references.
    meta
        What ``model_meta.json`` says, or ``None`` where there is none.
    predict_names
        Parameter names that the naming rules allow, for files that have none.
    """
    files = [file for path in sorted(paths) if (file := parse_rank_file(path))]
    degrees = _degrees(files, meta)
    by_kind = {kind: [f for f in files if f.kind == kind] for kind in (MODEL_STATE, OPTIMIZER, EMA)}
    for kind in (MODEL_STATE, OPTIMIZER):
        if not by_kind[kind]:
            raise CheckpointError(f"no {kind} file: not a hybrid-parallel training checkpoint")
    sharded_model = any(f.shard is not None for f in by_kind[MODEL_STATE])
    for kind, found in by_kind.items():
        if found:
            sharded = kind != MODEL_STATE or sharded_model
            _check_product(kind, found, {**degrees, "shard": degrees["shard"] if sharded else 1})
    _check_signals(paths, degrees)
    cells = [
        _read_cell(tp, pp, files, roots, meta, lambda keys: predict_names(keys, degrees["tp"], degrees["pp"]))
        for pp in range(degrees["pp"])
        for tp in range(degrees["tp"])
    ]
    metas = [] if meta is None else list(meta.cells.values())
    if meta is not None:
        extra = sorted(meta.cells.keys() - {cell_name(c.tp, c.pp) for c in cells})
        if extra:
            raise CheckpointError(f"{MODEL_META}: sharding_metas has a cell {extra[0]}, the files have none")
    return Ranks(
        tp=degrees["tp"],
        pp=degrees["pp"],
        sharding=degrees["shard"],
        cells=tuple(cells),
        strategy=_same("sharding_strategy", [m.strategy for m in metas], MODEL_META),
        comm_overlap=bool(_same("enable_overlap", [m.comm_overlap for m in metas], MODEL_META)),
        lr_scheduler=_lr_scheduler(by_kind[OPTIMIZER], roots),
        with_meta=meta is not None,
        has_ema=bool(by_kind[EMA]),
    )


def _degrees(files: list[RankFile], meta: ModelMeta | None) -> dict[str, int]:
    """Degree of each axis by the file names, held against ``parallel_config``."""
    if meta is not None and (meta.ep or 1) > 1:
        raise UnsupportedError(
            f"{MODEL_META}: ep_degree={meta.ep}: expert-parallel checkpoints are not supported by this version"
        )
    written = {} if meta is None else {"tp": meta.tp, "pp": meta.pp, "shard": meta.sharding}
    degrees = {}
    for axis in _AXES:
        ranks = {rank for f in files if (rank := getattr(f, axis)) is not None}
        degrees[axis] = max(ranks, default=0) + 1
        if ranks and degrees[axis] == 1:
            raise CheckpointError(
                f"file names have a part {axis}00 but no {axis}01: a part appears only when the degree is "
                f"above 1, so at least one rank's files are missing"
            )
        if written.get(axis) not in (None, degrees[axis]):
            raise CheckpointError(
                f"{MODEL_META} says {_META_AXES[axis]}={written[axis]}, the file names say {degrees[axis]}"
            )
    return degrees


def _check_product(kind: str, files: list[RankFile], degrees: Mapping[str, int]) -> None:
    """The files of one kind must be exactly the product of the degrees, each once."""

    def ranks(axis: str) -> list[int | None]:
        return list(range(degrees[axis])) if degrees[axis] > 1 else [None]

    expected = {
        (tp, pp, shard): rank_file_name(kind, tp, pp, shard)
        for tp in ranks("tp")
        for pp in ranks("pp")
        for shard in ranks("shard")
    }
    seen: dict[tuple[int | None, int | None, int | None], str] = {}
    for file in files:
        place = (file.tp, file.pp, file.shard)
        if place in seen:
            raise CheckpointError(f"{seen[place]} and {file.path} are the same rank's file")
        seen[place] = file.path
    what = f"tp={degrees['tp']} pp={degrees['pp']} sharding={degrees['shard']}"
    if missing := sorted(expected[place] for place in expected.keys() - seen.keys()):
        raise CheckpointError(
            f"{len(missing)} of {len(expected)} {kind} files for {what} are missing: {missing[0]}"
        )
    if extra := sorted(seen[place] for place in seen.keys() - expected.keys()):
        raise CheckpointError(f"{extra[0]} does not belong to a checkpoint of {what}")


def _check_signals(paths: Mapping[str, int], degrees: Mapping[str, int]) -> None:
    signals = sum(1 for path in paths if _SIGNAL.fullmatch(path))
    ranks = degrees["tp"] * degrees["pp"] * degrees["shard"]
    if signals and signals != ranks:
        raise CheckpointError(
            f"{signals} saved_signal_* files for {ranks} ranks: the trainer had not finished this checkpoint"
        )


def _same(what: str, values: list[Any], where: str) -> Any:
    """The one value that all agree on; ``None`` for no values."""
    for value in values:
        if value != values[0]:
            raise CheckpointError(f"{where}: {what} is {values[0]!r} in one place and {value!r} in another")
    return values[0] if values else None


def _lr_scheduler(files: list[RankFile], roots: Mapping[str, Any]) -> Any:
    states = {f.path: roots[f.path].get(_LR_SCHEDULER) for f in files if _LR_SCHEDULER in roots[f.path]}
    for path, state in states.items():
        if _holds_array(state):
            raise UnsupportedError(f"{path}: {_LR_SCHEDULER} holds an array; only plain values are written")
    if states and len(states) < len(files):
        lacking = next(f.path for f in files if f.path not in states)
        raise CheckpointError(f"{next(iter(states))} has an {_LR_SCHEDULER} entry, {lacking} has none")
    return _same(_LR_SCHEDULER, list(states.values()), "optimizer files")


def _holds_array(value: object) -> bool:
    if isinstance(value, dict):
        return any(_holds_array(entry) for entry in value.values())
    if isinstance(value, list | tuple):
        return any(_holds_array(entry) for entry in value)
    return isinstance(value, ArrayRef | SplitArray)


def _read_cell(
    tp: int,
    pp: int,
    files: list[RankFile],
    roots: Mapping[str, Any],
    meta: ModelMeta | None,
    predict_names: Callable[[list[str]], list[dict[str, str]]],
) -> Cell:
    cell = Cell(tp, pp)
    mine = [f for f in files if (f.tp or 0, f.pp or 0) == (tp, pp)]
    model_files = [f for f in mine if f.kind == MODEL_STATE]
    if meta is None:
        _names_from_model_state(cell, model_files, roots)
        if len(cell.names) < len(cell.shapes):
            optimizers = [roots[file.path] for file in mine if file.kind == OPTIMIZER]
            cell.names = _names_that_fit(model_files[0], predict_names(list(cell.shapes)), optimizers)
    else:
        _names_from_meta(cell, meta)
    for file in model_files:
        _add_parameters(cell, file, roots[file.path])
    keys = first_keys(cell.names)
    for file in (f for f in mine if f.kind == OPTIMIZER):
        _add_optimizer(cell, file, roots[file.path], keys)
    for file in (f for f in mine if f.kind == EMA):
        _add_ema(cell, file, roots[file.path], keys)
    for stored in cell.arrays.values():
        stored.sort(key=lambda s: s.shard)
    if meta is not None:
        _complete_shapes(cell, meta.cells[cell_name(tp, pp)].strategy)
    held = {key for key, state in cell.arrays if state not in (PARAM, EMA_PARAM)}
    cell.trained = [key for key in keys.values() if key in held]
    return cell


def _names_from_meta(cell: Cell, meta: ModelMeta) -> None:
    where = cell_name(cell.tp, cell.pp)
    if where not in meta.cells:
        raise CheckpointError(f"{MODEL_META}: sharding_metas has no cell {where}")
    described = meta.cells[where]
    cell.names.update(described.names)
    cell.owners.update({k: described.owners[n] for k, n in described.names.items() if n in described.owners})
    for key, parameter in described.parameters.items():
        cell.shapes[key] = parameter.local_shape
        cell.dtypes[key] = parameter.dtype
        cell.distributed[key] = parameter.is_distributed


def _complete_shapes(cell: Cell, strategy: str) -> None:
    """Shapes and dtypes that ``model_meta.json`` does not give, from the arrays that show them.

    A parameter that is not stored is bfloat16: sharded saving leaves out no other (PaddleNLP 3.0
    ``sharding_io.py:381-419``).
    """
    holders = first_keys(cell.names)
    for key, name in cell.names.items():
        if key in cell.shapes:
            continue
        holder = holders[name]
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


def _names_from_model_state(cell: Cell, files: list[RankFile], roots: Mapping[str, Any]) -> None:
    for file in files:
        root = roots[file.path]
        table = root.get(STRUCTURED_NAMES)
        if not isinstance(table, dict | None):
            raise CheckpointError(f"{file.path}: {STRUCTURED_NAMES} is not a table of names")
        for key, value in root.items():
            if key == STRUCTURED_NAMES:
                continue
            array = _array_of(value)
            if array is None:
                raise CheckpointError(f"{file.path}: {key} is not an array")
            name = array.name if isinstance(array, ArrayRef) and array.name else (table or {}).get(key)
            if isinstance(name, str):
                cell.names[key] = name
            cell.shapes[key] = array.shape
            cell.dtypes[key] = dtype_of_code(array.dtype, f"{file.path}: {key}")


def _names_that_fit(
    file: RankFile, candidates: list[dict[str, str]], optimizers: list[Mapping[str, Any]]
) -> dict[str, str]:
    """Of predicted names, those by which every optimizer entry of the cell has a meaning.

    The shape of every array is held against its parameter afterwards, as always.
    """
    entries = [entry for root in optimizers for entry, value in root.items() if _array_of(value) is not None]
    for names in candidates:
        known = set(names.values())
        if all(split_accumulator_key(entry.removeprefix(SLICE_PREFIX), known) for entry in entries):
            return names
    raise CheckpointError(
        f"{file.path}: parameter names are missing from {STRUCTURED_NAMES}, and those by the naming rules do not "
        "fit the optimizer files"
    )


def _add(cell: Cell, key: str, state: str, file: RankFile, value: object) -> None:
    value = _array_of(value)
    if value is None:
        raise CheckpointError(f"{file.path}: {key} ({state}) is not an array")
    stored = cell.arrays.setdefault((key, state), [])
    if stored and stored[-1].path == file.path:  # files are read one after the other
        raise CoverageError(f"{key} ({state})", "stored twice in one file", (file.path,))
    stored.append(StoredArray(file.shard or 0, file.path, value))


def _array_of(value: object) -> Array | None:
    """The array in an entry, which may be a ``(name, array)`` tuple, as ``paddle.load`` reads it."""
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], str):
        value = value[1]
    return value if isinstance(value, ArrayRef | SplitArray) else None


def _add_parameters(cell: Cell, file: RankFile, root: Mapping[str, Any]) -> None:
    for key, value in root.items():
        if key == STRUCTURED_NAMES:
            continue
        if key not in cell.names:
            raise CheckpointError(f"{file.path}: {key} is not in {MODEL_META}")
        _add(cell, key, PARAM, file, value)


def _key_of(cell: Cell, name: str, keys: Mapping[str, str], file: RankFile, what: str) -> str:
    """The structured key of an entry's parameter; a stage 3 slice is noted in the cell."""
    bare = name.removeprefix(SLICE_PREFIX)
    if bare not in keys:
        raise CheckpointError(f"{file.path}: {what} {name} belongs to no structured key of this cell")
    if bare != name:
        cell.sliced.add(keys[bare])
    return keys[bare]


def _master_weights(file: RankFile, root: Mapping[str, Any]) -> Mapping[str, Any]:
    entry = root.get("master_weights", {})
    if not isinstance(entry, dict):
        raise CheckpointError(f"{file.path}: master_weights is not a dict of arrays")
    return entry


def _add_optimizer(cell: Cell, file: RankFile, root: Mapping[str, Any], keys: Mapping[str, str]) -> None:
    masters = {
        _key_of(cell, name, keys, file, "master weight"): value
        for name, value in _master_weights(file, root).items()
    }
    for key, value in masters.items():
        _add(cell, key, MASTER_WEIGHT, file, value)
    for entry, value in root.items():
        if entry in ("master_weights", _LR_SCHEDULER, STRUCTURED_NAMES):
            continue
        if entry == "offload_buffer":
            raise UnsupportedError(
                f"{file.path}: offload_buffer: offloaded optimizer state cannot be converted"
            )
        parts = split_accumulator_key(entry.removeprefix(SLICE_PREFIX), keys)
        if parts is None:
            raise CheckpointError(
                f"{file.path}: {entry} is not a known accumulator of a parameter of this cell; its meaning is "
                "not known, so it is not converted"
            )
        name, accumulator, separate = parts
        key = keys[name]
        if entry.startswith(SLICE_PREFIX):
            cell.sliced.add(key)
        _add(cell, key, accumulator, file, value)
        if key in masters:
            cell.master_spellings.add(separate)


def _add_ema(cell: Cell, file: RankFile, root: Mapping[str, Any], keys: Mapping[str, str]) -> None:
    for name, value in _master_weights(file, root).items():
        _add(cell, _key_of(cell, name, keys, file, "EMA master weight"), EMA_MASTER_WEIGHT, file, value)
    for key, value in root.items():
        if key in ("master_weights", STRUCTURED_NAMES):
            continue
        if key not in cell.names:
            raise CheckpointError(f"{file.path}: EMA entry {key} is no structured key of this cell")
        _add(cell, key, EMA_PARAM, file, value)
