"""Hugging Face checkpoints: ``model*.safetensors`` with the names and layouts of ``transformers``."""

from typing import Final

HUGGINGFACE: Final = "huggingface"
EMA: Final = "ema"
