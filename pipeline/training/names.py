"""Check that a running job calls its parameters as a checkpoint does, before it trains.

The trainers find the optimizer states of a parameter by its name (``linear_0.w_0``), which
counts the layers of a class as they are built. A job that is started otherwise than the checkpoint was named, such as
without sequence parallelism, finds states under its names too, and they are those of other parameters.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from paddle_reshard.pipeline.checkpoint.reading import SourceFiles
from paddle_reshard.pipeline.core.errors import CheckpointError, UsageError
from paddle_reshard.pipeline.core.file_names import MODEL_META
from paddle_reshard.pipeline.core.geometry import Shape
from paddle_reshard.pipeline.core.topology import Topology
from paddle_reshard.pipeline.core.units import PathLike
from paddle_reshard.pipeline.formats.hybrid.entries import SPECIAL, FileEntries, index_rank_file
from paddle_reshard.pipeline.formats.hybrid.names import (
    LORA_MODEL_STATE,
    OPTIMIZER,
    WEIGHTS,
    RankFile,
    parse_rank_file,
    rank_file_name,
)
from paddle_reshard.pipeline.formats.hybrid.source import AUTOMATIC_NAME
from paddle_reshard.pipeline.formats.jobs.keys import cell_name
from paddle_reshard.pipeline.formats.model_meta import parse_model_meta
from paddle_reshard.pipeline.indexing.opening import open_checkpoint
from paddle_reshard.pipeline.model.optimizer_keys import MASTER_WEIGHTS, SLICE_PREFIX, split_accumulator_key
from paddle_reshard.pipeline.training.tensors import hybrid_group
from paddle_reshard.storage.files.paddle_pickle import STRUCTURED_NAMES, ArrayRef, SplitArray
from paddle_reshard.storage.locate import Access, StorageOptions
from paddle_reshard.tasks.index import index_here

SHOWN = 3
"""Parameters that an error names."""
_PARALLEL = "sequence_parallel_linear"
"""Part of the names of layers under sequence parallelism."""


@dataclass(frozen=True, slots=True)
class Named:
    """A parameter with the key, name and shape that one side, the job or the checkpoint, gives it."""

    key: str
    name: str
    shape: Shape | None
    """Shape of this rank's piece; ``None`` if it is not known."""
    trained: bool = True


def check_names(
    model: Any,
    checkpoint: PathLike,
    *,
    rank: str | None = None,
    storage_options: StorageOptions | None = None,
) -> int:
    """Check that the parameters of a job have the names and shapes under which a checkpoint stores their states.

    Every rank checks its own files; nothing is changed and no value is read. Formats that store states by key, such as
    FlexCheckpoint, need no check and are refused.

    Parameters
    ----------
    model
        The model as the trainer has built it, not wrapped: its ``state_dict`` has structured keys.
    checkpoint
        Path or URL of the hybrid-parallel checkpoint from which the job resumes.
    rank
        What stands for this rank in file names: ``"tp00_pp01_shard01"``, or ``""`` for one card; the trainer has it
        as ``args.optimizer_name_suffix``. Default: the position in ``fleet``, if that is initialised.
    storage_options
        fsspec options to access a store that is not a local folder.

    Returns
    -------
    int
        How many parameters have been compared.

    Raises
    ------
    CheckpointError
        Naming parameters that are called otherwise, or have other shapes; or if files of this rank are missing.
    UsageError
        If the checkpoint does not store states by parameter names.
    """
    store = open_checkpoint(os.fspath(checkpoint), Access(storage_options or {}))
    files = SourceFiles(store, None, index_here, index_here)
    own = _own_file(files, _own_path(rank))
    weights = _weights_of(files, own)
    stored, live = _stored_names(files, own, weights), list(_live_names(model))
    numbered = own.moe is None and weights.kind != LORA_MODEL_STATE
    problems = [*_differences(stored, live, numbered)]
    if not problems:
        problems = [*_states_of_others(files, own, live)]
    if problems:
        more = f", and {len(problems) - SHOWN} more" if len(problems) > SHOWN else ""
        raise CheckpointError(
            f"{files.store.location}: {'; '.join(problems[:SHOWN])}{more}: the trainer would give parameters the "
            f"optimizer states of others; {_advice(stored, live)}"
        )
    return len(stored)


