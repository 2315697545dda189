"""A Chinese section is not older than the English one of which it is the translation."""

from __future__ import annotations

import pytest

from tests.translations import PAGES, digest, outdated


@pytest.mark.parametrize("page", PAGES)
def test_no_section_is_older_than_its_original(page: str) -> None:
    old = list(outdated(page))
    assert not old, f"translate what has changed, then: python -m tests.translations {page}\n" + "\n".join(
        old
    )


def test_a_changed_word_is_another_section_and_a_broken_line_is_not() -> None:
    assert digest(("## A", "one two")) == digest(("## A", "one\ntwo\n")) != digest(("## A", "one three"))
