"""Words among which a user chooses; those of a format stand with the format."""

from __future__ import annotations

from paddle_reshard.pipeline.core.errors import UsageError

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


def parse_choice(value: str, choices: tuple[str, ...], what: str) -> bool:
    """Whether ``value`` is the first of several choices; an unknown value is an error."""
    if value not in choices:
        raise UsageError(f"unknown {what} {value!r}; known: {', '.join(choices)}")
    return value == choices[0]
