"""The session and the ledger that a conversion in progress keeps next to its target.

The *session* is one small record, replaced as a whole, by compare-and-swap: which conversion this is, who runs it (a
lock that is renewed), and its phase. The *ledger* is a log with one line for every finished unit of work, a group or a
carried file. Units are idempotent, so a unit whose line is missing is simply done again.

The phase only moves forward, and keeps an unfinished target from looking finished::

    MOVE     parts are written, none of them is visible
    FINISH   all parts are written; old completion markers are removed, the new files appear
    PUBLISH  all files have appeared and were read back; the markers appear, the manifest last

A session is kept in a :class:`SessionStore`: a folder next to a target on a disk, or objects below a target's prefix.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shlex
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
from paddle_reshard.storage.documents.strict_json import JsonError, parse_json
from paddle_reshard.storage.documents.typed_json import typed
from paddle_reshard.storage.session.holder import Holder, is_gone, process_start, this_process
from paddle_reshard.storage.store import OWN_PREFIX, Identity, NewFile, Permission, Receipt, Record

_RECEIPT = tuple[str, int, int, str, str, str]
"""The fields of a :class:`Receipt`, as a line of the ledger holds them."""
SESSION = f"{OWN_PREFIX}session.json"
"""Name of the record among the objects of a target."""
LEASE_SECONDS = 120.0
"""Seconds after its last renewal for which a lock stays valid, where its process cannot be looked up."""
RENEW_SECONDS = 20.0

logger = logging.getLogger(__name__)


# ------------------------------------------------------------------------------------------------- values


class Phase(str, Enum):
    """The phase of a conversion."""

    MOVE = "move"
    FINISH = "finish"
    PUBLISH = "publish"


def difference(before: Identity, now: Identity) -> str | None:
    """Why the conversion ``now`` cannot resume the session of ``before``, naming both; ``None`` if it can."""
    if before.version != now.version:
        return f"it was started by version {before.version} of this package, this is version {now.version}"
    if (reason := source_difference(before.files, now.files)) is not None:
        return reason
    if None not in (before.target, now.target) and before.target != now.target:
        return "it belongs to a different target; give the targets in their original order"
    if before.plan_id != now.plan_id:
        plans = f"it was started with plan {before.plan_id}, this is plan {now.plan_id}"
        budgets = [str((identity.request or {}).get("memory", DEFAULT_MEMORY)) for identity in (before, now)]
        if len(set(map(parse_memory, budgets))) > 1:
            return (
                f"{plans}: it was started with --memory {budgets[0]}, this is --memory {budgets[1]}; omit --memory to "
                "resume with the original budget"
            )
        return f"{plans}; are --to, --memory and all other options the same?"
    return None


def source_difference(before: Mapping[str, str], now: Mapping[str, str]) -> str | None:
    """The first file of a source that has changed, with both versions; ``None`` if none has."""
    for path in sorted(before.keys() | now.keys()):
        then, today = before.get(path), now.get(path)
        if then != today:
            return f"{path} of the source was {then or 'missing'} when it was started, and is {today or 'missing'} now"
    return None


@dataclass(frozen=True, slots=True)
class Lock:
    """The run that holds a session."""

    holder: Holder
    nonce: str
    """Unique to this run, also among runs of the same process."""
    renewed_at: float
    """When the lock was last renewed, in seconds since the epoch."""
    lease_seconds: float
    held: bool


def _new_lock() -> Lock:
    """A lock that a run of this process takes now."""
    return Lock(this_process(), os.urandom(8).hex(), time.time(), LEASE_SECONDS, True)


def blocker(lock: Lock, gone: bool, now: float) -> str | None:
    """Who holds a lock that is still valid, as text; ``None`` if it is not valid.

    ``gone``: its process has certainly ended. ``now`` is in seconds since the epoch.
    """
    silent = max(0.0, now - lock.renewed_at)
    if not lock.held or gone or silent >= lock.lease_seconds:
        return None
    return f"{lock.holder}, last seen {silent:.0f} s ago"


@dataclass(frozen=True, slots=True)
class SessionRecord:
    """A session without its ledger."""

    identity: Identity
    lock: Lock
    phase: Phase
    boot: str
    """Boot id of the machine that wrote the staged files; empty if they are not staged on a machine."""
    uploads: Mapping[str, str] = field(default_factory=dict)
    """File → upload id, on stores that have uploads; empty before it is created, and for an empty file."""
    replaces: tuple[str, ...] = ()
    """Files of the overwritten checkpoint that may be removed; from ``FINISH`` on, on stores where files appear one by
    one."""
    checksum: str = ""
    """The checksum that the parts of the uploads have, or empty."""

    def data(self) -> bytes:
        """The record as JSON."""
        return json.dumps(asdict(self), indent=1).encode()

    @classmethod
    def parse(cls, data: bytes, where: str) -> SessionRecord:
        """The record in JSON; a ``TargetError`` if the text is none."""
        try:
            return typed(parse_json(data), cls)
        except JsonError as error:
            raise TargetError(
                f"{where}: is not the record of a conversion ({error}); remove it if none is running"
            ) from error


def begins_record(data: bytes) -> bool:
    """Whether this is a record whose writing was interrupted."""
    start = b'{\n "identity": {'
    return data[: len(start)] == start[: len(data)]


_as_json = json.JSONEncoder(separators=(",", ":")).encode


def ledger_line(record: Record) -> bytes:
    """A record as one line of JSON."""
    parts = [(r.path, r.byte_offset, r.nbytes, r.tag, r.checksum, r.md5) for r in record.receipts]
    return f"{_as_json([record.unit, parts, record.drift])}\n".encode()


def parse_ledger(data: bytes) -> tuple[list[Record], int]:
    """The records of a ledger, and the number of bytes of its complete lines. A torn last line is ignored.

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
    """``(path, byte offset)`` → receipt. Every part of every file must have exactly one."""
    wanted = {
        (new.path, start): stop - start
        for new in files
        for start, stop in pairwise((*new.part_starts, new.size_bytes))
        if new.size_bytes
    }
    of_part: dict[tuple[str, int], Receipt] = {}
    for receipt in receipts:
        part = receipt.path, receipt.byte_offset
        if wanted.get(part) != receipt.nbytes or of_part.setdefault(part, receipt) != receipt:
            raise TargetError(
                f"{receipt.path}: {receipt.nbytes} bytes were written at byte {receipt.byte_offset}, which is not a "
                "part of it"
            )
    if missing := wanted.keys() - of_part.keys():
        path, start = min(missing)
        raise TargetError(
            f"{location}/{path}: the part at byte {start} was never written ({len(missing)} are missing)"
        )
    return of_part


