"""How large the units of a plan become, beside what the budget allows."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PlanSizes:
    """Sizes in bytes that a plan aims at; no byte of a target depends on them."""

    group_bytes: int = 64 << 20
    """Small tensors are gathered into groups of about this peak."""
    pass_bytes: int = 8 << 20
    """What a group may always read at once, however large its parts are."""
    fill_bytes: int = 16 << 20
    """More literal bytes or zeros than these become parts of their own."""


USUAL_SIZES = PlanSizes()
