"""Paddle moves and casts as NumPy does, bit for bit. Run here on Paddle's CPU device."""

import sys
import types
from pathlib import Path

import numpy as np
import pytest

import paddle_reshard
from paddle_reshard.pipeline.core.errors import UnsupportedError
from paddle_reshard.pipeline.planning.work import RemainingGroups
from paddle_reshard.tasks.cast import bfloat16_bits
from paddle_reshard.tasks.device import HOST, PROBE_BITS, DeviceBox, PaddleMover
from paddle_reshard.tasks.run_group import run_group
from tests.cluster.test_exchange import Written
from tests.conftest import case_directory

SEED = 20261121


@pytest.fixture(scope="module")
def paddle_mover() -> PaddleMover:
    return PaddleMover("cpu")


def moved(mover: PaddleMover, band: np.ndarray, nbytes: int, source: DeviceBox, target: DeviceBox) -> bytes:
    part = mover.zeros(nbytes)
    mover.move(
        DeviceBox(mover.load(band), source.byte_offset, source.dtype, source.extents, source.strides),
        DeviceBox(part, target.byte_offset, target.dtype, target.extents, target.strides),
    )
    return mover.fetch(part).tobytes()


def assert_same(
    mover: PaddleMover, band: np.ndarray, nbytes: int, source: DeviceBox, target: DeviceBox
) -> None:
    assert moved(mover, band, nbytes, source, target) == moved(HOST, band, nbytes, source, target)


def strided_box(
    random: np.random.Generator, dtype: np.dtype, extents: tuple[int, ...]
) -> tuple[DeviceBox, int]:
    """A box that starts at any byte, with or without gaps in each dim, its dims in any order in memory.

    Also how many bytes the buffer must have.
    """
    strides = [0] * len(extents)
    reach = dtype.itemsize
    for dim in random.permutation(len(extents)):
        strides[dim] = reach
        reach = reach * extents[dim] + int(random.integers(0, 2)) * int(random.integers(1, 40))
    offset = int(random.integers(0, 30))
    return DeviceBox(None, offset, dtype, extents, tuple(strides)), offset + reach + 8


@pytest.mark.parametrize("code", ["f4", "u2", "f2", "f8", "i8", "i4", "i1", "u1", "b1"])
def test_copies_of_strided_boxes(paddle_mover: PaddleMover, code: str) -> None:
    random = np.random.default_rng(SEED)
    dtype = np.dtype(f"<{code}")
    for _ in range(20):
        extents = tuple(int(n) for n in random.integers(1, 7, size=4))
        (source, band_bytes), (target, nbytes) = (strided_box(random, dtype, extents) for _ in range(2))
        band = random.integers(0, 256, band_bytes, dtype=np.uint8)
        band.flags.writeable = False
        assert_same(paddle_mover, band, nbytes, source, target)


def test_casts_of_strided_boxes(paddle_mover: PaddleMover) -> None:
    random = np.random.default_rng(SEED)
    for _ in range(20):
        extents = tuple(int(n) for n in random.integers(1, 7, size=4))
        source, band_bytes = strided_box(random, np.dtype("<f4"), extents)
        target, nbytes = strided_box(random, np.dtype("<u2"), extents)
        band = random.integers(0, 256, band_bytes, dtype=np.uint8)
        band.flags.writeable = False
        assert_same(paddle_mover, band, nbytes, source, target)


def test_casts_of_all_kinds_of_values(paddle_mover: PaddleMover) -> None:
    random = np.random.default_rng(SEED)
    bits = [
        np.array(PROBE_BITS, dtype=np.uint32),
        random.integers(0, 1 << 32, 1 << 20, dtype=np.uint32),
        (np.arange(1 << 16, dtype=np.uint32) << 16) + 0x8000,  # a tie at every bfloat16, NaN and infinity too
        np.arange(1 << 16, dtype=np.uint32),  # denormals
        random.integers(0x7F800000, 0x80000000, 1 << 16, dtype=np.uint32),  # NaN
    ]
    values = np.concatenate(bits).view(np.float32)
    count = len(values)
    source = DeviceBox(None, 0, np.dtype("<f4"), (1, 1, 1, count), (0, 0, 0, 4))
    target = DeviceBox(None, 0, np.dtype("<u2"), (1, 1, 1, count), (0, 0, 0, 2))
    found = moved(paddle_mover, values.view(np.uint8), 2 * count, source, target)
    assert found == bfloat16_bits(values).tobytes()


def test_a_whole_conversion(paddle_mover: PaddleMover, tmp_path: Path) -> None:
    source = case_directory("mp2pp2sh2_s1v2_meta_ema") / "checkpoint-3"
    plan = paddle_reshard.plan(source, tmp_path / "T", to="tp=2,sharding=2", format="hybrid-plain")
    for work in RemainingGroups(plan.plan):
        host, device = Written(), Written()
        assert run_group(work, plan.store, host) == run_group(work, plan.store, device, paddle_mover)
        assert host.parts == device.parts


def test_a_device_that_rounds_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paddle_reshard.tasks.device.bfloat16_bits", lambda values: values.view("<u2")[1::2])
    with pytest.raises(UnsupportedError, match="does not round float32 to bfloat16 as the CPU does"):
        PaddleMover("cpu")


def test_paddle_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "paddle", None)
    with pytest.raises(UnsupportedError, match=r"needs PaddlePaddle 2\.6 or later .* cannot be imported"):
        PaddleMover("gpu")


def test_paddle_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "paddle", types.SimpleNamespace(__version__="2.5.2"))
    with pytest.raises(UnsupportedError, match=r"needs PaddlePaddle 2\.6 or later .* found 2\.5\.2"):
        PaddleMover("gpu")
