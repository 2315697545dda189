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
