"""What PaddleFleet's model classes declare of their names: ``tests/golden/fleet``.

The classes need GPUs, and no checkpoint that they wrote was available. This executes the function with which each says
how a Hugging Face checkpoint becomes its model (``_gen_aoa_config``), for small configs; ``published`` in the files is
what ``transformers`` builds of the same config. Tests let Paddle's own engine execute the statements on all of these
tensors, and hold the rule tables to what it makes. ::

    pip download paddleformers==1.2.0 --no-deps -d wheel && unzip -d source wheel/*.whl
    python -m tests.lab.fleet source

A further family of ``only.json`` or ``vision.json`` needs its entry there, with ``config`` and names of variants in
``statements``; what it lacks of ``published`` is listed where ``transformers`` and ``torch`` are installed.
"""

from __future__ import annotations
import __future__

import ast
import json
import math
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from tests.conftest import case_directory

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "fleet"
DECLARED, ONLY, VISION = (GOLDEN / f"{name}.json" for name in ("declared", "only", "vision"))
"""Of families that train without PaddleFleet, too; of those that only it trains; and of those with a vision tower."""
OF_ERNIE = GOLDEN.with_name("ernie4_5_moe_vl.json")

# -------------------------------------------------------------------------------------------- what a class declares


class Entries(dict[str, Any]):
    """A section of a config. An entry that is not written has no value, as in the library's classes."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = self.get(name)
        return Entries(value) if isinstance(value, dict) else value


def attributes(tree: ast.Module, name: str) -> dict[str, Any]:
    """Class attributes that are plain values, those of its bases in the same file included."""
    (node,) = (n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == name)
    found: dict[str, Any] = {
        "base_model_prefix": "",
        "base_model_class": None,
        "_checkpoint_conversion_mapping": {},
        "_tied_weights_keys": None,
    }
    names = {n.name for n in tree.body if isinstance(n, ast.ClassDef)}
    for base in node.bases:
        if isinstance(base, ast.Name) and base.id in names:
            found |= attributes(tree, base.id)
    for statement in node.body:
        if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
            try:
                found[statement.targets[0].id] = ast.literal_eval(statement.value)
            except ValueError:  # of the library
                continue
    return found


def statements(
    path: Path, of: str, model: str, config: dict[str, Any], method: str = "_gen_aoa_config"
) -> list[str]:
    """What a class method returns as statements; ``of`` is its class, and ``model`` the one that is asked."""
    tree = ast.parse(path.read_text("utf-8"))
    plain = attributes(tree, of) | attributes(tree, model)
    (node,) = (n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == of)
    node.bases, node.keywords = [], []
    node.body = [n for n in node.body if isinstance(n, ast.FunctionDef) and is_plain(n)]
    space = {"logger": Silent(), "math": math, "is_layer_window_attention": has_window, **helpers(path)}
    flags = __future__.annotations.compiler_flag  # so that none is evaluated
    exec(compile(ast.Module([node], []), str(path), "exec", flags), space)
    cls = type(model, (space[of],), plain)
    found: list[str] = getattr(cls, method)(Entries(config))["aoa_statements"]
    return found


def is_plain(method: ast.FunctionDef) -> bool:
    """Whether a method needs nothing of the library to be defined."""
    return {ast.unparse(decorator) for decorator in method.decorator_list} <= {"classmethod", "staticmethod"}


def helpers(path: Path) -> dict[str, Any]:
    """What the maps of newer classes are built with, which needs nothing but Python."""
    source = next(p for p in path.parents if p.name == "transformers") / "aoa_config_base.py"
    module = ModuleType(source.stem)
    sys.modules[source.stem] = module  # dataclasses look their module up
    exec(compile(source.read_text("utf-8"), str(source), "exec"), module.__dict__)
    return {name: value for name, value in vars(module).items() if not name.startswith("__")}


def has_window(window: Any, *_: Any) -> bool:
    """PaddleFleet's ``is_layer_window_attention`` for configs that choose no layers."""
    return window is not None


class Silent:
    """A logger."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None


# ------------------------------------------------------------------------------ families that train without it, too

INVERSE = "_gen_inv_aoa_config"
CLASSES = {
    "qwen2": ("Qwen2PretrainedModel", "Qwen2ForCausalLM"),
    "qwen3": ("Qwen3PretrainedModel", "Qwen3ForCausalLM"),
    "qwen2_moe": ("Qwen2MoePretrainedModel", "Qwen2MoeForCausalLM"),
    "qwen3_moe": ("Qwen3MoePretrainedModel", "Qwen3MoeForCausalLM"),
    "glm4_moe": ("Glm4MoePreTrainedModel", "Glm4MoeForCausalLM"),
}
"""Family → the class that declares, and PaddleFleet's."""
SMALL: Mapping[str, Any] = {
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 16,
    "attention_bias": False,
    "qkv_bias": True,
    "use_qk_norm": True,
    "tie_word_embeddings": False,
    "using_sonic_moe": False,
    "moe_expert_fusion": False,
    "first_k_dense_replace": 1,
    "mtp_num_layers": 0,
    "num_nextn_predict_layers": 0,
    "num_empty_layers_add_in_head": 0,
    "n_routed_experts": 4,
}
LAYERS = {"glm4_moe": 3}
"""Decoder layers where they are not two: the configs are those of the real checkpoints in ``tests/corpus``."""
VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "plain": {},
    "bias": {"attention_bias": True},
    "tied": {"tie_word_embeddings": True},
    "grouped": {"moe_expert_fusion": True},
    "mtp": {"num_nextn_predict_layers": 1},
    "mtp_grouped": {"num_nextn_predict_layers": 1, "moe_expert_fusion": True},
    "shifted": {"num_empty_layers_add_in_head": 2, "num_nextn_predict_layers": 1},
}


