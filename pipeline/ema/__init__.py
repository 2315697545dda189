"""Exponential moving averages beside training."""
