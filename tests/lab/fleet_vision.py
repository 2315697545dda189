"""Qwen3.5, which PaddleFleet trains with its vision tower: what its class declares, and its rule tables.

The class needs GPUs, so no checkpoint of it was available. ``declare`` executes the function with which it says how a
Hugging Face checkpoint becomes its model (``_gen_aoa_config``), and the operation that it adds to Paddle's statements
for the projections of linear attention (``fused_in_proj``), for one tp rank and for two. ``transformers`` lists keys
and shapes of such a checkpoint. ``tables`` writes the rule tables from the rows below, and
``tests/golden/test_fleet_vision.py`` lets Paddle's own engine execute the statements on all of these tensors. ::

    pip download paddleformers==1.2.0 --no-deps -d wheel && unzip -d source wheel/*.whl
    python -m tests.lab.fleet_vision declare source published.json
    python -m tests.lab.fleet_vision tables

``published.json`` comes from an environment with ``transformers`` and ``torch``, which need not have Paddle::

    python -m tests.lab.fleet_vision published > published.json
"""

from __future__ import annotations

import ast
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[2]
RULES = REPO / "pipeline" / "model" / "rules"
DECLARED = REPO / "tests" / "golden" / "fleet" / "vision.json"
Row = dict[str, Any]

# ------------------------------------------------------------------------------------------------ declarations

CONFIG: Mapping[str, Any] = {
    "text_config": {
        "vocab_size": 48,
        "hidden_size": 16,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 6,
        "intermediate_size": 24,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "linear_conv_kernel_dim": 3,
        "linear_key_head_dim": 4,
        "linear_value_head_dim": 4,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 6,
        "moe_intermediate_size": 10,
        "shared_expert_intermediate_size": 14,
        "num_experts": 4,
        "num_experts_per_tok": 1,
        "attn_output_gate": True,
        "pad_token_id": 0,
        "tie_word_embeddings": False,
    },
    "vision_config": {
        "depth": 2,
        "hidden_size": 16,
        "intermediate_size": 20,
        "num_heads": 4,
        "out_hidden_size": 16,
        "patch_size": 2,
        "num_position_embeddings": 9,
        "in_channels": 3,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    },
    "tie_word_embeddings": False,
}
"""The ``config.json`` of a small model."""
OF_CLASS: Mapping[str, Any] = {"moe_expert_fusion": True}
"""Entries that the class sets itself."""
FAMILIES = ("qwen3_5", "qwen3_5_moe")
VARIANTS: Mapping[str, tuple[Mapping[str, Any], int]] = {
    "plain": ({}, 1),
    "tied": ({"tie_word_embeddings": True}, 1),
    "mtp": ({"mtp_num_hidden_layers": 1}, 1),
    "tp2": ({}, 2),
}
"""Variant → entries that differ, and the number of tp ranks."""


def config_of(config: Mapping[str, Any], variant: str) -> dict[str, Any]:
    """The ``config.json`` of a variant: further entries are in the section that has such entries."""
    made = {name: dict(value) if name == "text_config" else value for name, value in config.items()}
    for name, value in VARIANTS[variant][0].items():
        (made if name in made else made["text_config"])[name] = value
    return made


