"""Merge an adapter into its base model: both are read as a single checkpoint of parameters, and then converted.

The location of the base comes from the user; a location named in a file of the adapter is never opened.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from paddle_reshard.pipeline.changes.change import Altered, Reading
from paddle_reshard.pipeline.checkpoint.checkpoint import Checkpoint
from paddle_reshard.pipeline.core.catalog import Catalog, File, Fragments
from paddle_reshard.pipeline.core.errors import CheckpointError, UnsupportedError, UsageError
from paddle_reshard.pipeline.core.file_names import LORA_CONFIG
from paddle_reshard.pipeline.core.tensor_columns import Tensors
from paddle_reshard.pipeline.core.tensors import PARAM, DType
from paddle_reshard.pipeline.core.trainer_files import is_training_state
from paddle_reshard.pipeline.indexing.detect import index_checkpoint
from paddle_reshard.pipeline.indexing.finished import check_signals
from paddle_reshard.pipeline.model.lora_config import Adapter
from paddle_reshard.pipeline.model.model import ModelTensor
from paddle_reshard.pipeline.model.rules.rule import LORA, LoraRule
from paddle_reshard.storage.store import Source
from paddle_reshard.storage.views import JoinedSource, Mount
from paddle_reshard.tasks.merge import Addend, Matrix, MergedSource

PREFIX: Final = "LORA/"
"""Prefix of the adapter's files in the joined source."""
BFLOAT16: Final = "bfloat16"
OF_BASE_JOB: Final = "state of the job that trained the base"


def merged(base_store: Source, altered: Altered, reading: Reading) -> Altered:
    """The base in a store with the adapter merged into it, and the store that serves both."""
    base = index_checkpoint(base_store, reading.tables, reading.config, None, reading.index_files)
    check_signals(base_store)
    store, checkpoint = merge_into(base_store, base, altered.store, altered.source)
    return altered.read_as(checkpoint, store)


def merge_into(
    base_store: Source, base: Checkpoint, adapter_store: Source, trained: Checkpoint
) -> tuple[Source, Checkpoint]:
    """The base with the adapter merged into it, and the source that serves it.

    The product of the LoRA matrices is added to each adapted weight; a tensor that was trained in full replaces that of
    the base. The result holds parameters only.
    """
    adapter = _adapter_of(trained, adapter_store)
    _check_one_table(base, base_store, trained, adapter_store)
    weights, replaced = _changes(base, base_store, trained, adapter_store)
    catalog = _joined(base, trained.catalog, replaced)
    index = catalog.index()
    paths = tuple(f"{PREFIX}{file.path}" for file in trained.catalog.files)
    addends = {
        index[key, PARAM]: _addend(key.rpartition(".")[0], trained.catalog, paths, adapter) for key in weights
    }
    inner = JoinedSource((Mount("", base_store), Mount(PREFIX, adapter_store)))
    source = MergedSource(inner, addends, _by_path(catalog, addends))
    training = {path for path in base_store.sizes() if is_training_state(path)}
    tensors = tuple(
        replace(t, accumulators=(), master=False, of_base=False)
        for t in base.model.tensors
        if not isinstance(t.rule, LoraRule)
    )
    merged = replace(
        base,
        catalog=catalog,
        own_files=base.own_files | training | {path for path in inner.sizes() if path.startswith(PREFIX)},
        model=replace(base.model, tensors=tensors),
        job=replace(base.job, topology=None, strategy=None, lr_scheduler=None),
        has_ema=False,
        adapter=None,
        not_carried=(*base.not_carried, *((path, OF_BASE_JOB) for path in sorted(training))),
        history=replace(
            base.history,
            merged=f"LoRA of {len(weights)} weights, rank {adapter.rank}, scaling {adapter.scaling:g}, of "
            f"{adapter_store.location}{f'; {len(replaced)} tensors replaced' if replaced else ''}",
        ),
    )
    return source, merged


def _adapter_of(trained: Checkpoint, store: Source) -> Adapter:
    if not trained.model.has_lora:
        raise UsageError(f"--merge-into: {store.location} holds no LoRA that could be merged")
    if trained.adapter is None:
        raise CheckpointError(
            f"{store.location}: has no {LORA_CONFIG}, which holds the scaling; give it with --lora-config FILE"
        )
    return trained.adapter


def _check_one_table(base: Checkpoint, base_store: Source, trained: Checkpoint, store: Source) -> None:
    ours, theirs = trained.model.table, base.model.table
    if (ours.family, ours.convention) != (theirs.family, theirs.convention):
        raise CheckpointError(
            f"{store.location} is LoRA of {ours.named}, but {base_store.location} is a model of {theirs.named}"
        )


