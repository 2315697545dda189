"""What a watcher does about a checkpoint, decided from its record and what is seen. Nothing is read or written here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from paddle_reshard.pipeline.core.errors import ReshardError
from paddle_reshard.pipeline.core.version import __version__
from paddle_reshard.pipeline.indexing.finished import SETTLE_SECONDS
from paddle_reshard.pipeline.watch.notices import Notice, failed, skipped, waiting
from paddle_reshard.pipeline.watch.records import CheckpointRecord, Observation, State
from paddle_reshard.storage.local.source import kept_by_copies

LONGEST_BACKOFF_SECONDS = 3600.0


@dataclass(frozen=True, slots=True)
class Policy:
    """Settings of a watcher."""

    keep: int | None = None
    """Number of converted targets to keep, the newest."""
    retries: int = 3
    """Number of retries after a failure."""
    backoff_seconds: float = 60.0
    """Pause before the first retry; doubles with each retry."""
    settle_seconds: float = SETTLE_SECONDS
    """Time for which a checkpoint must not change if its files do not prove that it is finished."""
    overwrite: bool = False
    """Whether to convert a checkpoint again that has changed since its conversion."""
    forget_before: float = 0.0
    """Failures and refusals before this time do not count; seconds since the epoch."""
    stale_seconds: float | None = None
    """Time without changes after which an incomplete checkpoint is given up, because its job has died."""


class Action(Enum):
    """What to do about a checkpoint, if anything."""

    LOOK = "look"
    """Index it, and convert it if it is complete."""
    COMPARE = "compare"
    """A target exists that no record explains: determine whether this conversion made it."""


def decide(seen: Observation, record: CheckpointRecord, policy: Policy, now: float) -> Action | Notice:
    """What to do about a checkpoint, or why there is nothing to do."""
    if record.state is State.REMOVING or (record.state is State.REMOVED and seen.plan_id is None):
        return skipped("converted, and removed by --keep")
    counts = record.ended_at >= policy.forget_before
    if seen.plan_id is not None and record.plan_id == seen.plan_id:
        if record.made_of == seen.source_stamp:
            return skipped("converted")
        if not policy.overwrite:
            changed = "converted, but the source has changed since; give --overwrite to convert it again"
            return skipped(changed, alarming=True)
    elif seen.plan_id is not None and not (counts and _is_refused(record, seen)):
        return Action.COMPARE
    if not counts:
        return Action.LOOK
    if _is_refused(record, seen):
        return failed(record.reason)
    if record.state is State.FAILED:
        if record.failures > policy.retries:
            return failed(given_up(record))
        pause = min(policy.backoff_seconds * 2 ** (record.failures - 1), LONGEST_BACKOFF_SECONDS)
        if (left := record.ended_at + pause - now) > 0:
            return waiting(f"retry in {left:.0f} s after: {record.reason}", "too early")
    return Action.LOOK


def in_the_past(record: CheckpointRecord, policy: Policy, now: float) -> CheckpointRecord:
    """A record without times in the future, which a clock that was ahead wrote: they count as now.

    A failure in the future was before this watcher began, so it does not count where earlier ones are forgotten.
    """
    ended_at = record.ended_at
    if ended_at > now:
        ended_at = 0.0 if policy.forget_before else now
    return replace(
        record, since=min(record.since, now), ended_at=ended_at, looked_at=min(record.looked_at, now)
    )


def _is_refused(record: CheckpointRecord, seen: Observation) -> bool:
    """Whether a checkpoint was refused, and neither target nor this package has changed since."""
    at = record.target_stamp, record.version
    return record.state is State.REFUSED and at == (seen.target_stamp, __version__)


def given_up(record: CheckpointRecord) -> str:
    """Why a checkpoint is not tried again."""
    return f"given up after {record.failures} attempts: {record.reason or 'its process ended unexpectedly'}"


def begun(record: CheckpointRecord, before_died: bool = True) -> CheckpointRecord:
    """A record when an attempt begins. Another one that has not ended counts as failed if it must have died."""
    died = before_died and record.state is State.CONVERTING
    return replace(record, state=State.CONVERTING, failures=record.failures + died, reason="", looked_at=0.0)


def ended(
    record: CheckpointRecord, error: Exception | None, seen: Observation, now: float
) -> CheckpointRecord:
    """A record after an attempt, with an error or with the plan of its target."""
    if error is None and seen.plan_id is not None:
        done = replace(record, state=State.DONE, failures=0, reason="", ended_at=now)
        return made(done, seen.plan_id)
    if isinstance(error, ReshardError) and not error.retryable:
        return refused(record, str(error), seen, now)
    reason = "the conversion ended without a target" if error is None else in_words(error)
    return replace(record, state=State.FAILED, failures=record.failures + 1, reason=reason, ended_at=now)


def refused(record: CheckpointRecord, reason: str, seen: Observation, now: float) -> CheckpointRecord:
    """A record of a refusal, which stands until the source, the target or the version changes."""
    record = replace(record, state=State.REFUSED, reason=reason, ended_at=now)
    return replace(record, target_stamp=seen.target_stamp, version=__version__)


def made(record: CheckpointRecord, plan_id: str) -> CheckpointRecord:
    """A record of a target and of what it was made."""
    return replace(record, plan_id=plan_id, made_of=record.source_stamp)


def in_words(error: BaseException) -> str:
    """An error as a sentence."""
    return str(error) if isinstance(error, ReshardError) else f"{type(error).__name__}: {error}"


INCIDENTAL = (
    *("generation", "version", "additional_files", "digest", "plan_id", "etags", "parts", "source"),
    *("request", "target_number", "limits"),
)
"""Entries of a manifest in which equal targets may differ. The request names options that change no byte."""


def same_content(planned: Mapping[str, Any], published: Mapping[str, Any]) -> bool:
    """Whether two manifests are of the same target, made with any memory budget."""
    return _content(planned) == _content(published)


def _content(manifest: Mapping[str, Any]) -> dict[str, Any]:
    source = manifest.get("source") or {}
    versions = source.get("versions") or {}
    return {name: value for name, value in manifest.items() if name not in INCIDENTAL} | {
        "source": source.get("files"),
        "versions": {path: kept_by_copies(version) for path, version in versions.items()},
    }
