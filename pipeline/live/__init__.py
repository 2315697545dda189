"""Checkpoints loaded into running jobs."""
