"""Exponential moving averages during training."""
