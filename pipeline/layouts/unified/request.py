"""What can be asked of a unified checkpoint?"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paddle_reshard.pipeline.core.units import parse_count

if TYPE_CHECKING:
    from paddle_reshard.pipeline.layouts.unified.target import UnifiedTarget


def parse_unified(files: int | str | None) -> UnifiedTarget:
    """A unified checkpoint; ``None``: the default of :class:`UnifiedTarget`."""
    from paddle_reshard.pipeline.layouts.unified.target import UnifiedTarget

    return UnifiedTarget() if files is None else UnifiedTarget(parse_count(files))
