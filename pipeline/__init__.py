"""What is known about checkpoints and what is decided from it. Importing this package imports nothing."""
