"""How is a tensor computed from others? Averages are mixed step by step, in float32."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Term:
    """A step of mixing: ``mixed = keep · mixed + take · values``; each product and the sum are rounded to float32.

    In the first step nothing is kept, and values with a ``take`` of one stay as they are.
    """

    tensor: int
    """Whose values."""
    keep: float
    """Both factors are float32 numbers."""
    take: float


@dataclass(frozen=True, slots=True)
class Mixture:
    """How the values of a tensor are computed from those of others of its shape, which are float32.

    What the target wants in another dtype is cast at the end.
    """

    terms: tuple[Term, ...]
    """One after the other; each tensor once, and all files of a term before those of the next one."""
    divide_by: float = 1.0
    """Of the last step, rounded to float32 before and after."""
