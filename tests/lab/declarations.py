"""What PaddleFormers' own maps say of Hugging Face keys: ``_gen_aoa_config`` of each family, executed alone.

The functions are class methods that only make texts out of a config, so they are taken out of the source files and
executed; nothing of the library is imported::

    pip download paddleformers==1.2.0 --no-deps -d wheel && unzip -d source wheel/*.whl
    python -m tests.lab.declarations source tests/golden/declarations.json tests/aoa/programs
"""

from __future__ import annotations
import __future__

import ast
import json
import math
import re
import sys
from itertools import chain
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from paddle_reshard.pipeline.changes.aoa.apply import apply_aoa
from paddle_reshard.pipeline.changes.aoa.language import parse_aoa
from tests.aoa.arrays import stored, trained
from tests.conftest import case_directory

VECTOR = re.compile(r"norm|bias|alpha|base|scale|sink|ape|tid2eid")

FAMILIES = {
    "deepseek_v3": ("DeepseekV3PretrainedModel", "DeepseekV3ForCausalLM", "exports/deepseek_v3_yarn"),
    "ernie4_5": ("Ernie4_5PretrainedModel", "Ernie4_5ForCausalLM", "families/ernie4_5_single"),
    "ernie4_5_moe": ("Ernie4_5_MoePretrainedModel", "Ernie4_5_MoeForCausalLM", "exports/ernie4_5_moe"),
    "gemma3_text": ("Gemma3PreTrainedModel", "Gemma3ForCausalLM", "families/gemma3_text_single"),
    "glm4_moe": ("Glm4MoePreTrainedModel", "Glm4MoeForCausalLMDeprecated", "exports/glm4_moe"),
    "glm4v_moe": ("Glm4vMoePreTrainedModel", "Glm4vMoeForConditionalGeneration", "families/glm4v_moe_single"),
    "glm_ocr": ("GlmOcrPreTrainedModel", "GlmOcrForConditionalGeneration", "families/glm_ocr_single"),
    "gpt_oss": ("GptOssPreTrainedModel", "GptOssForCausalLM", "exports/gpt_oss"),
    "llama": ("LlamaPretrainedModel", "LlamaForCausalLM", "exports/llama"),
    "paddleocr_vl": (
        "Ernie4_5PretrainedModel",
        "PaddleOCRVLForConditionalGeneration",
        "families/paddleocr_vl_single",
    ),
    "phi3": ("Phi3PreTrainedModel", "Phi3ForCausalLM", "families/phi3_single"),
    "qwen2": ("Qwen2PretrainedModel", "Qwen2ForCausalLMDeprecated", "families/qwen2_single"),
    "qwen2_5_vl": (
        "Qwen2_5_VLPretrainedModel",
        "Qwen2_5_VLForConditionalGeneration",
        "families/qwen2_5_vl_single",
    ),
    "qwen2_moe": ("Qwen2MoePretrainedModel", "Qwen2MoeForCausalLMDeprecated", "exports/qwen2_moe"),
    "qwen3": ("Qwen3PretrainedModel", "Qwen3ForCausalLMDeprecated", "families/qwen3_single"),
    "qwen3_moe": ("Qwen3MoePretrainedModel", "Qwen3MoeForCausalLMDeprecated", "exports/qwen3_moe"),
    "qwen3_next": ("Qwen3NextPretrainedModel", "Qwen3NextForCausalLM", "families/qwen3_next_single"),
    "qwen3_vl": (
        "Qwen3VLPretrainedModel",
        "Qwen3VLForConditionalGenerationDeprecated",
        "families/qwen3_vl_single",
    ),
    "qwen3_vl_moe": (
        "Qwen3VLMoePretrainedModel",
        "Qwen3VLMoeForConditionalGenerationDeprecated",
        "families/qwen3_vl_moe_single",
    ),
}
"""Family → the class that declares the map, the class that is trained, the case whose config goes in."""


DEFAULTS = {"mtp_num_layers": 0, "fuse_attention_qkv": True, "fuse_attention_ffn": True}
"""Entries that a config does not have, as the library's classes have them."""
VARIANT = {"use_bias": True, "attention_bias": True}
"""Entries of the language model by which a map also declares biases."""


