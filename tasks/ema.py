"""Exponential moving averages: the arithmetic, and how the decay changes during training.

``average = decay · average + (1 − decay) · values`` in float32, as the trainers' own callback computes it
(PaddleFormers 1.2 ``zero_cost_checkpoint.py``: both factors are rounded to float32, then each product, then the
sum).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from paddle_reshard.pipeline.core.choices import parse_choice
from paddle_reshard.pipeline.core.errors import UsageError

Floats = npt.NDArray[np.float32]
STARTS = ("weights", "zero")
BLOCK_ELEMENTS = 1 << 16
"""Elements averaged at a time: both operands and the product stay in the cache."""


@dataclass(frozen=True, slots=True)
class Averaging:
    """How values are averaged.

    Parameters
    ----------
    decay
        Weight of the average so far, in [0, 1).
    warm_up
        Let the decay grow with the number of updates ``n``: ``min(decay, (1 + n) / (10 + n))``.
    start
        ``"weights"``: the first update takes the values as they are. ``"zero"``: the average starts at zero, and
        readers divide it by the sum of the weights so far (:meth:`AverageProgress.correction`).
    """

    decay: float
    warm_up: bool = False
    start: str = "weights"

    def __post_init__(self) -> None:
        if not 0 <= self.decay < 1:
            raise UsageError(f"decay {self.decay} must be at least 0 and below 1")
        parse_choice(self.start, STARTS, "start")

    def decay_at(self, updates: int) -> float:
        """The decay of an update after ``updates`` earlier ones."""
        if updates == 0 and self.start == "weights":
            return 0.0
        return min(self.decay, (1 + updates) / (10 + updates)) if self.warm_up else self.decay


@dataclass(frozen=True, slots=True)
class AverageProgress:
    """The updates that an average contains. It is the same on every rank."""

    updates: int = 0
    """Number of updates."""
    step: int = 0
    """Training step of the last update."""
    start_weight: float = 1.0
    """Remaining weight of the initial value: the product of all decays."""

    def after(self, step: int, decays: tuple[float, ...]) -> AverageProgress:
        """The progress after one more update for each of ``decays``, the last at ``step``."""
        weight = self.start_weight
        for decay in decays:
            weight *= decay
        return AverageProgress(self.updates + len(decays), step, weight)

    def correction(self, averaging: Averaging) -> float:
        """The divisor that makes the weights of the average add up to one."""
        return 1.0 if averaging.start == "weights" else 1.0 - self.start_weight


def blend(average: Floats, values: Floats, decay: float, scratch: Floats | None = None) -> None:
    """Update ``average`` in place; both arrays are one-dimensional and contiguous.

    ``scratch`` has at least ``BLOCK_ELEMENTS`` elements. With a decay of zero the values are copied, even where the
    average is NaN or infinite.
    """
    if decay == 0.0:
        np.copyto(average, values)
        return
    scratch = np.empty(BLOCK_ELEMENTS, dtype=np.float32) if scratch is None else scratch
    keep, take = factors(decay)
    for start in range(0, len(average), BLOCK_ELEMENTS):
        block = average[start : start + BLOCK_ELEMENTS]
        mix(block, values[start : start + BLOCK_ELEMENTS], keep, take, scratch[: len(block)])


def factors(decay: float) -> tuple[np.float32, np.float32]:
    """The factors of the average so far and of the new values, in an update with this decay."""
    return np.float32(decay), np.float32(1 - decay)


def mix(mixed: Floats, values: Floats, keep: np.float32, take: np.float32, scratch: Floats) -> None:
    """``mixed = keep · mixed + take · values`` in place, rounding each product and the sum; all have the same shape."""
    np.multiply(values, take, out=scratch)
    np.multiply(mixed, keep, out=mixed)
    np.add(mixed, scratch, out=mixed)
