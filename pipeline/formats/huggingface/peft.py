"""Export LoRA for the library ``peft``: ``adapter_model.safetensors`` and ``adapter_config.json``.

Both matrices are transposed: ``lora_A [r, in]`` and ``lora_B [out, r]``. A projection that Paddle fuses is several
modules in ``peft``: each gets all of ``lora_A``, and its own columns of ``lora_B``, group by group as in the weight.
The product is the same.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final

from paddle_reshard.pipeline.checkpoint.checkpoint import Checkpoint
from paddle_reshard.pipeline.core.errors import CheckpointError, RuleError, UnsupportedError
from paddle_reshard.pipeline.core.file_names import LORA_CONFIG
from paddle_reshard.pipeline.formats.huggingface.parts import Part, parts_by_form
from paddle_reshard.pipeline.model.model import Model, ModelTensor
from paddle_reshard.pipeline.model.rules.rule import LoraRule
from paddle_reshard.pipeline.model.rules.table import renamed_prefix

WEIGHTS: Final = "adapter_model.safetensors"
CONFIG: Final = "adapter_config.json"
_PREFIX: Final = "base_model.model."


def adapter_parts(wanted: Checkpoint) -> Iterator[tuple[ModelTensor, tuple[Part, ...]]]:
    """Every matrix of an adapter, in the order of the model, with its parts; refuses what ``peft`` cannot hold."""
    for tensor in wanted.model.tensors:
        if tensor.missing or tensor.of_base:
            continue
        if not isinstance(tensor.rule, LoraRule):
            raise UnsupportedError(
                f"{tensor.key}: trained in full besides LoRA, which is not supported in a peft adapter; merge both "
                "into the base model with --merge-into BASE"
            )
        yield tensor, _parts(tensor, tensor.rule, wanted.model)


def _parts(tensor: ModelTensor, rule: LoraRule, model: Model) -> tuple[Part, ...]:
    form = None if rule.weight is None else rule.weight.huggingface
    if form is None or not form.transposed:
        raise RuleError(
            tensor.key,
            f"the {model.table.convention} rule table {model.table.family!r} does not say which transposed linear "
            "layers its weight is in a Hugging Face checkpoint",
        )
    modules = [renamed_prefix(key, model.table.peft_prefixes).removesuffix("weight") for key in form.keys]
    keys = tuple(f"{_PREFIX}{module}{rule.name}.weight" for module in modules)
    if rule.name == "lora_B":
        return parts_by_form(tensor, replace(form, keys=keys), model)
    whole = replace(form, widths=None, groups=None)
    return tuple(part for key in keys for part in parts_by_form(tensor, replace(whole, keys=(key,)), model))


def adapter_config(wanted: Checkpoint, parts: Sequence[Part]) -> bytes:
    """``adapter_config.json``; a ``CheckpointError`` if the scaling is unknown."""
    if wanted.adapter is None:
        raise CheckpointError(
            f"the source has no {LORA_CONFIG}, which holds the scaling; give it with --lora-config FILE"
        )
    alpha = wanted.adapter.alpha
    entries = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": wanted.adapter.base,
        "r": wanted.adapter.rank,
        "lora_alpha": int(alpha) if alpha.is_integer() else alpha,
        "use_rslora": wanted.adapter.rslora,
        "lora_dropout": wanted.adapter.entries.get("lora_dropout", 0.0),
        "target_modules": _modules(parts, wanted.model),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "modules_to_save": None,
    }
    return (json.dumps(entries, indent=2, sort_keys=True) + "\n").encode()


def _modules(parts: Sequence[Part], model: Model) -> list[str]:
    """Names of the modules with LoRA: the last component, or full paths if not every layer has all of them."""
    paths = sorted({part.key.removeprefix(_PREFIX).rsplit(".", 2)[0] for part in parts})
    last = {path.rpartition(".")[2] for path in paths}
    everywhere = len(paths) == len(last) * int(model.config.get("num_hidden_layers", 0))
    return sorted(last) if everywhere else paths
