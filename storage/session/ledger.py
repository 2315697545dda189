"""What a conversion under way keeps beside its target, so that it can go on after a kill, and nobody disturbs it.

A *session* is one small record, replaced as a whole and only if nobody else has replaced it meanwhile: which
conversion this is, who runs it (a lock that is renewed), and how far it has come. Beside it grows the *ledger*: one
line for every unit of work that is done, a group or a carried file. Units are idempotent, so one whose line is
missing is simply done again.

How far it has come is one of three phases. They keep an unfinished target from looking finished, and only go
forward::

    MOVE     parts are written, nothing of them is visible
    FINISH   every part is written; old completion markers go, the new files appear
    PUBLISH  all files are there and were read back; the markers appear, the manifest is last

Where a session is kept is a :class:`Place`: a folder beside a target on a disk, or objects below its prefix.
"""

from __future__ import annotations

import contextlib
import json
import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import Enum
from itertools import pairwise
from typing import Any, ClassVar, Protocol

from paddle_reshard.pipeline.core.errors import (
    BusyError,
    CheckpointError,
    MemoryBudgetError,
    PlanError,
    ReshardError,
    StaleSessionError,
    TargetError,
    UnsupportedError,
)
from paddle_reshard.pipeline.core.units import DEFAULT_MEMORY, parse_memory
from paddle_reshard.storage.formats.strict_json import JsonError, parse_json
from paddle_reshard.storage.formats.typed_json import typed
from paddle_reshard.storage.session.holder import Holder, is_gone, process_start, this_process
from paddle_reshard.storage.store import OWN_PREFIX, Identity, NewFile, Receipt, Record

_RECEIPT = tuple[str, int, int, str, str, str]
"""The fields of a :class:`Receipt` in a line of the ledger."""
SESSION = f"{OWN_PREFIX}session.json"
"""Where the record is kept among the objects of a target."""
LEASE_SECONDS = 120.0
"""How long a lock is good without a sign of life, where its process cannot be looked for."""
RENEW_SECONDS = 20.0

logger = logging.getLogger(__name__)


# ------------------------------------------------------------------------------------------------- values


class Phase(str, Enum):
    """How far a conversion has come."""

    MOVE = "move"
    FINISH = "finish"
    PUBLISH = "publish"


def difference(before: Identity, now: Identity) -> str | None:
    """Why ``now`` may not go on with what ``before`` left, naming both; ``None`` if it may."""
    if before.version != now.version:
        return f"it was begun by version {before.version} of this package, this is version {now.version}"
    if (reason := source_difference(before.files, now.files)) is not None:
        return reason
    if None not in (before.target, now.target) and before.target != now.target:
        return "it is of another one of the targets; give them in the order in which they were given"
    if before.plan_id != now.plan_id:
        plans = f"it was begun with plan {before.plan_id}, this is plan {now.plan_id}"
        budgets = [str((identity.request or {}).get("memory", DEFAULT_MEMORY)) for identity in (before, now)]
        if len(set(map(parse_memory, budgets))) > 1:
            return (
                f"{plans}, for it was begun with --memory {budgets[0]}, and this is --memory {budgets[1]}; leave it "
                "out to go on with that"
            )
        return f"{plans}; are --to, --memory and all other options the same?"
    return None


def source_difference(before: Mapping[str, str], now: Mapping[str, str]) -> str | None:
    """The first file of a source that is another than it was, with both versions; ``None`` if none is."""
    for path in sorted(before.keys() | now.keys()):
        then, today = before.get(path), now.get(path)
        if then != today:
            return f"{path} of the source was {then or 'not there'} when it was begun, and is {today or 'gone'} now"
    return None


@dataclass(frozen=True, slots=True)
class Lock:
    """Who runs a conversion."""

    holder: Holder
    nonce: str
    """Tells this run from all others, also of the same process."""
    renewed_at: float
    """Last sign of life, seconds since the epoch."""
    lease_seconds: float
    held: bool


