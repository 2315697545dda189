"""Model knowledge that no checkpoint stores: which dim tp cuts, what is fused, how parameters are named.

One JSON table per model family and library; see ``rules/README.md`` beside this file for its fields.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from math import gcd, prod
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, overload

from paddle_reshard.pipeline.core.errors import RuleError, UsageError
from paddle_reshard.pipeline.layouts.rules.entries import (
    Config,
    config_entry,
    count_entry,
    derived_sizes,
    size_of,
    ties_words,
)
from paddle_reshard.storage.formats.strict_json import JsonError, parse_json
from paddle_reshard.storage.formats.typed_json import Bounds, EntryError, typed

if TYPE_CHECKING:  # NumPy, which the table of families does without
    from paddle_reshard.pipeline.core.geometry import Shape


@dataclass(frozen=True, slots=True)
class HuggingFaceForm:
    """What becomes of a tensor in a Hugging Face checkpoint: one tensor, or the parts that are fused in it."""

    keys: tuple[str, ...]
    """Key of each part there; ``{layer}`` and ``{expert}`` stand for the numbers in the key of the row."""
    transposed: bool = False
    """Whether the two dims change places: ``[in, out]`` here is ``[out, in]`` there."""
    saved_transposed: bool | None = None
    """Whether they change places where the trainer saves with ``save_to_hf``; ``None``: as in Hugging Face checkpoints
    for what is one tensor there, and not for what Paddle fuses."""
    widths: tuple[str, ...] | None = None
    """Extent of each part along the last dim here, as sums of products of config entries; needed for several."""
    groups: str | None = None
    """Config entry: into how many groups the last dim is cut, each with its share of every part in turn."""
    keep_float32: bool = False
    """Whether it stays float32 when the model is given another dtype."""

    @property
    def transposed_as_saved(self) -> bool:
        """Whether the two dims change places where the trainer saves with ``save_to_hf``."""
        if self.saved_transposed is not None:
            return self.saved_transposed
        return self.transposed and len(self.keys) == 1


@dataclass(frozen=True, slots=True)
class Discarded:
    """A parameter that the library builds and gives up for another one; it only counts in the names of others."""

    name_class: str
    """Layer class, as in a row."""
    name_class_sp: str | None = None
    """Layer class under sequence parallelism (tp > 1), where it differs."""

    def class_for(self, tp: int, sequence_parallel: bool) -> str:
        """Layer class in a job."""
        return (tp > 1 and sequence_parallel and self.name_class_sp) or self.name_class


@dataclass(frozen=True, slots=True)
class Rule:
    """One row: every tensor whose key fits ``key``."""

    key: str
    """Structured name; ``{layer}`` stands for a decoder layer's number, ``{expert}`` for a routed expert's."""
    item: str
    """Name of the pipeline item that owns it."""
    name_class: str
    """Layer class in the framework's parameter name, ``linear`` in ``linear_0.w_0``."""
    source: str
    """Where the row is known from."""
    split: Annotated[int, Bounds(0)] | None = None
    """Dim that tensor parallelism cuts; ``None``: every tp rank holds the whole tensor."""
    parts: Annotated[int, Bounds(1)] = 1
    """How many equal logical parts are fused along ``split``; a tp rank holds its piece of each."""
    part_widths: tuple[str, ...] | None = None
    """For parts that are not equal: the extent of each along ``split``, as sums of products of config entries."""
    split_if_divisible: str | None = None
    """Config entry that must divide by tp; otherwise every tp rank holds the whole tensor."""
    must_divide: str | None = None
    """Config entry without which tp cannot cut this tensor at all: heads are never divided."""
    name_class_pp: str | None = None
    """Layer class under pipeline parallelism, where it differs."""
    name_class_sp: str | None = None
    """Layer class under sequence parallelism (tp > 1), where it differs."""
    shape: tuple[str, ...] | None = None
    """Expected global shape as sums of products of config entries, to check against; ``a/b`` is rounded down."""
    tied_to: str | None = None
    """Key that shares the values where the config ties word embeddings."""
    always_tied: bool = False
    """Whether the family ties them whatever the config says."""
    key_pp: str | None = None
    """Key in the files under pipeline parallelism, where it differs; a key of the first stage, in the last one."""
    name_class_ep: str | None = None
    """Layer class under expert parallelism, where it differs."""
    name_class_ep_sp: str | None = None
    """Layer class under sequence parallelism where experts are spread, where it differs only then."""
    is_distributed: Literal["always", "never", "ep"] | None = None
    """Where the library does not mark a tensor by whether tp cuts it: ``always``, ``never``, or also under ``ep``."""
    leads_if_unified: bool = False
    """Whether it comes before the experts in the unified layer of expert parallelism."""
    parameter_name: str | None = None
    """The whole parameter name where the library gives it: ``{n}`` counts, ``{layer}`` is the decoder layer."""
    built_after: str | None = None
    """Key of the row right after whose tensor it is built, where rows, as the files, have another order."""
    discards: tuple[Discarded, ...] = ()
    """What the library builds right before it, and gives up."""
    where: Mapping[str, Any] = field(default_factory=dict)
    """Config entries that must have these values for the row to apply."""
    huggingface: HuggingFaceForm | None = None
    """What it is in a Hugging Face checkpoint; ``None``: not known."""

    def pattern(self) -> re.Pattern[str]:
        """The whole key as a regular expression."""
        return _pattern(self.key)

    def applies(self, config: Config) -> bool:
        """Whether the row is one of this model's."""
        return all(config_entry(config, name, False) == value for name, value in self.where.items())

    def fill_in(self, form: str, key: str) -> str:
        """Another spelling of a key of this row, with the same numbers."""
        match = self.pattern().fullmatch(key)
        return form.format(**(match.groupdict() if match else {}))

    def split_dim(self, config: Config, tp: int, key: str | None = None) -> int | None:
        """The dim that ``tp`` ranks cut in this model, or ``None`` where each holds the whole tensor."""
        if self.split is None or tp == 1:
            return self.split
        if not self.must_divide and not self.split_if_divisible:
            return self.split
        key = key or self.key
        values = derived_sizes(config)
        if self.must_divide and size_of(values, self.must_divide, key) % tp:
            raise RuleError(
                key,
                f"tp={tp} does not divide {self.must_divide}={values[self.must_divide]} of the config",
            )
        if self.split_if_divisible and size_of(values, self.split_if_divisible, key) % tp:
            return None
        return self.split

    @property
    def fused_parts(self) -> int:
        """How many logical parts are fused along ``split``."""
        return self.parts if self.part_widths is None else len(self.part_widths)

    def shares(self, config: Config) -> tuple[int, ...]:
        """The extents of the parts that are fused along ``split``, as a ratio in lowest terms; ``(1,)`` for one part.

        Raises
        ------
        RuleError
            If the parts do not make up the tensor.
        """
        if self.part_widths is None:
            return (1,) * self.parts
        widths = evaluate_sizes(self.part_widths, config, self.key)
        shape = expected_shape(self, config)
        extent = sum(widths) if shape is None or self.split is None else shape[self.split]
        if min(widths) < 1 or sum(widths) != extent:
            raise RuleError(
                self.key, f"parts of {list(widths)} elements are not its dim of {extent} elements"
            )
        return tuple(width // gcd(*widths) for width in widths)

    def twin(self, config: Config) -> str | None:
        """The key that holds the same values in this model."""
        return self.tied_to if self.always_tied or ties_words(config) else None

    def class_for(self, pp: int, tp: int, sequence_parallel: bool, ep: int = 1) -> str:
        """Layer class in parameter names of a job."""
        if pp > 1 and self.name_class_pp:
            return self.name_class_pp
        if ep > 1 and tp > 1 and sequence_parallel and self.name_class_ep_sp:
            return self.name_class_ep_sp
        if ep > 1 and self.name_class_ep:
            return self.name_class_ep
        if tp > 1 and sequence_parallel and self.name_class_sp:
            return self.name_class_sp
        return self.name_class

    @property
    def first_number(self) -> int:
        """The number in the parameter name of the first tensor of its kind in a layer: 0 in ``linear_0.w_0``."""
        return 0

    @property
    def of_expert(self) -> bool:
        """Whether its tensors belong to one routed expert each."""
        return "{expert}" in self.key

    def marked_distributed(self, cut: bool, ep: int) -> bool:
        """What the library says of a tensor that every rank holds, if tp does or does not cut it."""
        if self.is_distributed == "never":
            return False
        return cut or self.is_distributed == "always" or (self.is_distributed == "ep" and ep > 1)


LORA = {"lora_A": 1, "lora_B": 2}
"""Last word in the keys of the two matrices that LoRA trains beside a linear layer → the number in its parameter name:
the layer that LoRA puts in the place of the linear one makes a weight of its own first (``w_0``), and gives it up."""


@dataclass(frozen=True, slots=True)
class LoraRule(Rule):
    """The row of ``lora_A [in, r]`` or ``lora_B [r, out]``, which follows from that of the weight ``[in, out]``.

    tp cuts ``lora_A`` where it cuts rows of the weight, and ``lora_B`` where it cuts columns; every rank holds the
    other matrix whole (PaddleFormers 1.2 ``peft/lora/lora_layers.py``).
    """

    weight: Rule | None = None
    """The row of the weight."""

    @classmethod
    def beside(cls, weight: Rule, name: str) -> LoraRule:
        """The row of ``name``, one of :data:`LORA`, beside a linear layer.

        Raises
        ------
        RuleError
            If LoRA of this layer is not supported.
        """
        key = f"{weight.key.removesuffix('weight')}{name}"
        if weight.name_class != "linear" or weight.of_expert or (weight.split or 0) > 1:
            what = "a routed expert" if weight.of_expert else f"{weight.key}, which is no linear layer,"
            raise RuleError(key, f"LoRA of {what} is not supported")
        cut = weight.split is not None and weight.split == (name == "lora_B")
        return cls(
            key=key,
            item=weight.item,
            name_class="lo_ra_linear",
            source=weight.source,
            split=weight.split if cut else None,
            parts=weight.parts if cut else 1,
            part_widths=weight.part_widths if cut else None,
            split_if_divisible=weight.split_if_divisible if cut else None,
            must_divide=weight.must_divide if cut else None,
            where=weight.where,
            weight=weight,
        )

    @property
    def name(self) -> str:
        """Which of the two it is."""
        return self.key.rpartition(".")[2]

    @property
    def first_number(self) -> int:
        """1 or 2: see :data:`LORA`."""
        return LORA[self.name]

    def class_for(self, pp: int, tp: int, sequence_parallel: bool, ep: int = 1) -> str:
        """Layer class in parameter names of a job: LoRA's, for the class that the linear layer has there."""
        if tp == 1 or self.weight is None or self.weight.split is None:
            return self.name_class
        axis = ("row", "column")[self.weight.split]
        in_sequence = sequence_parallel and self.weight.name_class_sp == f"{axis}_sequence_parallel_linear"
        return f"{axis}_{'sequence_' if in_sequence else ''}parallel_lo_ra_linear"


LAYERS = "num_hidden_layers"
"""Config entry: how many decoder layers there are."""
MTP_LAYERS = "num_nextn_predict_layers"
"""Config entry: how many layers of multi-token prediction (MTP) follow the decoder layers."""


@dataclass(frozen=True, slots=True)
class Item:
    """One kind of pipeline item. ``layer_class`` is its class, by which a segmentation may choose it."""

    name: str
    layer_class: str
    """Empty: the library's pipeline has no such item."""
    repeated: bool = False
    """Whether it is the decoder layer, of which there are many."""
    mtp: bool = False
    """Whether it is a layer of multi-token prediction, or a part of one; there are as many as ``MTP_LAYERS`` says."""
    continues: str | None = None
    """The decoder layer's item, whose rows it has too; it is numbered on from there."""
    built_before: str | None = None
    """The item before which it is built where there are no pipeline stages."""
    count: str | None = None
    """Config entry: how many there are of an item that is numbered and is no decoder layer; of a list, its length."""


@dataclass(frozen=True, slots=True)
class Proof:
    """What the rows of a table have been compared with."""

    files: Literal["checkpoints", "classes", "declarations"]
    """Files of ranks: with real checkpoints, with tensors that the library's classes build, or with nothing but what
    its code declares."""
    huggingface: Literal["transformers", "library", "declarations"] | None = None
    """Hugging Face forms: ``transformers`` computes the logits of the Paddle model from an export; an export equals
    the library's own, or the library imports it as the same parameters; or nothing but what its code declares.
    ``None`` without forms."""


@dataclass(frozen=True, slots=True)
class RuleTable:
    """All rows of a model family as one library spells it. ``items`` are in pipeline order."""

    family: str
    convention: str
    model_types: tuple[str, ...]
    items: tuple[Item, ...]
    rules: tuple[Rule, ...]
    experts: str | None = None
    """Config entry: the number of routed experts in a layer."""
    expert_axis: Literal["ep", "tp", "dp"] | None = None
    """The axis over which the library can spread routed experts, whole ones to every rank: ``ep``, ``tp`` or ``dp``."""
    refused: Mapping[str, str] = field(default_factory=dict)
    """Axes that no job of the family can have together, ``tp,pp`` → what the trainer does instead."""
    muon_exclude_patterns: tuple[str, ...] = ("embed", "bias", "lm_head", "mlp.gate")
    """What a name must not have in it for Muon to update the parameter; the default of the trainer's arguments."""
    saved_prefixes: Mapping[str, str] = field(default_factory=dict)
    """Beginnings of keys that the class renames where it saves weights itself, in files without ``model_meta.json`` →
    what they are there."""
    proven: Proof | None = field(default=None, compare=False, repr=False)
    """What it has been compared with; ``None``: not said, as in a table that a user writes."""
    comment: str | tuple[str, ...] = field(default="", compare=False, repr=False)
    """For people."""

    @property
    def supports_lora(self) -> bool:
        """Whether it is known how LoRA training saves the family: PaddleFormers' language models."""
        return self.convention == "paddleformers" and not any(item.count for item in self.items)

    @property
    def counts_layers(self) -> bool:
        """Whether keys tell their layer, so that the config can be held against their number."""
        return any("{layer}" in rule.key for rule in self.rules)

    @property
    def mtp_items(self) -> dict[str, Item]:
        """Name → item, of those that make up multi-token prediction."""
        return {item.name: item for item in self.items if item.mtp}

    def build_order(self, pp: int) -> dict[str, int]:
        """Name of an item → its place in the order in which a job with ``pp`` stages builds the model."""
        names = [item.name for item in self.items]
        for item in self.items:
            if pp == 1 and item.built_before is not None:
                names.remove(item.name)
                names.insert(names.index(item.built_before), item.name)
        return {name: place for place, name in enumerate(names)}

    def first_mtp_layer(self, item: Item, config: Config) -> int:
        """The number of the first layer of multi-token prediction in the keys of its item."""
        return count_entry(config, LAYERS) if item.continues else 0

    def numbers(self, item: Item, config: Config) -> Sequence[int | None]:
        """The numbers of all items of a kind in a model; ``None`` where there is only one."""
        if item.repeated:
            return range(count_entry(config, LAYERS))
        if item.count is not None:
            return range(count_entry(config, item.count))
        first = self.first_mtp_layer(item, config)
        return range(first, first + count_entry(config, MTP_LAYERS)) if item.mtp else (None,)

    def key_saved_as(self, saved: str) -> str:
        """The key of a tensor by what the class renames it to where it saves weights itself."""
        if any(saved.startswith(prefix) for prefix in self.saved_prefixes):
            return saved
        return renamed_prefix(saved, {saved_as: prefix for prefix, saved_as in self.saved_prefixes.items()})

    def find(self, key: str, config: Config) -> tuple[Rule, int | None]:
        """The row for ``key`` and its decoder layer; for the matrices of LoRA that follows from the weight's row.

        Raises
        ------
        RuleError
            If no row fits, or more than one.
        """
        module, _, name = key.rpartition(".")
        if name in LORA:
            weight, numbered = self.find(f"{module}.weight", config)
            return LoraRule.beside(weight, name), numbered
        fits = [
            (self._of_layer(rule, match, config), match)
            for rule in self.rules
            if rule.applies(config) and (match := rule.pattern().fullmatch(key))
        ]
        fits = [(rule, match) for rule, match in fits if self._may_hold(rule, match, config)]
        if len(fits) != 1:
            found = "no row" if not fits else f"{len(fits)} rows"
            raise RuleError(
                key,
                f"{found} of the {self.convention} rule table {self.family!r} fits; add one to a copy of the "
                f"table and pass it with --rules FILE",
            )
        rule, match = fits[0]
        return rule, _layer_of(match)

    def _of_layer(self, rule: Rule, match: re.Match[str], config: Config) -> Rule:
        """The row, which is one of the item that continues its own for layers of multi-token prediction."""
        layer = _layer_of(match)
        if layer is None:
            return rule
        for item in self.items:
            if item.continues == rule.item:
                first = self.first_mtp_layer(item, config)
                if first and first <= layer < first + count_entry(config, MTP_LAYERS):
                    return replace(rule, item=item.name)
        return rule

    def _may_hold(self, rule: Rule, match: re.Match[str], config: Config) -> bool:
        """Whether a row of an item that continues the decoder layers is asked for one of its own layers."""
        item, layer = self.mtp_items.get(rule.item), _layer_of(match)
        return item is None or layer is None or layer >= self.first_mtp_layer(item, config)


def renamed_prefix(key: str, prefixes: Mapping[str, str]) -> str:
    """A key with another beginning, if it has one of the prefixes.

    >>> renamed_prefix("model.visual.merger.ln_q.weight", {"model.visual.": "visual."})
    'visual.merger.ln_q.weight'
    """
    for prefix, other in prefixes.items():
        if key.startswith(prefix):
            return other + key.removeprefix(prefix)
    return key


def _layer_of(match: re.Match[str]) -> int | None:
    layer = match.groupdict().get("layer")
    return None if layer is None else int(layer)


@cache
def _pattern(key: str) -> re.Pattern[str]:
    pattern = re.escape(key).replace(re.escape("{layer}"), r"(?P<layer>\d+)")
    return re.compile(pattern.replace(re.escape("{expert}"), r"(?P<expert>\d+)"))


def expected_shape(rule: Rule, config: Config, key: str | None = None) -> Shape | None:
    """The global shape by the config, or ``None`` where the row gives no shape.

    Raises
    ------
    RuleError
        If the row names an entry that the config does not have.
    """
    if rule.shape is None:
        return None
    return evaluate_sizes(rule.shape, config, key or rule.key)


def evaluate_sizes(texts: Sequence[str], config: Config, key: str) -> Shape:
    """The numbers that sums of products of config entries stand for; ``key`` names the row in an error."""
    values = derived_sizes(config)
    return tuple(_evaluate(text, values, key) for text in texts)


def _evaluate(text: str, values: Mapping[str, int], key: str) -> int:
    def number(word: str) -> int:
        word = word.strip()
        return int(word) if word.isascii() and word.isdigit() else size_of(values, word, key)

    def factor(text: str) -> int:
        whole, *by = text.split("/")
        result = number(whole)
        for word in by:
            if (divisor := number(word)) < 1:
                raise RuleError(key, f"its rule divides by {word.strip()}={divisor}")
            result //= divisor
        return result

    return sum(prod(factor(word) for word in term.split("*")) for term in text.split("+"))


def parse_rule_table(text: str, where: str) -> RuleTable:
    """Read a table from JSON.

    Raises
    ------
    UsageError
        If it is not JSON, an entry is unknown, missing or of the wrong type, or entries contradict each other.
    """
    try:
        table = typed(_renamed(parse_json(text)), RuleTable)
    except EntryError as error:
        raise UsageError(f"{where}: {error}") from error
    except JsonError as error:
        raise UsageError(f"{where}: not valid JSON: {error}") from error
    after = {row.key: row.built_after for row in table.rules}
    for row in table.rules:
        if fault := (
            _placeholder_fault(row) or _parts_fault(row) or _form_fault(row) or _order_fault(row, after)
        ):
            raise UsageError(f"{where}: the row of {row.key!r}: {fault}")
    if unknown := {rule.item for rule in table.rules} - {item.name for item in table.items}:
        raise UsageError(f"{where}: rules name the items {sorted(unknown)}, which are not in 'items'")
    if sum(item.repeated for item in table.items) != 1:
        raise UsageError(f"{where}: exactly one of 'items' must be the repeated decoder layer")
    if fault := _item_fault(table.items):
        raise UsageError(f"{where}: 'items': {fault}")
    known = {"tp", "pp", "sharding", "ep", "dp"}
    if unknown := {axis for axes in table.refused for axis in axes.split(",")} - known:
        raise UsageError(
            f"{where}: 'refused' names {sorted(unknown)}; the axes are {', '.join(sorted(known))}"
        )
    return table


def _item_fault(items: Sequence[Item]) -> str | None:
    """What is wrong with what items say of each other."""
    names = {item.name for item in items}
    decoder = next(item.name for item in items if item.repeated)
    for item in items:
        if item.continues is not None and not (item.mtp and item.continues == decoder):
            return (
                f"{item.name!r} continues {item.continues!r}: only MTP does that, and only with {decoder!r}"
            )
        if item.count is not None and (item.repeated or item.mtp):
            return f"{item.name!r} has a count, which decoder layers and those of MTP have in an entry of their own"
        if item.built_before is not None and item.built_before not in names - {item.name}:
            return f"{item.name!r} is built before {item.built_before!r}, which is none of them"
    return None


_FORMER_NAMES = {"experts_over": "expert_axis"}
"""Names of entries in tables that were written for version 0.1."""


def _renamed(entries: Any) -> Any:
    """The entries of a table under the names that they have here; one that is given under both is unknown as before."""
    if not isinstance(entries, dict):
        return entries
    renamed = {old: new for old, new in _FORMER_NAMES.items() if new not in entries}
    return {renamed.get(name, name): value for name, value in entries.items()}


_PLACEHOLDER = re.compile(r"\{(?:layer|expert|n)\}|[{}]")


def _placeholder_fault(rule: Rule) -> str | None:
    """Both texts are formatted later: nothing but the known names may stand in braces."""
    if twice := [name for name in ("{layer}", "{expert}") if rule.key.count(name) > 1]:
        return f"{twice[0]} stands twice in its key"
    for name_of_text, text, known in (
        ("key", rule.key, ("{layer}", "{expert}")),
        ("parameter_name", rule.parameter_name or "", ("{layer}", "{n}")),
    ):
        if set(_PLACEHOLDER.findall(text)) - {*known}:
            return f"only {' and '.join(known)} stand in braces of {name_of_text}"
    return None


def _order_fault(rule: Rule, after: Mapping[str, str | None]) -> str | None:
    """What is wrong with the place that a row says it is built in; ``after`` says it for every row."""
    seen = [rule.key]
    while (before := after[seen[-1]]) is not None:
        if before not in after:
            return f"it is built after {before!r}, which is no row"
        if sorted(_PLACEHOLDER.findall(before)) != sorted(_PLACEHOLDER.findall(rule.key)):
            return f"it is built after {before!r}, which has other numbers in its key"
        if before in seen:
            return f"it is built after {before!r}, and that after it"
        seen.append(before)
    return None


def _parts_fault(rule: Rule) -> str | None:
    """What is wrong with what a row says of the parts that tp cuts one by one."""
    if rule.part_widths is None:
        return None
    if len(rule.part_widths) < 2 or rule.parts != 1:
        return "part_widths are for two or more parts, and take the place of 'parts'"
    if rule.split is None or rule.shape is None or rule.split >= len(rule.shape):
        return "part_widths need a 'split' and a 'shape' with that dim"
    return None


def _form_fault(rule: Rule) -> str | None:
    """What is wrong with the parts that a row has in a Hugging Face checkpoint."""
    form = rule.huggingface
    if form is None:
        return None
    numbers = sorted(_PLACEHOLDER.findall(rule.key))
    if not form.keys or any(sorted(_PLACEHOLDER.findall(key)) != numbers for key in form.keys):
        return (
            f"keys must name the same {{layer}} and {{expert}} as it, not {', '.join(form.keys) or 'nothing'}"
        )
    if (len(form.keys) > 1) != (form.widths is not None) or len(form.widths or form.keys) != len(form.keys):
        return f"several keys, and only they, need one width each, not {len(form.widths or ())} for {len(form.keys)}"
    if form.groups is not None and len(form.keys) == 1:
        return "groups without several keys"
    return None


class ShippedTables(Sequence[RuleTable]):
    """The tables that come with the package; each is parsed when it is first asked for, since most commands need one.

    All of them name the model types that they are for.
    """

    def __init__(self) -> None:
        self._texts = {
            path.name: path.read_text("utf-8") for path in sorted(Path(__file__).parent.glob("*.json"))
        }
        self._names = list(self._texts)
        self._parsed: dict[str, RuleTable] = {}

    def __len__(self) -> int:
        return len(self._names)

    @overload
    def __getitem__(self, index: int) -> RuleTable: ...

    @overload
    def __getitem__(self, index: slice) -> list[RuleTable]: ...

    def __getitem__(self, index: int | slice) -> RuleTable | list[RuleTable]:
        """A table, or several, in the order of their file names."""
        if isinstance(index, slice):
            return [self._table(name) for name in self._names[index]]
        return self._table(self._names[index])

    def that_mention(self, model_type: str) -> list[RuleTable]:
        """The tables in whose text a model type appears: those for it, and perhaps others."""
        return [self._table(name) for name, text in self._texts.items() if f'"{model_type}"' in text]

    def _table(self, name: str) -> RuleTable:
        if name not in self._parsed:
            self._parsed[name] = parse_rule_table(self._texts[name], name)
        return self._parsed[name]


def shipped_tables() -> ShippedTables:
    """The tables that come with the package."""
    return ShippedTables()


def choose_table(tables: Sequence[RuleTable], keys: Iterable[str], config: Config) -> RuleTable:
    """The one table that has a row for every key.

    Raises
    ------
    RuleError
        Naming the first key, in the order of the alphabet, that the nearest table does not cover.
    """
    keys = sorted(set(keys))
    candidates = candidate_tables(tables, config)
    failures = [[key for key in keys if _failure(table, key, config)] for table in candidates]
    fitting = [table for table, failed in zip(candidates, failures, strict=True) if not failed]
    if len(fitting) > 1:
        raise RuleError(
            f"model type {config.get('model_type')!r}",
            f"several rule tables fit: {', '.join(f'{t.family} ({t.convention})' for t in fitting)}; pass the "
            "right one with --rules FILE",
        )
    if fitting:
        return fitting[0]
    nearest, failed = min(zip(candidates, failures, strict=True), key=lambda pair: len(pair[1]))
    raise _failure(nearest, failed[0], config) or RuleError(failed[0], "no row fits")


def candidate_tables(tables: Sequence[RuleTable], config: Config) -> list[RuleTable]:
    """The tables of the model's family, and of the library that the config names.

    Raises
    ------
    RuleError
        If there is none.
    """
    model_type = config.get("model_type")
    library = library_of(config)
    likely = tables.that_mention(str(model_type)) if isinstance(tables, ShippedTables) else tables
    candidates = [
        table
        for table in likely
        if (not table.model_types or model_type in table.model_types)
        and (library is None or len(tables) == 1 or table.convention == library)
    ]
    if not candidates:
        known = sorted({name for t in tables for name in t.model_types})
        raise RuleError(
            f"model type {model_type!r}",
            f"no rule table knows it (known: {', '.join(known)}); write one and pass it with --rules FILE",
        )
    return candidates


def keys_in_model(tables: Sequence[RuleTable], saved: Iterable[str], config: Config) -> dict[str, str]:
    """Keys in files of weights that the model's class has saved itself → what they are in the model, if it renames."""
    try:
        renaming = [table for table in candidate_tables(tables, config) if table.saved_prefixes]
    except RuleError:
        renaming = []
    return {key: renaming[0].key_saved_as(key) for key in saved} if renaming else {}


def library_of(config: Config) -> str | None:
    """The library that the config names; ``None`` where it names none."""
    return next((name for name in ("paddleformers", "paddlenlp") if f"{name}_version" in config), None)


def _failure(table: RuleTable, key: str, config: Config) -> RuleError | None:
    try:
        table.find(key, config)
    except RuleError as error:
        return error
    return None