def _changes(
    base: Checkpoint, base_store: Source, trained: Checkpoint, store: Source
) -> tuple[list[str], list[str]]:
    """Keys of adapted weights, and of tensors that were trained in full."""
    held = {tensor.key: tensor for tensor in base.model.tensors}
    index = base.catalog.index()
    ours = {tensor.key: tensor for tensor in trained.model.tensors if not (tensor.of_base or tensor.missing)}
    weights = list(
        dict.fromkeys(f"{key.rpartition('.')[0]}.weight" for key, t in ours.items() if _is_lora(t))
    )
    replaced = [key for key, tensor in ours.items() if not _is_lora(tensor) and tensor.tied_to is None]
    for key in (*weights, *replaced):
        if key not in held:
            raise CheckpointError(f"{key}: in {store.location}, but missing from {base_store.location}")
        number = index.get((held[key].tied_to or key, PARAM))
        if number is None or number in base.catalog.implied:
            raise CheckpointError(
                f"{key}: {base_store.location} does not store the parameter; give a base that does"
            )
    for key in weights:
        module = key.rpartition(".")[0]
        a, b, weight = ours[f"{module}.lora_A"], ours[f"{module}.lora_B"], held[key]
        if weight.global_shape != (a.global_shape[0], b.global_shape[1]):
            raise CheckpointError(
                f"{key}: {weight.global_shape} in {base_store.location}, the matrices in {store.location} are "
                f"{a.global_shape} and {b.global_shape}"
            )
        _check_dtypes(weight, (weight.dtype, a.dtype, b.dtype))
    for key in replaced:
        if (held[key].global_shape, held[key].dtype) != (ours[key].global_shape, ours[key].dtype):
            raise CheckpointError(
                f"{key}: {held[key].dtype.name} {held[key].global_shape} in {base_store.location}, "
                f"{ours[key].dtype.name} {ours[key].global_shape} in {store.location}"
            )
    return weights, replaced


def _is_lora(tensor: ModelTensor) -> bool:
    return isinstance(tensor.rule, LoraRule)


def _check_dtypes(weight: ModelTensor, dtypes: Sequence[DType]) -> None:
    """Refuse all but bfloat16: the library's result for the remaining dtypes depends on how the processor rounds."""
    if unsupported := sorted({dtype.name for dtype in dtypes} - {BFLOAT16}):
        raise UnsupportedError(
            f"{weight.key}: {', '.join(unsupported)}; only {BFLOAT16} weights and matrices can be merged, because only "
            "then the result does not depend on the processor"
        )


def _joined(base: Checkpoint, trained: Catalog, replaced: Sequence[str]) -> Catalog:
    """The parameters of the base, with those in ``replaced`` taken from the adapter's files."""
    keys = {tensor.key for tensor in base.model.tensors if not _is_lora(tensor)}
    kept = base.catalog.only([n for key, n in base.catalog.tensors.of_state(PARAM).items() if key in keys])
    index = trained.index()
    ours = trained.only([index[key, PARAM] for key in replaced])
    number_of = kept.index()
    numbers = np.array([number_of[key, PARAM] for key in replaced], dtype=np.int32)
    of_base = kept.fragments[~np.isin(kept.fragments["tensor"], numbers)]
    rows = ours.fragments.copy()
    if len(rows):
        rows["tensor"] = numbers[rows["tensor"]]
    rows["file"] = rows["file"] + len(kept.files)
    files = (*kept.files, *(File(f"{PREFIX}{file.path}", file.size_bytes) for file in ours.files))
    return Catalog(Tensors(kept.tensors), files, Fragments.joined([of_base, rows]), kept.implied)


def _addend(module: str, trained: Catalog, paths: tuple[str, ...], adapter: Adapter) -> Addend:
    a, b = (_matrix(f"{module}.{name}", trained, paths) for name in LORA)
    return Addend(a, b, adapter.scaling)


def _matrix(key: str, trained: Catalog, paths: tuple[str, ...]) -> Matrix:
    number = trained.index()[key, PARAM]
    if number in trained.implied:
        raise CheckpointError(f"{key}: only its master weight is stored; merging needs the parameter itself")
    return Matrix(key, trained.tensors.shape(number), trained.stored(number), paths)


def _by_path(catalog: Catalog, addends: dict[int, Addend]) -> dict[str, Fragments]:
    """Path → fragments of the adapted weights in that file."""
    changing = catalog.fragments[np.isin(catalog.fragments["tensor"], list(addends))]
    extents, strides = changing["extents"][:, :2], changing["strides"][:, :2]
    smallest = np.where(extents > 1, strides, np.iinfo(np.int64).max).min(axis=1)
    apart = (smallest > 2) & (extents > 1).any(axis=1)
    if apart.any():
        key = catalog.tensors[int(changing["tensor"][apart][0])].key
        raise UnsupportedError(f"{key}: its elements are not stored contiguously, which merging requires")
    return {
        catalog.files[file].path: changing[changing["file"] == file]
        for file in np.unique(changing["file"]).tolist()
    }
