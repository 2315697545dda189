"""Deltas: store the difference between two checkpoints, and recreate the newer one from it."""

from paddle_reshard.pipeline.core.extras import require

require("pyarrow", "arrow", "a delta")
