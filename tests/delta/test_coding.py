"""Blocks written down come back; what nobody has written down is refused."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paddle_reshard.pipeline.delta.coding import Coding, decode, encode
from paddle_reshard.pipeline.delta.packing import pack, unpack

ITEMS = st.sampled_from([1, 2, 4, 8])


def changed(old: bytes, share: float, item_bytes: int, seed: int) -> bytes:
    """The old bytes with a share of the integers changed, by one or by anything."""
    random = np.random.default_rng(seed)
    items = np.frombuffer(old, f"<u{item_bytes}").copy()
    hit = random.random(len(items)) < share
    steps = random.choice(np.array([1, 2**64 - 1, 12345678901234567890], "u8"), len(items)).astype(
        items.dtype
    )
    items[hit] += steps[hit]
    return items.tobytes()


@settings(deadline=None, max_examples=60)
@given(
    ITEMS, st.integers(1, 3000), st.sampled_from([0, 0.002, 0.05, 0.3, 1]), st.booleans(), st.integers(0, 99)
)
def test_a_block_comes_back(item_bytes: int, items: int, share: float, has_old: bool, seed: int) -> None:
    old = np.random.default_rng(seed).bytes(items * item_bytes)
    new = changed(old, share, item_bytes, seed)
    before = memoryview(old) if has_old else None
    packed = pack(memoryview(new), before, item_bytes)
    if packed.coding is Coding.WHOLE:
        before = None
    made = bytearray(len(new))
    unpack(
        memoryview(packed.stored), packed.coding, packed.written_bytes, before, item_bytes, memoryview(made)
    )
    assert made == new
    assert len(packed.stored) <= packed.written_bytes <= len(new)


@pytest.mark.parametrize(
    ("share", "coding", "most"),
    [(0, "same", 0), (0.01, "sparse", 0.01), (0.03, "sparse", 0.025), (0.4, "dense", 0.2)],
)
def test_few_small_changes_take_little(share: float, coding: str, most: float) -> None:
    old = np.random.default_rng(1).integers(0, 2**16, 200_000, "u2")
    hit = np.random.default_rng(2).random(len(old)) < share
    new = old + hit.astype("u2")
    packed = pack(memoryview(new.tobytes()), memoryview(old.tobytes()), 2)
    assert packed.coding.value == coding
    assert len(packed.stored) <= most * new.nbytes


def test_what_has_nothing_in_common_is_stored_whole() -> None:
    random = np.random.default_rng(1)
    new = random.standard_normal(50_000).astype("f4")
    old = random.integers(0, 2**32, 50_000, "u4")
    assert pack(memoryview(new.tobytes()), memoryview(old.tobytes()), 4).coding is Coding.WHOLE


@settings(deadline=None, max_examples=200)
@given(
    st.sampled_from([Coding.SPARSE, Coding.DENSE, Coding.WHOLE]),
    ITEMS,
    st.binary(max_size=64),
    st.binary(max_size=4),
)
def test_what_nobody_has_written_down_is_refused(
    coding: Coding, item: int, written: bytes, count: bytes
) -> None:
    old = bytes(16 * item)
    made = bytearray(len(old))
    before = None if coding is Coding.WHOLE else memoryview(old)
    try:
        decode(coding, memoryview(count + written), before, item, memoryview(made))
    except ValueError as refusal:
        assert str(refusal)


def test_gaps_of_every_length_come_back() -> None:
    old = np.zeros(400_000, "u1")
    positions = np.cumsum([0, 1, 254, 255, 256, 257, 509, 510, 511, 765, 70_000, 100_001])
    new = old.copy()
    new[positions] = 7
    coding, written = encode(memoryview(new.tobytes()), memoryview(old.tobytes()), 1)
    made = bytearray(len(old))
    decode(coding, memoryview(written), memoryview(old.tobytes()), 1, memoryview(made))
    assert coding is Coding.SPARSE
    assert made == new.tobytes()
