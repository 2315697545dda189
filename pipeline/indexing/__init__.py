"""From a folder of files to a checkpoint."""
