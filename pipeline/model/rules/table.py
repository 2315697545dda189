"""The rule table of a model family: all its rows, as one library spells them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from paddle_reshard.pipeline.core.errors import RuleError
from paddle_reshard.pipeline.model.rules.entries import (
    NUMBERS_OF_EXPERTS,
    Config,
    config_entry,
    count_entry,
    derived_sizes,
)
from paddle_reshard.pipeline.model.rules.items import LAYERS, EmptyLayers, Item, mtp_entry
from paddle_reshard.pipeline.model.rules.libraries import library_of
from paddle_reshard.pipeline.model.rules.rule import LORA, LoraRule, Rule, form_of
from paddle_reshard.pipeline.model.rules.stages import DECODER_LAYERS, Stages, stages_said

_LORA_ENDINGS = tuple(f".{name}" for name in LORA)


@dataclass(frozen=True, slots=True)
class Proof:
    """What the rows of a table have been compared with: files of ranks, and exports if there are forms for them."""

    files: Literal["checkpoints", "classes", "declarations"]
    huggingface: Literal["transformers", "library", "declarations"] | None = None


_SHOWN_BY = {
    "tp": "which dims tp cuts",
    "pp": "the items of the pipeline and their order",
    "ep": "how experts are distributed",
}
_DESCRIBE = (
    "call paddle_reshard.describe(model, to=FILE) once in such a job, with the same FILE, which adds it"
)
_HEADS = ("num_attention_heads", "num_key_value_heads")


@dataclass(frozen=True, slots=True)
class Described:
    """A job in which live parameters were described, by its degrees; ``names``: whether its names follow from rows."""

    tp: int = 1
    pp: int = 1
    ep: int = 1
    sequence_parallel: bool = False
    names: bool = True

    @property
    def kind(self) -> tuple[bool, ...]:
        """Which axes it has: jobs of one kind have the same layer classes."""
        return self.tp > 1, self.pp > 1, self.ep > 1, self.sequence_parallel

    @property
    def words(self) -> str:
        """The job in messages: ``tp=2, pp=2``."""
        degrees = ", ".join(f"{axis}={n}" for axis in ("tp", "pp", "ep") if (n := getattr(self, axis)) > 1)
        return (degrees or "one card") + (", sequence parallelism" if self.sequence_parallel else "")

    def entries(self) -> dict[str, int | bool]:
        """Its entries in a table."""
        return {"tp": self.tp, "pp": self.pp, "ep": self.ep, "sequence_parallel": self.sequence_parallel}


@dataclass(frozen=True, slots=True)
class Unsupported:
    """An option of a family whose models the rows do not describe, or not in every format."""

    entry: str
    why: str
    above: int = 0
    formats: tuple[str, ...] | None = None

    def concerns(self, config: Config) -> bool:
        """Whether the option is set in the config of a model."""
        value = config_entry(config, self.entry)
        within = isinstance(value, int) and not isinstance(value, bool) and value <= self.above
        return bool(value) and not within

    def refusal(self, table: str, config: Config, then: str) -> RuleError:
        """The error about a model with the option, which ends with what is not supported."""
        value = config_entry(config, self.entry)
        return RuleError(table, f"config.json says {self.entry}={value!r}: {self.why}; {then}")


@dataclass(frozen=True, slots=True)
class RuleTable:
    """All rows of a model family as a library spells it. ``README.md`` says what its fields mean."""

    family: str
    convention: str
    model_types: tuple[str, ...]
    items: tuple[Item, ...]
    rules: tuple[Rule, ...]
    # which checkpoints it is for
    shared_with: tuple[str, ...] = ()
    version: str | None = None
    formats: tuple[str, ...] | None = None
    unsupported: tuple[Unsupported, ...] = ()
    unsupported_keys: Mapping[str, str] = field(default_factory=dict)
    alternatives: tuple[tuple[tuple[str, ...], ...], ...] | None = None
    proven: Proof | None = field(default=None, compare=False, repr=False)
    comment: str | tuple[str, ...] = field(default="", compare=False, repr=False)
    described: tuple[Described, ...] | None = None
    without_forms: str = field(default="", compare=False, repr=False)
    # other keys of its tensors
    saved_prefixes: Mapping[str, str] = field(default_factory=dict)
    peft_prefixes: Mapping[str, str] = field(default_factory=dict)
    shifted_by: str | None = None
    local_experts: bool = False
    # which jobs there are of it
    experts: str | None = None
    expert_axis: Literal["ep", "tp", "dp"] | None = None
    needed: Mapping[str, str] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)
    segmentation: str = DECODER_LAYERS
    segmentation_entry: str | None = None
    segmentations: tuple[str, ...] = ()
    empty: EmptyLayers | None = None
    lora: bool | None = None
    muon_exclude_patterns: tuple[str, ...] = ("embed", "bias", "lm_head", "mlp.gate")
    colors: tuple[str, ...] = ()
    # those of a pre-training recipe
    recipe: str = ""
    recipe_switches: tuple[str, ...] = ()
    library_types: tuple[str, ...] = ()
    scheduler_ahead: int = 0

    @property
    def named(self) -> str:
        """The table in messages: its family, and the library in brackets."""
        return f"{self.family} ({self.convention})"

    @property
    def library(self) -> str:
        """The library whose jobs load its checkpoints, with its version if that is not the current one."""
        return self.convention if self.version is None else f"{self.convention} {self.version}"

    @property
    def supports_lora(self) -> bool:
        """Whether LoRA of the family is supported: language models of PaddleFormers, but not those of its recipes."""
        trains = self.convention == "paddleformers" and not self.recipe
        published = any(rule.huggingface for rule in self.rules)
        alone = not any(item.count for item in self.items)
        return trains and published and (alone if self.lora is None else self.lora)

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

    def place(self, item: str, layer: int | None) -> tuple[str, int | None]:
        """The pipeline item with a tensor of a layer: its kind, and its number unless it has all layers of its kind."""
        for known in self.items:
            if known.whole and known.name == item:
                return item, None
        return item, layer

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
        return self.finder(config)(key)

    def finder(self, config: Config) -> Callable[[str], tuple[Rule, int | None]]:
        """The same for many keys: what they share that differ in their numbers only is found once."""
        return _Finder(self, config).find

    def unclear(self, key: str, fits: int) -> RuleError:
        """The error for a key that so many rows fit, of which there has to be one."""
        why = next((why for start, why in self.unsupported_keys.items() if re.match(start, key)), None)
        if not fits and why is not None:
            return RuleError(key, f"{why}; such checkpoints are not supported")
        rows = f"{fits} rows" if fits else "no row"
        advice = "keep only one in" if fits else "add one to"
        return RuleError(
            key,
            f"{rows} of the {self.convention} rule table {self.family!r} {'fit' if fits else 'fits'}; {advice} a "
            "copy of the table and pass it with --rules FILE",
        )

    def why_missing(self, key: str, config: Config) -> str:
        """Which entries ``config.json`` would need for a row to have ``key``, in a sentence; empty: none would do."""
        for rule in self.rules:
            if rule.pattern().fullmatch(key) and (missed := rule.missed_entries(config)):
                entries = ", ".join(f'"{name}": {json.dumps(value)}' for name, value in missed.items())
                return (
                    f"no row of the {self.convention} rule table {self.family!r} fits: only models with {entries} in "
                    "config.json have it; the config.json beside the tensors must be that of their model"
                )
        return ""

    def of_layer(self, rule: Rule, layer: int | None, config: Config) -> Rule:
        """The row, assigned to the MTP item that continues its item if the layer is an MTP layer."""
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
        """By how much a target's keys number layers higher than the model does: 2 behind two empty layers."""
        shift = config.get(self.shifted_by) if self.shifted_by is not None else None
        if not shift:
            return 0
        if isinstance(shift, int) and library_of(config) == "paddleformers":
            return shift
        raise RuleError(
            self.named,
            f"config.json says {self.shifted_by}={shift!r}: {self.convention} 0.3, with which PaddleFormers 1.2 "
            "trains, numbers its layers from there on, and later versions number them from 0 on; which of them is to "
            "train on is not known. For 0.3, give a config.json with paddleformers_version with --config FILE; for a "
            "later one, set the entry to 0 in it",
        )

    def unsupported_option(self, config: Config, stages_known: bool) -> RuleError | None:
        """Why the table does not describe a model with this config; ``None`` if it does.

        ``stages_known``: whether it is known if its job has pipeline stages.
        """
        for option in self.unsupported:
            if option.formats is None and option.concerns(config):
                return option.refusal(self.named, config, "such checkpoints are not supported")
        if self.experts in NUMBERS_OF_EXPERTS:
            told = [(name, config_entry(config, name)) for name in NUMBERS_OF_EXPERTS]
            said = {number: name for name, number in told if isinstance(number, int)}
            if len(said) > 1:
                numbers = " and ".join(f"{name} {number}" for number, name in said.items())
                return RuleError(
                    self.named,
                    f"config.json says {numbers}: two names of one number, of which a job may take either; correct it",
                )
        for rule in self.rules:
            if not stages_known and (rule.of_stages or rule.own_in_stages) and rule.applies(config):
                return RuleError(
                    self.named,
                    f"{rule.key}: only jobs with pipeline stages have it as a tensor of its own beside {rule.tied_to}; "
                    "of which jobs files are, this format does not tell, and such models are not supported in it",
                )
        return None

    def is_for(self, format: str) -> bool:
        """Whether the table tells enough for a format."""
        return self.formats is None or format in self.formats

    def check_format(self, format: str, config: Config) -> None:
        """Refuse a format for which the table does not tell enough of a model."""
        if not self.is_for(format):
            raise RuleError(
                self.named,
                f"{self.convention}'s names and layouts are known for the formats {' and '.join(self.formats or ())} "
                f"only, not for {format}: no file of another one was available; convert to one of these, or to the "
                "names of another library with --convention",
            )
        for option in self.unsupported:
            if format in (option.formats or ()) and option.concerns(config):
                raise option.refusal(
                    self.named,
                    config,
                    f"the format {format} is not supported for such models; save or convert them in another",
                )

    def stages(self, config: Config) -> Stages:
        """How the pipeline class of a model with this config distributes its items."""
        if self.segmentation_entry is None:
            return Stages(self.segmentation, ways=self.segmentations)
        said = config.get(self.segmentation_entry)
        return stages_said(self.segmentation if said is None else said, self.segmentation_entry)

    # What a table that is made of files does not tell (StoredTable): known to all others.

    @property
    def not_known(self) -> str | None:
        """Why this table is not one of the model's family, made from its files instead; ``None`` if it is."""
        return None

    @property
    def ranks_in_a_row(self) -> int:
        """The number of tp ranks whose parts lie in a row in a tensor, because the cut is not known; otherwise 1."""
        return 1

    def check_known(self, config: Config, what: str) -> None:
        """Refuse a target that needs ``what``, if the table does not tell it."""

    def check_whole(self, config: Config) -> None:
        """Refuse a use of whole tensors if it is not known how tp has cut them."""

    def check_keys(self, config: Config) -> None:
        """Refuse a target of no certain topology that has the model's own keys, if they are not known."""
        if refused := self.unsupported_option(config, stages_known=False):
            raise refused
        for rule in self.rules if self.described and all(job.pp > 1 for job in self.described) else ():
            if (twin := rule.twin(config, rule.key)) is not None:
                raise RuleError(
                    rule.key,
                    f"tied to {twin} in all jobs in which the model was described, which have stages; whether one "
                    f"without has a parameter of its own there is not known; {_DESCRIBE}",
                )

    def check_shown(self, degrees: Mapping[str, int]) -> None:
        """Refuse a job with an axis that no job has in which the model was described; ``degrees``: axis → degree."""
        for axis, what in _SHOWN_BY.items():
            degree = degrees.get(axis, 1)
            if self.described and degree > 1 and all(getattr(job, axis) == 1 for job in self.described):
                raise RuleError(
                    self.named,
                    f"{axis}={degree}: the model was described in jobs without {axis} (with {self._jobs}), which do "
                    f"not show {what}; {_DESCRIBE}",
                )

    def check_job(
        self, config: Config, degrees: Mapping[str, int], stages_given: bool, marked: str | None = None
    ) -> None:
        """Refuse a hybrid-parallel target that the files do not determine.

        Parameters
        ----------
        degrees
            Axis → degree in the target, for axes that change more than the rank that holds an optimizer state.
        stages_given
            Whether options of the target determine the layers of its stages or virtual stages.
        marked
            What has to be known if the target says of every tensor whether it is distributed.
        """
        if self.described is None:
            return
        self.check_shown(degrees)
        tp, sizes = degrees["tp"], derived_sizes(config)
        shown = {job.tp for job in self.described if job.tp > 1}
        heads = {name: sizes[name] for name in _HEADS if name in sizes}
        if (
            tp > 1
            and tp not in shown
            and (not heads or any(n % t for n in heads.values() for t in (tp, *shown)))
        ):
            of_heads = (
                ", ".join(f"{name}={n}" for name, n in heads.items()) or "no numbers of heads in config.json"
            )
            raise RuleError(
                self.named,
                f"tp={tp}: the model was described with tp={', '.join(map(str, sorted(shown)))}; what a rank holds "
                f"with another degree follows only where all of them divide the heads ({of_heads}); {_DESCRIBE}",
            )

    @property
    def described_in(self) -> str:
        """Behind its family in messages: in which jobs the model was described; empty for any other table."""
        return f", as described in a job with {self._jobs}" if self.described else ""

    @property
    def _jobs(self) -> str:
        return " and one with ".join(job.words for job in self.described or ())

    def check_names(self, tp: int, pp: int, ep: int, sequence_parallel: bool) -> None:
        """Refuse parameter names in a job that is unlike all in which the model was described."""
        if self.described is None:
            return
        wanted = Described(tp, pp, ep, tp > 1 and sequence_parallel)
        alike = [job for job in self.described if job.kind == wanted.kind]
        if not alike:
            raise RuleError(
                self.named,
                f"what a job with {wanted.words} calls its parameters is not known: the model was described in "
                f"a job with {self._jobs}; {_DESCRIBE}, or give its model_meta.json with --layout",
            )
        if not all(job.names for job in alike):
            raise RuleError(
                self.named,
                f"what a job with {wanted.words} calls its parameters is not known: {self.comment} Give its "
                "model_meta.json with --layout, or take a format without parameter names",
            )


