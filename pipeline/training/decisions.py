"""Decide when to update an average, and how to recover it after its worker was lost. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from paddle_reshard.pipeline.core.errors import CheckpointError, UsageError
from paddle_reshard.pipeline.core.file_names import AVERAGE
from paddle_reshard.tasks.ema import AverageProgress, Averaging


class Due(Enum):
    """Whether an update is due at a training step."""

    YES = "yes"
    BETWEEN = "between two updates"
    LOSS_TOO_HIGH = "loss too high"


@dataclass(frozen=True, slots=True)
class UpdateRule:
    """The steps at which an average is updated."""

    interval: int = 1
    """Update at multiples of it."""
    loss_threshold: float | None = None
    """Update only while the loss is below it."""

    def __post_init__(self) -> None:
        if self.interval < 1:
            raise UsageError(f"interval {self.interval} must be at least 1")

    def due(self, step: int, loss: float | None) -> Due:
        """Whether an update is due at ``step``. A NaN is not below any threshold.

        >>> UpdateRule(interval=4, loss_threshold=2.0).due(8, float("nan")).value
        'loss too high'
        """
        if step % self.interval:
            return Due.BETWEEN
        if self.loss_threshold is None:
            return Due.YES
        if loss is None:
            raise UsageError("a loss_threshold was given, so update needs the loss")
        return Due.YES if loss < self.loss_threshold else Due.LOSS_TOO_HIGH


@dataclass(frozen=True, slots=True)
class Standing:
    """State of an average: its progress, skipped updates, and updates requested of the worker."""

    progress: AverageProgress = AverageProgress()
    owed: tuple[float, ...] = ()
    """Decays of skipped updates, which the next update applies too."""
    requested: int = 0
    """Updates requested of the worker since the average started or was loaded."""

    def decays(self, averaging: Averaging) -> tuple[float, ...]:
        """The decays of the next update: those of skipped updates, and its own."""
        return (*self.owed, averaging.decay_at(self.progress.updates + len(self.owed)))

    def skipped(self, decays: tuple[float, ...]) -> Standing:
        """After an update with these decays for which the worker was not ready."""
        return replace(self, owed=decays)

    def handed_over(self, step: int, decays: tuple[float, ...]) -> Standing:
        """After an update handed over at ``step``.

        >>> standing, warm = Standing(), Averaging(0.9, warm_up=True)
        >>> standing = standing.skipped(standing.decays(warm))
        >>> standing.handed_over(2, standing.decays(warm)).progress.updates
        2
        """
        return Standing(self.progress.after(step, decays), (), self.requested + 1)


class Recovery(Enum):
    """How to continue an average whose worker was lost."""

    CONTINUE = "continue"
    REPEAT = "repeat the last request"
    RESTART = "restart the average"


def recovery(started: int, done: int, requested: int) -> Recovery:
    """How to continue, from the numbers of updates that the worker had started and done, and that were requested.

    An update that was handed over and not started is still in shared memory. One that was started and not done has
    destroyed the average.
    """
    if started != done:
        return Recovery.RESTART
    return Recovery.REPEAT if done < requested else Recovery.CONTINUE


def progress_of(saved: Mapping[str, Any] | None, averaging: Averaging) -> AverageProgress:
    """Progress of a saved average, from its ``ema.json``: ``None`` for the trainers' own files, which have none.

    An average that started in a different way is refused.
    """
    if saved is None:
        if averaging.start == "zero":
            raise CheckpointError(
                f"{AVERAGE} is missing, so the weight of the initial value is unknown and an average that starts at "
                'zero cannot continue; start="weights" assumes that it started with weights'
            )
        return AverageProgress(updates=1, start_weight=0.0)
    if saved.get("start") != averaging.start:
        raise CheckpointError(
            f"{AVERAGE}: the average started from {saved.get('start')!r}, not {averaging.start!r}"
        )
    try:
        return AverageProgress(int(saved["updates"]), int(saved["step"]), float(saved["start_weight"]))
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{AVERAGE}: the progress of the average is missing: {error!r}") from error
