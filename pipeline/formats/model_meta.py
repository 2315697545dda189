"""Read and write ``model_meta.json``.

PaddleFormers 1.2 and PaddleNLP 3.0 write it (``trainer/utils/sharding_io.py``) beside sharded checkpoints::

    {"parallel_config": {"pp_degree": 2, "mp_degree": 2, "sharding_degree": 2, ...},
     "sharding_metas": {"tp00_pp00": {"sharding_strategy": "ShardingV1" | "ShardingV2",
                                      "enable_overlap": false,
                                      "param2rank": {parameter name: rank},          # ShardingV1 only
                                      "structure_name_mapping": {structured key: parameter name},
                                      "param_meta": {structured key: [local shape, dtype, is_distributed, ...]}}}}
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from math import prod
from typing import Any

from paddle_reshard.pipeline.core.errors import CheckpointError, UnsupportedError
from paddle_reshard.pipeline.core.file_names import MODEL_META
from paddle_reshard.pipeline.core.geometry import Shape
from paddle_reshard.pipeline.core.tensors import DType, dtype_of_meta, phi_code
from paddle_reshard.pipeline.core.topology import Topology

MOST_ELEMENTS = 1 << 38
"""Of a rank's piece of a parameter, which has 2**32 at most: the sums of all in a file have 64 bits."""
PARAMETER_COLUMNS = ["shape", "dtype", "is_distributed", "no_sync"]
"""What ``param_meta`` lists of a parameter; PaddleNLP writes the first three, and no ``param_meta_keys``."""
ENTRIES = frozenset({"parallel_config", "sharding_metas"})
"""Entries of the file."""
DEGREES = frozenset({"mp_degree", "pp_degree", "sharding_degree"})
"""Entries that every trainer writes to ``parallel_config``."""
EXPERT_DEGREES = frozenset({"ep_degree", "moe_sharding_degree"})
"""Entries that PaddleFormers writes besides, always both."""
STRATEGIES = {"ShardingV1": "stage1v1", "ShardingV2": "stage1v2"}


@dataclass(frozen=True, slots=True)
class ParameterMeta:
    """One structured key of a cell."""

    local_shape: Shape
    """Tensor-parallel local shape."""
    dtype: DType
    is_distributed: bool
    """Whether values differ between tp ranks; does not determine whether the tensor is cut, or along which dim."""
    no_sync: bool | None = None
    """Whether it belongs to an expert that no other expert rank holds; ``None`` for PaddleNLP, which omits it."""


@dataclass(frozen=True, slots=True)
class CellMeta:
    """One cell."""

    strategy: str
    comm_overlap: bool
    names: Mapping[str, str]
    """Structured key → parameter name, in model order."""
    parameters: Mapping[str, ParameterMeta]
    """Structured key → shape and dtype; empty for PaddleNLP 2.8 and older, which do not write them."""
    owners: Mapping[str, int]
    """Stage 1 v1: parameter name → rank, in the order of assignment."""


@dataclass(frozen=True, slots=True)
class ModelMeta:
    """The whole file. Degrees are ``None`` if it does not give them."""

    tp: int | None
    pp: int | None
    sharding: int | None
    ep: int | None
    moe_sharding: int | None
    cells: Mapping[str, CellMeta]


def parse_model_meta(data: Mapping[str, Any]) -> ModelMeta:
    """Parse the file and check the type of every value; an error names the entry that is missing or invalid."""
    config = _mapping(data, "parallel_config", MODEL_META)
    metas = _mapping(data, "sharding_metas", MODEL_META)
    _check_written(config, DEGREES, f"{MODEL_META}: parallel_config")
    if not EXPERT_DEGREES.isdisjoint(config):
        _check_written(config, EXPERT_DEGREES, f"{MODEL_META}: parallel_config")
    return ModelMeta(
        tp=_degree(config, "mp_degree"),
        pp=_degree(config, "pp_degree"),
        sharding=_degree(config, "sharding_degree"),
        ep=_degree(config, "ep_degree"),
        moe_sharding=_degree(config, "moe_sharding_degree"),
        cells={name: _parse_cell(_mapping(metas, name, MODEL_META), name) for name in metas},
    )


