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

    @classmethod
    def of(cls, data: object) -> Answer:
        """From what ``data`` has made; ``ValueError`` if it is something else, or of another schema.

        >>> Answer.of(Answer("convert", "tp=3 does not divide 8", "UnsupportedError").data()).kind
        'UnsupportedError'
        """
        if not isinstance(data, dict) or data.get("schema_version") != SCHEMA_VERSION:
            raise ValueError("not the answer of a command, or one of another schema")
        facts = dict(data)
        del facts["schema_version"]
        try:
            command, error, kind, retryable = (
                facts.pop(name) for name in ("command", "error", "kind", "retryable")
            )
        except KeyError as missing:
            raise ValueError(f"not the answer of a command: it has no {missing}") from None
        texts = all(value is None or isinstance(value, str) for value in (command, error, kind))
        if not texts or type(retryable) is not bool or (error is None) != (kind is None):
            raise ValueError("not the answer of a command: an entry has another type")
        return cls(command, error, kind, retryable, facts)
