"""Real checkpoints of other model families than Llama, by the rule tables that come with the package.

``tests/corpus/small-families`` and ``families`` hold small ones of each; ``README.md`` there tells how they were made.
"""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from math import prod
from pathlib import Path

import numpy as np
import pytest

import paddle_reshard
from paddle_reshard.pipeline.core.errors import PlanError, RuleError
from paddle_reshard.pipeline.model.rules.choose import choose_table
from paddle_reshard.pipeline.model.rules.rule import Rule
from paddle_reshard.pipeline.model.rules.table import RuleTable
from paddle_reshard.pipeline.model.rules.tables import shipped_tables
from tests import oracle
from tests.conftest import case_directory
from tests.golden.compare_one_card import bits, load


@pytest.mark.parametrize("tp", [1, 2])
def test_unequal_parts_are_cut_one_by_one(tp: int, tmp_path: Path) -> None:
    """A rank's ``qkv_proj`` is ``[q | k | v]`` of its own heads, as the forward pass of the class takes it apart."""
    converted = tmp_path / "converted"
    paddle_reshard.convert(case_directory("families/phi3_single") / "checkpoint-3", converted, to=f"tp={tp}")
    truth = oracle.read_truth(case_directory("families/phi3_single") / "truth.safetensors")
    for rank in range(tp):
        cell = f".tp{rank:02d}" if tp > 1 else ""
        held = load(converted / f"model_state{cell}.pdparams")
        for layer in range(2):
            fused = f"model.layers.{layer}.self_attn.qkv_proj.weight"
            queries, keys, values = np.split(truth[fused], [64, 96], axis=1)  # 4, 2 and 2 heads of 16
            own = [np.split(part, tp, axis=1)[rank] for part in (queries, keys, values)]
            assert bits(held[fused]) == np.concatenate(own, axis=1).tobytes()
            fused = f"model.layers.{layer}.mlp.gate_up_proj.weight"
            own = [np.split(part, tp, axis=1)[rank] for part in np.split(truth[fused], 2, axis=1)]
            assert bits(held[fused]) == np.concatenate(own, axis=1).tobytes()


# --- all tables ---------------------------------------------------------------------------------------

TABLES = {f"{table.family}.{table.convention}": table for table in shipped_tables() if table.version is None}
HEADS = {
    "paddleformers": ("vocab_size", "hidden_size"),
    "paddlefleet": ("vocab_size", "hidden_size"),
    "paddlenlp": ("hidden_size", "vocab_size"),
}
CONFIG = {
    "num_hidden_layers": 2, "num_nextn_predict_layers": 1, "use_bias": True, "attention_bias": True,
    "vocab_size": 64, "hidden_size": 24, "intermediate_size": 36, "max_position_embeddings": 16,
    "num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 12, "kv_lora_rank": 8,
    "qk_nope_head_dim": 4, "qk_rope_head_dim": 2, "v_head_dim": 6, "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 20, "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4,
    "n_shared_experts": 2, "moe_num_experts": 4, "moe_num_experts.0": 4, "moe_num_experts.1": 4,
    "moe_intermediate_size.0": 16, "use_temporal_conv": True, "spatial_conv_size": 2, "temporal_conv_size": 2,
    "moe_num_shared_experts": 2, "index_n_heads": 2, "index_head_dim": 8, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_key_head_dim": 6, "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
    "vision_config": {
        "depth": 2,
        "num_hidden_layers": 2,
        "deepstack_visual_indexes": [0, 1],
        "hidden_size": 16, "embed_dim": 16, "mlp_ratio": 2, "intermediate_size": 24, "out_hidden_size": 32,
        "num_heads": 2, "num_attention_heads": 2, "num_channels": 3, "in_channels": 3,
        "num_position_embeddings": 12, "image_size": 16, "patch_size": 4, "spatial_merge_size": 2,
        "temporal_patch_size": 2, "attention_bias": True,
    },
}  # fmt: skip
_NUMBERED = r"\.(?:layers|blocks|deepstack_merger_list|mtp_\w+)\.(\d+)\."


