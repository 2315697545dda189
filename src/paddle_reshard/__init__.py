"""Convert PaddlePaddle hybrid-parallel training checkpoints to any other topology, bit for bit."""

from paddle_reshard.pipeline.api import (
    ConversionReport,
    Inspection,
    VerifyReport,
    check,
    clean,
    convert,
    inspect,
    plan,
    verify,
)
from paddle_reshard.pipeline.averaging import average
from paddle_reshard.pipeline.ema import AsyncEma
from paddle_reshard.pipeline.ema_live import rank_pieces
from paddle_reshard.pipeline.ema_resume import Piece, RankPieces
from paddle_reshard.pipeline.ema_trainer import ema_callback
from paddle_reshard.pipeline.errors import ReshardError
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
