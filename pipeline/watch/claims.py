"""Decide from earlier attempts at a conversion what to do next.

An *attempt* is a small file next to the targets, created by one process: who, since when, how it ended. Everything
here is a function of such records and of observations; nothing is read or written.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import Enum
from typing import Annotated, Any

from paddle_reshard.pipeline.core.errors import ReshardError
from paddle_reshard.storage.formats.strict_json import JsonError, parse_json
from paddle_reshard.storage.formats.typed_json import Bounds, typed
from paddle_reshard.storage.local.source import kept_by_copies
from paddle_reshard.storage.session.holder import Holder

CLAIMS = ".paddle_reshard/claims"
LONGEST_BACKOFF_SECONDS = 3600.0
CHECKPOINT = re.compile(r"checkpoint-([0-9]{1,18})")


class State(str, Enum):
    """State of an attempt."""

    RUNNING = "running"
    DONE = "done"
    ADOPTED = "adopted"
    """The target was made by ``convert``, and equals the result of this conversion."""
    FAILED = "failed"
    """Failed, and may be retried: a full disk, a lost connection, a process that died."""
    REFUSED = "refused"
    """Refused; a retry is pointless until the source or the target changes."""
    RELEASED = "released"
    """Released without a result: interrupted, or the source changed during the conversion."""
    REMOVING = "removing"
    REMOVED = "removed"
    """Removed by ``--keep``, and not converted again."""


class Action(str, Enum):
    """What to do about a checkpoint."""

    LOOK = "look"
    """Index it, and convert it if it is complete."""
    COMPARE = "compare"
    """A target exists without a record: determine whether this conversion made it."""
    NOTHING = "nothing"
    """Done: converted, or removed by ``--keep``."""
    WAIT = "wait"
    """Another watcher converts it, or the next retry is not due."""
    FAIL = "fail"
    """Refused or given up; needs attention."""


@dataclass(frozen=True, slots=True)
class Policy:
    """Settings of a watcher."""

    keep: int | None = None
    """Number of converted targets to keep, the newest."""
    retries: int = 3
    """Number of retries after a failure."""
    backoff_seconds: float = 60.0
    """Pause before the first retry; doubles with each retry."""
    claim_timeout_seconds: float = 6 * 3600.0
    """Time without a heartbeat after which a claim of another machine is taken over."""
    settle_seconds: float = 60.0
    """Time for which a checkpoint must not change if its files do not prove that it is finished."""
    overwrite: bool = False
    """Whether to convert a checkpoint again that has changed since its conversion."""
    forget_before: float = 0.0
    """Failures and refusals before this time do not count; seconds since the epoch."""
    stale_seconds: float | None = None
    """Time without changes after which an incomplete checkpoint is given up, because its job has died."""
    heartbeat_seconds: float = 60.0
    """Pause between two heartbeats of a claim."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """A claim file."""

    conversion_id: str
    number: Annotated[int, Bounds(1)]
    target: str
    """Name of the target folder."""
    holder: Holder
    nonce: str
    state: State
    started_at: float
    seen_at: float
    """Last heartbeat, seconds since the epoch."""
    source_stamp: str
    target_stamp: str
    version: str
    plan_id: str = ""
    reason: str = ""

    def data(self) -> bytes:
        """As the JSON of its claim file."""
        return json.dumps(asdict(self), indent=1).encode()

    @classmethod
    def parse(cls, data: bytes) -> Attempt:
        """From the JSON of its claim file.

        Raises
        ------
        ValueError
            If it is not a claim, or its names, which become paths, would lead out of their folder.
        """
        try:
            attempt = typed(parse_json(data), cls)
        except JsonError as error:
            raise ValueError(f"not a claim: {error}") from error
        if "/" in attempt.conversion_id or not CHECKPOINT.fullmatch(attempt.target):
            raise ValueError(f"not a claim of a checkpoint: {attempt.target!r}, {attempt.conversion_id!r}")
        return attempt


@dataclass(frozen=True, slots=True)
class Observation:
    """What is known about a conversion without reading the checkpoint."""

    source_stamp: str
    target_stamp: str
    plan_id: str | None
    """Plan in the target's manifest; ``None`` without a manifest."""
    version: str


