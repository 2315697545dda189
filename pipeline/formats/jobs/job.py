"""What a hybrid-parallel job decides about its files, whatever the model.

The planner of cells and the writer of files need no more of a target than this.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from paddle_reshard.pipeline.checkpoint.checkpoint import Checkpoint
from paddle_reshard.pipeline.checkpoint.training_job import TrainingJob, lora_of, precision_of
from paddle_reshard.pipeline.core.choices import MUON
from paddle_reshard.pipeline.core.tensors import MASTER_WEIGHT, PARAM
from paddle_reshard.pipeline.core.topology import Topology
from paddle_reshard.pipeline.core.upstream import DEFAULT_PADDLE
from paddle_reshard.pipeline.formats.sharding import DEFAULT_SEGMENT_ELEMENTS, ShardingOptions
from paddle_reshard.pipeline.model.optimizers import special_optimizer
from paddle_reshard.pipeline.model.rules.stages import Segmentation


@dataclass(frozen=True, slots=True)
class HybridJob:
    """The axes of a job, its sharding, and what else determines which rank writes what."""

    topology: Topology
    strategy: str
    strategy_reason: str = "as requested"
    """Why this strategy was chosen, as shown to the user."""
    sharded_saving: bool = True
    """Write what the trainer writes with sharded saving on: ``model_meta.json`` under stage 1."""
    sharding: ShardingOptions = field(default_factory=ShardingOptions)
    sequence_parallel: bool = False
    segmentation: Segmentation | None = None
    """Which layers go to which stage; ``None``: as both trainers' model classes do."""
    names: Mapping[str, Mapping[str, str]] | None = None
    """Cell → structured key → parameter name, taken from a job of the target topology."""
    expert_axis_beside_ep: str | None = None
    """``tp`` or ``dp``: distribute whole experts over the ranks of that axis; with ``ep`` > 1, ``ep`` does so."""
    unified_experts: bool = False
    """Use the unified layer of expert parallelism, in families that have two kinds."""
    paddle_version: str = DEFAULT_PADDLE
    """Paddle version that will read it, one of :data:`~paddle_reshard.pipeline.core.upstream.PADDLE_RELEASES`."""

    @property
    def format(self) -> str:
        """Name of the format of its files."""
        raise NotImplementedError

    def facts(self) -> dict[str, str]:
        """What tells it from other targets of the same source."""
        segment = self.sharding.segment_elements
        other = self.strategy == "stage3" and segment != DEFAULT_SEGMENT_ELEMENTS
        return {
            "topology": str(self.topology),
            "sharding_strategy": self.strategy,
            "paddle_version": self.paddle_version,
            **({"stage3_segment_size": str(segment)} if other else {}),
        }

    def job(self, source: Checkpoint) -> TrainingJob:
        """The job of this topology that goes on training the source."""
        tensors = source.catalog.tensors
        dtypes = {dtype.name for dtype in tensors.dtypes_of(PARAM)}
        return TrainingJob(
            source.model.table.library,
            self.format,
            self.topology,
            self.strategy,
            self.sharding.comm_overlap,
            self.topology.tp > 1 and self.sequence_parallel,
            muon=special_optimizer(source.model) == MUON,
            experts_over_dp=self.expert_axis == "dp",
            recipe=source.model.table.recipe,
            switches=source.model.recipe_switches,
            precision=precision_of(dtypes, source.adapter),
            master_weights=MASTER_WEIGHT in tensors.states,
            **lora_of(source.adapter),
        )

    @property
    def expert_axis(self) -> str | None:
        """The axis over which whole experts are distributed; ``None``: every rank has all of them."""
        if self.topology.ep > 1:
            return "ep"
        ranks = {"tp": self.topology.tp, "dp": self.topology.dp, None: 1}[self.expert_axis_beside_ep]
        return self.expert_axis_beside_ep if ranks > 1 else None

    @property
    def expert_ranks(self) -> int:
        """Number of ranks over which whole experts are distributed."""
        axis = self.expert_axis
        return 1 if axis is None else int(getattr(self.topology, axis))

    @property
    def cells_per_tp_rank(self) -> int:
        """Number of cells per tp rank of a stage; each has its own experts."""
        return self.topology.dp if self.expert_axis == "dp" else self.topology.dense_sharding

    @property
    def writes_meta(self) -> bool:
        """Whether the trainer would write ``model_meta.json``: stage 1 with sharded saving."""
        return self.sharded_saving and self.strategy.startswith("stage1")
