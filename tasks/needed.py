"""Read only the bytes of a group's bands that its moves and comparisons need.

A band extends from the first to the last byte that a pass needs of a file. In a conversion some target file needs
nearly every byte in between. A process that loads its own columns of a matrix needs only a short run of each row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from paddle_reshard.pipeline.core.catalog import ITEMSIZES
from paddle_reshard.pipeline.core.geometry import MAX_DIMS
from paddle_reshard.pipeline.core.numbers import Ints
from paddle_reshard.pipeline.planning.ops import MOVE, hull
from paddle_reshard.pipeline.planning.ranges import merge
from paddle_reshard.pipeline.planning.work import GroupWork
from paddle_reshard.storage.store import Read, ReadRange


class NeededBytes(ReadRange):
    """Reads the needed bytes of one group's bands; the remaining bytes of the buffers are not touched.

    Gaps of at most ``gap_bytes`` between needed bytes are read too.
    """

    def __init__(self, source: ReadRange, work: GroupWork, gap_bytes: int) -> None:
        self.source, self.work, self.gap_bytes = source, work, gap_bytes
        self.file_numbers = {path: number for number, path in work.source_paths.items()}
        # Both sides of a comparison are in source files.
        self._sides = (("source", work.ops), ("target", work.ops[work.ops["kind"] != MOVE]))
        self.read_bytes = 0

    def read_many(self, reads: Sequence[Read]) -> None:
        """Fill the needed bytes of several bands."""
        pieces = [piece for read in reads for piece in self._pieces(read)]
        self.source.read_many(pieces)
        self.read_bytes += sum(len(piece.buffer) for piece in pieces)

    def _pieces(self, band: Read) -> Iterator[Read]:
        start, stop = band.byte_offset, band.byte_offset + len(band.buffer)
        runs = []
        for side, ops in self._sides:
            low, high = hull(ops, side)
            inside = (low >= start) & (high <= stop)
            inside &= ops[f"{side}_file"] == self.file_numbers[band.path]
            runs += [self._runs(op, side) for op in ops[inside].rows()]
        if not runs:
            return
        low, high = (np.concatenate([run[end] for run in runs]) for end in (0, 1))
        _, low, high = merge(np.zeros(len(low), dtype=np.int64), low, high, self.gap_bytes)
        for first, last in zip(low.tolist(), high.tolist(), strict=True):
            yield Read(band.path, first, band.buffer[first - start : last - start])

    def _runs(self, op: np.void, side: str) -> tuple[Ints, Ints]:
        """Starts and stops of the byte runs that make up one side of an op.

        3 rows of 4 float32 values with a row stride of 64, from byte 100, and gaps of up to 16 bytes: the gap between
        rows is 48 bytes, so there are three runs, [100, 116), [164, 180) and [228, 244).
        """
        strides, extents = op[f"{side}_strides"].tolist(), op["extents"].tolist()
        length = int(ITEMSIZES[op[f"{side}_dtype"]])
        start = np.array([op[f"{side}_byte"]], dtype=np.int64)
        within = True
        for dim in sorted(range(MAX_DIMS), key=lambda d: strides[d]):
            if extents[dim] == 1:
                continue
            within = within and strides[dim] - length <= self.gap_bytes
            if within:
                length += (extents[dim] - 1) * strides[dim]
            else:
                start = (start[:, None] + np.arange(extents[dim]) * strides[dim]).ravel()
        return start, start + length
