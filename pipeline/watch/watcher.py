"""Convert the checkpoints of a training run as they finish: a loop over ``convert --resume``.

Several watchers may work on one folder. Which of them converts a checkpoint is decided by the lock of the conversion;
the others wait, and find the target finished, which its manifest says. What survives a watcher are small records
(:mod:`~paddle_reshard.pipeline.watch.records`): since when a checkpoint has not changed, which attempts have failed,
what ``--keep`` may remove.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace

from paddle_reshard.pipeline.convert.conversion import plan_with
from paddle_reshard.pipeline.convert.manifest import describe_targets
from paddle_reshard.pipeline.core.errors import (
    BusyError,
    CheckpointError,
    ListingError,
    ReshardError,
    TargetError,
    UsageError,
)
from paddle_reshard.pipeline.core.outcome import Outcome
from paddle_reshard.pipeline.core.trainer_files import CHECKPOINT, steps_of
from paddle_reshard.pipeline.progress.stream import Checked
from paddle_reshard.pipeline.request.parse import locations_of
from paddle_reshard.pipeline.watch.decisions import (
    Action,
    Policy,
    begun,
    decide,
    ended,
    given_up,
    in_the_past,
    in_words,
    made,
    refused,
    same_content,
)
from paddle_reshard.pipeline.watch.looking import Inspector
from paddle_reshard.pipeline.watch.notices import (
    Notice,
    Notices,
    Result,
    failed,
    of_incomplete,
    skipped,
    waiting,
)
from paddle_reshard.pipeline.watch.records import CheckpointRecord, Observation, Records, State, digest
from paddle_reshard.pipeline.watch.runners import Conversion, Convert, convert_inline
from paddle_reshard.storage.documents.manifest import own_manifest
from paddle_reshard.storage.listing import open_root
from paddle_reshard.storage.locate import comparable_path
from paddle_reshard.storage.session.holder import user_at_host

log = logging.getLogger(__name__)

BUSY = "busy"
"""Key of notices about a checkpoint that another watcher converts."""
EVENTS = {State.DONE: "converted", State.REFUSED: "refused", State.FAILED: "failed"}
"""How an attempt ended → the event of its outcome."""


class Watcher:
    """Checks a training run repeatedly and converts its checkpoints once they are complete.

    Parameters
    ----------
    run, out
        Folder or URL of the checkpoints, and of what they are converted to.
    convert
        Default: in this process.
    """

    def __init__(
        self,
        run: str,
        out: str,
        conversion: Conversion,
        policy: Policy,
        convert: Convert | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        folders = locations_of((run,), out, conversion.request)
        self.run = open_root(run, folders.reading.options)
        self.out = open_root(out, folders.writing.options)
        check_locations(self.run.location, self.out.location)
        self.conversion, self.policy, self.clock = conversion, policy, clock
        self.convert = convert or convert_inline(conversion)
        self.notices = Notices()
        self.records = Records(self.run, self.out, conversion.identify)
        self.inspector = Inspector(self.records, conversion.request.options, policy.settle_seconds)
        self.tell: Callable[[Outcome | Checked], None] = lambda event: None
        """Called when a checkpoint is converted, refused, failed or stale, and after each pass."""
        self._order: list[str] = []
        self._held: set[str] = set()
        """Checkpoints that another watcher converts, or that will be tried again."""

    # ------------------------------------------------------------------------------------- one pass

    def once(self) -> dict[str, Result]:
        """Check every checkpoint once, oldest first, and convert those that are ready. Name → result."""
        self._order = [name for _, name in steps_of(self.run.folders())]
        if not self._order:
            nothing = Notice(Result.WAITING, logging.WARNING, "no checkpoint-<step> folder yet")
            self.notices.give(self.run.location, nothing, about="")
        self._held = set()
        results: dict[str, Result] = {}
        for name in self._wanted():
            try:
                results[name] = self._handle(name)
            except (OSError, ListingError) as error:
                notice = failed(f"{in_words(error)}; will be checked again", "")
                results[name] = self.notices.give(name, notice)
            if results[name] is Result.CONVERTED:
                self.prune()
        self.prune()
        self.tell(Checked({name: result.value for name, result in results.items()}))
        return results

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
                newer = f"skipped, --keep {self.policy.keep} has newer checkpoints"
                self.notices.give(name, Notice(Result.DONE, logging.INFO, newer))
        return wanted[::-1]

    def _usable(self, name: str) -> bool:
        """Whether a checkpoint has been converted or can be."""
        decision = self._decide(name)[0]
        if decision is Action.LOOK:
            try:
                return self.inspector.look(name, self._order, self.clock()) is None
            except ReshardError:
                return False
        return isinstance(decision, Notice) and decision.result is Result.DONE

    def _decide(self, name: str) -> tuple[Action | Notice, Observation, CheckpointRecord]:
        seen = self.records.observe(name)
        now = self.clock()
        record = self.records.read(name, seen.source_stamp, now)
        past = in_the_past(record, self.policy, now)
        if past != record:  # time has to pass since then, in the passes to come
            self.records.write(past)
        return decide(seen, past, self.policy, now), seen, past

    def _handle(self, name: str) -> Result:
        """Decide what to do about a checkpoint, and do it."""
        decision, seen, record = self._decide(name)
        if decision is Action.COMPARE:
            decision = self._compare(name, seen, record)
        if isinstance(decision, Notice):
            if decision.result is Result.WAITING:
                self._held.add(name)
            return self.notices.give(name, decision)
        try:
            incomplete = self.inspector.look(name, self._order, self.clock())
        except ListingError:  # of the records, or the run: no word about the checkpoint
            raise
        except ReshardError as error:
            notice = failed(str(error), "refused: ")
            if self._is_news(name, notice):
                self.tell(self._outcome("refused", name, error=str(error)))
            return self.notices.give(name, notice)
        if incomplete is not None:
            about = of_incomplete(incomplete, self.clock(), self.policy.stale_seconds)
            if about.result is Result.STALE:
                self.tell(self._outcome("stale", name, error=about.message))
            elif about.result is Result.FAILED and self._is_news(name, about):
                self.tell(self._outcome("refused", name, error=about.message))
            return self.notices.give(name, about)
        return self._convert(name, record)

    def _is_news(self, name: str, notice: Notice) -> bool:
        return self.notices.messages.get(name) != f"{name}: {notice.message}"

    def _compare(self, name: str, seen: Observation, record: CheckpointRecord) -> Action | Notice:
        """Decide about a target that no record explains, of a killed watcher or made by hand, from its manifest."""
        target, request = self.out.at(name), self.conversion.request
        request = replace(request, options={**request.options, "overwrite": False}, resume=False)
        try:
            if (incomplete := self.inspector.look(name, self._order, self.clock())) is not None:
                return waiting(incomplete.reason)
            planned = plan_with(locations_of((self.run.at(name),), f"{target}.planned", request), request)
            if not same_content(describe_targets(planned)[""], self.records.manifest(name)):
                if self.policy.overwrite:
                    return Action.LOOK
                raise TargetError(
                    f"{target} holds the result of a different conversion; use another folder, or --overwrite to "
                    "replace it"
                )
        except ReshardError as error:
            if not error.retryable:  # so that the next pass knows it without planning again
                self.records.write(refused(record, str(error), seen, self.clock()))
            return failed(str(error))
        state = State.DONE if record.state is State.CONVERTING else State.ADOPTED  # of a killed watcher
        self.records.write(made(replace(record, state=state), seen.plan_id or ""))
        log.info("%s: converted already; recorded", name)
        return skipped("converted")

    # ------------------------------------------------------------------------------------- converting

    def _convert(self, name: str, record: CheckpointRecord) -> Result:
        """Convert a checkpoint, unless another watcher does, and record how that ended."""
        current, started = record, self.clock()

        def begin(before_died: bool) -> None:
            nonlocal current
            current = begun(self.records.read(name, record.source_stamp, self.clock()), before_died)
            if current.failures > self.policy.retries:
                raise TargetError(given_up(current))
            self.records.write(current)
            log.info(
                "%s: converting%s", name, f", attempt {current.failures + 1}" if current.failures else ""
            )

        def changed() -> bool:
            return digest(self.run.files(name)) != record.source_stamp

        def check() -> None:
            if changed():
                raise CheckpointError("the trainer was still writing the checkpoint")

        error: Exception | None = None
        try:
            self.convert(self.run.at(name), self.out.at(name), begin, check)
        except BusyError as busy:
            self._held.add(name)
            return self.notices.give(name, waiting(str(busy), BUSY))
        except (ReshardError, OSError, MemoryError) as raised:
            error = raised
        except KeyboardInterrupt:
            self._release(record, current)
            raise
        if isinstance(error, ReshardError) and not error.retryable and changed():
            self._release(record, current)
            return self.notices.give(name, waiting(str(error)))
        if error is None and (current is record or self._is_done(name, started)):
            return self.notices.give(name, skipped("converted"))  # by another watcher, in the meantime
        return self._record(name, ended(current, error, self.records.observe(name), self.clock()), started)

    def _release(self, before: CheckpointRecord, current: CheckpointRecord) -> None:
        """Record that an attempt does not count, if it has begun."""
        if current is not before:
            self.records.write(replace(current, state=State.SEEN))

    def _is_done(self, name: str, since: float) -> bool:
        """Whether another watcher, which followed the same job, has recorded its end."""
        record = self.records.read(name, "", self.clock())
        return record.plan_id == self.records.plan_id(name) is not None and record.ended_at > since

    def _record(self, name: str, record: CheckpointRecord, started: float) -> Result:
        """Record and report an attempt that has ended."""
        self.records.write(record)
        seconds, done = max(0.0, self.clock() - started), record.state is State.DONE
        outcome = replace(
            self._outcome(EVENTS[record.state], name, error=None if done else record.reason),
            plan_id=record.plan_id if done else None,
            seconds=seconds,
        )
        self.records.note(outcome)
        self.tell(outcome)
        if done:
            return self.notices.give(
                name, Notice(Result.CONVERTED, logging.INFO, f"converted in {seconds:.0f} s")
            )
        return self.notices.give(name, failed(record.reason, f"{record.state.value}: "))

    def _outcome(self, event: str, name: str, error: str | None = None) -> Outcome:
        source = None if event == "removed" else self.run.at(name)
        return Outcome(event, source, self.out.at(name), self.clock(), user_at_host(), error=error)

    # ------------------------------------------------------------------------------------- keeping

    def prune(self) -> None:
        """Remove targets beyond ``--keep`` that a watcher made and that have not been replaced since."""
        if self.policy.keep is None:
            return
        mine: dict[str, tuple[str, CheckpointRecord]] = {}
        for path, record in self.records.all().items():
            if record.state is State.REMOVING:
                self._remove(path, record)
            elif record.state is State.DONE and record.plan_id == self.records.plan_id(record.target):
                mine[record.target] = path, record
        for _, name in steps_of([*mine])[: -self.policy.keep]:
            self._remove(*mine[name])

    def _remove(self, path: str, record: CheckpointRecord) -> None:
        """Remove a target, and nothing else. If this is killed, the next pass completes the removal."""
        name = record.target
        if self.records.plan_id(name) not in (None, record.plan_id):
            return
        self.records.replace(path, replace(record, state=State.REMOVING))
        reason = self.out.remove(
            name, lambda data: (own_manifest(data) or {}).get("plan_id") == record.plan_id
        )
        if reason is None:
            self.records.replace(path, replace(record, state=State.REMOVED))
            log.info("%s: removed, --keep %s", self.out.at(name), self.policy.keep)
            self.records.note(replace(self._outcome("removed", name), plan_id=record.plan_id))
        else:
            self.records.replace(path, replace(record, state=State.DONE))
            kept = Notice(Result.DONE, logging.WARNING, f"not removed: {reason}")
            self.notices.give(self.out.at(name), kept, about=f"{name} kept")


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
