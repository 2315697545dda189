"""The published schema is made from the types of the answers."""

from __future__ import annotations

from tests.schemas import DOCUMENT, text


def test_the_schema_is_that_of_the_answers() -> None:
    """``make schemas`` writes it."""
    assert DOCUMENT.read_text("utf-8") == text()
