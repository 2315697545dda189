"""What model is this, independent of any topology?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paddle_reshard.pipeline.geometry import Shape
from paddle_reshard.pipeline.layouts.hybrid.placement import TensorCut
from paddle_reshard.pipeline.layouts.rules import Rule, RuleTable
from paddle_reshard.pipeline.tensors import DType


@dataclass(frozen=True, slots=True)
class ModelTensor:
    """One structured key of the model."""

    key: str
    rule: Rule
    layer: int | None
    """Number of the decoder layer that owns it."""
    global_shape: Shape
    dtype: DType
    """Of the parameter."""
    accumulators: tuple[str, ...]
    """Optimizer states, in the order of the files; empty for a tensor that is not trained."""
    master: bool
    """Whether the optimizer keeps a master weight."""
    tied_to: str | None = None
    """The key that holds the same values."""
    automatic_name: str | None = None
    """Name in the source of a buffer that nobody named; it has no meaning and no loader looks at it."""

    @property
    def trained(self) -> bool:
        """Whether the optimizer holds any state of it."""
        return self.master or bool(self.accumulators)


@dataclass(frozen=True, slots=True)
class Model:
    """All tensors in the order of ``model.parameters()``."""

    tensors: tuple[ModelTensor, ...]
    table: RuleTable
    config: Mapping[str, Any]

    def cut(self, tensor: ModelTensor, tp: int) -> TensorCut:
        """How ``tp`` ranks cut a tensor of this model."""
        return TensorCut(tp, tensor.rule.split_dim(self.config, tp, tensor.key), tensor.rule.parts)


@dataclass(frozen=True, slots=True)
class NamedTensor:
    """What decides a parameter name."""

    key: str
    rule: Rule
    tied_to: str | None
    automatic_name: str | None = None


def predict_parameter_names(
    tensors: Sequence[ModelTensor | NamedTensor], pp: int, tp: int, sequence_parallel: bool
) -> dict[str, str]:
    """Structured key → parameter name in one cell that holds ``tensors``, in model order.

    A name is the layer's class and a counter of that class within the process, as
    ``paddle.utils.unique_name`` makes it when the layers are built in order. A tied tensor has the name of
    the one it is tied to where both live in the cell.
    """
    counters: dict[str, int] = {}
    modules: dict[str, str] = {}
    names: dict[str, str] = {}
    for tensor in tensors:
        if tensor.tied_to in names:
            names[tensor.key] = names[tensor.tied_to or ""]
            continue
        if tensor.automatic_name is not None:
            names[tensor.key] = tensor.automatic_name
            continue
        module, _, leaf = tensor.key.rpartition(".")
        name_class = tensor.rule.class_for(pp, tp, sequence_parallel)
        if tensor.rule.parameter_name is not None:
            count = counters.get(name_class, 0)
            counters[name_class] = count + 1
            layer = match["layer"] if (match := tensor.rule.pattern().fullmatch(tensor.key)) else None
            names[tensor.key] = tensor.rule.parameter_name.format(n=count, layer=layer)
            continue
        if name_class == "create_parameter":
            module = tensor.key  # paddle.create_parameter counts its calls, not layers
        if module not in modules:
            modules[module] = f"{name_class}_{counters.get(name_class, 0)}"
            counters[name_class] = counters.get(name_class, 0) + 1
        names[tensor.key] = f"{modules[module]}.{'b' if leaf == 'bias' else 'w'}_0"
    return names
