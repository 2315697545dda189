"""The model of a checkpoint, independent of any topology."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import groupby
from typing import Any

from paddle_reshard.pipeline.core.errors import CoverageError, RuleError
from paddle_reshard.pipeline.core.geometry import Shape
from paddle_reshard.pipeline.core.tensors import (
    ACCUMULATORS,
    MASTER_WEIGHT,
    PARAM,
    DType,
    Tensor,
    dtype_named,
)
from paddle_reshard.pipeline.model.placement import TensorCut
from paddle_reshard.pipeline.model.rules.entries import Config, config_entry
from paddle_reshard.pipeline.model.rules.rule import LoraRule, Rule, expected_shape
from paddle_reshard.pipeline.model.rules.table import RuleTable

AUTOMATIC = "eager_tmp"
"""Class in the name of an unnamed tensor."""
UNNAMED_PARAMETER = "_eager_param_base"
"""Class in the name of an unnamed parameter. Its number counts all parameters that the process created before: Paddle
generates such a name for every parameter, and discards it for named parameters."""
EXPERT_NUMBER = re.compile(r"(?<=\.experts\.)\d+(?=\.)")
"""The number of the routed expert in a structured key."""


def expert_of(key: str) -> int | None:
    """Number of the routed expert in a structured key, or ``None``.

    >>> expert_of("model.layers.1.mlp.experts.13.up_proj.weight")
    13
    """
    match = EXPERT_NUMBER.search(key)
    return None if match is None else int(match[0])


def spelled_experts(tensors: Iterable[ModelTensor]) -> dict[str, str]:
    """Key of each tensor of a single routed expert → the number of the expert, as the key spells it."""
    rules = {tensor.key: tensor.rule for tensor in tensors if tensor.rule.of_expert}
    if all(rule.numbers_experts for rule in {id(rule): rule for rule in rules.values()}.values()):
        return {key: key.partition(".experts.")[2].partition(".")[0] for key in rules}
    spelled = {}
    for key, rule in rules.items():
        if (match := EXPERT_NUMBER.search(key)) or "expert" in rule.numbers(key):
            spelled[key] = match[0] if match else rule.numbers(key)["expert"]
    return spelled


@dataclass(frozen=True, slots=True)
class ModelTensor:
    """A structured key of the model."""

    key: str
    rule: Rule
    layer: int | None
    """Number of the decoder layer that owns it."""
    global_shape: Shape
    dtype: DType
    """Dtype of the parameter."""
    accumulators: tuple[str, ...]
    """Optimizer states, in the order of the files; empty for a tensor that is not trained."""
    master: bool
    """Whether the optimizer keeps a master weight."""
    tied_to: str | None = None
    """The key with the same values."""
    automatic_name: str | None = None
    """Name in the source of an unnamed buffer; loaders ignore it."""
    missing: bool = False
    """Whether no file holds it, because that was allowed, or it belongs to the base model of an adapter."""
    of_base: bool = False
    """Whether it belongs to the base model of an adapter; most formats do not store these tensors."""

    @property
    def trained(self) -> bool:
        """Whether the optimizer has any state of it."""
        return self.master or bool(self.accumulators)

    @property
    def is_alias(self) -> bool:
        """Whether it is another key of the parameter ``tied_to``, and not a parameter that only has the same name."""
        return self.tied_to is not None and self.rule.tied_to is not None

    @property
    def item(self) -> tuple[str, int | None]:
        """The pipeline item that owns it, and its layer number, if any."""
        return self.rule.item, self.layer


@dataclass(frozen=True)
class Model:
    """All tensors in the order of ``model.parameters()`` of a job without pipeline stages."""

    tensors: tuple[ModelTensor, ...]
    table: RuleTable
    config: Mapping[str, Any]

    @property
    def recipe_switches(self) -> tuple[str, ...]:
        """The switches that are on in the config, and that a job of its recipe has to be told."""
        return tuple(name for name in self.table.recipe_switches if config_entry(self.config, name))

    @property
    def aliases(self) -> dict[str, tuple[str, ...]]:
        """Key → the keys that are tied to it."""
        aliases: dict[str, tuple[str, ...]] = {}
        for tensor in self.tensors:
            if tensor.tied_to is not None:
                aliases[tensor.tied_to] = (*aliases.get(tensor.tied_to, ()), tensor.key)
        return aliases

    @property
    def tied_by_config(self) -> dict[str, str]:
        """Key → the key that only ``tie_word_embeddings`` ties to it: its class has a parameter of its own for it."""
        return {
            tensor.tied_to: tensor.key
            for tensor in self.tensors
            if tensor.tied_to is not None and tensor.is_alias and not tensor.rule.always_tied
        }

    @property
    def tied_by_class(self) -> dict[str, str]:
        """Key → the key that is one with it in every job, and that a published model may have apart all the same."""
        return {
            tensor.tied_to: tensor.key
            for tensor in self.tensors
            if tensor.tied_to is not None and tensor.rule.always_tied and tensor.rule.huggingface is not None
        }

    @cached_property
    def has_lora(self) -> bool:
        """Whether it contains LoRA matrices."""
        return any(isinstance(tensor.rule, LoraRule) for tensor in self.tensors)

    def as_built(self, pp: int) -> list[ModelTensor]:
        """All tensors in the order in which a job with ``pp`` stages builds them."""
        return [tensor for place in self.places_as_built(pp) for tensor in self.of_places[place]]

    def places_as_built(self, pp: int) -> list[tuple[str, int | None]]:
        """The pipeline items that own tensors, in the order in which a job with ``pp`` stages builds them."""
        position = self.table.build_order(pp)
        return sorted(
            self.of_places, key=lambda place: (position[place[0]], -1 if place[1] is None else place[1])
        )

    @cached_property
    def of_places(self) -> dict[tuple[str, int | None], list[ModelTensor]]:
        """Pipeline item → the tensors that it owns."""
        owned: dict[tuple[str, int | None], list[ModelTensor]] = {}
        for tensor in self.tensors:
            owned.setdefault(self.places[tensor.key], []).append(tensor)
        return owned

    @cached_property
    def experts(self) -> dict[str, int]:
        """Key of a tensor of a single routed expert → number of the expert."""
        return {key: int(number) for key, number in spelled_experts(self.tensors).items()}

    @cached_property
    def expert_numbers(self) -> frozenset[int]:
        """The numbers of the routed experts that have tensors of their own."""
        return frozenset(self.experts.values())

    @cached_property
    def plain_expert(self) -> str | None:
        """Key of the first tensor of an expert without a master weight."""
        return next((t.key for t in self.tensors if t.key in self.experts and not t.master), None)

    @cached_property
    def rules(self) -> tuple[Rule, ...]:
        """The rules of its tensors, each once."""
        return tuple({id(tensor.rule): tensor.rule for tensor in self.tensors}.values())

    @cached_property
    def tied(self) -> tuple[ModelTensor, ...]:
        """The tensors with the values of others."""
        return tuple(tensor for tensor in self.tensors if tensor.tied_to is not None)

    @cached_property
    def untrained(self) -> tuple[str, ...]:
        """Keys of the tensors without optimizer states, but those that are tied to others."""
        return tuple(t.key for t in self.tensors if not t.trained and t.tied_to is None)

    @cached_property
    def kinds_of_states(self) -> frozenset[tuple[str, ...]]:
        """The optimizer states that any tensor has, together."""
        return frozenset(tensor.accumulators for tensor in self.tensors)

    @cached_property
    def places(self) -> dict[str, tuple[str, int | None]]:
        """Key → the pipeline item that owns the tensor."""
        place = cache(self.table.place)
        return {tensor.key: place(*tensor.item) for tensor in self.tensors}

    def cut(self, tensor: ModelTensor, tp: int, expert_axis: str | None = None, ep: int = 1) -> TensorCut:
        """How ``tp`` ranks cut a tensor of this model; experts distributed over ``ep`` or ``tp`` ranks are not cut.

        One tensor of all experts is cut by ``ep`` ranks instead.
        """
        return cut_of(tensor.rule, self.config, tensor.key, tp, expert_axis, ep)


def cut_of(
    rule: Rule, config: Config, key: str, tp: int, expert_axis: str | None = None, ep: int = 1
) -> TensorCut:
    """How the ranks of a job cut a tensor with this row; see :meth:`Model.cut`."""
    if rule.shared_out and expert_axis == "ep":
        return TensorCut(ep, 0)
    if expert_axis in ("ep", "tp") and rule.of_expert:
        return TensorCut(1, None)
    return TensorCut(tp, rule.split_dim(config, tp, key), rule.shares(config))


def read_model(tensors: Sequence[Tensor], table: RuleTable, config: Mapping[str, Any]) -> Model:
    """The model with these logical tensors, determined by the rules alone.

    For formats that hold whole tensors by structured key and no other facts about the model. Parameters that are absent
    are bfloat16 casts of their master weights, by definition of these formats. Tied tensors that are absent are added.

    Raises
    ------
    RuleError
        Naming a tensor that has no row in the table, or another shape than the config requires.
    """
    states: dict[str, dict[str, Tensor]] = {}
    for tensor in tensors:
        states.setdefault(tensor.key, {})[tensor.state] = tensor
    find = table.finder(config)
    by_key = {key: _model_tensor(key, of_key, find, config) for key, of_key in states.items()}
    for rule in table.rules:
        for key, twin in _twins(rule, by_key, config):
            row, layer = find(key)
            by_key.setdefault(key, replace(twin, key=key, rule=row, layer=layer, tied_to=twin.key))
    tied = [replace(t, tied_to=t.tied_to if t.tied_to in by_key else None) for t in by_key.values()]
    return Model(tuple(sorted(tied, key=model_order(table))), table, config)


def _twins(rule: Rule, tensors: Mapping[str, ModelTensor], config: Config) -> list[tuple[str, ModelTensor]]:
    """The keys of a row for tensors that are tied to others, each with the tensor to which it is tied."""
    if rule.of_stages or rule.twin(config, rule.key) is None or not rule.applies(config):
        return []
    other = replace(rule, key=rule.tied_to or "")
    keys = (key for key in tensors if other.pattern().fullmatch(key)) if "{" in other.key else (other.key,)
    return [
        (other.fill_in(rule.key, key), tensors[key])
        for key in keys
        if key in tensors and (rule.only_with is None or other.fill_in(rule.only_with, key) in tensors)
    ]


def model_order(table: RuleTable) -> Callable[[ModelTensor], tuple[int, ...]]:
    """A sort key for the order of ``model.parameters()``: items, layers and rows of the table in order.

    Consecutive rows of experts repeat as a block for every expert: ``0.gate, 0.up, 1.gate, 1.up``. An item with all
    layers of its kind has one module after another: ``block.0, block.1, norm.0, norm.1``.
    """
    items = table.build_order(pp=1)
    blocks: dict[str, int] = {}
    modules = {rule.key.rpartition(".")[0]: row for row, rule in enumerate(table.rules)}
    rows = {rule.key: row for row, rule in enumerate(table.rules)}
    lists = list(dict.fromkeys(rule.key.partition("{layer}")[0] for rule in table.rules))
    for of_experts, run in groupby(table.rules, key=lambda rule: "{expert}" in rule.key):
        keys = [rule.key for rule in run]
        blocks |= {key: rows[keys[0] if of_experts else key] for key in keys}

    def sort_key(tensor: ModelTensor) -> tuple[int, ...]:
        rule = tensor.rule
        layer = -1 if tensor.layer is None else tensor.layer
        if isinstance(rule, LoraRule):  # after all tensors of the linear layer itself
            last = modules[rule.key.rpartition(".")[0]]
            return items[rule.item], layer, last, -1, last, rule.first_number
        expert = rule.numbers(tensor.key).get("expert", "-1") if rule.of_expert else "-1"
        if table.place(rule.item, layer)[1] is None:
            module = lists.index(rule.key.partition("{layer}")[0])
            return items[rule.item], -1, module, layer, blocks[rule.key], int(expert), rows[rule.key]
        return items[rule.item], layer, blocks[rule.key], int(expert), rows[rule.key]

    return sort_key


def order_routers(tensors: Sequence[ModelTensor], unified: bool) -> list[ModelTensor]:
    """Put routers before (``unified``) or after the experts of their layer, if the library has both orders."""
    ordered: list[ModelTensor] = []
    for _, run in groupby(tensors, key=lambda t: t.item):
        layer = list(run)
        leading = [t for t in layer if t.rule.leads_if_unified]
        rest = [t for t in layer if not t.rule.leads_if_unified]
        experts = [index for index, t in enumerate(rest) if t.rule.of_expert]
        if not (leading and experts):
            ordered += layer
            continue
        position = experts[0] if unified else experts[-1] + 1
        ordered += [*rest[:position], *leading, *rest[position:]]
    return ordered


def _model_tensor(
    key: str,
    states: Mapping[str, Tensor],
    find: Callable[[str], tuple[Rule, int | None]],
    config: Mapping[str, Any],
) -> ModelTensor:
    rule, layer = find(key)
    whole = states.get(PARAM) or states.get(MASTER_WEIGHT)
    if whole is None:
        raise CoverageError(key, f"nothing but its {', '.join(sorted(states))} is stored")
    expected = expected_shape(rule, config, key)
    if expected is not None and expected != whole.global_shape:
        lost = f"; {rule.saved_in_part}" if rule.saved_in_part else ""
        raise RuleError(
            key,
            f"{rule.who_expects(config)} the shape {expected}, the files hold {whole.global_shape}{lost}",
        )
    return ModelTensor(
        key=key,
        rule=rule,
        layer=layer,
        global_shape=whole.global_shape,
        dtype=whole.dtype if PARAM in states else dtype_named("bfloat16"),
        accumulators=tuple(name for name in ACCUMULATORS if name in states),
        master=MASTER_WEIGHT in states,
        tied_to=rule.twin(config, key),
    )


@dataclass(frozen=True, slots=True)
class NamedTensor:
    """The facts that determine a parameter name."""

    key: str
    rule: Rule
    tied_to: str | None
    automatic_name: str | None = None


Named = ModelTensor | NamedTensor


def predict_parameter_names(
    tensors: Sequence[Named],
    config: Config,
    pp: int,
    tp: int,
    sequence_parallel: bool,
    ep: int = 1,
) -> dict[str, str]:
    """Structured key → parameter name in one cell that holds ``tensors``, in model order.

    A name consists of the layer's class and a counter of that class in the process, as ``paddle.utils.unique_name``
    generates it when layers are built in order: ``linear_0.w_0``, ``linear_0.b_0``, ``linear_1.w_0``. Tied tensors in
    the same cell have the same name.
    """
    named = _NamesOfCell(config, pp, tp, sequence_parallel, ep)
    for tensor in in_building_order(tensors):
        named.names[tensor.key] = named.build(tensor)
    return {tensor.key: named.names[tensor.key] for tensor in tensors}


def check_given_names(tensors: Iterable[Named], names: Mapping[str, str]) -> None:
    """Refuse parameter names that a user gives, if two tensors of a cell have one name and are not tied."""
    holders: dict[str, Named] = {}
    for tensor in tensors:
        first = holders.setdefault(names[tensor.key], tensor)
        if (first.tied_to or first.key) != (tensor.tied_to or tensor.key):
            raise RuleError(
                tensor.key,
                f"has the parameter name {names[tensor.key]} in the model_meta.json given with --layout, and so has "
                f"{first.key}; only tied tensors share one",
            )


class _NamesOfCell:
    """Gives the parameters of one cell their names, in the order in which the process builds them."""

    def __init__(self, config: Config, pp: int, tp: int, sequence_parallel: bool, ep: int) -> None:
        self.config, self.pp, self.tp, self.ep = config, pp, tp, ep
        self.sequence_parallel = sequence_parallel
        self.names: dict[str, str] = {}
        self._counters: dict[str, int] = {}
        self._layers: dict[str, str] = {}
        """Module → name of its layer."""
        self._first_experts: dict[str, str] = {}
        """Key without the number of its expert → key of the first expert that was built."""
        self._built = self._copies = 0
        self._classes: dict[int, str] = {}
        """Id of a row → class of its layers."""

    def build(self, tensor: Named) -> str:
        """The name of the tensor that the process builds next."""
        rule = tensor.rule
        if tensor.tied_to in self.names and not (self.pp == 1 and rule.own_without_stages):
            if rule.own_in_stages:  # its layer is built all the same, and counts before a bias
                self._of_layer(tensor, self._class_of(tensor))
            return self.names[tensor.tied_to or ""]
        if rule.copied and rule.of_expert:
            first = self._first_experts.setdefault(rule.of_every_expert(tensor.key), tensor.key)
            if first != tensor.key:
                return self._copied(self.names[first])
        for discarded in rule.discards:
            self._counted(discarded.class_for(self.tp, self.sequence_parallel))
        self._built += len(rule.discards)
        name_class = self._class_of(tensor)
        if name_class == AUTOMATIC:
            count = self._counted(name_class)
            return tensor.automatic_name or f"{AUTOMATIC}_{count}"
        if name_class == UNNAMED_PARAMETER or not rule.first_number:
            self._built += 1
        if name_class == UNNAMED_PARAMETER:
            return f"{UNNAMED_PARAMETER}_{self._built - 1}"
        if rule.parameter_name is not None:
            layer = rule.numbers(tensor.key).get("layer")
            return rule.parameter_name.format(n=self._counted(name_class), layer=layer)
        name = self._of_layer(tensor, name_class)
        return self._copied(name) if rule.copied and not rule.of_expert else name

    def _copied(self, name: str) -> str:
        """Name of the next deep copy of a parameter."""
        self._copies += 1
        return f"{name}_deepcopy_{self._copies - 1}"

    def _class_of(self, tensor: Named) -> str:
        """Class of the layer; what tp does not cut is of a plain layer, also under sequence parallelism."""
        rule = tensor.rule
        if id(rule) not in self._classes:
            cut = self.sequence_parallel and not rule.stays_whole(self.config, self.tp, tensor.key)
            self._classes[id(rule)] = rule.class_for(self.pp, self.tp, cut, self.ep)
        return self._classes[id(rule)]

    def _of_layer(self, tensor: Named, name_class: str) -> str:
        """Name of a weight or a bias of a layer, which the first of its parameters counts."""
        module, _, leaf = tensor.key.rpartition(".")
        kind = "b" if leaf == "bias" and not tensor.rule.created_as_weight else "w"
        if tensor.rule.first_number:  # the LoRA layer that replaces the linear layer
            module = f"{module} with LoRA"
        if name_class == "create_parameter":
            module, kind = tensor.key, "w"  # paddle.create_parameter counts its calls, not layers
        if module not in self._layers:
            self._layers[module] = f"{name_class}_{self._counted(name_class)}"
        parameter = f"{self._layers[module]}.{kind}"
        return f"{parameter}_{self._counted(parameter, tensor.rule.first_number)}"

    def _counted(self, counter: str, first: int = 0) -> int:
        """The number that a counter has come to, which is one more the next time."""
        number = self._counters.get(counter, first)
        self._counters[counter] = number + 1
        return number


def in_building_order(tensors: Sequence[Named]) -> Sequence[Named]:
    """Tensors of a cell in the order in which their parameters are built, according to ``built_after`` in the rows."""
    keys = {tensor.key for tensor in tensors}
    later: dict[str, list[Named]] = {}
    first: list[Named] = []
    for tensor in tensors:
        rule = tensor.rule
        after = rule.fill_in(rule.built_after, tensor.key) if rule.built_after else None
        (first if after is None or after not in keys else later.setdefault(after, [])).append(tensor)
    if not later:
        return tensors
    ordered: list[Named] = []
    waiting = first[::-1]
    while waiting:
        ordered.append(waiting.pop())
        waiting += later.pop(ordered[-1].key, [])[::-1]
    return ordered
