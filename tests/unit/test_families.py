"""The command ``families``, and the documents that say the same."""

from __future__ import annotations

import subprocess
import sys

import pytest

from paddle_reshard.pipeline.layouts.rules import shipped_tables
from tests.families_page import DOCUMENTS, REPO, with_current_facts
from tests.published import checked
from tests.unit.test_starting import HEAVY, loaded


@pytest.mark.parametrize("document", DOCUMENTS)
def test_documents_say_what_the_rule_tables_say(document: str) -> None:
    said = (REPO / document).read_text("utf-8")
    assert said == with_current_facts(document), "run python -m tests.families_page"


def test_every_table_says_how_it_is_proven() -> None:
    for table in shipped_tables():
        assert table.proven is not None, f"{table.family} ({table.convention})"
        has_forms = any(rule.huggingface is not None for rule in table.rules)
        assert (table.proven.huggingface is not None) == has_forms, f"{table.family} ({table.convention})"


def test_families_are_listed_as_published() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "paddle_reshard", "families", "--json"],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    listed = {(family["name"], family["library"]): family for family in checked(done)["families"]}
    assert len(listed) == len(shipped_tables())
    assert listed["deepseek_v3", "paddleformers"] == {
        "name": "deepseek_v3",
        "library": "paddleformers",
        "model_types": ["deepseek_v3"],
        "axes": ["tp", "pp", "ep"],
        "huggingface": "yes",
        "multi_token_prediction": True,
        "proven": {"files": "checkpoints", "huggingface": "transformers"},
    }
    assert listed["gpt", "paddlenlp"]["huggingface"] == "no"


def test_listing_them_needs_no_numpy() -> None:
    assert not loaded("families") & HEAVY
