"""Quantise weights to FP8 while parts are written.

Codes and scales are those of DeepSeek's ``per_block_cast_to_fp8`` without ``use_ue8m0`` (DeepGEMM at 54e2261,
``deep_gemm/utils/math.py``; vLLM 0.33.0 and SGLang have copies of it), bit for bit, in float32: ``scale = max(amax,
1e-4) / 448`` and ``code = e4m3(weight · (1 / scale))``, rounded to nearest, ties to even. A block at an edge is
smaller, which gives the same as padding it with zeros. That is what torch computes on a CPU; on a GPU, it multiplies by
a rounded 1 / 448, and the last bit of a scale may differ.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import numpy.typing as npt

from paddle_reshard.pipeline.checkpoint.quantising import (
    BLOCK,
    FLOAT_BYTES,
    Quantisation,
    QuantisedFile,
    WeightRows,
)
from paddle_reshard.storage.store import CopyRange, NewFile, ReadRange, Receipt, WritePart
from paddle_reshard.tasks.cast import Floats, fp8_values

Codes = npt.NDArray[np.uint8]

LARGEST = np.float32(448)
"""Largest value of e4m3."""
LARGEST_CODE = 0x7E
"""Its code."""
SMALLEST_AMAX = np.float32(1e-4)
"""Blocks with smaller values are scaled as if this were their largest."""
CHUNK_COLUMNS = 8 * BLOCK
"""Columns quantised at a time: with 128 rows, they fit the processor's cache."""
SCALE_PART_BYTES = 8 << 20
"""Bytes of the parts of a file of scales."""


class NotFiniteError(ValueError):
    """A value of a weight has no scale. ``byte_offset`` is that of the value in the file as planned."""

    def __init__(self, key: str, index: tuple[int, int], value: float, byte_offset: int) -> None:
        super().__init__(key, index, value, byte_offset)
        self.key, self.index, self.value, self.byte_offset = key, index, value, byte_offset

    def __str__(self) -> str:
        return f"{self.key}: the value at {self.index} is {self.value}, so it has no FP8 scale"


def e4m3_codes(values: Floats) -> Codes:
    """Codes of the nearest e4m3 values, ties to even; magnitudes must be below 464, which rounds to 448.

    >>> [hex(code) for code in e4m3_codes(np.float32([0, -1, 448, 1.0625, 1.1875, 2**-10, 0.0029296875]))]
    ['0x0', '0xb8', '0x7e', '0x38', '0x3a', '0x0', '0x2']
    """
    bits = np.ascontiguousarray(values).view("<u4")
    words = np.bitwise_and(bits, 0xFFFF)
    # The upper half is enough, if its last bit is set whenever a bit of the lower half is.
    np.add(words, 0xFFFF, out=words)
    np.bitwise_or(words, bits, out=words)
    return _codes_of_halves().take(words.view("<u2")[..., 1::2])


@cache
def _codes_of_halves() -> Codes:
    """The code of the e4m3 value nearest to each number of 16 bits, the upper half of a float32; ``[65536]``."""
    magnitudes = (np.arange(1 << 15, dtype="<u4") << 16).view("<f4")
    finite = fp8_values()[: LARGEST_CODE + 1]
    halfway = (finite[:-1] + finite[1:]) / 2
    below, above = (np.searchsorted(halfway, magnitudes, side) for side in ("left", "right"))
    codes = np.where(below % 2, above, below).astype(np.uint8)  # they differ halfway: the even one
    return np.concatenate([codes, codes | 0x80])


