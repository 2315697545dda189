"""The portion of a target that some ranks of its job read: the files that each node of a job can make for itself."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from paddle_reshard.pipeline.checkpoint.checkpoint import Checkpoint
from paddle_reshard.pipeline.checkpoint.files import TargetFiles
from paddle_reshard.pipeline.checkpoint.format import JobTarget, Target
from paddle_reshard.pipeline.checkpoint.training_job import TrainingJob, coordinates_of
from paddle_reshard.pipeline.core.catalog import Catalog
from paddle_reshard.pipeline.core.errors import UnsupportedError, UsageError
from paddle_reshard.pipeline.core.geometry import MAX_DIMS
from paddle_reshard.pipeline.core.literals import Literals
from paddle_reshard.pipeline.core.ranks import ranks_in_words
from paddle_reshard.pipeline.formats.registry import FORMATS, names_of


@dataclass(frozen=True)
class Portion:
    """Which portion of which whole a conversion makes."""

    ranks: tuple[int, ...]
    """Global ranks of the job, in order."""
    world_size: int
    plan_id: str
    """Of the plan of the whole."""
    digest: str
    """Of what every file of the whole holds, and of the state of the source: equal for all portions of one whole."""
    written_bytes: int
    """Size of the whole."""
    files: TargetFiles
    """The whole, without its fragments."""
    job: TrainingJob

    def in_words(self) -> str:
        """Which ranks of how many."""
        return f"ranks {ranks_in_words(self.ranks)} of {self.world_size}"

    def data(self) -> dict[str, Any]:
        """The same for JSON output; ``whole`` is the digest of the whole."""
        return {"ranks": ranks_in_words(self.ranks), "world_size": self.world_size, "whole": self.digest}

    def recorded(self) -> dict[str, Any]:
        """The same for manifests, with the job, which the files of some ranks do not tell."""
        return {**self.data(), "job": {**asdict(self.job), "switches": list(self.job.switches)}}


def files_of_ranks(
    target: Target, source: Checkpoint, paths: Sequence[str], ranks: Sequence[int]
) -> frozenset[str]:
    """The files that ``ranks`` of the job read, if that is known: their own, and all files that belong to no rank."""
    job, asked = job_of(target, source, ranks), f"--ranks {ranks_in_words(ranks)}"
    format = FORMATS[target.format]
    files = set()
    for rank in ranks:
        place = _place(job, rank)
        own = [
            path
            for path in paths
            if format.process_of(path) == rank
            or ((named := format.rank_of(path)) is not None and named.items() <= place.items())
        ]
        if not own:
            raise UnsupportedError(
                f"{asked}: which files rank {rank} of {job.topology} reads is not known: no file is named after it"
            )
        files.update(own)
    return frozenset(files) | {
        path for path in paths if format.process_of(path) is None and format.rank_of(path) is None
    }


def job_of(target: Target, source: Checkpoint, ranks: Sequence[int]) -> TrainingJob:
    """The job of which ``ranks`` are some.

    A ``UsageError`` if the target has no files of ranks, or its job has no such ranks.
    """
    asked = f"--ranks {ranks_in_words(ranks)}"
    if not isinstance(target, JobTarget):
        by_rank = names_of((f for f in FORMATS.values() if "to" in f.options), "or")
        raise UsageError(
            f"{asked}: {target.in_words()} has no files of ranks; give --to, and --format {by_rank}"
        )
    job = target.job(source)
    world_size = job.topology.world_size
    if ranks[-1] >= world_size:
        raise UsageError(f"{asked}: {job.topology} has the ranks 0-{world_size - 1}")
    return job


def _place(job: TrainingJob, rank: int) -> Mapping[str, int]:
    """The coordinates of a rank, as file names have them."""
    tp, pp, shard, dp = coordinates_of(rank, job.topology, job.library)
    return {"tp": tp, "pp": pp, "sharding": shard, "dp": dp, "ep": job.topology.expert_rank(tp, shard)}


def portion_of(whole: TargetFiles, paths: frozenset[str]) -> TargetFiles:
    """The target with only some of its files."""
    kept = np.array([file.path in paths for file in whole.files], dtype=bool)
    number = np.cumsum(kept) - 1
    literals = Literals()
    for file, offset, content in whole.literals:
        if kept[file]:
            literals.add(int(number[file]), offset, content)
    fragments = whole.fragments[kept[whole.fragments["file"]]]
    fragments["file"] = number[fragments["file"]]
    return replace(
        whole,
        files=tuple(file for file, keep in zip(whole.files, kept, strict=True) if keep),
        literals=literals,
        fills=tuple((int(number[f]), start, nbytes) for f, start, nbytes in whole.fills if kept[f]),
        fragments=fragments,
    )


def digest_of(
    files: TargetFiles, catalog: Catalog, carried: Sequence[tuple[str, int]], state: Mapping[str, object]
) -> str:
    """A hash of what every file holds: names, literal bytes, and boxes of tensors; and of the ``state`` of the source.

    It depends neither on how the bytes get there nor on where they go.
    """
    digest = hashlib.sha256(repr((files.files, sorted(carried), files.fills, sorted(state.items()))).encode())
    for content in files.literals.contents():
        digest.update(content)
    boxes = files.fragments
    columns = [boxes[name] for name in ("file", "byte_base", "dtype", "tensor")]
    columns += [
        boxes.along(field, dim) for field in ("offset", "extents", "strides") for dim in range(MAX_DIMS)
    ]
    for column in (*columns, files.literals.files, files.literals.offsets, files.literals.sizes):
        digest.update(np.ascontiguousarray(column, dtype=np.int64).data)
    for number in np.unique(boxes["tensor"]).tolist():
        digest.update(repr(catalog.tensors[number].label).encode())
    return f"sha256:{digest.hexdigest()}"
