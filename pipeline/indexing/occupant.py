"""What lies where a target is to be: which checkpoint, for a refusal, and which states, for a replacement.

Whatever is there was written by others, and a word about it is all that is wanted: it is read as a source is, within
limits, and what cannot be read so is told by its names or not at all.
"""

from __future__ import annotations

from collections.abc import Collection

from paddle_reshard.pipeline.checkpoint.checkpoint import Checkpoint, MissingPolicy
from paddle_reshard.pipeline.core.file_names import MANIFEST
from paddle_reshard.pipeline.core.tensors import EMA_STATES, PARAM
from paddle_reshard.pipeline.core.trainer_files import is_tensor_file
from paddle_reshard.pipeline.indexing.detect import index_checkpoint
from paddle_reshard.pipeline.indexing.opening import dequantising
from paddle_reshard.pipeline.model.rules.tables import shipped_tables
from paddle_reshard.storage.documents.manifest import own_manifest
from paddle_reshard.storage.locate import Access, open_source
from paddle_reshard.storage.store import Source

MOST_TENSOR_FILES = 256
"""Number of files beyond which the names have to do: each takes a request or two."""
MOST_OTHER_BYTES = 64 << 20
"""Size of all other files together beyond which none is read."""


def checkpoint_in_words(location: str, access: Access) -> str:
    """Which checkpoint lies at a location that we did not write; empty if it is none, or ours with other files."""
    try:
        store = open_source(location, *access)
        if _is_ours(store):
            return ""
        checkpoint = _indexed(store)
    except Exception:  # noqa: BLE001 (whatever lies there, the refusal is about the target)
        return ""
    return _named(store.sizes()) if checkpoint is None else _described(checkpoint)


def states_held(location: str, access: Access) -> frozenset[str]:
    """The states of the conversion that lies at a location; none if there is none, or it cannot be read."""
    try:
        checkpoint = _indexed(open_source(location, *access))
    except Exception:  # noqa: BLE001 (a damaged target is replaced too)
        return frozenset()
    return frozenset() if checkpoint is None else checkpoint.catalog.tensors.states


def _is_ours(store: Source) -> bool:
    size_bytes = store.sizes().get(MANIFEST)
    if size_bytes is None or size_bytes > MOST_OTHER_BYTES:
        return False
    return own_manifest(store.read(MANIFEST, 0, size_bytes)) is not None


def _indexed(store: Source) -> Checkpoint | None:
    """The checkpoint in a folder; ``None`` if it is too large to be read for a word about it, or is not one whole."""
    sizes = store.sizes()
    tensor_files = [path for path in sizes if is_tensor_file(path)]
    others = sum(size for path, size in sizes.items() if not is_tensor_file(path))
    if not tensor_files or len(tensor_files) > MOST_TENSOR_FILES or others > MOST_OTHER_BYTES:
        return None
    try:
        missing = MissingPolicy(allowed=("*",))
        return index_checkpoint(dequantising(store), shipped_tables(), missing=missing, pieces=True)
    except Exception:  # noqa: BLE001 (half a checkpoint, a damaged one, or files that only have such names)
        return None


def _described(checkpoint: Checkpoint) -> str:
    """Who wrote it, for which job, and what it holds beside parameters."""
    table, job = checkpoint.model.table, checkpoint.job
    library = table.library or table.convention
    what = f"{checkpoint.format} checkpoint" if job.topology is None else "checkpoint"
    states = checkpoint.catalog.tensors.states
    averages = states.intersection(EMA_STATES)
    holds = ["optimizer states"] * bool(states - averages - {PARAM}) + ["moving averages"] * bool(averages)
    of_job = "" if job.topology is None else f" of {library}, {job.topology}"
    return f"a {what}{of_job}{', with ' if holds else ''}{' and '.join(holds)}"


def _named(paths: Collection[str]) -> str:
    """What the names alone tell."""
    tensor_files = sorted(path for path in paths if is_tensor_file(path))
    if not tensor_files:
        return ""
    also = f" and {len(tensor_files) - 1} more" if len(tensor_files) > 1 else ""
    return f"files of a checkpoint ({tensor_files[0]}{also})"