def _own_path(rank: str | None) -> str:
    """The name of the optimizer file of a rank, by default of this process's position in ``fleet``."""
    if rank is not None:
        return f"{OPTIMIZER}.{rank}.pdopt" if rank else f"{OPTIMIZER}.pdopt"
    group = hybrid_group()
    if group is None:
        return f"{OPTIMIZER}.pdopt"
    places = (
        (group.get_model_parallel_world_size(), group.get_model_parallel_rank()),
        (group.get_pipe_parallel_world_size(), group.get_stage_id()),
        (group.get_sharding_parallel_world_size(), group.get_sharding_parallel_rank()),
    )
    tp, pp, shard = (position if degree > 1 else None for degree, position in places)
    return rank_file_name(OPTIMIZER, tp, pp, shard)


def _own_file(files: SourceFiles, path: str) -> RankFile:
    own = parse_rank_file(path)
    if not any(name.startswith(OPTIMIZER) and name.endswith(".pdopt") for name in files.sizes):
        raise UsageError(
            f"{files.store.location}: holds no optimizer files of ranks; only these store states by parameter names"
        )
    if own is None or path not in files.sizes:
        raise CheckpointError(
            f"{files.store.location}: there is no {path}, the file of this rank: the checkpoint is for another topology"
        )
    return own


def _stored_names(files: SourceFiles, own: RankFile, weights: RankFile) -> list[Named]:
    """The parameters of this rank's cell as the checkpoint calls them, in model order."""
    if MODEL_META not in files.sizes or weights.kind == LORA_MODEL_STATE:
        return list(_names_in(files, weights))
    meta = parse_model_meta(files.json(MODEL_META))
    topology = Topology(tp=meta.tp or 1, pp=meta.pp or 1, sharding=meta.sharding or 1, ep=meta.ep or 1)
    expert = topology.expert_rank(own.tp or 0, own.shard or 0) if topology.ep > 1 else None
    where = cell_name(own.tp or 0, own.pp or 0, expert)
    if where not in meta.cells:
        raise CheckpointError(f"{files.store.location}/{MODEL_META}: sharding_metas has no cell {where}")
    cell = meta.cells[where]
    shapes = {key: parameter.local_shape for key, parameter in cell.parameters.items()}
    return [Named(key, name, shapes.get(key)) for key, name in cell.names.items()]


def _weights_of(files: SourceFiles, own: RankFile) -> RankFile:
    """The file of this rank's parameters."""
    ranks = [file for path in sorted(files.sizes) if (file := parse_rank_file(path)) and file.kind in WEIGHTS]
    topology = Topology(
        tp=1 + max((file.tp or 0 for file in ranks), default=0),
        sharding=1 + (own.shard or 0),
        ep=1 + max((file.ep or 0 for file in ranks), default=0),
    )
    for file in ranks:
        expert = None if file.ep is None else topology.expert_rank(own.tp or 0, own.shard or 0)
        if (file.tp, file.pp, file.moe, file.ep) == (own.tp, own.pp, own.moe, expert):
            return file
    raise CheckpointError(f"{files.store.location}: there is no file of parameters beside {own.path}")


def _names_in(files: SourceFiles, weights: RankFile) -> Iterator[Named]:
    root = _entries(files, weights)
    names = root.get(STRUCTURED_NAMES, {})
    for key, value in root.items():
        shape, name = _shape_of(value), names.get(key) if isinstance(names, dict) else None
        if key != STRUCTURED_NAMES and isinstance(name, str) and shape is not None:
            yield Named(key, name, shape)


def _shape_of(value: Any) -> Shape | None:
    """The shape of the array in an entry, which may be a tuple of its name and itself; ``None`` if it has none."""
    array = value[1] if isinstance(value, tuple) and len(value) == 2 else value
    return array.shape if isinstance(array, ArrayRef | SplitArray) else None


def _entries(files: SourceFiles, file: RankFile) -> FileEntries:
    return index_rank_file(files.store, file.path, files.sizes[file.path])


