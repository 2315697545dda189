"""Sources of tests that look at one range at a time."""

from __future__ import annotations

from collections.abc import Sequence

from paddle_reshard.storage.store import Read, ReadRange


class OneByOne(ReadRange):
    """Base of sources that define ``read_into``: several ranges are read one after the other."""

    def read_many(self, reads: Sequence[Read]) -> None:
        for read in reads:
            self.read_into(read.path, read.byte_offset, read.buffer)
