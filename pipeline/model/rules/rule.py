"""A row of a rule table: which dim tp cuts, what is fused, how a parameter is named, here and in other checkpoints."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from math import gcd, prod
from typing import TYPE_CHECKING, Annotated, Any, Literal

from paddle_reshard.pipeline.core.errors import RuleError
from paddle_reshard.pipeline.model.rules.entries import (
    Config,
    config_entry,
    count_entry,
    derived_sizes,
    size_of,
    ties_words,
)
from paddle_reshard.pipeline.model.rules.items import mtp_entry
from paddle_reshard.storage.documents.typed_json import Bounds

if TYPE_CHECKING:  # NumPy, which the table of families does without
    from paddle_reshard.pipeline.core.geometry import Shape


@dataclass(frozen=True, slots=True)
class HuggingFaceForm:
    """A tensor's form in a Hugging Face checkpoint: a single tensor, or several that Paddle fuses.

    ``README.md`` says what its fields mean, as it does for all that is read from a table.
    """

    keys: tuple[str, ...]
    transposed: bool = False
    saved_transposed: bool | None = None
    widths: tuple[str, ...] | None = None
    groups: str | None = None
    groups_there: str | None = None
    stacked: str | None = None
    keep_float32: bool = False
    exported_as: str | None = None

    @property
    def tensors(self) -> tuple[str, ...]:
        """The keys there, each once."""
        return tuple(dict.fromkeys(self.keys))

    def key_of(self, tensor: int, expert: int) -> str:
        """Key of one of the :attr:`tensors` there; of this expert, if several are stacked here."""
        key = self.tensors[tensor]
        return key if self.stacked is None else key.replace("{expert}", str(expert))

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
    name_class_sp: str | None = None

    def class_for(self, tp: int, sequence_parallel: bool) -> str:
        """Layer class in a job with this configuration."""
        return (tp > 1 and sequence_parallel and self.name_class_sp) or self.name_class


@dataclass(frozen=True, slots=True)
class Rule:
    """A row of a rule table; applies to every tensor whose key matches ``key``. Its fields are in ``README.md``."""

    key: str
    item: str
    name_class: str
    source: str
    # which models have it
    where: Mapping[str, Any] = field(default_factory=dict)
    unless: Mapping[str, Any] = field(default_factory=dict)
    with_mtp: bool | None = None
    grouped_heads: bool | None = None
    former: bool = False
    optional: str | None = None
    # its shape, and how tp and ep cut it
    shape: tuple[str, ...] | None = None
    split: Annotated[int, Bounds(0)] | None = None
    parts: Annotated[int, Bounds(1)] = 1
    part_widths: tuple[str, ...] | None = None
    parts_unknown: bool = False
    split_if_divisible: str | None = None
    must_divide: str | None = None
    shared_out: bool = False
    is_distributed: Literal["always", "never", "ep"] | None = None
    saved_in_part: str | None = None
    # other keys of its values
    tied_to: str | None = None
    always_tied: bool = False
    only_with: str | None = None
    of_stages: bool = False
    own_in_stages: bool = False
    own_without_stages: bool = False
    key_pp: str | None = None
    # the name of its parameter, and the order in which parameters are built
    name_class_pp: str | None = None
    name_class_sp: str | None = None
    name_class_tp: str | None = None
    name_class_ep: str | None = None
    name_class_ep_sp: str | None = None
    parameter_name: str | None = None
    created_as_weight: bool = False
    built_after: str | None = None
    discards: tuple[Discarded, ...] = ()
    copied: bool = False
    leads_if_unified: bool = False
    # what the optimizer keeps of it
    untrained: bool = False
    states_if_sharded: bool = False
    color: str | None = None
    # in models that are not trained
    unused: bool = False
    huggingface: HuggingFaceForm | None = None

    def pattern(self) -> re.Pattern[str]:
        """``key`` as a regular expression for the whole key."""
        return _pattern(self.key)

    def form(self) -> str:
        """``key`` as :func:`form_of` gives it for the keys of its tensors."""
        return _form(self.key)

    def numbers(self, key: str) -> Mapping[str, str]:
        """The numbers in a key of the row: ``layer`` and ``expert``, as far as it has them."""
        match = self.pattern().fullmatch(key)
        return match.groupdict() if match else {}

    def applies(self, config: Config) -> bool:
        """Whether the model with this config has the row."""
        if self.with_mtp is not None and self.with_mtp != (count_entry(config, mtp_entry(config)) > 0):
            return False
        if any(config_entry(config, name, self) == value for name, value in self.unless.items()):
            return False
        return self._fits_heads(config) and not self.missed_entries(config)

    def missed_entries(self, config: Config) -> dict[str, Any]:
        """The entries of ``where`` that the config does not have."""
        return {
            name: value for name, value in self.where.items() if config_entry(config, name, False) != value
        }

    def _fits_heads(self, config: Config) -> bool:
        if self.grouped_heads is None:
            return True
        sizes = derived_sizes(config)
        grouped = sizes.get("num_key_value_heads") != sizes.get("num_attention_heads")
        return grouped == self.grouped_heads

    def fill_in(self, form: str, key: str) -> str:
        """``form`` with the layer and expert numbers of ``key`` filled in; a number that ``key`` lacks stays open."""
        for name, number in self.numbers(key).items():
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

    @property
    def sizes(self) -> tuple[str, ...]:
        """The entries of the config in its shape, each once."""
        return tuple(dict.fromkeys(_ENTRY.findall(" ".join(self.shape or ()))))

    def who_expects(self, config: Config) -> str:
        """Who says its shape: ``config.json (vocab_size 24) and the rule table expect``; a described table alone."""
        values = derived_sizes(config)
        sizes = ", ".join(f"{name} {values[name]}" for name in self.sizes if name in values)
        return f"config.json ({sizes}) and the rule table expect" if sizes else "the rule table expects"

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

    def twin(self, config: Config, key: str) -> str | None:
        """The key with the same values as ``key`` in this model, or ``None``."""
        if self.tied_to is None or not (self.always_tied or ties_words(config)):
            return None
        return self.fill_in(self.tied_to, key)

    def is_own(self, pp: int) -> bool:
        """Whether a job with ``pp`` stages has a parameter of its own, which other jobs tie to another."""
        return self.own_in_stages if pp > 1 else self.own_without_stages

    def class_for(self, pp: int, tp: int, sequence_parallel: bool, ep: int = 1) -> str:
        """Layer class in the parameter names of a job; refused if the row does not tell it."""
        in_sequence = tp > 1 and sequence_parallel
        has_own = in_sequence and self.name_class_sp is not None
        if not self.name_class or (tp > 1 and not has_own and self.name_class_tp == ""):
            raise RuleError(
                self.key, "what a job calls its parameter is not known: no file that tells it was available"
            )
        classes = (
            (pp > 1, self.name_class_pp),
            (ep > 1 and in_sequence, self.name_class_ep_sp),
            (ep > 1, self.name_class_ep),
            (in_sequence, self.name_class_sp),
            (tp > 1, self.name_class_tp),
        )
        return next((name for applies, name in classes if applies and name), self.name_class)

    @property
    def first_number(self) -> int:
        """Number in the parameter name of a layer's first weight or bias: 0 in ``linear_0.w_0``."""
        return 0

    @property
    def of_expert(self) -> bool:
        """Whether each of its tensors belongs to a single routed expert."""
        return "{expert}" in self.key

    @property
    def numbers_experts(self) -> bool:
        """Whether the number of the expert is what stands behind the only ``.experts.`` of its keys."""
        return self.key.count(".experts.") == self.key.count(".experts.{expert}.") == 1

    @property
    def of_expert_rank(self) -> bool:
        """Whether each rank of ``ep`` has values of its own: one expert's, or all of its experts'."""
        return self.of_expert or self.shared_out

    def of_every_expert(self, key: str) -> str:
        """``key`` without the number of its expert: the same for all experts of a layer."""
        return self.key.replace("{layer}", self.numbers(key).get("layer", "{layer}"))

    @property
    def of_experts(self) -> bool:
        """Whether each of its tensors holds all routed experts of a layer, one after the other along the first dim."""
        form = self.huggingface
        return form is not None and form.stacked is not None and len(self.shape or ()) == 2

    @property
    def cut_unmarked(self) -> bool:
        """Whether tp cuts its tensors and the library does not mark them, so that it takes them for copies."""
        return self.split is not None and self.is_distributed == "never"

    def marked_distributed(self, cut: bool, ep: int, *, of_rank: bool) -> bool:
        """Value of the library's ``is_distributed`` flag.

        ``cut``: whether tp cuts the tensor; ``of_rank``: whether it is an expert that only some ranks hold.
        """
        if self.is_distributed == "never":
            return False
        return cut or of_rank or self.is_distributed == "always" or (self.is_distributed == "ep" and ep > 1)


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
        """The row of the matrix ``name``, a key of :data:`LORA`, of a linear layer; of other layers it is refused."""
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


_NUMBER = re.compile(r"\d+")
_ENTRY = re.compile(r"[A-Za-z_][\w.]*")
_NUMBERS_OF_ROW = re.compile(r"(?:\d|\{layer\}|\{expert\})+")


def form_of(key: str) -> str:
    """A key with ``#`` for every number: the same for all layers and experts.

    >>> form_of("model.layers.11.mlp.experts.3.up_proj.weight")
    'model.layers.#.mlp.experts.#.up_proj.weight'
    """
    return _NUMBER.sub("#", key)


@cache
def _form(key: str) -> str:
    return _NUMBERS_OF_ROW.sub("#", key)


@cache
def _pattern(key: str) -> re.Pattern[str]:
    pattern = re.escape(key).replace(re.escape("{layer}"), r"(?P<layer>\d+)")
    return re.compile(pattern.replace(re.escape("{expert}"), r"(?P<expert>\d+)"))


def expected_shape(rule: Rule, config: Config, key: str | None = None) -> Shape | None:
    """The global shape according to the config, or ``None`` if the row gives no shape."""
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
