"""Tensors that are computed from others: averages, mixed step by step in float32."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Term:
    """A step of mixing: ``mixed = keep · mixed + take · values``; each product and the sum are rounded to float32.

    In the first step nothing is kept; values with a ``take`` of 1 are unchanged. With steps ``(keep, take)`` of
    ``(0, 1)`` and ``(0.75, 0.25)``, the values 4 and 8 give ``0.75 · 4 + 0.25 · 8 = 5``.
    """

    tensor: int
    """Index of the tensor whose values are mixed in."""
    keep: float
    """Both factors are float32 numbers."""
    take: float


@dataclass(frozen=True, slots=True)
class Mixture:
    """Computes the values of a tensor from float32 tensors of the same shape.

    If the target has another dtype, the result is cast at the end.
    """

    terms: tuple[Term, ...]
    """The steps in order; each tensor occurs once, and the files of a term precede those of the next."""
    divide_by: float = 1.0
    """Divisor after the last step; the values are rounded to float32 before and after."""
