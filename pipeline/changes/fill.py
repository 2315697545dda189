"""Take the tensors that a checkpoint lacks from another checkpoint, or from a file (``--fill``).

PaddleFormers' sharded saving loses buffers and parameters that are not trained
(``trainer/utils/sharding_io.py:70-107``). Only what no file of the checkpoint holds is taken, and only in
the shape and the dtype that its metadata give.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from paddle_reshard.pipeline.changes.change import Altered, Reading
from paddle_reshard.pipeline.checkpoint.checkpoint import Checkpoint, Filled, MissingPolicy
from paddle_reshard.pipeline.core.catalog import (
    Catalog,
    File,
    Fragments,
    check_catalog,
    fragment_row,
    fragment_rows,
)
from paddle_reshard.pipeline.core.errors import CheckpointError, CoverageError, FormatError, UnsupportedError
from paddle_reshard.pipeline.core.geometry import row_major_strides
from paddle_reshard.pipeline.core.tensor_columns import Tensors
from paddle_reshard.pipeline.core.tensors import PARAM, Tensor
from paddle_reshard.pipeline.indexing.detect import index_checkpoint
from paddle_reshard.pipeline.indexing.opening import open_checkpoint
from paddle_reshard.pipeline.model.completeness import lost
from paddle_reshard.pipeline.model.model import Model, ModelTensor
from paddle_reshard.pipeline.model.rules.tables import shipped_tables
from paddle_reshard.pipeline.model.weights import PADDLE_LAYOUTS, TRANSFORMERS_LAYOUT, dtype_of_tag
from paddle_reshard.storage.files.safetensors import SafetensorsPayload, parse_safetensors
from paddle_reshard.storage.locate import Access, is_local, local_path, open_file
from paddle_reshard.storage.store import Source
from paddle_reshard.storage.views import JoinedSource, Mount

ENDING: Final = ".safetensors"
LAYOUT: Final = "format"
"""Entry of a safetensors file's metadata that tells the layout of its tensors."""
PREFIX: Final = "FILL/"
"""Prefix of the paths of the other checkpoint's files among those of the source."""


@dataclass(frozen=True)
class Filling:
    """The checkpoint or file of ``--fill``, opened."""

    store: Source
    file: str | None
    """Name of the safetensors file; ``None``: the store is a checkpoint."""

    @property
    def location(self) -> str:
        """The location of the file or the checkpoint."""
        return self.store.location if self.file is None else f"{self.store.location}/{self.file}"

    @property
    def paths(self) -> frozenset[str]:
        """The files that it consists of."""
        return frozenset(self.store.sizes() if self.file is None else (self.file,))


@dataclass(frozen=True)
class Filler:
    """The tensors of a filling that a checkpoint may take, by their metadata."""

    filling: Filling
    catalog: Catalog
    numbers: Mapping[str, int]
    """Structured key → tensor of ``catalog``."""
    layout_told: bool = True
    """Whether the layout of the tensors is known, and not taken for that of the source."""

    @property
    def location(self) -> str:
        """The location of the file or the checkpoint."""
        return self.filling.location


def open_filling(location: str, access: Access) -> Filling:
    """Open a checkpoint or a safetensors file; on a store that is not local, a file ends in ``.safetensors``."""
    is_file = not local_path(location).is_dir() if is_local(location) else location.endswith(ENDING)
    if is_file:
        return Filling(*open_file(location, access.options))
    return Filling(open_checkpoint(location, access), None)


def filled(filling: Filling, altered: Altered, reading: Reading) -> Altered:
    """A checkpoint with what ``filling`` gives it, and the store that serves both."""
    checkpoint = altered.source
    payload = None if filling.file is None else _header(filling)
    published = payload is None or _is_published(payload, checkpoint.model)
    if payload is None or published:
        filler = _of_checkpoint(filling, checkpoint, reading)
    else:
        filler = _of_file(filling, payload, layout_told=published is not None)
    whole = _filled(checkpoint, filler, reading.missing)
    store = JoinedSource((Mount("", altered.store), Mount(PREFIX, filling.store)))
    return altered.read_as(whole, store)


