"""Take the tensors that a checkpoint lacks from where the user says (``--fill``)."""

from __future__ import annotations

from dataclasses import dataclass

from paddle_reshard.pipeline.changes.change import Altered, Reading
from paddle_reshard.pipeline.changes.filling import PREFIX, Filler, fill
from paddle_reshard.pipeline.checkpoint.checkpoint import Checkpoint, MissingPolicy
from paddle_reshard.pipeline.checkpoint.reading import IndexFiles
from paddle_reshard.pipeline.core.catalog import Catalog, File, fragment_row, fragment_rows
from paddle_reshard.pipeline.core.errors import CheckpointError, CoverageError, FormatError, UnsupportedError
from paddle_reshard.pipeline.core.geometry import row_major_strides
from paddle_reshard.pipeline.core.tensor_columns import Tensors
from paddle_reshard.pipeline.core.tensors import PARAM, Tensor
from paddle_reshard.pipeline.formats.registry import FORMATS, names_of
from paddle_reshard.pipeline.indexing.detect import index_checkpoint
from paddle_reshard.pipeline.indexing.opening import open_checkpoint
from paddle_reshard.pipeline.model.rules.tables import RuleTables, shipped_tables
from paddle_reshard.pipeline.model.weights import dtype_of_tag
from paddle_reshard.storage.locate import Access, is_local, local_path, open_file
from paddle_reshard.storage.store import Source

ENDING = ".safetensors"


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


def open_filling(location: str, access: Access) -> Filling:
    """Open a checkpoint or a safetensors file; on a store that is not local, a file ends in ``.safetensors``."""
    is_file = not local_path(location).is_dir() if is_local(location) else location.endswith(ENDING)
    if is_file:
        return Filling(*open_file(location, access.options, access.schemes))
    return Filling(open_checkpoint(location, access), None)


def filled(filling: Filling, altered: Altered, reading: Reading) -> Altered:
    """A checkpoint with what ``filling`` gives it, and the store that serves both."""
    checkpoint = altered.source
    given = None if filling.file is None else _of_file(filling)
    if not FORMATS[checkpoint.format].loses_tensors:
        losing = names_of(known for known in FORMATS.values() if known.loses_tensors)
        raise CoverageError(
            min(given.numbers, default=filling.location) if given else filling.location,
            f"given with --fill, but only {losing} checkpoints can lack tensors; omit the option",
        )
    from paddle_reshard.storage.views import JoinedSource, Mount

    filler = given or _of_checkpoint(filling, checkpoint, reading.tables, reading.index_files)
    whole = fill(checkpoint, filler, reading.missing)
    store = JoinedSource((Mount("", altered.store), Mount(PREFIX, filling.store)))
    return altered.read_as(whole, store)


def _of_file(filling: Filling) -> Filler:
    """The tensors of a safetensors file, by structured key."""
    from paddle_reshard.storage.files.safetensors import parse_safetensors

    name, store = filling.file or "", filling.store
    size_bytes = store.sizes()[name]
    shown = f"--fill {filling.location}"
    try:
        payload = parse_safetensors(
            lambda offset, nbytes: store.read(name, offset, nbytes), size_bytes, shown
        )
    except FormatError as error:
        raise CheckpointError(f"{error}; expected a safetensors file") from error
    tensors, rows = [], []
    for number, (key, array) in enumerate(payload.tensors.items()):
        dtype = dtype_of_tag(payload.tags[key], f"{shown}: {key}")
        tensors.append(Tensor(key, PARAM, dtype, array.shape))
        strides = row_major_strides(array.shape, dtype.itemsize)
        begins = (0,) * len(array.shape)
        rows.append(fragment_row(number, 0, dtype, 0, array.byte_offset, begins, array.shape, strides))
    catalog = Catalog(Tensors(tensors), (File(name, size_bytes),), fragment_rows(rows), {})
    numbers = {tensor.key: number for number, tensor in enumerate(tensors)}
    return Filler(filling.location, catalog, numbers, frozenset({name}), exact=True)


def _of_checkpoint(
    filling: Filling, source: Checkpoint, tables: RuleTables, index_files: IndexFiles
) -> Filler:
    """The parameters of a checkpoint of the same model family, in any format and topology."""
    store, table = filling.store, source.model.table
    if table.not_known is not None:
        raise UnsupportedError(
            f"--fill {filling.location}: no rule table describes this model, so that its tensors cannot be told in "
            f"another checkpoint; give a {ENDING} file with the missing tensors, by the keys of the source"
        )
    known = tables if tables.for_any_family else shipped_tables(table.convention)
    base = index_checkpoint(store, known, source.model.config, MissingPolicy(allowed=("*",)), index_files)
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
    return Filler(filling.location, base.catalog, numbers, frozenset(store.sizes()), exact=False)
