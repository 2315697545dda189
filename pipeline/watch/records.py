"""The files of a training run and its targets: claims, manifests, and records of when checkpoints were seen.

::

    DST_ROOT/checkpoint-<step>/paddle_reshard.json     the manifest: this target is complete
    DST_ROOT/.paddle_reshard/claims/<id>.json          attempt 1 of conversion <id>: who, since when, how it ended
    DST_ROOT/.paddle_reshard/claims/<id>.2.json        attempt 2, made when attempt 1 had failed or died
    DST_ROOT/.paddle_reshard/seen/<id>.json            the state of a checkpoint that may be unfinished
    DST_ROOT/.paddle_reshard/audit.jsonl               how every attempt ended; in an object store audit/<time>-….json

All state is in these files, so it survives restarts and is shared by any number of watchers. This module makes no
decisions.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from paddle_reshard.pipeline.core.errors import ListingError
from paddle_reshard.pipeline.core.file_names import MANIFEST
from paddle_reshard.pipeline.core.outcome import Outcome
from paddle_reshard.pipeline.core.version import __version__
from paddle_reshard.pipeline.watch.claims import CLAIMS, Attempt, Observation, claim_path
from paddle_reshard.storage.formats.manifest import own_manifest
from paddle_reshard.storage.formats.strict_json import parse_json
from paddle_reshard.storage.listing import CheckpointRoot

log = logging.getLogger(__name__)

SEEN = ".paddle_reshard/seen"
AUDIT = ".paddle_reshard/audit"
LARGEST_CLAIM_BYTES = 1 << 16
_CLAIM = re.compile(r"(?P<id>.+?)(?:\.(?P<number>\d+))?\.json")


@dataclass
class Records:
    """Reads and writes records. Unchanged records are not read again."""

    run: CheckpointRoot
    out: CheckpointRoot
    identify: Callable[[str, str], str]
    """Source and target → conversion id."""
    _claims: dict[str, tuple[str, Attempt | None]] = field(default_factory=dict)
    _manifests: dict[str, tuple[str, str | None]] = field(default_factory=dict)

    def conversion_id(self, name: str) -> str:
        """The id of the conversion of a checkpoint."""
        return self.identify(self.run.at(name), self.out.at(name))

    def observe(self, name: str) -> Observation:
        """What is known about a conversion without reading the checkpoint."""
        files = self.out.files(name)
        return Observation(
            source_stamp=digest(self.run.files(name)),
            target_stamp=digest(files),
            plan_id=self._plan_id(name, files),
            version=__version__,
        )

    def plan_id(self, name: str) -> str | None:
        """The plan in a target's manifest; ``None`` without a manifest of ours."""
        return self._plan_id(name, self.out.files(name))

    def _plan_id(self, name: str, files: Mapping[str, str]) -> str | None:
        stamp = files.get(MANIFEST)
        if stamp is None:
            return None
        if self._manifests.get(name, ("", None))[0] != stamp:
            self._manifests[name] = (stamp, self.manifest(name).get("plan_id"))
        return self._manifests[name][1]

    def manifest(self, name: str) -> dict[str, Any]:
        """The manifest of a target; empty without a manifest of ours."""
        return own_manifest(self.out.read(f"{name}/{MANIFEST}")) or {}

    def unchanged_since(self, name: str, stamp: str, now: float) -> float:
        """When a checkpoint was first seen in its present state, in seconds since the epoch.

        The time is recorded for other watchers.
        """
        path = f"{SEEN}/{self.conversion_id(name)}.json"
        try:
            seen = parse_json(self.out.read(path) or b"{}")
        except ValueError:
            seen = {}
        if isinstance(seen, dict) and seen.get("stamp") == stamp and type(seen.get("at")) in (int, float):
            return float(seen["at"])
        self.out.replace(path, json.dumps({"stamp": stamp, "at": now}).encode())
        return now

    # ------------------------------------------------------------------------------------- claims

    def attempts(self, conversion_id: str) -> list[Attempt]:
        """All attempts at a conversion, ascending."""
        return self.all_attempts().get(conversion_id, [])

    def all_attempts(self) -> dict[str, list[Attempt]]:
        """All claims next to the targets: conversion id → attempts, ascending."""
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
                raise ValueError("the claim of a different attempt")
            return attempt
        except ValueError:
            log.warning("%s: not a claim; delete it if no watcher runs", self.out.at(path))
            return None

    def create(self, attempt: Attempt) -> bool:
        """Create the file of an attempt, which claims it. ``False`` if another process has created it."""
        return self.out.create(claim_path(attempt), attempt.data())

    def write(self, attempt: Attempt) -> None:
        """Rewrite the file of an attempt. Only its owner may do this."""
        self.out.replace(claim_path(attempt), attempt.data())

    def note(self, outcome: Outcome) -> None:
        """Add an outcome to the audit log. A log that cannot be written is a warning: the work is done."""
        try:
            self.out.append(AUDIT, json.dumps(outcome.data()).encode())
        except (OSError, ListingError) as error:
            log.warning("%s: not in the audit log: %s", outcome.target, error)

    def root(self, name: str) -> str | None:
        """The root of the fingerprints in a target's manifest."""
        entry = self.manifest(name).get("fingerprints")
        return entry.get("root") if isinstance(entry, dict) else None

    @contextmanager
    def renewed(self, attempt: Attempt, every_seconds: float, clock: Callable[[], float]) -> Iterator[None]:
        """Send heartbeats for an attempt while the block runs."""
        stopped = threading.Event()

        def beat() -> None:
            while not stopped.wait(every_seconds):
                try:
                    self.write(replace(attempt, seen_at=clock()))
                except (OSError, ListingError) as error:
                    log.warning("%s: claim not renewed: %s", attempt.target, error)

        thread = threading.Thread(target=beat, name="claim", daemon=True)
        thread.start()
        try:
            yield
        finally:
            stopped.set()
            thread.join()


def digest(files: Mapping[str, str]) -> str:
    """A fingerprint of all files of a folder; empty for an empty folder."""
    text = json.dumps(sorted(files.items()))
    return hashlib.sha256(text.encode()).hexdigest()[:16] if files else ""