def parse_names(data: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """Cell → structured key → parameter name; the rest of the file is not checked."""
    metas = _mapping(data, "sharding_metas", MODEL_META)
    return {name: _names(_mapping(metas, name, MODEL_META), name) for name in metas}


def without_names(data: Mapping[str, Any]) -> dict[str, Any]:
    """All entries of a valid file, with parameters by key where it has them by name, and dtypes for their codes.

    Two files of one job are then equal, whatever each process called its parameters.
    """
    cells = {}
    for cell, entry in data["sharding_metas"].items():
        keys: dict[str, str] = {}
        for key, name in entry["structure_name_mapping"].items():
            keys.setdefault(name, key)
        described = {
            key: [columns[0], dtype_of_meta(columns[1], key).name, *columns[2:]]
            for key, columns in entry.get("param_meta", {}).items()
        }
        owners = {keys.get(name, name): rank for name, rank in entry["param2rank"].items()}
        mapping = {key: keys[name] for key, name in entry["structure_name_mapping"].items()}
        by_key = {"param2rank": owners, "structure_name_mapping": mapping}
        cells[cell] = {**entry, **by_key, "param_meta": described}
    return {**data, "sharding_metas": cells}


def _parse_cell(entry: Mapping[str, Any], cell: str) -> CellMeta:
    where = f"{MODEL_META}: {cell}"
    strategy = entry.get("sharding_strategy")
    if not isinstance(strategy, str) or strategy not in STRATEGIES:
        raise UnsupportedError(f"{where}: sharding strategy {strategy!r} is not supported")
    names = _names(entry, cell)
    described = _mapping(entry, "param_meta", where) if "param_meta" in entry else {}
    if described and described.keys() != names.keys():
        differing = sorted(described.keys() ^ names.keys())
        raise CheckpointError(
            f"{where}: {differing[0]} is only in one of param_meta and structure_name_mapping"
        )
    _check_written(entry, {"param2rank", *(["enable_overlap"] if described else [])}, where)
    columns = entry.get("param_meta_keys", PARAMETER_COLUMNS[:3])
    if not isinstance(columns, list) or columns != PARAMETER_COLUMNS[: len(columns)] or len(columns) < 3:
        raise CheckpointError(
            f"{where}: param_meta_keys is {columns!r}, only {PARAMETER_COLUMNS} is supported"
        )
    for key, of_key in described.items():
        if isinstance(of_key, list) and len(of_key) != len(columns):
            raise CheckpointError(f"{where}: {key}: {of_key!r} are not values of the columns {columns}")
    owners = entry["param2rank"]
    if not isinstance(owners, dict) or not all(_is_int(rank) for rank in owners.values()):
        raise CheckpointError(f"{where}: param2rank is not an object of ranks")
    comm_overlap = entry.get("enable_overlap", False)
    if not isinstance(comm_overlap, bool):
        raise CheckpointError(f"{where}: enable_overlap is {comm_overlap!r}")
    return CellMeta(
        strategy=STRATEGIES[strategy],
        comm_overlap=comm_overlap,
        names=names,
        parameters={key: _parse_parameter(described[key], f"{where}: {key}") for key in described},
        owners=owners,
    )


def _check_written(entries: Mapping[str, Any], expected: Set[str], where: str) -> None:
    """Refuse a file without entries that its writer always writes beside the others."""
    if lacking := sorted(expected - entries.keys()):
        raise CheckpointError(
            f"{where} has no {lacking[0]}, which trainers always write: the file was changed"
        )


def _parse_parameter(described: object, where: str) -> ParameterMeta:
    if isinstance(described, list) and len(described) >= 3:
        shape, code, distributed = described[:3]
        sizes = isinstance(shape, list) and all(_is_int(n) and 0 <= n < MOST_ELEMENTS for n in shape)
        sizes = sizes and prod(shape) < MOST_ELEMENTS
        no_sync = described[3] if len(described) > 3 else None
        if sizes and _is_int(code) and isinstance(distributed, bool) and isinstance(no_sync, bool | None):
            return ParameterMeta(tuple(shape), dtype_of_meta(code, where), distributed, no_sync)
    raise CheckpointError(f"{where}: {described!r} is not [local shape, dtype, is_distributed, no_sync]")


def _names(entry: Mapping[str, Any], cell: str) -> dict[str, str]:
    names = _mapping(entry, "structure_name_mapping", f"{MODEL_META}: {cell}")
    for key, name in names.items():
        if not isinstance(name, str):
            raise CheckpointError(f"{MODEL_META}: {cell}: the name of {key} is {name!r}")
    return dict(names)


def _mapping(data: Mapping[str, Any], entry: str, where: str) -> Mapping[str, Any]:
    value = data.get(entry)
    if not isinstance(value, dict):
        raise CheckpointError(f"{where}: {entry} is missing or is not an object")
    return value


def _degree(config: Mapping[str, Any], entry: str) -> int | None:
    value = config.get(entry)
    if value is not None and not _is_int(value):
        raise CheckpointError(f"{MODEL_META}: {entry} is {value!r}")
    return value


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def format_model_meta(convention: str, topology: Topology, cells: Mapping[str, CellMeta]) -> str:
    """``model_meta.json`` as the trainer of a library writes it; ``cells`` in its order, tp fastest."""
    former = convention == "paddleformers"
    # Without expert parallelism Paddle's topology has no such groups, and the trainer writes 0 for their size.
    experts = {
        "ep_degree": topology.ep,
        "moe_sharding_degree": topology.moe_sharding if topology.ep > 1 else 0,
    }
    parallel_config = {
        "pp_degree": topology.pp,
        "mp_degree": topology.tp,
        "sharding_degree": topology.sharding,
        **(experts if former else {"vpp_degree": 1}),
    }
    texts: dict[int, str] = {}  # ranks of tp share the object that describes their cells
    for cell in cells.values():
        if id(cell) not in texts:
            texts[id(cell)] = json.dumps(_format_cell(cell, former))
    metas = ", ".join(f"{json.dumps(name)}: {texts[id(cell)]}" for name, cell in cells.items())
    return f'{{"parallel_config": {json.dumps(parallel_config)}, "sharding_metas": {{{metas}}}}}'


def _format_cell(cell: CellMeta, former: bool) -> dict[str, Any]:
    strategy = next(written for written, known in STRATEGIES.items() if known == cell.strategy)
    described: dict[str, Sequence[Any]] = {
        key: [
            list(p.local_shape),
            phi_code(p.dtype),
            p.is_distributed,
            *([bool(p.no_sync)] if former else []),
        ]
        for key, p in cell.parameters.items()
    }
    return {
        "param2rank": dict(cell.owners),
        "structure_name_mapping": dict(cell.names),
        "param_meta": described,
        **({"param_meta_keys": PARAMETER_COLUMNS} if former else {}),
        "sharding_strategy": strategy,
        "enable_overlap": cell.comm_overlap,
    }
