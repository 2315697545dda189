"""Rule tables that say what differs from others say what they said in full."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from paddle_reshard.pipeline.core.errors import UsageError
from paddle_reshard.pipeline.model.rules.items import EmptyLayers, Item
from paddle_reshard.pipeline.model.rules.parse import parse_rule_table
from paddle_reshard.pipeline.model.rules.rule import Discarded, HuggingFaceForm, Rule
from paddle_reshard.pipeline.model.rules.table import Proof, RuleTable, Unsupported
from tests.documents.blocks import blocks_of
from tests.rule_tables import DIGESTS, FOLDER, digest, names, stated, whole

GATE = "model.layers.{layer}.mlp.gate.weight"


def parse(**entries: Any) -> Any:
    own = {"family": "mine", "convention": "paddleformers", "model_types": ["mine"]}
    return parse_rule_table(json.dumps({**own, **entries}), "mine.json")


@pytest.mark.parametrize("name", names())
def test_a_whole_table_is_the_recorded_one(name: str) -> None:
    """If it is to be another one, ``python -m tests.rule_tables`` records it, and the commit says why."""
    assert digest(whole(name)) == json.loads(DIGESTS.read_text())[name]


@pytest.mark.parametrize("name", names())
def test_of_what_tp_cuts_unmarked_a_flex_checkpoint_is_said_to_lack_the_rest(name: str) -> None:
    cut = [row for row in whole(name)["rules"] if row.get("is_distributed") == "never" and "split" in row]
    assert all("in no file" in row.get("saved_in_part", "") for row in cut)


def test_it_is_another_family_and_the_rest_is_the_same() -> None:
    made, base = (
        parse(extends="qwen2.paddleformers"),
        parse(**{**whole("qwen2.paddleformers"), "family": "mine"}),
    )
    assert made.rules == base.rules
    assert made.items == base.items
    assert (made.family, made.model_types, made.proven) == ("mine", ("mine",), None)


def test_rows_are_taken_changed_added_and_left_out() -> None:
    keys = [row["key"] for row in whole("llama.paddleformers")["rules"]]
    new = {"key": "model.extra.weight", "item": "norm", "name_class": "linear", "source": "here"}
    changed = {"key": keys[0], "split": None, "must_divide": None, "source": "there"}
    made = parse(extends="llama.paddleformers", rules=[changed, new, *keys[1:-1]])
    base = parse(**{**whole("llama.paddleformers"), "family": "mine"})
    assert [rule.key for rule in made.rules] == [keys[0], new["key"], *keys[1:-1]]
    assert made.rules[2:] == base.rules[1:-1]
    first = made.rules[0]
    assert (first.split, first.must_divide, first.source) == (None, None, "there")
    assert (first.shape, first.huggingface) == (base.rules[0].shape, base.rules[0].huggingface)


def test_the_table_that_the_page_shows_is_what_the_page_says() -> None:
    (shown,) = [
        block for block in blocks_of((FOLDER / "README.md").read_text("utf-8")) if block.language == "json"
    ]
    made = parse_rule_table(shown.text, "mine.json")
    base = {rule.key: rule for rule in parse(**{**whole("qwen2.paddleformers"), "family": "mine"}).rules}
    embedding, projection = made.rules
    assert embedding == base[embedding.key]
    assert (projection.split, base[projection.key].split) == (None, 0)
    assert projection.shape == base[projection.key].shape


@pytest.mark.parametrize(
    "kind", [RuleTable, Proof, Unsupported, Item, EmptyLayers, Rule, Discarded, HuggingFaceForm]
)
def test_the_page_describes_every_field(kind: type) -> None:
    page = (FOLDER / "README.md").read_text("utf-8")
    assert [field.name for field in fields(kind) if f"`{field.name}`" not in page] == []


def test_keys_get_another_beginning_here_and_in_hugging_face_checkpoints() -> None:
    made = parse(extends="llama.paddleformers", renamed={"model.": "model.language_model."})
    embedding = made.rules[0]
    assert embedding.key == "model.language_model.embed_tokens.weight"
    assert embedding.huggingface.keys == ("model.language_model.embed_tokens.weight",)
    assert made.rules[-1].key == "lm_head.weight"


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ({"extends": "qwen2.paddleformer"}, r"extends 'qwen2.paddleformer'.*qwen2.paddleformers"),
        ({"extends": "../rules/qwen2.paddleformers"}, "no table of the package"),
        ({"extends": 3}, "extends 3"),
        ({"extends": "llama.paddleformers", "rules": [GATE]}, "is no row of the table that this one extends"),
        ({"extends": "llama.paddleformers", "rules": [{"key": GATE, "split": 1}]}, "'item' is missing"),
        ({"extends": "llama.paddleformers", "rules": [3]}, "mine.json: "),
        ({"extends": "llama.paddleformers", "rules": 3}, "mine.json: "),
        ({"extends": "llama.paddleformers", "unsupported_keys": {"(": "x"}}, "not a regular expression"),
        ({"extends": "llama.paddleformers", "renamed": ["model."]}, "beginnings of keys"),
    ],
)
def test_a_table_that_cannot_be_meant_is_refused(entries: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        parse(**entries)


def test_a_chain_of_tables_ends(tmp_path: Path) -> None:
    for name in names():
        passed = [name]
        while (base := stated(passed[-1]).get("extends")) is not None:
            assert base not in passed
            passed.append(base)
