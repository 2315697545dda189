"""What runs inside training jobs: checkpoints loaded into them, averages kept next to them, names checked."""
