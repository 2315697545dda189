"""Convert PaddlePaddle hybrid-parallel training checkpoints to any other topology, bit for bit."""

from __future__ import annotations

from paddle_reshard import _import_path  # noqa: F401

# isort: split
from importlib import import_module
from typing import TYPE_CHECKING, Any

from paddle_reshard.pipeline.core.version import __version__ as __version__

if TYPE_CHECKING:
    from paddle_reshard.pipeline.api import clean, convert, plan
    from paddle_reshard.pipeline.convert.run import ConversionReport
    from paddle_reshard.pipeline.convert.series import average
    from paddle_reshard.pipeline.convert.verify import VerifyReport, check, verify
    from paddle_reshard.pipeline.ema.async_ema import AsyncEma
    from paddle_reshard.pipeline.ema.paddle_objects import rank_pieces
    from paddle_reshard.pipeline.ema.resume import Piece, RankPieces
    from paddle_reshard.pipeline.ema.trainer import ema_callback
    from paddle_reshard.pipeline.core.errors import ReshardError
    from paddle_reshard.pipeline.convert.inspection import Inspection, inspect
    from paddle_reshard.pipeline.convert.integrity import IntegrityReport
    from paddle_reshard.pipeline.live.load import LoadReport, load_into
    from paddle_reshard.pipeline.live.converter import CheckpointConverter
    from paddle_reshard.pipeline.live.tensors import stage3_state_dict
    from paddle_reshard.pipeline.convert.request import ConversionOptions, TargetOptions
    from paddle_reshard.pipeline.core.topology import Topology

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
    "pipeline.api": ("clean", "convert", "plan"),
    "pipeline.convert.run": ("ConversionReport",),
    "pipeline.convert.verify": ("VerifyReport", "check", "verify"),
    "pipeline.convert.series": ("average",),
    "pipeline.ema.async_ema": ("AsyncEma",),
    "pipeline.ema.paddle_objects": ("rank_pieces",),
    "pipeline.ema.resume": (
        "Piece",
        "RankPieces",
    ),
    "pipeline.ema.trainer": ("ema_callback",),
    "pipeline.core.errors": ("ReshardError",),
    "pipeline.convert.inspection": ("Inspection", "inspect"),
    "pipeline.convert.integrity": ("IntegrityReport",),
    "pipeline.live.load": (
        "LoadReport",
        "load_into",
    ),
    "pipeline.live.converter": ("CheckpointConverter",),
    "pipeline.live.tensors": ("stage3_state_dict",),
    "pipeline.convert.request": (
        "ConversionOptions",
        "TargetOptions",
    ),
    "pipeline.core.topology": ("Topology",),
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
