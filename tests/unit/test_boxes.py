"""Boxes of any strides are moved element by element, whatever order their dims have in memory."""

from math import prod

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paddle_reshard.tasks.boxes import BLOCK_ELEMENTS, TILE_EDGES, blocks, cast_box, copy_box, tiles
from tests.unit.test_cast import paddle_bits

RELAXED = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
SHAPES = st.lists(st.integers(0, 6), max_size=4).map(tuple)


def strided(draw: st.DrawFn, extents: tuple[int, ...], dtype: str) -> np.ndarray:
    """A box of zeros in a buffer of its own: any order of dims, gaps, any first byte."""
    itemsize = np.dtype(dtype).itemsize
    strides = [0] * len(extents)
    reach = itemsize
    for dim in draw(st.permutations(range(len(extents)))):
        strides[dim] = reach
        reach = reach * extents[dim] + draw(st.sampled_from([0, 0, 1, itemsize, 64]))
    offset = draw(st.integers(0, 8))
    return np.ndarray(extents, dtype, np.zeros(offset + reach + 8, np.uint8), offset, tuple(strides))


@st.composite
def pairs(draw: st.DrawFn, one: str, other: str) -> tuple[np.ndarray, np.ndarray]:
    extents = draw(SHAPES)
    return strided(draw, extents, one), strided(draw, extents, other)


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Boxes of a few elements are cut, too."""
    monkeypatch.setattr("paddle_reshard.tasks.boxes.blocks.__defaults__", (7,))
    monkeypatch.setattr("paddle_reshard.tasks.boxes.tiles.__defaults__", ((2, 3),))


@pytest.mark.usefixtures("small_blocks")
@RELAXED
@pytest.mark.parametrize("code", ["<u1", "<u2", "<f4", "<f8"])
@given(st.data())
def test_copies(code: str, data: st.DataObject) -> None:
    source, target = data.draw(pairs(code, code))
    source[...] = np.arange(source.size).reshape(source.shape) + 1
    copy_box(source, target)
    assert target.tolist() == source.tolist()


@pytest.mark.usefixtures("small_blocks")
@RELAXED
@given(st.data(), st.integers(0, 1 << 32))
def test_casts_are_those_of_paddle(data: st.DataObject, seed: int) -> None:
    source, target = data.draw(pairs("<f4", "<u2"))
    bits = np.random.default_rng(seed).integers(0, 1 << 32, source.size, dtype=np.uint32)
    source[...] = bits.view(np.float32).reshape(source.shape)
    cast_box(source, target)
    assert target.tobytes() == paddle_bits(source).tobytes()


def test_only_the_box_is_written() -> None:
    target = np.full((4, 6), 9, np.uint8)
    copy_box(np.zeros((2, 3), np.uint8), target[1:3, ::2])
    assert target.tolist() == [[9] * 6, [0, 9] * 3, [0, 9] * 3, [9] * 6]


@pytest.mark.parametrize("shape", [(300, 700), (512, 512), (3, 50_000), (50_000, 3), (130, 7, 130)])
def test_transposes_larger_than_a_tile(shape: tuple[int, ...]) -> None:
    values = np.random.default_rng(0).standard_normal(shape, np.float32)
    copied, rounded = np.zeros(shape[::-1], np.float32), np.zeros(shape[::-1], np.uint16)
    copy_box(values, copied.T)
    cast_box(values, rounded.T)
    assert copied.tobytes() == values.T.tobytes()
    assert rounded.tobytes() == paddle_bits(values).T.tobytes()


@given(SHAPES, st.integers(1, 40))
def test_blocks_tile_a_box_once_and_in_order(extents: tuple[int, ...], elements: int) -> None:
    numbered = np.arange(prod(extents)).reshape(extents)
    cut = [numbered[block] for block in blocks(extents, elements)]
    assert [int(i) for block in cut for i in block.ravel()] == list(range(prod(extents)))
    assert all(block.size <= elements for block in cut)


@given(
    SHAPES.flatmap(lambda s: st.tuples(st.just(s), st.permutations(range(len(s))))),
    st.tuples(st.integers(1, 9), st.integers(1, 9)),
)
def test_tiles_tile_a_box_once(case: tuple[tuple[int, ...], list[int]], edges: tuple[int, int]) -> None:
    extents, order = case
    numbered = np.arange(prod(extents)).reshape(extents)
    cut = [numbered[tile] for tile in tiles(extents, order, edges)]
    assert sorted(int(i) for tile in cut for i in tile.ravel()) == list(range(prod(extents)))
    assert all(tile.size <= prod(edges) for tile in cut)


def test_large_boxes_are_cut_into_few_pieces() -> None:
    assert len(list(blocks((4096, 4096)))) == 4096 * 4096 // BLOCK_ELEMENTS
    assert len(list(tiles((4096, 4096), (1, 0)))) == prod(-(-4096 // edge) for edge in TILE_EDGES)
    assert len(list(tiles((3, prod(TILE_EDGES)), (1, 0)))) < 5
