"""Does a model lack tensors?"""

from __future__ import annotations

from paddle_reshard.pipeline.errors import CheckpointError, CoverageError
from paddle_reshard.pipeline.layouts.model import Model


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
    layers: dict[int, set[str]] = {}
    for tensor in model.tensors:
        if tensor.layer is not None:
            match = tensor.rule.pattern().fullmatch(tensor.key)
            expert = match.groupdict().get("expert") if match else None
            name = tensor.rule.key.format(layer="{layer}", expert=expert)
            layers.setdefault(tensor.layer, set()).add(name)
    expected = model.config.get("num_hidden_layers", len(layers))
    if expected != len(layers) or sorted(layers) != list(range(len(layers))):
        raise CheckpointError(
            f"config.json says num_hidden_layers={expected!r}, the files hold the layers "
            f"{', '.join(map(str, sorted(layers))) or 'none'}"
        )
    for layer, held in sorted(layers.items()):
        for other, more in sorted(layers.items()):
            if held < more:
                missing = min(more - held).format(layer=layer)
                raise CoverageError(missing, f"no file holds it, and layer {other} has it")
