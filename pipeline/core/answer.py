"""The JSON object that a command prints with ``--json``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

SCHEMA_VERSION = 1
"""Version of the output of ``--json``; it increases when an entry is removed or changes its meaning."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The outcome of a command."""

    command: str | None
    """``None`` if the command line names none."""
    error: str | None = None
    """The error message; ``None`` if the command succeeded."""
    kind: str | None = None
    """Name of the error's class; ``None`` without an error."""
    retryable: bool = False
    """Whether the same request may succeed later."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Further entries, specific to the command."""

    def data(self) -> dict[str, Any]:
        """The object as plain data, ready for JSON."""
        head = {"schema_version": SCHEMA_VERSION, "command": self.command}
        return {**head, "error": self.error, "kind": self.kind, "retryable": self.retryable, **self.facts}
