"""Hugging Face forms of the rule tables are those that PaddleFormers' own loading maps declare.

``tests/facts`` hold what ``_gen_aoa_config`` of every class returned that was built; ``ernie4_5_moe_vl.json`` what one
returns whose module imports libraries for CUDA (``tests/lab/fleet.py``). Statements about tensors without a row are of
variants that the table does not support; a row without a statement is loaded as it lies, under its own key.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import NamedTuple

import pytest
from safetensors import deserialize

import paddle_reshard
from paddle_reshard.pipeline.model.rules.rule import Rule
from paddle_reshard.pipeline.model.rules.table import RuleTable
from paddle_reshard.pipeline.model.rules.tables import shipped_tables
from tests import facts
from tests.conftest import GOLDEN, case_directory

OF_ERNIE = json.loads((GOLDEN / "ernie4_5_moe_vl.json").read_text("utf-8"))
DECLARED = {
    **{family: facts.declared(family, biases=True) for family in sorted({b.family for b in facts.builds()})},
    "ernie4_5_moe_vl": OF_ERNIE["statements"],
}
TABLES = {
    table.family: table
    for table in shipped_tables()
    if table.convention == "paddleformers" and table.version is None
}
DENSE = ("*.mlp.up_gate_proj.weight", "*.mlp.down_proj.weight")
STACKED = (".mlp.experts.gate_up_proj", ".mlp.experts.down_proj")
"""Experts of a layer in one tensor (``fd_fallback``): no map knows them, and the tables have them from the class."""
OTHERWISE = {
    "deepseek_v3": ("*.eh_proj.weight", *STACKED),  # save_to_hf transposes it; this map forgets to
    "glm4_moe": STACKED,
    "ernie4_5_moe_vl": (
        "lm_head.weight",
    ),  # the row of a tied head; the statement is of one that is not tied
    "gemma3_text": ("lm_head.weight",),  # loaded from the word embedding, to which it is tied
    "phi3": ("*.self_attn.qkv_proj.weight",),  # interleaves what the class keeps as [q | k | v]
    "qwen2_moe": (*DENSE, *STACKED),  # the maps of these leave dense layers out
    "qwen3_moe": (*DENSE, *STACKED),
    # Its dense layers have gate and up apart, as the class builds them (tests/facts).
    "qwen3_next": ("*.mlp.gate_proj.weight", "*.mlp.up_proj.weight", "*.mlp.down_proj.weight", *STACKED),
    "qwen3_vl_moe": (*DENSE, "*.self_attn.qkv_proj.bias"),
}
"""Family → endings of rows that are right, though the library declares something else or nothing."""


class Form(NamedTuple):
    """What a tensor of Paddle is made of."""

    keys: tuple[str, ...]
    transposed: bool
    interleaved: bool
    """Whether its parts take turns, in groups of key-value heads."""


def forms(statements: list[str]) -> dict[str, Form]:
    """Key in Paddle → what it is made of, with placeholders as rows have them."""
    found = {}
    for statement in statements:
        sources, _, rest = statement.partition("->")
        target, *words = (word.strip() for word in rest.split(","))
        keys = [key.strip() for key in sources.split(",")]
        interleaved = any(word.startswith("num_key_value_groups") for word in words)
        for number in (
            "023" if "_linear.$LAYER_ID" in target else ""
        ):  # of a list of layers, without the activation
            found |= forms([statement.replace("$LAYER_ID", number)])
        form = Form(tuple(map(template, keys)), keys[0].endswith("^T"), interleaved)
        found[template(target)] = form
    return found


def template(key: str) -> str:
    """A key with placeholders in the place of numbers."""
    named = key.removesuffix("^T").replace("$LAYER_ID", "{layer}").replace("$EXPERT_ID", "{expert}")
    numbered = re.sub(r"\.(layers|blocks|deepstack_merger_list)\.\d+\.", r".\1.{layer}.", named)
    return re.sub(r"\.experts\.\d+\.", ".experts.{expert}.", numbered)


def form_of(rule: Rule) -> Form:
    """What the table says."""
    assert rule.huggingface is not None
    transposed = rule.huggingface.transposed or len(rule.shape or ()) < 2
    return Form(rule.huggingface.keys, transposed, rule.huggingface.groups is not None)


def differing(table: RuleTable, declared: dict[str, Form]) -> list[str]:
    """Keys of the rows that say something else."""
    odd = []
    for rule in table.rules:
        if rule.huggingface is None:
            continue
        form = declared.get(rule.key, Form((rule.key,), False, False))
        if len(rule.shape or ()) < 2:  # some maps transpose vectors too, which changes nothing
            form = form._replace(transposed=True)
        if form != form_of(rule):
            odd.append(rule.key)
    return odd


@pytest.mark.parametrize("family", DECLARED)
def test_forms_are_those_that_the_library_declares(family: str) -> None:
    declared = forms(DECLARED[family])
    endings = tuple(ending.lstrip("*") for ending in OTHERWISE.get(family, ()))
    odd = differing(TABLES[family], declared)
    assert [key for key in odd if not key.endswith(endings or ("\n",))] == []
    assert len(odd) == len(endings), "one of those that differ is declared"
    named = [rule.key for rule in TABLES[family].rules if rule.key in declared]
    assert len(named) > len(TABLES[family].rules) / 2


def test_every_table_is_compared() -> None:
    recipes = {"ernie", "deepseek_v3_pretrain"}  # load their own files only, without such a map
    assert set(DECLARED) | recipes == set(TABLES)


def test_a_form_that_is_not_declared_is_found() -> None:
    declared = forms(DECLARED["glm_ocr"])
    key = "model.language_model.layers.{layer}.self_attn.q_proj.weight"
    declared[key] = declared[key]._replace(transposed=False)
    assert differing(TABLES["glm_ocr"], declared) == [key]


def test_the_map_of_a_class_exports_what_its_table_does(tmp_path: Path) -> None:
    """Both exports are the library's own, which it makes by the same statements."""
    (tmp_path / "aoa.json").write_text(json.dumps({"aoa_statements": OF_ERNIE["inverse"]}))
    case = case_directory(OF_ERNIE["case"])
    real = entries(case / "hf-export/model-00001-of-00001.safetensors")
    assert len(real) == 126
    for name, options in {"map": {"aoa": tmp_path / "aoa.json"}, "table": {}}.items():
        paddle_reshard.convert(case / "checkpoint-0", tmp_path / name, format="huggingface", **options)
        assert entries(tmp_path / name / "model.safetensors") == real


def entries(path: Path) -> dict[str, dict]:
    """Every tensor of a file, by the safetensors library."""
    return {key: dict(entry) for key, entry in deserialize(path.read_bytes())}
