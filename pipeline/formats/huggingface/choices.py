"""What can be asked of a Hugging Face target. The command line offers it, so nothing heavy is imported here."""

from __future__ import annotations

from typing import get_args

from paddle_reshard.pipeline.core.choices import Dtype, ModelState, Quantised

EMA = "ema"
EXPORTED_STATES = get_args(ModelState)
"""The parameters, or as a model their exponential moving average."""
QUANTISATIONS = get_args(Quantised)
"""FP8 with a scale for each block of 128 × 128 elements."""
FLOATING = get_args(Dtype)
"""What the values can be stored as; others (integers, booleans) keep their dtype."""
