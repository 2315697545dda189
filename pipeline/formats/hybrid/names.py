"""Names of the files of a hybrid-parallel checkpoint.

(PaddleNLP 3.0 ``trainer/training_args.py``, PaddleFormers 1.2 the same)::

    model_state | lora_model_state | optimizer | ema
        [ "." tpNN ["_" ppNN] ["_" shardNN] ["_" moeNN | "_" moe_shardingNN] ]  ".pdparams" | ".pdopt"

``lora_model_state`` replaces ``model_state`` in LoRA training. It has no part ``shardNN``, and
without pipeline parallelism no part at all: tp ranks are merged then.

``save_pretrained`` cuts a model above ``max_shard_size`` into ``model_state-00001-of-00003.pdparams`` … with an index.

A part is left out where its degree is 1, but for ``moe``: the data-parallel rank, under ``use_expert_parallel``.
``moe_sharding`` is the expert rank, in PaddleFormers' ``model_state`` without sharded saving.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from paddle_reshard.pipeline.core.errors import CheckpointError
from paddle_reshard.pipeline.core.limits import MAX_RANKS

MODEL_STATE = "model_state"
LORA_MODEL_STATE = "lora_model_state"
OPTIMIZER = "optimizer"
EMA = "ema"

WEIGHTS = (MODEL_STATE, LORA_MODEL_STATE)
"""Files of parameters; a checkpoint has one of these kinds."""

_SUFFIXES = {MODEL_STATE: "pdparams", LORA_MODEL_STATE: "pdparams", OPTIMIZER: "pdopt", EMA: "pdopt"}
_RANK_FILE = re.compile(r"(model_state|lora_model_state|optimizer|ema)(?:\.([a-z0-9_]+))?\.(pdparams|pdopt)")
_PIECE = re.compile(r"model_state-(\d{5})-of-(\d{5})\.pdparams")
PIECE_INDEX = "model_state.pdparams.index.json"
_PARTS = re.compile(
    r"(?:tp(?P<tp>\d{2,}))?_?(?:pp(?P<pp>\d{2,}))?_?(?:shard(?P<shard>\d{2,}))?"
    r"_?(?:moe(?P<moe>\d{2,})|moe_sharding(?P<ep>\d{2,}))?"
)


@dataclass(frozen=True, slots=True)
class RankFile:
    """A tensor file of one rank. A coordinate is ``None`` where the name has no such part."""

    kind: str
    tp: int | None
    pp: int | None
    shard: int | None
    path: str
    moe: int | None = None
    """Data-parallel rank, over which experts may be spread."""
    ep: int | None = None
    """Expert rank."""


def parse_rank_file(path: str) -> RankFile | None:
    """The coordinates in a file name; ``None`` if it is not a tensor file of this family.

    >>> parse_rank_file("optimizer.tp00_pp01_shard03.pdopt")
    RankFile(kind='optimizer', tp=0, pp=1, shard=3, path='optimizer.tp00_pp01_shard03.pdopt', moe=None, ep=None)
    """
    if piece_of(path) is not None:
        return RankFile(MODEL_STATE, None, None, None, path)
    match = _RANK_FILE.fullmatch(path)
    if match is None:
        return None
    kind, parts, suffix = match.groups()
    coordinates = _PARTS.fullmatch(parts or "")
    if coordinates is None or suffix != _SUFFIXES[kind] or parts == "" or (parts or "").startswith("_"):
        raise CheckpointError(
            f"{path}: looks like a tensor file, but its name is not {kind}[.tpNN][_ppNN][_shardNN]"
            f"[_moeNN | _moe_shardingNN].{_SUFFIXES[kind]}"
        )
    tp, pp, shard, moe, ep = (_rank(value, path) for value in coordinates.groups())
    return RankFile(kind, tp, pp, shard, path, moe, ep)


def piece_of(path: str) -> tuple[int, int] | None:
    """Number, from 1, and count of a piece of the only rank's parameters; ``None`` for other files.

    >>> piece_of("model_state-00002-of-00003.pdparams")
    (2, 3)
    """
    match = _PIECE.fullmatch(path)
    return (int(match[1]), int(match[2])) if match else None


def _rank(digits: str | None, path: str) -> int | None:
    if digits is None:
        return None
    if len(digits) > len(str(MAX_RANKS)) or int(digits) >= MAX_RANKS:
        raise CheckpointError(
            f"{path}: names the rank {digits[:12]}; jobs of at most {MAX_RANKS} ranks are supported. Rename "
            "the file, or move it elsewhere if it is none of the checkpoint's"
        )
    return int(digits)


def rank_file_name(
    kind: str,
    tp: int | None,
    pp: int | None,
    shard: int | None,
    moe: int | None = None,
    ep: int | None = None,
) -> str:
    """The name of a tensor file; a coordinate that is ``None`` leaves no part.

    >>> rank_file_name("ema", 0, None, 12)
    'ema.tp00_shard12.pdopt'
    """
    coordinates = {"tp": tp, "pp": pp, "shard": shard, "moe": moe, "moe_sharding": ep}
    parts = "_".join(f"{axis}{rank:0>2d}" for axis, rank in coordinates.items() if rank is not None)
    return ".".join([kind, *([parts] if parts else []), _SUFFIXES[kind]])


WEIGHTS_OF_RANK = re.compile(r"model(\.[a-z0-9_]+)?\.safetensors")


def hybrid_name(path: str) -> str:
    """Name of the file of a hybrid checkpoint that would hold the same weights.

    >>> hybrid_name("model.tp00_pp01.safetensors")
    'model_state.tp00_pp01.pdparams'
    """
    match = WEIGHTS_OF_RANK.fullmatch(path)
    if match is None:
        raise CheckpointError(f"{path}: not the weights of a rank beside optimizer states (.pdopt) of one")
    return f"model_state{match[1] or ''}.pdparams"
