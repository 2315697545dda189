"""What PaddleFormers' own maps say of Hugging Face keys: ``_gen_aoa_config`` of each family, executed without Paddle.

The functions are class methods that only make texts out of a config, so they are taken out of the source files and
executed alone; nothing else of the library is imported::

    pip download paddleformers==1.2.0 --no-deps -d wheel && unzip -d source wheel/*.whl
    python -m tests.lab.declarations source tests/golden/declarations.json
"""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path
from typing import Any

from tests.conftest import case_directory

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
            except ValueError:
                continue
    return found


def statements(
    path: Path, of: str, model: str, config: dict[str, Any], name: str = "_gen_aoa_config"
) -> list[str]:
    """What ``_gen_aoa_config``, or another method like it, of a class returns."""
    source = path.read_text("utf-8")
    tree = ast.parse(source)
    (node,) = (n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == of)
    (method,) = (n for n in node.body if isinstance(n, ast.FunctionDef) and n.name == name)
    method.decorator_list = []
    method.returns = None
    for argument in method.args.args:
        argument.annotation = None
    space: dict[str, Any] = {"logger": Silent(), "layer_type": None}
    exec(compile(ast.Module([method], []), str(path), "exec"), space)
    cls = type(model, (), attributes(tree, model))
    found: list[str] = space[name](cls, Entries(config))["aoa_statements"]
    return found


class Silent:
    """A logger."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None


def main(folder: Path, target: Path) -> None:
    """Write the maps of all families."""
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
    inverse = statements(path, of, of, config, "_gen_inv_aoa_config")
    made["ernie4_5_moe_vl"] = {"class": of, "case": case, "inverse": inverse}
    target.write_text(json.dumps(made, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
