"""Steps of a mixture on strided boxes in host memory, block by block."""

from __future__ import annotations

import numpy as np

from paddle_reshard.pipeline.core.mixture import Term
from paddle_reshard.tasks.boxes import BLOCK_ELEMENTS, Array, in_order_of, pieces_of
from paddle_reshard.tasks.ema import mix


def mix_box(values: Array, mixed: Array, term: Term, first: bool) -> None:
    """Make one step of a mixture: ``mixed = keep · mixed + take · values``; both are float32 and of the same shape.

    The ``first`` step ignores the contents of ``mixed``, even NaN, and copies the values if ``take`` is 1.
    """
    values, mixed = in_order_of(mixed, values, mixed)
    keep, take = np.float32(term.keep), np.float32(term.take)
    # Arithmetic on strided or unaligned operands is slow; copying a block first is not.
    taken, kept, scratch = (np.empty(min(mixed.size, BLOCK_ELEMENTS), np.float32) for _ in range(3))
    for piece in pieces_of(values):
        box = values[piece]
        block, so_far = taken[: box.size], kept[: box.size]
        block.reshape(box.shape)[...] = box
        with np.errstate(over="ignore", invalid="ignore"):
            if not first:
                so_far.reshape(box.shape)[...] = mixed[piece]
                mix(so_far, block, keep, take, scratch[: box.size])
            elif take != 1:
                np.multiply(block, take, out=so_far)
            else:
                so_far = block
        mixed[piece] = so_far.reshape(box.shape)


def divide_box(mixed: Array, divide_by: float) -> None:
    """Divide a float32 box in place by a number rounded to float32."""
    (mixed,) = in_order_of(mixed, mixed)
    divisor = np.float32(divide_by)
    values = np.empty(min(mixed.size, BLOCK_ELEMENTS), np.float32)
    for piece in pieces_of(mixed):
        box = mixed[piece]
        block = values[: box.size]
        block.reshape(box.shape)[...] = box
        with np.errstate(over="ignore", invalid="ignore"):
            np.divide(block, divisor, out=block)
        mixed[piece] = block.reshape(box.shape)
