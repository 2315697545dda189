"""Check that a running job calls its parameters as a checkpoint does, before it trains.

The trainers find the optimizer states of a parameter by its name (``linear_0.w_0``), which
counts the layers of a class as they are built. A job that is started otherwise than the checkpoint was named, such as
without sequence parallelism, finds states under its names too, and they are those of other parameters.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from typing import Any

from paddle_reshard.pipeline.checkpoint.reading import SourceFiles
from paddle_reshard.pipeline.core.errors import CheckpointError, UsageError
from paddle_reshard.pipeline.core.file_names import MODEL_META
from paddle_reshard.pipeline.core.geometry import Shape
from paddle_reshard.pipeline.core.tensors import dtype_of_code
from paddle_reshard.pipeline.core.topology import Topology
from paddle_reshard.pipeline.core.units import PathLike
from paddle_reshard.pipeline.formats.flex.names import MASTER_WEIGHTS as MASTER_WEIGHT_FOLDER
from paddle_reshard.pipeline.formats.flex.names import METADATA, MODEL_STATE, OPTIMIZER_STATE, folder_of
from paddle_reshard.pipeline.formats.hybrid.entries import SPECIAL, FileEntries, index_rank_file
from paddle_reshard.pipeline.formats.hybrid.names import (
    LORA_MODEL_STATE,
    OPTIMIZER,
    WEIGHTS,
    WEIGHTS_OF_RANK,
    RankFile,
    hybrid_name,
    parse_rank_file,
    rank_file_name,
)
from paddle_reshard.pipeline.formats.hybrid.source import AUTOMATIC_NAME
from paddle_reshard.pipeline.formats.jobs.keys import cell_name
from paddle_reshard.pipeline.formats.model_meta import parse_model_meta
from paddle_reshard.pipeline.indexing.opening import open_checkpoint
from paddle_reshard.pipeline.model.optimizer_keys import MASTER_WEIGHTS, SLICE_PREFIX, split_accumulator_key
from paddle_reshard.pipeline.training.tensors import hybrid_group
from paddle_reshard.storage.files.dist_metadata import parse_dist_metadata
from paddle_reshard.storage.files.paddle_pickle import STRUCTURED_NAMES, ArrayRef, SplitArray
from paddle_reshard.storage.locate import StorageOptions, source_access
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
    dtype: str | None = None
    """``bfloat16``, ``float32``, …; ``None`` if it is not known."""
    cut: bool = False
    """Whether sharding stage 3 holds a slice of it."""


def check_names(
    model: Any,
    checkpoint: PathLike,
    *,
    rank: str | None = None,
    master_weights: bool | None = None,
    storage_options: StorageOptions | None = None,
) -> int:
    """Check that the parameters of a job have the names, shapes and dtypes that they have in a checkpoint.

    Every rank checks its own files; nothing is changed and no value is read. Of a FlexCheckpoint, which stores states
    by key, dtypes and master weights are compared, and local shapes with the pieces into which this job cuts the whole.
    Beside parameters in safetensors files, which hold no names, those of the states and their shapes must be the job's.
    Call it after the model is built and before the trainer loads, which may load into other dtypes and train without a
    word.

    Parameters
    ----------
    model
        The model as the trainer has built it, not wrapped: its ``state_dict`` has structured keys.
    checkpoint
        Path or URL of the hybrid-parallel checkpoint from which the job resumes.
    rank
        What stands for this rank in file names: ``"tp00_pp01_shard01"``, or ``""`` for one card; the trainer has it
        as ``args.optimizer_name_suffix``. Default: the position in ``fleet``, if that is initialised.
    master_weights
        Whether the job keeps float32 master weights: ``fp16_opt_level`` is O2, with bf16 or fp16. It then converts
        float32 parameters later, and their dtype is not compared. ``None``: parameters alone are.
    storage_options
        fsspec options to access a store that is not a local folder.

    Returns
    -------
    int
        How many parameters have been compared.

    Raises
    ------
    CheckpointError
        Naming parameters that are called otherwise, or have other shapes or dtypes; if one of the job and the
        checkpoint's optimizer states has master weights and the other has none; or if files of this rank are missing.
    UsageError
        If the checkpoint stores states neither by parameter names nor as a FlexCheckpoint.
    """
    return compare_with_job(model, checkpoint, rank, master_weights, storage_options)


def compare_with_job(
    model: Any,
    checkpoint: PathLike,
    rank: str | None,
    master_weights: bool | None,
    storage_options: StorageOptions | None,
    placed: bool = False,
) -> int:
    """:func:`check_names`; ``placed``: the trainer has converted and wrapped the model for its precision and stage."""
    store = open_checkpoint(os.fspath(checkpoint), source_access({"storage_options": storage_options}))
    files = SourceFiles(store, None, index_here, index_here)
    if described := [path for path in sorted(files.sizes) if path.endswith(METADATA)]:
        return _check_flex(files, described, list(_live_names(model)), master_weights, placed, _cuts(rank))
    own = _own_file(files, _own_path(rank))
    weights, live = _weights_of(files, own), list(_live_names(model))
    # Safetensors files hold no names of parameters: those of the states in the optimizer file must all be the job's.
    stored = _stored_names(files, own, weights) if weights.path in files.sizes else live
    numbered = own.moe is None and weights.kind != LORA_MODEL_STATE
    problems = [*_differences(stored, live, numbered)]
    if not problems:
        problems = [*_states_of_others(files, own, live, placed)]
    _refuse(
        files,
        problems,
        f"the trainer would give parameters the optimizer states of others; {_advice(stored, live)}",
    )
    pairs = [
        (ours, theirs.dtype)
        for theirs, ours in _pairs(stored, live)
        if theirs is not None and ours is not None
    ]
    masters = _has_masters(_entries(files, own), stored)
    _refuse(files, [*_other_precision(pairs, masters, master_weights, placed)], _PRECISION)
    return len(stored)


_PRECISION = (
    "the trainer would train from other values without a word; start it with the precision that paddle-reshard launch "
    "prints for the checkpoint"
)


def _has_masters(root: FileEntries, stored: Sequence[Named]) -> bool | None:
    """Whether the optimizer states in a rank's file have master weights; ``None`` if it holds none that would.

    Parameters that are float32 in a job of half precision have none, and a rank may have the states of such ones only.
    """
    if root.get(MASTER_WEIGHTS):
        return True
    half = {named.name for named in stored if named.dtype != "float32"}
    would = half or {named.name for named in stored}
    entries = (entry.removeprefix(SLICE_PREFIX) for entry in root.names() if entry not in SPECIAL)
    return False if any(split_accumulator_key(entry, would) for entry in entries) else None


def _refuse(files: SourceFiles, problems: Sequence[str], why: str) -> None:
    if problems:
        more = f", and {len(problems) - SHOWN} more" if len(problems) > SHOWN else ""
        raise CheckpointError(f"{files.store.location}: {'; '.join(problems[:SHOWN])}{more}: {why}")


def _other_precision(
    pairs: Iterable[tuple[Named, str | None]], masters: bool | None, keeps: bool | None, placed: bool
) -> Iterator[str]:
    """A sentence for each parameter that the job holds in another dtype than ``masters`` and parameters are stored in.

    ``masters``: whether optimizer states are stored with master weights; ``None`` if there are none that tell. A job
    that keeps master weights converts its float32 parameters when the trainer places them, not before.
    """
    if keeps is False and masters:
        yield "the checkpoint holds float32 master weights and this job keeps none"
    if keeps and masters is False:
        yield "this job keeps float32 master weights and the checkpoint holds optimizer states without any"
    for ours, stored in pairs:
        waits = not placed and bool(keeps) and ours.dtype == "float32"
        if stored is not None and ours.dtype is not None and ours.dtype != stored and not waits:
            yield f"{ours.key} is {ours.dtype} in this job and {stored} in the checkpoint"


def _check_flex(
    files: SourceFiles,
    described: Sequence[str],
    live: Sequence[Named],
    keeps: bool | None,
    placed: bool,
    cuts: frozenset[int] | None,
) -> int:
    """Compare what a FlexCheckpoint says of each key with the job's parameters; ``cuts`` are those of :func:`_cuts`."""
    stored: dict[str, tuple[str | None, Shape | None]] = {}
    held = set[str]()
    for path in described:
        metadata = parse_dist_metadata(partial(files.store.read, path), files.sizes[path], path)
        if metadata.keys:  # the trainer writes a folder of each kind, even an empty one
            held.add(folder_of(path))
        if path.startswith(f"{MODEL_STATE}/"):
            for key, dtype, _, _, whole, _ in metadata.pieces.tolist():
                dtypes, shapes = metadata.dtypes, metadata.shapes
                stored[metadata.keys[key]] = (
                    dtypes[dtype] if dtype >= 0 else None,
                    shapes[whole] if whole >= 0 else None,
                )
    masters = True if MASTER_WEIGHT_FOLDER in held else False if OPTIMIZER_STATE in held else None
    known = [(ours, *stored[ours.key]) for ours in live if ours.key in stored]
    larger = (
        f"{ours.key} is {ours.shape} in this job and {whole} in the checkpoint"
        for ours, _, whole in known
        if ours.shape is not None and whole is not None and not _fits(ours.shape, whole, cuts)
    )
    _refuse(files, [*larger], "they are of different models")
    _refuse(files, [*_other_precision(((o, d) for o, d, _ in known), masters, keeps, placed)], _PRECISION)
    return len(known)


