"""Run the moves of a group on the CPU with NumPy, or on a device of Paddle.

A *mover* keeps the bands and parts of one group in its own memory: every band is loaded once, boxes are moved from
bands to parts, and every part is fetched once. All movers give the same bits.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from importlib import import_module
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from paddle_reshard.pipeline.core.errors import UnsupportedError
from paddle_reshard.pipeline.core.mixture import Term
from paddle_reshard.storage.aligned import memory_for
from paddle_reshard.tasks.boxes import cast_box, copy_box, divide_box, mix_box
from paddle_reshard.tasks.cast import bfloat16_bits, cast_in_range

Buffer = npt.NDArray[np.uint8]
OLDEST_PADDLE = (2, 6)
"""The first release with strided views (``paddle.as_strided``)."""


@dataclass(frozen=True, slots=True)
class DeviceBox:
    """A strided box of elements in a buffer; offset and strides in bytes."""

    buffer: Any
    """A band or part in the mover's memory."""
    byte_offset: int
    dtype: np.dtype[Any]
    extents: tuple[int, ...]
    strides: tuple[int, ...]

    def array(self) -> npt.NDArray[Any]:
        """The box as an array; its buffer must be in host memory."""
        return np.ndarray(self.extents, self.dtype, self.buffer, self.byte_offset, self.strides)


class Mover:
    """Moves boxes between the bands and the parts of a group, in host memory with NumPy."""

    def allocate(self, nbytes: int, byte_offset: int = 0) -> Buffer:
        """Host memory to read a band into, which is in a file from ``byte_offset`` on."""
        return np.frombuffer(memory_for(nbytes, byte_offset), dtype=np.uint8)

    def release(self) -> None:
        """Discard the bands that were loaded."""

    def load(self, band: Buffer) -> Any:
        """Copy a band to the mover's memory, or return it as it is; it is not changed."""
        return band

    def zeros(self, nbytes: int, byte_offset: int = 0) -> Any:
        """A part, all zeros, which is written to a file from ``byte_offset`` on."""
        return self.allocate(nbytes, byte_offset)

    def move(self, source: DeviceBox, target: DeviceBox) -> None:
        """Copy a box of a band into a part; cast it if the dtypes differ.

        Raises
        ------
        OverflowError
            If a finite value is too large for the dtype of the part.
        """
        move = copy_box if source.dtype == target.dtype else cast_box
        move(source.array(), target.array())

    def mix(self, source: DeviceBox, mixed: DeviceBox, term: Term, first: bool) -> None:
        """Make one step of a mixture; the ``first`` step ignores the contents of ``mixed``. Both boxes are float32.

        Raises
        ------
        UnsupportedError
            If this mover does not support mixtures.
        """
        mix_box(source.array(), mixed.array(), term, first)

    def finish(self, mixed: DeviceBox, target: DeviceBox, divide_by: float) -> None:
        """Divide after the last step, and cast to ``target`` if that is a different box.

        Raises
        ------
        OverflowError
            If a finite value is too large for the dtype of ``target``.
        """
        if divide_by != 1:
            divide_box(mixed.array(), divide_by)
        if mixed.dtype != target.dtype:
            cast_box(mixed.array(), target.array())

    def fetch(self, part: Any) -> Buffer:
        """The part in host memory, as a writable buffer."""
        buffer: Buffer = part
        return buffer


HOST = Mover()