@pytest.mark.parametrize("name", TABLES)
def test_a_table_is_a_file_of_its_name(name: str) -> None:
    data = json.loads(
        (Path(paddle_reshard.pipeline.model.rules.__file__).parent / f"{name}.json").read_text()
    )
    assert f"{data['family']}.{data['convention']}" == name


@pytest.mark.parametrize("name", TABLES)
def test_the_head_is_laid_out_as_in_its_library(name: str) -> None:
    """[vocab, hidden] in PaddleFormers, [hidden, vocab] in PaddleNLP unless tied; cut by vocabulary.

    What is one parameter with a word embedding that tp does not cut is whole too.
    """
    table = TABLES[name]
    for rule in (rule for rule in table.rules if rule.key.endswith("lm_head.weight")):
        tied = rule.where.get("tie_word_embeddings") is True or rule.always_tied
        linear = table.family in ("glm_ocr", "ernie4_5_moe_vl") or table.recipe
        like = "paddlenlp" if linear else table.convention
        assert rule.shape == (HEADS["paddleformers"] if tied else HEADS[like])
        assert rule.shape is not None
        words = [r.split for r in table.rules if r.key == rule.tied_to and rule.always_tied]
        whole = words == [None] or table.family == "glm_ocr" or (table.recipe and "tp" in table.refused)
        assert rule.split == (None if whole else rule.shape.index("vocab_size"))


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("tied", [False, True])
def test_every_row_is_the_only_one_for_its_tensor(name: str, tied: bool) -> None:
    table, config = TABLES[name], CONFIG | {"tie_word_embeddings": tied}
    for key in _keys(table):
        rules = [
            rule
            for rule in table.rules
            if all(_entries(config).get(k) == value for k, value in rule.where.items())
        ]
        if any(rule.pattern().fullmatch(key) for rule in rules):
            rule, layer = table.find(key, config)
            assert layer == (int(match[1]) if (match := re.search(_NUMBERED, key)) else None)
            dim = rule.split_dim(config, 2)
            assert dim is None or _shape(rule)[dim] % (2 * sum(rule.shares(CONFIG))) == 0, key


def _entries(config: dict) -> dict:
    """Every entry by its name, those of sections with the section's name."""
    return config | {f"vision_config.{name}": value for name, value in config["vision_config"].items()}


