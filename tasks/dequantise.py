"""Dequantise FP8, MXFP4 and integer weights while they are read: files appear with 16-bit floats in them.

Planning and moving then work as with any source, range by range, and nothing is stored in between.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from paddle_reshard.pipeline.checkpoint.quantised import (
    BLOCK,
    GROUP,
    GROUP_BYTES,
    Dequantised,
    Section,
    ServedFile,
)
from paddle_reshard.pipeline.checkpoint.stored_tensors import Integers, Packed, Scales
from paddle_reshard.storage.store import Read, Source
from paddle_reshard.storage.views import ComputedSource
from paddle_reshard.tasks.cast import Floats, bfloat16_bits, fp8_values, widened

CODES = 256
CHUNK_ELEMENTS = 1 << 16
"""Elements dequantised at a time: they fit the processor's cache."""


def dequantise(buffer: memoryview, first: int, layout: Scales, rows: bytearray) -> None:
    """Replace FP8 codes, which fill the second half of ``buffer``, by bfloat16, which fills all of it.

    ``weight · scale`` in float32, rounded once to bfloat16, as DeepSeek's ``fp8_cast_bf16.py`` does.

    Parameters
    ----------
    buffer
        Two bytes for each element.
    first
        Number of the first element in the weight, in C order.
    rows
        Stored rows of scales, beginning with that of the first element.
    """
    count, width = buffer.nbytes // 2, layout.width
    bits, codes = np.frombuffer(buffer, "<u2"), np.frombuffer(buffer, np.uint8)[count:]
    scales = _floats(rows, layout)
    above, made = first // width // BLOCK, -1
    for start, row, number, column, columns in _chunks(first, first + count, width):
        at, nelements = start - first, number * columns
        if row // BLOCK != made:
            made = row // BLOCK
            table = _block_values(scales[made - above])
        blocks = np.arange(column, column + columns) // BLOCK * CODES
        # What is written here ends at or before the codes of the next chunk, and the codes of this one are taken first.
        chunk = codes[at : at + nelements].reshape(number, columns) + blocks
        bits[at : at + nelements] = table.take(chunk).ravel()


def _floats(rows: bytearray, layout: Scales | Integers) -> Floats:
    """Rows of scales, stored as float32, float16 or bfloat16."""
    return widened(np.frombuffer(rows, layout.code)).reshape(-1, layout.columns)


def _block_values(scales: Floats) -> npt.NDArray[np.uint16]:
    """The 256 values that a block can hold, in bfloat16, for each block of a row; flat."""
    with np.errstate(all="ignore"):
        return bfloat16_bits(scales[:, None] * fp8_values()).ravel()


