"""From two versions of a tensor to a Zstandard frame, and back, window by window.

A tensor is worked on from its first byte to its last, so memory does not depend on its size. An encoder takes the new
and the old bytes of each window; a change, opened from a frame, alters the old bytes of each window to the new ones::

    old   1 2 3 4 | 5 6 7 8
    new   1 2 9 4 | 5 6 7 0
    xor   0 0 a 0 | 0 0 0 8          as many bytes as the tensor has
    overwrite  2  | 2 7 | 9 0        count, positions, values: 4 bytes, 4 bytes each, 1 byte each, little endian
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from typing import IO, Any, Protocol

import numpy as np
import numpy.typing as npt

from paddle_reshard.pipeline.core.extras import require
from paddle_reshard.pipeline.versions.form import Encoding

WINDOW_BYTES = 8 << 20
"""How much of a tensor is in memory at a time."""
MAX_OVERWRITE_BYTES = 1 << 32
"""Tensors of this size and larger have positions that 4 bytes cannot hold."""
LEVEL = 3
"""Level of compression."""
_MAX_FRAME_WINDOW_BYTES = 1 << 27
"""What a frame may make its reader hold; the default of the ``zstd`` command."""
_COUNT_BYTES = 4
_POSITION_BYTES = 4
_POSITIONS = 1 << 18
"""Positions in memory at a time."""

Window = npt.NDArray[np.uint8]


class FrameError(ValueError):
    """A frame does not hold what its encoding says. The message completes "the frame …"."""


def _zstandard() -> Any:
    require("zstandard", "publish", "a published delta")
    import zstandard

    return zstandard


# ------------------------------------------------------------------------------------------------------- encoding


class XorEncoder:
    """:attr:`Encoding.XOR`. The frame is compressed as windows arrive, into a temporary file if it is large."""

    def __init__(self, nbytes: int, folder: str | None) -> None:
        self._compressor = _zstandard().ZstdCompressor(level=LEVEL).compressobj(size=nbytes)
        self._spool = _spool_file(folder)
        self._changed = False

    def add(self, new: Window, old: Window) -> None:
        """Add the next window."""
        differs = np.bitwise_xor(new, old)
        self._changed = self._changed or bool(differs.any())
        self._spool.write(self._compressor.compress(differs.data))

    def frame(self) -> Iterator[bytes] | None:
        """The frame, or ``None``."""
        self._spool.write(self._compressor.flush())
        return _pieces(self._spool) if self._changed else None

    def close(self) -> None:
        """Remove the temporary file."""
        self._spool.close()


class OverwriteEncoder:
    """:attr:`Encoding.OVERWRITE`. Positions come before values, so both are collected before they are compressed."""

    def __init__(self, nbytes: int, folder: str | None) -> None:
        self._positions, self._values = _spool_file(folder), _spool_file(folder)
        self._start = self._count = 0

    def add(self, new: Window, old: Window) -> None:
        """Add the next window."""
        within = np.flatnonzero(new != old)
        self._positions.write((within + self._start).astype("<u4").data)
        self._values.write(new[within].data)
        self._start += len(new)
        self._count += len(within)

    def frame(self) -> Iterator[bytes] | None:
        """The frame, or ``None``."""
        return self._compressed() if self._count else None

    def close(self) -> None:
        """Remove the temporary files."""
        self._positions.close()
        self._values.close()

    def _compressed(self) -> Iterator[bytes]:
        size = _COUNT_BYTES + self._count * (_POSITION_BYTES + 1)
        compressor = _zstandard().ZstdCompressor(level=LEVEL).compressobj(size=size)
        yield compressor.compress(self._count.to_bytes(_COUNT_BYTES, "little"))
        for part in (self._positions, self._values):
            yield from map(compressor.compress, _pieces(part))
        yield compressor.flush()


Encoder = XorEncoder | OverwriteEncoder
"""Makes the frame of one tensor: windows are added, then the frame is taken, ``None`` if nothing changed."""


def encoder_of(encoding: Encoding, nbytes: int, folder: str | None) -> Encoder:
    """An encoder for a tensor of this size; temporary files are made in ``folder``."""
    kind = XorEncoder if encoding is Encoding.XOR else OverwriteEncoder
    return kind(nbytes, folder)


def _spool_file(folder: str | None) -> IO[bytes]:
    """A temporary file without a name, which is in memory while it is small."""
    return tempfile.SpooledTemporaryFile(max_size=WINDOW_BYTES, dir=folder)


def _pieces(spool: IO[bytes]) -> Iterator[bytes]:
    spool.seek(0)
    while piece := spool.read(WINDOW_BYTES):
        yield piece


# ------------------------------------------------------------------------------------------------------- decoding


class ByteReader(Protocol):
    """Bytes that are read from first to last."""

    def read(self, size: int = -1, /) -> bytes:
        """The next bytes, at most ``size``; none at the end."""


OpenFrame = Callable[[], ByteReader]
"""Opens the compressed bytes of a frame at its beginning."""


class _Frame:
    """The decompressed bytes of a frame."""

    def __init__(self, open_frame: OpenFrame) -> None:
        zstandard = _zstandard()
        self._errors = zstandard.ZstdError
        decompressor = zstandard.ZstdDecompressor(max_window_size=_MAX_FRAME_WINDOW_BYTES)
        self._reader = decompressor.stream_reader(open_frame())

    def fill(self, buffer: Window) -> None:
        """Fill a buffer with the next bytes."""
        rest = buffer.data
        while rest:
            count = self._read_into(rest)
            if not count:
                raise FrameError(f"ends {len(rest)} bytes too early")
            rest = rest[count:]

    def skip(self, nbytes: int) -> None:
        """Read past bytes that are not needed."""
        buffer = np.empty(min(nbytes, WINDOW_BYTES), np.uint8)
        while nbytes:
            self.fill(buffer[:nbytes])
            nbytes -= len(buffer[:nbytes])

    def end(self) -> None:
        """Refuse further bytes."""
        if self._read_into(memoryview(bytearray(1))):
            raise FrameError("holds more than the tensor needs")

    def _read_into(self, buffer: memoryview) -> int:
        try:
            return int(self._reader.readinto(buffer))
        except self._errors as error:
            raise FrameError(f"cannot be decompressed: {error}") from error


class XorChange:
    """:attr:`Encoding.XOR`."""

    def __init__(self, open_frame: OpenFrame, nbytes: int) -> None:
        self._frame = _Frame(open_frame)

    def apply(self, window: Window) -> None:
        """Change the next window."""
        differs = np.empty_like(window)
        self._frame.fill(differs)
        np.bitwise_xor(window, differs, out=window)

    def end(self) -> None:
        """Refuse further bytes."""
        self._frame.end()


class OverwriteChange:
    """:attr:`Encoding.OVERWRITE`. The frame is decompressed twice at a time: for positions, and for values."""

    def __init__(self, open_frame: OpenFrame, nbytes: int) -> None:
        self._positions, self._values = _Frame(open_frame), _Frame(open_frame)
        count = np.empty(_COUNT_BYTES, np.uint8)
        self._positions.fill(count)
        self._count = int.from_bytes(count.tobytes(), "little")
        if self._count > nbytes:
            raise FrameError(f"changes {self._count} bytes of {nbytes}")
        self._values.skip(_COUNT_BYTES + self._count * _POSITION_BYTES)
        self._unread, self._start, self._last = self._count, 0, -1
        self._at = np.empty(0, np.int64)
        self._with = np.empty(0, np.uint8)

    def apply(self, window: Window) -> None:
        """Change the next window."""
        end = self._start + len(window)
        while True:
            if not len(self._at) and self._unread:
                self._refill()
            here = int(np.searchsorted(self._at, end))
            window[self._at[:here] - self._start] = self._with[:here]
            self._at, self._with = self._at[here:], self._with[here:]
            if len(self._at) or not self._unread:
                break
        self._start = end

    def _refill(self) -> None:
        count = min(self._unread, _POSITIONS)
        positions = np.empty(count * _POSITION_BYTES, np.uint8)
        self._with = np.empty(count, np.uint8)
        self._positions.fill(positions)
        self._values.fill(self._with)
        self._at = positions.view("<u4").astype(np.int64)
        if self._at[0] <= self._last or not (np.diff(self._at) > 0).all():
            raise FrameError("has positions that do not ascend, which cannot be applied from first to last")
        self._last = int(self._at[-1])
        self._unread -= count

    def end(self) -> None:
        """Refuse positions beyond the tensor, and further bytes."""
        if len(self._at) or self._unread:
            raise FrameError(f"changes byte {self._last} of a tensor of {self._start} bytes")
        self._values.end()


Change = XorChange | OverwriteChange
"""The change of one tensor from a version to the next. It turns the old bytes of each window into the new ones, in
place; :class:`FrameError` if the frame is damaged, or is that of a tensor of another size."""


def open_change(encoding: Encoding, open_frame: OpenFrame, nbytes: int) -> Change:
    """The change that a frame describes, of a tensor of this size.

    Raises
    ------
    FrameError
        If the frame is damaged.
    """
    kind = XorChange if encoding is Encoding.XOR else OverwriteChange
    return kind(open_frame, nbytes)
