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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

import numpy as np

from paddle_reshard.pipeline.core.catalog import File
from paddle_reshard.pipeline.core.part_limits import PartLimits, Together

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

    @classmethod
    def of(
        cls, size_bytes: int, weights: Iterable[tuple[int, tuple[int, ...], int, str]], scales: str
    ) -> QuantisedFile:
        """A file with these weights: first byte as stored, shape, first byte of its scales, key; in file order."""
        tensors, added = [], 0
        for stored, (rows, columns), scales_at, key in weights:
            tensors.append(QuantisedTensor(stored + added, stored, rows, columns, scales_at, key))
            added += (FLOAT_BYTES - 1) * rows * columns
        return cls(size_bytes, tuple(tensors), scales)

    @property
    def planned_bytes(self) -> int:
        """Size as planned."""
        return self.planned_at(self.size_bytes)

    def planned_at(self, stored: int) -> int:
        """Where a byte of the file as stored is planned; it must not lie within a weight."""
        number = bisect_right(self.tensors, stored, key=lambda tensor: tensor.stored) - 1
        if number < 0:
            return stored
        tensor = self.tensors[number]
        return tensor.start if stored == tensor.stored else tensor.stop + stored - tensor.stored_stop

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
    """What is quantised while it is written; by default nothing."""

    files: Mapping[str, QuantisedFile] = field(default_factory=dict)
    """Path in the target → a file with quantised weights."""
    scale_files: Mapping[str, ScaleFile] = field(default_factory=dict)

    @classmethod
    def joined(cls, of_targets: Mapping[str, Quantisation]) -> Quantisation:
        """That of several targets: prefix of the paths of a target → its own."""
        files: dict[str, QuantisedFile] = {}
        scale_files: dict[str, ScaleFile] = {}
        for prefix, quantisation in of_targets.items():
            scale_files |= {prefix + path: file for path, file in quantisation.scale_files.items()}
            files |= {
                prefix + path: replace(file, scales=prefix + file.scales)
                for path, file in quantisation.files.items()
            }
        return cls(files, scale_files)

    def __bool__(self) -> bool:
        return bool(self.files)

    def stored(self, planned: Sequence[File]) -> tuple[File, ...]:
        """The files as stored, those of scales last."""
        sizes = {path: file.size_bytes for path, file in self.files.items()}
        files = (File(file.path, sizes.get(file.path, file.size_bytes)) for file in planned)
        return (*files, *(File(path, file.size_bytes) for path, file in self.scale_files.items()))

    def limits(self, of_store: PartLimits) -> PartLimits:
        """Limits for parts as planned: one may shrink to a quarter of its size, and what is quantised is no copy."""
        if not self:
            return of_store
        return replace(of_store, smallest_bytes=FLOAT_BYTES * of_store.smallest_bytes, copies=None)

    def together(self, paths: Iterable[str]) -> Together | None:
        """The blocks of rows of the weights in the target files with these ``paths``, as planned."""
        if not self:
            return None
        rows = [
            (number, tensor.start, tensor.stop, FLOAT_BYTES * BLOCK * tensor.columns)
            for number, path in enumerate(paths)
            if path in self.files
            for tensor in self.files[path].tensors
            if tensor.start < tensor.stop
        ]
        file, start, stop, unit = np.array(rows, dtype=np.int64).reshape(-1, 4).T
        return Together(file, start, stop, unit, BLOCK)
