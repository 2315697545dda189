"""Model knowledge that no checkpoint stores: which dim tp cuts, what is fused, how parameters are named.

One JSON table per model family and library; see ``rules/README.md`` beside this file for its fields.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from math import gcd, prod
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, overload

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
    """A tensor's form in a Hugging Face checkpoint: a single tensor, or several that Paddle fuses."""

    keys: tuple[str, ...]
    """Key of each part in Hugging Face checkpoints; ``{layer}`` and ``{expert}`` are the numbers in the row's key.
    Parts with the same key are one tensor there."""
    transposed: bool = False
    """Whether the last two dims are swapped: ``[in, out]`` in Paddle, ``[out, in]`` in Hugging Face."""
    saved_transposed: bool | None = None
    """Whether the two dims are swapped when the trainer saves with ``save_to_hf``; ``None``: as ``transposed`` for a
    single key, not at all for several."""
    widths: tuple[str, ...] | None = None
    """Extent of each part along Paddle's last dim, as sums of products of config entries; required for several keys."""
    groups: str | None = None
    """Config entry with the number of groups into which the last dim is divided; each group has a share of every part.

    4 query heads and 2 key/value heads with ``groups = "num_key_value_heads"`` are stored as
    ``[q q k v | q q k v]``.
    """
    groups_there: str | None = None
    """Config entry with the number of groups into which a tensor of several parts is divided in Hugging Face
    checkpoints; each group has a share of every part. ``None``: one part after the other."""
    stacked: str | None = None
    """Config entry: the number of routed experts that lie one after the other along the first dim here, or in a
    ``shape`` of three dims along a dim of their own. Each has tensors of its own there, numbered where its key has
    ``{expert}``."""
    keep_float32: bool = False
    """Whether it stays float32 when the model is converted to another dtype."""

    @property
    def tensors(self) -> tuple[str, ...]:
        """The keys there, each once."""
        return tuple(dict.fromkeys(self.keys))

    def key_of(self, tensor: int, expert: int) -> str:
        """Key of one of the :attr:`tensors` there, of one of several experts that are stacked here."""
        return self.tensors[tensor].replace("{expert}", str(expert))

    @property
    def transposed_as_saved(self) -> bool:
        """Whether the two dims are swapped when the trainer saves with ``save_to_hf``."""
        if self.saved_transposed is not None:
            return self.saved_transposed
        return self.transposed and len(self.keys) == 1


@dataclass(frozen=True, slots=True)
class Discarded:
    """A parameter that the library creates and then replaces; it only advances the counters in parameter names."""

    name_class: str
    """Layer class, as in a row."""
    name_class_sp: str | None = None
    """Layer class under sequence parallelism (tp > 1), if it differs."""

    def class_for(self, tp: int, sequence_parallel: bool) -> str:
        """Layer class in a job with this configuration."""
        return (tp > 1 and sequence_parallel and self.name_class_sp) or self.name_class


