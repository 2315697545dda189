"""What can be asked of a dist checkpoint?"""

from __future__ import annotations

from collections.abc import Mapping

from paddle_reshard.pipeline.core.errors import UsageError
from paddle_reshard.pipeline.core.units import parse_count
from paddle_reshard.pipeline.core.upstream import DEFAULT_PADDLE
from paddle_reshard.pipeline.layouts.flex.target import FlexTarget


def parse_flex(
    auto_parallel: bool,
    files: int | str | None,
    paddle_version: str | None,
    names: Mapping[str, Mapping[str, str]] | None,
) -> FlexTarget:
    """A dist checkpoint; ``None``: the default of :class:`FlexTarget`. ``names`` are those of its one cell.

    Raises
    ------
    UsageError
    """
    if names is not None and len(names) != 1:
        raise UsageError(
            f"--target-meta names {len(names)} cells; auto-parallel training has the names of one program"
        )
    return FlexTarget(
        auto_parallel,
        None if files is None else parse_count(files),
        DEFAULT_PADDLE if paddle_version is None else paddle_version,
        None if names is None else next(iter(names.values())),
    )
