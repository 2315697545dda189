"""A requested job: its topology, its sharding, and what else its files depend on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, TypeVar

from paddle_reshard.pipeline.checkpoint.checkpoint import Checkpoint
from paddle_reshard.pipeline.checkpoint.format import Entries
from paddle_reshard.pipeline.core.errors import PlanError, UnsupportedError, UsageError
from paddle_reshard.pipeline.core.limits import MAX_BUFFER_MB, MAX_ELEMENTS
from paddle_reshard.pipeline.core.topology import Topology
from paddle_reshard.pipeline.core.upstream import DEFAULT_PADDLE, paddle_release
from paddle_reshard.pipeline.formats.jobs.checks import check_target, default_strategy
from paddle_reshard.pipeline.formats.jobs.job import HybridJob
from paddle_reshard.pipeline.formats.sharding import DEFAULT_SEGMENT_ELEMENTS, ShardingOptions
from paddle_reshard.storage.documents.typed_json import Bounds, EntryError, typed

Job = TypeVar("Job", bound=HybridJob)
_Request = TypeVar("_Request", bound="JobRequest")


@dataclass(frozen=True, slots=True)
class LayoutOptions:
    """Settings of the target job that its topology does not determine; ``None``: the source's or the trainer's."""

    comm_buffer_size_MB: Annotated[int, Bounds(1, MAX_BUFFER_MB)] | None = None
    """Stage 1 v2: ``sharding_comm_buffer_size_MB``; the trainer's default is 256."""
    comm_overlap: bool | None = None
    """Stage 1 v2 with pp > 1: ``sharding_comm_overlap``; default off, buffers of 128 MB when on."""
    sort_parameters: bool | None = None
    """Stage 1 v1: ``FLAGS_sharding_sort_parameters``; default on."""
    sequence_parallel: bool | None = None
    """Default: as the source; off if the source does not determine it."""
    segmentation: str | tuple[int, ...] | None = None
    """``"uniform"``, ``"layer:Regex"`` or a list of item numbers; default: as the model class does."""
    stage3_segment_size: Annotated[int, Bounds(0, MAX_ELEMENTS)] | None = None
    """Elements above which stage 3 cuts a parameter, 0 to cut every one; the trainer's default is 2**20."""
    experts_over_tp: bool | None = None
    """Families with a choice (ernie4_5_moe, ``moe_group``): distribute whole experts over tp ranks; default: as the
    source; if its tp is 1, as the trainer: on."""
    use_unified_moe: bool | None = None
    """Families with a choice (glm4_moe): the unified layer of expert parallelism; default: as the source, else off."""
    convention: str | None = None
    """``"paddleformers"`` or ``"paddlenlp"``; default: the source's."""

    @classmethod
    def parse(cls, values: Mapping[str, Any], where: str) -> LayoutOptions:
        """Parse a JSON object; raises a ``UsageError`` that begins with ``where``."""
        try:
            return typed(dict(values), cls)
        except EntryError as error:
            raise UsageError(f"{where}: {error}") from error


@dataclass(frozen=True)
class JobRequest:
    """A requested job, for formats whose targets are jobs."""

    topology: Topology
    strategy: str | None
    """``None``: as the source if the target can use it, otherwise the trainer's default."""
    layout: LayoutOptions
    names: Mapping[str, Mapping[str, str]] | None
    """Cell → structured key → parameter name of the target job, if given."""
    paddle_version: str = DEFAULT_PADDLE
    """Paddle version that will read it, one of :data:`~paddle_reshard.pipeline.core.upstream.PADDLE_RELEASES`."""

    def __post_init__(self) -> None:
        paddle_release(self.paddle_version)

    @classmethod
    def of(cls: type[_Request], asked: Mapping[str, Any], **own: Any) -> _Request:
        """The request of a format's options, as :meth:`Format.request` takes them, and of ``own`` fields."""
        layout: Entries | None = asked.get("layout")
        return cls(
            topology=Topology.of(asked.get("to") or ""),
            strategy=asked.get("sharding_strategy"),
            layout=LayoutOptions() if layout is None else LayoutOptions.parse(layout.values, layout.where),
            names=asked.get("names"),
            paddle_version=asked.get("paddle_version") or DEFAULT_PADDLE,
            **own,
        )

    def job_for(
        self,
        source: Checkpoint,
        kind: Callable[..., Job],
        check: Callable[[HybridJob], None] = check_target,
    ) -> Job:
        """The settings of the target job; those not requested come from the source or the trainer's defaults.

        If the trainer allows only one value (under expert parallelism), that is the default. ``kind`` makes the job of
        its settings; ``check`` refuses sharding strategies that are no default.
        """
        layout, topology = self.layout, self.topology
        convention = source.model.table.convention
        if layout.convention not in (None, convention):
            raise UnsupportedError(
                f"layout: convention is {layout.convention!r}, the source's is {convention!r}; to translate it, use "
                f"--convention {layout.convention}"
            )
        over = self._expert_axis_beside_ep(source)
        unified = source.job.unified_experts if layout.use_unified_moe is None else layout.use_unified_moe
        job = kind(
            topology=replace(topology, ep=1) if over == "dp" else topology,
            strategy=self.strategy or "none",
            sharding=self._sharding(),
            sequence_parallel=self._sequence_parallel(source, over),
            segmentation=layout.segmentation,
            names=self.names,
            expert_axis_beside_ep=over,
            unified_experts=bool(unified),
            paddle_version=self.paddle_version,
        )
        if self.strategy:
            return job
        strategy, reason = default_strategy(job, source, check)
        return replace(job, strategy=strategy, strategy_reason=reason)

    def _sharding(self) -> ShardingOptions:
        layout, overlap = self.layout, bool(self.layout.comm_overlap)
        segment = layout.stage3_segment_size
        return ShardingOptions(
            buffer_bytes=(layout.comm_buffer_size_MB or (128 if overlap else 256)) << 20,
            comm_overlap=overlap,
            sort_parameters=layout.sort_parameters is not False,
            segment_elements=DEFAULT_SEGMENT_ELEMENTS if segment is None else segment,
        )

    def _sequence_parallel(self, source: Checkpoint, over: str | None) -> bool:
        """As requested, else as the source or as experts over ep require; ``over``: their axis beside ep."""
        if self.layout.sequence_parallel is not None:
            return self.layout.sequence_parallel
        experts_require = self.topology.ep > 1 and self.topology.tp > 1 and over is None
        return bool(source.job.sequence_parallel) or experts_require

    def _expert_axis_beside_ep(self, source: Checkpoint) -> str | None:
        """The axis other than ``ep`` over which the target's experts are distributed.

        PaddleNLP has no axis for experts: they are distributed over data-parallel ranks.
        """
        asked, topology = self.layout.experts_over_tp, self.topology
        if source.model.table.convention == "paddlenlp" and topology.ep > 1:
            if topology.ep != topology.dp:
                raise PlanError(
                    f"ep={topology.ep} with dp={topology.dp}: PaddleNLP distributes experts over data-parallel "
                    "ranks, so both must be equal"
                )
            return "dp"
        by_default = source.model.table.expert_axis == "tp" and (
            source.job.expert_axis == "tp" or source.job.topology is None or source.job.topology.tp == 1
        )
        return "tp" if (by_default if asked is None else asked) else None
