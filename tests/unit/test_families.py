"""The documents say of families what the rule tables say."""

from __future__ import annotations

import pytest

from paddle_reshard.pipeline.checkpoint.lora import check_matrices
from paddle_reshard.pipeline.core.errors import UnsupportedError
from paddle_reshard.pipeline.core.tensors import dtype_named
from paddle_reshard.pipeline.model.model import Model, ModelTensor
from paddle_reshard.pipeline.model.rules.rule import LoraRule
from paddle_reshard.pipeline.model.rules.tables import shipped_tables
from tests.families import families
from tests.families_page import DOCUMENTS, REPO, with_current_facts


@pytest.mark.parametrize("document", DOCUMENTS)
def test_documents_say_what_the_rule_tables_say(document: str) -> None:
    said = (REPO / document).read_text("utf-8")
    assert said == with_current_facts(document), "run python -m tests.families_page"


def test_every_table_says_how_it_is_proven() -> None:
    for table in shipped_tables():
        assert table.proven is not None, f"{table.family} ({table.convention})"
        has_forms = any(rule.huggingface is not None for rule in table.rules)
        assert (table.proven.huggingface is not None) == has_forms, f"{table.family} ({table.convention})"


NOT_TRAINED = {"ernie", "ernie4_5_moe_vl", "deepseek_v3_pretrain"}
"""Families of PaddleFormers that are not in the table of jobs that were started: recipes, and one without a trainer."""


def test_every_axis_that_is_listed_was_started_in_the_real_trainer() -> None:
    text = (REPO / "tests/parity/families.md").read_text("utf-8").partition("<!-- started -->")[2]
    lines = [line.strip("| ").split(" | ") for line in text.partition("\n\n")[0].split("\n") if line]
    header, _, *rows = lines
    started = {row[0]: dict(zip(header, row, strict=True)) for row in rows}
    listed = {
        family.name: ("sharding", *family.axes)
        for family in families(shipped_tables())
        if family.library == "paddleformers" and family.name not in NOT_TRAINED
    }
    assert started.keys() == listed.keys()
    for name, axes in listed.items():
        for axis in axes:
            assert started[name][axis].partition(",")[0].isdigit(), f"{name} with {axis}"


@pytest.mark.parametrize("family", ["glm_ocr.paddleformers", "llama.paddlenlp"])
def test_lora_of_a_family_that_has_none_is_refused(family: str) -> None:
    (table,) = (t for t in shipped_tables() if f"{t.family}.{t.convention}" == family)
    weight = next(rule for rule in table.rules if rule.key.endswith("self_attn.o_proj.weight"))
    rule = LoraRule.beside(weight, "lora_A")
    matrix = ModelTensor(rule.key, rule, 0, (32, 4), dtype_named("bfloat16"), (), False)
    with pytest.raises(UnsupportedError, match=rf"LoRA of {table.family} .* is not supported"):
        check_matrices(Model((matrix,), table, {}), None)