def _header(filling: Filling) -> SafetensorsPayload:
    name, store = filling.file or "", filling.store
    try:
        return parse_safetensors(
            lambda offset, nbytes: store.read(name, offset, nbytes),
            store.sizes()[name],
            f"--fill {filling.location}",
        )
    except FormatError as error:
        raise CheckpointError(f"{error}; expected a safetensors file") from error


def _is_published(payload: SafetensorsPayload, model: Model) -> bool | None:
    """Whether a file is of a published model: as it says, or as keys and shapes show, if they do."""
    if (layout := payload.metadata.get(LAYOUT)) is not None:
        return layout not in PADDLE_LAYOUTS
    if model.table.not_known is not None:
        return False
    if not payload.tensors.keys() <= {tensor.key for tensor in model.tensors}:
        return True
    for tensor in model.tensors:
        shape = payload.tensors[tensor.key].shape if tensor.key in payload.tensors else ()
        if _is_turned(tensor) and shape != shape[::-1]:
            return shape != tensor.global_shape
    return None


def _is_turned(tensor: ModelTensor) -> bool:
    """Whether a published model has a tensor transposed, under whatever key."""
    return tensor.rule.huggingface is not None and tensor.rule.huggingface.transposed


def _of_file(filling: Filling, payload: SafetensorsPayload, layout_told: bool) -> Filler:
    """The tensors of a safetensors file, by structured key."""
    tensors, rows = [], []
    for number, (key, array) in enumerate(payload.tensors.items()):
        dtype = dtype_of_tag(payload.tags[key], f"--fill {filling.location}: {key}")
        tensors.append(Tensor(key, PARAM, dtype, array.shape))
        strides = row_major_strides(array.shape, dtype.itemsize)
        begins = (0,) * len(array.shape)
        rows.append(fragment_row(number, 0, dtype, 0, array.byte_offset, begins, array.shape, strides))
    name = filling.file or ""
    catalog = Catalog(Tensors(tensors), (File(name, filling.store.sizes()[name]),), fragment_rows(rows), {})
    numbers = {tensor.key: number for number, tensor in enumerate(tensors)}
    return Filler(filling, catalog, numbers, layout_told)


def _of_checkpoint(filling: Filling, source: Checkpoint, reading: Reading) -> Filler:
    """The parameters of a checkpoint of the same model family, in any format and topology."""
    store, table = filling.store, source.model.table
    if table.not_known is not None:
        raise UnsupportedError(
            f"--fill {filling.location}: no rule table describes this model, so that its tensors cannot be told in "
            f"another checkpoint; give a {ENDING} file with the missing tensors, by the keys of the source"
        )
    known = reading.tables if reading.tables.for_any_family else shipped_tables(table.convention)
    any_missing = MissingPolicy(allowed=("*",), lacks_layers=filling.file is not None)
    base = index_checkpoint(store, known, source.model.config, any_missing, reading.index_files)
    theirs = base.model.table
    if (theirs.family, theirs.convention) != (table.family, table.convention):
        raise CheckpointError(
            f"--fill {filling.location}: a model of {theirs.named}, but the checkpoint is of {table.named}"
        )
    index = base.catalog.index()
    numbers = {
        t.key: number
        for t in base.model.tensors
        if (number := index.get((t.tied_to or t.key, PARAM))) is not None
    }
    return Filler(filling, base.catalog, numbers)


