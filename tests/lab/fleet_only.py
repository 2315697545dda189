"""Families that only PaddleFleet trains: what their classes declare, and their rule tables.

Their classes need GPUs, so no checkpoint of them was available. ``declare`` executes the function with which a class
says how a Hugging Face checkpoint becomes its model (``_gen_aoa_config``), for small configs, and lets ``transformers``
list the keys and shapes of such a checkpoint. ``tables`` writes the rule tables from the rows below.
``tests/golden/test_fleet_only.py`` lets Paddle's own engine execute the statements on all of these tensors: every table
has to hold what comes out. ::

    pip download paddleformers==1.2.0 --no-deps -d wheel && unzip -d source wheel/*.whl
    python -m tests.lab.fleet_only declare source
    python -m tests.lab.fleet_only tables
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import safetensors

from tests.lab.fleet import CLASSES, RULES

REPO = Path(__file__).resolve().parents[2]
DECLARED = REPO / "tests" / "golden" / "fleet" / "only.json"
Row = dict[str, Any]

# ------------------------------------------------------------------------------------------------ declarations

LANGUAGE: Mapping[str, Any] = {
    "vocab_size": 48,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 24,
    "moe_intermediate_size": 10,
    "n_routed_experts": 2,
    "num_experts_per_tok": 1,
    "n_group": 1,
    "topk_group": 1,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LATENT: Mapping[str, Any] = {
    **LANGUAGE,
    "q_lora_rank": 12,
    "kv_lora_rank": 14,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 6,
    "v_head_dim": 8,
    "first_k_dense_replace": 1,
    "n_shared_experts": 2,
}
SPARSE: Mapping[str, Any] = {**LATENT, "index_n_heads": 3, "index_head_dim": 8, "index_topk": 4}
MINIMAX: Mapping[str, Any] = {
    **{
        name: value
        for name, value in LANGUAGE.items()
        if name not in ("n_routed_experts", "moe_intermediate_size")
    },
    "num_key_value_heads": 2,
    "head_dim": 6,
    "num_local_experts": 2,
    "intermediate_size": 10,
}
DENSE: Mapping[str, Any] = {
    **{name: value for name, value in LANGUAGE.items() if "expert" not in name and "group" not in name},
    "num_key_value_heads": 2,
    "head_dim": 4,
}
CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "deepseek_v32": SPARSE,
    "glm_moe_dsa": SPARSE,
    "granite": DENSE,
    "internlm3": DENSE,
    "kimi_k2": LATENT,
    "minicpm": DENSE,
    "minimax_m2": MINIMAX,
    "olmo2": DENSE,
}
"""Family → the ``config.json`` of a small model."""
OF_CLASS: Mapping[str, Mapping[str, Any]] = {
    "deepseek_v32": {"multi_latent_attention": True, "use_qk_norm": True},
    "glm_moe_dsa": {"multi_latent_attention": True, "use_qk_norm": True},
    "kimi_k2": {},
    "minimax_m2": {
        "use_qk_norm": True,
        "v_head_dim": 6,
        "num_empty_layers_add_in_head": 0,
        "mtp_num_layers": 0,
        "n_routed_experts": 2,
        "first_k_dense_replace": 0,
        "n_shared_experts": 0,
    },
}
"""Family → entries that its class sets itself."""
CLASS: Mapping[str, str] = {
    "deepseek_v32": "DeepseekV32PreTrainedModel",
    "glm_moe_dsa": "GlmMoeDsaPreTrainedModel",
    "kimi_k2": "KimiK2PretrainedModel",
    "minimax_m2": "MiniMaxM2PreTrainedModel",
}
"""Family → the class that declares its map."""
PUBLISHED_AS: Mapping[str, str] = {"kimi_k2": "deepseek_v3", "minicpm": "llama"}
"""Family → the model type whose class has the tensors of its published models, if ``transformers`` 5.23 has none of its
own; its development version derives the class of minicpm from that of llama."""
VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "plain": {},
    "tied": {"tie_word_embeddings": True},
    "bias": {"attention_bias": True, "mlp_bias": True},
    "grouped": {"moe_expert_fusion": True},
    "mtp": {"num_nextn_predict_layers": 1},
    "mtp_grouped": {"num_nextn_predict_layers": 1, "moe_expert_fusion": True},
}
OF_FAMILY: Mapping[str, Sequence[str]] = {
    "deepseek_v32": ("plain", "mtp_grouped"),
    "glm_moe_dsa": ("plain", "tied", "mtp", "mtp_grouped"),
    "granite": ("plain", "tied", "bias"),
    "internlm3": ("plain", "tied"),
    "kimi_k2": ("plain", "grouped"),
    "minicpm": ("plain", "tied"),
    "minimax_m2": ("tied", "grouped", "mtp"),
    "olmo2": ("plain", "tied"),
}
"""Family → variants that change something."""


class _Read(NamedTuple):
    """What the class of a dense model in PaddleFleet's sources says: every tensor keeps its key."""

    commit: str
    folder: str
    norms: tuple[str, ...]
    """Of a decoder layer."""
    biases: bool = False
    """Whether linear layers can have biases."""
    fuses: bool = False
    """Whether entries of the config can make projections one tensor, which has no row."""

    def statements(self, config: Mapping[str, Any]) -> list[str]:
        """Its statements for a config."""
        layer = "model.layers.$LAYER_ID"
        same = [
            "model.embed_tokens.weight",
            "model.norm.weight",
            *(f"{layer}.{n}.weight" for n in self.norms),
        ]
        linear = {**ATTENTION, **MLP}
        turned = [f"{layer}.{name}.weight" for name in linear]
        if self.biases:
            same += [f"{layer}.{name}.bias" for name, entry in linear.items() if config.get(entry)]
        head = "model.embed_tokens" if config["tie_word_embeddings"] else "lm_head"
        return [
            *(f"{key} -> {key}" for key in same),
            *(f"{key}^T -> {key}" for key in turned),
            f"{head}.weight -> lm_head.weight",
        ]


