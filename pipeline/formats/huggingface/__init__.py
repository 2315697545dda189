"""Hugging Face checkpoints: ``model*.safetensors`` with the names and layouts of ``transformers``."""
