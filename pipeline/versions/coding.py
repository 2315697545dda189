"""From two versions of a tensor to a Zstandard frame, and back, window by window.

A tensor is worked on from its first byte to its last, so memory does not depend on its size. A frame is written
from the new and the old bytes of each window; a change, opened from a frame, turns old bytes into new ones::

    old   1 2 3 4 | 5 6 7 8
    new   1 2 9 4 | 5 6 7 0
    xor   0 0 a 0 | 0 0 0 8          as many bytes as the tensor has
    overwrite  2  | 2 7 | 9 0        count, positions, values: 4 bytes, 4 bytes each, 1 byte each, little endian
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import IO, Any, Protocol

import numpy as np
import numpy.typing as npt

from paddle_reshard.pipeline.core.errors import CheckpointError
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


def _zstandard() -> Any:
    require("zstandard", "publish", "a published delta")
    import zstandard

    return zstandard


# ------------------------------------------------------------------------------------------------------- encoding


Windows = Iterable[tuple[Window, Window]]
"""The new and the old bytes of a tensor, window by window."""


def write_frame(encoding: Encoding, windows: Windows, nbytes: int, frame: IO[bytes], folder: str) -> bool:
    """Write the frame of a tensor of this size to a file. Returns whether the tensor has changed at all.

    Temporary files are made in ``folder``.
    """
    if encoding is Encoding.XOR:
        return _write_xor(windows, nbytes, frame)
    with spool_file(folder) as positions, spool_file(folder) as values:
        return _write_overwrite(windows, frame, positions, values)


def _write_xor(windows: Windows, nbytes: int, frame: IO[bytes]) -> bool:
    compressor = _zstandard().ZstdCompressor(level=LEVEL).compressobj(size=nbytes)
    changed = False
    for new, old in windows:
        differs = np.bitwise_xor(new, old)
        changed = changed or bool(differs.any())
        frame.write(compressor.compress(differs.data))
    frame.write(compressor.flush())
    return changed


def _write_overwrite(windows: Windows, frame: IO[bytes], positions: IO[bytes], values: IO[bytes]) -> bool:
    """Positions come before values, and their number before both, so all are collected before they are compressed."""
    start = count = 0
    for new, old in windows:
        within = np.flatnonzero(new != old)
        positions.write((within + start).astype("<u4").data)
        values.write(new[within].data)
        start += len(new)
        count += len(within)
    size = _COUNT_BYTES + count * (_POSITION_BYTES + 1)
    compressor = _zstandard().ZstdCompressor(level=LEVEL).compressobj(size=size)
    frame.write(compressor.compress(count.to_bytes(_COUNT_BYTES, "little")))
    for piece in chain(pieces_of(positions), pieces_of(values)):
        frame.write(compressor.compress(piece))
    frame.write(compressor.flush())
    return count > 0


def spool_file(folder: str) -> IO[bytes]:
    """A temporary file without a name in a folder, which is in memory while it is small."""
    return tempfile.SpooledTemporaryFile(max_size=WINDOW_BYTES, dir=folder)


def pieces_of(spool: IO[bytes]) -> Iterator[bytes]:
    """The content of a temporary file, from its beginning."""
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
    """The decompressed bytes of a frame. ``where`` it is stored is for messages."""

    def __init__(self, open_frame: OpenFrame, where: str) -> None:
        self._where = where
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
                raise self.damaged(f"ends {len(rest)} bytes too early")
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
            raise self.damaged("holds more than the tensor needs")

    def damaged(self, how: str) -> CheckpointError:
        """The error that the frame does not hold what its encoding says."""
        return CheckpointError(f"{self._where}: the frame {how}")

    def _read_into(self, buffer: memoryview) -> int:
        try:
            return int(self._reader.readinto(buffer))
        except self._errors as error:
            raise self.damaged(f"cannot be decompressed: {error}") from error


class XorChange:
    """:attr:`Encoding.XOR`."""

    def __init__(self, open_frame: OpenFrame, nbytes: int, where: str) -> None:
        self._frame = _Frame(open_frame, where)

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

    def __init__(self, open_frame: OpenFrame, nbytes: int, where: str) -> None:
        self._positions, self._values = _Frame(open_frame, where), _Frame(open_frame, where)
        count = np.empty(_COUNT_BYTES, np.uint8)
        self._positions.fill(count)
        self._unread = int.from_bytes(count.tobytes(), "little")
        if self._unread > nbytes:
            raise self._values.damaged(f"changes {self._unread} bytes of {nbytes}")
        self._values.skip(_COUNT_BYTES + self._unread * _POSITION_BYTES)
        self._start, self._last = 0, -1
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
            raise self._positions.damaged(
                "has positions that do not ascend, which cannot be applied from first to last"
            )
        self._last = int(self._at[-1])
        self._unread -= count

    def end(self) -> None:
        """Refuse positions beyond the tensor, and further bytes."""
        if len(self._at) or self._unread:
            raise self._positions.damaged(f"changes byte {self._last} of a tensor of {self._start} bytes")
        self._values.end()


Change = XorChange | OverwriteChange
"""The change of one tensor from a version to the next. It turns the old bytes of each window into the new ones, in
place; a ``CheckpointError`` if the frame is damaged, or is that of a tensor of another size."""


def open_change(encoding: Encoding, open_frame: OpenFrame, nbytes: int, where: str) -> Change:
    """The change that the frame stored at ``where`` describes, of a tensor of this size."""
    kind = XorChange if encoding is Encoding.XOR else OverwriteChange
    return kind(open_frame, nbytes, where)
