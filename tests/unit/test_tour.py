"""The numbers of the tour are those of a real conversion."""

from __future__ import annotations

import re
from pathlib import Path

from tests.tour import DOCUMENT, MARKED, make_blocks


def test_every_block_of_the_tour_is_what_the_conversion_shows(tmp_path: Path) -> None:
    made = make_blocks(tmp_path / "one-card")
    written = dict(MARKED.findall(DOCUMENT.read_text("utf-8")))
    assert list(written) == list(made)
    assert written == made, "python -m tests.tour --write brings the document up to date; read it again then"


def test_long_numbers_in_its_prose_are_in_its_blocks() -> None:
    text = DOCUMENT.read_text("utf-8")
    blocks = "\n".join(block for _, block in MARKED.findall(text))
    in_prose = set(re.findall(r"\d{5,}", MARKED.sub("", text)))
    assert len(in_prose) > 2
    assert in_prose <= set(re.findall(r"\d{5,}", blocks))
