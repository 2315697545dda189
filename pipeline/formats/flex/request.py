"""What can be asked of a dist checkpoint?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from paddle_reshard.pipeline.checkpoint.checkpoint import Checkpoint
from paddle_reshard.pipeline.core.errors import UsageError
from paddle_reshard.pipeline.core.upstream import DEFAULT_PADDLE
from paddle_reshard.pipeline.formats.flex.format import FLEX
from paddle_reshard.pipeline.formats.flex.rank_target import RankFlexTarget, check_strategy
from paddle_reshard.pipeline.formats.flex.target import FlexTarget
from paddle_reshard.pipeline.formats.jobs.request import JobRequest


def parse_flex(format: str, asked: Mapping[str, Any]) -> FlexTarget:
    """A dist checkpoint of whole tensors; names of parameters are those of its one cell."""
    for option in ("layout", "sharding_strategy"):
        if asked.get(option):
            raise UsageError(
                f"--{option.replace('_', '-')} without --to: whole tensors, in files of no rank, are the same for "
                "every job"
            )
    names: Mapping[str, Mapping[str, str]] | None = asked.get("target_meta")
    if names is not None and len(names) != 1:
        raise UsageError(
            f"--target-meta names {len(names)} cells; auto-parallel training has the names of one program"
        )
    return FlexTarget(
        format,
        asked.get("files"),
        asked.get("paddle_version") or DEFAULT_PADDLE,
        None if names is None else next(iter(names.values())),
    )


@dataclass(frozen=True)
class RankFlexRequest(JobRequest):
    """A requested FlexCheckpoint whose files are those of the ranks of a job."""

    of_average: ClassVar[bool] = False
    of_stored_parameters: ClassVar[bool] = False
    format: ClassVar[str] = FLEX

    def target_for(self, source: Checkpoint) -> RankFlexTarget:
        """The target; settings not requested come from the source or the trainer's defaults."""
        return self.job_for(source, RankFlexTarget, check_strategy)


def parse_by_rank(asked: Mapping[str, Any]) -> RankFlexRequest:
    """A FlexCheckpoint for the ranks of a job."""
    if (files := asked.get("files")) is not None:
        raise UsageError(f"--files {files} with --to: there is a file for every rank; omit one of the two")
    return RankFlexRequest.of(asked)
