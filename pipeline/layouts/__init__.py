"""How each family of checkpoints places logical tensors in files; pure."""
