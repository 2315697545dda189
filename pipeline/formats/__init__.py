"""How each checkpoint format stores logical tensors in files; pure."""
