"""Limits for the parts of target files."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CopyLimits:
    """Ranges that the store itself can copy from the source, in bytes."""

    smallest_bytes: int
    """Shorter ones are not worth a copy of their own, or not allowed."""
    largest_bytes: int
    """Longer ones become several parts, so that progress and retries have a grain."""


@dataclass(frozen=True, slots=True)
class PartLimits:
    """The limits of the target's store."""

    smallest_bytes: int = 1
    """Every part but the last of a file must have at least this size."""
    most: int | None = None
    """How many parts a file may have."""
    copies: CopyLimits | None = None
    """``None``: the store can copy nothing from this source."""
