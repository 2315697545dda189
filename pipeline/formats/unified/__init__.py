"""Unified checkpoints: safetensors files with whole tensors by structured key, and index files."""

from typing import Final

UNIFIED: Final = "unified"