class PaddleMover(Mover):
    """Moves on a device of Paddle; strided copies and casts are Paddle's own operators.

    Buffers are byte tensors and boxes are strided views of them, because a payload may start at any byte of a file. The
    device holds the bands, one part, and the largest box that is cast.

    Raises
    ------
    UnsupportedError
        If Paddle is missing or too old, does not have the device, or rounds differently from the CPU.
    """

    def __init__(self, device: str) -> None:
        self.paddle = _import_paddle()
        self.paddle.disable_signal_handler()  # it prints a traceback of its own when a worker is stopped
        try:
            self.paddle.set_device(device)
        except Exception as error:
            raise UnsupportedError(f"this build of Paddle has no device {device!r}: {error}") from error
        probe = np.array(PROBE_BITS, dtype="<u4").view("<f4")
        cast = self.paddle.to_tensor(probe).astype("bfloat16").numpy()
        if cast.tobytes() != bfloat16_bits(probe).tobytes():
            raise UnsupportedError(f"Paddle on {device!r} does not round float32 to bfloat16 as the CPU does")

    def load(self, band: Buffer) -> Any:
        """A copy of the band on the device."""
        return self.paddle.to_tensor(band)

    def zeros(self, nbytes: int, byte_offset: int = 0) -> Any:
        """A part on the device, all zeros."""
        return self.paddle.zeros([nbytes], dtype="uint8")

    def move(self, source: DeviceBox, target: DeviceBox) -> None:
        """Copy, or cast float32 to bfloat16, on the device; other casts, which only exports need, on the host."""
        if source.dtype == target.dtype:
            self._assign(source, target)
            return
        nbytes = prod(source.extents) * source.dtype.itemsize
        aligned = DeviceBox(self.zeros(nbytes), 0, source.dtype, source.extents, _contiguous(source))
        self._assign(source, aligned)
        if (source.dtype, target.dtype) == (np.dtype("<f4"), np.dtype("<u2")):
            rounded = aligned.buffer.view("float32").astype("bfloat16").view("uint8")
        else:
            values = aligned.buffer.numpy().view(source.dtype)
            rounded = self.paddle.to_tensor(cast_in_range(values, target.dtype).view(np.uint8))
        self._assign(DeviceBox(rounded, 0, target.dtype, source.extents, _contiguous(target)), target)

    def mix(self, source: DeviceBox, mixed: DeviceBox, term: Term, first: bool) -> None:
        """Not supported: a device may round a product and a sum in one step."""
        raise UnsupportedError("averages are computed on the CPU; omit --device")

    def _assign(self, source: DeviceBox, target: DeviceBox) -> None:
        """Copy bytes between two boxes of one dtype; dims that are contiguous on both sides are merged."""
        extents, from_strides, to_strides = [source.dtype.itemsize], [1], [1]
        dims = zip(reversed(source.extents), reversed(source.strides), reversed(target.strides), strict=True)
        for extent, source_stride, target_stride in dims:
            if extent == 1:
                continue
            reach = extents[0]
            if source_stride == from_strides[0] * reach and target_stride == to_strides[0] * reach:
                extents[0] *= extent
            else:
                extents = [extent, *extents]
                from_strides, to_strides = [source_stride, *from_strides], [target_stride, *to_strides]
        strided = self.paddle.as_strided
        values = strided(source.buffer, extents, from_strides, source.byte_offset)
        self.paddle.assign(values, output=strided(target.buffer, extents, to_strides, target.byte_offset))

    def fetch(self, part: Any) -> Buffer:
        """A copy of the part in host memory."""
        return np.require(part.numpy(), requirements="W")


PROBE_BITS = (
    *(0x00000000, 0x80000000, 0x3F800000, 0x3F808000, 0x3F818000, 0x3F808001),  # ±0, exact, ties, above a tie
    *(0x00000001, 0x00008000, 0x00018000, 0x007FFFFF, 0x807FFFFF),  # denormals
    *(0x7F7FFFFF, 0xFF7F8000, 0x7F800000, 0xFF800000),  # overflow to infinity, infinities
    *(0x7FC00000, 0xFFC00000, 0x7F800001, 0xFFFFFFFF),  # NaN, quiet and signalling
)
"""Bits of float32 values whose cast to bfloat16 shows how a device rounds."""


def _contiguous(box: DeviceBox) -> tuple[int, ...]:
    """Byte strides of a box with the same extents and dtype, without gaps."""
    return tuple(prod(box.extents[dim + 1 :]) * box.dtype.itemsize for dim in range(len(box.extents)))


def _import_paddle() -> Any:
    wanted = ".".join(map(str, OLDEST_PADDLE))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            paddle: Any = import_module("paddle")
    except ImportError as error:
        raise UnsupportedError(
            f"device gpu needs PaddlePaddle {wanted} or later on every worker, but it cannot be imported: {error}"
        ) from error
    version = tuple(int(number) for number in paddle.__version__.split(".")[:2])
    if version != (0, 0) and version < OLDEST_PADDLE:  # 0.0.0 is a nightly build
        raise UnsupportedError(
            f"device gpu needs PaddlePaddle {wanted} or later on every worker, found {paddle.__version__}"
        )
    return paddle