@dataclass(frozen=True, slots=True)
class Basis:
    """What a decision is based on. A claim made on this basis is for the attempt directly after these."""

    observation: Observation
    attempts: tuple[Attempt, ...]


class Cause(Enum):
    """The cause of a decision, where its message depends on it."""

    CLAIMED = "claimed"
    """Claimed by another process that is alive."""
    TOO_EARLY = "too early"
    """Waiting for the next retry."""
    SOURCE_CHANGED = "source changed"
    """Since it was converted."""


@dataclass(frozen=True, slots=True)
class Decision:
    """What to do, and why, for the log."""

    action: Action
    reason: str = ""
    cause: Cause | None = None


def decide(
    seen: Observation, attempts: Sequence[Attempt], gone: bool, policy: Policy, now: float
) -> Decision:
    """What to do about a checkpoint.

    Parameters
    ----------
    attempts
        All attempts at this conversion, ascending.
    gone
        Whether the process of the last attempt is known to have ended.
    now
        Seconds since the epoch.
    """
    last = attempts[-1] if attempts else None
    if last is not None and last.state is State.RUNNING and not gone:
        silent = now - last.seen_at
        if silent < policy.claim_timeout_seconds:
            where = f"process {last.holder.pid} on {last.holder.host}"
            return Decision(
                Action.WAIT, f"claimed by {where}, last heartbeat {silent:.0f} s ago", Cause.CLAIMED
            )
    if last is not None and (
        last.state is State.REMOVING or (last.state is State.REMOVED and seen.plan_id is None)
    ):
        return Decision(Action.NOTHING, "converted, and removed by --keep")
    if seen.plan_id is not None:
        decision = _decide_converted(seen, attempts, policy)
        if decision.action is not Action.LOOK:
            return decision
    return _decide_again(seen, attempts, gone, policy, now)


def _decide_converted(seen: Observation, attempts: Sequence[Attempt], policy: Policy) -> Decision:
    made = [a for a in attempts if a.state in (State.DONE, State.ADOPTED) and a.plan_id == seen.plan_id]
    if not made:
        return Decision(Action.COMPARE)
    if made[-1].source_stamp == seen.source_stamp:
        return Decision(Action.NOTHING, "converted")
    if policy.overwrite:
        return Decision(Action.LOOK, "the source has changed since it was converted", Cause.SOURCE_CHANGED)
    return Decision(
        Action.NOTHING,
        "converted, but the source has changed since; give --overwrite to convert it again",
        Cause.SOURCE_CHANGED,
    )


def _decide_again(
    seen: Observation, attempts: Sequence[Attempt], gone: bool, policy: Policy, now: float
) -> Decision:
    """What to do after earlier attempts at the same source."""
    same = [
        a
        for a in attempts
        if a.source_stamp == seen.source_stamp
        and a.state is not State.RELEASED
        and a.seen_at >= policy.forget_before
    ]
    if not same:
        return Decision(Action.LOOK)
    last = same[-1]
    unchanged = (last.target_stamp, last.version) == (seen.target_stamp, seen.version)
    if last.state is State.REFUSED and unchanged:
        return Decision(Action.FAIL, last.reason)
    failed = [a for a in same if a.state in (State.FAILED, State.RUNNING)]
    if len(failed) > policy.retries:
        return Decision(
            Action.FAIL,
            f"given up after {len(failed)} attempts: {last.reason or 'its process ended unexpectedly'}",
        )
    if last.state is State.FAILED:
        pause = min(policy.backoff_seconds * 2 ** (len(failed) - 1), LONGEST_BACKOFF_SECONDS)
        if now < last.seen_at + pause:
            remaining = last.seen_at + pause - now
            return Decision(Action.WAIT, f"retry in {remaining:.0f} s after: {last.reason}", Cause.TOO_EARLY)
    return Decision(Action.LOOK)


INCIDENTAL = (
    *("generation", "version", "additional_files", "digest", "plan_id", "etags", "parts", "source"),
    *("request", "target_number", "limits", "fingerprints"),
)
"""Entries of a manifest in which equal targets may differ. The request names options that change no byte."""


