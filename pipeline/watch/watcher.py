"""Convert the checkpoints of a training run as they finish.

A watcher claims a conversion by creating the file of its next attempt. The creation is exclusive, also when the claim
of a dead process is taken over: only one of the watchers that want attempt 2 gets it. Only the owner of an attempt
rewrites its file. The decisions are divided among modules::

    records    files of the run and next to the targets             reads and writes
    looking    whether a checkpoint is complete                     reads
    finished   whether the trainer has finished writing it          pure
    claims     observations and earlier attempts → what to do       pure
    attempts   claim an attempt, run it, record its end             reads and writes
    publishing versions of converted checkpoints                    reads and writes
    notices    results → messages                                   pure

``Watcher`` calls them in turn, claims, converts and records.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace

from paddle_reshard.pipeline.convert.conversion import plan_with
from paddle_reshard.pipeline.convert.manifest import describe_targets
from paddle_reshard.pipeline.convert.options import ConversionOptions
from paddle_reshard.pipeline.core.errors import CheckpointError, ListingError, ReshardError, UsageError
from paddle_reshard.pipeline.core.outcome import Outcome
from paddle_reshard.pipeline.watch import notices
from paddle_reshard.pipeline.watch.attempts import Attempts
from paddle_reshard.pipeline.watch.claims import (
    CHECKPOINT,
    CLAIMS,
    Action,
    Attempt,
    Basis,
    Decision,
    Observation,
    Policy,
    State,
    compare_manifests,
    end_of,
    in_words,
    recorded_as,
    steps_of,
    superfluous,
)
from paddle_reshard.pipeline.watch.looking import Inspector
from paddle_reshard.pipeline.watch.notices import Notice, Notices, Result
from paddle_reshard.pipeline.watch.publishing import Publisher
from paddle_reshard.pipeline.watch.records import Records, digest
from paddle_reshard.pipeline.watch.runners import Conversion, Convert, convert_inline, publish_inline
from paddle_reshard.storage.formats.manifest import own_manifest
from paddle_reshard.storage.listing import CheckpointRoot, open_root
from paddle_reshard.storage.locate import comparable_path, source_access, target_access
from paddle_reshard.storage.session.holder import user_at_host

log = logging.getLogger(__name__)

EVENTS = {State.DONE: "converted", State.REFUSED: "refused", State.FAILED: "failed"}
"""How an attempt ended → the event of its outcome."""


@dataclass
class Watcher:
    """Checks a training run repeatedly and converts its checkpoints once they are complete."""

    run: CheckpointRoot
    out: CheckpointRoot
    conversion: Conversion
    convert: Convert
    policy: Policy
    versions: CheckpointRoot | None = None
    """Where converted checkpoints are published, if they are."""
    clock: Callable[[], float] = time.time
    notices: Notices = field(default_factory=Notices)
    tell: Callable[[Outcome], None] = lambda outcome: None
    """Called when a checkpoint is converted, refused, failed or stale."""
    _order: list[str] = field(default_factory=list)
    _compared: dict[str, tuple[Observation, Decision]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_locations(self.run.location, self.out.location)
        self.records = Records(self.run, self.out, self.conversion.identify)
        self.attempts = Attempts(self.records, self.policy, lambda: self.clock())
        self.publisher: Publisher | None = None
        if self.versions is not None:
            publish = publish_inline(self.conversion, self.versions.location)
            self.publisher = Publisher(self.attempts, self.versions, publish, self.notices)
        self.inspector = Inspector(self.records, self.conversion.settings.options, self.policy.settle_seconds)

    # ------------------------------------------------------------------------------------- one pass

    def once(self) -> dict[str, Result]:
        """Check every checkpoint once, oldest first, and convert those that are ready. Name → result."""
        found = steps_of(self.run.folders())
        if not found:
            nothing = f"{self.run.location}: no checkpoint-<step> folder yet"
            self.notices.give("", Notice(Result.WAITING, logging.WARNING, nothing))
        self._order = [name for _, name in found]
        results: dict[str, Result] = {}
        for name in self._wanted():
            try:
                results[name] = self._handle(name)
            except (OSError, ListingError) as error:
                message = f"{name}: {in_words(error)}; will be checked again"
                results[name] = self._give(name, Result.FAILED, logging.ERROR, message)
            if results[name] is Result.CONVERTED:
                self._settle(results)
        self._settle(results)
        return results

    def _settle(self, results: dict[str, Result]) -> None:
        """Publish what is due, and remove what ``--keep`` does not keep."""
        needed: set[str] = set()
        if self.publisher is not None:
            results |= self.publisher.update(self._order, results)
            needed = self.publisher.needed(self._order, results)
        self.prune(needed)

    def repeat(self, every_seconds: float) -> dict[str, Result]:
        """Repeat until interrupted or a checkpoint is stale. Returns the result of the last pass."""
        while True:
            try:
                results = self.once()
                if Result.STALE in results.values():
                    return results
            except (OSError, ListingError) as error:
                log.error("%s; next check in %.0f s", in_words(error), every_seconds)
            time.sleep(every_seconds)

    def _wanted(self) -> list[str]:
        """With ``--keep N``: the newest N checkpoints that have been converted or can be, and all newer ones."""
        if self.policy.keep is None:
            return self._order
        wanted: list[str] = []
        usable = 0
        for name in reversed(self._order):
            if usable < self.policy.keep:
                wanted.append(name)
                usable += self._usable(name)
            else:
                skipped = f"{name}: skipped, --keep {self.policy.keep} has newer checkpoints"
                self._give(name, Result.DONE, logging.INFO, skipped)
        return wanted[::-1]

    def _usable(self, name: str) -> bool:
        """Whether a checkpoint has been converted or can be."""
        action = self._decide(name)[0].action
        if action is Action.LOOK:
            try:
                return self.inspector.look(name, self._order, self.clock()) is None
            except ReshardError:
                return False
        return action is Action.NOTHING

    def _decide(self, name: str) -> tuple[Decision, Basis]:
        return self.attempts.decide(self.records.conversion_id(name), self.records.observe(name))

    def _handle(self, name: str) -> Result:
        """Decide what to do about a checkpoint, and do it."""
        decision, basis = self._decide(name)
        if decision.action is Action.COMPARE:
            decision = self._adopt(name, basis)
        notice = notices.of_decision(name, decision)
        if notice is not None:
            return self.notices.give(name, notice)
        try:
            incomplete = self.inspector.look(name, self._order, self.clock())
        except ReshardError as error:
            message = f"{name}: refused: {error}"
            if self.notices.messages.get(name) != message:
                self.tell(self._outcome("refused", name, error=str(error)))
            return self._give(name, Result.FAILED, logging.ERROR, message)
        if incomplete is not None:
            now, stale = self.clock(), self.policy.stale_seconds
            about = notices.of_incomplete(name, incomplete, now, stale)
            if about.result is Result.STALE:
                self.tell(self._outcome("stale", name, error=about.message))
            return self.notices.give(name, about)
        return self._claim_and_convert(name, basis)

    def _adopt(self, name: str, basis: Basis) -> Decision:
        """Decide about a target without a record, of a killed watcher or made by hand, from its manifest."""
        if self._compared.get(name, (None, None))[0] != basis.observation:
            self._compared[name] = (basis.observation, self._compare(name, basis))
        return self._compared[name][1]

    def _compare(self, name: str, basis: Basis) -> Decision:
        source, target = self.run.at(name), self.out.at(name)
        settings = self.conversion.settings
        options: ConversionOptions = {**settings.options, "overwrite": False}
        try:
            planned = plan_with(
                source,
                f"{target}.planned",
                replace(settings, options=options, run=replace(settings.run, resume=False)),
            )
        except CheckpointError as error:
            return Decision(Action.WAIT, str(error))
        except ReshardError as error:
            return Decision(Action.FAIL, str(error))
        wanted, found = describe_targets(planned)[""], self.records.manifest(name)
        decision = compare_manifests(wanted, found, target, self.policy.overwrite)
        if decision.action is Action.NOTHING:
            attempt = replace(self._next_attempt(name, basis), state=recorded_as(basis.attempts))
            if self.records.create(attempt):
                log.info("%s: converted already; recorded", name)
        return decision

    # ------------------------------------------------------------------------------------- converting

    def _next_attempt(self, name: str, basis: Basis) -> Attempt:
        return self.attempts.following(self.records.conversion_id(name), name, basis)

    def _claim_and_convert(self, name: str, basis: Basis) -> Result:
        attempt = self._next_attempt(name, basis)
        if not self.records.create(attempt):
            return self._not_claimed(name, basis)
        log.info("%s: converting (%s, attempt %d)", name, attempt.conversion_id, attempt.number)
        started = self.clock()
        ended = self.attempts.run(attempt, lambda: self._convert(name, attempt))
        seconds = self.clock() - started
        if ended.state in EVENTS:
            done = ended.state is State.DONE
            outcome = replace(
                self._outcome(EVENTS[ended.state], name, error=None if done else ended.reason),
                plan_id=ended.plan_id if done else None,
                root=self.records.root(name) if done else None,
                seconds=max(0.0, seconds),
            )
            self.records.note(outcome)
            self.tell(outcome)
        return self.notices.give(name, notices.of_attempt(name, ended, seconds))

    def _outcome(self, event: str, name: str, error: str | None = None) -> Outcome:
        source = None if event == "removed" else self.run.at(name)
        return Outcome(event, source, self.out.at(name), self.clock(), user_at_host(), error=error)

    def _not_claimed(self, name: str, basis: Basis) -> Result:
        """Another watcher was faster, or a file that is not a claim occupies the claim's path."""
        if self.records.attempts(self.records.conversion_id(name)) != list(basis.attempts):
            message = f"{name}: waiting: another watcher has just claimed it"
            return self._give(name, Result.WAITING, logging.INFO, message)
        where = self.out.at(f"{CLAIMS}/{self.records.conversion_id(name)}")
        message = f"{name}: not converted: {where}….json is not a claim; delete it if no watcher runs"
        return self._give(name, Result.FAILED, logging.ERROR, message)

    def _convert(self, name: str, attempt: Attempt) -> Attempt:
        """Run a claimed conversion. Returns the attempt after its end."""

        def changed() -> bool:
            return digest(self.run.files(name)) != attempt.source_stamp

        def check() -> None:
            if changed():
                raise CheckpointError("the trainer was still writing the checkpoint")

        error: Exception | None = None
        try:
            self.convert(self.run.at(name), self.out.at(name), check)
        except (ReshardError, OSError, MemoryError) as raised:
            error = raised
        plan_id = self.records.plan_id(name) if error is None else None
        ended = end_of(attempt, error, plan_id, self.clock())
        if ended.state is State.REFUSED and changed():
            return replace(ended, state=State.RELEASED)
        return ended

    # ------------------------------------------------------------------------------------- keeping

    def prune(self, needed: Collection[str] = ()) -> None:
        """Remove targets beyond ``--keep`` that a watcher made and that have not been replaced since.

        Targets that are ``needed`` stay.
        """
        if self.policy.keep is None:
            return
        latest = [attempts[-1] for attempts in self.records.all_attempts().values()]
        for attempt in latest:
            if attempt.state is State.REMOVING:
                self._remove(attempt)
        mine = {
            attempt.target: attempt
            for attempt in latest
            if attempt.state is State.DONE and attempt.plan_id == self.records.plan_id(attempt.target)
        }
        for name in superfluous(list(mine), self.policy.keep):
            if name not in needed:
                self._remove(mine[name])

    def _remove(self, attempt: Attempt) -> None:
        """Remove a target, and nothing else. If this is killed, the next pass completes the removal."""
        if self.records.plan_id(attempt.target) not in (None, attempt.plan_id):
            return
        where = self.out.at(attempt.target)
        removing = replace(attempt, state=State.REMOVING, reason=f"--keep {self.policy.keep}")
        self.records.write(removing)
        reason = self.out.remove(
            attempt.target, lambda manifest: (own_manifest(manifest) or {}).get("plan_id") == attempt.plan_id
        )
        if reason is None:
            self.records.write(replace(removing, state=State.REMOVED))
            log.info("%s: removed, --keep %s", where, self.policy.keep)
            self.records.note(replace(self._outcome("removed", attempt.target), plan_id=attempt.plan_id))
        else:
            self.records.write(replace(attempt, state=State.DONE, reason=""))
            message = f"{where}: not removed: {reason}"
            self._give(f"{attempt.target} kept", Result.DONE, logging.WARNING, message)

    def _give(self, name: str, result: Result, level: int, message: str) -> Result:
        return self.notices.give(name, Notice(result, level, message))


def check_locations(run: str, out: str) -> None:
    """Refuse target folders that overlap with the run, after resolving links."""
    run_path, out_path = comparable_path(run), comparable_path(out)
    if run_path == out_path:
        raise UsageError(f"{out}: converted checkpoints cannot be written into the run directory itself")
    for inner, outer, what in (
        (out_path, run_path, "a checkpoint of the run"),
        (run_path, out_path, "a converted checkpoint"),
    ):
        if outer in inner.parents and CHECKPOINT.fullmatch(inner.relative_to(outer).parts[0]):
            raise UsageError(f"{out if inner == out_path else run}: is inside {what}")


def open_watcher(
    run: str,
    out: str,
    conversion: Conversion,
    policy: Policy,
    convert: Convert | None = None,
    versions: str | None = None,
) -> Watcher:
    """A watcher of the checkpoints in ``run`` that converts them below ``out``, and publishes them to ``versions``."""
    reading, writing = source_access(conversion.settings.options), target_access(conversion.settings.options)
    return Watcher(
        open_root(run, *reading[:2]),
        open_root(out, *writing[:2]),
        conversion,
        convert or convert_inline(conversion),
        policy,
        None if versions is None else open_root(versions, *writing[:2]),
    )
