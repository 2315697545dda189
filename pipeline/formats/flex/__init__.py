"""Dist checkpoints: FlexCheckpoint folders of PaddleFormers, and the flat keys of auto-parallel training."""