@dataclass(frozen=True, slots=True)
class Rule:
    """A row of a rule table; applies to every tensor whose key matches ``key``."""

    key: str
    """Structured name; ``{layer}`` matches the number of a decoder layer, ``{expert}`` that of a routed expert."""
    item: str
    """Name of the pipeline item that owns it."""
    name_class: str
    """Layer class in the framework's parameter name: ``linear`` in ``linear_0.w_0``."""
    source: str
    """Evidence for the row."""
    split: Annotated[int, Bounds(0)] | None = None
    """Dim that tensor parallelism cuts; ``None``: every tp rank holds the whole tensor."""
    parts: Annotated[int, Bounds(1)] = 1
    """How many equal logical parts are fused along ``split``; a tp rank holds its piece of each."""
    part_widths: tuple[str, ...] | None = None
    """For unequal parts: the extent of each along ``split``, as sums of products of config entries."""
    split_if_divisible: str | None = None
    """Config entry that tp must divide; otherwise every tp rank holds the whole tensor."""
    must_divide: str | None = None
    """Config entry that tp must divide; otherwise the topology is refused, because heads are never divided."""
    name_class_pp: str | None = None
    """Layer class under pipeline parallelism, if it differs."""
    name_class_sp: str | None = None
    """Layer class under sequence parallelism (tp > 1), if it differs."""
    shape: tuple[str, ...] | None = None
    """Expected global shape; each dim is a sum of products of config entries, in which ``a/b`` is rounded down."""
    tied_to: str | None = None
    """Key with the same values if the config ties word embeddings."""
    always_tied: bool = False
    """Whether the family ties them regardless of the config."""
    key_pp: str | None = None
    """Key in the files of the last stage under pipeline parallelism, if it differs: a key of the first stage."""
    name_class_ep: str | None = None
    """Layer class under expert parallelism, if it differs."""
    name_class_ep_sp: str | None = None
    """Layer class under expert and sequence parallelism together, if it differs."""
    is_distributed: Literal["always", "never", "ep"] | None = None
    """If the library's flag does not say whether tp cuts the tensor: ``always``, ``never``, or set under ``ep`` too."""
    leads_if_unified: bool = False
    """Whether it comes before the experts in the unified layer of expert parallelism."""
    parameter_name: str | None = None
    """The whole parameter name if the library sets it: ``{n}`` counts, ``{layer}`` is the decoder layer."""
    built_after: str | None = None
    """Key of the row right after whose tensor the library builds it, if that is not the order of the rows."""
    discards: tuple[Discarded, ...] = ()
    """What the library creates right before it and then replaces."""
    where: Mapping[str, Any] = field(default_factory=dict)
    """Config entries that must have these values for the row to apply."""
    former: bool = False
    """Whether only earlier versions of the library call it so: it is read, and not written."""
    huggingface: HuggingFaceForm | None = None
    """The tensor's form in a Hugging Face checkpoint; ``None``: unknown."""

    def pattern(self) -> re.Pattern[str]:
        """``key`` as a regular expression for the whole key."""
        return _pattern(self.key)

    def applies(self, config: Config) -> bool:
        """Whether the model with this config has the row."""
        return all(config_entry(config, name, False) == value for name, value in self.where.items())

    def fill_in(self, form: str, key: str) -> str:
        """``form`` with the layer and expert numbers of ``key`` filled in; a number that ``key`` lacks stays open."""
        match = self.pattern().fullmatch(key)
        for name, number in (match.groupdict() if match else {}).items():
            form = form.replace(f"{{{name}}}", number)
        return form

    def split_dim(self, config: Config, tp: int, key: str | None = None) -> int | None:
        """The dim that ``tp`` ranks cut in this model, or ``None`` if each holds the whole tensor.

        Raises
        ------
        RuleError
            If tp does not divide ``must_divide``, or the config lacks an entry.
        """
        if self.split is None or tp == 1:
            return self.split
        if not self.must_divide and not self.split_if_divisible:
            return self.split
        key = key or self.key
        values = derived_sizes(config)
        if self.must_divide and size_of(values, self.must_divide, key) % tp:
            raise RuleError(
                key,
                f"tp={tp} does not divide {self.must_divide}={values[self.must_divide]} of the config, as the trainer "
                "asserts",
            )
        if self.split_if_divisible and size_of(values, self.split_if_divisible, key) % tp:
            return None
        return self.split

    def stays_whole(self, config: Config, tp: int, key: str) -> bool:
        """Whether each of ``tp`` ranks holds the whole tensor because they do not divide ``split_if_divisible``."""
        return tp > 1 and self.split_if_divisible is not None and self.split_dim(config, tp, key) is None

    @property
    def fused_parts(self) -> int:
        """How many logical parts are fused along ``split``."""
        return self.parts if self.part_widths is None else len(self.part_widths)

    def shares(self, config: Config) -> tuple[int, ...]:
        """The extents of the parts fused along ``split``, as a ratio in lowest terms; ``(1,)`` for a single part.

        Parts of 4096, 1024 and 1024 elements are ``(4, 1, 1)``.

        Raises
        ------
        RuleError
            If the extents of the parts do not add up to the dim.
        """
        if self.part_widths is None:
            return (1,) * self.parts
        widths = evaluate_sizes(self.part_widths, config, self.key)
        shape = expected_shape(self, config)
        extent = sum(widths) if shape is None or self.split is None else shape[self.split]
        if min(widths) < 1 or sum(widths) != extent:
            raise RuleError(
                self.key, f"parts of {list(widths)} elements do not add up to its dim of {extent} elements"
            )
        return tuple(width // gcd(*widths) for width in widths)

    def twin(self, config: Config) -> str | None:
        """The key with the same values in this model, or ``None``."""
        return self.tied_to if self.always_tied or ties_words(config) else None

    def class_for(self, pp: int, tp: int, sequence_parallel: bool, ep: int = 1) -> str:
        """Layer class in the parameter names of a job.

        Raises
        ------
        RuleError
            If the row does not tell it.
        """
        if not self.name_class:
            raise RuleError(
                self.key, "what a job calls its parameter is not known: no file that tells it was available"
            )
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
        """Number in the parameter name of a layer's first weight or bias: 0 in ``linear_0.w_0``."""
        return 0

    @property
    def of_expert(self) -> bool:
        """Whether each of its tensors belongs to a single routed expert."""
        return "{expert}" in self.key

    @property
    def of_experts(self) -> bool:
        """Whether each of its tensors holds all routed experts of a layer, one after the other along the first dim."""
        form = self.huggingface
        return form is not None and form.stacked is not None and len(self.shape or ()) == 2

    def marked_distributed(self, cut: bool, ep: int) -> bool:
        """Value of the library's ``is_distributed`` flag; ``cut``: whether tp cuts the tensor."""
        if self.is_distributed == "never":
            return False
        return cut or self.is_distributed == "always" or (self.is_distributed == "ep" and ep > 1)


LORA = {"lora_A": 1, "lora_B": 2}
"""Last component of the keys of the two LoRA matrices of a linear layer → number in the parameter name. The layer that
replaces the linear one first creates a weight of its own (``w_0``), which it then discards."""


@dataclass(frozen=True, slots=True)
class LoraRule(Rule):
    """The row of ``lora_A [in, r]`` or ``lora_B [r, out]``, derived from the row of the weight ``[in, out]``.

    tp cuts ``lora_A`` if it cuts rows of the weight, and ``lora_B`` if it cuts columns; every rank holds the whole of
    the matrix that is not cut (PaddleFormers 1.2 ``peft/lora/lora_layers.py``).
    """

    weight: Rule | None = None
    """The row of the weight."""

    @classmethod
    def beside(cls, weight: Rule, name: str) -> LoraRule:
        """The row of the matrix ``name``, a key of :data:`LORA`, of a linear layer.

        Raises
        ------
        RuleError
            If LoRA of this layer is not supported.
        """
        key = f"{weight.key.removesuffix('weight')}{name}"
        if weight.name_class != "linear" or weight.of_expert or (weight.split or 0) > 1:
            what = "a routed expert" if weight.of_expert else f"{weight.key}, which is not a linear layer,"
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
        """``lora_A`` or ``lora_B``."""
        return self.key.rpartition(".")[2]

    @property
    def first_number(self) -> int:
        """1 or 2: see :data:`LORA`."""
        return LORA[self.name]

    def class_for(self, pp: int, tp: int, sequence_parallel: bool, ep: int = 1) -> str:
        """Layer class in the parameter names of a job: LoRA's counterpart of the linear layer's class."""
        if tp == 1 or self.weight is None or self.weight.split is None:
            return self.name_class
        axis = ("row", "column")[self.weight.split]
        in_sequence = sequence_parallel and self.weight.name_class_sp == f"{axis}_sequence_parallel_linear"
        return f"{axis}_{'sequence_' if in_sequence else ''}parallel_lo_ra_linear"


LAYERS = "num_hidden_layers"
"""Config entry: how many decoder layers there are."""
MTP_LAYERS = "num_nextn_predict_layers"
"""Config entry: how many layers of multi-token prediction (MTP) follow the decoder layers."""
_MTP_ENTRIES = (MTP_LAYERS, "mtp_num_hidden_layers")


def mtp_entry(config: Config) -> str:
    """The config entry that counts the layers of MTP; Qwen3.5 calls it ``mtp_num_hidden_layers``.

    >>> mtp_entry({"text_config": {"mtp_num_hidden_layers": 1}})
    'mtp_num_hidden_layers'
    """
    return next((name for name in _MTP_ENTRIES if config_entry(config, name)), MTP_LAYERS)


DECODER_LAYERS = "layer:DecoderLayer"
"""The segmentation of most pipeline classes: decoder layers alone are distributed evenly."""


@dataclass(frozen=True, slots=True)
class Item:
    """A kind of pipeline item."""

    name: str
    layer_class: str
    """Its class, which a segmentation ``layer:Regex`` matches; empty: the library's pipeline has no such item."""
    repeated: bool = False
    """Whether it is the decoder layer."""
    mtp: bool = False
    """Whether it is a layer of multi-token prediction, or a part of one; ``MTP_LAYERS`` of the config counts them."""
    continues: str | None = None
    """The decoder layer's item, for MTP layers that have its rows too and are numbered after it."""
    inner: str | None = None
    """For an item with ``continues``: the module that has the decoder layer's rows, ``transformer_layer`` in
    ``layers.4.transformer_layer.mlp``; ``None``: the layer itself."""
    there: str | None = None
    """For an item with ``continues``: the beginning of its keys in Hugging Face checkpoints, which have no number of a
    layer, so that there can be only one. It has its own rows, and not those of the decoder layers."""
    built_before: str | None = None
    """The item before which it is built in a job without pipeline stages."""
    count: str | None = None
    """Config entry with the number of such items, or a list of that length; for numbered items but decoder layers."""


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
    """All rows of a model family as a library spells it. ``items`` are in pipeline order."""

    family: str
    convention: str
    model_types: tuple[str, ...]
    items: tuple[Item, ...]
    rules: tuple[Rule, ...]
    experts: str | None = None
    """Config entry with the number of routed experts in a layer."""
    expert_axis: Literal["ep", "tp", "dp"] | None = None
    """The axis over which the library can distribute whole routed experts: ``ep``, ``tp`` or ``dp``."""
    segmentation: str = DECODER_LAYERS
    """How the pipeline class distributes its items if the number of stages divides the decoder layers."""
    refused: Mapping[str, str] = field(default_factory=dict)
    """Axes that a job of the family cannot combine, as ``tp,pp`` → what the trainer does instead."""
    muon_exclude_patterns: tuple[str, ...] = ("embed", "bias", "lm_head", "mlp.gate")
    """Parameters whose name contains any of these are not updated by Muon; the trainer's default."""
    saved_prefixes: Mapping[str, str] = field(default_factory=dict)
    """Prefix of keys → prefix under which the model class saves them in files without ``model_meta.json``."""
    proven: Proof | None = field(default=None, compare=False, repr=False)
    """How the table was tested; ``None``: not recorded, as in a table that a user writes."""
    formats: tuple[str, ...] | None = None
    """Formats that the table supports; ``None``: all."""
    shared_with: tuple[str, ...] = ()
    """Further libraries whose models of the family have the same tensors under the same names."""
    shifted_by: str | None = None
    """Config entry: by how much layers may be numbered higher in keys than in the model."""
    comment: str | tuple[str, ...] = field(default="", compare=False, repr=False)
    """Ignored by the program."""

    @property
    def supports_lora(self) -> bool:
        """Whether LoRA of the family is supported: language models of PaddleFormers."""
        return self.convention == "paddleformers" and not any(item.count for item in self.items)

    @property
    def counts_layers(self) -> bool:
        """Whether keys contain layer numbers, so that their count can be checked against the config."""
        return any("{layer}" in rule.key for rule in self.rules)

    @property
    def mtp_items(self) -> dict[str, Item]:
        """Name → item, for the items of multi-token prediction."""
        return {item.name: item for item in self.items if item.mtp}

    def build_order(self, pp: int) -> dict[str, int]:
        """Name of an item → its position in the order in which a job with ``pp`` stages builds the model."""
        names = [item.name for item in self.items]
        for item in self.items:
            if pp == 1 and item.built_before is not None:
                names.remove(item.name)
                names.insert(names.index(item.built_before), item.name)
        return {name: position for position, name in enumerate(names)}

    def first_mtp_layer(self, item: Item, config: Config) -> int:
        """Number of the first MTP layer in the keys of its item."""
        return count_entry(config, LAYERS) if item.continues else 0

    def numbers(self, item: Item, config: Config) -> Sequence[int | None]:
        """The layer numbers of all items of a kind in a model; ``(None,)`` for an item that occurs once."""
        if item.repeated:
            return range(count_entry(config, LAYERS))
        if item.count is not None:
            return range(count_entry(config, item.count))
        first = self.first_mtp_layer(item, config)
        return range(first, first + count_entry(config, mtp_entry(config))) if item.mtp else (None,)

    def key_saved_as(self, saved: str) -> str:
        """The key in the model of a tensor that the model class saved as ``saved``."""
        if any(saved.startswith(prefix) for prefix in self.saved_prefixes):
            return saved
        return renamed_prefix(saved, {saved_as: prefix for prefix, saved_as in self.saved_prefixes.items()})

    def find(self, key: str, config: Config) -> tuple[Rule, int | None]:
        """The row for ``key``, and the number of its decoder layer; rows of LoRA matrices follow from the weight's.

        Raises
        ------
        RuleError
            If no row matches, or more than one.
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
        fits = [(rule, match) for rule, match in fits if self.holds(rule, _layer_of(match), config)]
        if len(fits) != 1:
            found = f"{len(fits)} rows" if fits else "no row"
            advice = "keep only one in" if fits else "add one to"
            raise RuleError(
                key,
                f"{found} of the {self.convention} rule table {self.family!r} {'fit' if fits else 'fits'}; {advice} a "
                "copy of the table and pass it with --rules FILE",
            )
        rule, match = fits[0]
        return rule, _layer_of(match)

    def _of_layer(self, rule: Rule, match: re.Match[str], config: Config) -> Rule:
        """The row, assigned to the MTP item that continues its item if the layer is an MTP layer."""
        layer = _layer_of(match)
        if layer is None:
            return rule
        for item in self.items:
            if item.continues == rule.item and item.inner is None and item.there is None:
                first = self.first_mtp_layer(item, config)
                if first and first <= layer < first + count_entry(config, mtp_entry(config)):
                    return replace(rule, item=item.name)
        return rule

    def holds(self, rule: Rule, layer: int | None, config: Config) -> bool:
        """Whether a row may be one of a layer: items that share their numbers have layers of their own."""
        if layer is None:
            return True
        if (item := self.mtp_items.get(rule.item)) is not None:
            return layer >= self.first_mtp_layer(item, config)
        behind = [
            item
            for item in self.items
            if item.continues == rule.item and (item.inner is not None or item.there is not None)
        ]
        return not behind or layer < (self.first_mtp_layer(behind[0], config) or layer + 1)

    def written_shift(self, config: Config) -> int:
        """By how much a target's keys number layers higher than the model does: 2 behind two empty layers.

        Raises
        ------
        RuleError
            If it is not settled how the version that is to train on numbers them.
        """
        shift = config.get(self.shifted_by) if self.shifted_by is not None else None
        if not shift:
            return 0
        if isinstance(shift, int) and library_of(config) == "paddleformers":
            return shift
        raise RuleError(
            f"{self.family} ({self.convention})",
            f"config.json says {self.shifted_by}={shift!r}: {self.convention} 0.3, with which PaddleFormers 1.2 "
            "trains, numbers its layers from there on, and later versions number them from 0 on; which of them is to "
            "train on is not known. For 0.3, give a config.json with paddleformers_version with --config FILE; for a "
            "later one, set the entry to 0 in it",
        )

    def is_for(self, format: str) -> bool:
        """Whether the table tells enough for a format."""
        return self.formats is None or format in self.formats

    def check_format(self, format: str) -> None:
        """Refuse a format for which the table does not tell enough.

        Raises
        ------
        RuleError
            Naming the formats for which it does.
        """
        if not self.is_for(format):
            raise RuleError(
                f"{self.family} ({self.convention})",
                f"{self.convention}'s names and layouts are known for the formats {' and '.join(self.formats or ())} "
                f"only, "
                f"not for {format}: no file of another one was available; convert to one of these, or to the names of "
                "another library with --convention",
            )


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
    """The global shape according to the config, or ``None`` if the row gives no shape.

    Raises
    ------
    RuleError
        If the config lacks an entry that the row names.
    """
    if rule.shape is None:
        return None
    return evaluate_sizes(rule.shape, config, key or rule.key)


def evaluate_sizes(texts: Sequence[str], config: Config, key: str) -> Shape:
    """Evaluate sums of products of config entries, such as ``"2 * hidden_size + 8"``; ``key`` is for error messages."""
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
        If it is not valid JSON, an entry is unknown, missing or of the wrong type, or entries contradict each other.
    """
    try:
        table = typed(_renamed(parse_json(text)), RuleTable)
    except EntryError as error:
        raise UsageError(f"{where}: {error}") from error
    except JsonError as error:
        raise UsageError(f"{where}: not valid JSON: {error}") from error
    after = {row.key: row.built_after for row in table.rules}
    alone = {item.name for item in table.items if item.there is not None}
    for row in table.rules:
        if fault := (
            _placeholder_fault(row)
            or _parts_fault(row)
            or _form_fault(row, row.item in alone)
            or _order_fault(row, after)
        ):
            raise UsageError(f"{where}: the row of {row.key!r}: {fault}")
    if unknown := {rule.item for rule in table.rules} - {item.name for item in table.items}:
        raise UsageError(f"{where}: rules refer to the items {sorted(unknown)}, which are not in 'items'")
    if sum(item.repeated for item in table.items) != 1:
        raise UsageError(f"{where}: exactly one of 'items' must be the repeated decoder layer")
    if fault := _item_fault(table.items):
        raise UsageError(f"{where}: 'items': {fault}")
    known = {"tp", "pp", "sharding", "ep", "dp"}
    if unknown := {axis for axes in table.refused for axis in axes.split(",")} - known:
        raise UsageError(
            f"{where}: 'refused' names {sorted(unknown)}; the axes are {', '.join(sorted(known))}"
        )
    return replace(table, rules=(*table.rules, *_inner_rules(table)))


def _inner_rules(table: RuleTable) -> Iterator[Rule]:
    """The rows that layers of multi-token prediction have of the decoder layers, where they have them inside."""
    for item in table.items:
        for rule in table.rules:
            if item.inner is not None and rule.item == item.continues:
                yield replace(
                    rule, key=rule.key.replace("{layer}.", f"{{layer}}.{item.inner}.", 1), item=item.name
                )


def _item_fault(items: Sequence[Item]) -> str | None:
    """An invalid reference between items, or ``None``."""
    names = {item.name for item in items}
    decoder = next(item.name for item in items if item.repeated)
    for item in items:
        if item.continues is not None and not (item.mtp and item.continues == decoder):
            return f"{item.name!r} continues {item.continues!r}: only MTP items can, and only the item {decoder!r}"
        if item.count is not None and (item.repeated or item.mtp):
            return f"{item.name!r} has a count, which decoder layers and those of MTP have in an entry of their own"
        if item.inner is not None and item.continues is None:
            return f"{item.name!r} has 'inner' and does not continue the decoder layers"
        if item.there is not None and (item.continues is None or item.inner is not None):
            return f"{item.name!r} has 'there', which is for items with 'continues' and without 'inner'"
        if item.built_before is not None and item.built_before not in names - {item.name}:
            return f"{item.name!r} is built before {item.built_before!r}, which is not an item"
    return None


_FORMER_NAMES = {"experts_over": "expert_axis"}
"""Names of entries in tables for version 0.1 → their current names."""


def _renamed(entries: Any) -> Any:
    """The entries of a table with former names replaced, unless the current name is present too."""
    if not isinstance(entries, dict):
        return entries
    renamed = {old: new for old, new in _FORMER_NAMES.items() if new not in entries}
    return {renamed.get(name, name): value for name, value in entries.items()}


_PLACEHOLDER = re.compile(r"\{(?:layer|expert|n)\}|[{}]")


def _placeholder_fault(rule: Rule) -> str | None:
    """An invalid placeholder in a text that is formatted later, or ``None``."""
    if twice := [name for name in ("{layer}", "{expert}") if rule.key.count(name) > 1]:
        return f"its key contains {twice[0]} twice"
    for name_of_text, text, known in (
        ("key", rule.key, ("{layer}", "{expert}")),
        ("parameter_name", rule.parameter_name or "", ("{layer}", "{n}")),
    ):
        if set(_PLACEHOLDER.findall(text)) - {*known}:
            return f"{name_of_text} can contain only {' and '.join(known)} in braces"
    return None


def _order_fault(rule: Rule, after: Mapping[str, str | None]) -> str | None:
    """An invalid ``built_after``, or ``None``; ``after`` has the entry of every row."""
    seen = [rule.key]
    while (before := after[seen[-1]]) is not None:
        if before not in after:
            return f"it is built after {before!r}, which is not a row"
        if sorted(_PLACEHOLDER.findall(before)) != sorted(_PLACEHOLDER.findall(rule.key)):
            return f"it is built after {before!r}, whose key has different placeholders"
        if before in seen:
            return f"it is built after {before!r}, which is built after it"
        seen.append(before)
    return None


def _parts_fault(rule: Rule) -> str | None:
    """An invalid ``part_widths``, or ``None``."""
    if rule.part_widths is None:
        return None
    if len(rule.part_widths) < 2 or rule.parts != 1:
        return "part_widths are for two or more parts, instead of 'parts'"
    if rule.split is None or rule.shape is None or rule.split >= len(rule.shape):
        return "part_widths need a 'split' and a 'shape' with that dim"
    return None


def _form_fault(rule: Rule, alone: bool) -> str | None:
    """An invalid form in a Hugging Face checkpoint, or ``None``; ``alone``: keys there have no number of a layer."""
    form = rule.huggingface
    if form is None:
        return None
    numbers = sorted(set(_PLACEHOLDER.findall(rule.key)) - ({"{layer}"} if alone else set()))
    if form.stacked is not None:
        if rule.of_expert or len(rule.shape or ()) not in (2, 3):
            return "what is 'stacked' is one tensor of two or three dims for all experts, with a 'shape'"
        numbers = sorted([*numbers, "{expert}"])
    if not form.keys or any(sorted(_PLACEHOLDER.findall(key)) != numbers for key in form.keys):
        return (
            "keys must have the same {layer} and {expert} as the row's key; found "
            f"{', '.join(form.keys) or 'no keys'}"
        )
    if (len(form.keys) > 1) != (form.widths is not None) or len(form.widths or form.keys) != len(form.keys):
        return (
            "several keys need a width each, and a single key none; found "
            f"{len(form.widths or ())} widths for {len(form.keys)} keys"
        )
    if form.groups is not None and len(form.keys) == 1:
        return "groups require several keys"
    if form.groups_there is not None and len(form.tensors) == len(form.keys):
        return "groups_there require parts with the same key"
    return None


class ShippedTables(Sequence[RuleTable]):
    """The tables that come with the package, each parsed on first use, since most commands need only one.

    Every table lists its model types.

    Parameters
    ----------
    preferred
        The library whose tables go before the others where a checkpoint does not tell by its keys which one it is of.
    """

    def __init__(self, preferred: str | None = None) -> None:
        self.preferred = preferred
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
        """The tables whose text contains a model type: those for it, and possibly more."""
        return [self._table(name) for name, text in self._texts.items() if f'"{model_type}"' in text]

    def _table(self, name: str) -> RuleTable:
        if name not in self._parsed:
            self._parsed[name] = parse_rule_table(self._texts[name], name)
        return self._parsed[name]


def shipped_tables(preferred: str | None = None) -> ShippedTables:
    """The tables that come with the package."""
    return ShippedTables(preferred)


def choose_table(
    tables: Sequence[RuleTable], keys: Iterable[str], config: Config, format: str | None = None
) -> RuleTable:
    """The table that has a row for every key; of several, the one that is for all formats.

    Raises
    ------
    RuleError
        If there is none, naming the first key, in alphabetical order, that the closest table lacks; if several fit;
        or if the table does not tell enough for ``format``.
    """
    keys = sorted(set(keys))
    candidates = candidate_tables(tables, config)
    failures = [[key for key in keys if _failure(table, key, config)] for table in candidates]
    fitting = [table for table, failed in zip(candidates, failures, strict=True) if not failed]
    if len(fitting) > 1:
        fitting = [table for table in fitting if table.formats is None] or fitting
    if len(fitting) > 1:
        raise RuleError(
            f"model type {config.get('model_type')!r}",
            f"several rule tables fit: {', '.join(f'{t.family} ({t.convention})' for t in fitting)}; pass the "
            "right one with --rules FILE",
        )
    if fitting:
        if format is not None:
            fitting[0].check_format(format)
        return fitting[0]
    nearest, failed = min(zip(candidates, failures, strict=True), key=lambda pair: len(pair[1]))
    raise _failure(nearest, failed[0], config) or RuleError(failed[0], "no row fits")


def candidate_tables(tables: Sequence[RuleTable], config: Config) -> list[RuleTable]:
    """The tables for the model type and the library in the config.

    Raises
    ------
    RuleError
        If there are none.
    """
    model_type = config.get("model_type")
    library = library_of(config)
    likely = tables.that_mention(str(model_type)) if isinstance(tables, ShippedTables) else tables
    candidates = [
        table
        for table in likely
        if (not table.model_types or model_type in table.model_types)
        and (library is None or len(tables) == 1 or table.convention in _CONVENTIONS[library])
    ]
    if not candidates:
        known = what_is_known(tables, config)
        if known == NOT_KNOWN:
            known += f" (known: {', '.join(sorted({name for t in tables for name in t.model_types}))})"
        raise RuleError(f"model type {model_type!r}", f"{known}; write one and pass it with --rules FILE")
    return candidates


NOT_KNOWN: Final = "no rule table knows it"


def what_is_known(tables: Sequence[RuleTable], config: Config) -> str:
    """What the tables know about the family in the config, in words, where they do not tell enough.

    >>> what_is_known(shipped_tables(), {"model_type": "granite"})
    'the paddlefleet rule table knows it in the formats flex and huggingface only'
    >>> what_is_known(shipped_tables(), {"model_type": "granite", "paddlenlp_version": "3.0"})
    'no rule table knows it as paddlenlp trains it, only as paddlefleet does'
    >>> what_is_known(shipped_tables(), {"model_type": "mamba"})
    'no rule table knows it'
    """
    model_type, library = config.get("model_type"), library_of(config)
    likely = tables.that_mention(str(model_type)) if isinstance(tables, ShippedTables) else tables
    of_family = [table for table in likely if model_type in table.model_types]
    own = [table for table in of_family if library is None or table.convention in _CONVENTIONS[library]]
    if limited := [table for table in own if table.formats is not None]:
        return (
            f"the {limited[0].convention} rule table knows it in the formats "
            f"{' and '.join(limited[0].formats or ())} only"
        )
    if of_family and not own:
        others = " and ".join(sorted({table.convention for table in of_family}))
        return f"{NOT_KNOWN} as {library} trains it, only as {others} does"
    return NOT_KNOWN


def keys_in_model(tables: Sequence[RuleTable], saved: Iterable[str], config: Config) -> dict[str, str]:
    """Keys in files of weights that the model's class has saved itself → what they are in the model, if it renames."""
    try:
        renaming = [table for table in candidate_tables(tables, config) if table.saved_prefixes]
    except RuleError:
        renaming = []
    return {key: renaming[0].key_saved_as(key) for key in saved} if renaming else {}


def tables_to_train_with(tables: Sequence[RuleTable], config: Config) -> list[RuleTable]:
    """The tables for a model that no library has given names yet: those of the library that is to train it.

    Raises
    ------
    RuleError
        If there is none.
    """
    candidates = candidate_tables(tables, config)
    wanted = tables.preferred if isinstance(tables, ShippedTables) else None
    wanted = wanted or (PADDLEFLEET if library_of(config) == PADDLEFLEET else None)
    if wanted is not None:
        own = [table for table in candidates if table.convention == wanted]
        return own or [table for table in candidates if wanted in table.shared_with] or candidates
    return [table for table in candidates if table.formats is None] or candidates


PADDLEFLEET: Final = "paddlefleet"
_CONVENTIONS: Final[Mapping[str, tuple[str, ...]]] = {
    PADDLEFLEET: (PADDLEFLEET, "paddleformers"),
    "paddleformers": ("paddleformers", PADDLEFLEET),
    "paddlenlp": ("paddlenlp",),
}
"""Library that a config names → whose names its checkpoints may have: PaddleFormers 1.2 trains some families with
PaddleFleet's model, and PaddleFleet took over PaddleFormers' models of the others."""


def conventions_of(library: str) -> tuple[str, ...]:
    """Whose names the checkpoints of a library may have."""
    return _CONVENTIONS[library]


def library_of(config: Config) -> str | None:
    """The library whose version is in the config, or ``None``."""
    return next((name for name in _CONVENTIONS if f"{name}_version" in config), None)


def _failure(table: RuleTable, key: str, config: Config) -> RuleError | None:
    try:
        table.find(key, config)
    except RuleError as error:
        return error
    return None
