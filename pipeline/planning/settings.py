"""Settings of a plan: memory, sizes, and what is allowed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

STEP_BYTES = 4 << 20
"""Both sides of a step of each of a few workers fit the third-level cache."""


@dataclass(frozen=True, slots=True)
class PlanSizes:
    """Sizes in bytes that a plan aims at, within the budget; no byte of a target depends on them."""

    group_bytes: int = 64 << 20
    """Small tensors are gathered into groups of about this peak."""
    pass_bytes: int = 8 << 20
    """What a group may always read at a time, however large its parts are."""
    fill_bytes: int = 16 << 20
    """Longer ranges of literal bytes or zeros become parts of their own."""
    step_bytes: int | None = None
    """What a group that only compares reads at a time; ``None`` for as much as a group may hold."""

    def in_steps(self) -> PlanSizes:
        """For comparisons of files that answer at once: what they read is compared while a processor's cache has it."""
        return self if self.step_bytes is not None else replace(self, step_bytes=STEP_BYTES)


class Tie(NamedTuple):
    """Another tensor that is the same one to the model."""

    key: str
    by_class: bool
    """Whether its class makes it so; otherwise an entry of the config does."""


@dataclass(frozen=True, slots=True)
class PlanSettings:
    """How a conversion or a comparison is to be planned."""

    budget_bytes: int
    """Memory of a worker, including its own overhead."""
    compare_replicas: bool = True
    """Whether all copies of a tensor are compared; if not, only the first is read."""
    allow_replica_drift: bool = False
    """Whether copies that differ are reported instead of refused."""
    tied: Mapping[str, Tie] = field(default_factory=dict)
    """Key → another tensor that is one with it and no copy of it. They are compared, and refused if they differ,
    whatever is said of copies."""
    allow_master_drift: bool = False
    """Whether parameters that differ from their rounded master weights are reported instead of refused."""
    sizes: PlanSizes = PlanSizes()