def _chunks(start: int, stop: int, width: int) -> Iterator[tuple[int, int, int, int, int]]:
    """Cut a range of elements into boxes ``(start, row, rows, column, columns)`` within 128 rows."""
    while start < stop:
        row, column = divmod(start, width)
        if column or stop - start < width or width > CHUNK_ELEMENTS:
            rows, columns = 1, min(width - column, stop - start, CHUNK_ELEMENTS)
        else:
            rows = min((stop - start) // width, CHUNK_ELEMENTS // width, BLOCK - row % BLOCK)
            columns = width
        yield start, row, rows, column, columns
        start += rows * columns


E2M1: Floats = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
"""The value of each of the 16 codes of e2m1 (OCP Microscaling Formats 1.0: bias 1)."""
E2M1.flags.writeable = False


@cache
def mxfp4_values() -> npt.NDArray[np.uint16]:
    """The bfloat16 value of each code of e2m1 with each of the 256 scales, ``[256, 16]``.

    A product has two significant bits, so bfloat16 holds it exactly for scales up to 2¹²⁵ (code 252). With larger ones
    it may be infinite; code 255, NaN in the specification, counts as 2¹²⁸, as in transformers'
    ``convert_moe_packed_tensors`` (5.20.2 ``integrations/mxfp4.py``), which gives the same for all codes and scales.

    >>> [hex(bits) for bits in mxfp4_values()[127, [1, 7, 15]]]
    ['0x3f00', '0x40c0', '0xc0c0']
    """
    with np.errstate(all="ignore"):
        values = bfloat16_bits(np.ldexp(E2M1, np.arange(256)[:, None] - 127))
    values.flags.writeable = False
    return values


def dequantise_groups(packed: npt.NDArray[np.uint8], scales: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint16]:
    """Rows of an expert in bfloat16, ``[groups · 32, columns]``, of ``[columns, groups, 16]`` and its scales."""
    columns, groups, _ = packed.shape
    codes = np.empty((columns, groups, GROUP), np.intp)
    np.bitwise_and(packed, 15, out=codes[..., 0::2], casting="unsafe")
    np.right_shift(packed, 4, out=codes[..., 1::2], casting="unsafe")
    codes += scales[..., None].astype(np.intp) * len(E2M1)
    return np.ascontiguousarray(mxfp4_values().ravel().take(codes).reshape(columns, groups * GROUP).T)


def dequantise_experts(
    goal: memoryview, first_byte: int, stored: bytearray, stored_scales: bytearray, layout: Packed
) -> None:
    """Fill ``goal`` with bytes of an expert in bfloat16, from ``first_byte`` on, given all that is stored of it."""
    columns, groups = layout.columns, layout.groups
    packed = np.frombuffer(stored, np.uint8).reshape(columns, groups, GROUP_BYTES)
    scales = np.frombuffer(stored_scales, np.uint8).reshape(columns, groups)
    stop, group_bytes = first_byte + goal.nbytes, GROUP * columns * 2
    step = max(1, CHUNK_ELEMENTS // (GROUP * columns))
    for group in range(first_byte // group_bytes, -(-stop // group_bytes), step):
        some = slice(group, group + step)
        values = dequantise_groups(packed[:, some], scales[:, some]).data.cast("B")
        at = group * group_bytes
        low, high = max(at, first_byte), min(at + values.nbytes, stop)
        goal[low - first_byte : high - first_byte] = values[low - at : high - at]


@cache
def integer_values(bits: int, packed: bool) -> Floats:
    """The values in each of the 256 bytes, in order, ``[256, 8 // bits]``; half their range was added if ``packed``.

    >>> [integer_values(bits, packed)[0x9F].tolist() for bits, packed in ((4, True), (8, True), (8, False))]
    [[7.0, 1.0], [31.0], [-97.0]]
    """
    stored = np.arange(256)
    if packed:
        fields = stored[:, None] >> np.arange(0, 8, bits) & (1 << bits) - 1
        values = (fields - (1 << (bits - 1))).astype(np.float32)
    else:
        values = stored.astype(np.int8)[:, None].astype(np.float32)
    values.flags.writeable = False
    return values


def dequantise_integers(
    buffer: memoryview, first: int, stored: bytearray, layout: Integers, rows: bytearray
) -> None:
    """Fill ``buffer`` with float16 or bfloat16.

    ``integer · scale``, rounded once. compressed-tensors (0.20.0 ``_dequantize``) casts the integer to the dtype of the
    scale, which holds it exactly, and multiplies in that dtype, which on a CPU is float32 and a rounding.

    Parameters
    ----------
    buffer
        Two bytes for each element that is wanted.
    first
        Number of the first in the weight, in C order.
    stored
        Bytes of the integers, from that with the first element on.
    rows
        Stored rows of scales, beginning with that of the first element.
    """
    values, scales = np.frombuffer(buffer, layout.code), _floats(rows, layout)
    table, bits = integer_values(layout.bits, layout.packed), layout.bits
    top = first // layout.width
    begin = layout.byte_of(first)
    for start, row, number, column, columns in _chunks(first, first + len(values), layout.width):
        low, high = column * bits // 8, -(-(column + columns) * bits // 8)
        offset = row * layout.row_bytes + low - begin
        some = np.ndarray((number, high - low), np.uint8, stored, offset, (layout.row_bytes, 1))
        skip = column * bits % 8 // bits
        floats = table.take(some, axis=0).reshape(number, -1)[:, skip : skip + columns]
        left, right = column // layout.group, (column + columns - 1) // layout.group + 1
        factors = np.repeat(scales[row - top : row - top + number, left:right], layout.group, axis=1)
        with np.errstate(all="ignore"):
            floats *= factors[:, column - left * layout.group :][:, :columns]
            rounded = bfloat16_bits(floats) if values.dtype == np.uint16 else floats.astype(values.dtype)
        values[start - first : start - first + number * columns] = rounded.ravel()


class _Reading(NamedTuple):
    """Stored bytes to be read with one call to the store, and what is computed when they are there."""

    stored: list[Read]
    then: list[Callable[[], None]]

    def memory_for(self, path: str, byte_offset: int, nbytes: int) -> bytearray:
        """Memory for stored bytes of a file, which are read."""
        content = bytearray(nbytes)
        self.stored.append(Read(path, byte_offset, memoryview(content)))
        return content


@dataclass(frozen=True)
class DequantisedSource(ComputedSource):
    """A checkpoint that reads as if its quantised weights were bfloat16 or float16.

    Besides the buffers to be filled, which hold FP8 codes too, a read takes the scales of its range and a chunk; for
    MXFP4, packed experts: a quarter of the bytes that they have in bfloat16; for integers of 4 and 8 bits, a quarter
    and half of the bytes that are read.
    """

    inner: Source
    served: Dequantised

    @property
    def summary(self) -> str:
        """What is computed, in words."""
        return self.served.summary

    def sizes(self) -> Mapping[str, int]:
        """Name of every file → size in bytes, as it is served."""
        served = {path: file.size_bytes for path, file in self.served.files.items()}
        made = {path: len(content) for path, content in self.served.made.items()}
        return {**self.inner.sizes(), **served, **made}

    def read_many(self, reads: Sequence[Read]) -> None:
        """Fill several buffers; the store gets all reads at once, those of scales included."""
        reading = _Reading([], [])
        for read in reads:
            if (content := self.served.made.get(read.path)) is not None:
                read.buffer[:] = content[read.byte_offset : read.byte_offset + read.buffer.nbytes]
            elif (file := self.served.files.get(read.path)) is not None:
                _read_served(file, read, reading)
            else:
                reading.stored.append(read)
        self.inner.read_many(reading.stored)
        for compute in reading.then:
            compute()


def _read_served(file: ServedFile, read: Read, reading: _Reading) -> None:
    """Fill what a range has of the header, and ask for what its sections are computed from."""
    at, stop = read.byte_offset, read.byte_offset + read.buffer.nbytes
    if at < len(file.header):
        part = file.header[at:stop]
        read.buffer[: len(part)] = part
    number = max(0, bisect_right(file.sections, at, key=lambda section: section.start) - 1)
    for section in file.sections[number:]:
        if section.start >= stop:
            break
        first, last = max(at, section.start), min(stop, section.stop)
        if first < last:
            buffer = read.buffer[first - at : last - at]
            _read_section(read.path, section, first - section.start, buffer, reading)


def _read_section(
    path: str, section: Section, first_byte: int, buffer: memoryview, reading: _Reading
) -> None:
    """Ask for what fills ``buffer``, which has the bytes of a section as it is served from ``first_byte`` on."""
    layout, base = section.scales, section.byte_offset
    if layout is None:
        reading.stored.append(Read(path, base + first_byte, buffer))
        return
    if isinstance(layout, Packed):
        _read_experts(path, base, layout, first_byte, buffer, reading)
        return
    first, last = first_byte // 2, -(-(first_byte + buffer.nbytes) // 2)
    whole = buffer  # unless the range begins or ends within an element
    if whole.nbytes < 2 * (last - first):
        whole = memoryview(bytearray(2 * (last - first)))
    if isinstance(layout, Integers):
        begin, end = layout.byte_of(first), layout.byte_of(last - 1) + 1
        stored = reading.memory_for(path, base + begin, end - begin)
        rows = _read_scales(layout, first // layout.width, (last - 1) // layout.width, reading)
        reading.then.append(partial(dequantise_integers, whole, first, stored, layout, rows))
    else:
        reading.stored.append(Read(path, base + first, whole[last - first :]))
        blocks = BLOCK * layout.width
        rows = _read_scales(layout, first // blocks, (last - 1) // blocks, reading)
        reading.then.append(partial(dequantise, whole, first, layout, rows))
    if whole is not buffer:
        reading.then.append(partial(_copy, whole[first_byte % 2 :], buffer))


def _copy(source: memoryview, target: memoryview) -> None:
    """Fill ``target`` with the first bytes of ``source``."""
    target[:] = source[: target.nbytes]


def _read_scales(layout: Scales | Integers, top: int, bottom: int, reading: _Reading) -> bytearray:
    """Ask for the rows of scales from ``top`` to ``bottom``."""
    row_bytes = layout.columns * np.dtype(layout.code).itemsize
    return reading.memory_for(
        layout.path, layout.byte_offset + top * row_bytes, (bottom + 1 - top) * row_bytes
    )


def _read_experts(
    path: str, base: int, layout: Packed, first_byte: int, buffer: memoryview, reading: _Reading
) -> None:
    """Ask for the packed experts that a range of bytes needs, whole."""
    rows = layout.columns * layout.groups
    expert_bytes = 2 * GROUP * rows
    stop = first_byte + buffer.nbytes
    for expert in range(first_byte // expert_bytes, -(-stop // expert_bytes)):
        at = expert * expert_bytes
        low, high = max(first_byte, at), min(stop, at + expert_bytes)
        packed = reading.memory_for(path, base + expert * rows * GROUP_BYTES, rows * GROUP_BYTES)
        scales = reading.memory_for(layout.path, layout.byte_offset + expert * rows, rows)
        goal = buffer[low - first_byte : high - first_byte]
        reading.then.append(partial(dequantise_experts, goal, low - at, packed, scales, layout))