def compare_manifests(
    wanted: Mapping[str, Any], found: Mapping[str, Any], target: str, overwrite: bool
) -> Decision:
    """What to do about a target without a record, given the manifest that this conversion would write for it."""
    if _content(wanted) == _content(found):
        return Decision(Action.NOTHING, "converted")
    if overwrite:
        return Decision(Action.LOOK, "the target is the result of a different conversion")
    return Decision(
        Action.FAIL,
        f"{target} holds the result of a different conversion; use another folder, or --overwrite to replace it",
    )


def _content(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """The parts of a manifest that identify a target's contents, independent of the memory budget."""
    source = manifest.get("source") or {}
    versions = source.get("versions") or {}
    return {name: value for name, value in manifest.items() if name not in INCIDENTAL} | {
        "source": source.get("files"),
        "versions": {path: kept_by_copies(version) for path, version in versions.items()},
    }


# --------------------------------------------------------------------------------------------- attempts


def next_attempt(
    conversion_id: str, target: str, basis: Basis, holder: Holder, nonce: str, now: float
) -> Attempt:
    """The next attempt, running, held by ``holder``."""
    seen = basis.observation
    return Attempt(
        conversion_id=conversion_id,
        number=basis.attempts[-1].number + 1 if basis.attempts else 1,
        target=target,
        holder=holder,
        nonce=nonce,
        state=State.RUNNING,
        started_at=now,
        seen_at=now,
        source_stamp=seen.source_stamp,
        target_stamp=seen.target_stamp,
        version=seen.version,
        plan_id=seen.plan_id or "",
    )


def recorded_as(attempts: Sequence[Attempt]) -> State:
    """The state to record for a target without a record: ``DONE`` if a killed attempt made it."""
    last = attempts[-1] if attempts else None
    killed = last is not None and last.state is State.RUNNING and not last.target_stamp
    return State.DONE if killed else State.ADOPTED


def end_of(attempt: Attempt, error: Exception | None, plan_id: str | None, now: float) -> Attempt:
    """An attempt after its end, with an error or with the plan of its target."""
    if error is None and plan_id:
        return replace(attempt, state=State.DONE, reason="", plan_id=plan_id, seen_at=now)
    state, reason = State.FAILED, "the conversion ended without a target"
    if isinstance(error, ReshardError):
        state, reason = State.FAILED if error.retryable else State.REFUSED, str(error)
    elif error is not None:
        reason = in_words(error)
    return replace(attempt, state=state, reason=reason, plan_id="", seen_at=now)


def in_words(error: BaseException) -> str:
    """An error as a sentence."""
    return str(error) if isinstance(error, ReshardError) else f"{type(error).__name__}: {error}"


def steps_of(folders: Sequence[str]) -> list[tuple[int, str]]:
    """The checkpoints among folder names, ascending by step.

    >>> steps_of(["checkpoint-20", "runs", "checkpoint-3", "checkpoint-x"])
    [(3, 'checkpoint-3'), (20, 'checkpoint-20')]
    """
    return sorted((int(match[1]), name) for name in folders if (match := CHECKPOINT.fullmatch(name)))


def step_of(name: str) -> int:
    """The step of a checkpoint.

    >>> step_of("checkpoint-20")
    20
    """
    return int(name.removeprefix("checkpoint-"))


def superfluous(converted: Sequence[str], keep: int | None) -> list[str]:
    """The converted targets that ``--keep`` removes, oldest first."""
    ordered = [name for _, name in steps_of(converted)]
    return [] if keep is None else ordered[: max(0, len(ordered) - keep)]


# ----------------------------------------------------------------------------------------------- names


def conversion_id(identity: Mapping[str, Any]) -> str:
    """The id of a conversion: a hash of what decides its outcome.

    >>> conversion_id({"source": "/a", "target": "/b", "to": "tp=1"})
    'paddle-reshard-fee32f995f451960'
    """
    text = json.dumps(identity, sort_keys=True, separators=(",", ":"))
    return f"paddle-reshard-{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def claim_path(attempt: Attempt) -> str:
    """Path of the claim of an attempt."""
    number = "" if attempt.number == 1 else f".{attempt.number}"
    return f"{CLAIMS}/{attempt.conversion_id}{number}.json"
