"""Moves of strided boxes in host memory.

A box may have its dims in any order, gaps between its elements, and its first byte at any address. Work is done in
blocks that fit the processor's cache, so a few blocks are all the extra memory it needs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import product
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from paddle_reshard.pipeline.core.mixture import Term
from paddle_reshard.tasks.cast import cast, cast_in_range, upper_halves
from paddle_reshard.tasks.ema import mix

BLOCK_ELEMENTS = 1 << 17
"""Largest block of casts and comparisons: its operands fit the second-level cache, and an operation on it takes much
longer than handing Python's lock to another thread."""
TILE_EDGES = 240, 512
"""Lengths of a tile along the fastest dim of the side that it is read from and of the side that it is written to. The
first is not a power of two, so that the elements of a column do not compete for a few lines of the cache. A tile is no
larger than a block."""

Array = npt.NDArray[Any]
Slices = tuple[slice, ...]
FLOAT32, BFLOAT16 = np.dtype("<f4"), np.dtype("<u2")


def copy_box(source: Array, target: Array) -> None:
    """Copy a box to one of the same shape and dtype."""
    source, target = in_order_of(target, source, target)
    if _is_in_order(source):
        target[...] = source
    else:
        by_blocks(source, target, lambda values, _: values)


def cast_box(source: Array, target: Array, in_range: bool = True) -> None:
    """Cast a box to one of the same shape, as :func:`~paddle_reshard.tasks.cast.cast_in_range` does.

    Raises
    ------
    OverflowError
        If a finite value is too large for the dtype of ``target``, and must be ``in_range``.
    """
    words = np.empty(min(source.size, BLOCK_ELEMENTS), "<u4")

    def rounded(values: Array, _: Array) -> Array:
        if (source.dtype, target.dtype) == (FLOAT32, BFLOAT16):
            return upper_halves(values, words[: values.size])
        return (cast_in_range if in_range else cast)(values, target.dtype)

    by_blocks(source, target, rounded)


def by_blocks(source: Array, target: Array, make: Callable[[Array, Array], Array]) -> None:
    """Fill a box with what ``make`` returns for each block of a box of the same shape.

    It is given the values of the block in the order in which they lie, flat, in memory that the next block reuses, and
    the block of the target. It returns as many values, flat.

    Where the target has another fastest dim, it is cheaper to go through the cache twice than to read across rows:
    those of a matrix are often a power of two apart, and compete for a few of its lines.
    """
    source, target = in_order_of(source, source, target)
    # Arithmetic on strided or unaligned operands is slow; copying a block first is not.
    values = np.empty(min(source.size, BLOCK_ELEMENTS), source.dtype)
    pieces = blocks(source.shape) if _is_in_order(target) else tiles(source.shape, _memory_order(target))
    for piece in pieces:
        box = source[piece]
        block = values[: box.size]
        block.reshape(box.shape)[...] = box
        target[piece] = make(block, target[piece]).reshape(box.shape)


def blocks(extents: Sequence[int], elements: int = BLOCK_ELEMENTS) -> Iterator[Slices]:
    """Cut a box into slices of at most ``elements`` elements each, in order."""
    if not extents:
        yield ()
        return
    inner = prod(extents[1:])
    rows = max(1, elements // max(inner, 1))
    for low in range(0, extents[0], rows):
        here = slice(low, min(low + rows, extents[0]))
        if inner > elements:
            for rest in blocks(extents[1:], elements):
                yield (here, *rest)
        else:
            yield (here,)


def tiles(
    extents: Sequence[int], order_b: Sequence[int], edges: tuple[int, int] = TILE_EDGES
) -> Iterator[Slices]:
    """Cut a box into tiles that are runs of about as many elements as the ``edges`` say on the two sides of a move.

    On one side the last dim is the fastest; ``order_b`` lists the dims as the second side has them, fastest last. A
    tile has at most the product of the edges. A 1000 × 700 matrix that is transposed (``order_b = (1, 0)``) has tiles
    of 512 × 240: two rows of three.
    """
    shape = [1] * len(extents)
    order = range(len(extents) - 1, -1, -1)
    for dims, room in zip((order, reversed(order_b)), edges, strict=True):
        for dim in dims:
            shape[dim] = max(shape[dim], min(extents[dim], room))
            room //= max(1, shape[dim])
    for dim in order:  # lengthen the tile where short dims do not use up the limit
        room = prod(edges) // max(1, prod(shape))
        shape[dim] = min(extents[dim], shape[dim] * max(1, room))
    return product(
        *(
            [slice(low, min(low + step, extent)) for low in range(0, extent, max(1, step))]
            for extent, step in zip(extents, shape, strict=True)
        )
    )


def _memory_order(box: Array) -> list[int]:
    """The dims of a box, fastest last."""
    order: list[int] = np.argsort([-stride for stride in box.strides], kind="stable").tolist()
    return order


def in_order_of(leader: Array, *boxes: Array) -> tuple[Array, ...]:
    """Boxes of one shape with their dims in the memory order of ``leader``, fastest last, and without extents of 1."""
    single = [dim for dim, extent in enumerate(leader.shape) if extent == 1]
    rest = [dim for dim, extent in enumerate(leader.shape) if extent != 1]
    rest.sort(key=lambda dim: -leader.strides[dim])
    first = (*(0 for _ in single), ...)
    return tuple(box.transpose(*single, *rest)[first] for box in boxes)


def _is_in_order(box: Array) -> bool:
    """Whether strides do not increase from dim to dim."""
    return all(a >= b for a, b in zip(box.strides, box.strides[1:], strict=False))


def mix_box(values: Array, mixed: Array, term: Term, first: bool) -> None:
    """Make one step of a mixture: ``mixed = keep · mixed + take · values``; both are float32 and of the same shape.

    The ``first`` step ignores the contents of ``mixed``, even NaN, and copies the values if ``take`` is 1.
    """
    keep, take = np.float32(term.keep), np.float32(term.take)
    kept, scratch = (np.empty(min(mixed.size, BLOCK_ELEMENTS), np.float32) for _ in range(2))

    def step(block: Array, so_far: Array) -> Array:
        if first:
            return block if take == 1 else np.multiply(block, take, out=block)
        here = kept[: block.size]
        here.reshape(so_far.shape)[...] = so_far
        mix(here, block, keep, take, scratch[: block.size])
        return here

    with np.errstate(over="ignore", invalid="ignore"):
        by_blocks(values, mixed, step)


def divide_box(mixed: Array, divide_by: float) -> None:
    """Divide a float32 box in place by a number rounded to float32."""
    divisor = np.float32(divide_by)
    with np.errstate(over="ignore", invalid="ignore"):
        by_blocks(mixed, mixed, lambda block, _: np.divide(block, divisor, out=block))
