"""When is an average updated, and what is left of it after its worker was lost? All here is a function of values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from paddle_reshard.pipeline.core.errors import CheckpointError, UsageError
from paddle_reshard.pipeline.core.file_names import AVERAGE
from paddle_reshard.tasks.ema import AverageProgress, Averaging


class Due(Enum):
    """Whether a training step is one to update at."""

    YES = "yes"
    BETWEEN = "between two updates"
    LOSS_TOO_HIGH = "loss too high"


@dataclass(frozen=True, slots=True)
class Rule:
    """At which steps an average is updated."""

    interval: int = 1
    """Those that it divides."""
    loss_threshold: float | None = None
    """Only while the loss is below it."""

    def __post_init__(self) -> None:
        if self.interval < 1:
            raise UsageError(f"interval {self.interval} must be at least 1")

    def due(self, step: int, loss: float | None) -> Due:
        """Whether ``step`` is one. A loss that is NaN is not below any threshold.

        >>> Rule(interval=4, loss_threshold=2.0).due(8, float("nan")).value
        'loss too high'

        Raises
        ------
        UsageError
            If there is a threshold and no loss.
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
    """Where an average stands: what is in it, what it owes, and what was asked of its worker."""

    progress: AverageProgress = AverageProgress()
    owed: tuple[float, ...] = ()
    """Decays of skipped updates; the next one makes up for them."""
    asked: int = 0
    """Updates that were asked of the worker since the average began, or was loaded."""

    def decays(self, averaging: Averaging) -> tuple[float, ...]:
        """The decays of the next update: those that are owed, and its own."""
        return (*self.owed, averaging.decay_at(self.progress.updates + len(self.owed)))

    def skipped(self, decays: tuple[float, ...]) -> Standing:
        """Where it stands after an update of these decays for which the worker was not ready."""
        return replace(self, owed=decays)

    def handed_over(self, step: int, decays: tuple[float, ...]) -> Standing:
        """Where it stands after one that was handed over at ``step``.

        >>> standing, warm = Standing(), Averaging(0.9, warm_up=True)
        >>> standing = standing.skipped(standing.decays(warm))
        >>> standing.handed_over(2, standing.decays(warm)).progress.updates
        2
        """
        return Standing(self.progress.after(step, decays), (), self.asked + 1)


class Recovery(Enum):
    """What becomes of an average whose worker was lost."""

    GO_ON = "goes on"
    REPEAT = "goes on, and the last update is asked for once more"
    BEGIN_ANEW = "was spoilt"


def recovery(begun: int, done: int, asked: int) -> Recovery:
    """What becomes of it, by how many updates the worker had begun, had done, and was asked for.

    What was handed over and not begun is still there; an update that was begun and not done has spoilt the average.
    """
    if begun != done:
        return Recovery.BEGIN_ANEW
    return Recovery.REPEAT if done < asked else Recovery.GO_ON


def progress_of(saved: Mapping[str, Any] | None, averaging: Averaging) -> AverageProgress:
    """How far a saved average has come, by its ``ema.json``; ``None``: the trainers' own files have none.

    Raises
    ------
    CheckpointError
        If it does not say so, or the average began in another way.
    """
    if saved is None:
        if averaging.start == "zero":
            raise CheckpointError(
                f"{AVERAGE} is missing, so the weight of what the average began with is not known; an average that "
                'starts at zero cannot go on (start="weights" takes it as whole)'
            )
        return AverageProgress(updates=1, start_weight=0.0)
    if saved.get("start") != averaging.start:
        raise CheckpointError(
            f"{AVERAGE}: the average started from {saved.get('start')!r}, not {averaging.start!r}"
        )
    try:
        return AverageProgress(int(saved["updates"]), int(saved["step"]), float(saved["start_weight"]))
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{AVERAGE}: does not say how far the average has come: {error!r}") from error