def blocker(lock: Lock, gone: bool, now: float) -> str | None:
    """What a lock that keeps others out says of its owner; ``None`` if it does not.

    ``gone`` says that its process has surely ended, ``now`` is in seconds since the epoch.
    """
    silent = max(0.0, now - lock.renewed_at)
    if not lock.held or gone or silent >= lock.lease_seconds:
        return None
    return f"{lock.holder}, last sign of life {silent:.0f} s ago"


@dataclass(frozen=True, slots=True)
class SessionRecord:
    """All that a session is, but for its ledger."""

    identity: Identity
    lock: Lock
    phase: Phase
    begun_at: float
    boot: str
    """Of the machine that has written the staged files, where they are staged on one."""
    uploads: Mapping[str, str] = field(default_factory=dict)
    """File → upload id, where the store has such."""
    replaces: tuple[str, ...] = ()
    """Files of an overwritten checkpoint that were there when it was decided that they may go; from ``FINISH`` on,
    where files appear one by one."""

    def data(self) -> bytes:
        """As JSON."""
        return json.dumps(asdict(self), indent=1).encode()

    @classmethod
    def parse(cls, data: bytes, where: str) -> SessionRecord:
        """From JSON.

        Raises
        ------
        TargetError
            If it is none.
        """
        try:
            return typed(parse_json(data), cls)
        except JsonError as error:
            raise TargetError(
                f"{where}: is not the record of a conversion ({error}); remove it if none is running"
            ) from error


def begins_record(data: bytes) -> bool:
    """Whether a record was being written when this was left."""
    start = b'{\n "identity": {'
    return data[: len(start)] == start[: len(data)]


def ledger_line(record: Record) -> bytes:
    """A record as one line of JSON."""
    parts = [list(asdict(receipt).values()) for receipt in record.receipts]
    return json.dumps([record.unit, parts, list(record.drift)], separators=(",", ":")).encode() + b"\n"


def parse_ledger(data: bytes) -> tuple[list[Record], int]:
    """The records of a ledger, and how many bytes of it are whole lines: a torn end counts for nothing.

    >>> line = ledger_line(Record(3, (Receipt("a", 0, 7, "", "ae8b"),)))
    >>> parse_ledger(line + line[:9])[1] == len(line)
    True
    """
    records = []
    good = 0
    for line in data.splitlines(keepends=True):
        try:
            if not line.endswith(b"\n"):
                break
            unit, parts, drift = typed(parse_json(line), tuple[int, tuple[_RECEIPT, ...], tuple[str, ...]])
        except JsonError:
            break
        records.append(Record(unit, tuple(Receipt(*part) for part in parts), drift))
        good += len(line)
    return records, good


def check_receipts(
    location: str, files: Iterable[NewFile], receipts: Iterable[Receipt]
) -> dict[tuple[str, int], Receipt]:
    """Refuse unless there is exactly one receipt for every part of every file. Path and byte offset → receipt."""
    wanted = {
        (new.path, start): stop - start
        for new in files
        for start, stop in pairwise((*new.part_starts, new.size_bytes))
        if new.size_bytes
    }
    found: dict[tuple[str, int], Receipt] = {}
    for receipt in receipts:
        part = receipt.path, receipt.byte_offset
        if wanted.get(part) != receipt.nbytes or found.setdefault(part, receipt) != receipt:
            raise TargetError(
                f"{receipt.path}: {receipt.nbytes} bytes written at {receipt.byte_offset} are no part of it"
            )
    if missing := wanted.keys() - found.keys():
        path, start = min(missing)
        raise TargetError(
            f"{location}/{path}: the part at byte {start} was never written ({len(missing)} are missing)"
        )
    return found


def keeps(error: BaseException | None) -> bool:
    """Whether what is done is worth keeping after an error: the same conversion may end well another time.

    It may not if the checkpoint itself was refused.
    """
    if isinstance(error, (CheckpointError, PlanError)):
        return error.retryable or isinstance(error, (UnsupportedError, MemoryBudgetError))
    return error is not None


