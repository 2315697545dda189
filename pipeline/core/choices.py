"""Words among which a user chooses; those of a format stand with the format."""

from __future__ import annotations

REPLICAS = ("compare", "first")
MASTER_WEIGHTS = ("stored", "from-parameters")
CHECKS = ("sample", "full")
FULL = "full"
FINGERPRINTS = ("off", "known", FULL)
EXCHANGES = ("auto", "always", "never")
CONVENTIONS = ("paddleformers", "paddlenlp", "paddlefleet")
"""Libraries whose names and layouts are known."""
DEVICES = ("cpu", "gpu")
UPLOADS = ("always", "never")
