"""Checksums added up from boxes, against a CRC computed bit by bit."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from awscrt.checksums import crc64nvme
from hypothesis import example, given, settings
from hypothesis import strategies as st

from paddle_reshard.pipeline.core import crc
from paddle_reshard.pipeline.core.errors import CheckpointError
from paddle_reshard.pipeline.core.tensor_columns import Tensors
from paddle_reshard.pipeline.core.tensors import DTYPES as TENSOR_DTYPES
from paddle_reshard.pipeline.core.tensors import Tensor, dtype_named
from paddle_reshard.pipeline.examine.fingerprint import fingerprints_of
from paddle_reshard.tasks import sums
from paddle_reshard.tasks.cast import cast
from paddle_reshard.tasks.device import DeviceBox
from paddle_reshard.tasks.sums import Sum, SummedBox, Sums, Whole, added
from tests.sampling import examples

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


@settings(deadline=None)
@example(b"many", 200)
@given(st.binary(min_size=1, max_size=60), st.integers(1, 7))
def test_remainders_in_a_row(message: bytes, count: int) -> None:
    each = np.full(count, crc.checksum_of(bit_by_bit(message), len(message)), dtype=np.uint64)
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


def stored_in(order: list[int], values: np.ndarray) -> tuple[np.ndarray, tuple[int, ...]]:
    """Values with their dims in another order, after three other bytes, and the strides of their dims."""
    stored = np.array(values.transpose(order), order="C")
    strides = [0] * len(order)
    for dim, stride in zip(order, stored.strides, strict=True):
        strides[dim] = stride
    return np.frombuffer(b"xyz" + stored.tobytes(), np.uint8), tuple(strides)


NARROW = [([0, i, j], [4, 1, 1]) for i in range(3) for j in range(2)]
PLACES = "as a tensor", "apart", "one after the other"


@examples(200)
@example((np.arange(24, dtype="<u2").reshape(4, 3, 2), NARROW, [0, 1, 2]), 3, 16, "apart")
@example(
    (np.arange(24, dtype="<u2").reshape(4, 3, 2), NARROW, [2, 1, 0]), 2048, 1 << 20, "one after the other"
)
@given(cut_tensors(), st.sampled_from([0, 3, 2048]), st.sampled_from([16, 1 << 20]), st.sampled_from(PLACES))
def test_boxes_add_up_to_the_tensor(
    case: tuple[np.ndarray, list[tuple[list[int], list[int]]], list[int]],
    call: int,
    scratch: int,
    stored: str,
) -> None:
    tensor, boxes, order = case
    before = sums.CALL_BYTES, sums.SCRATCH_BYTES
    sums.CALL_BYTES, sums.SCRATCH_BYTES = call, scratch
    try:
        added, whole = Sums(), Whole.of(tensor.shape, tensor.dtype)
        buffer, strides = stored_in(order, tensor)
        of_boxes = np.zeros(tensor.nbytes + 4 * len(boxes), np.uint8)
        end = 0
        for offset, extents in boxes:
            if stored == "as a tensor":
                first_byte = 3 + sum(o * stride for o, stride in zip(offset, strides, strict=True))
            else:
                values = tensor[tuple(slice(o, o + e) for o, e in zip(offset, extents, strict=True))]
                buffer, strides = stored_in(order, values)
                first_byte = 3
            if stored == "one after the other":
                of_boxes[end : end + len(buffer)] = buffer
                buffer, first_byte, end = of_boxes, end + 3, end + len(buffer)
            box = DeviceBox(buffer, first_byte, tensor.dtype, tuple(extents), strides)
            added.add((7, 1), whole, [SummedBox.of(box, offset, tensor.ndim)])
        (found,) = added.totals()
    finally:
        sums.CALL_BYTES, sums.SCRATCH_BYTES = before
    assert (found.tensor, found.dtype, found.elements) == (7, 1, tensor.size)
    assert crc.checksum_of(found.remainder, tensor.nbytes) == bit_by_bit(tensor.tobytes())


@pytest.mark.parametrize("columns", [(0, 40), (0, 15, 40), (0, 15, 30)])
def test_long_and_short_runs(columns: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sums, "CALL_BYTES", 64)
    monkeypatch.setattr(sums, "SCRATCH_BYTES", 256)
    master = np.random.default_rng(1).standard_normal((2, 5, 40, 3)).astype("<f4")
    added, dtypes = Sums(), [np.dtype(name) for name in ("<f4", "<u2")]
    for first, last in pairwise(columns):
        part = np.ascontiguousarray(master[:, :, first:last])
        box = DeviceBox(part.view(np.uint8).reshape(-1), 0, part.dtype, part.shape, part.strides)
        for number, dtype in enumerate(dtypes):
            piece = SummedBox.of(box, (0, 0, first, 0), 4)
            added.add((0, number), Whole.of(master.shape, dtype), [piece])
    for found, dtype in zip(added.totals(), dtypes, strict=True):
        values = cast(master, dtype).copy()
        values[:, :, columns[-1] :] = 0  # what is missing adds nothing
        assert crc.checksum_of(found.remainder, values.nbytes) == crc64nvme(values.tobytes())


def test_zeros_are_those_of_the_runs_at_hand() -> None:
    added, stored = Sums(), np.random.default_rng(1).integers(1, 256, 4000, np.uint8)
    expected = []
    for number, (first, last) in enumerate([(0, 30), (20, 24), (5, 35), (0, 7)]):
        values = np.zeros((90, 40), np.uint8)
        values[:, first:last] = stored[: 90 * (last - first)].reshape(90, -1)
        box = DeviceBox(stored, 0, values.dtype, (90, last - first), (last - first, 1))
        added.add((number, 0), Whole.of(values.shape, values.dtype), [SummedBox.of(box, (0, first), 2)])
        expected.append(crc64nvme(values.tobytes()))
    assert [crc.checksum_of(one.remainder, 3600) for one in added.totals()] == expected


def test_sums_of_groups_cancel_what_they_have_in_common() -> None:
    groups = [Sum(1, 0, 0b1100, 4), Sum(0, 0, 0b1, 6), Sum(1, 0, 0b1010, 2)]
    assert added(groups) == (Sum(0, 0, 0b1, 6), Sum(1, 0, 0b0110, 6))


def test_a_tensor_without_some_of_its_values_has_no_fingerprint() -> None:
    float32 = dtype_named("float32")
    tensors = Tensors([Tensor("w", state, float32, (2, 3)) for state in ("param", "moment1")])
    number = TENSOR_DTYPES.index(float32)
    sums = [Sum(0, number, 7, 6), Sum(1, number, 9, 5)]
    with pytest.raises(CheckpointError, match=r"w \(moment1\): 5 of 6 elements were added up"):
        fingerprints_of(tensors, sums)
    assert fingerprints_of(tensors, sums, [0]).checksums.tolist() == [crc.checksum_of(7, 24)]