def keeps(error: BaseException | None) -> bool:
    """Whether finished work is worth keeping after an error, because the same conversion may succeed when resumed.

    It cannot if the checkpoint itself was refused.
    """
    if isinstance(error, (CheckpointError, PlanError)):
        return error.retryable or isinstance(error, (UnsupportedError, MemoryBudgetError))
    return error is not None


# ------------------------------------------------------------------------------------------------ effects


class SessionStore(Protocol):
    """Storage of a session: one small record and a ledger."""

    @property
    def location(self) -> str:
        """Location, for messages."""

    def read(self) -> tuple[bytes, str] | None:
        """The record and its version; ``None`` if there is no record."""

    def write(self, data: bytes, version: str | None) -> str | None:
        """Replace the record if it still has this version (``None``: if there is no record yet).

        Returns the new version, or ``None`` if it was not replaced.
        """

    def append(self, lines: bytes) -> None:
        """Queue lines for the ledger."""

    def flush(self) -> None:
        """Wait until all queued lines are in the ledger."""

    def shorten_timeouts(self) -> None:
        """Give up early from here on, rather than retry for long."""

    def ledger(self) -> list[Record]:
        """All complete lines. Further lines will follow them."""

    def clear(self) -> None:
        """Remove a ledger that belongs to no record."""

    def remove(self) -> None:
        """Remove record and ledger, the record last."""


def find_session(store: SessionStore) -> SessionRecord | None:
    """The session in a store, whoever holds it."""
    stored = store.read()
    return None if stored is None else SessionRecord.parse(stored[0], store.location)


def refuse_busy(record: SessionRecord, location: str) -> None:
    """Refuse, naming the holder, while another run holds the lock; a lock of another machine expires."""
    me, now = this_process(), time.time()
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
        raise BusyError(f"{location}: another conversion is writing it: {owner}; wait for it, or stop it")
    remaining = lock.lease_seconds - max(0.0, now - lock.renewed_at)
    raise BusyError(
        f"{location}: another conversion is writing it: {owner}; if it has ended, its lock expires in "
        f"{remaining:.0f} s, for which --resume waits",
        remaining,
    )


def refuse_unfinished(record: SessionRecord, location: str, permission: Permission) -> None:
    """Refuse an unfinished conversion that another run holds, or that nobody has asked to resume."""
    refuse_busy(record, location)
    if not permission.resume:
        raise TargetError(
            f"{location}: holds an unfinished conversion of {record.identity.source}; the same command with --resume "
            f"continues it, {shlex.join(['paddle-reshard', 'clean', location])} removes it"
        )


def acquire_lock(store: SessionStore, location: str) -> bool:
    """Take the lock of a session in order to remove it, unless another run holds it; False if there is no session."""
    stored = store.read()
    if stored is None:
        return False
    record, lock = SessionRecord.parse(stored[0], store.location), _new_lock()
    refuse_busy(record, location)
    if store.write(replace(record, lock=lock).data(), stored[1]) is None:
        raise BusyError(f"{location}: another conversion has begun writing it just now")
    return True