def _shape(rule: Rule) -> list[int]:
    """What the row's formulas give for ``CONFIG``; every name in them must be an entry."""
    assert rule.shape is not None
    sizes = _entries(CONFIG) | {"head_dim": CONFIG["hidden_size"] // CONFIG["num_attention_heads"]}

    def size(factor: str) -> int:
        whole, *by = (int(f) if f.strip().isdigit() else sizes[f.strip()] for f in factor.split("/"))
        return whole // prod(by)

    terms = [[term.split("*") for term in dim.split("+")] for dim in rule.shape]
    return [sum(prod(map(size, factors)) for factors in dim) for dim in terms]


@pytest.mark.parametrize("name", TABLES)
def test_a_table_is_chosen_by_the_names_of_its_library(name: str) -> None:
    table = TABLES[name]
    for model_type in table.model_types:
        config = {**CONFIG, "model_type": model_type} | {option.entry: None for option in table.unsupported}
        if table.convention == "paddlefleet":  # whose heads have a further key where they are tied
            config["tie_word_embeddings"] = True
        of_model = replace(table, rules=tuple(rule for rule in table.rules if rule.applies(config)))
        chosen = choose_table(shipped_tables(), _keys(of_model), config)
        assert (chosen.family, chosen.convention) == (table.family, table.convention)


def _keys(table: RuleTable) -> list[str]:
    later = {item.name for item in table.items if item.continues}
    """Items that are numbered on from the two decoder layers."""
    return [
        rule.key.replace("{layer}", "2" if rule.item in later else "1").replace("{expert}", "13")
        for rule in table.rules
    ]


def test_rows_of_decoder_layers_are_those_of_a_layer_that_continues_them_too() -> None:
    """Which layers these are, the config says; their own rows are for them alone."""
    table = TABLES["deepseek_v3.paddleformers"]
    attention, own = "model.layers.{}.self_attn.o_proj.weight", "model.layers.{}.enorm.weight"
    items = [table.find(attention.format(layer), CONFIG)[0].item for layer in range(4)]
    assert items == ["layer", "layer", "mtp", "layer"]  # the last of them is no layer of this config
    assert table.find(own.format(2), CONFIG)[0].item == "mtp"
    with pytest.raises(RuleError, match=r"layers\.1\.enorm\.weight: no row"):
        table.find(own.format(1), CONFIG)


@pytest.mark.parametrize("name", TABLES)
def test_biases_follow_their_weights(name: str) -> None:
    """A bias is cut where the outputs of its layer are cut, and whole where the inputs are."""
    rules = {rule.key: rule for rule in TABLES[name].rules if not rule.where}
    for key, bias in rules.items():
        weight = rules.get(f"{key.removesuffix('bias')}weight")
        if not key.endswith(".bias") or weight is None or weight.shape is None or len(weight.shape) == 1:
            continue
        if weight.name_class == "create_parameter" or len(weight.shape) > 2:  # [out, in], as a router
            assert (bias.split, bias.shape) == (None, weight.shape[:1])
            continue
        assert (bias.split, bias.parts) == ((0, weight.parts) if weight.split == 1 else (None, 1)), key
        assert (bias.name_class, bias.name_class_sp) == (weight.name_class, weight.name_class_sp), key
        assert bias.shape == weight.shape[1:], key


@pytest.mark.parametrize(
    ("name", "to", "told"),
    [
        ("families/gemma3_text_single", "tp=2,pp=3", "^tp=2: paddleformers cannot train gemma3_text .*logits"),
        ("families/paddleocr_vl_single", "tp=2", "^tp=2: paddleformers cannot train .*: its projector"),
        ("moe/gptoss_single", "pp=2", "^pp=2: the trainer cannot start it: .*'layer:GptOssDec.*' matches none"),
        ("families/ernie4_5_single", "pp=2", "^pp=2: .*'layer:Ernie4_5DecoderLayer|EmptyLayer' matches none of"),
        ("moe/glm4moe_single", "pp=2", "^pp=2: the trainer cannot start it: 3 layers do not divide into 2"),
    ],
)  # fmt: skip
def test_axes_with_which_the_trainer_starts_no_job_of_a_family_are_refused(
    name: str, to: str, told: str
) -> None:
    with pytest.raises(PlanError, match=told):
        paddle_reshard.plan(case_directory(name) / "checkpoint-3", to=to)


@pytest.mark.parametrize("said", ["layer:DecoderLayer", "uniform", "[0, 2]", [0, 2]])
def test_the_config_says_how_a_pipeline_divides_the_layers(said: object, tmp_path: Path) -> None:
    """As the trainer, which reads ``pp_seg_method`` of its model, does with it."""
    source, made = tmp_path / "source", {}
    shutil.copytree(
        case_directory("moe/gptoss_single") / "checkpoint-3", source, copy_function=shutil.copyfile
    )
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "pp_seg_method": said}))
    for name, layout in {
        "config": None,
        "option": {"segmentation": [0, 2] if "[" in str(said) else said},
    }.items():
        paddle_reshard.convert(source, tmp_path / name, to="pp=2", layout=layout)
        made[name] = {path.name: path.read_bytes() for path in (tmp_path / name).glob("*.pd*")}
    assert made["config"] == made["option"]
