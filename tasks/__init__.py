"""The work of one worker: index a file, run one group of a plan."""
