"""The options of a unified checkpoint as a target."""

from __future__ import annotations

from paddle_reshard.pipeline.core.units import parse_count
from paddle_reshard.pipeline.formats.unified.target import UnifiedTarget


def parse_unified(files: int | str | None) -> UnifiedTarget:
    """A unified checkpoint; ``None``: the default of :class:`UnifiedTarget`."""
    return UnifiedTarget() if files is None else UnifiedTarget(parse_count(files))
