"""Determine whether a checkpoint of a training run is complete, by listing its files and reading their metadata."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from paddle_reshard.pipeline.changes.change import Reading
from paddle_reshard.pipeline.changes.kinds import Fill
from paddle_reshard.pipeline.changes.read import OpenChanges
from paddle_reshard.pipeline.checkpoint.checkpoint import MissingPolicy
from paddle_reshard.pipeline.core.errors import CheckpointError, unfinished
from paddle_reshard.pipeline.core.version import __version__
from paddle_reshard.pipeline.indexing.finished import Incomplete, doubtful_signal, lacking, merging, settling
from paddle_reshard.pipeline.request.inputs import load_config, load_tables
from paddle_reshard.pipeline.request.parse import Values
from paddle_reshard.pipeline.watch.records import Records, State, digest
from paddle_reshard.storage.locate import open_source, source_access
from paddle_reshard.tasks.index import index_here

LISTED_SECONDS = 600.0
"""Time for which a listing that has not changed is enough to know that a checkpoint still lacks the same. Then it is
indexed again: what it lacked may have been access to a file, which no listing tells."""


class Inspector:
    """Inspects checkpoints. One that has not changed since is not indexed again, whether it was complete or not."""

    def __init__(self, records: Records, options: Values, settle_seconds: float) -> None:
        self.records, self.settle_seconds, self.access = records, settle_seconds, source_access(options)
        missing = MissingPolicy(allowed=options.get("allow_missing") or ())
        self.reading = Reading(
            load_tables(options.get("rules"), options.get("convention")),
            load_config(options.get("config")),
            missing,
            index_here,
        )
        fill = Fill.from_option(options.get("fill"), ())
        self.changes = OpenChanges.open((fill,) if fill else (), self.access)
        self._complete: dict[str, tuple[str, str | None]] = {}
        """Checkpoint → its state when it was indexed, and why its signals may be of an earlier save, if they may."""

    def look(self, name: str, order: Sequence[str], now: float) -> Incomplete | None:
        """Why a checkpoint is incomplete, or ``None``; a ``ReshardError`` if it is complete and cannot be converted.

        It is damaged if its names mark it as finished, and it has not changed for as long as it takes to settle.

        ``order`` are all checkpoints of the run, by step.
        """
        files = self.records.run.files(name)
        stamp = digest(files)
        record = self.records.read(name, stamp, now)
        lacks = self._lacks(name, files, order)
        settled = lacks is None and now - record.since >= self.settle_seconds
        if record.state in (State.CONVERTING, State.FAILED):
            return None  # it was complete when that attempt began, and has not changed since
        if not settled and record.version == __version__ and 0 <= now - record.looked_at < LISTED_SECONDS:
            return Incomplete(record.reason, record.since)
        error = self._lacking(name, stamp)
        if error is not None:
            if settled and not (error.retryable or error.unfinished):
                return Incomplete(str(error), record.since, damaged=True)
            reason = str(error)
            if self.records.read(name, stamp, now) == record:  # to index takes a while, and others may go on
                self.records.write(replace(record, reason=reason, looked_at=now, version=__version__))
            return Incomplete(reason, record.since)
        doubt = lacks or self._complete[name][1]
        if doubt is None or self.settle_seconds == 0:
            return None
        since = self.records.unchanged_since(name, stamp, now)
        return settling(doubt, since, now, self.settle_seconds)

    def _lacking(self, name: str, stamp: str) -> CheckpointError | None:
        """Why a checkpoint is incomplete, by its files and their metadata."""
        if name not in self._complete or self._complete[name][0] != stamp:
            try:
                doubt = self._index(name)
            except CheckpointError as error:
                return error
            if digest(self.records.run.files(name)) != stamp:
                return unfinished("its files are still changing")
            self._complete[name] = stamp, doubt
        return None

    def _lacks(self, name: str, files: Mapping[str, str], order: Sequence[str]) -> str | None:
        """What the trainer has yet to write, by the names of the files; ``None`` if all is there."""
        number = order.index(name)
        before = self.records.run.files(order[number - 1]) if number else {}
        return merging(files) or lacking(files, before)

    def _index(self, name: str) -> str | None:
        source = open_source(self.records.run.at(name), *self.access)
        self.changes.index(source, self.reading)
        return doubtful_signal(source.modified())