class Session:
    """A session that this run holds. ``records``: the finished units of earlier runs; ``resumed``: whether there was
    one."""

    running: ClassVar[set[str]] = set()
    """Nonces of the runs of this process in progress: on a full disk, a run that ended cannot record it."""

    def __init__(
        self,
        store: SessionStore,
        location: str,
        record: SessionRecord,
        version: str,
        records: Sequence[Record],
        resumed: bool = False,
    ) -> None:
        self.session_store, self.location = store, location
        self.resumed = resumed
        self.record, self.version = record, version
        self.records = list(records)
        self.recorded = len(self.records)
        self.lost: ReshardError | None = None
        self.running.add(record.lock.nonce)
        self._write_lock = threading.Lock()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="lock", daemon=True)
        self._thread.start()

    @classmethod
    def take(
        cls,
        store: SessionStore,
        location: str,
        identity: Identity,
        permission: Permission,
        uploads: Iterable[str] = (),
    ) -> Session:
        """Begin a session, or resume the existing one.

        ``uploads`` are the files that will have uploads: a session lists them before the first is created.
        A ``StaleSessionError`` if it belongs to another conversion, another ``TargetError`` if another run holds it or
        it may not be resumed.
        """
        lock = _new_lock()
        stored = store.read()
        if stored is None:
            names = dict.fromkeys(uploads, "")
            record, version, records = (
                SessionRecord(identity, lock, Phase.MOVE, lock.holder.boot, names),
                None,
                [],
            )
        else:
            earlier = SessionRecord.parse(stored[0], store.location)
            version = stored[1]
            refuse_unfinished(earlier, location, permission)
            if (reason := difference(earlier.identity, identity)) is not None:
                raise StaleSessionError(
                    f"{location}: the unfinished conversion here cannot be resumed: {reason}; paddle-reshard clean "
                    f"{location} removes it"
                )
            record = replace(earlier, lock=lock)
        taken = store.write(record.data(), version)
        # A store that ignores conditional writes accepts every writer; then the last record wins.
        if taken is None or (seen := store.read()) is None or seen[0] != record.data():
            raise BusyError(f"{location}: another conversion has begun writing it just now")
        if stored is None:
            store.clear()
        else:
            records = list({record.unit: record for record in store.ledger()}.values())
        return cls(store, location, record, taken, records, stored is not None)

    @property
    def phase(self) -> Phase:
        """The phase of the conversion."""
        return self.record.phase

    def note(self, records: Sequence[Record]) -> None:
        """Log finished units in the ledger."""
        self.check()
        self.session_store.append(b"".join(map(ledger_line, records)))
        self.recorded += len(records)

    def flush(self) -> None:
        """Wait until all lines are in the ledger."""
        self.session_store.flush()
        self.check()

    def update(self, **changes: Any) -> None:
        """Change fields of the record, and renew the lock with it; refused if another run has taken over."""
        self.check()
        self._write(lambda record: replace(record, **changes))

    def check(self) -> None:
        """Raise if the lock was lost."""
        if self.lost is not None:
            raise self.lost

    def _write(self, change: Callable[[SessionRecord], SessionRecord]) -> None:
        with self._write_lock:
            record = change(self.record)
            record = replace(record, lock=replace(record.lock, renewed_at=time.time()))
            version = self.session_store.write(record.data(), self.version)
            if version is None:
                raise BusyError(f"{self.location}: the lock is lost: {self._new_owner()}")
            self.record, self.version = record, version

    def _new_owner(self) -> str:
        stored = self.session_store.read()
        if stored is None:
            return f"{self.session_store.location} was removed"
        return f"taken over by {SessionRecord.parse(stored[0], self.session_store.location).lock.holder}"

    def _renew(self) -> None:
        while not self._stopped.wait(RENEW_SECONDS):
            try:
                self._write(lambda record: record)
            except (ReshardError, OSError) as error:
                self.lost = BusyError(str(error))
                return

    def release(self) -> None:
        """Release the session, for a later run to resume."""
        self.stop()
        self.session_store.shorten_timeouts()
        if self.lost is None:
            with contextlib.suppress(ReshardError, OSError):
                self.session_store.flush()
            with contextlib.suppress(ReshardError, OSError):
                self._write(lambda record: replace(record, lock=replace(record.lock, held=False)))

    def stop(self) -> None:
        """Stop renewing the lock: the session is about to be removed."""
        self._stopped.set()
        self._thread.join()
        self.running.discard(self.record.lock.nonce)

    def remove(self) -> None:
        """Remove the session: its conversion is complete, or rolled back."""
        self.stop()
        self.session_store.remove()

    def keep(self, error: BaseException | None) -> bool:
        """After an error, release the session if a later run can resume it; False if it must be rolled back."""
        resumable = self.lost is not None or (keeps(error) and self.recorded > 0)
        if resumable:
            self.release()
        if resumable and self.lost is None:
            logger.warning(
                "%s: finished work is kept; the same command with --resume continues, "
                "paddle-reshard clean %s removes it",
                self.location,
                self.location,
            )
        return resumable
