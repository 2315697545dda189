"""What can be asked of a dist checkpoint?"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import ClassVar

from paddle_reshard.pipeline.checkpoint.checkpoint import Checkpoint
from paddle_reshard.pipeline.checkpoint.format import Entries
from paddle_reshard.pipeline.core.errors import UsageError
from paddle_reshard.pipeline.core.topology import Topology
from paddle_reshard.pipeline.core.units import parse_count
from paddle_reshard.pipeline.core.upstream import DEFAULT_PADDLE
from paddle_reshard.pipeline.formats.flex.name import FLEX
from paddle_reshard.pipeline.formats.flex.rank_target import RankFlexTarget, check_strategy
from paddle_reshard.pipeline.formats.flex.target import FlexTarget
from paddle_reshard.pipeline.formats.jobs.request import JobRequest, layout_options


def parse_flex(
    auto_parallel: bool,
    files: int | str | None,
    paddle_version: str | None,
    names: Mapping[str, Mapping[str, str]] | None,
    of_jobs: Collection[str] = (),
) -> FlexTarget:
    """A dist checkpoint; ``None``: the default of :class:`FlexTarget`. ``names`` are those of its one cell.

    ``of_jobs``: options that were given and belong to a job, which has a topology.

    Raises
    ------
    UsageError
    """
    if of_jobs:
        option = min(of_jobs).replace("_", "-")
        raise UsageError(
            f"--{option} without --to: whole tensors, in files of no rank, are the same for every job"
        )
    if names is not None and len(names) != 1:
        raise UsageError(
            f"--target-meta names {len(names)} cells; auto-parallel training has the names of one program"
        )
    return FlexTarget(
        auto_parallel,
        None if files is None else parse_count(files),
        DEFAULT_PADDLE if paddle_version is None else paddle_version,
        None if names is None else next(iter(names.values())),
    )


@dataclass(frozen=True)
class RankFlexRequest(JobRequest):
    """A requested FlexCheckpoint whose files are those of the ranks of a job."""

    of_average: ClassVar[bool] = False
    format: ClassVar[str] = FLEX

    def target_for(self, source: Checkpoint) -> RankFlexTarget:
        """The target; settings not requested come from the source or the trainer's defaults."""
        return self.job_for(source, RankFlexTarget, check_strategy)


def parse_by_rank(
    to: str | Mapping[str, int] | Topology,
    strategy: str | None,
    layout: Entries | None,
    files: int | str | None,
    paddle_version: str | None,
) -> RankFlexRequest:
    """A FlexCheckpoint for a job of a topology; ``None``: as :class:`JobRequest` and ``LayoutOptions`` say.

    Raises
    ------
    UsageError
    """
    if files is not None:
        raise UsageError(f"--files {files} with --to: there is a file for every rank; omit one of the two")
    return RankFlexRequest(
        Topology.of(to),
        strategy,
        layout_options(layout),
        None,
        DEFAULT_PADDLE if paddle_version is None else paddle_version,
    )
