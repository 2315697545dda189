"""What can be asked of a Hugging Face target. The command line offers it, so nothing heavy is imported here."""

from __future__ import annotations

EMA = "ema"
EXPORTED_STATES = ("param", EMA)
"""The parameters, or as a model their exponential moving average."""
QUANTISATIONS = ("fp8",)
"""FP8 with a scale for each block of 128 × 128 elements."""
FLOATING = ("bfloat16", "float16", "float32")
"""What the values can be stored as; others (integers, booleans) keep their dtype."""