def published() -> dict[str, dict[str, list[int]]]:
    """Family → key → shape, as ``transformers`` builds such a model."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    from transformers import AutoConfig, AutoModelForImageTextToText

    def listed(family: str) -> dict[str, list[int]]:
        model = AutoModelForImageTextToText.from_config(AutoConfig.for_model(family, **CONFIG))
        return {key: list(tensor.shape) for key, tensor in sorted(model.state_dict().items())}

    return {family: listed(family) for family in FAMILIES}


def declare(source: Path, shapes: Mapping[str, Mapping[str, list[int]]]) -> dict[str, Any]:
    """Family → config, keys and shapes in ``transformers``, and variant → statements that Paddle's engine knows."""
    from tests.lab.declarations import statements

    path = source / "paddleformers" / "transformers" / "qwen3_5" / "modeling.py"
    name = "Qwen3_5ForConditionalGeneration"

    def declared(family: str, variant: str) -> list[str]:
        config, tp = config_of({"model_type": family, **CONFIG}, variant), VARIANTS[variant][1]
        config |= OF_CLASS | {"text_config": {"mtp_num_hidden_layers": 0, **config["text_config"]}}
        return [one for text in statements(path, name, name, config) for one in expanded(path, text, tp)]

    (installed,) = source.glob("paddleformers-*.dist-info")
    return {
        "package": installed.name.removesuffix(".dist-info"),
        "families": {
            family: {
                "config": {"model_type": family, **CONFIG},
                "published": shapes[family],
                "statements": {
                    variant: declared(family, variant)
                    for variant in VARIANTS
                    if variant != "mtp" or family.endswith("moe")
                },
            }
            for family in FAMILIES
        },
    }


class _Job:
    """What a macro of the library asks Paddle's engine for: the number of shards of a tensor."""

    def __init__(self, shards: int) -> None:
        self.shards = shards

    def get_dst_state_shard_num(self, key: str) -> int:
        """The same for all."""
        return self.shards


def expanded(path: Path, statement: str, tp: int) -> list[str]:
    """A statement in operations of Paddle's engine, with the macro that the class registers executed."""
    from paddle.distributed.flex_checkpoint.aoa.lexer import Lexer
    from paddle.distributed.flex_checkpoint.aoa.macros import macro_registry

    if not any(macro["name"] == MACRO for macro in macro_registry.macros):
        registering = "_register_fused_in_proj_macro"
        (function,) = (
            node
            for node in ast.parse(path.read_text("utf-8")).body
            if isinstance(node, ast.FunctionDef) and node.name == registering
        )
        space: dict[str, Any] = {}
        exec(compile(ast.Module([function], []), str(path), "exec"), space)
        space[registering]()
    (macro,) = (macro for macro in macro_registry.macros if macro["name"] == MACRO)
    made = macro["func"](Lexer(None).tokenize(statement), statement, _Job(tp))
    return [made] if isinstance(made, str) else list(made)


MACRO = "fused_in_proj"

# ----------------------------------------------------------------------------------------------------- tables

TEXT, TOWER = "model.language_model", "model.vision_model"
TEXT_THERE, TOWER_THERE = "model.language_model", "model.visual"
LAYER, LAYER_THERE = f"{TEXT}.layers.{{layer}}", f"{TEXT_THERE}.layers.{{layer}}"
MTP, MTP_THERE = f"{LAYER}.transformer_layer", "mtp.layers.0"
BLOCK, BLOCK_THERE = f"{TOWER}.layers.{{layer}}", f"{TOWER_THERE}.blocks.{{layer}}"
HIDDEN = "hidden_size"
OF_TOWER = "vision_config.hidden_size"
MERGED = "*".join([OF_TOWER, *["vision_config.spatial_merge_size"] * 2])


def _row(
    item: str,
    key: str,
    shape: Sequence[str],
    there: str | Sequence[str],
    split: int | None = None,
    **form: Any,
) -> Row:
    keys = [there] if isinstance(there, str) else list(there)
    cut = {} if split is None else {"split": split}
    return {
        "key": key,
        "item": item,
        "name_class": "",
        **cut,
        "shape": list(shape),
        "huggingface": {"keys": keys, **form},
    }


def _linear(
    item: str,
    key: str,
    ends: tuple[str, str],
    there: str | Sequence[str],
    split: int | None = None,
    **form: Any,
) -> Row:
    """A linear layer: ``[in, out]``, and the other way round in a Hugging Face checkpoint."""
    return _row(item, key, ends, there, split, transposed=True, **form)


