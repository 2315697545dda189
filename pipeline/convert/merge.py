"""An adapter merged into its base model: both together are read as one checkpoint of parameters.

From there on it is a conversion like any other. The base is what the user names; nothing is opened because a file of
the adapter names it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from paddle_reshard.pipeline.core.catalog import Catalog, File, Fragments
from paddle_reshard.pipeline.core.errors import CheckpointError, UnsupportedError, UsageError
from paddle_reshard.pipeline.core.file_names import LORA_CONFIG
from paddle_reshard.pipeline.core.tensor_columns import Tensors
from paddle_reshard.pipeline.core.tensors import PARAM, DType
from paddle_reshard.pipeline.core.trainer_files import is_training_state
from paddle_reshard.pipeline.layouts.checkpoint import Checkpoint
from paddle_reshard.pipeline.layouts.lora_config import Adapter
from paddle_reshard.pipeline.layouts.model import ModelTensor
from paddle_reshard.pipeline.layouts.rules import LORA, LoraRule
from paddle_reshard.storage.store import Source
from paddle_reshard.storage.views import JoinedSource, Mount
from paddle_reshard.tasks.merge import Addend, Matrix, MergedSource

PREFIX: Final = "LORA/"
"""Below this the files of the adapter are seen beside those of the base."""
BFLOAT16: Final = "bfloat16"
OF_BASE_JOB: Final = "state of the job that trained the base"


def merge_into(
    base_store: Source, base: Checkpoint, adapter_store: Source, trained: Checkpoint
) -> tuple[Source, Checkpoint]:
    """The base as it is with the adapter merged into it, and the source that serves it so.

    Weights beside which there is LoRA get the product of its matrices added; a tensor that was trained as a whole takes
    the place of that of the base. Only parameters are left of both.

    Raises
    ------
    CheckpointError, UsageError, UnsupportedError
        Naming the tensor, if the two are not of one model or the arithmetic is not known.
    """
    adapter = _adapter_of(trained, adapter_store)
    _check_one_table(base, base_store, trained, adapter_store)
    weights, replaced = _changes(base, base_store, trained, adapter_store)
    catalog = _joined(base.catalog, trained.catalog, replaced, base)
    places = catalog.index()
    paths = tuple(f"{PREFIX}{file.path}" for file in trained.catalog.files)
    addends = {
        places[key, PARAM]: _addend(key.rpartition(".")[0], trained.catalog, paths, adapter)
        for key in weights
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
        topology=None,
        strategy=None,
        lr_scheduler=None,
        has_ema=False,
        adapter=None,
        not_carried=(*base.not_carried, *((path, OF_BASE_JOB) for path in sorted(training))),
        merged=f"LoRA of {len(weights)} weights, rank {adapter.rank}, scaling {adapter.scaling:g}, of "
        f"{adapter_store.location}{f'; {len(replaced)} tensors replaced' if replaced else ''}",
    )
    return source, merged


def _adapter_of(trained: Checkpoint, store: Source) -> Adapter:
    if not trained.model.has_lora:
        raise UsageError(f"--merge-into: {store.location} holds no LoRA that could be merged")
    if trained.adapter is None:
        raise CheckpointError(
            f"{store.location}: has no {LORA_CONFIG}, which tells the scaling; give it with --lora-config FILE"
        )
    return trained.adapter


def _check_one_table(base: Checkpoint, base_store: Source, trained: Checkpoint, store: Source) -> None:
    ours, theirs = trained.model.table, base.model.table
    if (ours.family, ours.convention) != (theirs.family, theirs.convention):
        raise CheckpointError(
            f"{store.location} is LoRA of {ours.family} ({ours.convention}), {base_store.location} a model of "
            f"{theirs.family} ({theirs.convention})"
        )


def _changes(
    base: Checkpoint, base_store: Source, trained: Checkpoint, store: Source
) -> tuple[list[str], list[str]]:
    """Keys of the weights beside which there is LoRA, and of tensors that were trained as a whole."""
    held = {tensor.key: tensor for tensor in base.model.tensors}
    index = base.catalog.index()
    ours = {tensor.key: tensor for tensor in trained.model.tensors if not (tensor.of_base or tensor.missing)}
    weights = list(
        dict.fromkeys(f"{key.rpartition('.')[0]}.weight" for key, t in ours.items() if _is_lora(t))
    )
    replaced = [key for key, tensor in ours.items() if not _is_lora(tensor) and tensor.tied_to is None]
    for key in (*weights, *replaced):
        if key not in held:
            raise CheckpointError(
                f"{key}: {store.location} changes it, {base_store.location} does not have it"
            )
        place = index.get((held[key].tied_to or key, PARAM))
        if place is None or place in base.catalog.implied:
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
    """The library merges other dtypes in their own arithmetic, in which the processor's kind of rounding shows."""
    if others := sorted({dtype.name for dtype in dtypes} - {BFLOAT16}):
        raise UnsupportedError(
            f"{weight.key}: {', '.join(others)}; only {BFLOAT16} weights and matrices are merged, for which the result "
            "does not depend on the processor"
        )


def _joined(base: Catalog, trained: Catalog, replaced: Sequence[str], model: Checkpoint) -> Catalog:
    """The parameters of the base, some of them from the files of the adapter."""
    keys = {tensor.key for tensor in model.model.tensors if not _is_lora(tensor)}
    parameters = [n for n, t in enumerate(base.tensors) if t.state == PARAM and t.key in keys]
    kept = base.only(parameters)
    index = trained.index()
    ours = trained.only([index[key, PARAM] for key in replaced])
    places = kept.index()
    of_base = kept.fragments[~np.isin(kept.fragments["tensor"], [places[key, PARAM] for key in replaced])]
    rows = ours.fragments.copy()
    numbers = np.array([places[key, PARAM] for key in replaced], dtype=np.int32)
    if len(rows):
        rows["tensor"] = numbers[rows["tensor"]]
    rows["file"] = rows["file"] + len(kept.files)
    files = (*kept.files, *(File(f"{PREFIX}{file.path}", file.size_bytes) for file in ours.files))
    return Catalog(Tensors(kept.tensors), files, Fragments.joined([of_base, rows]), kept.implied)


def _addend(module: str, trained: Catalog, paths: tuple[str, ...], adapter: Adapter) -> Addend:
    a, b = (_matrix(f"{module}.{name}", trained, paths) for name in LORA)
    return Addend(a, b, adapter.scaling)


def _matrix(key: str, trained: Catalog, paths: tuple[str, ...]) -> Matrix:
    place = trained.index()[key, PARAM]
    if place in trained.implied:
        raise CheckpointError(f"{key}: no file stores the parameter itself, which is what is merged")
    return Matrix(key, trained.tensors.shape(place), trained.stored(place), paths)


def _by_path(catalog: Catalog, addends: dict[int, Addend]) -> dict[str, Fragments]:
    """Path → where the weights that change lie in it."""
    changing = catalog.fragments[np.isin(catalog.fragments["tensor"], list(addends))]
    extents, strides = changing["extents"][:, :2], changing["strides"][:, :2]
    apart = (np.where(extents > 1, strides, np.iinfo(np.int64).max).min(axis=1) > 2) & (extents > 1).any(
        axis=1
    )
    if apart.any():
        key = catalog.tensors[int(changing["tensor"][apart][0])].key
        raise UnsupportedError(f"{key}: its elements do not lie beside each other, and it cannot be merged")
    return {
        catalog.files[file].path: changing[changing["file"] == file]
        for file in np.unique(changing["file"]).tolist()
    }
