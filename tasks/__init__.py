"""What one worker does: index a file, run one group of a plan."""
