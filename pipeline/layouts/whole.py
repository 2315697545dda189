"""Does a model lack tensors?"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from paddle_reshard.pipeline.core.errors import CheckpointError, CoverageError
from paddle_reshard.pipeline.layouts.model import Model, ModelTensor


def check_whole(model: Model) -> None:
    """Refuse a model that lacks tensors, for formats in which nothing else tells.

    There must be every decoder layer of the config, every tensor outside of layers that the rule table knows, and in
    every layer what another layer has that otherwise has the same.

    Raises
    ------
    CoverageError
        Naming the tensor that is missing.
    CheckpointError
        If the layers are not those of the config.
    """
    keys = {tensor.key for tensor in model.tensors}
    for rule in model.table.rules:
        if "{" not in rule.key and rule.applies(model.config) and rule.key not in keys:
            raise CoverageError(rule.key, "no file holds it, and every model of this family has it")
    if not model.table.counts_layers:
        return
    check_layers(model.tensors, model.config)
    layers: dict[int, set[str]] = {}
    for tensor in model.tensors:
        if tensor.layer is not None:
            match = tensor.rule.pattern().fullmatch(tensor.key)
            expert = match.groupdict().get("expert") if match else None
            name = tensor.rule.key.format(layer="{layer}", expert=expert)
            layers.setdefault(tensor.layer, set()).add(name)
    for layer, held in sorted(layers.items()):
        for other, more in sorted(layers.items()):
            if held < more:
                missing = min(more - held).format(layer=layer)
                raise CoverageError(missing, f"no file holds it, and layer {other} has it")


def check_layers(tensors: Iterable[ModelTensor], config: Mapping[str, Any]) -> None:
    """Refuse tensors whose decoder layers are not those of the config.

    Raises
    ------
    CheckpointError
        Naming a layer that only one of the two has.
    """
    layers = sorted({t.layer for t in tensors if t.layer is not None})
    expected = config.get("num_hidden_layers", len(layers))
    if not isinstance(expected, int):
        raise CheckpointError(f"config.json: num_hidden_layers is {expected!r}")
    if expected != len(layers) or layers != list(range(len(layers))):
        held = set(layers)  # not a range of what the config says, which may be any number
        odd = next(n for n in (*range(len(layers) + 1), *layers) if (n < expected) != (n in held))
        raise CheckpointError(
            f"config.json says {expected} decoder layers; layer {odd} is in only one of the config and the files"
        )
