"""Index two folders that are to be compared."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paddle_reshard.pipeline.checkpoint.checkpoint import Checkpoint, MissingPolicy
from paddle_reshard.pipeline.checkpoint.reading import IndexFiles, SourceFiles, read_json
from paddle_reshard.pipeline.core.catalog import Catalog
from paddle_reshard.pipeline.core.file_names import CONFIG
from paddle_reshard.pipeline.formats.registry import format_of
from paddle_reshard.pipeline.indexing.detect import index_source
from paddle_reshard.pipeline.model.rules.tables import RuleTables
from paddle_reshard.storage.store import Source
from paddle_reshard.tasks.index import index_here


@dataclass(frozen=True)
class Contents:
    """The contents of a checkpoint that are compared."""

    catalog: Catalog
    lr_scheduler: Any

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> Contents:
        """The contents of an indexed checkpoint."""
        return cls(checkpoint.catalog, checkpoint.job.lr_scheduler)


def index_pair(
    a: Source,
    b: Source,
    tables: RuleTables,
    config: Mapping[str, Any] | None = None,
    missing: MissingPolicy | None = None,
    index_files: IndexFiles = index_here,
) -> tuple[Contents, Contents]:
    """Index two checkpoints that are to be compared. One without ``config.json`` is read with that of the second.

    If only one of them has a format for models without training state, it is read as the model of the second.
    """
    for store in (a, b):
        if config is None and CONFIG in store.sizes():
            config = read_json(store, CONFIG, store.sizes())
    first, second = (SourceFiles(store, config, index_here, index_files) for store in (a, b))
    first_as, second_as = format_of(first).index_as, format_of(second).index_as
    if first_as is not None and second_as is None:
        known = index_source(second, tables, missing)
        return Contents(first_as(first, known.model), None), Contents.of(known)
    if second_as is not None and first_as is None:
        known = index_source(first, tables, missing)
        return Contents.of(known), Contents(second_as(second, known.model), None)
    of_a, of_b = (index_source(files, tables, missing, pieces=True) for files in (first, second))
    if of_a.model.table.ranks_in_a_row != of_b.model.table.ranks_in_a_row:  # comparable only rank by rank
        for model in (of_a.model, of_b.model):
            model.table.check_whole(model.config)
    return Contents.of(of_a), Contents.of(of_b)
