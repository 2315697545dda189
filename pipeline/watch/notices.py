"""Messages of a watcher about checkpoints. Only news are logged."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from enum import Enum

from paddle_reshard.pipeline.indexing.finished import Incomplete

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
    """Result of a checkpoint, with a sentence for the log, which its name precedes."""

    result: Result
    level: int
    message: str
    key: str = ""
    """A notice is not logged if the previous one had the same key. Default: the message."""


def skipped(reason: str, alarming: bool = False) -> Notice:
    """There is nothing to do."""
    return Notice(Result.DONE, logging.WARNING if alarming else logging.DEBUG, reason)


def waiting(reason: str, key: str = "") -> Notice:
    """It will be tried later."""
    return Notice(Result.WAITING, logging.INFO, f"waiting: {reason}", key)


def failed(reason: str, before: str = "not converted: ") -> Notice:
    """It needs attention."""
    return Notice(Result.FAILED, logging.ERROR, f"{before}{reason}")


def of_incomplete(incomplete: Incomplete, now: float, stale_seconds: float | None) -> Notice:
    """The notice about an incomplete checkpoint."""
    since = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(incomplete.since))
    if incomplete.is_stale(now, stale_seconds):
        return Notice(
            Result.STALE,
            logging.ERROR,
            f"incomplete, and has not changed since {since}, longer than --stale allows; its job may have died: "
            f"{incomplete.reason}",
        )
    if incomplete.damaged:
        marked = f"damaged: it is marked as finished, and has not changed since {since}: {incomplete.reason}"
        return failed(marked, "")
    return waiting(f"{incomplete.reason}; unchanged since {since}")


@dataclass
class Notices:
    """The latest notices."""

    messages: dict[str, str] = field(default_factory=dict)
    """Name of a checkpoint → latest message about it; ``""`` → about the run."""
    _keys: dict[str, str] = field(default_factory=dict)

    def give(self, name: str, notice: Notice, about: str | None = None) -> Result:
        """Log a notice unless it is the same as the previous one ``about`` the same thing, by default the name."""
        about = name if about is None else about
        self.messages[about] = message = f"{name}: {notice.message}"
        key = notice.key or message
        if self._keys.get(about) != key:
            self._keys[about] = key
            log.log(notice.level, "%s", message)
        return notice.result
