"""Options of a hybrid-parallel target."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from paddle_reshard.pipeline.checkpoint.checkpoint import Checkpoint
from paddle_reshard.pipeline.formats.hybrid.format import HYBRID, HYBRID_PLAIN
from paddle_reshard.pipeline.formats.hybrid.target import HybridTarget
from paddle_reshard.pipeline.formats.jobs.request import JobRequest


@dataclass(frozen=True)
class HybridRequest(JobRequest):
    """A requested hybrid-parallel target."""

    of_average: ClassVar[bool] = False
    of_stored_parameters: ClassVar[bool] = False

    sharded_saving: bool = True
    """Whether it may have ``model_meta.json``."""

    @property
    def format(self) -> str:
        """Name of the format: with or without ``model_meta.json``."""
        return HYBRID if self.sharded_saving else HYBRID_PLAIN

    def target_for(self, source: Checkpoint) -> HybridTarget:
        """The target; settings not requested come from the source or the trainer's defaults."""
        return self.job_for(source, partial(HybridTarget, sharded_saving=self.sharded_saving))
