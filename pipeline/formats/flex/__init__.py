"""Dist checkpoints: FlexCheckpoint folders of PaddleFormers, and the flat keys of auto-parallel training."""

from typing import Final

FLEX: Final = "flex"
AUTO_PARALLEL: Final = "auto-parallel"
