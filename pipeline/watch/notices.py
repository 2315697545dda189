"""Messages of a watcher about checkpoints. Only news are logged."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from enum import Enum

from paddle_reshard.pipeline.watch.claims import Action, Attempt, Cause, Decision, State
from paddle_reshard.pipeline.watch.finished import Incomplete

log = logging.getLogger(__name__)


class Result(str, Enum):
    """Result of a checkpoint in one pass."""

    CONVERTED = "converted"
    DONE = "done"
    WAITING = "waiting"
    STALE = "stale"
    """Incomplete and unchanged for longer than ``Policy.stale_seconds``."""
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Notice:
    """Result of a checkpoint, with a sentence for the log."""

    result: Result
    level: int
    message: str
    key: str = ""
    """A notice is not logged if the previous one had the same key. Default: the message."""


def of_decision(name: str, decision: Decision, made: str = "converted") -> Notice | None:
    """The notice about a decision to do nothing; ``None`` for all others. ``made`` is what would have been done."""
    if decision.action is Action.NOTHING:
        level = logging.WARNING if decision.cause is Cause.SOURCE_CHANGED else logging.DEBUG
        return Notice(Result.DONE, level, f"{name}: {decision.reason}")
    if decision.action is Action.WAIT:
        key = "" if decision.cause is None else decision.cause.value
        return Notice(Result.WAITING, logging.INFO, f"{name}: waiting: {decision.reason}", key)
    if decision.action is Action.FAIL:
        return Notice(Result.FAILED, logging.ERROR, f"{name}: not {made}: {decision.reason}")
    return None


def of_incomplete(name: str, incomplete: Incomplete, now: float, stale_seconds: float | None) -> Notice:
    """The notice about an incomplete checkpoint."""
    since = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(incomplete.since))
    if incomplete.is_stale(now, stale_seconds):
        return Notice(
            Result.STALE,
            logging.ERROR,
            f"{name}: incomplete, and has not changed since {since}, longer than --stale allows; its job may "
            f"have died: {incomplete.reason}",
        )
    message = f"{name}: waiting: {incomplete.reason}; unchanged since {since}"
    return Notice(Result.WAITING, logging.INFO, message, f"waiting: {incomplete.reason} {since}")


def of_attempt(name: str, ended: Attempt, seconds: float, made: str = "converted") -> Notice:
    """The notice about an attempt that has ended. ``made`` is what it was for."""
    if ended.state is State.DONE:
        return Notice(Result.CONVERTED, logging.INFO, f"{name}: {made} in {seconds:.0f} s")
    if ended.state is State.RELEASED:
        return Notice(Result.WAITING, logging.INFO, f"{name}: waiting: {ended.reason}")
    return Notice(Result.FAILED, logging.ERROR, f"{name}: {ended.state.value}: {ended.reason}")


@dataclass
class Notices:
    """The latest notices."""

    messages: dict[str, str] = field(default_factory=dict)
    """Name of a checkpoint → latest message about it; ``""`` → about the run."""
    _keys: dict[str, str] = field(default_factory=dict)

    def give(self, name: str, notice: Notice) -> Result:
        """Log a notice unless it is the same as the previous one about the same checkpoint."""
        self.messages[name] = notice.message
        key = notice.key or notice.message
        if self._keys.get(name) != key:
            self._keys[name] = key
            log.log(notice.level, "%s", notice.message)
        return notice.result
