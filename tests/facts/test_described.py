"""A table that is described from what ranks hold says the same of every rank as the shipped table, which is written."""

import json
import lzma
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache, reduce
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import paddle_reshard
from paddle_reshard.pipeline.changes.aoa.forms import READS, WRITES, shares_said, with_forms
from paddle_reshard.pipeline.core.errors import ReshardError, UsageError
from paddle_reshard.pipeline.model.described import (
    Entry,
    RankFacts,
    _segmentations,
    described_table,
    joined_tables,
)
from paddle_reshard.pipeline.model.rules.choose import choose_table
from paddle_reshard.pipeline.model.rules.parse import typed_table
from paddle_reshard.pipeline.model.rules.rule import Rule, evaluate_sizes, expected_shape
from paddle_reshard.pipeline.model.rules.table import Described, RuleTable
from paddle_reshard.pipeline.model.rules.tables import shipped_tables
from paddle_reshard.pipeline.training.describe import written
from tests import facts
from tests.conftest import case_directory, unpack
from tests.facts.test_tables import EP, PP, SEQUENCE_PARALLEL, TP, differences, table_of
from tests.golden.compare_one_card import NAMES, read_one_card
from tests.oracle import assert_same_tensors, load_with_paddle, read_checkpoint, read_truth, shapes_of
from tests.parity.tensors import read_tensors, write_tensors

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    **{family: (family, {}) for family in sorted({build.family for build in facts.builds()})},
    **{
        f"{family} stacked": (family, {"fd_fallback": True})
        for family in ("deepseek_v3", "glm4_moe", "qwen2_moe", "qwen3_moe", "qwen3_next")
    },
    "deepseek_v3 mtp": ("deepseek_v3", {"num_nextn_predict_layers": 2}),
    "ernie4_5_moe mtp": ("ernie4_5_moe", {"num_nextn_predict_layers": 1}),
}
"""Name of a variant → its family, and the entries of its config that differ from the laboratory's."""


def rank_facts(build: facts.Build) -> RankFacts:
    tp, pp, ep = (2 if build.topology in topologies else 1 for topologies in (TP, PP, EP))
    whole = (
        {s.structured: tuple(s.global_shape) for s in build.sharded}
        if isinstance(build.sharded, list)
        else {}
    )
    return RankFacts(
        Described(tp, pp, ep, build.topology in SEQUENCE_PARALLEL),
        build.rank % tp,
        build.rank // tp if pp > 1 else 0,
        build.rank if ep > 1 else 0,
        str(build.kind),
        "paddleformers",
        build.saved or {},
        tuple(
            Entry(
                e.key,
                e.name if e.is_parameter else None,
                tuple(e.shape),
                e.is_distributed,
                e.split_axis,
                whole.get(e.key),
                e.expert or e.no_sync,
                e.same_as,
                e.trainable,
            )
            for e in build.entries or ()
        ),
        maps={name: tuple(said) for name, said in zip((READS, WRITES), build.maps or (), strict=False)},
        transposed=tuple(build.transposed or ()),
    )


@cache
def bases(variant: str) -> list[facts.Build]:
    family, config = VARIANTS[variant]
    return [
        build
        for build in facts.builds()
        if build.family == family
        and build.config == config
        and build.entries
        and not build.topology.startswith("case ")
    ]


def fused(variant: str, table: RuleTable) -> dict[str, int | Sequence[int]]:
    """What the table says to be fused, by the keys of the rows that are described: parameters do not tell it."""
    config = bases(variant)[0].saved or {}
    made = typed_table(described(variant, bases(variant)[0].topology, None))
    rows = {
        made.find(key, config)[0].key: table.find(key, config)[0]
        for key in (entry.key for build in bases(variant) for entry in build.entries or ())
    }
    return {
        key: rule.parts if rule.part_widths is None else evaluate_sizes(rule.part_widths, config, rule.key)
        for key, rule in rows.items()
        if rule.fused_parts > 1
    }


LISTED = {
    "gpt_oss": "self_attn.sinks: of the shape",
    # the file has no pipeline items, and a shared layer comes first in the entries of its stage
    "gemma3_text": "Names with pp=2 were given up",
    # a number that counts all parameters that the process has created
    "qwen3_next": "Parameter names do not follow from the rows: model.layers.0.linear_attn.dt_bias",
}
"""Family → what a description says that it does not tell."""


def described(variant: str, topology: str, parts: dict[str, int | Sequence[int]] | None) -> dict[str, Any]:
    return described_table([rank_facts(b) for b in bases(variant) if b.topology == topology], parts)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_table_described_in_every_topology_says_what_the_shipped_one_says(variant: str) -> None:
    builds = bases(variant)
    family = builds[0].family
    shipped, config = table_of(builds[0]), builds[0].saved or {}
    parts = fused(variant, shipped)
    tables = [described(variant, t, parts) for t in dict.fromkeys(build.topology for build in builds)]
    if family == "gpt_oss":
        with pytest.raises(UsageError, match=LISTED[family]):
            reduce(joined_tables, tables)
        return

    made = typed_table(reduce(joined_tables, tables))

    named = {job.kind for job in made.described or () if job.names}
    if family in LISTED:
        assert LISTED[family] in str(made.comment)
    else:
        assert len(named) == len(tables)
    for build in builds:
        known = rank_facts(build).job.kind in named
        assert not [d for d in differences(build, made) if known or ": named " not in d]
    cut = any(job.tp > 1 for job in made.described or ())
    for key in {entry.key for build in builds for entry in build.entries or ()}:
        (rule, layer), (row, _) = (table.find(key, config) for table in (made, shipped))
        assert expected_shape(row, config, key) in (None, expected_shape(rule, config, key)), key
        assert not cut or (rule.split, rule.shares(config)) == (row.split, row.shares(config)), key
        decoders = shipped.of_layer(row, layer, config).item == "layer"
        assert layer is not None or not decoders, key


