"""The files of a training run and its targets, and what watchers remember of each conversion.

::

    DST_ROOT/checkpoint-<step>/paddle_reshard.json     the manifest: this target is complete
    DST_ROOT/.paddle_reshard/seen/<id>.json            what watchers know of conversion <id>
    DST_ROOT/.paddle_reshard/audit.jsonl               how every attempt ended; in an object store audit/<time>-….json

All state is in these files, so it survives restarts and is shared by any number of watchers. Who converts is decided by
the lock of the conversion itself, not here: a record that two of them write at once costs a look at the target.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from enum import Enum
from typing import Any

from paddle_reshard.pipeline.core.errors import ListingError
from paddle_reshard.pipeline.core.file_names import MANIFEST, SEEN
from paddle_reshard.pipeline.core.limits import MAX_RECORD_BYTES
from paddle_reshard.pipeline.core.outcome import Outcome
from paddle_reshard.pipeline.core.trainer_files import CHECKPOINT
from paddle_reshard.storage.documents.manifest import own_manifest
from paddle_reshard.storage.documents.strict_json import JsonError, parse_json
from paddle_reshard.storage.documents.typed_json import typed
from paddle_reshard.storage.listing import CheckpointRoot

log = logging.getLogger(__name__)

AUDIT = ".paddle_reshard/audit"


class State(str, Enum):
    """What became of a checkpoint."""

    SEEN = "seen"
    """Nothing yet, or an attempt that was interrupted or found its source changing."""
    CONVERTING = "converting"
    """An attempt runs, or its process died."""
    FAILED = "failed"
    """Failed, and may be retried: a full disk, a lost connection."""
    REFUSED = "refused"
    """Refused; a retry is pointless until the source or the target changes."""
    DONE = "done"
    """Converted by a watcher."""
    ADOPTED = "adopted"
    """The target was made by ``convert``, and equals the result of this conversion."""
    REMOVING = "removing"
    REMOVED = "removed"
    """Removed by ``--keep``, and not converted again."""


@dataclass(frozen=True, slots=True)
class CheckpointRecord:
    """What watchers know of a conversion."""

    target: str
    """Name of the target folder."""
    source_stamp: str
    """State of the source; a change of it begins a new count of failures."""
    since: float
    """When the source was first seen in this state; seconds since the epoch, as every time here."""
    state: State = State.SEEN
    failures: int = 0
    """Attempts that failed, or whose process died."""
    ended_at: float = 0.0
    """When the last attempt ended."""
    reason: str = ""
    """Why it failed, was refused or is incomplete."""
    looked_at: float = 0.0
    """When it was last found to be incomplete."""
    target_stamp: str = ""
    """State of the target when it was refused."""
    version: str = ""
    """Version of this package that refused it, or found it incomplete."""
    plan_id: str = ""
    """Plan of the target that was made or adopted."""
    made_of: str = ""
    """State of the source of which that was."""

    @classmethod
    def parse(cls, data: bytes) -> CheckpointRecord:
        """From the JSON of its file; a ``ValueError`` if it is no record, or its name is that of another folder."""
        if len(data) > MAX_RECORD_BYTES:
            raise ValueError(f"not a record: {len(data)} bytes")
        try:
            record = typed(parse_json(data), cls)
        except JsonError as error:
            raise ValueError(f"not a record: {error}") from error
        if not CHECKPOINT.fullmatch(record.target):
            raise ValueError(f"not a record of a checkpoint: {record.target!r}")
        return record


@dataclass(frozen=True, slots=True)
class Observation:
    """What listings and the target's manifest say of a conversion."""

    source_stamp: str
    target_stamp: str
    plan_id: str | None
    """Plan in the target's manifest; ``None`` without a manifest."""