def declared(source: Path, known: dict[str, Any]) -> None:
    """Renew family → variant → statements."""
    for family, (of, model) in CLASSES.items():
        layers = LAYERS.get(family, SMALL["num_hidden_layers"])
        path, config = _modeling(source, family), {**SMALL, "num_hidden_layers": layers}
        for variant in known["families"][family]:
            known["families"][family][variant] = statements(path, of, model, {**config, **VARIANTS[variant]})


# ------------------------------------------------------------------------------------ families that only it trains

OF_CLASS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "deepseek_v32": ("DeepseekV32PreTrainedModel", {"multi_latent_attention": True, "use_qk_norm": True}),
    "glm_moe_dsa": ("GlmMoeDsaPreTrainedModel", {"multi_latent_attention": True, "use_qk_norm": True}),
    "kimi_k2": ("KimiK2PretrainedModel", {}),
    "minimax_m2": (
        "MiniMaxM2PreTrainedModel",
        {
            "use_qk_norm": True,
            "v_head_dim": 6,
            "num_empty_layers_add_in_head": 0,
            "mtp_num_layers": 0,
            "n_routed_experts": 2,
            "first_k_dense_replace": 0,
            "n_shared_experts": 0,
        },
    ),
}
"""Family → the class that declares, and entries that it sets itself."""
PUBLISHED_AS: Mapping[str, str] = {"kimi_k2": "deepseek_v3", "minicpm": "llama"}
"""Family → the model type whose class has the tensors of its published models, if ``transformers`` 5.23 has none of its
own; its development version derives the class of minicpm from that of llama."""
OF_BIASES = {"attention_bias": True, "mlp_bias": True}
ONLY_VARIANTS: Mapping[str, Mapping[str, Any]] = {**VARIANTS, "bias": OF_BIASES}


class Read(NamedTuple):
    """What the class of a dense model in PaddleFleet's sources says: every tensor keeps its key."""

    source: str
    norms: tuple[str, ...]
    """Of a decoder layer."""

    def statements(self, config: Mapping[str, Any]) -> list[str]:
        """Its statements for a config."""
        layer = "model.layers.$LAYER_ID"
        same = ["model.embed_tokens.weight", "model.norm.weight"]
        same += [f"{layer}.{name}.weight" for name in self.norms]
        same += [f"{layer}.{name}.bias" for name, entry in LINEAR.items() if config.get(entry)]
        head = "model.embed_tokens" if config["tie_word_embeddings"] else "lm_head"
        return [
            *(f"{key} -> {key}" for key in same),
            *(f"{layer}.{name}.weight^T -> {layer}.{name}.weight" for name in LINEAR),
            f"{head}.weight -> lm_head.weight",
        ]


LINEAR = {f"self_attn.{name}_proj": "attention_bias" for name in "qkvo"}
LINEAR |= {f"mlp.{name}_proj": "mlp_bias" for name in ("gate", "up", "down")}
"""Linear layer → entry of the config by which it has a bias."""
BEFORE = ("input_layernorm", "post_attention_layernorm")
AFTER = ("post_attention_layernorm", "post_feedforward_layernorm", "self_attn.q_norm", "self_attn.k_norm")
READ: Mapping[str, Read] = {
    "granite": Read("c6968bc transformers/granite/modeling.py", BEFORE),
    "internlm3": Read("24cabce transformers/intern_lm3/modeling.py", BEFORE),
    "minicpm": Read("24cabce transformers/minicpm/modeling.py", BEFORE),
    "olmo2": Read("73b56bc transformers/olmo2/modeling.py", AFTER),
}
"""Families that came after PaddleFormers 1.2.0: their classes could be read in PaddleFleet's sources, and not
executed."""


