"""The bytes of a rank's files: literals, array slots and zero padding."""

from __future__ import annotations

from array import array as numbers_of
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import TypeAlias

import numpy as np

from paddle_reshard.pipeline.checkpoint.checkpoint import Checkpoint
from paddle_reshard.pipeline.core.catalog import File
from paddle_reshard.pipeline.core.literals import LiteralTemplate
from paddle_reshard.pipeline.core.numbers import Ints
from paddle_reshard.pipeline.core.tensors import DTYPES, is_per_parameter
from paddle_reshard.pipeline.formats.jobs.cells import Cell
from paddle_reshard.pipeline.formats.sharding import FlatSlice
from paddle_reshard.pipeline.formats.writing import UNCUT, NewFiles, lacking
from paddle_reshard.pipeline.model.model import ModelTensor
from paddle_reshard.pipeline.model.placement import ArrayKind
from paddle_reshard.storage.files.paddle_pickle_writer import ArraySlot, DictEntries, write_pickle

AddArray: TypeAlias = Callable[[str, FlatSlice | None, str | None], ArraySlot]
"""Takes the key of a parameter, a slice of its flattening or ``None`` for all of it, and the name of the array."""
ArrayRows: TypeAlias = "numbers_of[int]"
"""The arrays of a file that is being laid out, five numbers for each because there may be very many: its kind, its
tensor, the index of its dtype, the bytes of its values, and those of the zeros that follow them."""
_COLUMNS = 5


@dataclass(frozen=True, slots=True)
class RankFileLayout:
    """A rank's file without its tp coordinate: files of tp ranks differ only in the offsets of boxes."""

    kind: str
    shard: int | None
    size_bytes: int
    literals: LiteralTemplate
    fills: tuple[tuple[int, int], ...]
    """``(byte offset, number of zero bytes)``."""
    arrays: Ints
    """A row for each array: kind, tensor, byte offset, index of the dtype."""


class FileBytes(NewFiles):
    """Collects the files of a target."""

    def __init__(self, checkpoint: Checkpoint, pickle_protocol: int) -> None:
        super().__init__()
        self.pickle_protocol = pickle_protocol
        self.tensors = checkpoint.catalog.tensors
        self.dtypes = checkpoint.catalog.tensors.dtypes.tolist()
        """Index of the dtype of each tensor."""
        self.identity = {t.key: t.tied_to or t.key for t in checkpoint.model.tensors}
        self.fills: list[tuple[int, int, int]] = []

    def has(self, tensor: ModelTensor, state: str) -> bool:
        """Whether the source has a state of a tensor."""
        return self.tensors.find(self.identity[tensor.key], state) is not None

    def adder(self, rows: ArrayRows, cell: Cell, state: str) -> AddArray:
        """A function that adds an array of a ``state`` to a file: all that the cell has of a tensor, or a slice of its
        flattening.

        What is the same for all arrays of a state is looked up once, because there may be very many.
        """
        find, per_parameter = self.tensors.finder(state), is_per_parameter(state)
        identity, dtypes, kind_of = self.identity, self.dtypes, self.placements.kind

        def add(key: str, flat: FlatSlice | None, name: str | None) -> ArraySlot:
            number = find(identity[key])
            if number is None:
                raise lacking(key, state)
            dtype = DTYPES[dtypes[number]]
            whole, cut = ((1,), UNCUT) if per_parameter else (cell.local_shapes[key], cell.cuts[key])
            flat = None if per_parameter else flat
            shape = whole if flat is None else (flat.elements,)
            values = prod(whole) if flat is None else max(0, min(flat.stop, prod(whole)) - flat.start)
            kind = kind_of(ArrayKind(whole, cut, dtype.itemsize, flat))
            zeros = prod(shape) - values
            rows.extend((kind, number, dtypes[number], values * dtype.itemsize, zeros * dtype.itemsize))
            return ArraySlot(len(rows) // _COLUMNS - 1, dtype.code, shape, name)

        return add

    def lay_out(
        self, kind: str, shard: int | None, root: Iterator[tuple[object, object]], rows: ArrayRows
    ) -> RankFileLayout:
        """Lay out a file with these entries; iterating over ``root`` adds to ``rows``."""
        literals = self.literals.template(())
        size_bytes, slots = write_pickle(
            DictEntries(root), partial(self.literals.extend_template, literals), self.pickle_protocol
        )
        slot, byte_offset, _ = np.array(slots, dtype=np.int64).reshape(-1, 3).T
        in_file = np.array(rows, dtype=np.int64).reshape(-1, _COLUMNS)[slot]
        array_kind, tensor, dtype, values, zeros = in_file.T
        padded = zeros > 0
        fills = zip((byte_offset + values)[padded].tolist(), zeros[padded].tolist(), strict=True)
        arrays = np.column_stack([array_kind, tensor, byte_offset, dtype])
        return RankFileLayout(kind, shard, size_bytes, literals, tuple(fills), arrays)

    def add(self, path: str, layout: RankFileLayout, tp: int) -> None:
        """Add a laid-out file for a tp rank."""
        file = len(self.files)
        self.files.append(File(path, layout.size_bytes))
        self.literals.add_file(layout.literals, file)
        self.fills.extend((file, offset, nbytes) for offset, nbytes in layout.fills)
        self.placements.add_file(layout.arrays, tp, file)
