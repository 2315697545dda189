"""LoRA: small matrices that are trained next to the layers of an unchanged base model.

A checkpoint of LoRA training holds two matrices for each linear layer (``LoraRule``), biases and whole tensors that are
trained too, and the optimizer states of all these. A FlexCheckpoint also holds the base model.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from paddle_reshard.pipeline.checkpoint.checkpoint import Checkpoint
from paddle_reshard.pipeline.core.errors import CheckpointError, RuleError, UnsupportedError, UsageError
from paddle_reshard.pipeline.core.file_names import LORA_CONFIG
from paddle_reshard.pipeline.core.tensors import DType, dtype_named
from paddle_reshard.pipeline.model.lora_config import Adapter
from paddle_reshard.pipeline.model.model import Model, ModelTensor, model_order
from paddle_reshard.pipeline.model.rules.entries import count_entry
from paddle_reshard.pipeline.model.rules.items import LAYERS
from paddle_reshard.pipeline.model.rules.rule import LORA, LoraRule, expected_shape

IN_BASE: Final = "belongs to the base model, which the job loads from its own checkpoint"
"""Why a tensor is not in the checkpoint of an adapter."""


def check_matrices(model: Model, adapter: Adapter | None) -> None:
    """Refuse matrices whose shapes contradict each other, their linear layer or ``lora_config.json``.

    LoRA of a family whose checkpoints are not known is refused too.
    """
    if model.has_lora and not model.table.supports_lora:
        raise UnsupportedError(
            f"LoRA of {model.table.family} as {model.table.convention} writes it is not supported: no real "
            "checkpoint of it has been seen"
        )
    shapes = {tensor.key: tensor.global_shape for tensor in model.tensors}
    for tensor in model.tensors:
        rule = tensor.rule
        if not isinstance(rule, LoraRule) or rule.weight is None:
            continue
        module = tensor.key.rpartition(".")[0]
        other = next(name for name in LORA if name != rule.name)
        if f"{module}.{other}" not in shapes:
            raise CheckpointError(f"{tensor.key}: {module}.{other} is missing")
        ranks = {shapes[f"{module}.lora_A"][-1], shapes[f"{module}.lora_B"][0]}
        if len(tensor.global_shape) != 2 or len(ranks | ({adapter.rank} if adapter else set())) > 1:
            configured = f", {LORA_CONFIG} says r={adapter.rank}" if adapter else ""
            raise CheckpointError(
                f"{tensor.key}: shape {tensor.global_shape}, that of {other} is {shapes[f'{module}.{other}']}"
                f"{configured}; [in, r] and [r, out] are expected"
            )
        weight = expected_shape(rule.weight, model.config, f"{module}.weight")
        outer = 0 if rule.name == "lora_A" else 1
        if weight is not None and weight[outer] != tensor.global_shape[outer]:
            raise RuleError(
                tensor.key,
                f"shape {tensor.global_shape} does not fit the shape {weight} of the weight, which follows from "
                "config.json and the rule table",
            )


def _base_tensors(model: Model, dtype: DType) -> Iterator[ModelTensor]:
    """The tensors of the base that an adapter does not hold, if the rule table determines them.

    The job of an adapter builds its base first, so names of parameters count its layers too. A table determines the
    tensors of dense models only: the layers with experts, and their number, are known from files.
    """
    table, config, held = model.table, model.config, {tensor.key for tensor in model.tensors}
    rules = [rule for rule in table.rules if rule.applies(config)]
    items = {item.name: item for item in table.items}
    determined = all(rule.shape is not None and not rule.of_expert for rule in rules)
    if table.experts is not None or not determined or not count_entry(config, LAYERS):
        return
    keys = {rule.key for rule in rules}
    for rule in rules:
        for layer in table.numbers(items[rule.item], config):
            key = rule.key if layer is None else rule.key.format(layer=layer)
            shape = expected_shape(rule, config, key)
            if key not in held and shape is not None:
                twin = rule.twin(config, key)
                base = ModelTensor(key, rule, layer, shape, dtype, accumulators=(), master=False)
                yield replace(base, tied_to=twin if twin in keys else None, missing=True, of_base=True)


def with_base(model: Model, adapter: Adapter | None) -> Model:
    """Add the tensors of the base to the model of an adapter, as missing ones, if the rule table determines them."""
    entries = {**model.config, **(adapter.entries if adapter else {})}
    written = entries.get("dtype") or entries.get("torch_dtype")
    if not isinstance(written, str):
        return model
    base = list(_base_tensors(model, dtype_named(written)))
    if not base:
        return model
    return replace(model, tensors=tuple(sorted((*model.tensors, *base), key=model_order(model.table))))


def with_adapter(checkpoint: Checkpoint, given: Adapter, location: str) -> Checkpoint:
    """Add the ``lora_config.json`` that the user passes to a checkpoint with LoRA that has none of its own."""
    if checkpoint.adapter is not None or not checkpoint.model.has_lora:
        has = f"has its own {LORA_CONFIG}" if checkpoint.adapter else "holds no LoRA"
        raise UsageError(f"--lora-config: {location} {has}; omit the option")
    check_matrices(checkpoint.model, given)
    return replace(checkpoint, adapter=given)


def marked_base(model: Model) -> Model:
    """Mark the tensors of the base, in a model with LoRA."""
    if not model.has_lora:
        return model
    marked = (replace(t, of_base=not (isinstance(t.rule, LoraRule) or t.trained)) for t in model.tensors)
    return replace(model, tensors=tuple(marked))


def without_base(checkpoint: Checkpoint) -> Checkpoint:
    """Remove the tensors of the base from a checkpoint of an adapter."""
    model = checkpoint.model
    of_base = {tensor.key for tensor in model.tensors if tensor.of_base}
    if not of_base:
        return checkpoint
    tensors = checkpoint.catalog.tensors
    kept = [number for number, tensor in enumerate(tensors) if tensor.key not in of_base]
    marked = tuple(replace(t, missing=True) if t.of_base else t for t in model.tensors)
    return replace(checkpoint, catalog=checkpoint.catalog.only(kept), model=replace(model, tensors=marked))