def quantise(weight: Floats, codes: Codes) -> Floats:
    """Fill ``codes`` with those of at most 128 rows of a weight; one scale for each 128 columns.

    Raises ``OverflowError`` if a value is infinite or not a number.
    """
    columns = weight.shape[1]
    scales = np.empty(-(-columns // BLOCK), np.float32)
    for first in range(0, columns, CHUNK_COLUMNS):
        values = np.array(weight[:, first : first + CHUNK_COLUMNS], np.float32)
        starts = np.arange(0, values.shape[1], BLOCK)
        amax = np.maximum.reduceat(np.abs(values).max(axis=0), starts)
        if not np.isfinite(amax).all():
            raise OverflowError("a value is infinite or not a number")
        scale = np.maximum(amax, SMALLEST_AMAX) / LARGEST
        scales[first // BLOCK : first // BLOCK + len(scale)] = scale
        factors = np.repeat(np.float32(1) / scale, np.diff(starts, append=values.shape[1]))
        np.multiply(values, factors, out=values)
        codes[:, first : first + values.shape[1]] = e4m3_codes(values)
    return scales


@dataclass(frozen=True)
class QuantisingWriter:
    """Writes parts as they are stored, given as they are planned.

    The codes replace the values in their buffer; besides it, the codes of 128 rows and a chunk take memory.
    """

    inner: WritePart
    files: Mapping[str, QuantisedFile]

    @property
    def copies_in_flight(self) -> int:
        """The number of copies at a time that the store allows."""
        return self.inner.copies_in_flight

    def write_part(self, path: str, byte_offset: int, buffer: memoryview) -> Receipt:
        """Write a whole part; offset and buffer are those of the file as planned, the receipt's of that as stored.

        Raises
        ------
        NotFiniteError
            If a weight holds an infinite value or NaN.
        """
        file = self.files.get(path)
        if file is None:
            return self.inner.write_part(path, byte_offset, buffer)
        start, stop = file.stored_at(byte_offset), file.stored_at(byte_offset + buffer.nbytes)
        flat = np.frombuffer(buffer, np.uint8)
        scales: list[Floats] = []
        at = taken = 0  # bytes written to the buffer, bytes read from it: never fewer
        for piece in file.pieces(start, stop):
            begin = piece.tensor.start + FLOAT_BYTES * piece.tensor.columns * piece.first - byte_offset
            flat[at : at + begin - taken] = flat[taken:begin]
            at += begin - taken
            at, taken = _quantise_piece(flat, at, begin, piece, scales)
        rest = flat.nbytes - taken
        flat[at : at + rest] = flat[taken:]
        receipt = self.inner.write_part(path, start, buffer[: at + rest])
        return replace(receipt, aside=b"".join(row.tobytes() for row in scales).hex())

    def copy_part(self, copy: CopyRange, source: ReadRange) -> Receipt:
        """Have the storage copy a part of another file."""
        return self.inner.copy_part(copy, source)


def _quantise_piece(
    flat: Codes, at: int, begin: int, piece: WeightRows, scales: list[Floats]
) -> tuple[int, int]:
    """Quantise rows that begin at byte ``begin`` of a buffer, to byte ``at``; where both end."""
    columns = piece.tensor.columns
    for first in range(piece.first, piece.last, BLOCK):
        rows = min(BLOCK, piece.last - first)
        weight = np.ndarray((rows, columns), "<f4", flat, begin)
        codes = np.empty((rows, columns), np.uint8)
        try:
            scales.append(quantise(weight, codes))
        except OverflowError as error:
            row, column = (int(at) for at in np.argwhere(~np.isfinite(weight))[0])
            element = columns * (first + row) + column
            raise NotFiniteError(
                piece.tensor.key,
                (first + row, column),
                float(weight[row, column]),
                piece.tensor.start + FLOAT_BYTES * element,
            ) from error
        flat[at : at + codes.nbytes] = codes.ravel()
        at, begin = at + codes.nbytes, begin + FLOAT_BYTES * codes.nbytes
    return at, begin


def stored_parts(planned: Sequence[NewFile], quantisation: Quantisation) -> list[NewFile]:
    """The planned files as they are stored, with the offsets of their parts; and the files of scales."""
    stored = [
        NewFile(file.path, described.size_bytes, tuple(map(described.stored_at, file.part_starts)))
        if (described := quantisation.files.get(file.path)) is not None
        else file
        for file in planned
    ]
    return stored + [
        NewFile(path, file.size_bytes, tuple(range(0, file.size_bytes, SCALE_PART_BYTES)))
        for path, file in quantisation.scale_files.items()
    ]


def write_scales(
    path: str, quantisation: Quantisation, receipts: Sequence[Receipt], writer: WritePart
) -> list[Receipt]:
    """Write the file of scales at ``path``, given the receipts of all other parts."""
    content = memoryview(_scale_file(path, quantisation, receipts))
    return [
        writer.write_part(path, start, content[start : start + SCALE_PART_BYTES])
        for start in range(0, len(content), SCALE_PART_BYTES)
    ]


def _scale_file(path: str, quantisation: Quantisation, receipts: Iterable[Receipt]) -> bytes:
    described = quantisation.scale_files[path]
    content = bytearray(described.size_bytes)
    content[: len(described.header)] = described.header
    for receipt in receipts:
        file = quantisation.files.get(receipt.path)
        if file is None or file.scales != path:
            continue
        scales, done = bytes.fromhex(receipt.aside), 0
        for tensor, first, last in file.pieces(receipt.byte_offset, receipt.byte_offset + receipt.nbytes):
            row = FLOAT_BYTES * tensor.scale_columns
            nbytes = -(-(last - first) // BLOCK) * row
            begin = tensor.scales + first // BLOCK * row
            content[begin : begin + nbytes] = scales[done : done + nbytes]
            done += nbytes
    return bytes(content)
