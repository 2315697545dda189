"""Real jobs drawn by chance: run by the real trainer, converted, and held against live memory and real files."""