def _live_names(model: Any) -> Iterator[Named]:
    for key, tensor in model.state_dict().items():
        cut = hasattr(tensor, "fw_storage")  # by sharding stage 3: a slice, or nothing
        shape = None if cut else tuple(int(extent) for extent in tensor.shape)
        yield Named(key, tensor.name, shape, trained=not tensor.stop_gradient)


def _pairs(stored: list[Named], live: list[Named]) -> Iterator[tuple[Named | None, Named | None]]:
    """Each parameter as the checkpoint stores it and as the job has it; ``None`` on a side that lacks it.

    Parameters are paired by key. Some classes save parameters under other keys than their own; the rest is paired in
    order, without parameters that a job holds and does not train, such as the base of an adapter.
    """
    by_key, known = {named.key: named for named in live}, {named.key for named in stored}
    lacking = [named for named in stored if named.key not in by_key]
    others = [named for named in live if named.key not in known]
    if len(others) != len(lacking):
        others = [named for named in others if named.trained]
    yield from ((named, by_key[named.key]) for named in stored if named.key in by_key)
    yield from zip_longest(lacking, others)


def _differences(stored: list[Named], live: list[Named], numbered: bool) -> Iterator[str]:
    """A sentence for each parameter whose name or shape differs, or that one side lacks.

    ``numbered``: layers and experts have the same numbers on both sides. An adapter of a pipeline stage counts the
    stage's layers; of experts over data-parallel ranks, ``model_meta.json`` lists those of the first rank only.
    """
    for theirs, ours in _pairs(stored, live):
        if ours is None or theirs is None:
            named, there = (theirs, "the checkpoint") if ours is None else (ours, "this job")
            if named is not None and not AUTOMATIC_NAME.fullmatch(named.name):
                yield f"{named.key} ({named.name}) is only in {there}"
        elif AUTOMATIC_NAME.fullmatch(theirs.name):
            continue  # a buffer, which no optimizer knows
        elif numbered and _numbers(ours.key) != _numbers(theirs.key):
            yield f"{ours.name} is {ours.key} in this job and {theirs.key} in the checkpoint"
        elif ours.name != theirs.name:
            yield f"{ours.key} is {ours.name} in this job and {theirs.name} in the checkpoint"
        elif None not in (ours.shape, theirs.shape) and ours.shape != theirs.shape:
            yield f"{ours.key} is {ours.shape} in this job and {theirs.shape} in the checkpoint"


def _numbers(key: str) -> list[str]:
    return [part for part in key.split(".") if part.isdigit()]


def _states_of_others(files: SourceFiles, own: RankFile, live: list[Named]) -> Iterator[str]:
    """A sentence for each state in this rank's optimizer file that fits no parameter of the job."""
    shapes = {named.name: named.shape for named in live}
    root = _entries(files, own)
    masters = root.get(MASTER_WEIGHTS)
    stored = (
        [(name, name, value) for name, value in masters.items()] if isinstance(masters, FileEntries) else []
    )
    for entry, value in root.items():
        if entry not in SPECIAL:
            parts = split_accumulator_key(entry.removeprefix(SLICE_PREFIX), shapes)
            stored.append((entry, parts[0] if parts else "", value))
    for entry, name, value in stored:
        shape, bare = _shape_of(value) or (), name.removeprefix(SLICE_PREFIX)
        if bare not in shapes:
            yield f"{own.path} holds {entry}, which belongs to no parameter of this job"
        elif len(shape) > 1 and shapes[bare] not in (None, shape):
            yield f"{own.path} holds {entry} as {shape}, in this job it is {shapes[bare]}"


def _advice(stored: list[Named], live: list[Named]) -> str:
    """How to start a job whose names are those of the checkpoint."""
    of_checkpoint, of_job = (any(_PARALLEL in named.name for named in side) for side in (stored, live))
    if of_checkpoint == of_job:
        return "start it with the arguments that paddle-reshard launch prints for the checkpoint"
    flag = "--sequence-parallel" if of_job else "--no-sequence-parallel"
    return (
        f"start it with --sequence_parallel {str(of_checkpoint).lower()}, as the checkpoint is named, or convert with "
        f"{flag}"
    )
