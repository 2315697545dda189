"""What a checkpoint holds, what a conversion would do, and whether it did: nothing here writes a checkpoint."""
