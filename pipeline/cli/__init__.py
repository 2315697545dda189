"""The command line: what commands share. Each of them has a module in ``commands``."""
