"""Paddle's AOA rule language, offline: which tensors of a target are made of which tensors of a source."""
