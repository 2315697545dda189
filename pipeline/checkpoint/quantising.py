"""Files whose weights are quantised while they are written: FP8, with a scale for each block of 128 × 128 elements.

A conversion is planned as if such weights were float32. What a worker then writes is the same part with 8-bit codes::

    planned   header │ norm BF16 │ up_proj.weight, 300 × 200 × 4 bytes │ …
    stored    header │ norm BF16 │ up_proj.weight, 300 × 200 × 1 byte  │ …

A scale depends on all values of a block, so a part begins and ends between blocks of rows: here before row 0, 128, 256
or after row 299. The scales of all weights go to a file of their own, the last of the checkpoint, which is written when
all parts are.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from paddle_reshard.pipeline.core.numbers import Ints

BLOCK: Final = 128
"""Rows and columns of a weight that share a scale; blocks at the edges are smaller."""
FLOAT_BYTES: Final = 4
"""Bytes of an element as planned, for each byte as stored; and bytes of a scale."""


class QuantisedTensor(NamedTuple):
    """A weight that is planned as float32 and stored as FP8, both in C order."""

    start: int
    """First byte in the file as planned."""
    stored: int
    """First byte in the file as stored."""
    rows: int
    columns: int
    scales: int
    """First byte of its scales in the file of scales; a row of scales for each block of rows."""
    key: str

    @property
    def stop(self) -> int:
        """One past its last byte as planned."""
        return self.start + FLOAT_BYTES * self.rows * self.columns

    @property
    def stored_stop(self) -> int:
        """One past its last byte as stored."""
        return self.stored + self.rows * self.columns

    @property
    def scale_columns(self) -> int:
        """Number of blocks side by side."""
        return -(-self.columns // BLOCK)


class WeightRows(NamedTuple):
    """Rows of a weight in a part."""

    tensor: QuantisedTensor
    first: int
    """First row, a multiple of 128."""
    last: int
    """One past the last row."""


@dataclass(frozen=True, slots=True)
class QuantisedFile:
    """A file with quantised weights."""

    size_bytes: int
    """Size as stored."""
    tensors: tuple[QuantisedTensor, ...]
    """In the order of the file, both as planned and as stored."""
    scales: str
    """Path of the file of scales."""

    def stored_at(self, planned: int) -> int:
        """Where a byte of the file as planned is stored; it must not lie within a block of rows."""
        number = bisect_right(self.tensors, planned, key=lambda tensor: tensor.start) - 1
        if number < 0:
            return planned
        tensor = self.tensors[number]
        if planned >= tensor.stop:
            return tensor.stored_stop + planned - tensor.stop
        row, rest = divmod(planned - tensor.start, FLOAT_BYTES * tensor.columns)
        if rest or row % BLOCK:
            raise ValueError(f"{tensor.key}: a part is cut within a block, at row {row}")
        return tensor.stored + row * tensor.columns

    def pieces(self, start: int, stop: int) -> Iterator[WeightRows]:
        """The rows of weights in a range of the file as stored."""
        number = max(0, bisect_right(self.tensors, start, key=lambda tensor: tensor.stored) - 1)
        for tensor in self.tensors[number:]:
            if tensor.stored >= stop:
                break
            low, high = max(start, tensor.stored), min(stop, tensor.stored_stop)
            if low < high:
                first, last = (byte - tensor.stored for byte in (low, high))
                yield WeightRows(tensor, first // tensor.columns, last // tensor.columns)


@dataclass(frozen=True, slots=True)
class ScaleFile:
    """A file of scales, written last."""

    header: bytes
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Quantisation:
    """What is quantised while it is written."""

    files: Mapping[str, QuantisedFile]
    """Path in the target → a file with quantised weights."""
    scale_files: Mapping[str, ScaleFile]

    @property
    def weights(self) -> int:
        """Number of quantised weights."""
        return sum(len(file.tensors) for file in self.files.values())

    def below(self, prefix: str) -> Quantisation:
        """The same with ``prefix`` before all paths."""
        files = {
            prefix + path: QuantisedFile(file.size_bytes, file.tensors, prefix + file.scales)
            for path, file in self.files.items()
        }
        return Quantisation(files, {prefix + path: file for path, file in self.scale_files.items()})


def joined(quantisations: Iterable[Quantisation]) -> Quantisation | None:
    """Several as one, ``None`` for none; their paths differ."""
    found = list(quantisations)
    if not found:
        return None
    files = {path: file for one in found for path, file in one.files.items()}
    return Quantisation(files, {path: file for one in found for path, file in one.scale_files.items()})


class BlockRows(NamedTuple):
    """Ranges of target files in which every ``unit`` bytes must be written by one group; sorted by file and start."""

    file: Ints
    start: Ints
    stop: Ints
    unit: Ints


def block_rows(quantisation: Quantisation, paths: Iterable[str]) -> BlockRows:
    """The weights of the target files with these ``paths``, as planned; a unit is a block of rows."""
    files = quantisation.files
    rows = [
        (number, tensor.start, tensor.stop, FLOAT_BYTES * BLOCK * tensor.columns)
        for number, path in enumerate(paths)
        if path in files
        for tensor in files[path].tensors
        if tensor.start < tensor.stop
    ]
    columns = np.array(rows, dtype=np.int64).reshape(-1, 4).T
    return BlockRows(*columns)