def _attention(item: str, layer: str, layer_there: str) -> list[Row]:
    """Grouped-query attention, with or without gates."""
    here, there = f"{layer}.self_attn", f"{layer_there}.self_attn"
    queries, keys = "num_attention_heads*head_dim", "num_key_value_heads*head_dim"
    spelled = [f"{there}.{name}_proj.weight" for name in "qkv"]
    rows = []
    for gates, widths in ((True, [queries, queries, keys, keys]), (False, [queries, keys, keys])):
        more = {"groups_there": "num_attention_heads"} if gates else {}
        row = _linear(
            item,
            f"{here}.qkv_proj.weight",
            (HIDDEN, " + ".join(widths)),
            [spelled[0]] * gates + spelled,
            1,
            widths=widths,
            groups="num_key_value_heads",
            **more,
        )
        rows.append({**row, "where": {"attn_output_gate": gates}})
    return [
        *rows,
        _linear(item, f"{here}.o_proj.weight", (queries, HIDDEN), f"{there}.o_proj.weight", 0),
        *(
            _row(item, f"{here}.{name}_norm.weight", ["head_dim"], f"{there}.{name}_norm.weight")
            for name in "qk"
        ),
    ]


def _linear_attention() -> list[Row]:
    """Gated delta nets: queries, keys, values, gates, beta and alpha are six parts of one projection."""
    here, there = f"{LAYER}.self_attn", f"{LAYER_THERE}.linear_attn"
    key, value = "linear_num_key_heads*linear_key_head_dim", "linear_num_value_heads*linear_value_head_dim"
    heads = "linear_num_value_heads"
    convolved = f"2*{key} + {value}"
    parts = [key, key, value, value, heads, heads]
    projection = _linear(
        "layer",
        f"{here}.in_proj.weight",
        (HIDDEN, " + ".join(parts)),
        [f"{there}.in_proj_{name}.weight" for name in ("qkv", "z", "b", "a")],
        1,
        widths=[convolved, value, heads, heads],
    )
    kernel = [convolved, "1", "linear_conv_kernel_dim"]
    convolution = _row("layer", f"{here}.conv1d.weight", kernel, f"{there}.conv1d.weight", 0)
    return [
        {**projection, "part_widths": parts},
        {**convolution, "part_widths": parts[:3]},
        *(
            _row("layer", f"{here}.{name}", [heads], f"{there}.{name}", 0, keep_float32=True)
            for name in ("dt_bias", "A_log")
        ),
        _row("layer", f"{here}.out_norm.weight", ["linear_value_head_dim"], f"{there}.norm.weight"),
        _linear("layer", f"{here}.out_proj.weight", (value, HIDDEN), f"{there}.out_proj.weight", 0),
    ]


def _gated(item: str, here: str, there: str, width: str) -> list[Row]:
    """Gate and up in one, and down."""
    both = [f"{there}.{name}_proj.weight" for name in ("gate", "up")]
    fused = _linear(
        item, f"{here}.up_gate_proj.weight", (HIDDEN, f"2*{width}"), both, 1, widths=[width, width]
    )
    down = _linear(item, f"{here}.down_proj.weight", (width, HIDDEN), f"{there}.down_proj.weight", 0)
    return [{**fused, "parts": 2}, down]


def _experts(item: str, layer: str, layer_there: str) -> list[Row]:
    """Routed experts, their router, and the shared expert.

    Those of decoder layers are stacked in both; those of multi-token prediction are one by one in both.
    """
    here, there = f"{layer}.mlp", f"{layer_there}.mlp"
    width, count = "moe_intermediate_size", "num_experts"
    stacked = {
        "weight1": ("gate_up_proj", [count, HIDDEN, f"2*{width}"]),
        "weight2": ("down_proj", [count, width, HIDDEN]),
    }
    routed = [
        _row(item, f"{here}.grouped_gemm_experts.{name}", shape, f"{there}.experts.{key}", transposed=True)
        for name, (key, shape) in stacked.items()
    ]
    if item == "mtp":
        routed = _gated(item, f"{here}.experts.{{expert}}", f"{there}.experts.{{expert}}", width)
    shared = f"{here}.shared_experts"
    return [
        _row(item, f"{here}.gate.weight", [count, HIDDEN], f"{there}.gate.weight"),
        *routed,
        *_gated(item, shared, f"{there}.shared_expert", "shared_expert_intermediate_size"),
        _linear(item, f"{shared}.gate_weight", (HIDDEN, "1"), f"{there}.shared_expert_gate.weight"),
    ]


