"""Convert PaddlePaddle hybrid-parallel training checkpoints to any other topology, bit for bit."""

from paddle_reshard.pipeline.api import (
    ConversionReport,
    Inspection,
    VerifyReport,
    convert,
    inspect,
    plan,
    verify,
)
from paddle_reshard.pipeline.ema import AsyncEma
from paddle_reshard.pipeline.ema_trainer import ema_callback
from paddle_reshard.pipeline.errors import ReshardError
from paddle_reshard.pipeline.topology import Topology

__version__ = "0.1.0"

__all__ = [
    "AsyncEma",
    "ConversionReport",
    "Inspection",
    "ReshardError",
    "Topology",
    "VerifyReport",
    "__version__",
    "convert",
    "ema_callback",
    "inspect",
    "plan",
    "verify",
]