OF_IMAGES = "model.language_model.layers.{layer}."
NO_FORMS: dict[str, set[str] | None] = {
    # what is read is not what is written: the one swaps dims, the other forgets to, or interleaves heads with gates
    "gemma3_text": {"model.layers.{layer}.mlp.up_gate_proj.weight", "lm_head.weight"},
    "qwen3_next": {
        "model.layers.{layer}.self_attn.qkv_proj.weight",
        "model.layers.{layer}.mlp.experts.{expert}.up_gate_proj.weight",
        "model.layers.{layer}.mlp.shared_expert.up_gate_proj.weight",
    },
    # written with dims swapped before what is fused is cut
    "glm4v_moe": {
        f"{OF_IMAGES}{name}.weight"
        for name in (
            "self_attn.qkv_proj",
            "mlp.up_gate_proj",
            "mlp.shared_experts.up_gate_proj",
            "mlp.experts.{expert}.up_gate_proj",
        )
    },
    # written under the keys of the trainer, beside weights under those of Hugging Face
    "qwen2_5_vl": {f"{OF_IMAGES}self_attn.qkv_proj.bias"},
    # no statement names them
    "qwen3_next stacked": {
        "model.layers.{layer}.self_attn.qkv_proj.weight",
        "model.layers.{layer}.mlp.experts.gate_up_proj",
        "model.layers.{layer}.mlp.experts.down_proj",
        "model.layers.{layer}.mlp.shared_expert.up_gate_proj.weight",
    },
    # a comma is missing between two statements
    "deepseek_v3 stacked": None,
    "qwen2_moe stacked": None,
}
"""Variant → the rows without a form, whose maps contradict each other or cannot be read; ``None``: all. Of gemma3_text
also that of a head that is always tied."""
UNNAMED = re.compile(r"model\.layers\.\d+\.eh_proj\.weight")
"""No map names it, so that its dims are not swapped, in the library's own export and by the loader that reads that; the
table has it as DeepSeek has published it."""


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_maps_of_a_class_give_rows_the_forms_of_the_shipped_table(variant: str) -> None:
    """Those of the table are held against exports of the library and logits of transformers."""
    [build] = [build for build in bases(variant) if build.topology == "tp1"]
    shipped, config = table_of(build), build.saved or {}

    made = typed_table(with_forms(described_table([rank_facts(build)], {}), [rank_facts(build)]))

    assert bool(made.without_forms) == (variant in NO_FORMS)
    of_none = NO_FORMS.get(variant, set())
    lacking = {rule.key for rule in made.rules if rule.huggingface is None}
    assert lacking == ({rule.key for rule in made.rules} if of_none is None else of_none)
    for key in (entry.key for entry in build.entries or ()):
        (rule, _), (row, _) = (table.find(key, config) for table in (made, shipped))
        shape = expected_shape(rule, config, key) or ()
        if rule.huggingface is not None and len(shape) == 2:
            assert rule.huggingface.transposed_as_saved == build.saves_transposed(key, shape), key
        if rule.huggingface is not None and not UNNAMED.fullmatch(key):
            assert as_numbers(rule, config, key) == as_numbers(row, config, key), key


def as_numbers(rule: Rule, config: Mapping[str, Any], key: str) -> tuple[object, ...]:
    """The form of a tensor with its numbers; of a vector, swapped dims are no other form."""
    form, shape = rule.huggingface, expected_shape(rule, config, key)
    assert form is not None
    assert shape is not None
    widths = form.widths and evaluate_sizes(form.widths, config, key)
    groups, stacked = (of and evaluate_sizes([of], config, key)[0] for of in (form.groups, form.stacked))
    keys = tuple(rule.fill_in(spelled, key) for spelled in form.keys)
    return keys, form.transposed and len(shape) > 1, widths, groups, stacked


@pytest.mark.parametrize("family", ["qwen3", "phi3", "glm4_moe"])
def test_what_the_maps_of_a_class_fuse_is_what_a_rank_has_beside_each_other(family: str) -> None:
    shipped = table_of(bases(family)[0])
    ranks = [rank_facts(build) for build in bases(family) if build.topology == "tp2"]

    made = typed_table(described_table(ranks, None, shares_said(ranks[0])))

    config = ranks[0].config
    assert not any(rule.parts_unknown for rule in made.rules if "proj" in rule.key)
    for rule in made.rules:
        [row] = [row for row in shipped.rules if row.key == rule.key and row.applies(config)]
        assert (rule.split, rule.shares(config)) == (row.split, row.shares(config)), rule.key


MAPS = {
    "no statement": ("nonsense", "expected '->'"),
    "a key that the model lacks": ("a.weight -> model.other.weight", r"model\.other\.weight is neither"),
    "heads that do not divide": (
        "q, k, v -> model.layers.0.self_attn.o_proj.weight, fused_qkv, num_heads=5, num_key_value_groups=5",
        "cannot be divided",
    ),
}


@pytest.mark.parametrize("wrong", MAPS)
def test_maps_that_do_not_fit_the_model_give_no_form_and_the_export_says_why(
    wrong: str, tmp_path: Path
) -> None:
    statement, words = MAPS[wrong]
    [build] = [build for build in bases("llama") if build.topology == "tp1"]
    rank = replace(rank_facts(build), maps={READS: (statement,)})
    told = with_forms(own_of("tp1", "tp2"), [rank])
    source = own_checkpoint(tmp_path / "own", {**told, "model_types": ["own"]})

    with pytest.raises(ReshardError, match=rf"maps of LlamaForCausalLM do not fit the model: .*{words}"):
        paddle_reshard.convert(source, tmp_path / "model", format="huggingface", replicas="report")


