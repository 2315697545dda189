"""List the checkpoints of a run: what each holds, whether it is complete, and what was made of it."""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from paddle_reshard.pipeline.core.backports import Unpack
from paddle_reshard.pipeline.core.errors import CheckpointError, ListingError, ReshardError
from paddle_reshard.pipeline.core.events import Observer, ignore_events
from paddle_reshard.pipeline.core.file_names import MANIFEST
from paddle_reshard.pipeline.core.shown import Bytes, Facts, Result
from paddle_reshard.pipeline.core.tensors import in_words
from paddle_reshard.pipeline.core.trainer_files import steps_of
from paddle_reshard.pipeline.core.units import PathLike
from paddle_reshard.pipeline.examine.inspection import Inspection, inspect_store
from paddle_reshard.pipeline.indexing.finished import check_signals, is_damage, lacking, merging
from paddle_reshard.pipeline.indexing.opening import open_checkpoint
from paddle_reshard.pipeline.request.options import with_options
from paddle_reshard.pipeline.request.read_options import InspectOptions
from paddle_reshard.storage.documents.manifest import own_manifest
from paddle_reshard.storage.listing import CheckpointRoot, open_root
from paddle_reshard.storage.locate import source_access
from paddle_reshard.storage.store import Source


@dataclass(frozen=True, slots=True)
class RunCheckpoint:
    """A checkpoint of a run."""

    name: str
    step: int
    format: str | None
    """``None`` if it cannot be read; so are the following."""
    topology: str | None
    """``None`` also if the format does not record it."""
    sharding_strategy: str | None
    states: tuple[str, ...]
    tensor_bytes: int
    problem: str | None
    """Why it is incomplete, or cannot be read; ``None`` if nothing is missing."""
    made_from: str | None
    """The source in its manifest, for display only; ``None`` for a checkpoint that a trainer wrote."""
    converted_to: tuple[str, ...]
    """Targets of the same name below the given folders, each as ``location (topology or format)``."""


@dataclass(frozen=True, slots=True, repr=False)
class Run(Result):
    """The checkpoints of a run."""

    path: str
    checkpoints: tuple[RunCheckpoint, ...]
    """By step."""

    def __iter__(self) -> Iterator[RunCheckpoint]:
        """The checkpoints, by step."""
        return iter(self.checkpoints)

    def _in_short(self) -> str:
        complete = sum(checkpoint.problem is None for checkpoint in self.checkpoints)
        return f"{self.path}: {len(self.checkpoints)} checkpoints, {complete} complete"

    def facts(self) -> Facts:
        """A line for each checkpoint."""
        return [
            (checkpoint.name, f"{checkpoint.format or '?'}, {checkpoint.problem or 'complete'}")
            for checkpoint in self.checkpoints
        ]

    def rows(self) -> list[tuple[str | int, ...]]:
        """The cells under :data:`HEADINGS`."""
        return [
            (
                checkpoint.name,
                checkpoint.format or "?",
                checkpoint.topology or ("any" if checkpoint.format else "?"),
                checkpoint.sharding_strategy or ("any" if checkpoint.format else "?"),
                " ".join(checkpoint.states),
                Bytes(checkpoint.tensor_bytes),
                checkpoint.problem or "complete",
                checkpoint.made_from or "",
                ", ".join(checkpoint.converted_to),
            )
            for checkpoint in self.checkpoints
        ]

    def rows_in_short(self) -> list[tuple[str, ...]]:
        """The cells under :data:`HEADINGS_IN_SHORT`."""
        return [
            (
                checkpoint.name,
                _job_in_words(checkpoint),
                in_words(checkpoint.states),
                checkpoint.problem or ("complete" if checkpoint.made_from is None else "converted"),
                ", ".join(checkpoint.converted_to),
            )
            for checkpoint in self.checkpoints
        ]


HEADINGS_IN_SHORT = ("checkpoint", "topology", "holds", "status", "converted to")
HEADINGS = (
    *("checkpoint", "format", "topology", "sharding", "holds"),
    *("size", "status", "made from", "converted to"),
)