_BEHIND_EXPERTS = re.compile(r"\.experts\.[\d{]")


class _Finder:
    """Finds the rows of the keys of one model."""

    def __init__(self, table: RuleTable, config: Config) -> None:
        self._table, self._config = table, config
        self._rows: dict[str, list[int]] = {}
        """Form of a key → numbers of the rows that may have it."""
        for number, rule in enumerate(table.rules):
            self._rows.setdefault(rule.form(), []).append(number)
        self._applying: dict[str, list[int]] = {}
        """Form of a key → numbers of those of its rows that the model has."""
        self._in_layer: dict[tuple[int, int | None], Rule | None] = {}
        """Number of a row, and a layer → the row as that layer has it; ``None`` if it has none."""
        self._alike: dict[str, tuple[Rule, int | None]] = {}
        """Key, of an expert that of expert 0 → what was found, which is the same for all experts of a layer."""
        self._numbers_experts = all(
            rule.numbers_experts or not _BEHIND_EXPERTS.search(rule.key) for rule in table.rules
        )

    def find(self, key: str) -> tuple[Rule, int | None]:
        """As :meth:`RuleTable.find`."""
        alike = key
        begin, experts, inside = key.partition(".experts.")
        number, dot, name = inside.partition(".")
        if dot and number.isdecimal() and self._numbers_experts:  # no regular expression: keys are very many
            alike = f"{begin}{experts}0.{name}"
        found = self._alike.get(alike)
        if found is None:
            found = self._alike[alike] = self._find(key)
        return found

    def _find(self, key: str) -> tuple[Rule, int | None]:
        if key.endswith(_LORA_ENDINGS):
            module, _, name = key.rpartition(".")
            weight, numbered = self.find(f"{module}.weight")
            return LoraRule.beside(weight, name), numbered
        form, rules = form_of(key), self._table.rules
        numbers = self._applying.get(form)
        if numbers is None:
            numbers = [row for row in self._rows.get(form, ()) if rules[row].applies(self._config)]
            self._applying[form] = numbers
        fits: list[tuple[Rule, int | None]] = []
        for row in numbers:
            if match := rules[row].pattern().fullmatch(key):
                number = match.groupdict().get("layer")
                layer = None if number is None else int(number)
                if (rule := self._row_of_layer(row, layer)) is not None:
                    fits.append((rule, layer))
        if len(fits) != 1:
            raise self._table.unclear(key, len(fits))
        return fits[0]

    def _row_of_layer(self, row: int, layer: int | None) -> Rule | None:
        if (row, layer) not in self._in_layer:
            rule = self._table.of_layer(self._table.rules[row], layer, self._config)
            self._in_layer[row, layer] = rule if self._table.holds(rule, layer, self._config) else None
        return self._in_layer[row, layer]


def renamed_prefix(key: str, prefixes: Mapping[str, str]) -> str:
    """A key with another beginning, if it has one of the prefixes.

    >>> renamed_prefix("model.visual.merger.ln_q.weight", {"model.visual.": "visual."})
    'visual.merger.ln_q.weight'
    """
    for prefix, other in prefixes.items():
        if key.startswith(prefix):
            return other + key.removeprefix(prefix)
    return key
