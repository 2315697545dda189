"""What is in two folders that are to be compared?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paddle_reshard.pipeline.core.catalog import Catalog
from paddle_reshard.pipeline.core.file_names import CONFIG
from paddle_reshard.pipeline.indexing.detect import index_checkpoint
from paddle_reshard.pipeline.layouts.checkpoint import Checkpoint, MissingPolicy
from paddle_reshard.pipeline.layouts.reading import IndexFiles, read_json
from paddle_reshard.pipeline.layouts.rules import RuleTable
from paddle_reshard.storage.store import Source
from paddle_reshard.tasks.index import holds_huggingface, index_here, index_huggingface


@dataclass(frozen=True)
class Contents:
    """What two checkpoints are compared by."""

    catalog: Catalog
    lr_scheduler: Any

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> Contents:
        """Of a checkpoint that is understood."""
        return cls(checkpoint.catalog, checkpoint.lr_scheduler)


def index_pair(
    a: Source,
    b: Source,
    tables: Sequence[RuleTable],
    config: Mapping[str, Any] | None = None,
    missing: MissingPolicy | None = None,
    index_files: IndexFiles = index_here,
) -> tuple[Contents, Contents]:
    """Understand two checkpoints that are to be compared; one that has no ``config.json`` is read by the other's.

    If one of them is a Hugging Face checkpoint, it holds the parameters of the other one's model.
    """
    for store in (a, b):
        if config is None and CONFIG in store.sizes():
            config = read_json(store, CONFIG, store.sizes())
    foreign = [holds_huggingface(store, store.sizes()) for store in (a, b)]
    if all(foreign) or not any(foreign):
        one, two = (index_checkpoint(store, tables, config, missing, index_files) for store in (a, b))
        return Contents.of(one), Contents.of(two)
    known, other = (b, a) if foreign[0] else (a, b)
    checkpoint = index_checkpoint(known, tables, config, missing, index_files)
    pair = Contents.of(checkpoint), Contents(index_huggingface(other, other.sizes(), checkpoint.model), None)
    return (pair[1], pair[0]) if foreign[0] else pair