@with_options(InspectOptions)
def ls(
    run: PathLike,
    *,
    targets: Sequence[PathLike] = (),
    observe: Observer = ignore_events,
    **options: Unpack[InspectOptions],
) -> Run:
    """List the checkpoints of a run from their metadata.

    Parameters
    ----------
    run
        Path or URL of the folder that holds ``checkpoint-<step>`` folders.
    targets
        Folders with conversions, as ``watch`` fills them: what was made of ``checkpoint-7`` is there under that name.

    Raises
    ------
    ListingError
        If there is no such folder.
    """
    access = source_access(options)
    roots = [open_root(os.fspath(at), access.options) for at in (run, *targets)]
    here, *elsewhere = roots
    for root in roots:
        if not root.is_there():
            raise ListingError(f"{root.location}: no such folder")
    listed = []
    before: frozenset[str] = frozenset()
    for step, name in steps_of(here.folders()):
        files = here.files(name)
        seen = look_at(here, name, files, before, options, observe)
        if seen.made is None:
            before = frozenset(files)
        listed.append(_described(name, step, seen, elsewhere))
    return Run(here.location, tuple(listed))


@dataclass(frozen=True, slots=True)
class Seen:
    """What the files of a checkpoint in a run say."""

    described: Inspection | None
    """``None`` if it cannot be read."""
    problem: str | None
    """As in :class:`RunCheckpoint`."""
    unfinished: bool
    """Whether the problem is that its trainer may still write it, or died while it did."""
    made: Mapping[str, object] | None
    """Our manifest; ``None`` for a checkpoint that a trainer wrote."""


def look_at(
    here: CheckpointRoot,
    name: str,
    files: Mapping[str, str],
    before: Collection[str],
    options: InspectOptions,
    observe: Observer = ignore_events,
) -> Seen:
    """Describe a checkpoint of a run, and say whether it is complete.

    ``files``: those in it, as ``here`` lists them; ``before``: those of the one that the trainer wrote before it.
    """
    doubt, made = merging(files), None
    try:
        made = own_manifest(here.read(f"{name}/{MANIFEST}") if MANIFEST in files else None)
    except ListingError as error:  # of this checkpoint only: a pipe, or larger than any manifest
        doubt = str(error)
    if made is None:
        doubt = doubt or lacking(files, before)
    unfinished = doubt is not None
    described: Inspection | None = None
    store: Source | None = None
    try:
        store = open_checkpoint(here.at(name), source_access(options))
        described = inspect_store(store, observe, options)
        check_signals(store)
    except ReshardError as error:
        damaged = doubt is None and store is not None and is_damage(error, store.modified(), time.time())
        doubt = f"damaged: it is marked as finished, but {error}" if damaged else str(error)
        unfinished = unfinished or (isinstance(error, CheckpointError) and error.unfinished)
    return Seen(described, doubt, unfinished, made)


def _described(name: str, step: int, seen: Seen, elsewhere: Sequence[CheckpointRoot]) -> RunCheckpoint:
    described, source = seen.described, seen.made.get("source") if seen.made else None
    return RunCheckpoint(
        name,
        step,
        described.format if described else None,
        str(described.topology) if described and described.topology else None,
        described.sharding_strategy if described else None,
        tuple(state.state for state in described.states) if described else (),
        described.tensor_bytes if described else 0,
        seen.problem,
        str(source.get("location")) if isinstance(source, dict) else None,
        tuple(said for root in elsewhere if (said := _target(root, name))),
    )


def _job_in_words(checkpoint: RunCheckpoint) -> str:
    if checkpoint.format is None:
        return "?"
    if checkpoint.topology is None:
        return f"any ({checkpoint.format})"
    return f"{checkpoint.topology} {checkpoint.sharding_strategy or ''}".rstrip()


def _target(root: CheckpointRoot, name: str) -> str | None:
    """What a folder of conversions holds under a name, by its manifest; ``None`` if nothing."""
    try:
        made = own_manifest(root.read(f"{name}/{MANIFEST}"))
    except ListingError as error:
        return str(error)
    return None if made is None else f"{root.at(name)} ({made.get('layout') or made.get('topology')})"