def _norms(item: str, layer: str, layer_there: str) -> list[Row]:
    return [
        _row(item, f"{layer}.{name}.weight", [HIDDEN], f"{layer_there}.{name}.weight")
        for name in ("input_layernorm", "post_attention_layernorm")
    ]


def _mtp() -> list[Row]:
    """Multi-token prediction: a layer with full attention, and what is around it."""
    around = {"enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "norm": "norm"}
    return [
        _linear("mtp", f"{LAYER}.eh_proj.weight", (f"2*{HIDDEN}", HIDDEN), "mtp.fc.weight", 1),
        *(
            _row("mtp", f"{LAYER}.{here}.weight", [HIDDEN], f"mtp.{there}.weight")
            for here, there in around.items()
        ),
        *_norms("mtp", MTP, MTP_THERE),
        *_attention("mtp", MTP, MTP_THERE),
        *_experts("mtp", MTP, MTP_THERE),
    ]


def _with_bias(item: str, here: str, there: str, ends: tuple[str, str], **form: Any) -> list[Row]:
    """A linear layer of the vision tower."""
    spelled = [there] * len(form.get("widths", [there]))
    return [
        _linear(item, f"{here}.weight", ends, [f"{key}.weight" for key in spelled], **form),
        _row(item, f"{here}.bias", ends[1:], [f"{key}.bias" for key in spelled], **form),
    ]


def _norm(item: str, here: str, there: str, width: str) -> list[Row]:
    return [_row(item, f"{here}.{name}", [width], f"{there}.{name}") for name in ("weight", "bias")]


def _tower() -> list[Row]:
    """The vision tower."""
    inner = "vision_config.intermediate_size"
    sizes = [
        f"vision_config.{name}" for name in ("in_channels", "temporal_patch_size", "patch_size", "patch_size")
    ]
    patches = f"{TOWER_THERE}.patch_embed.proj"
    words = ["vision_config.num_position_embeddings", OF_TOWER]
    mixed = f"{TOWER}.merger.mlp"
    return [
        _row("patches", f"{TOWER}.patch_embed.weight", [OF_TOWER, *sizes], f"{patches}.weight"),
        _row("patches", f"{TOWER}.patch_embed.bias", [OF_TOWER], f"{patches}.bias"),
        _row("patches", f"{TOWER}.pos_embed.weight", words, f"{TOWER_THERE}.pos_embed.weight"),
        *_with_bias(
            "block",
            f"{BLOCK}.self_attn.qkv_proj",
            f"{BLOCK_THERE}.attn.qkv",
            (OF_TOWER, f"3*{OF_TOWER}"),
            widths=[OF_TOWER] * 3,
            groups="vision_config.num_heads",
        ),
        *_with_bias("block", f"{BLOCK}.self_attn.o_proj", f"{BLOCK_THERE}.attn.proj", (OF_TOWER, OF_TOWER)),
        *_with_bias("block", f"{BLOCK}.mlp.up_gate_proj", f"{BLOCK_THERE}.mlp.linear_fc1", (OF_TOWER, inner)),
        *_with_bias("block", f"{BLOCK}.mlp.down_proj", f"{BLOCK_THERE}.mlp.linear_fc2", (inner, OF_TOWER)),
        *_norm("block", f"{BLOCK}.input_layernorm", f"{BLOCK_THERE}.norm1", OF_TOWER),
        *_norm("block", f"{BLOCK}.post_attention_layernorm", f"{BLOCK_THERE}.norm2", OF_TOWER),
        *_norm("merger", f"{TOWER}.merger.norm", f"{TOWER_THERE}.merger.norm", OF_TOWER),
        *_with_bias("merger", f"{mixed}.up_gate_proj", f"{TOWER_THERE}.merger.linear_fc1", (MERGED, MERGED)),
        *_with_bias(
            "merger",
            f"{mixed}.down_proj",
            f"{TOWER_THERE}.merger.linear_fc2",
            (MERGED, "vision_config.out_hidden_size"),
        ),
    ]


def _rows(family: str) -> list[Row]:
    words = ["vocab_size", HIDDEN]
    head = _row("head", f"{TEXT}.lm_head.weight", words, "lm_head.weight", 0)
    embedding = f"{TEXT}.embedding.embed_tokens.weight"
    moe = family.endswith("moe")
    of_layer = "layer", LAYER, LAYER_THERE
    dense = _gated("layer", f"{LAYER}.mlp", f"{LAYER_THERE}.mlp", "intermediate_size")
    return [
        *_tower(),
        _row("embedding", embedding, words, f"{TEXT_THERE}.embed_tokens.weight", 0),
        *_attention(*of_layer),
        *_linear_attention(),
        *(_experts(*of_layer) if moe else dense),
        *_norms(*of_layer),
        _row("norm", f"{TEXT}.norm.weight", [HIDDEN], f"{TEXT_THERE}.norm.weight"),
        *(_mtp() if moe else ()),
        {**head, "tied_to": embedding},
    ]


COMMENT = (
    "Names and layouts are what the class of PaddleFormers 1.2.0 declares for PaddleFleet's model (_gen_aoa_config), "
    "executed by Paddle's engine on all tensors that transformers lists; rows by tests/lab/fleet_vision.py. No "
    "checkpoint that PaddleFleet wrote was available. What a hybrid-parallel job calls its parameters is not declared "
    "anywhere, so the formats are limited. Each tp rank has its share of the six parts of in_proj and of the three of "
    "conv1d, as the class's own operation fused_in_proj cuts them; which dims of the vision tower tp cuts is not "
    "needed. Model and tower are built without pipeline stages. Not supported: biases of attention (attention_bias)"
)
OF_EXPERTS = (
    ", experts of decoder layers that are not stacked (moe_expert_fusion off), whose statements split a wrong dim, and "
    "more than one layer of multi-token prediction: all would be made of the same mtp.fc."
)
OF_DENSE = " and layers of multi-token prediction, for which the class declares nothing in a dense model."
SOURCE = "paddleformers 1.2.0 transformers/qwen3_5/modeling.py _gen_aoa_config"


def table(family: str) -> dict[str, Any]:
    """A rule table."""
    moe = family.endswith("moe")
    more: Mapping[str, Mapping[str, Any]] = {
        "block": {"count": "vision_config.depth"},
        "layer": {"repeated": True},
        "mtp": {"mtp": True, "continues": "layer", "there": "mtp."},
    }
    items = ("patches", "block", "merger", "embedding", "layer", "norm", "mtp", "head")
    return {
        "family": family,
        "convention": "paddlefleet",
        "model_types": [family],
        "comment": COMMENT + (OF_EXPERTS if moe else OF_DENSE),
        "proven": {"files": "declarations", "huggingface": "declarations"},
        **({"experts": "num_experts", "expert_axis": "ep"} if moe else {}),
        "formats": ["flex", "huggingface"],
        "items": [{"name": name, "layer_class": "", **more.get(name, {})} for name in items],
        "rules": [{"source": SOURCE, **row} for row in _rows(family)],
    }


def tables() -> dict[Path, str]:
    """Path → text of every table."""
    from tests.rule_tables import shortened

    return {
        RULES / f"{family}.paddlefleet.json": shortened(f"{family}.paddlefleet", table(family))
        for family in FAMILIES
    }


def main(what: str, *paths: str) -> None:
    """As the module says."""
    if what == "published":
        sys.stdout.write(json.dumps(published()))
    elif what == "declare":
        source, shapes = map(Path, paths)
        DECLARED.write_text(json.dumps(declare(source, json.loads(shapes.read_text())), indent=1) + "\n")
    else:
        for path, text in tables().items():
            path.write_text(text)


if __name__ == "__main__":
    main(*sys.argv[1:])
