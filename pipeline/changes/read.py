"""Index a source, and apply the changes that are asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce

from paddle_reshard.pipeline.changes.change import Altered, Change, Reading, Step
from paddle_reshard.pipeline.checkpoint.reading import check_given_config
from paddle_reshard.pipeline.indexing.detect import index_checkpoint
from paddle_reshard.pipeline.indexing.finished import check_signals
from paddle_reshard.storage.locate import Access
from paddle_reshard.storage.store import Source


@dataclass(frozen=True)
class OpenChanges:
    """Changes with what they bring open, in order."""

    changes: tuple[Change, ...]
    steps: tuple[Step, ...]

    @classmethod
    def open(cls, changes: Sequence[Change], access: Access) -> OpenChanges:
        """Open what they bring."""
        return cls(tuple(changes), tuple(change.opened(access) for change in changes))

    def index(self, store: Source, reading: Reading) -> Altered:
        """Index the checkpoint in a store, which may lack what the changes let it lack, and apply them."""
        lenient = reduce(lambda missing, change: change.lets_lack(missing), self.changes, reading.missing)
        pieces = reading.pieces and not any(change.needs_whole for change in self.changes)
        if not any(change.reads_config for change in self.changes):
            check_given_config(store, reading.config)
        checkpoint = index_checkpoint(
            store, reading.tables, reading.config, lenient, reading.index_files, pieces
        )
        check_signals(store)
        return self.apply(
            Altered.of(store, checkpoint), replace(reading, missing=replace(lenient, fills=False))
        )

    def apply(self, altered: Altered, reading: Reading) -> Altered:
        """Apply them to a checkpoint."""
        return reduce(lambda before, step: step(before, reading), self.steps, altered)