ATTENTION = {f"self_attn.{name}_proj": "attention_bias" for name in "qkvo"}
MLP = {f"mlp.{name}_proj": "mlp_bias" for name in ("gate", "up", "down")}
"""Linear layer → entry of the config by which it has a bias."""
BEFORE = ("input_layernorm", "post_attention_layernorm")
READ: Mapping[str, _Read] = {
    "granite": _Read("c6968bc", "granite", BEFORE, biases=True),
    "internlm3": _Read("24cabce", "intern_lm3", BEFORE),
    "minicpm": _Read("24cabce", "minicpm", BEFORE, fuses=True),
    "olmo2": _Read(
        "73b56bc",
        "olmo2",
        ("post_attention_layernorm", "post_feedforward_layernorm", "self_attn.q_norm", "self_attn.k_norm"),
    ),
}
"""Families that came after PaddleFormers 1.2.0: their classes could be read in PaddleFleet's sources, and not
executed."""


def declare(source: Path) -> dict[str, Any]:
    """Family → config, keys and shapes in ``transformers``, and variant → statements."""
    from tests.lab.declarations import statements

    def declared(family: str, variant: str) -> list[str]:
        if family in READ:
            return READ[family].statements({**CONFIGS[family], **VARIANTS[variant]})
        path = source / "paddleformers" / "transformers" / family / "modeling.py"
        config = {"num_nextn_predict_layers": 0, **CONFIGS[family], **OF_CLASS[family], **VARIANTS[variant]}
        return statements(path, CLASS[family], CLASS[family], config)

    (installed,) = source.glob("paddleformers-*.dist-info")
    return {
        "package": installed.name.removesuffix(".dist-info"),
        "families": {
            family: {
                "config": {"model_type": family, **config},
                "published": _published(PUBLISHED_AS.get(family, family), config),
                **_with_biases(family, config),
                "statements": {variant: declared(family, variant) for variant in OF_FAMILY[family]},
            }
            for family, config in CONFIGS.items()
        },
    }