# ------------------------------------------------------------------------------------------------ effects


class Place(Protocol):
    """Where a session is kept: one small record and a ledger."""

    @property
    def location(self) -> str:
        """For people."""

    def read(self) -> tuple[bytes, str] | None:
        """The record and its version, ``None`` where there is none."""

    def write(self, data: bytes, version: str | None) -> str | None:
        """Replace the record if it still has this version, ``None``: if there is none yet. The new version, or
        ``None`` if it was not replaced."""

    def append(self, lines: bytes) -> None:
        """Add lines to the ledger, soon."""

    def flush(self) -> None:
        """Wait until all lines are in the ledger."""

    def shorten_timeouts(self) -> None:
        """Be quick from now on, rather than patient."""

    def ledger(self) -> list[Record]:
        """Every whole line; the ledger goes on after them."""

    def clear(self) -> None:
        """Remove what no record belongs to."""

    def remove(self) -> None:
        """Remove record and ledger, the record last."""


def find_session(place: Place) -> SessionRecord | None:
    """The session at a place, whoever holds it."""
    found = place.read()
    return None if found is None else SessionRecord.parse(found[0], place.location)


def refuse_busy(record: SessionRecord, location: str, take_over: bool, now: float) -> None:
    """Refuse while another run holds the lock; one on another machine can be overruled.

    Raises
    ------
    TargetError
        Naming the holder.
    """
    me = this_process()
    lock = record.lock
    ended_here = lock.holder == me and lock.nonce not in Session.running
    owner = blocker(lock, ended_here or is_gone(lock.holder, me, process_start), now)
    if owner is None:
        return
    here = (lock.holder.host, lock.holder.machine, lock.holder.pid_space) == (
        me.host,
        me.machine,
        me.pid_space,
    )
    if here:
        raise BusyError(f"{location}: another conversion is writing it: {owner}; wait for it, or end it")
    if not take_over:
        left = lock.lease_seconds - max(0.0, now - lock.renewed_at)
        raise BusyError(
            f"{location}: another conversion is writing it: {owner}; if that one has ended, wait {left:.0f} s, or "
            "use --take-over"
        )


def refuse_unfinished(record: SessionRecord, location: str) -> None:
    """Refuse to begin anew where an unfinished conversion is.

    Raises
    ------
    TargetError
        Always.
    """
    raise TargetError(
        f"{location}: an unfinished conversion of {record.identity.source} is here; the same command with --resume "
        f"goes on with it, paddle-reshard clean {location} removes it"
    )


def acquire_lock(place: Place, location: str, take_over: bool) -> bool:
    """Take the lock of a session in order to remove it; False if there is none.

    Raises
    ------
    TargetError
        If another run holds it.
    """
    found = place.read()
    if found is None:
        return False
    record, now = SessionRecord.parse(found[0], place.location), time.time()
    refuse_busy(record, location, take_over, now)
    lock = Lock(this_process(), secrets.token_hex(8), now, LEASE_SECONDS, True)
    if place.write(replace(record, lock=lock).data(), found[1]) is None:
        raise BusyError(f"{location}: another conversion has begun writing it just now")
    return True


