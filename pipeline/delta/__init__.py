"""Deltas: store the difference between two checkpoints, and recreate the newer one from it."""
