"""Rule tables: errors in a table, the rule of a tensor, and messages to the user."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import paddle_reshard
from paddle_reshard.pipeline.core.errors import RuleError, UsageError
from paddle_reshard.pipeline.indexing.detect import index_checkpoint
from paddle_reshard.pipeline.model.model import read_model
from paddle_reshard.pipeline.model.rules.choose import choose_table
from paddle_reshard.pipeline.model.rules.entries import derived_sizes
from paddle_reshard.pipeline.model.rules.parse import parse_rule_table
from paddle_reshard.pipeline.model.rules.table import RuleTable
from paddle_reshard.pipeline.model.rules.tables import shipped_tables
from paddle_reshard.storage.locate import open_source
from tests.conftest import case_directory, hybrid_cases
from tests.properties import synthetic

CONFIG = {
    "model_type": "llama", "hidden_size": 12, "intermediate_size": 20, "num_attention_heads": 6,
    "num_key_value_heads": 3, "num_hidden_layers": 2, "vocab_size": 10,
}  # fmt: skip


LAYER = {"name": "layer", "layer_class": "DecoderLayerPipe", "repeated": True}


def table_of(rows: list[dict[str, Any]], **changes: Any) -> dict[str, Any]:
    items = [{"name": "embedding", "layer_class": "EmbeddingPipe"}, LAYER]
    whole = {"family": "toy", "convention": "paddleformers", "model_types": ["toy"]}
    return {**whole, "items": items, "rules": rows, **changes}


def row(**changes: Any) -> dict[str, Any]:
    key = "toy.layers.{layer}.up.weight"
    return {"key": key, "item": "layer", "name_class": "linear", "source": "here"} | changes


def parse(data: dict[str, Any]) -> RuleTable:
    return parse_rule_table(json.dumps(data), "toy.json")


def shipped(convention: str) -> RuleTable:
    current, *_ = (t for t in shipped_tables() if (t.family, t.convention) == ("llama", convention))
    return current  # before those of earlier versions of the library


# --- reading a table ----------------------------------------------------------------------------------


def of_items(*items: dict[str, Any]) -> dict[str, Any]:
    return table_of([row()], items=[LAYER, *({"layer_class": "L", **item} for item in items)])


WHOLE = {"shape": ["hidden_size"]}


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (table_of([row(splitt=1, axis=0)]), "unknown entry 'splitt' in .*; did you mean split?"),
        ({"famly": "x"} | table_of([row()]), "unknown entry 'famly' in .*; did you mean family?"),
        (table_of([row()], items=[{"name": "layer"}]), "'layer_class' is missing"),
        (table_of([{"key": "a", "item": "layer", "source": "b"}]), "'name_class' is missing"),
        (table_of([row(split="1")]), "split"),
        (table_of([row(split=True)]), "split"),
        (table_of([row(split=-1)]), "split"),
        (table_of([row(parts=0)]), "parts"),
        (table_of([row(item="encoder")]), r"rules refer to the items \['encoder'\], which are not in 'items'"),
        (table_of([row()], items=[{**LAYER, "repeated": False}]), "exactly one of 'items' must be the repeated"),
        (of_items({"name": "head", "continues": "layer"}), "'head' continues 'layer': only MTP items can"),
        (of_items({"name": "mtp", "mtp": True, "continues": "mtp"}), "'mtp' continues 'mtp': only MTP items can"),
        (of_items({"name": "mtp", "built_before": "norm"}), "'mtp' is built before 'norm', which is not an item"),
        (table_of([row(**WHOLE, split=0, part_widths=["4"])]), "part_widths are for two or more parts"),
        (table_of([row(**WHOLE, split=1, part_widths=["4", "8"])]), "part_widths need a 'split' and a 'shape' with"),
        (table_of([row(built_after="toy.norm")]), "built after 'toy.norm', which is not a row"),
        (table_of([row(built_after="toy.norm"), row(key="toy.norm")]), "'toy.norm', whose key has different plac"),
        (table_of([row(built_after=row()["key"])]), "which is built after it"),
    ],
)  # fmt: skip
def test_what_is_not_a_table(data: dict[str, Any], told: str) -> None:
    with pytest.raises(UsageError, match=rf"^toy\.json: .*{told}"):
        parse(data)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "toy.json: not valid JSON: Expecting value"),
        ("{", "toy.json: not valid JSON: "),
        ("[" * 100_000, "toy.json: not valid JSON: "),
        ("[]", "toy.json: an object is expected, not []"),
        ("3", "toy.json: an object is expected, not 3"),
        ('{"rules": 3}', "toy.json: 'family' is missing in {\"rules\": 3}"),
        (json.dumps(table_of(3)), "toy.json: rules cannot be 3: a list is expected"),
        (json.dumps(table_of([3])), "toy.json: rules[0] cannot be 3: an object is expected"),
    ],
)
def test_what_is_not_even_json_of_a_table(text: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_rule_table(text, "toy.json")
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(("name", "axes"), [("refused", "tp,vp"), ("needed", "vp")])
def test_axes_that_are_refused_or_needed_are_axes(name: str, axes: str) -> None:
    with pytest.raises(UsageError, match=rf"^toy\.json: '{name}' names \['vp'\]; the axes are dp, ep, pp"):
        parse({**table_of([row()]), name: {axes: "it stops"}})


def test_colors_of_rows_are_those_of_the_table() -> None:
    assert parse(table_of([row(color="red")], colors=["red"])).rules[0].color == "red"
    with pytest.raises(UsageError, match=r"rules have the colors \['blue'\], which are not in 'colors'"):
        parse(table_of([row(color="blue")], colors=["red"]))


def test_a_row_is_tied_to_a_key_of_its_own_numbers() -> None:
    tied = row(tied_to="toy.layers.{layer}.down.weight", always_tied=True)
    (rule,) = parse(table_of([tied])).rules
    assert rule.twin({}, "toy.layers.7.up.weight") == "toy.layers.7.down.weight"
    with pytest.raises(UsageError, match=r"tied to a key with \{expert\}, which its own key lacks"):
        parse(table_of([row(tied_to="toy.layers.{layer}.experts.{expert}.weight")]))


@pytest.mark.parametrize(
    ("widths", "shares"),
    [(["8", "4"], (2, 1)), (["hidden_size"], None), (["6", "2", "4"], (3, 1, 2)), (["7", "4"], None)],
)
def test_parts_are_a_ratio_in_lowest_terms(widths: list[str], shares: tuple[int, ...] | None) -> None:
    """So that tp divides every part where it divides what is left of the tensor."""
    whole = row(split=0, shape=["hidden_size"], part_widths=[*widths, *(["1"] if len(widths) == 1 else [])])
    rule = parse(table_of([whole])).rules[0]
    if shares is not None:
        assert rule.shares(CONFIG) == shares
        return
    with pytest.raises(
        RuleError, match=r"up\.weight: parts of \[.*\] elements do not add up .* of 12 elements"
    ):
        rule.shares(CONFIG)


# --- the tables that come with the package ------------------------------------------------------------


OF_TWO_SIZES = {
    ("ernie4_5_moe_vl", f"model.layers.{{layer}}.mlp.experts.{{expert}}.{name}_proj.weight")
    for name in ("up", "gate", "down")
}
"""Rows of experts for text and for images, which have sizes of their own."""


def test_every_shipped_row_says_where_it_is_known_from() -> None:
    tables = shipped_tables()
    assert {("llama", "paddleformers"), ("llama", "paddlenlp")} <= {(t.family, t.convention) for t in tables}
    for table in tables:
        assert table.model_types
        for rule in table.rules:
            assert len(rule.source) > 10, rule.key
            assert rule.shape or (table.family, rule.key) in OF_TWO_SIZES, rule.key


def test_a_model_type_is_found_in_the_text_of_its_tables() -> None:
    every = list(shipped_tables())
    for model_type in {name for table in every for name in table.model_types}:
        mentioned = shipped_tables().that_mention(model_type)
        assert {t.family for t in every if model_type in t.model_types} <= {t.family for t in mentioned}
        assert len(mentioned) < len(every) / 2


@pytest.mark.parametrize(
    ("key", "config", "told"),
    [
        ("llama.layers.1.self_attn.q_proj.weight", CONFIG, "tp=4 does not divide num_attention_heads=6 of the config"),
        ("lm_head.weight", {"model_type": "llama"}, r"needs vocab_size from config\.json, which is not there"),
    ],
)  # fmt: skip
def test_what_tp_cannot_cut(key: str, config: dict[str, Any], told: str) -> None:
    with pytest.raises(RuleError, match=told):
        shipped("paddlenlp").find(key, config)[0].split_dim(config, 4)


# --- finding rows -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "key",
    [
        *("llama.layers.0.self_attn.q_norm.weight", "xllama.norm.weight", "llama.norm.weight.x"),
        *("llamaxnorm.weight", "llama.layers.-1.mlp.up_proj.weight"),
    ],
)
def test_a_tensor_without_a_row(key: str) -> None:
    """A row fits whole keys only."""
    told = rf"^{key}: no row of the paddlenlp rule table 'llama' fits; add one to .*--rules FILE$"
    with pytest.raises(RuleError, match=told):
        shipped("paddlenlp").find(key, CONFIG)


@pytest.mark.parametrize(
    ("rows", "keys"),
    [
        (("experts.0.w", "experts.1.w"), {"experts.0.w": 0, "experts.1.w": 1, "experts.2.w": None}),
        (("experts.{layer}.w",), {"experts.0.w": 0, "experts.1.w": 0}),
        (("{layer}.experts.{expert}.w",), {"1.experts.3.w": 0, "1.experts.3": None, "1.experts.x.w": None}),
        (("{layer}.experts.{expert}.w", "{layer}.experts.w"), {"1.experts.03.w": 0, "1.experts.w": 1}),
    ],
)
def test_a_key_found_first_does_not_find_another(rows: tuple[str, ...], keys: dict[str, int | None]) -> None:
    table = parse(table_of([row(key=f"toy.{key}") for key in rows]))
    for order in ([*keys], [*reversed(keys)]):
        find = table.finder({})
        for key in [*order, *order]:
            number = keys[key]
            layer = next((int(part) for part in key.split(".") if part.isdecimal()), 0)
            if number is None:
                with pytest.raises(RuleError, match="no row"):
                    find(f"toy.{key}")
            else:
                rule, of_layer = find(f"toy.{key}")
                assert rule.key == f"toy.{rows[number]}"
                assert of_layer == (layer if "{layer}" in rule.key else None)


def test_two_rows_for_one_tensor() -> None:
    table = parse(table_of([row(), row(key="toy.layers.{layer}.up.weight", split=1)]))
    with pytest.raises(
        RuleError, match=r"layers\.0\.up\.weight: 2 rows of the paddleformers rule table 'toy'"
    ):
        table.find("toy.layers.0.up.weight", {})


def test_the_nearest_table_speaks() -> None:
    keys = ["model.embed_tokens.weight", "model.norm.weight", "model.rotary.weight", "lm_head.weight"]
    with pytest.raises(RuleError, match=r"rotary\.weight: no row of the paddleformers rule table 'llama'"):
        choose_table(shipped_tables(), keys, CONFIG)


def test_a_tensor_that_another_config_has() -> None:
    key = "embed_share.embed_tokens.weight"
    config = {"model_type": "ernie", "num_nextn_predict_layers": 1}
    with pytest.raises(RuleError, match=rf'{key}: .*"enable_mtp_magic_send": true in config.json have it'):
        choose_table(shipped_tables(), ["ernie.norm.weight", key], config)


@pytest.mark.parametrize("twin", ["num_experts", "n_routed_experts"])
def test_two_names_of_one_number_that_contradict_each_other(twin: str) -> None:
    config = {"model_type": "qwen3_moe", "num_local_experts": 4, twin: 4}
    keys = ["model.norm.weight"]
    assert choose_table(shipped_tables("paddleformers"), keys, config).family == "qwen3_moe"
    with pytest.raises(RuleError, match=rf"(?=.*{twin} 8)(?=.*num_local_experts 4)"):
        choose_table(shipped_tables("paddleformers"), keys, config | {twin: 8})


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({}, r"config.json: it has no model_type, which names the family \(known: .*llama.*\)"),
        (
            {"model_type": "mamba"},
            r"no rule table knows it \(known: .*llama.*\); call paddle_reshard.describe",
        ),
    ],
)
def test_an_unknown_model_type(config: dict[str, Any], said: str) -> None:
    with pytest.raises(RuleError, match=said):
        choose_table(shipped_tables(), ["w"], config)


# --- sizes --------------------------------------------------------------------------------------------


def test_sizes_that_the_config_leaves_out() -> None:
    sizes = derived_sizes({"hidden_size": 12, "num_attention_heads": 4, "use_cache": True, "rope_theta": 1e4})
    derived = {"num_key_value_heads": 4, "head_dim": 3, "num_labels": 2}
    assert sizes == {"hidden_size": 12, "num_attention_heads": 4, **derived}
    labels = {str(n): f"LABEL_{n}" for n in range(5)}
    assert derived_sizes({"num_labels": 3, "id2label": labels})["num_labels"] == 5
    assert derived_sizes({"num_labels": 3})["num_labels"] == 3
    assert derived_sizes({"hidden_size": 12, "num_attention_heads": 4, "head_dim": 8})["head_dim"] == 8


def write(folder: Path, model: synthetic.Model, **config: Any) -> Path:
    synthetic.write_checkpoint(model, folder)
    (folder / "config.json").write_text(json.dumps(model.config | config))
    return folder


# --- a table of the user ------------------------------------------------------------------------------


def own_table(folder: Path, model_type: str) -> Path:
    name = "llama.paddleformers.json"
    data = json.loads(
        Path(paddle_reshard.__file__).with_name("pipeline").joinpath("model/rules", name).read_text()
    )
    path = folder / "own.json"
    path.write_text(json.dumps(data | {"family": "own", "model_types": [model_type]}))
    return path


def test_a_table_from_a_file(tmp_path: Path) -> None:
    source = write(tmp_path / "S", synthetic.Model(), model_type="own")
    with pytest.raises(RuleError, match="model type 'own': no rule table knows it"):
        paddle_reshard.plan(source, to="tp=2")
    assert paddle_reshard.inspect(source).family == "own"
    rules = own_table(tmp_path, "own")
    assert paddle_reshard.inspect(source, rules=rules).family == "own"
    paddle_reshard.convert(source, tmp_path / "A", to="tp=2,pp=2", rules=rules)
    assert paddle_reshard.verify(source, tmp_path / "A", rules=rules).equal


def test_a_table_from_a_file_replaces_the_shipped_ones(tmp_path: Path) -> None:
    source = write(tmp_path / "S", synthetic.Model())
    with pytest.raises(RuleError, match=r"model type 'llama': no rule table knows it \(known: own\)"):
        paddle_reshard.inspect(source, rules=own_table(tmp_path, "own"))


def test_a_table_that_cannot_be_read(tmp_path: Path) -> None:
    source = write(tmp_path / "S", synthetic.Model())
    with pytest.raises(UsageError, match=r"none\.json: cannot be read: "):
        paddle_reshard.inspect(source, rules=tmp_path / "none.json")


@pytest.mark.parametrize("case", hybrid_cases())
def test_the_rules_alone_determine_the_model(case: str) -> None:
    """Formats that hold whole tensors say nothing of the order of parameters: the tables do, as real files hold it."""
    found = index_checkpoint(open_source(str(case_directory(case) / "checkpoint-3"), {}), shipped_tables())
    model = read_model(found.catalog.tensors, found.model.table, found.model.config)
    assert model.tensors == tuple(replace(t, automatic_name=None) for t in found.model.tensors)


@pytest.mark.parametrize(
    ("field", "text"),
    [
        ("key", "toy.layers.{layer.__class__}.up.weight"),
        ("key", "toy.{other}.up.weight"),
        ("key", "toy.layers.{layer!r}.up.weight"),
        ("key", "toy.{}.{layer}"),
        ("parameter_name", "moe_gate_{n.__init__.__globals__}"),
        ("parameter_name", "moe_gate_{n:>9999999999}"),
        ("parameter_name", "moe_{0}"),
        ("parameter_name", "moe_}"),
    ],
)
def test_braces_of_a_table_hold_the_known_names_and_nothing_else(field: str, text: str) -> None:
    with pytest.raises(UsageError, match=rf"{field} can contain only .* in braces"):
        parse(table_of([row(**{field: text})]))


def test_a_table_for_version_0_1_names_the_axis_of_experts_as_it_did() -> None:
    assert parse(table_of([row()], experts_over="dp")) == parse(table_of([row()], expert_axis="dp"))
    with pytest.raises(UsageError, match="unknown entry 'experts_over'"):
        parse(table_of([row()], experts_over="dp", expert_axis="ep"))