class Session:
    """A session that this run holds. ``records`` is what earlier runs have done."""

    running: ClassVar[set[str]] = set()
    """Nonces of the runs of this process that have not ended: a full disk may keep one from saying so itself."""

    def __init__(
        self, place: Place, location: str, record: SessionRecord, version: str, records: Sequence[Record]
    ) -> None:
        self.place, self.location = place, location
        self.record, self.version = record, version
        self.records = list(records)
        self.recorded = len(self.records)
        self.lost: ReshardError | None = None
        self.running.add(record.lock.nonce)
        self._alone = threading.Lock()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="lock", daemon=True)
        self._thread.start()

    @classmethod
    def take(
        cls,
        place: Place,
        location: str,
        identity: Identity,
        resume: bool,
        take_over: bool,
        clock: Callable[[], float] = time.time,
    ) -> Session:
        """Begin a session, or go on with the one that is there.

        Raises
        ------
        StaleSessionError
            If it is another conversion's.
        TargetError
            If somebody else holds it, or there is one and ``resume`` is not set.
        """
        now, me = clock(), this_process()
        lock = Lock(me, secrets.token_hex(8), now, LEASE_SECONDS, True)
        found = place.read()
        if found is None:
            record, version, records = SessionRecord(identity, lock, Phase.MOVE, now, me.boot), None, []
        else:
            left = SessionRecord.parse(found[0], place.location)
            version = found[1]
            refuse_busy(left, location, take_over, now)
            if not resume:
                refuse_unfinished(left, location)
            if (reason := difference(left.identity, identity)) is not None:
                raise StaleSessionError(
                    f"{location}: the unfinished conversion here cannot be resumed: {reason}; paddle-reshard clean "
                    f"{location} removes it"
                )
            record = replace(left, lock=lock)
        taken = place.write(record.data(), version)
        # A store that does not look at conditions lets everybody in: the last one stays.
        if taken is None or (seen := place.read()) is None or seen[0] != record.data():
            raise BusyError(f"{location}: another conversion has begun writing it just now")
        if found is None:
            place.clear()
        else:
            records = list({record.unit: record for record in place.ledger()}.values())
        return cls(place, location, record, taken, records)

    @property
    def phase(self) -> Phase:
        """How far it has come."""
        return self.record.phase

    def note(self, record: Record) -> None:
        """Write a line of the ledger: this unit is done."""
        self.check()
        self.place.append(ledger_line(record))
        self.recorded += 1

    def flush(self) -> None:
        """Wait until the ledger is whole."""
        self.place.flush()
        self.check()

    def update(self, **changes: Any) -> None:
        """Change fields of the record; the lock is renewed along.

        Raises
        ------
        TargetError
            If another run has taken over.
        """
        self.check()
        self._write(lambda record: replace(record, **changes))

    def check(self) -> None:
        """Raise if the lock was lost."""
        if self.lost is not None:
            raise self.lost

    def _write(self, change: Callable[[SessionRecord], SessionRecord]) -> None:
        with self._alone:
            record = change(self.record)
            record = replace(record, lock=replace(record.lock, renewed_at=time.time()))
            version = self.place.write(record.data(), self.version)
            if version is None:
                raise BusyError(f"{self.location}: the lock is lost: {self._thief()}")
            self.record, self.version = record, version

    def _thief(self) -> str:
        found = self.place.read()
        if found is None:
            return f"{self.place.location} was removed"
        return f"taken over by {SessionRecord.parse(found[0], self.place.location).lock.holder}"

    def _renew(self) -> None:
        while not self._over.wait(RENEW_SECONDS):
            try:
                self._write(lambda record: record)
            except (ReshardError, OSError) as error:
                self.lost = BusyError(str(error))
                return

    def release(self) -> None:
        """Let the session be, for a later run to go on with."""
        self.stop()
        self.place.shorten_timeouts()
        if self.lost is None:
            with contextlib.suppress(ReshardError, OSError):
                self.place.flush()
            with contextlib.suppress(ReshardError, OSError):
                self._write(lambda record: replace(record, lock=replace(record.lock, held=False)))

    def stop(self) -> None:
        """Renew the lock no more: the session is about to be removed."""
        self._over.set()
        self._thread.join()
        self.running.discard(self.record.lock.nonce)

    def remove(self) -> None:
        """End the session: what it was for is done, or taken back."""
        self.stop()
        self.place.remove()

    def keep(self, error: BaseException | None) -> bool:
        """After an error: let the session be if a later run can go on with it. False if it is to be taken back."""
        worth = self.lost is not None or (keeps(error) and self.recorded > 0)
        if worth:
            self.release()
        if worth and self.lost is None:
            logger.warning(
                "%s: what is done is kept; the same command with --resume goes on, paddle-reshard clean %s removes it",
                self.location,
                self.location,
            )
        return worth