def test_a_row_has_no_form_where_two_maps_differ_or_none_can_be_said() -> None:
    [build] = [build for build in bases("llama") if build.topology == "tp1"]
    rank, key = rank_facts(build), "model.norm.weight"
    part = "model.layers.$LAYER_ID.mlp.down_proj.weight"
    for maps, row, words in (
        ({READS: (f"a -> {key}",), WRITES: (f"{key} -> b",)}, key, "make different things"),
        ({WRITES: (f"{part} -> {part}_a, {part}_b, axis=0",)}, part, "a row cannot say"),
        ({READS: (f"x -> {key}",), WRITES: "KeyError: 1"}, key, "_gen_inv_aoa_config failed: KeyError: 1"),
    ):
        made = typed_table(with_forms(described_table([rank], {}), [replace(rank, maps=maps)]))
        assert words in made.without_forms
        row = row.replace("$LAYER_ID", "{layer}")
        assert [rule.huggingface for rule in made.rules if rule.key == row] == [None]


def test_descriptions_of_several_jobs_keep_forms_and_refuse_others() -> None:
    """Stages have only some of the tensors, and a job whose class says nothing takes none away."""
    tables = []
    for job in ("tp1", "pp2"):
        ranks = [rank_facts(build) for build in bases("llama") if build.topology == job]
        tables.append(with_forms(described_table(ranks, {}), ranks))
    silent = described_table([rank_facts(b) for b in bases("llama") if b.topology == "tp2"], {})
    forms = {row["key"]: row["huggingface"] for row in tables[0]["rules"]}
    for order in ([*tables, silent], [silent, *tables], [tables[1], silent, tables[0]]):
        joined = reduce(joined_tables, order)
        assert {row["key"]: row["huggingface"] for row in joined["rules"]} == forms
    rows = [{**row, "huggingface": {"keys": ["other"]}} for row in silent["rules"][:1]]
    with pytest.raises(UsageError, match=r"embed_tokens\.weight: .* by the other"):
        joined_tables(tables[0], {**silent, "rules": [*rows, *silent["rules"][1:]]})


