"""Convert PaddlePaddle hybrid-parallel training checkpoints to any other topology, bit for bit."""