def only(source: Path, known: dict[str, Any]) -> None:
    """Renew variant → statements of every family, and what ``transformers`` lists where it is not there."""
    for family, found in known["families"].items():
        for variant in found["statements"]:
            config = {**found["config"], **ONLY_VARIANTS[variant]}
            if family in READ:
                found["statements"][variant] = READ[family].statements(config)
            else:
                of, entries = OF_CLASS[family]
                config = {"num_nextn_predict_layers": 0, **config, **entries, **ONLY_VARIANTS[variant]}
                found["statements"][variant] = statements(_modeling(source, family), of, of, config)
        config = {**found["config"], "model_type": PUBLISHED_AS.get(family, family)}
        if "published" not in found:
            found["published"] = published(config)
        if "bias" in found["statements"] and "published_with_biases" not in found:
            found["published_with_biases"] = published({**config, **OF_BIASES})


def published(config: Mapping[str, Any]) -> dict[str, list[int]]:
    """Key → shape, as ``transformers`` saves such a model."""
    from tests.lab.transformers_keys import written_by_transformers

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        return written_by_transformers(Path(folder), Path(folder) / "saved")


# ---------------------------------------------------------------------------------------------- with a vision tower

MACRO = "fused_in_proj"
"""The operation that the class of Qwen3.5 adds to Paddle's statements for the projections of linear attention."""
VISION_VARIANTS: Mapping[str, tuple[Mapping[str, Any], int]] = {
    "plain": ({}, 1),
    "tied": ({"tie_word_embeddings": True}, 1),
    "mtp": ({"mtp_num_hidden_layers": 1}, 1),
    "tp2": ({}, 2),
}
"""Variant → entries that differ, and the number of tp ranks."""


def vision_config(config: Mapping[str, Any], variant: str) -> dict[str, Any]:
    """The ``config.json`` of a variant: further entries are in the section that has such entries."""
    made = {name: dict(value) if name == "text_config" else value for name, value in config.items()}
    for name, value in VISION_VARIANTS[variant][0].items():
        (made if name in made else made["text_config"])[name] = value
    return made


def vision(source: Path, known: dict[str, Any]) -> None:
    """Renew variant → statements that Paddle's engine knows."""
    path, name = _modeling(source, "qwen3_5"), "Qwen3_5ForConditionalGeneration"
    for found in known["families"].values():
        for variant in found["statements"]:
            config = vision_config(found["config"], variant) | {
                "moe_expert_fusion": True
            }  # the class sets it itself
            config["text_config"] = {"mtp_num_hidden_layers": 0, **config["text_config"]}
            declared, tp = statements(path, name, name, config), VISION_VARIANTS[variant][1]
            found["statements"][variant] = [one for text in declared for one in _expanded(path, text, tp)]


class _Job:
    """What a macro of the library asks Paddle's engine for: the number of shards of a tensor."""

    def __init__(self, shards: int) -> None:
        self.shards = shards

    def get_dst_state_shard_num(self, key: str) -> int:
        """The same for all."""
        return self.shards


def _expanded(path: Path, statement: str, tp: int) -> list[str]:
    """A statement in operations of Paddle's engine, with the macro that the class registers executed."""
    from paddle.distributed.flex_checkpoint.aoa.lexer import Lexer
    from paddle.distributed.flex_checkpoint.aoa.macros import macro_registry

    if not any(macro["name"] == MACRO for macro in macro_registry.macros):
        registering = f"_register_{MACRO}_macro"
        body = ast.parse(path.read_text("utf-8")).body
        (function,) = (one for one in body if isinstance(one, ast.FunctionDef) and one.name == registering)
        space: dict[str, Any] = {}
        exec(compile(ast.Module([function], []), str(path), "exec"), space)
        space[registering]()
    (macro,) = (macro for macro in macro_registry.macros if macro["name"] == MACRO)
    made = macro["func"](Lexer(None).tokenize(statement), statement, _Job(tp))
    return [made] if isinstance(made, str) else list(made)


def _modeling(source: Path, family: str) -> Path:
    return source / "paddleformers" / "transformers" / family / "modeling.py"


# ------------------------------------------------------------------- PaddleFormers' own class that tests/facts lack


def of_ernie(source: Path, known: dict[str, Any]) -> None:
    """Renew both maps of the class of images that imports nothing without CUDA."""
    name = "Ernie4_5_VLMoeForConditionalGeneration"
    path = source / "paddleformers/transformers/ernie4_5_moe_vl/model/modeling_moe_vl.py"
    config = min(case_directory(known["case"]).glob("*/config.json"))
    for key, method in {"statements": "_gen_aoa_config", "inverse": INVERSE}.items():
        known[key] = statements(path, name, name, json.loads(config.read_text()), method)


RENEWED: Mapping[Path, Callable[[Path, dict[str, Any]], None]] = {
    DECLARED: declared,
    ONLY: only,
    VISION: vision,
    OF_ERNIE: of_ernie,
}


def main(source: Path) -> None:
    """Write all files anew."""
    (installed,) = source.glob("paddleformers-*.dist-info")
    for path, renew in RENEWED.items():
        known = json.loads(path.read_text())
        renew(source, known)
        known["package"] = installed.name.removesuffix(".dist-info")
        path.write_text(json.dumps(known, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