def own_checkpoint(folder: Path, table: Mapping[str, Any], model_type: str = "own") -> Path:
    """A real checkpoint of tp=2 as that of a class that no shipped table knows, with a description beside it."""
    [source] = case_directory("dense/mp2").glob("checkpoint-*")
    shutil.copytree(source, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": model_type}))
    (folder / "paddle_reshard_rules.json").write_bytes(written(table))
    return folder


@cache
def own_table() -> dict[str, Any]:
    return own_of("tp1", "tp2")


def own_of(*jobs: str) -> dict[str, Any]:
    """What these jobs describe of the class."""
    return {**reduce(joined_tables, [described("llama", job, {}) for job in jobs]), "model_types": ["own"]}


def test_a_description_beside_a_checkpoint_is_used_and_said(tmp_path: Path) -> None:
    source = own_checkpoint(tmp_path / "own", own_table())

    assert "as described in a job with one card and one with tp=2" in str(
        dict(paddle_reshard.inspect(source).facts())
    )
    for target in ("tp=1", "sharding=2"):
        paddle_reshard.convert(source, tmp_path / target, to=target, replicas="report")
        truth = read_truth(case_directory("dense/mp2") / "truth.safetensors")
        assert_same_tensors(read_checkpoint(tmp_path / target, shapes_of(truth)), truth)


def test_beside_a_shipped_table_a_description_counts_where_it_says_something_else(tmp_path: Path) -> None:
    same = own_checkpoint(tmp_path / "same", {**own_table(), "model_types": ["llama"]}, "llama")
    assert "described" not in str(paddle_reshard.inspect(same).facts())

    other = {**altered("model.norm.weight", shape=["63"]), "model_types": ["llama"]}
    with pytest.raises(ReshardError, match=r"model\.norm\.weight"):
        paddle_reshard.inspect(own_checkpoint(tmp_path / "other", other, "llama"))


def altered(key: str, **entries: object) -> dict[str, Any]:
    rows = [
        {
            name: value
            for name, value in {**row, **(entries if row["key"] == key else {})}.items()
            if value is not None
        }
        for row in own_table()["rules"]
    ]
    return {**own_table(), "rules": rows}


LAYER = "model.layers.{layer}."
WRONG = {
    "the other dim": (altered(f"{LAYER}self_attn.o_proj.weight", split=1), "shape"),
    "no dim": (altered(f"{LAYER}self_attn.o_proj.weight", split=None), "shape"),
    "a cut of what is whole": (altered("model.norm.weight", split=0), "shape"),
    "exchanged names": (
        altered(f"{LAYER}self_attn.q_proj.weight", built_after=f"{LAYER}self_attn.o_proj.weight"),
        "name",
    ),
    "another layer class": (altered("lm_head.weight", name_class="head"), "name"),
    "a tie": (altered("lm_head.weight", tied_to="model.embed_tokens.weight", always_tied=True), "lm_head"),
    "another shape": (altered("model.norm.weight", shape=["63"]), "shape"),
    "a row less": ({**own_table(), "rules": own_table()["rules"][:-1]}, "no row"),
    "nobody said what is fused": (altered(f"{LAYER}mlp.gate_proj.weight", parts_unknown=True), "fused"),
    "no entry of a table": ({**own_table(), "run": "me"}, "run"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_description_is_not_believed(wrong: str, tmp_path: Path) -> None:
    table, words = WRONG[wrong]
    source = own_checkpoint(tmp_path / "own", table)

    with pytest.raises(ReshardError, match=words):
        paddle_reshard.convert(source, tmp_path / "target", to="tp=1", replicas="report")
    assert not (tmp_path / "target").exists()


@pytest.mark.parametrize(
    ("jobs", "to", "words"),
    [
        (["tp2"], "tp=1", "what a job with one card calls its parameters is not known"),
        (["tp1", "tp2"], "tp=4", "what a rank holds with another degree"),
        (["tp1", "tp2"], "pp=2", "jobs without pp"),
    ],
)
def test_what_no_job_has_shown_is_refused(jobs: list[str], to: str, words: str, tmp_path: Path) -> None:
    source = own_checkpoint(tmp_path / "own", own_of(*jobs))

    with pytest.raises(ReshardError, match=words):
        paddle_reshard.convert(source, tmp_path / "target", to=to, replicas="report")


# ---- a class of its own, whose jobs ``make own`` ran

WORDS, HEAD = "model.embed.words.weight", "answer.words.weight"
FUSED = {"model.layers.{layer}.attention.keys_and_values.weight": 2}


@cache
def of_own_class(job: str) -> tuple[RankFacts, ...]:
    """What the ranks of a job of a run of ``make own`` held: on ``one`` card, of ``ep2``, or of the ``source``: tp, pp
    and ep on four ranks."""
    told = json.loads(lzma.decompress(Path(facts.__file__).with_name("own.json.xz").read_bytes()))[job]
    return tuple(
        RankFacts(
            **{
                **rank,
                "job": Described(**rank["job"]),
                "entries": tuple(
                    Entry(**{n: tuple(v) if isinstance(v, list) else v for n, v in entry.items()})
                    for entry in rank["entries"]
                ),
                **{name: tuple(rank[name]) for name in ("items", "segments")},
            }
        )
        for rank in told
    )


def rows_of(table: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    return {row["key"]: row for row in table["rules"]}


@pytest.mark.parametrize("run", ["tied", "untied", "stacked", "local"])
def test_experts_over_ranks_of_tp_and_words_over_stages_are_those_of_a_job_on_one_card(run: str) -> None:
    [one] = of_own_class(f"one {run}")
    tables = [described_table(of_own_class(f"{job} {run}"), FUSED) for job in ("source", "ep2", "one")]
    assert tables[0]["expert_axis"] == "ep"
    assert tables[0].get("experts") == (None if run == "stacked" else "num_experts")
    for order in (tables, tables[::-1], [*tables, *tables]):
        table = reduce(joined_tables, order)
        made = typed_table(table)
        assert [job.names for job in made.described or ()] == [True] * 3
        found = {entry.key: made.find(entry.key, one.config)[0] for entry in one.entries}
        for entry in one.entries:
            assert expected_shape(found[entry.key], one.config) == entry.shape
            assert found[entry.key].twin(one.config, entry.key) == entry.same_as
        assert str(table["comment"]).count("with one card") == 1
        shared_out = {rule.key for rule in made.rules if rule.shared_out}
        assert shared_out == (
            {f"{LAYER}mlp.experts.{n}" for n in ("up", "down")} if run == "stacked" else set()
        )
        assert made.local_experts == (run == "local")
        refused = [] if run.endswith("tied") else ["flex", "unified"]
        assert sorted(format for of in made.unsupported for format in of.formats or ()) == refused
        mtp = [(item.layer_class, item.continues, item.built_before) for item in made.items if item.mtp]
        assert made.segmentations == ("layer:OwnBlock", *(["uniform"] if run != "local" else []))
        before = "LayerNorm 5" if run == "local" else None  # stages build it first
        assert mtp == ([("OwnNext", "layer", before)] if refused else [])
    assert (HEAD in rows_of(table)) == (run == "tied")


def own_job(into: Path) -> Path:
    """The real checkpoint of the job with tp, pp and ep, with the description of all three jobs."""
    return own_source("tied", into)


@pytest.mark.parametrize("over", ["flex", "unified"])
def test_where_no_config_says_which_library_the_description_does(over: str, tmp_path: Path) -> None:
    source = own_job(tmp_path)
    config = json.loads((source / "config.json").read_text())
    del config["paddleformers_version"]
    (source / "config.json").write_text(json.dumps(config))

    paddle_reshard.convert(source, tmp_path / "over", format=over)
    as_source = {"to": "tp=2,pp=2,ep=2", "layout": {"sequence_parallel": False}, "format": "hybrid-plain"}
    paddle_reshard.convert(tmp_path / "over", tmp_path / "back", **as_source)

    files = {path.name for pattern in ("*.pdparams", "*.pdopt") for path in source.glob(pattern)}
    assert len(files) == 9
    for name in files:
        real, back = (load_with_paddle(folder / name) for folder in (source, tmp_path / "back"))
        assert list(flat(real)) == list(flat(back)), name
        for key, value in flat(real).items():
            assert np.array_equal(value, flat(back)[key]), (name, key)


HERE = {
    "query": "attention.query",
    "out": "attention.out",
    "dense.up": "mlp.up",
    "dense.down": "mlp.down",
    "moe.router": "mlp.router",
    **{f"moe.{n}.{part}": f"mlp.experts.{n}.{part}" for n in range(4) for part in ("up", "down")},
}
"""What the library's export of the class calls a layer's linear layers → what the trainer does."""


def as_trained(there: Mapping[str, Any]) -> dict[str, Any]:
    """The tensors of the library's export as the class holds them, by what its ``_gen_aoa_config`` says."""
    held = {}
    for key, value in there.items():
        layer, _, rest = key.removeprefix("model.layers.").partition(".")
        module, _, kind = rest.rpartition(".")
        turned = value.T if value.ndim == 2 else value
        if key == "embed_tokens.weight":
            held[WORDS] = value
        elif key.startswith("lm_head."):
            held[key.replace("lm_head", "answer.proj")] = turned
        elif rest == "attention.k.weight":
            both = [turned, there[key.replace(".k.", ".v.")].T]
            held[f"model.layers.{layer}.attention.keys_and_values.weight"] = np.concatenate(both, axis=1)
        elif (name := HERE.get(module.removeprefix("attention."))) is not None:
            held[f"model.layers.{layer}.{name}.{kind}"] = turned
        elif rest != "attention.v.weight":
            held[key] = value
    return held


def test_a_described_class_is_read_and_written_as_its_own_export(tmp_path: Path) -> None:
    """What the library wrote by the maps of the class, on one card and over tp, pp and ep."""
    unpack(Path(facts.__file__).with_name("own_export.tar.xz"), tmp_path)
    real, rules = tmp_path / "own_export", tmp_path / "own_export/rules.json"
    held = published(real)

    paddle_reshard.convert(real, tmp_path / "one", to="tp=1", rules=rules)
    of_stages = {"to": "tp=2,pp=2,ep=2", "layout": {"sequence_parallel": False}}
    paddle_reshard.convert(real, tmp_path / "ranks", rules=rules, **of_stages)
    paddle_reshard.convert(tmp_path / "ranks", tmp_path / "back", format="huggingface", rules=rules)

    one = load_with_paddle(tmp_path / "one/model_state.pdparams")
    assert as_trained(held).keys() == one.keys() - {"StructuredToParameterName@@"}
    for key, value in as_trained(held).items():
        assert np.array_equal(one[key], value), key
    # held against the files like any table
    told = json.loads(rules.read_text())
    fused = next(row for row in told["rules"] if row["key"].endswith("keys_and_values.weight"))
    fused["shape"] = ["8", "18"]
    (tmp_path / "wrong.json").write_bytes(written(told))
    with pytest.raises(ReshardError, match=r"keys_and_values\.weight: the rule table expects .* \(8, 18\)"):
        paddle_reshard.plan(real, to="tp=1", rules=tmp_path / "wrong.json")
    unsaid = {**told, "without_forms": "nobody said", "rules": [{**row} for row in told["rules"]]}
    for row in unsaid["rules"]:
        row.pop("huggingface", None)
    (tmp_path / "wrong.json").write_bytes(written(unsaid))
    with pytest.raises(ReshardError, match=r"no row .* has this key .* \(nobody said\)"):
        paddle_reshard.plan(real, to="tp=1", rules=tmp_path / "wrong.json")
    back = published(tmp_path / "back")
    assert back.keys() == held.keys()
    assert all(np.array_equal(back[key], value) for key, value in held.items())


def own_source(run: str, into: Path) -> Path:
    """The real checkpoint of a run's job with tp, pp and ep, with the description of all three jobs."""
    name = f"drawn_own_{run}".removesuffix("_tied")
    unpack(Path(__file__).parents[1] / f"golden/draws/{name}.tar.xz", into)
    return into / f"{name}/source/checkpoint-2"


def bits(folder: Path) -> dict[str, Any]:
    """The parameters of a job, from its memory, as 16 bits each."""
    return {
        key: np.frombuffer(data, np.uint16).reshape(shape)
        for key, (dtype, shape, data) in read_tensors(folder / "truth.safetensors").items()
        if dtype == "BF16"
    }


def as_published(key: str, value: Any) -> dict[str, Any]:
    """The tensors of a Hugging Face checkpoint of what the class holds, by what its ``_gen_aoa_config`` says."""
    there = key.replace("model.embed.words", "embed_tokens").replace("answer.proj", "lm_head")
    there = (
        re.sub(r"mlp\.(up|down)\.", r"dense.\1.", there).replace("mlp.experts", "moe").replace("mlp.", "moe.")
    )
    if value.ndim == 3:
        return {there.replace("moe", f"moe.{n}") + ".weight": one.T for n, one in enumerate(value)}
    if "keys_and_values" in key:
        halves = zip("kv", np.split(value, 2, axis=1), strict=True)
        return {there.replace("keys_and_values", name): half.T for name, half in halves}
    same = value.ndim == 1 or "words" in key or ".mix." in key
    return {there: value if same else value.T}


@pytest.mark.parametrize("run", ["stacked", "local"])
def test_experts_of_ranks_and_mtp_layers_are_published_as_the_class_says(run: str, tmp_path: Path) -> None:
    source, layer = own_source(run, tmp_path), "model.layers.4."
    rules = source / "paddle_reshard_rules.json"
    held = {}
    for key, value in bits(source.parent).items():
        held |= as_published(key, value)

    paddle_reshard.convert(source, tmp_path / "model", format="huggingface")
    of_stages = {"to": "tp=2,pp=2,ep=2", "layout": {"sequence_parallel": False}, "format": "hybrid-plain"}
    paddle_reshard.convert(tmp_path / "model", tmp_path / "ranks", rules=rules, **of_stages)
    paddle_reshard.convert(source, tmp_path / "fewer", format="huggingface", drop=["mtp"])

    real = published(tmp_path / "model")
    assert real.keys() == held.keys()
    assert all(np.array_equal(real[key], value) for key, value in held.items())
    weights = [path.name for path in source.glob("model_state*.pdparams")]
    assert len(weights) == 4
    for name in weights:
        before, back = (load_with_paddle(folder / name) for folder in (source, tmp_path / "ranks"))
        assert list(before) == list(back), name
        assert all(np.array_equal(value, back[key]) for key, value in before.items()), name
    assert published(tmp_path / "fewer").keys() == {key for key in held if not key.startswith(layer)}
    assert json.loads((tmp_path / "fewer/config.json").read_text())["mtp_num_hidden_layers"] == 0
    own = r"each rank of ep=2 has its own \S+mlp\.experts\."
    flat = r"sharded_state_dict\(\) gives \S+mlp\.experts\.up as \[32, 12\]"
    for over, words in (("flex", flat if run == "stacked" else own), ("unified", own)):
        with pytest.raises(ReshardError, match=rf"{words}.*the format {over} is not supported"):
            paddle_reshard.plan(source, format=over)


@pytest.mark.parametrize("run", ["tied", "stacked", "local"])
def test_experts_of_ranks_are_read_by_a_description_that_shows_them(run: str, tmp_path: Path) -> None:
    """Under numbers in the model their keys show it as well; of others, copies of one would be taken for all."""
    source = own_source(run, tmp_path)
    tables = {job: tmp_path / f"{job}.json" for job in ("one", "ep2")}
    for job, path in tables.items():
        path.write_bytes(written(described_table(of_own_class(f"{job} {run}"), FUSED)))
    over = {"to": "sharding=2,ep=2", "sharding_strategy": "stage1v2"}
    paddle_reshard.convert(source, tmp_path / "one", to="tp=1")
    paddle_reshard.convert(source, tmp_path / "ranks", **over)

    with pytest.raises(
        ReshardError, match=r"tp=2: .* jobs without tp \(with ep=2\).*; call paddle_reshard.desc"
    ):
        paddle_reshard.plan(source, **over, rules=tables["ep2"])
    with pytest.raises(
        ReshardError, match=r"ep=2: .* jobs without ep \(with one card\).*; call paddle_reshard.d"
    ):
        paddle_reshard.plan(tmp_path / "one", **over, rules=tables["one"])
    with pytest.raises(
        ReshardError, match=r"one card calls its parameters is not known.*; call paddle_reshard.d"
    ):
        paddle_reshard.plan(tmp_path / "ranks", to="tp=1", rules=tables["ep2"])
    if run == "tied":
        paddle_reshard.convert(tmp_path / "ranks", tmp_path / "back", to="tp=1", rules=tables["one"])
        assert read_one_card(tmp_path / "back") == read_one_card(tmp_path / "one")
    else:
        with pytest.raises(
            ReshardError, match=r"ep=2: the model was described in jobs without ep .*; call paddle"
        ):
            paddle_reshard.plan(tmp_path / "ranks", to="tp=1", rules=tables["one"])


def test_stages_of_a_pipeline_of_another_degree_follow_where_all_ways_agree_that_fit_a_job(
    tmp_path: Path,
) -> None:
    """Four decoder layers in two stages may be counted, or all items are, those before and behind them too."""
    source = own_source("stacked", tmp_path)
    ranks = of_own_class("source stacked")
    assert {rank.segments for rank in ranks} == {(0, 3, 7)}
    rules = tmp_path / "rules.json"
    table = described_table(ranks, FUSED)
    rules.write_bytes(written(table))
    of_four = {"to": "tp=2,pp=4,ep=2", "layout": {"sequence_parallel": False}, "rules": rules}

    words = r"\[0, 2, 3, 4\] with 'layer:OwnBlock', \[0, 1, 3, 5\] with 'uniform'.*describe.*--layout"
    with pytest.raises(ReshardError, match=words):
        paddle_reshard.plan(source, **of_four)
    layout = {**of_four["layout"], "segmentation": "layer:OwnBlock"}
    paddle_reshard.plan(source, **{**of_four, "layout": layout})

    counted = tuple(replace(rank, segments=(0, 2, 3, 4, 7), job=replace(rank.job, pp=4)) for rank in ranks)
    assert _segmentations(counted) == ["layer:OwnBlock"]
    of_virtual = tuple(replace(rank, segments=(0, 2, 3, 4, 7)) for rank in ranks)
    assert _segmentations(of_virtual) == ["layer:OwnBlock"]
    more = {**table, "segmentations": _segmentations(counted)}
    assert joined_tables(table, more)["segmentations"] == ["layer:OwnBlock"]
    contradicting = joined_tables({**more, "segmentations": ["uniform"]}, more)
    assert contradicting["segmentations"] == ["uniform", "layer:OwnBlock"]
    with pytest.raises(
        UsageError, match=r"at items 0, 4, 7 of 7, neither by .* OwnBlock and OwnNext nor evenly"
    ):
        _segmentations(tuple(replace(rank, segments=(0, 4, 7)) for rank in ranks))


def test_layers_of_mtp_with_numbers_of_their_own_are_described_as_they_are_and_not_dropped(
    tmp_path: Path,
) -> None:
    """No number tells that they are of multi-token prediction: ernie4_5_moe has them in ``mtp_block.0``."""
    [build] = bases("ernie4_5_moe mtp")
    table = described_table([rank_facts(build)], {})
    rows = [{name: of for name, of in row.items() if name != "shape"} for row in table["rules"]]
    source = tmp_path / "own"
    shutil.copytree(case_directory("states/ernie45_mtp_single") / "checkpoint-3", source)
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "model_type": "own"}))
    described_as = {**table, "model_types": ["own"], "rules": rows}
    (source / "paddle_reshard_rules.json").write_bytes(written(described_as))

    paddle_reshard.convert(source, tmp_path / "target", to="tp=1")

    held = read_one_card(source)
    assert any("mtp_block.0." in key for key in held)
    assert read_one_card(tmp_path / "target") == held
    with pytest.raises(ReshardError, match=r"does not tell which tensors .*num_nextn_predict_layers: 1.*mtp"):
        paddle_reshard.plan(source, to="tp=1", drop=["mtp"])
    of_mtp = {"item": "mtp", "with_mtp": True}
    told = [{**row, **of_mtp} if "mtp_" in str(row["key"]) else row for row in rows]
    items = [*table["items"], {"name": "mtp", "layer_class": "", "mtp": True}]
    (tmp_path / "told.json").write_bytes(written({**described_as, "items": items, "rules": told}))
    paddle_reshard.convert(source, tmp_path / "fewer", to="tp=1", drop=["mtp"], rules=tmp_path / "told.json")
    assert read_one_card(tmp_path / "fewer") == {key: of for key, of in held.items() if "mtp_" not in key}


def published(folder: Path) -> dict[str, Any]:
    """The bfloat16 tensors of a Hugging Face checkpoint as 16 bits each."""
    [path] = folder.glob("*.safetensors")
    return {
        key: np.frombuffer(data, np.uint16).reshape(shape)
        for key, (_, shape, data) in read_tensors(path).items()
    }


def flat(entries: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of a file, those of master weights among them."""
    return {
        key: value
        for name, entry in entries.items()
        for key, value in (entry.items() if isinstance(entry, dict) else [(name, entry)])
    }


def test_a_tie_that_only_jobs_with_stages_have_shown_is_no_tie_of_files_for_any_job(tmp_path: Path) -> None:
    source = own_job(tmp_path)
    paddle_reshard.convert(source, tmp_path / "known", format="flex")
    table = described_table(of_own_class("source tied"), FUSED)
    (source / "paddle_reshard_rules.json").write_bytes(written(table))
    with pytest.raises(ReshardError, match=rf"{HEAD}: tied to {WORDS} in all jobs .* which have stages"):
        paddle_reshard.convert(source, tmp_path / "target", format="flex")


def test_what_only_a_job_on_one_card_has_shown_as_tied_is_in_files_for_jobs_with_stages(
    tmp_path: Path,
) -> None:
    """Both keys, and the states of both: what a job with stages asks for, whether it ties them or trains them apart."""
    source = own_job(tmp_path)
    for name, options in {"one": {"to": "tp=1"}, "flex": {"format": "flex"}}.items():
        paddle_reshard.convert(source, tmp_path / name, **options)
    table = described_table(of_own_class("one tied"), FUSED)
    (tmp_path / "one/paddle_reshard_rules.json").write_bytes(written(table))

    paddle_reshard.convert(tmp_path / "one", tmp_path / "target", format="flex")

    of_stages = {path.relative_to(tmp_path / "flex"): path for path in (tmp_path / "flex").rglob("*.distcp")}
    of_stages |= {
        path.relative_to(tmp_path / "flex"): path for path in (tmp_path / "flex").rglob("*.metadata")
    }
    assert len(of_stages) == 6
    for name, path in of_stages.items():
        assert (tmp_path / "target" / name).read_bytes() == path.read_bytes(), name


def test_the_color_of_a_parameter_is_that_of_its_row() -> None:
    """Experts have buffers of their own under ep, whatever their color; in other jobs it is described, too."""
    colored = {"color": "of the head"}
    made = described_table(altered_ranks("one tied", same_as=None, name="linear_0.w_1", **colored), FUSED)
    colors = {key: row["color"] for key, row in rows_of(made).items() if "color" in row}
    queries = [f"{LAYER}attention.query.{part}" for part in ("weight", "bias")]
    assert colors == {**dict.fromkeys(queries, "queries"), HEAD: "of the head"}
    assert typed_table(made).colors == ()
    plain = described_table(altered_ranks("one tied", same_as=None, name="linear_0.w_1"), FUSED)
    with pytest.raises(UsageError, match=rf"{HEAD}: its color is 'of the head' .* None in the other"):
        joined_tables(made, plain)
    in_turns = [
        replace(
            rank, entries=tuple(replace(e, color=None if n % 2 else "x") for n, e in enumerate(rank.entries))
        )
        for rank in of_own_class("one tied")
    ]
    with pytest.raises(UsageError, match="that of another tensor of"):
        described_table(in_turns, FUSED)


def altered_ranks(job: str, **changes: Any) -> list[RankFacts]:
    """The ranks of a job, whose entry of the head has other marks, or is not there (``gone``)."""
    gone = changes.pop("gone", False)
    return [
        replace(
            rank,
            shared={key: name for key, name in rank.shared.items() if not (gone and key == HEAD)},
            entries=tuple(
                replace(entry, **changes) if entry.key == HEAD else entry
                for entry in rank.entries
                if not (gone and entry.key == HEAD)
            ),
        )
        for rank in of_own_class(job)
    ]


def test_words_that_only_some_jobs_tie_are_described_as_theirs() -> None:
    staged = described_table(of_own_class("source tied"), FUSED)
    apart = described_table(altered_ranks("one tied", same_as=None, name="linear_0.w_1"), FUSED)
    lacking = described_table(altered_ranks("one tied", gone=True), FUSED)
    of_experts = described_table(of_own_class("ep2 tied"), FUSED)

    for tables in ([staged, apart], [apart, staged], [staged, apart, staged]):
        row = rows_of(reduce(joined_tables, tables))[HEAD]
        assert (row["tied_to"], row.get("own_without_stages")) == (WORDS, True)
        assert "of_stages" not in row
    for tables in ([staged, lacking], [lacking, staged], [staged, lacking, staged]):
        joined = reduce(joined_tables, tables)
        assert (rows_of(joined)[HEAD]["tied_to"], rows_of(joined)[HEAD]["of_stages"]) == (WORDS, True)
        assert list(rows_of(joined)) == list(rows_of(staged))
    with pytest.raises(
        UsageError, match=rf"{HEAD}: tied to {WORDS} in a job with ep=2, and not in .* one card"
    ):
        joined_tables(apart, of_experts)
    with pytest.raises(UsageError, match=rf"{HEAD}: tied to {WORDS} .* tp=2, pp=2, ep=2 does not have it"):
        joined_tables(of_experts, described_table(altered_ranks("source tied", gone=True), FUSED))
    with pytest.raises(
        UsageError, match=rf"{HEAD}: a job with ep=2 has it, and a job with one card does not"
    ):
        joined_tables(joined, of_experts)
    untied = {"config": {**of_own_class("one tied")[0].config, "tie_word_embeddings": False}}
    two = [
        described_table([replace(rank, **untied) for rank in ranks], FUSED)
        for ranks in (of_own_class("source tied"), altered_ranks("one tied", same_as=None))
    ]
    with pytest.raises(UsageError, match=rf"{HEAD}: only some of the jobs tie it .* tie_word_embeddings"):
        joined_tables(*two)


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        (lambda: of_own_class("source untied")[:3], "no rank with tp, pp = .* was described"),
        (lambda: altered_ranks("source tied", split=None, distributed=False, whole=None), "over stages"),
        (
            lambda: [
                replace(rank, shared={WORDS: "words"}, places={**rank.places, WORDS: 5 * rank.pp_rank})
                for rank in of_own_class("source tied")
            ],
            "share it under one key",
        ),
        (
            lambda: [
                replace(
                    rank,
                    entries=tuple(replace(e, key=e.key.replace("experts", "pros")) for e in rank.entries),
                )
                for rank in of_own_class("ep2 untied")
            ],
            r"mlp\.pros\.0\.up\.weight: .* does not tell which",
        ),
        (
            lambda: [
                replace(rank, config={**rank.config, "num_experts": 8})
                for rank in of_own_class("ep2 stacked")
            ],
            r"mlp\.experts\.up: each rank of ep=2 has its own, of the shape \[2, 8, 12\]",
        ),
        (
            lambda: [
                replace(rank, config={**rank.config, "num_experts": 8}) for rank in of_own_class("ep2 local")
            ],
            r"mlp\.experts\.0\.up\.weight: .* which have the experts \[0, 1\]",
        ),
    ],
    ids=["a rank less", "cut otherwise", "one key", "another list", "stacked", "local"],
)
def test_what_ranks_of_stages_and_experts_contradict_is_refused(ranks: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        described_table(ranks(), FUSED)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_keys_of_the_base_class_are_called_that(family: str) -> None:
    """``LlamaModel`` and ``Qwen3Model`` have the keys of the class for language models behind ``model.``."""
    [build] = [build for build in bases(family) if build.topology == "tp1"]
    keys = [entry.key for entry in build.entries or () if entry.key.startswith("model.")]
    config = {**(build.saved or {}), "paddleformers_version": "1.2.0"}
    assert choose_table(shipped_tables(), keys, config).family == family
    with pytest.raises(
        ReshardError, match=rf"all {len(keys)} tensors .* {family} .* without 'model\.'.*describe"
    ):
        choose_table(shipped_tables(), [key.removeprefix("model.") for key in keys], config)


def test_a_base_class_that_describes_itself_is_read_and_written(tmp_path: Path) -> None:
    """``Qwen3Model``: its rows are those of the language model, whose keys have ``model.`` before them."""
    builds = [build for build in facts.builds() if build.kind == "Qwen3Model"]
    tables = []
    for topology in ("tp1", "tp2", "tp2sp"):
        ranks = [rank_facts(build) for build in builds if build.topology == topology]
        tables.append(with_forms(described_table(ranks, None, shares_said(ranks[0])), ranks))
    table = reduce(joined_tables, tables)
    made, shipped = typed_table(table), table_of(bases("qwen3")[0])
    for build in builds:
        config = build.saved or {}
        assert not list(differences(build, made))
        for key in (entry.key for entry in build.entries or ()):
            (rule, _), (row, _) = made.find(key, config), shipped.find(f"model.{key}", config)
            assert expected_shape(rule, config) == expected_shape(row, config), key
            assert (rule.split, rule.shares(config)) == (row.split, row.shares(config)), key
            assert as_numbers(rule, config, key) == as_numbers(row, config, f"model.{key}"), key

    [whole] = case_directory("families/qwen3_single").glob("checkpoint-*")
    paddle_reshard.convert(whole, tmp_path / "model", format="huggingface")
    [path] = (tmp_path / "model").glob("*.safetensors")
    base = {key: tensor for key, tensor in read_tensors(path).items() if key != "lm_head.weight"}
    write_tensors(base, path)
    (tmp_path / "rules.json").write_bytes(written(table))
    rules = tmp_path / "rules.json"
    paddle_reshard.convert(tmp_path / "model", tmp_path / "ranks", to="tp=2", rules=rules)
    paddle_reshard.convert(tmp_path / "ranks", tmp_path / "one", to="tp=1", rules=rules)
    paddle_reshard.convert(tmp_path / "one", tmp_path / "back", format="huggingface", rules=rules)

    held, alone = (load_with_paddle(at / "model_state.pdparams") for at in (whole, tmp_path / "one"))
    assert {f"model.{key}" for key in alone.keys() - {NAMES}} == held.keys() - {NAMES, "lm_head.weight"}
    for key in alone.keys() - {NAMES}:
        assert np.array_equal(alone[key], held[f"model.{key}"]), key
    [path] = (tmp_path / "back").glob("*.safetensors")
    assert read_tensors(path) == base
