"""Names of files and keys in a unified checkpoint, and checks of the files against their indexes.

Files (PaddleFormers 1.2 and PaddleNLP 3.0 ``trainer/unified_checkpoint``)::

    model-00001-of-00004.safetensors             model.safetensors.index.json
    optimizer-00001-of-00004.safetensors         optimizer.safetensors.index.json
    master_weights-00001-of-00004.safetensors    master_weights.safetensors.index.json

With ``ignore_merge_optimizer`` every rank writes its own tensors: ``optimizer.tp00_pp00_shard00.safetensors`` and
``master_weights.tp00_pp00_shard00.safetensors``, without the parts whose degree is 1; no index lists them. With
``optim_shard_num=2`` each of these is two files, ``….safetensors_shard_0001`` and ``….safetensors_shard_0002``, between
which the keys are divided at random; the index of the optimizer gives their number.

Keys are ``<structured key>/moment1_0`` for optimizer states, and ``<structured key>`` for everything else.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from paddle_reshard.pipeline.core.errors import CheckpointError, CoverageError, UnsupportedError, of_optimizer
from paddle_reshard.pipeline.core.limits import MAX_TARGET_FILES
from paddle_reshard.pipeline.core.tensors import WRITTEN_NAMES
from paddle_reshard.storage.files.safetensors import Index, SafetensorsPayload

MODEL: Final = "model"
OPTIMIZER: Final = "optimizer"
MASTER_WEIGHTS: Final = "master_weights"
KINDS: Final = (MODEL, OPTIMIZER, MASTER_WEIGHTS)

_NUMBERED = re.compile(rf"({MODEL}|{OPTIMIZER}|{MASTER_WEIGHTS})-(\d{{5,}})-of-(\d{{5,}})\.safetensors")
_OF_RANK = re.compile(rf"({OPTIMIZER}|{MASTER_WEIGHTS})(?:\.([a-z0-9_]+))?\.safetensors(?:_shard_(\d{{4}}))?")
_PARTS = re.compile(r"(?:tp(?P<tp>\d{2,}))?_?(?:pp(?P<pp>\d{2,}))?_?(?:shard(?P<shard>\d{2,}))?")
_SCALES = re.compile(r".+@(scales|min_scales|max_scales)")
_STATE = re.compile(rf"(.+)/({'|'.join(sorted(WRITTEN_NAMES, key=len, reverse=True))})_0")
_NOT_QUANTISED = (None, "O0")


@dataclass(frozen=True, slots=True, order=True)
class UnifiedFile:
    """A file. Files are ordered by kind and rank; slices of a tensor are joined in this order."""

    kind: str
    tp: int
    pp: int
    number: int
    """From 0; the sharding rank if ``of_rank``."""
    path: str
    of_rank: bool
    """Whether it holds the tensors of a single rank, before tensor parallelism is merged."""
    piece: int = 0
    """Number among several files of its rank, from 1; 0: the rank has a single file."""


def index_name(kind: str) -> str:
    """Name of the index file of a kind."""
    return f"{kind}.safetensors.index.json"


def file_name(kind: str, number: int, count: int) -> str:
    """Name of the ``number``-th file, from 0, of ``count`` files of a kind."""
    return f"{kind}-{number + 1:05d}-of-{count:05d}.safetensors"


def optimizer_key(key: str, state: str) -> str:
    """Key of an optimizer state.

    >>> optimizer_key("model.norm.weight", "moment1")
    'model.norm.weight/moment1_0'
    """
    return f"{key}/{state}_0"


def split_optimizer_key(key: str, path: str) -> tuple[str, str]:
    """Structured key and state of a key of an optimizer file; unknown and quantised states are refused."""
    if _SCALES.fullmatch(key):
        raise of_optimizer(UnsupportedError(f"{path}: {key}: {_QUANTISED}"))
    match = _STATE.fullmatch(key)
    if match is None:
        raise of_optimizer(
            CheckpointError(
                f"{path}: {key} is not a known accumulator of a parameter; entries of unknown meaning are not converted"
            )
        )
    return match[1], match[2]


_QUANTISED = (
    "quantised optimizer states are not exact, so they are not supported; resume from them and save with "
    "ckpt_quant_stage O0"
)


def is_unified(paths: Iterable[str]) -> bool:
    """Whether a file has a name that only unified checkpoints use."""
    return any((file := _parsed(path)) and file.kind != MODEL for path in paths)


ADAPTER: Final = "peft_model"
"""Beginning of the names of the files of an adapter."""


def holds_adapter(paths: Iterable[str]) -> bool:
    """Whether a file has the name of what is left of LoRA training."""
    return any(path.startswith(ADAPTER) for path in paths)


def sort_files(paths: Iterable[str]) -> list[UnifiedFile]:
    """All safetensors files in the order of their ranks; they must be all those of one checkpoint."""
    files = []
    for path in sorted(paths):
        file = _parsed(path)
        if file is None:
            raise CheckpointError(f"{path}: a tensor file whose name has no meaning in a unified checkpoint")
        files.append(file)
    for kind in KINDS:
        of_kind = [file for file in files if file.kind == kind]
        own = [file for file in of_kind if file.of_rank]
        if own and len(own) < len(of_kind):
            merged = next(file for file in of_kind if not file.of_rank)
            raise CheckpointError(
                f"{merged.path} holds merged {kind} tensors, but {own[0].path} those of a single rank: the files "
                "belong to two checkpoints"
            )
        if own:
            _check_ranks(own)
        elif of_kind:
            _check_numbers(kind, of_kind)
    return sorted(files)


def _parsed(path: str) -> UnifiedFile | None:
    if match := _NUMBERED.fullmatch(path):
        return UnifiedFile(match[1], 0, 0, int(match[2]) - 1, path, False)
    match = _OF_RANK.fullmatch(path)
    parts = _PARTS.fullmatch(match[2] or "") if match else None
    if match is None or parts is None:
        return None
    tp, pp, shard = (int(parts[name] or 0) for name in ("tp", "pp", "shard"))
    return UnifiedFile(match[1], tp, pp, shard, path, True, int(match[3] or 0))


def _check_numbers(kind: str, files: list[UnifiedFile]) -> None:
    counts = {int(file.path.removesuffix(".safetensors").rpartition("-")[2]): file.path for file in files}
    if len(counts) > 1:
        first, second = list(counts.values())[:2]
        raise CheckpointError(f"{first} and {second} cannot belong to the same checkpoint")
    (count,) = counts
    if count > MAX_TARGET_FILES:
        raise CheckpointError(
            f"{counts[count]}: the name gives a total of {count} files; at most {MAX_TARGET_FILES} are supported"
        )
    expected = {file_name(kind, number, count) for number in range(count)}
    paths = {file.path for file in files}
    if missing := sorted(expected - paths):
        raise CheckpointError(f"{len(missing)} of {count} {kind} files are missing: {missing[0]}")
    if extra := sorted(paths - expected):
        raise CheckpointError(f"{extra[0]}: files of this kind must be numbered from 1 to {count}")


def _check_ranks(files: list[UnifiedFile]) -> None:
    ranks: dict[tuple[int, int, int], dict[int, str]] = {}
    for file in files:
        other = ranks.setdefault((file.tp, file.pp, file.number), {}).setdefault(file.piece, file.path)
        if other != file.path:
            raise CheckpointError(f"{other} and {file.path} are files of the same rank")
    tp, pp, sharding = (max(rank[axis] for rank in ranks) + 1 for axis in range(3))
    for rank in ((t, p, s) for t in range(tp) for p in range(pp) for s in range(sharding)):
        if rank not in ranks:
            raise CheckpointError(
                f"{files[0].kind}: the file of the rank tp={rank[0]} pp={rank[1]} shard={rank[2]} is missing; "
                f"the other files belong to tp={tp} pp={pp} sharding={sharding}"
            )
    count = max(file.piece for file in files)
    expected = list(range(1, count + 1)) if count else [0]
    for pieces in ranks.values():
        if sorted(pieces) != expected:
            raise CheckpointError(
                f"{min(pieces.values())}: its rank has files {sorted(pieces)} of {count} (optim_shard_num)"
            )


def check_indexes(
    files: Sequence[UnifiedFile],
    payloads: Mapping[str, SafetensorsPayload],
    indexes: Mapping[str, Index],
) -> None:
    """Check the files against ``indexes`` (name of an index file → its contents).

    If several files hold a key, the index may name any of them; PaddleFormers names the last. No index lists the files
    of single ranks. Quantised states and adapters, of which an index tells, are refused.
    """
    _check_pieces(files, indexes.get(index_name(OPTIMIZER)))
    for kind in KINDS:
        name = index_name(kind)
        index = indexes.get(name)
        if index is not None:
            _check_facts(name, index.extra)
        of_kind = [file for file in files if file.kind == kind]
        if any(file.of_rank for file in of_kind):
            continue
        held: dict[str, list[str]] = {}
        for file in of_kind:
            for key in payloads[file.path].tensors:
                held.setdefault(key, []).append(file.path)
        if index is None and held:
            raise CheckpointError(f"{name} is missing, which lists the files of all {kind} tensors")
        _check_index(name, {} if index is None else index.weight_map, held)


def _check_pieces(files: Iterable[UnifiedFile], index: Index | None) -> None:
    """Check the number of files per rank and kind against the index of the optimizer states."""
    expected = None if index is None else index.extra.get("optim_shard_num")
    pieces: dict[str, int] = {}
    for file in files:
        if file.of_rank:
            pieces[file.kind] = max(pieces.get(file.kind, 1), file.piece)
    for kind, count in pieces.items():
        if expected not in (None, count):
            raise CheckpointError(
                f"{index_name(OPTIMIZER)} says that optim_shard_num is {expected!r}, but a rank has "
                f"{count} files of {kind}"
            )


def _check_facts(name: str, facts: Mapping[str, Any]) -> None:
    if (stage := facts.get("ckpt_quant_stage")) not in _NOT_QUANTISED:
        raise of_optimizer(UnsupportedError(f"{name}: ckpt_quant_stage is {stage}: {_QUANTISED}"))
    if (adapter := facts.get("type")) is not None:
        raise UnsupportedError(
            f"{name}: weights of an adapter ({adapter}) in a unified checkpoint are not supported"
        )


def _check_index(name: str, weight_map: Mapping[str, str], held: Mapping[str, list[str]]) -> None:
    for key, path in weight_map.items():
        if path not in held.get(key, ()):
            others = tuple(held.get(key, ()))
            raise CoverageError(key, f"{name} says that {path} holds it, but it does not", others)
    for key, paths in held.items():
        if key not in weight_map:
            raise CoverageError(key, f"{name} does not list it", tuple(paths))
