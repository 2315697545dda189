"""Blocks written down and compressed, and back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pyarrow

from paddle_reshard.pipeline.delta.coding import Coding, decode, encode

CODEC = "zstd"
LEVEL = 3
SAMPLE_BYTES = 1 << 16
"""What of a block tells whether its differences are worth more than the block itself; a multiple of every integer."""


@dataclass(frozen=True, slots=True)
class Packed:
    """A block as it is stored."""

    coding: Coding
    stored: bytes
    written_bytes: int
    """The same before compression; as many as are stored: it is not compressed."""


def pack(new: memoryview, old: memoryview | None, item_bytes: int) -> Packed:
    """A block in as few bytes as this can; the same ones every time. See :func:`~.coding.encode`."""
    if old is not None and not _is_related(new, old, item_bytes):
        old = None
    coding, written = encode(new, old, item_bytes)
    return Packed(coding, _shortened(written), len(written))


def _is_related(new: memoryview, old: memoryview, item_bytes: int) -> bool:
    """Whether the differences of the first integers take less than these themselves, where all of them count."""
    new, old = new[:SAMPLE_BYTES], old[:SAMPLE_BYTES]
    coding, written = encode(new, old, item_bytes)
    if coding is not Coding.DENSE:
        return True
    return len(_shortened(written)) <= len(_shortened(encode(new, None, item_bytes)[1]))


def _shortened(written: bytes) -> bytes:
    stored: bytes = _codec().compress(written, asbytes=True) if written else b""
    return stored if len(stored) < len(written) else written


def unpack(
    stored: memoryview,
    coding: Coding,
    written_bytes: int,
    old: memoryview | None,
    item_bytes: int,
    new: memoryview,
) -> None:
    """Fill ``new`` with a block that :func:`pack` has made; ``written_bytes`` of memory are taken for it.

    Raises
    ------
    ValueError
        If that is not what it has made.
    """
    if len(stored) < written_bytes:
        try:
            stored = memoryview(_codec().decompress(stored, decompressed_size=written_bytes))
        except OSError as error:  # not what the codec writes, or of another length
            raise ValueError(str(error)) from error
    decode(coding, stored, old, item_bytes, new)


def _codec() -> Any:
    """A new codec per call, because threads may not be able to share it."""
    return pyarrow.Codec(CODEC, compression_level=LEVEL)