def _cuts(rank: str | None) -> frozenset[int] | None:
    """Into how many pieces this job cuts a dim of a parameter that it cuts; ``None`` if it cannot be known here."""
    group = hybrid_group()
    if group is None:
        return None if re.search(r"tp|moe", rank or "") else frozenset()
    tp = int(group.get_model_parallel_world_size())
    ep = int(getattr(group, "get_expert_parallel_world_size", lambda: 1)())
    return frozenset({tp, ep, tp * ep})


def _fits(local: Shape, whole: Shape, cuts: frozenset[int] | None) -> bool:
    """Whether a local tensor can be one of the equal pieces into which a job cuts a whole one.

    >>> _fits((64, 128), (128, 128), frozenset({2})), _fits((64, 128), (192, 128), frozenset({2}))
    (True, False)
    """
    if len(local) != len(whole):
        return False
    dims = [(here, there) for here, there in zip(local, whole, strict=True) if here != there]
    return all(here and there % here == 0 and (cuts is None or there // here in cuts) for here, there in dims)


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
            f"{files.store.location}: holds no optimizer files of ranks, and only these store states by parameter "
            "names: leave this check out"
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
    known = {key: (parameter.local_shape, parameter.dtype.name) for key, parameter in cell.parameters.items()}
    described = ((key, name, *known.get(key, (None, None))) for key, name in cell.names.items())
    return [Named(key, name, shape, dtype=dtype) for key, name, shape, dtype in described]


def _weights_of(files: SourceFiles, own: RankFile) -> RankFile:
    """The file of this rank's parameters; under the name of the one whose place a safetensors file takes."""
    named = (hybrid_name(path) if WEIGHTS_OF_RANK.fullmatch(path) else path for path in sorted(files.sizes))
    ranks = [file for path in named if (file := parse_rank_file(path)) and file.kind in WEIGHTS]
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
            array = value[1] if isinstance(value, tuple) else value
            yield Named(key, name, shape, dtype=dtype_of_code(array.dtype, weights.path).name)


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
        dtype = str(tensor.dtype).rpartition(".")[2]  # paddle.bfloat16
        yield Named(key, tensor.name, shape, not tensor.stop_gradient, dtype, cut)


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


def _states_of_others(files: SourceFiles, own: RankFile, live: list[Named], placed: bool) -> Iterator[str]:
    """A sentence for each state in this rank's optimizer file that fits no parameter of the job.

    Only a job that is ``placed`` has cut what stage 3 cuts: the parameters above its size of segments.
    """
    whole = {named.name for named in live if placed and not named.cut}
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
        elif bare in whole and name.startswith(SLICE_PREFIX):
            yield (
                f"{own.path} holds {entry}, a slice, and this job does not cut {bare}: its segments of stage 3 have "
                "another size (stage3_segment_size of --layout)"
            )
        elif len(shape) > 1 and shapes[bare] not in (None, shape):
            yield f"{own.path} holds {entry} as {shape}, in this job it is {shapes[bare]}"


def _advice(stored: list[Named], live: list[Named]) -> str:
    """How to start a job whose names are those of the checkpoint."""
    of_checkpoint, of_job = (any(_PARALLEL in named.name for named in side) for side in (stored, live))
    if of_checkpoint == of_job:
        return "start it with the arguments that paddle-reshard launch prints for the checkpoint"
    checkpoint, job = str(of_checkpoint).lower(), str(of_job).lower()
    return (
        f"start it with --sequence_parallel {checkpoint}, as the checkpoint is named, or convert with --layout "
        f"'{{\"sequence_parallel\": {job}}}'"
    )
