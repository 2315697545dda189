"""Steps of a mixture on strided boxes in host memory, block by block."""

from __future__ import annotations

import numpy as np

from paddle_reshard.pipeline.core.mixture import Term
from paddle_reshard.tasks.boxes import BLOCK_ELEMENTS, Array, by_blocks
from paddle_reshard.tasks.ema import mix


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
