"""The job that reads a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass

from paddle_reshard.pipeline.core.topology import Topology


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


def naming_arguments(topology: Topology, sequence_parallel: bool) -> str:
    """The arguments of the trainer that are not its defaults and that parameter names depend on; empty: there are none.

    The sizes of axes are in the names of the files too, so that no job mistakes them.

    >>> naming_arguments(Topology(tp=2, sharding=2, ep=2), sequence_parallel=True)
    '--sequence_parallel true --use_expert_parallel true'
    """
    of_sequence = ["--sequence_parallel true"] if topology.tp > 1 and sequence_parallel else []
    return " ".join([*of_sequence, *(["--use_expert_parallel true"] if topology.ep > 1 else [])])
