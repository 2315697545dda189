"""The libraries whose checkpoints are known: which one a config names, and whose names its checkpoints have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from paddle_reshard.pipeline.model.rules.entries import Config

PADDLEFLEET: Final = "paddlefleet"
_CONVENTIONS: Final[Mapping[str, tuple[str, ...]]] = {
    PADDLEFLEET: (PADDLEFLEET, "paddleformers"),
    "paddleformers": ("paddleformers", PADDLEFLEET),
    "paddlenlp": ("paddlenlp",),
}
"""Library that a config names → whose names its checkpoints may have: PaddleFormers 1.2 trains some families with
PaddleFleet's model, and PaddleFleet took over PaddleFormers' models of the others."""


def conventions_of(library: str) -> tuple[str, ...]:
    """The libraries whose parameter names the checkpoints of a library may have."""
    return _CONVENTIONS[library]


def library_of(config: Config) -> str | None:
    """The library whose version is in the config, or ``None``."""
    return next((name for name in _CONVENTIONS if f"{name}_version" in config), None)
