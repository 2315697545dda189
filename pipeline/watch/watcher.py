"""Which checkpoints of a training run are to be converted now, and which never again?

All state lies beside the targets, so it survives restarts and is shared by any number of watchers::

    DST_ROOT/checkpoint-<step>/paddle_reshard.json     the manifest: this target is whole
    DST_ROOT/.paddle_reshard/claims/<id>.json          attempt 1 of conversion <id>: who, since when, how it ended
    DST_ROOT/.paddle_reshard/claims/<id>.2.json        attempt 2, made when attempt 1 had failed or died
    DST_ROOT/.paddle_reshard/seen/<id>.json            how a checkpoint looked that may be unfinished

Creating the file of the next attempt is the claim. It is exclusive, also when a dead process's claim is taken over:
of all watchers that want attempt 2, one gets it. Only the owner of an attempt rewrites its file.

``decide`` is pure: what was seen → what to do. ``Watcher`` looks, claims, converts and records.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Any

from paddle_reshard.pipeline import api
from paddle_reshard.pipeline.convert.inputs import load_config, load_tables
from paddle_reshard.pipeline.convert.manifest import describe_targets
from paddle_reshard.pipeline.convert.request import CONVERSION_OPTIONS
from paddle_reshard.pipeline.core.errors import CheckpointError, ListingError, ReshardError, UsageError
from paddle_reshard.pipeline.core.file_names import MANIFEST
from paddle_reshard.pipeline.core.trainer_files import is_of_training
from paddle_reshard.pipeline.core.version import __version__
from paddle_reshard.pipeline.indexing.detect import index_checkpoint
from paddle_reshard.pipeline.indexing.fill import read_filling
from paddle_reshard.pipeline.watch.claims import (
    CHECKPOINT,
    CLAIMS,
    Action,
    Attempt,
    Decision,
    Policy,
    Sight,
    State,
    Why,
    claim_path,
    decide,
    steps_of,
    superfluous,
)
from paddle_reshard.pipeline.watch.runners import Conversion, Convert, convert_inline
from paddle_reshard.storage.formats.manifest import own_manifest
from paddle_reshard.storage.formats.strict_json import parse_json
from paddle_reshard.storage.listing import CheckpointRoot, open_root
from paddle_reshard.storage.locate import open_source, place, source_access, target_access
from paddle_reshard.storage.session.holder import is_gone, process_start, this_process

log = logging.getLogger(__name__)

SEEN = ".paddle_reshard/seen"
HEARTBEAT_SECONDS = 60.0
LARGEST_CLAIM_BYTES = 1 << 16
_CLAIM = re.compile(r"(?P<id>.+?)(?:\.(?P<number>\d+))?\.json")
_SIGNAL = re.compile(r"saved_signal_\d+")
_OF_RANK = re.compile(r"rng_state_(\d+)\.pth|(?:.*/)?(\d+)_\d+\.distcp")
"""Files that tell the number of the rank that wrote them."""
_TRAINER_STATE = ("trainer_state.bin", "trainer_state.json")
_UNFINISHED = re.compile(r"save_signal_TMP_\d+")
"""What the trainer renames to ``saved_signal_*`` once the EMA has been merged."""


# ------------------------------------------------------------------------------------------------ the watcher


class Result(str, Enum):
    """What came of a checkpoint in one pass."""

    CONVERTED = "converted"
    DONE = "done"
    WAITING = "waiting"
    STALE = "stale"
    """It is not whole, and has not changed for longer than ``Policy.stale_seconds``."""
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Basis:
    """What a decision was taken on. A claim that follows from it is for the attempt after these, and no later one."""

    sight: Sight
    attempts: tuple[Attempt, ...]


@dataclass(frozen=True, slots=True)
class Incomplete:
    """Why a checkpoint is not whole, and since when it has looked as it does: seconds since the epoch."""

    reason: str
    since: float


@dataclass
class Watcher:
    """Looks at a training run again and again, and converts what has become whole."""

    run: CheckpointRoot
    out: CheckpointRoot
    conversion: Conversion
    convert: Convert
    policy: Policy
    clock: Callable[[], float] = time.time
    messages: dict[str, str] = field(default_factory=dict)
    """Name of a checkpoint → what was found about it last, in a sentence; ``""`` → about the run."""
    _told: dict[str, str] = field(default_factory=dict)
    _claims: dict[str, tuple[str, Attempt | None]] = field(default_factory=dict)
    _manifests: dict[str, tuple[str, str | None]] = field(default_factory=dict)
    _order: list[str] = field(default_factory=list)
    _indexed: dict[str, str] = field(default_factory=dict)
    _compared: dict[str, tuple[Sight, Decision]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_places(self.run.location, self.out.location)
        self.me = this_process()
        options = self.conversion.options
        self.tables = load_tables(_path(options.get("rules")))
        self.config = load_config(_path(options.get("config")))
        fill, allowed = options.get("fill"), options.get("allow_missing", ())
        self.missing = read_filling(fill, allowed, source_access(options)).policy

    # ------------------------------------------------------------------------------------- one pass

    def once(self) -> dict[str, Result]:
        """Look at every checkpoint once, the oldest first; convert what is ready. Name → what came of it."""
        found = steps_of(self.run.folders())
        if not found:
            self._tell("", logging.WARNING, f"{self.run.location}: no checkpoint-<step> folder yet")
        self._order = [name for _, name in found]
        results: dict[str, Result] = {}
        for name in self._wanted():
            try:
                results[name] = self._one(name)
            except (OSError, ListingError) as error:
                self._tell(name, logging.ERROR, f"{name}: {_named(error)}; looked at again later")
                results[name] = Result.FAILED
            if results[name] is Result.CONVERTED:
                self.prune()
        self.prune()
        return results

    def repeat(self, every_seconds: float) -> dict[str, Result]:
        """Pass after pass, until interrupted or something is stale: what came of the last one."""
        while True:
            try:
                results = self.once()
                if Result.STALE in results.values():
                    return results
            except (OSError, ListingError) as error:
                log.error("%s; looked at again in %.0f s", _named(error), every_seconds)
            time.sleep(every_seconds)

    def _wanted(self) -> list[str]:
        """With ``--keep N``: no more than the newest N that are converted or can be, and what is younger."""
        if self.policy.keep is None:
            return self._order
        wanted: list[str] = []
        usable = 0
        for name in reversed(self._order):
            if usable < self.policy.keep:
                wanted.append(name)
                usable += self._usable(name)
            else:
                self._tell(
                    name, logging.INFO, f"{name}: passed over, --keep {self.policy.keep} has newer ones"
                )
        return wanted[::-1]

    def _usable(self, name: str) -> bool:
        """Whether a checkpoint is converted, or can be."""
        action = self._decide(name)[0].action
        if action is Action.LOOK:
            try:
                return self._look(name) is None
            except ReshardError:
                return False
        return action is Action.NOTHING

    def _one(self, name: str) -> Result:
        """Decide about one checkpoint and do it."""
        decision, basis = self._decide(name)
        if decision.action is Action.COMPARE:
            decision = self._adopt(name, basis)
        if decision.action is Action.NOTHING:
            level = logging.WARNING if decision.why is Why.SOURCE_CHANGED else logging.DEBUG
            self._tell(name, level, f"{name}: {decision.reason}")
            return Result.DONE
        if decision.action is Action.WAIT:
            key = None if decision.why is None else decision.why.value
            self._tell(name, logging.INFO, f"{name}: waiting: {decision.reason}", key)
            return Result.WAITING
        if decision.action is Action.FAIL:
            self._tell(name, logging.ERROR, f"{name}: not converted: {decision.reason}")
            return Result.FAILED
        try:
            incomplete = self._look(name)
        except ReshardError as error:
            self._tell(name, logging.ERROR, f"{name}: refused: {error}")
            return Result.FAILED
        if incomplete is not None:
            return self._wait_for(name, incomplete)
        return self._claim_and_convert(name, basis)

    def _wait_for(self, name: str, incomplete: Incomplete) -> Result:
        """Say what a checkpoint waits for, and since when; whether that is too long."""
        since = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(incomplete.since))
        stale = self.policy.stale_seconds
        if stale is not None and self.clock() - incomplete.since >= stale:
            self._tell(
                name,
                logging.ERROR,
                f"{name}: incomplete, and has not changed since {since}, longer than --stale allows; its job may "
                f"have died: {incomplete.reason}",
            )
            return Result.STALE
        told = f"{name}: waiting: {incomplete.reason}; unchanged since {since}"
        self._tell(name, logging.INFO, told, key=f"waiting: {incomplete.reason} {since}")
        return Result.WAITING

    # ------------------------------------------------------------------------------------- looking

    def _id(self, name: str) -> str:
        return self.conversion.identify(self.run.at(name), self.out.at(name))

    def _sight(self, name: str) -> Sight:
        files = self.out.files(name)
        return Sight(
            source_stamp=_digest(self.run.files(name)),
            target_stamp=_digest(files),
            plan_id=self._plan_id(name, files),
            version=__version__,
        )

    def _plan_id(self, name: str, files: Mapping[str, str]) -> str | None:
        """The plan of a target's manifest; ``None`` where there is none or it is not ours."""
        stamp = files.get(MANIFEST)
        if stamp is None:
            return None
        if self._manifests.get(name, ("", None))[0] != stamp:
            manifest = self._manifest(name)
            self._manifests[name] = (stamp, manifest.get("plan_id"))
        return self._manifests[name][1]

    def _manifest(self, name: str) -> dict[str, Any]:
        return own_manifest(self.out.read(f"{name}/{MANIFEST}")) or {}

    def _attempts(self) -> dict[str, list[Attempt]]:
        """Every claim beside the targets: conversion id → attempts, ascending."""
        found: dict[str, list[Attempt]] = {}
        for file, stamp in self.out.files(CLAIMS).items():
            if file.startswith(".") or not _CLAIM.fullmatch(file):
                continue
            if self._claims.get(file, ("", None))[0] != stamp:
                self._claims[file] = (stamp, self._read_claim(file, int(stamp.partition(":")[0])))
            attempt = self._claims[file][1]
            if attempt is not None:
                found.setdefault(attempt.conversion_id, []).append(attempt)
        return {key: sorted(attempts, key=lambda a: a.number) for key, attempts in found.items()}

    def _read_claim(self, file: str, size_bytes: int) -> Attempt | None:
        path = f"{CLAIMS}/{file}"
        try:
            if size_bytes > LARGEST_CLAIM_BYTES:
                raise ValueError(f"not a claim: {size_bytes} bytes")
            data = self.out.read(path)
            attempt = None if data is None else Attempt.parse(data)
            if attempt is not None and claim_path(attempt) != path:
                raise ValueError("is the claim of another attempt")
            return attempt
        except ValueError:
            log.warning("%s: not a claim; delete it if no watcher runs", self.out.at(path))
            return None

    def _decide(self, name: str) -> tuple[Decision, Basis]:
        attempts = self._attempts().get(self._id(name), [])
        sight = self._sight(name)
        gone = bool(attempts) and is_gone(attempts[-1].holder, self.me, process_start)
        return decide(sight, attempts, gone, self.policy, self.clock()), Basis(sight, tuple(attempts))

    def _look(self, name: str) -> Incomplete | None:
        """Why a checkpoint is not whole yet, or ``None``.

        Raises
        ------
        ReshardError
            If it is whole and cannot be converted.
        """
        files = self.run.files(name)
        stamp = _digest(files)
        reason = self._lacking(name, files, stamp)
        if reason is not None:
            return Incomplete(reason, self._unchanged_since(name, stamp))
        doubt, settle = self._doubt(name, files), self.policy.settle_seconds
        if doubt is None or settle == 0:
            return None
        since = self._unchanged_since(name, stamp)
        if self.clock() - since >= settle:
            return None
        return Incomplete(f"{doubt}; converted if nothing changes for {settle:g} s", since)

    def _lacking(self, name: str, files: Mapping[str, str], stamp: str) -> str | None:
        """What keeps a checkpoint from being one, by its files and their metadata."""
        unfinished = sorted(path for path in files if _UNFINISHED.fullmatch(path))
        if unfinished:
            return f"{unfinished[0]}: the trainer has not finished merging the EMA"
        if self._indexed.get(name) != stamp:
            error = self._index(name)
            if isinstance(error, CheckpointError):
                return str(error)
            if error is not None:
                raise error
            self._indexed[name] = stamp
        return None

    def _doubt(self, name: str, files: Mapping[str, str]) -> str | None:
        """Why the trainer may still be adding small files to a checkpoint that indexes as whole, or ``None``."""
        place = self._order.index(name)
        before = self.run.files(self._order[place - 1]) if place else {}
        return lacking(files, before)

    def _index(self, name: str) -> ReshardError | None:
        """What is wrong with a checkpoint, by its metadata."""
        try:
            source = open_source(self.run.at(name), *source_access(self.conversion.options))
            index_checkpoint(source, self.tables, self.config, self.missing)
        except ReshardError as error:
            return error
        return None

    def _unchanged_since(self, name: str, stamp: str) -> float:
        """When a checkpoint was first seen as it looks, seconds since the epoch; told to later watchers."""
        path, now = f"{SEEN}/{self._id(name)}.json", self.clock()
        try:
            seen = parse_json(self.out.read(path) or b"{}")
        except ValueError:
            seen = {}
        if isinstance(seen, dict) and seen.get("stamp") == stamp and type(seen.get("at")) in (int, float):
            return float(seen["at"])
        self.out.replace(path, json.dumps({"stamp": stamp, "at": now}).encode())
        return now

    def _adopt(self, name: str, basis: Basis) -> Decision:
        """Decide about a target with a manifest that no record knows: after a kill, or made by hand."""
        if self._compared.get(name, (None, None))[0] != basis.sight:
            self._compared[name] = (basis.sight, self._compare(name, basis))
        return self._compared[name][1]

    def _compare(self, name: str, basis: Basis) -> Decision:
        source, target = self.run.at(name), self.out.at(name)
        options = {k: v for k, v in self.conversion.options.items() if k in CONVERSION_OPTIONS}
        try:
            planned = api.plan(source, f"{target}.planned", **{**options, "overwrite": False})
        except CheckpointError as error:
            return Decision(Action.WAIT, str(error))
        except ReshardError as error:
            return Decision(Action.FAIL, str(error))
        wanted = describe_targets(planned)[""]
        found = self._manifest(name)
        if _content(wanted) != _content(found):
            if self.policy.overwrite:
                return Decision(Action.LOOK, "the target is another conversion's")
            return Decision(
                Action.FAIL,
                f"{target} holds another conversion; give another folder, or --overwrite to replace it",
            )
        last = basis.attempts[-1] if basis.attempts else None
        killed = last is not None and last.state is State.RUNNING and not last.target_stamp
        if self._claim(name, basis, State.DONE if killed else State.ADOPTED) is not None:
            log.info("%s: converted already; recorded", name)
        return Decision(Action.NOTHING, "converted")

    # ------------------------------------------------------------------------------------- converting

    def _claim(self, name: str, basis: Basis, state: State = State.RUNNING) -> Attempt | None:
        """Create the file of the next attempt; ``None`` if somebody did since the decision was taken."""
        now, sight = self.clock(), basis.sight
        attempt = Attempt(
            conversion_id=self._id(name),
            number=basis.attempts[-1].number + 1 if basis.attempts else 1,
            target=name,
            holder=self.me,
            nonce=uuid.uuid4().hex,
            state=state,
            started_at=now,
            seen_at=now,
            source_stamp=sight.source_stamp,
            target_stamp=sight.target_stamp,
            version=sight.version,
            plan_id=sight.plan_id or "",
        )
        return attempt if self.out.create(claim_path(attempt), attempt.data()) else None

    def _not_claimed(self, name: str, basis: Basis) -> Result:
        """Somebody else was faster, or what lies where the claim would go is none."""
        if self._attempts().get(self._id(name), []) != list(basis.attempts):
            self._tell(name, logging.INFO, f"{name}: waiting: another watcher has just claimed it")
            return Result.WAITING
        place = self.out.at(f"{CLAIMS}/{self._id(name)}")
        self._tell(
            name,
            logging.ERROR,
            f"{name}: not converted: what lies at {place}….json is not a claim; delete it if no watcher runs",
        )
        return Result.FAILED

    def _claim_and_convert(self, name: str, basis: Basis) -> Result:
        attempt = self._claim(name, basis)
        if attempt is None:
            return self._not_claimed(name, basis)
        log.info("%s: converting (%s, attempt %d)", name, attempt.conversion_id, attempt.number)
        started, ended = self.clock(), None
        try:
            with self._alive(attempt):
                ended = self._convert(name, attempt)
        except KeyboardInterrupt:
            ended = replace(attempt, state=State.RELEASED, reason="interrupted", seen_at=self.clock())
            raise
        finally:
            if ended is not None:
                self.out.replace(claim_path(ended), ended.data())
        if ended.state is State.DONE:
            self._tell(name, logging.INFO, f"{name}: converted in {self.clock() - started:.0f} s")
            return Result.CONVERTED
        waits = ended.state is State.RELEASED
        level = logging.INFO if waits else logging.ERROR
        self._tell(name, level, f"{name}: {'waiting' if waits else ended.state.value}: {ended.reason}")
        return Result.WAITING if waits else Result.FAILED

    def _convert(self, name: str, attempt: Attempt) -> Attempt:
        """Run a conversion that is claimed; the attempt as it ended."""

        def changed() -> bool:
            return _digest(self.run.files(name)) != attempt.source_stamp

        def check() -> None:
            if changed():
                raise CheckpointError("the trainer was still writing it")

        state, reason = State.DONE, ""
        try:
            self.convert(self.run.at(name), self.out.at(name), check)
        except ReshardError as error:
            state, reason = (State.FAILED if error.retryable else State.REFUSED), str(error)
        except (OSError, MemoryError) as error:
            state, reason = State.FAILED, _named(error)
        if state is State.REFUSED and changed():
            state = State.RELEASED
        plan_id = (self._plan_id(name, self.out.files(name)) or "") if state is State.DONE else ""
        if state is State.DONE and not plan_id:
            state, reason = State.FAILED, "the conversion ended without a target"
        return replace(attempt, state=state, reason=reason, plan_id=plan_id, seen_at=self.clock())

    @contextmanager
    def _alive(self, attempt: Attempt) -> Iterator[None]:
        """Renew a claim while a conversion runs."""
        over = threading.Event()

        def beat() -> None:
            while not over.wait(HEARTBEAT_SECONDS):
                try:
                    self.out.replace(claim_path(attempt), replace(attempt, seen_at=self.clock()).data())
                except (OSError, ListingError) as error:
                    log.warning("%s: claim not renewed: %s", attempt.target, error)

        thread = threading.Thread(target=beat, name="claim", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    # ------------------------------------------------------------------------------------- keeping

    def prune(self) -> None:
        """Remove targets that ``--keep`` does not keep: only such as a watcher has made and nobody has replaced."""
        if self.policy.keep is None:
            return
        mine: dict[str, Attempt] = {}
        for attempts in self._attempts().values():
            last = attempts[-1]
            if last.state is State.REMOVING:
                self._remove(last)
            elif (
                last.state is State.DONE
                and CHECKPOINT.fullmatch(last.target)
                and last.plan_id == self._plan_id(last.target, self.out.files(last.target))
            ):
                mine[last.target] = last
        for name in superfluous(list(mine), self.policy.keep):
            self._remove(mine[name])

    def _remove(self, attempt: Attempt) -> None:
        """Remove a target, and nothing else with it; a kill in between is made good by the next pass."""
        current = self._plan_id(attempt.target, self.out.files(attempt.target))
        if current not in (None, attempt.plan_id):
            return
        where = self.out.at(attempt.target)
        going = replace(attempt, state=State.REMOVING, reason=f"--keep {self.policy.keep}")
        self.out.replace(claim_path(going), going.data())
        reason = self.out.remove(
            attempt.target, lambda m: (own_manifest(m) or {}).get("plan_id") == attempt.plan_id
        )
        if reason is None:
            ended = replace(going, state=State.REMOVED)
        else:
            ended = replace(attempt, state=State.DONE, reason="")
        self.out.replace(claim_path(ended), ended.data())
        if reason is None:
            log.info("%s: removed, --keep %s", where, self.policy.keep)
        else:
            self._tell(f"{attempt.target} kept", logging.WARNING, f"{where}: not removed, for {reason}")

    def _tell(self, name: str, level: int, message: str, key: str | None = None) -> None:
        """Log what is news; the same about the same checkpoint is told once."""
        self.messages[name] = message
        if self._told.get(name) != (key or message):
            self._told[name] = key or message
            log.log(level, "%s", message)


def lacking(files: Collection[str], before: Collection[str]) -> str | None:
    """What the trainer still writes after a checkpoint indexes as whole, by that of the checkpoint before.

    ``None``: every rank has signalled, the trainer's own state is there, and no kind of file is missing.

    >>> lacking({"saved_signal_0", "trainer_state.json"}, {"scheduler.pdparams", "notes.txt"})
    'scheduler.pdparams is not there yet'
    """
    if not any(_SIGNAL.fullmatch(path) for path in files):
        return "no saved_signal file says that it is finished"
    if not any(path in _TRAINER_STATE for path in files):
        return "trainer_state is not there yet"
    ranks = {match[1] or match[2] for path in files if (match := _OF_RANK.fullmatch(path))}
    silent = sorted(f"saved_signal_{rank}" for rank in ranks if f"saved_signal_{rank}" not in files)
    missing = silent + sorted(p for p in before if p not in files and is_of_training(p))
    return f"{missing[0]} is not there yet" if missing else None


def check_places(run: str, out: str) -> None:
    """Refuse targets that would be sources, by whatever names."""
    there, here = place(run), place(out)
    if there == here:
        raise UsageError(f"{out}: the converted checkpoints may not go into the run directory itself")
    for inner, outer, what in (
        (here, there, "a checkpoint of the run"),
        (there, here, "a converted checkpoint"),
    ):
        if outer in inner.parents and CHECKPOINT.fullmatch(inner.relative_to(outer).parts[0]):
            raise UsageError(f"{out if inner == here else run}: lies inside {what}")


def _content(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """The parts of a manifest that say what a target holds, whatever the budget it was made with."""
    source = manifest.get("source") or {}
    beside = ("generation", "version", "beside", "digest", "plan_id", "etags", "parts", "source")
    return {name: value for name, value in manifest.items() if name not in beside} | {
        "source": source.get("files")
    }


def _digest(files: Mapping[str, str]) -> str:
    """One text for all files of a folder; empty for none."""
    text = json.dumps(sorted(files.items()))
    return hashlib.sha256(text.encode()).hexdigest()[:16] if files else ""


def _named(error: BaseException) -> str:
    return str(error) if isinstance(error, ReshardError) else f"{type(error).__name__}: {error}"


def _path(value: str | os.PathLike[str] | None) -> Path | None:
    return None if value is None else Path(value)


def open_watcher(
    run: str, out: str, conversion: Conversion, policy: Policy, convert: Convert | None = None
) -> Watcher:
    """A watcher of the checkpoints in ``run`` that converts them below ``out``."""
    return Watcher(
        open_root(run, *source_access(conversion.options)[:2]),
        open_root(out, *target_access(conversion.options)[:2]),
        conversion,
        convert or convert_inline(conversion),
        policy,
    )