@dataclass
class Records:
    """Reads and writes records. What has not changed is not read again."""

    run: CheckpointRoot
    out: CheckpointRoot
    identify: Callable[[str, str], str]
    """Source and target → id of the conversion."""
    _manifests: dict[str, tuple[str, str | None]] = field(default_factory=dict)
    _known: dict[str, tuple[str, CheckpointRecord | None]] = field(default_factory=dict)

    def observe(self, name: str) -> Observation:
        """What can be seen without reading the checkpoint."""
        files = self.out.files(name)
        return Observation(digest(self.run.files(name)), digest(files), self.plan_id(name, files))

    def plan_id(self, name: str, files: Mapping[str, str] | None = None) -> str | None:
        """The plan in a target's manifest, ``None`` without one of ours; ``files``: the target's, if listed already."""
        stamp = (self.out.files(name) if files is None else files).get(MANIFEST)
        if stamp is None:
            return None
        if self._manifests.get(name, ("", None))[0] != stamp:
            self._manifests[name] = (stamp, self.manifest(name).get("plan_id"))
        return self._manifests[name][1]

    def manifest(self, name: str) -> dict[str, Any]:
        """The manifest of a target; empty without a manifest of ours."""
        return own_manifest(self.out.read(f"{name}/{MANIFEST}")) or {}

    def path_of(self, name: str) -> str:
        """Where the record of a checkpoint is."""
        return f"{SEEN}/{self.identify(self.run.at(name), self.out.at(name))}.json"

    def read(self, name: str, source_stamp: str, now: float) -> CheckpointRecord:
        """The record of a checkpoint; one of its present state if there is none, or none that can be read."""
        record = self._parsed(self.path_of(name))
        if record is None or record.target != name:
            return CheckpointRecord(name, source_stamp, now)
        if record.source_stamp == source_stamp:
            return record
        attempted = record.state in (State.CONVERTING, State.FAILED, State.REFUSED)
        state = State.SEEN if attempted else record.state
        begun = replace(record, source_stamp=source_stamp, since=now, state=state)
        return replace(begun, failures=0, reason="", looked_at=0.0)

    def write(self, record: CheckpointRecord) -> None:
        """Write the record of a checkpoint."""
        self.replace(self.path_of(record.target), record)

    def unchanged_since(self, name: str, source_stamp: str, now: float) -> float:
        """When a checkpoint was first seen in its present state; recorded for other watchers."""
        record = self.read(name, source_stamp, now)
        if record.since == now:
            self.write(record)
        return record.since

    def all(self) -> dict[str, CheckpointRecord]:
        """Every record next to the targets, also of watchers with other options: path → record."""
        records = {}
        for file, stamp in self.out.files(SEEN).items():
            if file.startswith(".") or int(stamp.partition(":")[0]) > MAX_RECORD_BYTES:
                continue
            if self._known.get(file, ("", None))[0] != stamp:
                self._known[file] = stamp, self._parsed(f"{SEEN}/{file}")
            if (record := self._known[file][1]) is not None:
                records[f"{SEEN}/{file}"] = record
        return records

    def _parsed(self, path: str) -> CheckpointRecord | None:
        try:
            return CheckpointRecord.parse(self.out.read(path) or b"")
        except ValueError:
            return None

    def replace(self, path: str, record: CheckpointRecord) -> None:
        """Write a record at its path."""
        self.out.replace(path, json.dumps(asdict(record)).encode())

    def note(self, outcome: Outcome) -> None:
        """Add an outcome to the audit log. A log that cannot be written is a warning: the work is done."""
        try:
            self.out.append(AUDIT, json.dumps(outcome.data()).encode())
        except (OSError, ListingError) as error:
            log.warning("%s: not in the audit log: %s", outcome.target, error)


def digest(files: Mapping[str, str]) -> str:
    """A fingerprint of all files of a folder; empty for an empty folder."""
    text = json.dumps(sorted(files.items()))
    return hashlib.sha256(text.encode()).hexdigest()[:16] if files else ""


def conversion_id(identity: Mapping[str, Any]) -> str:
    """The id of a conversion: a hash of what decides its outcome.

    >>> conversion_id({"source": "/a", "target": "/b", "to": "tp=1"})
    'paddle-reshard-fee32f995f451960'
    """
    text = json.dumps(identity, sort_keys=True, separators=(",", ":"))
    return f"paddle-reshard-{hashlib.sha256(text.encode()).hexdigest()[:16]}"
