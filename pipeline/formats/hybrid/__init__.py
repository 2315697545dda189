"""Hybrid-parallel checkpoints: one file set per rank, with and without ``model_meta.json``."""
