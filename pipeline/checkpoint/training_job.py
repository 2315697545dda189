"""The job that reads a checkpoint."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

from paddle_reshard.pipeline.core.tensors import written_name
from paddle_reshard.pipeline.core.topology import Topology
from paddle_reshard.pipeline.model.lora_config import Adapter
from paddle_reshard.pipeline.model.model import ModelTensor
from paddle_reshard.pipeline.model.optimizers import ADAM_STATES


@dataclass(frozen=True, slots=True)
class TrainingJob:
    """What a job must know to read a checkpoint."""

    library: str
    """``paddleformers`` or ``paddlenlp``."""
    format: str
    topology: Topology
    strategy: str
    """One of :data:`paddle_reshard.pipeline.core.topology.STRATEGIES`."""
    comm_overlap: bool = False
    sequence_parallel: bool = False
    muon: bool = False
    experts_over_dp: bool = False
    """Whether data-parallel ranks share the experts out, as PaddleNLP does."""
    recipe: str = ""
    """The pre-training recipe that the library starts, as its argument ``stage`` calls it; empty: none."""
    switches: tuple[str, ...] = ()
    """Arguments of the recipe that are on."""
    precision: str = ""
    """``bf16`` or ``fp16``, as the dtypes of its parameters show; empty: float32."""
    master_weights: bool = False
    lora_rank: int = 0
    """Rank of the adapter that is trained; 0: the model is trained in full."""
    rslora: bool = False
    lora_plus_scale: float = 1.0


_PRECISIONS = {"bfloat16": "bf16", "float16": "fp16"}


def precision_of(dtypes: Iterable[str], adapter: Adapter | None) -> str:
    """The argument for the precision of a job whose parameters have these dtypes; empty: float32.

    The base of an ``adapter``, which its checkpoint lacks, has the dtype of ``lora_config.json``.

    >>> precision_of(["bfloat16", "float32"], None), precision_of(["float32"], None)
    ('bf16', '')
    """
    names = {*dtypes, *([] if adapter is None else [str(adapter.entries.get("dtype"))])}
    return next((argument for dtype, argument in _PRECISIONS.items() if dtype in names), "")


def lora_of(adapter: Adapter | None) -> dict[str, Any]:
    """What a :class:`TrainingJob` has of an adapter."""
    if adapter is None:
        return {}
    plus = adapter.entries.get("lora_plus_scale")
    scale = float(plus) if isinstance(plus, int | float) and not isinstance(plus, bool) else 1.0
    return {"lora_rank": adapter.rank, "rslora": adapter.rslora, "lora_plus_scale": scale}


def coordinates_of(rank: int, topology: Topology, library: str) -> tuple[int, int, int, int]:
    """The tp, pp, sharding and dp rank of a global rank, with the trainer's default order of axes.

    From the fastest: tp, pp, sharding, dp in PaddleFormers 1.2 (``sharding_first``, seen of jobs), where under ``ep``
    the neighbours of a sharding group that share the experts of a layer come before pp (Paddle 3.3
    ``fleet/base/topology.py``, ``EPHybridCommunicateGroup``); tp, sharding, pp, dp in PaddleNLP 3.0 (``pp_first``,
    ``trainer/training_args.py``).

    >>> topology = Topology(tp=2, pp=2, sharding=2)
    >>> coordinates_of(2, topology, "paddleformers"), coordinates_of(2, topology, "paddlenlp")
    ((0, 1, 0, 0), (0, 0, 1, 0))
    >>> [coordinates_of(rank, Topology(pp=2, sharding=2, ep=2), "paddleformers")[1:3] for rank in range(4)]
    [(0, 0), (0, 1), (1, 0), (1, 1)]
    """
    rest, tp = divmod(rank, topology.tp)
    if library == "paddlenlp":
        rest, shard = divmod(rest, topology.sharding)
        dp, pp = divmod(rest, topology.pp)
        return tp, pp, shard, dp
    rest, neighbour = divmod(rest, topology.dense_sharding)
    rest, pp = divmod(rest, topology.pp)
    dp, group = divmod(rest, topology.moe_sharding)
    return tp, pp, group * topology.dense_sharding + neighbour, dp


def naming_arguments(topology: Topology, sequence_parallel: bool) -> str:
    """The arguments of the trainer that are not its defaults and that parameter names depend on; empty: there are none.

    The sizes of axes are in the names of the files too, so that no job mistakes them.

    >>> naming_arguments(Topology(tp=2, sharding=2, ep=2), sequence_parallel=True)
    '--sequence_parallel true --use_expert_parallel true'
    """
    of_sequence = ["--sequence_parallel true"] if topology.tp > 1 and sequence_parallel else []
    return " ".join([*of_sequence, *(["--use_expert_parallel true"] if topology.ep > 1 else [])])


def takes_from_masters(tensor: ModelTensor, strategy: str, with_lora: bool) -> bool:
    """Whether PaddleFormers 1.2 takes a parameter from its master weight alone, and asks no FlexCheckpoint for it.

    Under stage 1 v2 it skips everything in bfloat16, but for LoRA (``trainer/trainer.py``, ``enable_bf16_opt``).
    """
    return strategy == "stage1v2" and not with_lora and tensor.dtype.name == "bfloat16"


def never_restored(tensors: Iterable[ModelTensor], strategy: str, with_lora: bool) -> str | None:
    """The parameters that PaddleFormers 1.2 does not restore from a FlexCheckpoint, in words; ``None``: none."""
    held = [tensor for tensor in tensors if not tensor.missing and tensor.tied_to is None]
    if not any(tensor.master for tensor in held):
        return None
    lost = [t.key for t in held if not t.master and takes_from_masters(t, strategy, with_lora)]
    if not lost:
        return None
    more = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
    return (
        f"{lost[0]}{more}: under {strategy} this trainer never restores bfloat16 parameters that have no master weight "
        "(frozen ones) from a FlexCheckpoint: they keep the values that the job was built with; begin from the same "
        "values, or resume with stage1v1 (--split_param false)"
    )


def taken_for_copies(tensors: Iterable[ModelTensor]) -> str | None:
    """Why no job with tp reads a FlexCheckpoint of a model, nor its own, in words; ``None``: they do.

    Seen of gpt_oss with tp=2: PaddleFormers 1.2 saves the first rank's half of ``sinks`` as the whole, and gives both
    ranks the first half of a whole one, of master weights and moments too.
    """
    cut = next((tensor.key for tensor in tensors if tensor.rule.cut_unmarked), None)
    return cut and (
        f"in a job with tp the trainer takes {cut}, which its class cuts and does not mark, for the same on all ranks: "
        "they would hold the first rank's part, without an error"
    )


def not_read_by_part(arguments: Collection[str], library: str, kinds: Iterable[Iterable[str]]) -> str:
    """:func:`beyond_adam`, if the trainer reads the states by ``load_sharded_model``, as these arguments tell."""
    by_part = "load_sharded_model" in arguments and library != "paddlenlp"
    return beyond_adam(kinds) if by_part else ""


def beyond_adam(kinds: Iterable[Iterable[str]]) -> str:
    """Why PaddleFormers 1.2 reads no such states of an optimizer by ``load_sharded_model`` or from a FlexCheckpoint, in
    words with a way out; empty: it does. ``kinds`` are the accumulators of every kind of tensor.

    ``GroupGetter`` (``trainer/utils/sharding_io.py``) stops at any other state, and only AdamW has a
    ``sharded_state_dict``, which knows no others (Paddle 3.3.1). Seen of Momentum and of Adam with amsgrad.
    """
    others = {written_name(state) for states in kinds for state in states} - ADAM_STATES
    if not others:
        return ""
    return (
        f"the optimizer keeps {min(others)}, and this loader of the trainer knows Adam's states alone, also in its own "
        "files: it stops with an error; such a job needs --format hybrid-plain"
    )
