"""What changed between two checkpoints of one model, and how a folder that says so becomes the newer one again."""