def _with_biases(family: str, config: Mapping[str, Any]) -> dict[str, dict[str, list[int]]]:
    if "bias" not in OF_FAMILY[family]:
        return {}
    return {"published_with_biases": _published(family, {**config, **VARIANTS["bias"]})}


def _published(model_type: str, config: Mapping[str, Any]) -> dict[str, list[int]]:
    """Key → shape, as ``transformers`` saves such a model."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    from transformers import AutoConfig, AutoModelForCausalLM

    with tempfile.TemporaryDirectory() as folder:
        AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **config)).save_pretrained(folder)
        entries = safetensors.deserialize((Path(folder) / "model.safetensors").read_bytes())
    return {key: list(entry["shape"]) for key, entry in sorted(entries)}


# ----------------------------------------------------------------------------------------------------- tables

LAYER = "model.layers.{layer}"


def _row(item: str, key: str, form: Mapping[str, Any], shape: Sequence[str], split: int | None = None) -> Row:
    cut = {} if split is None else {"split": split}
    return {
        "key": key,
        "item": item,
        "name_class": "",
        **cut,
        "shape": list(shape),
        "huggingface": dict(form),
    }


def _as_it_is(item: str, key: str, shape: Sequence[str], there: str | None = None, **form: Any) -> Row:
    """A tensor that is the same in both."""
    return _row(item, key, {"keys": [there or key], **form}, shape)


def _linear(
    item: str, key: str, ends: tuple[str, str], split: int | None = None, there: str | None = None
) -> Row:
    """A linear layer: ``[in, out]``, and the other way round in a Hugging Face checkpoint."""
    return _row(item, key, {"keys": [there or key], "transposed": True}, ends, split)


def _fused(item: str, key: str, keys: Sequence[str], inner: str, width: str, stacked: str = "") -> Row:
    """Gate and up in one, or such tensors of all experts one after the other."""
    form: dict[str, Any] = {"keys": list(keys), "transposed": True, "widths": [width, width]}
    if stacked:
        return _row(item, key, {**form, "stacked": stacked}, [f"{stacked}*{inner}", f"2*{width}"])
    return {**_row(item, key, form, [inner, f"2*{width}"], 1), "parts": 2}


def _ends(of_mtp: bool) -> tuple[list[Row], list[Row]]:
    """What is before and after the layers."""
    words = ["vocab_size", "hidden_size"]
    before = [
        {
            **_as_it_is(
                "embedding", "model.embedding.embed_tokens.weight", words, "model.embed_tokens.weight"
            ),
            "split": 0,
        }
    ]
    head = {**_as_it_is("head", "model.lm_head.weight", words, "lm_head.weight"), "split": 0}
    return before, [
        _as_it_is("norm", "model.norm.weight", ["hidden_size"]),
        *(_mtp() if of_mtp else ()),
        head,
    ]


def _tied(rows: Iterable[Row]) -> list[Row]:
    """The rows of a family that can tie the head to the word embedding."""
    found = list(rows)
    head = found.pop()
    twin = {**head, "tied_to": "model.embedding.embed_tokens.weight"}
    last = {**twin, "key": "model.shared_head.weight", "where": {"tie_word_embeddings": True}, "source": TWIN}
    del last["huggingface"]
    return [*found, twin, last]


TWIN = "paddlefleet 0031070 models/gpt/gpt_model.py get_layer_desc_list: the head in the last stage"


def _mtp() -> list[Row]:
    return [
        _linear("mtp", f"{LAYER}.eh_proj.weight", ("2*hidden_size", "hidden_size"), 1),
        _as_it_is("mtp", f"{LAYER}.enorm.weight", ["hidden_size"]),
        _as_it_is("mtp", f"{LAYER}.hnorm.weight", ["hidden_size"]),
        _as_it_is("mtp", f"{LAYER}.norm.weight", ["hidden_size"], f"{LAYER}.shared_head.norm.weight"),
    ]


def _norms() -> list[Row]:
    return [
        _as_it_is("layer", f"{LAYER}.{name}.weight", ["hidden_size"])
        for name in ("input_layernorm", "post_attention_layernorm")
    ]


def _latent() -> list[Row]:
    """Multi-head latent attention."""
    at = f"{LAYER}.self_attn"
    heads = "num_attention_heads"
    query = f"{heads}*qk_nope_head_dim + {heads}*qk_rope_head_dim"
    values = f"{heads}*qk_nope_head_dim + {heads}*v_head_dim"
    return [
        _linear("layer", f"{at}.q_a_proj.weight", ("hidden_size", "q_lora_rank")),
        _as_it_is("layer", f"{at}.q_a_layernorm.weight", ["q_lora_rank"]),
        _linear("layer", f"{at}.q_b_proj.weight", ("q_lora_rank", query), 1),
        _linear(
            "layer", f"{at}.kv_a_proj_with_mqa.weight", ("hidden_size", "kv_lora_rank + qk_rope_head_dim")
        ),
        _as_it_is("layer", f"{at}.kv_a_layernorm.weight", ["kv_lora_rank"]),
        _linear("layer", f"{at}.kv_b_proj.weight", ("kv_lora_rank", values), 1),
        _linear("layer", f"{at}.o_proj.weight", (f"{heads}*v_head_dim", "hidden_size"), 0),
    ]


def _indexer() -> list[Row]:
    """What selects the tokens that sparse attention attends to."""
    here, there = f"{LAYER}.self_attn.core_attention.indexer", f"{LAYER}.self_attn.indexer"
    linear = {
        "wq_b": ("q_lora_rank", "index_n_heads*index_head_dim"),
        "wk": ("hidden_size", "index_head_dim"),
        "weights_proj": ("hidden_size", "index_n_heads"),
    }
    return [
        *(
            _linear("layer", f"{here}.{name}.weight", ends, there=f"{there}.{name}.weight")
            for name, ends in linear.items()
        ),
        *(
            _as_it_is("layer", f"{here}.k_norm.{name}", ["index_head_dim"], f"{there}.k_norm.{name}")
            for name in ("weight", "bias")
        ),
    ]


def _dense() -> list[Row]:
    at = f"{LAYER}.mlp"
    keys = [f"{at}.{name}.weight" for name in ("gate_proj", "up_proj")]
    return [
        _fused("layer", f"{at}.up_gate_proj.weight", keys, "hidden_size", "intermediate_size"),
        _linear("layer", f"{at}.down_proj.weight", ("intermediate_size", "hidden_size"), 0),
    ]


GATE_UP_DOWN = ("gate_proj", "up_proj", "down_proj")


def _experts(there: str = f"{LAYER}.mlp", names: Sequence[str] = GATE_UP_DOWN) -> list[Row]:
    """Routed experts, one by one or grouped, and their router."""
    at, width, count = f"{LAYER}.mlp", "moe_intermediate_size", "n_routed_experts"
    *both, down = (f"{there}.experts.{{expert}}.{name}.weight" for name in names)
    of_expert = f"{at}.experts.{{expert}}"
    bias = f"{there}.gate.e_score_correction_bias".replace(
        *(("", "") if there == at else (".gate.e_", ".e_"))
    )
    grouped = _row(
        "layer",
        f"{at}.grouped_gemm_experts.weight2",
        {"keys": [down], "transposed": True, "stacked": count},
        [f"{count}*{width}", "hidden_size"],
    )
    return [
        _fused("layer", f"{of_expert}.up_gate_proj.weight", both, "hidden_size", width),
        _fused("layer", f"{at}.grouped_gemm_experts.weight1", both, "hidden_size", width, count),
        _linear("layer", f"{of_expert}.down_proj.weight", (width, "hidden_size"), 0, down),
        grouped,
        _as_it_is("layer", f"{at}.gate.weight", [count, "hidden_size"], f"{there}.gate.weight"),
        _as_it_is("layer", f"{at}.gate.e_score_correction_bias", [count], bias, keep_float32=True),
    ]


def _shared() -> list[Row]:
    at, width = f"{LAYER}.mlp.shared_experts", "n_shared_experts*moe_intermediate_size"
    keys = [f"{at}.{name}.weight" for name in ("gate_proj", "up_proj")]
    return [
        _fused("layer", f"{at}.up_gate_proj.weight", keys, "hidden_size", width),
        _linear("layer", f"{at}.down_proj.weight", (width, "hidden_size"), 0),
    ]


def _grouped_query() -> list[Row]:
    """Grouped-query attention with norms over all heads of a layer."""
    at = f"{LAYER}.self_attn"
    widths = [f"{heads}*head_dim" for heads in ("num_attention_heads", *("num_key_value_heads",) * 2)]
    form = {
        "keys": [f"{at}.{name}_proj.weight" for name in "qkv"],
        "transposed": True,
        "widths": widths,
        "groups": "num_key_value_heads",
    }
    return [
        _row("layer", f"{at}.qkv_proj.weight", form, ["hidden_size", " + ".join(widths)], 1),
        _linear("layer", f"{at}.o_proj.weight", (widths[0], "hidden_size"), 0),
        _as_it_is("layer", f"{at}.q_norm.weight", widths[:1]),
        _as_it_is("layer", f"{at}.k_norm.weight", widths[1:2]),
    ]


def _dense_model(read: _Read) -> list[Row]:
    """A dense model whose tensors keep their keys, with linear layers turned."""
    heads = {"q": "num_attention_heads", "k": "num_key_value_heads", "v": "num_key_value_heads"}
    queries, words = "num_attention_heads*head_dim", ["vocab_size", "hidden_size"]
    ends: dict[str, tuple[str, str]] = {
        **{f"self_attn.{n}_proj": ("hidden_size", f"{count}*head_dim") for n, count in heads.items()},
        "self_attn.o_proj": (queries, "hidden_size"),
        **{f"mlp.{n}_proj": ("hidden_size", "intermediate_size") for n in ("gate", "up")},
        "mlp.down_proj": ("intermediate_size", "hidden_size"),
    }
    norms = {"self_attn.q_norm": queries, "self_attn.k_norm": "num_key_value_heads*head_dim"}
    rows = [{**_as_it_is("embedding", "model.embed_tokens.weight", words), "split": 0}]
    for name, of_layer in ends.items():
        by_rows = name.endswith(("o_proj", "down_proj"))
        fuse = f"fuse_attention_{'ffn' if name in MLP else 'qkv'}"
        where = {"where": {fuse: False}} if read.fuses and not by_rows else {}
        rows.append({**_linear("layer", f"{LAYER}.{name}.weight", of_layer, 0 if by_rows else 1), **where})
        if read.biases:
            bias = _as_it_is("layer", f"{LAYER}.{name}.bias", of_layer[1:])
            rows.append(bias if by_rows else {**bias, "split": 0})
    for name in read.norms:
        rows.append(_as_it_is("layer", f"{LAYER}.{name}.weight", [norms.get(name, "hidden_size")]))
    head = {**_as_it_is("head", "lm_head.weight", words), "split": 0, "tied_to": "model.embed_tokens.weight"}
    return [*rows, _as_it_is("norm", "model.norm.weight", ["hidden_size"]), head]


def _rows(family: str) -> list[Row]:
    if family in READ:
        return _dense_model(READ[family])
    if family == "minimax_m2":
        before, after = _ends(of_mtp=True)
        experts = _experts(f"{LAYER}.block_sparse_moe", ("w1", "w3", "w2"))
        return _tied([*before, *_grouped_query(), *experts, *_norms(), *after])
    sparse = family in ("deepseek_v32", "glm_moe_dsa")
    before, after = _ends(of_mtp=sparse)
    attention = [*_latent(), *(_indexer() if sparse else ())]
    rows = [*before, *attention, *_dense(), *_experts(), *_shared(), *_norms(), *after]
    return _tied(rows) if sparse else rows


SAID = (
    "Names and layouts are what the class of PaddleFormers 1.2.0 declares for PaddleFleet's model (_gen_aoa_config), "
    "executed by Paddle's engine on all tensors that transformers lists; rows by tests/lab/fleet_only.py. No "
    "checkpoint that PaddleFleet wrote was available. What a hybrid-parallel job calls its parameters is not declared "
    "anywhere, so the formats are limited. Grouped experts (moe_expert_fusion) are written with two dims, and read "
    "with two or three. "
)
TURNED = (
    "The library's own export (_gen_inv_aoa_config) leaves experts transposed or under names that nothing reads; "
    "exports here undo the way in. All layers have an indexer."
)
MORE: Mapping[str, str] = {
    "deepseek_v32": TURNED,
    "glm_moe_dsa": TURNED,
    "kimi_k2": "Keys of the published model are those of deepseek_v3. Multi-token prediction and tied words are not "
    "declared. The library's statements know one dense layer; the rows know any number (first_k_dense_replace).",
    "minicpm": " Keys of published models are those of llama. Without tie_word_embeddings in config.json, the head is "
    "read as a tensor of its own. Fused projections (fuse_attention_qkv, fuse_attention_ffn) and biases (use_bias) "
    "have no rows.",
    "minimax_m2": "Norms of queries and keys are over all heads (qk_norm_type per_layer). Gated, latent and hybrid "
    "attention, latent experts and shared experts, which PaddleFleet can add to the published model, have no rows.",
}
READ_ONLY = (
    "Names and layouts are what PaddleFleet's class declares (_gen_aoa_config), read in its sources and executed by "
    "Paddle's engine on all tensors that transformers lists; rows by tests/lab/fleet_only.py. The family came after "
    "PaddleFormers 1.2.0, and no checkpoint was available. What a hybrid-parallel job calls its parameters is not "
    "declared anywhere, so the formats are limited."
)
_MTP_ITEM = {"mtp": True, "continues": "layer", "inner": "transformer_layer"}
EAGER_CLASSES = {
    "embedding": "EmbeddingPipe",
    "layer": "DecoderLayerPipe",
    "norm": "RMSNormPipe",
    "head": "LMHeadPipe",
}
"""Pipeline items of ``nn/pp_model.py``."""


def table(family: str) -> dict[str, Any]:
    """A rule table."""
    rows, read = _rows(family), READ.get(family)
    held = {row["item"] for row in rows}
    more: Mapping[str, Mapping[str, Any]] = {"layer": {"repeated": True}, "mtp": _MTP_ITEM}
    source = f"paddleformers 1.2.0 transformers/{family}/modeling.py _gen_aoa_config"
    if read is not None:
        source = f"paddlefleet {read.commit} transformers/{read.folder}/modeling.py"
    experts = {"experts": "n_routed_experts", "expert_axis": "ep"}
    return {
        "family": family,
        "convention": "paddlefleet",
        "model_types": [family],
        "comment": SAID + MORE[family] if read is None else READ_ONLY + MORE.get(family, ""),
        "proven": {"files": "declarations", "huggingface": "declarations"},
        **(experts if read is None else {}),
        "formats": ["flex", "huggingface"],
        **({"shifted_by": "num_empty_layers_add_in_head"} if read is None else {}),
        "items": [
            {"name": name, "layer_class": layer_class, **more.get(name, {})}
            for name, layer_class in (CLASSES if read is None else EAGER_CLASSES).items()
            if name in held
        ],
        "rules": [{"source": source, **row} for row in rows],
    }


def tables() -> dict[Path, str]:
    """Path → text of every table."""
    from tests.rule_tables import shortened

    return {
        RULES / f"{family}.paddlefleet.json": shortened(f"{family}.paddlefleet", table(family))
        for family in CONFIGS
    }


if __name__ == "__main__":
    if sys.argv[1] == "declare":
        DECLARED.write_text(json.dumps(declare(Path(sys.argv[2])), indent=1) + "\n")
    else:
        for path, text in tables().items():
            path.write_text(text)
