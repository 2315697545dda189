"""Hybrid-parallel checkpoints: one file set per rank, with and without ``model_meta.json``."""

from typing import Final

HYBRID: Final = "hybrid"
HYBRID_PLAIN: Final = "hybrid-plain"
