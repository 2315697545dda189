"""The checksum of a part: CRC-64/NVME, fast enough to cover every byte that is written."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

from paddle_reshard.storage.aligned import memory_for

BLOCK_BYTES = 8 << 20


class RangeReader(Protocol):
    """Ranged reads."""

    def read_into(self, path: str, byte_offset: int, buffer: memoryview) -> None:
        """Fill all of ``buffer``, or raise."""


class Checksum:
    """A checksum computed block by block.

    >>> one = Checksum()
    >>> one.update(b"1234")
    >>> one.update(b"56789")
    >>> one.text() == checksum(b"123456789") == "ae8b14860a799888"
    True
    """

    def __init__(self) -> None:
        self.value = 0

    def update(self, block: Any) -> None:
        """Add the bytes of a buffer."""
        # Imported here: training environments import this package, write no parts and lack the library.
        from awscrt.checksums import crc64nvme

        self.value = crc64nvme(block, self.value)

    def text(self) -> str:
        """16 hexadecimal digits."""
        return f"{self.value:016x}"


def checksum(buffer: Any) -> str:
    """The checksum of one buffer."""
    whole = Checksum()
    whole.update(buffer)
    return whole.text()


def stretches(source: RangeReader, path: str, byte_offset: int, nbytes: int) -> Iterator[memoryview]:
    """A stretch of a file, block by block; each block is valid only until the next is requested."""
    buffer = memory_for(min(nbytes, BLOCK_BYTES), byte_offset)
    for start in range(byte_offset, byte_offset + nbytes, BLOCK_BYTES):
        block = buffer[: min(BLOCK_BYTES, byte_offset + nbytes - start)]
        source.read_into(path, start, block)
        yield block


def source_checksum(source: RangeReader, path: str, byte_offset: int, nbytes: int) -> str:
    """The checksum of a stretch of a file, read in blocks."""
    whole = Checksum()
    for block in stretches(source, path, byte_offset, nbytes):
        whole.update(block)
    return whole.text()
