"""Convert PaddlePaddle hybrid-parallel training checkpoints to any other topology, bit for bit."""

from __future__ import annotations

from paddle_reshard import _import_path  # noqa: F401

# isort: split
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paddle_reshard.pipeline.api import (
        ConversionReport,
        VerifyReport,
        check,
        clean,
        convert,
        plan,
        verify,
    )
    from paddle_reshard.pipeline.averaging import average
    from paddle_reshard.pipeline.ema import AsyncEma
    from paddle_reshard.pipeline.ema_live import rank_pieces
    from paddle_reshard.pipeline.ema_resume import Piece, RankPieces
    from paddle_reshard.pipeline.ema_trainer import ema_callback
    from paddle_reshard.pipeline.errors import ReshardError
    from paddle_reshard.pipeline.inspection import Inspection, inspect
    from paddle_reshard.pipeline.integrity import IntegrityReport
    from paddle_reshard.pipeline.live import LoadReport, load_into
    from paddle_reshard.pipeline.live_converter import CheckpointConverter
    from paddle_reshard.pipeline.live_tensors import stage3_state_dict
    from paddle_reshard.pipeline.options import ConversionOptions, TargetOptions
    from paddle_reshard.pipeline.topology import Topology

__version__ = "0.1.0"

__all__ = [
    "AsyncEma",
    "CheckpointConverter",
    "ConversionOptions",
    "ConversionReport",
    "Inspection",
    "IntegrityReport",
    "LoadReport",
    "Piece",
    "RankPieces",
    "ReshardError",
    "TargetOptions",
    "Topology",
    "VerifyReport",
    "__version__",
    "average",
    "check",
    "clean",
    "convert",
    "ema_callback",
    "inspect",
    "load_into",
    "plan",
    "rank_pieces",
    "stage3_state_dict",
    "verify",
]

_HOMES = {
    "pipeline.api": (
        "ConversionReport",
        "VerifyReport",
        "check",
        "clean",
        "convert",
        "plan",
        "verify",
    ),
    "pipeline.averaging": ("average",),
    "pipeline.ema": ("AsyncEma",),
    "pipeline.ema_live": ("rank_pieces",),
    "pipeline.ema_resume": (
        "Piece",
        "RankPieces",
    ),
    "pipeline.ema_trainer": ("ema_callback",),
    "pipeline.errors": ("ReshardError",),
    "pipeline.inspection": ("Inspection", "inspect"),
    "pipeline.integrity": ("IntegrityReport",),
    "pipeline.live": (
        "LoadReport",
        "load_into",
    ),
    "pipeline.live_converter": ("CheckpointConverter",),
    "pipeline.live_tensors": ("stage3_state_dict",),
    "pipeline.options": (
        "ConversionOptions",
        "TargetOptions",
    ),
    "pipeline.topology": ("Topology",),
}
"""Module → the public names that come from it. Each is imported when it is first asked for, so that `--help` and
`--version` start without NumPy; type checkers read the imports above."""
_HOME = {name: module for module, names in _HOMES.items() for name in names}

if not TYPE_CHECKING:  # a type checker that saw this would accept any name

    def __getattr__(name: str) -> Any:
        if name not in _HOME:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
        globals()[name] = value
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
