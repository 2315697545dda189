"""The words of the glossary are drawn, and its numbers are those of the tour."""

from __future__ import annotations

import re

import pytest

from tests.conftest import REPO

GLOSSARY = REPO / "docs" / "glossary.md"


@pytest.mark.parametrize(
    "word", ["fragment", "box", "band", "part", "group", "pass", "op", "cell", "literal"]
)
def test_words_are_drawn(word: str) -> None:
    entry = re.search(
        rf"^### [^\n]*\b{word}\b[^\n]*\n(.*?)(?=^##)", GLOSSARY.read_text("utf-8"), re.DOTALL | re.MULTILINE
    )
    assert entry is not None
    assert "\n```text\n" in entry[1]


def test_byte_offsets_are_those_of_the_tour() -> None:
    """But for the multiples of 8 MiB in the ledger."""
    told = {int(n) for n in re.findall(r"\d{6,}", (REPO / "docs" / "tour.md").read_text("utf-8"))}
    numbers = {int(n) for n in re.findall(r"(?<![\w.])\d{6,}\b", GLOSSARY.read_text("utf-8"))}
    numbers = {n for n in numbers if n % (8 << 20)}
    assert len(numbers) > 3
    assert numbers <= told | {n + 1 for n in told}