FLEET = {
    "kimi_k2": "KimiK2PretrainedModel",
    "deepseek_v32": "DeepseekV32PreTrainedModel",
    "deepseek_v4": "DeepseekV4PreTrainedModel",
    "glm_moe_dsa": "GlmMoeDsaPreTrainedModel",
    "minimax_m2": "MiniMaxM2PreTrainedModel",
}
"""Family that only PaddleFleet trains, which is for GPUs → the class that declares its maps."""
SMALL = {
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 2,
    "v_head_dim": 2,
    "n_routed_experts": 2,
    "num_experts": 2,
    "num_local_experts": 2,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 4,
    "kv_lora_rank": 4,
    "use_qk_norm": True,
    "num_head_empty_layers": 0,
    "num_empty_layers_add_in_head": 0,
    "tensor_model_parallel_size": 1,
    "csa_compress_ratios": [0, 4, 4],
    "moe_n_hash_layers": 1,
    "tie_word_embeddings": False,
}
"""The config of a small model of any of them."""


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


def program(folder: Path, family: str, of: str) -> dict[str, Any]:
    """Both maps of a family without a class that runs here, and the model that the first makes of what it reads."""
    path = folder / "paddleformers" / "transformers" / family / "modeling.py"
    config = {**DEFAULTS, **SMALL, "model_type": family}
    forward, inverse = (
        {"aoa_statements": statements(path, of, of, config, method)}
        for method in ("_gen_aoa_config", "_gen_inv_aoa_config")
    )
    rng = np.random.default_rng(0)
    arrays = trained({key: (shape, "bfloat16") for key, shape in read_by(forward).items()}, rng, states=False)
    catalog, _ = stored(arrays, rng)
    made = apply_aoa(catalog, parse_aoa(json.dumps(forward), family)).catalog
    model = {tensor.key: [list(tensor.global_shape), tensor.dtype.name] for tensor in made.tensors}
    return {"model": model, "forward": forward, "inverse": inverse}


def read_by(forward: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Key → shape of what a map reads: 8 by 8, but for heads of keys and values, what is split, and vectors."""
    found: dict[str, tuple[int, ...]] = {}
    made: set[str] = set()
    for statement in forward["aoa_statements"]:
        left, _, right = statement.partition("->")
        keys = [key.strip().removesuffix("^T") for key in left.split(",")]
        targets = [word.strip() for word in right.split(",") if "." in word and "=" not in word]
        for key in chain.from_iterable(map(numbered, keys)):
            if key in made or key == "_":
                continue
            narrow = ".self_attn.k_proj" in key or ".self_attn.v_proj" in key
            is_vector = "^T" not in left and VECTOR.search(key)
            rows = 8 * len(targets) if len(targets) > 1 else 4 if narrow else 8
            found[key] = (rows,) if is_vector else (rows, 8)
        made |= {filled for target in targets for filled in numbered(target)}
    return found


def numbered(key: str) -> list[str]:
    """A key with every number that its placeholders stand for."""
    keys = [key]
    for name, count in (("$LAYER_ID", 2), ("$EXPERT_ID", 2)):
        keys = [k.replace(name, str(n)) for k in keys for n in (range(count) if name in k else (0,))]
    return keys


def main(folder: Path, target: Path, programs: Path) -> None:
    """Write the maps of all families."""
    for family, of in FLEET.items():
        made = json.dumps(program(folder, family, of), indent=1) + "\n"
        (programs / f"{family}.json").write_text(made, "utf-8")
    made = {}
    for family, (of, model, case) in FAMILIES.items():
        config = json.loads(min(case_directory(case).glob("*/config.json")).read_text())
        path = folder / "paddleformers" / "transformers" / family / "modeling.py"
        if "text_config" in config:
            config["text_config"] |= VARIANT
        made[family] = {
            "class": of,
            "case": case,
            "statements": statements(path, of, model, {**DEFAULTS, **config, **VARIANT}),
        }
    of, case = "Ernie4_5_VLMoeForConditionalGeneration", "families/ernie4_5_moe_vl_saved"
    path = folder / "paddleformers/transformers/ernie4_5_moe_vl/model/modeling_moe_vl.py"
    config = json.loads(min(case_directory(case).glob("*/config.json")).read_text())
    forward, inverse = (statements(path, of, of, config, f"_gen_{way}aoa_config") for way in ("", "inv_"))
    made["ernie4_5_moe_vl"] = {"class": of, "case": case, "statements": forward, "inverse": inverse}
    target.write_text(json.dumps(made, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
