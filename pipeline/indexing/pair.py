"""Index two folders that are to be compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paddle_reshard.pipeline.checkpoint.checkpoint import Checkpoint, Job, MissingPolicy
from paddle_reshard.pipeline.checkpoint.parameter_names import compare_names
from paddle_reshard.pipeline.checkpoint.reading import IndexFiles, SourceFiles, check_given_config, read_json
from paddle_reshard.pipeline.core.catalog import Catalog
from paddle_reshard.pipeline.core.file_names import CONFIG, MODEL_META
from paddle_reshard.pipeline.core.limits import MAX_META_BYTES
from paddle_reshard.pipeline.formats.model_meta import without_names
from paddle_reshard.pipeline.formats.registry import format_of
from paddle_reshard.pipeline.indexing import small_files
from paddle_reshard.pipeline.indexing.detect import check_names, index_source
from paddle_reshard.pipeline.model.rules.tables import RuleTables
from paddle_reshard.storage.store import Source
from paddle_reshard.tasks.index import index_here


@dataclass(frozen=True)
class Contents:
    """The contents of a checkpoint that are compared."""

    catalog: Catalog
    job: Job
    convention: str
    """The library whose files it has; empty for a model without training state."""

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> Contents:
        """The contents of an indexed checkpoint."""
        return cls(checkpoint.catalog, checkpoint.job, checkpoint.model.table.convention)


def compare_jobs(
    stores: Sequence[Source], a: Contents, b: Contents
) -> tuple[list[tuple[str, str]], list[str]]:
    """Compare parameter names and ``model_meta.json`` of two checkpoints, as far as they are of jobs alike.

    Returns what is damage, as ``(what, detail)``, and in words what may differ between the jobs.
    """
    names = compare_names(a.job.names, b.job.names)
    differences, remarks = list(names.differences), []
    if names.renamed:
        remarks.append(
            f"{names.renamed}; all parameters are called so in the two jobs, and a job finds states under its own names"
        )
    if any(MODEL_META not in store.sizes() for store in stores) or a.job.topology != b.job.topology:
        return differences, remarks
    if a.job.topology is None:
        sizes = {min(store.sizes()[MODEL_META], MAX_META_BYTES) for store in stores}
        if len(sizes) > 1 or len({store.read(MODEL_META, 0, max(sizes)) for store in stores}) > 1:
            remarks.append(
                f"{MODEL_META} is not compared, and differs: of a FlexCheckpoint a trainer reads it only with "
                "--enable_zero_cost_checkpoint and an average, and then compares the degrees with its own"
            )
        return differences, remarks
    kinds = [(side.convention, side.job.strategy, side.job.comm_overlap) for side in (a, b)]
    if kinds[0] != kinds[1]:
        jobs = [
            f"{library}, {strategy}, {'with' if overlap else 'without'} comm overlap"
            for library, strategy, overlap in kinds
        ]
        remarks.append(f"{MODEL_META} is not compared: A is of a job of {jobs[0]}, B of one of {jobs[1]}")
        return differences, remarks
    of_a, of_b = (without_names(read_json(store, MODEL_META, store.sizes())) for store in stores)
    for entry in small_files.differences(of_a, of_b):
        differences.append((f"{MODEL_META}: {entry.what}", f"{entry.a} in A, {entry.b} in B"))
    return differences, remarks


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
        check_given_config(store, config)
    for store in (a, b):
        if config is None and CONFIG in store.sizes():
            config = read_json(store, CONFIG, store.sizes())
    first, second = (SourceFiles(store, config, index_here, index_files) for store in (a, b))
    first_as, second_as = format_of(first).index_as, format_of(second).index_as
    if first_as is not None and second_as is None:
        known = index_source(second, tables, missing)
        return Contents(first_as(first, known.model), Job(), ""), Contents.of(known)
    if second_as is not None and first_as is None:
        known = index_source(first, tables, missing)
        return Contents.of(known), Contents(second_as(second, known.model), Job(), "")
    of_a, of_b = (index_source(files, tables, missing, pieces=True) for files in (first, second))
    check_names(a.location, of_a)
    check_names(b.location, of_b)
    if of_a.model.table.ranks_in_a_row != of_b.model.table.ranks_in_a_row:  # comparable only rank by rank
        for model in (of_a.model, of_b.model):
            model.table.check_whole(model.config)
    return Contents.of(of_a), Contents.of(of_b)
