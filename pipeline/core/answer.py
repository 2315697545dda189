"""The one JSON object that a command prints with ``--json``: how it ended, and what it found."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

SCHEMA_VERSION = 1
"""Of everything that ``--json`` prints; it grows when an entry changes its meaning or goes."""


@dataclass(frozen=True, slots=True)
class Answer:
    """How a command ended."""

    command: str | None
    """``None`` where the command line names none."""
    error: str | None = None
    """What went wrong, in a sentence; ``None`` if the command came to its end."""
    kind: str | None = None
    """Name of the error's class; ``None`` without an error."""
    retryable: bool = False
    """Whether the same request may end otherwise later."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """What the command has to say beyond that, by its own names."""

    def data(self) -> dict[str, Any]:
        """As plain data: its JSON is what is printed."""
        head = {"schema_version": SCHEMA_VERSION, "command": self.command}
        return {**head, "error": self.error, "kind": self.kind, "retryable": self.retryable, **self.facts}
