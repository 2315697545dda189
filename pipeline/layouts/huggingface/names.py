"""Names in a Hugging Face checkpoint."""

INDEX = "model.safetensors.index.json"
