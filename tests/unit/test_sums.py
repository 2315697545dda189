"""Checksums added up from boxes, against a CRC computed bit by bit."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from awscrt.checksums import crc64nvme
from hypothesis import given, settings
from hypothesis import strategies as st

from paddle_reshard.pipeline.core import crc
from paddle_reshard.tasks import sums
from paddle_reshard.tasks.cast import cast
from paddle_reshard.tasks.device import Box
from paddle_reshard.tasks.sums import Sums

DTYPES = (np.dtype("<u2"), np.dtype("<f4"), np.dtype("<i8"), np.dtype("u1"))


def bit_by_bit(message: bytes) -> int:
    """CRC-64/NVME as its definition has it."""
    register = (1 << 64) - 1
    for octet in message:
        for bit in range(8):
            divides = (register ^ octet >> bit) & 1
            register = register >> 1 ^ (0x9A6C9329AC4BC9B5 if divides else 0)
    return register ^ (1 << 64) - 1


def test_the_check_value_of_the_catalogue() -> None:
    assert bit_by_bit(b"123456789") == 0xAE8B14860A799888


@given(st.lists(st.binary(max_size=40), max_size=6))
def test_remainders_of_pieces_add_up(pieces: list[bytes]) -> None:
    whole = b"".join(pieces)
    remainders = [crc.remainder_of(bit_by_bit(piece), len(piece)) for piece in pieces]
    behind = [len(whole) - len(b"".join(pieces[: n + 1])) for n in range(len(pieces))]
    found = crc.shifted(np.array(remainders, dtype=np.uint64), np.array(behind, dtype=np.int64))
    assert crc.checksum_of(int(np.bitwise_xor.reduce(found)), len(whole)) == bit_by_bit(whole)


@given(st.binary(min_size=1, max_size=60), st.integers(1, 7))
def test_remainders_in_a_row(message: bytes, count: int) -> None:
    each = np.full(count, crc.remainder_of(bit_by_bit(message), len(message)), dtype=np.uint64)
    whole = message * count
    found = int(crc.in_a_row(each, len(message)))
    assert crc.checksum_of(found, len(whole)) == bit_by_bit(whole)


@st.composite
def cut_tensors(draw: st.DrawFn) -> tuple[np.ndarray, list[tuple[list[int], list[int]]], list[int]]:
    """A tensor, boxes that cover it once, and the order of its dims in memory."""
    shape = draw(st.lists(st.integers(1, 6), max_size=4))
    dtype = draw(st.sampled_from(DTYPES))
    tensor = np.random.default_rng(draw(st.integers(0, 99))).bytes(int(np.prod(shape)) * dtype.itemsize)
    cuts = [
        [*sorted(draw(st.sets(st.integers(0, extent - 1), max_size=2)) | {0}), extent] for extent in shape
    ]
    boxes: list[tuple[list[int], list[int]]] = [([], [])]
    for cut in cuts:
        ranges = list(pairwise(cut))
        boxes = [([*o, low], [*e, high - low]) for o, e in boxes for low, high in ranges]
    order = draw(st.permutations(range(len(shape))))
    return np.frombuffer(tensor, dtype).reshape(shape), draw(st.permutations(boxes)), order


@settings(max_examples=150, deadline=None)
@given(cut_tensors(), st.sampled_from([0, 3, 2048]), st.sampled_from([16, 1 << 20]))
def test_boxes_add_up_to_the_tensor(
    case: tuple[np.ndarray, list[tuple[list[int], list[int]]], list[int]], gap: int, scratch: int
) -> None:
    tensor, boxes, order = case
    before = sums.GAP_BYTES, sums.SCRATCH_BYTES
    sums.GAP_BYTES, sums.SCRATCH_BYTES = gap, scratch
    try:
        added = Sums()
        for offset, extents in boxes:
            values = tensor[tuple(slice(o, o + e) for o, e in zip(offset, extents, strict=True))]
            stored = np.array(values.transpose(order), order="C")
            buffer = np.frombuffer(b"xyz" + stored.tobytes(), np.uint8)
            strides = [0] * len(order)
            for dim, stride in zip(order, stored.strides, strict=True):
                strides[dim] = stride
            box = Box(buffer, 3, tensor.dtype, tuple(extents), tuple(strides))
            added.add((7, 1), box, offset, tensor.shape, tensor.dtype)
        (found,) = added.found()
    finally:
        sums.GAP_BYTES, sums.SCRATCH_BYTES = before
    assert (found.tensor, found.dtype, found.elements) == (7, 1, tensor.size)
    assert crc.checksum_of(found.remainder, tensor.nbytes) == bit_by_bit(tensor.tobytes())


def test_a_box_is_cast_before_it_is_added() -> None:
    master = np.random.default_rng(1).standard_normal((300, 500)).astype("<f4")
    added = Sums()
    for first in (0, 200):
        half = np.ascontiguousarray(master[first : first + 200 - first // 2])
        box = Box(half.view(np.uint8).reshape(-1), 0, half.dtype, half.shape, half.strides)
        added.add((0, 0), box, (first, 0), master.shape, np.dtype("<u2"))
    (found,) = added.found()
    rounded = cast(master, np.dtype("<u2"))
    assert crc.checksum_of(found.remainder, rounded.nbytes) == crc64nvme(rounded.tobytes())