def _filled(checkpoint: Checkpoint, filler: Filler, policy: MissingPolicy) -> Checkpoint:
    """The checkpoint with the tensors that it lacked."""
    lacking = [tensor for tensor in checkpoint.model.tensors if tensor.missing]
    taken: dict[str, int] = {}  # identity → tensor of the filler
    for tensor in lacking:
        identity = tensor.tied_to or tensor.key
        number = filler.numbers.get(tensor.key, filler.numbers.get(identity))
        if number is not None:
            _check(tensor, filler, number)
            taken.setdefault(identity, number)
    absent = {tensor.key for tensor in lacking if (tensor.tied_to or tensor.key) not in taken}
    _check_base(lacking, absent, filler)
    for tensor in lacking:
        if tensor.key in absent and not (tensor.of_base or policy.allows(tensor.key)):
            raise lost(tensor, filler.location)
    tensors = tuple(replace(t, missing=t.key in absent) for t in checkpoint.model.tensors)
    catalog = _joined(checkpoint, taken, filler)
    check_catalog(catalog)
    return replace(
        checkpoint,
        catalog=catalog,
        model=replace(checkpoint.model, tensors=tensors),
        own_files=checkpoint.own_files | {PREFIX + path for path in filler.filling.paths},
        history=replace(checkpoint.history, filled=Filled(filler.location, tuple(taken))),
    )


def _check(tensor: ModelTensor, filler: Filler, number: int) -> None:
    """Refuse a tensor of another shape or dtype, or one of which only the master weight is stored."""
    given = filler.catalog.tensors[number]
    if number in filler.catalog.implied:
        raise CoverageError(
            f"{tensor.key} (param)",
            f"{filler.location}, given with --fill, does not store it, only its master weight; give a checkpoint that "
            "stores its parameters",
        )
    if (given.dtype, given.global_shape) != (tensor.dtype, tensor.global_shape):
        raise CoverageError(
            f"{tensor.key} (param)",
            f"{tensor.dtype.name} {tensor.global_shape} in the checkpoint, but {given.dtype.name} "
            f"{given.global_shape} in {filler.location}, given with --fill",
        )
    if not filler.layout_told and _is_turned(tensor):
        raise CoverageError(
            f"{tensor.key} (param)",
            f"{filler.location}, given with --fill, does not say whether it has Paddle's layout or that of published "
            f'models, which is transposed; write the file with the metadata {{"{LAYOUT}": "{PADDLE_LAYOUTS[0]}"}} or '
            f'"{TRANSFORMERS_LAYOUT}"',
        )


def _check_base(lacking: Sequence[ModelTensor], absent: set[str], filler: Filler) -> None:
    """Refuse a part of the base model of an adapter: a target holds all of it, or nothing."""
    base = [tensor.key for tensor in lacking if tensor.of_base]
    without = [key for key in base if key in absent]
    if without and len(without) < len(base):
        given = next(key for key in base if key not in absent)
        raise CoverageError(
            without[0],
            f"belongs to the base model, of which --fill gives {given}, but not this; give the whole base or none",
            (filler.location,),
        )


def _joined(checkpoint: Checkpoint, taken: Mapping[str, int], filler: Filler) -> Catalog:
    """The catalog with the tensors taken from the filler, and the files that hold them."""
    catalog = checkpoint.catalog
    if not taken:
        return catalog
    given = filler.catalog.only(list(taken.values()))
    rows = given.fragments.copy()
    used = np.unique(rows["file"])
    numbers = np.zeros(len(given.files), dtype=np.int32)
    numbers[used] = np.arange(len(catalog.files), len(catalog.files) + len(used))
    rows["file"] = numbers[rows["file"]]
    rows["tensor"] = rows["tensor"] + len(catalog.tensors)
    aliases = checkpoint.model.aliases
    added = (
        Tensor(identity, PARAM, tensor.dtype, tensor.global_shape, aliases.get(identity, ()))
        for identity, tensor in zip(taken, given.tensors, strict=True)
    )
    files = (given.files[number] for number in used.tolist())
    return replace(
        catalog,
        tensors=Tensors([*catalog.tensors, *added]),
        files=(*catalog.files, *(File(PREFIX + file.path, file.size_bytes) for file in files)),
        fragments=Fragments.joined([catalog.fragments, rows]),
    )
