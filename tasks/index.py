"""Read the metadata of a checkpoint's files: ranged reads, no payload.

Each format is imported by what reads it: most checkpoints are of one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from paddle_reshard.pipeline.core.catalog import Catalog
from paddle_reshard.pipeline.core.events import FilesRead, Observer, ignore_events
from paddle_reshard.pipeline.core.file_names import MODEL_META
from paddle_reshard.pipeline.layouts.checkpoint import Checkpoint, MissingPolicy
from paddle_reshard.pipeline.layouts.hybrid.names import parse_rank_file
from paddle_reshard.pipeline.layouts.model import Model
from paddle_reshard.pipeline.layouts.model_meta import parse_model_meta
from paddle_reshard.pipeline.layouts.reading import (
    IndexFiles,
    Readable,
    T,
    index_safetensors,
    index_tensor_file,
    read_json,
    read_lr_scheduler,
)
from paddle_reshard.pipeline.layouts.rules import RuleTable

if TYPE_CHECKING:
    from paddle_reshard.pipeline.layouts.huggingface.target import HuggingFaceTarget
    from paddle_reshard.storage.formats.safetensors import Index

FILES_IN_FLIGHT = 64
"""Files whose metadata are read at a time from a store that answers late: each waits most of the time."""
LATE_SECONDS = 0.1
"""Waiting for a store, all files together, that is too little to start threads for."""


def index_here(
    index: Callable[[Readable, str, int], T],
    store: Readable,
    sizes: Mapping[str, int],
    observe: Observer = ignore_events,
) -> dict[str, T]:
    """Index files in this process: one by one, and side by side as soon as the store turns out to answer late.

    Threads only help while they wait. Where a disk answers at once they fight for the interpreter, and the same files
    take twice as long.

    ``observe`` receives the number of files read so far.
    """
    found: dict[str, T] = {}
    for path, one in _indexed(index, store, sizes):
        found[path] = one
        observe(FilesRead(len(found), len(sizes)))
    return found


def _indexed(
    index: Callable[[Readable, str, int], T], store: Readable, sizes: Mapping[str, int]
) -> Iterator[tuple[str, T]]:
    pending = iter(sizes.items())
    waited = worked = 0.0
    for path, size_bytes in pending:
        began, began_work = time.perf_counter(), time.thread_time()
        one = index(store, path, size_bytes)
        work = time.thread_time() - began_work
        worked += work
        waited += time.perf_counter() - began - work
        yield path, one
        if waited > max(LATE_SECONDS, 2 * worked):
            break
    if rest := dict(pending):
        from concurrent.futures import ThreadPoolExecutor

        with ThreadPoolExecutor(FILES_IN_FLIGHT) as pool:
            yield from zip(rest, pool.map(partial(index, store), rest, rest.values()), strict=True)


def index_huggingface(
    store: Readable, sizes: Mapping[str, int], model: Model, target: HuggingFaceTarget | None = None
) -> Catalog:
    """The parameters of ``model``, as a Hugging Face checkpoint holds them.

    Parameters
    ----------
    sizes
        Path of every file → size in bytes.
    target
        What it must have been made as, where that is known.

    Raises
    ------
    CheckpointError
        If it holds another model, or is not whole; naming the tensor and the file.
    """
    from paddle_reshard.pipeline.layouts.huggingface.source import read_huggingface
    from paddle_reshard.pipeline.layouts.huggingface.target import INDEX

    weights = _sizes_of_safetensors(sizes)
    payloads = index_here(index_safetensors, store, weights)
    return read_huggingface(model, weights, payloads, _read_index(store, INDEX, sizes), target)


def holds_huggingface(store: Readable, sizes: Mapping[str, int]) -> bool:
    """Whether the files are weights in the layout of Hugging Face, without any other file of a training checkpoint."""
    from paddle_reshard.pipeline.layouts.huggingface.source import is_huggingface
    from paddle_reshard.pipeline.layouts.weights import PADDLE_LAYOUTS

    if not is_huggingface(sizes):
        return False
    first = min(_sizes_of_safetensors(sizes))
    payload = index_safetensors(store, first, sizes[first])
    return payload.metadata.get("format") not in PADDLE_LAYOUTS


def index_weights(
    store: Readable, sizes: Mapping[str, int], config: Mapping[str, Any], tables: Sequence[RuleTable]
) -> Checkpoint:
    """A checkpoint of weights only, in the layout of Hugging Face or of Paddle, as its files say."""
    from paddle_reshard.pipeline.layouts.huggingface.source import huggingface_checkpoint
    from paddle_reshard.pipeline.layouts.huggingface.target import INDEX
    from paddle_reshard.pipeline.layouts.unified.source import read_unified
    from paddle_reshard.pipeline.layouts.weights import PADDLE_LAYOUTS

    weights = _sizes_of_safetensors(sizes)
    payloads = index_here(index_safetensors, store, weights)
    index = _read_index(store, INDEX, sizes)
    if any(payload.metadata.get("format") in PADDLE_LAYOUTS for payload in payloads.values()):
        return read_unified(sizes, payloads, {} if index is None else {INDEX: index}, config, tables, None)
    return huggingface_checkpoint(weights, payloads, index, config, tables)


def index_weights_and_states(
    store: Readable,
    sizes: Mapping[str, int],
    config: Mapping[str, Any],
    tables: Sequence[RuleTable],
    missing: MissingPolicy | None,
    index_files: IndexFiles,
) -> Checkpoint:
    """Weights in safetensors files beside the optimizer states of a hybrid checkpoint."""
    from paddle_reshard.pipeline.layouts.hybrid.beside import read_weights_and_states

    payloads = index_here(index_safetensors, store, _sizes_of_safetensors(sizes))
    ranks = {path: size for path, size in sizes.items() if parse_rank_file(path) is not None}
    meta = parse_model_meta(read_json(store, MODEL_META, sizes)) if MODEL_META in sizes else None
    roots = index_files(index_tensor_file, store, ranks)
    return read_weights_and_states(sizes, payloads, roots, meta, config, tables, missing)


def index_unified(
    store: Readable, sizes: Mapping[str, int], config: Mapping[str, Any], tables: Sequence[RuleTable]
) -> Checkpoint:
    """A unified checkpoint with optimizer states."""
    from paddle_reshard.pipeline.layouts.unified.names import MASTER_WEIGHTS, MODEL, OPTIMIZER, index_name
    from paddle_reshard.pipeline.layouts.unified.source import read_unified

    payloads = index_here(index_safetensors, store, _sizes_of_safetensors(sizes))
    found = {kind: _read_index(store, index_name(kind), sizes) for kind in (MODEL, OPTIMIZER, MASTER_WEIGHTS)}
    indexes = {index_name(kind): index for kind, index in found.items() if index is not None}
    return read_unified(sizes, payloads, indexes, config, tables, read_lr_scheduler(store, sizes))


def _sizes_of_safetensors(sizes: Mapping[str, int]) -> dict[str, int]:
    return {path: size for path, size in sizes.items() if path.endswith(".safetensors")}


def _read_index(store: Readable, path: str, sizes: Mapping[str, int]) -> Index | None:
    """An index file. That of optimizer states which are not merged names no files."""
    from paddle_reshard.pipeline.layouts.unified.names import OPTIMIZER, index_name
    from paddle_reshard.storage.formats.safetensors import Index, parse_index

    if path not in sizes:
        return None
    facts = read_json(store, path, sizes)
    if "weight_map" not in facts and path == index_name(OPTIMIZER):
        return Index({}, {}, facts)
    return parse_index(store.read(path, 0, sizes[path]), path)
