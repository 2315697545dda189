"""Match tensors of Hugging Face checkpoints with the rows of a rule table."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final, NamedTuple

from paddle_reshard.pipeline.core.errors import CoverageError, RuleError
from paddle_reshard.pipeline.core.geometry import Shape
from paddle_reshard.pipeline.model.model import Model, ModelTensor
from paddle_reshard.pipeline.model.rules.entries import Config
from paddle_reshard.pipeline.model.rules.rule import HuggingFaceForm, Rule, evaluate_sizes
from paddle_reshard.pipeline.model.rules.table import RuleTable

_STACKED_IF: Final[Mapping[str, tuple[str, ...]]] = {
    "paddlefleet": ("moe_expert_fusion", "using_sonic_moe"),
    "paddleformers": ("fd_fallback",),
}
"""Library → its config entries that make the routed experts of a layer one tensor; off by default."""


UNUSED: Final = "the model computes nothing with it, and only checkpoints of its recipe hold it"
"""Why an export has no tensor of a row that is ``unused``."""


def form_of(tensor: ModelTensor, model: Model) -> HuggingFaceForm:
    """The form of a tensor in a Hugging Face checkpoint, according to the rule table."""
    form = tensor.rule.huggingface
    if form is None:
        model.table.check_known(model.config, "the form of its tensors in a Hugging Face checkpoint")
        why = f" ({model.table.without_forms})" if model.table.without_forms else ""
        raise RuleError(
            tensor.key,
            f"the {model.table.convention} rule table {model.table.family!r} does not give its form in a "
            f"Hugging Face checkpoint{why}; add 'huggingface' to its row in a copy of the table, and pass that with "
            "--rules FILE, or map all tensors with --aoa FILE",
        )
    return form


def _widths_and_groups(form: HuggingFaceForm, config: Config, key: str, last: int) -> tuple[Shape, int]:
    """Extent of each part within one group, along a last dim of ``last`` elements, and the number of groups.

    Widths of 8, 4 and 4 with 2 groups cut a dim of 16 elements into 4, 2, 2 and again 4, 2, 2: (4, 2, 2) and 2.
    """
    if form.widths is None:
        return (last,), 1
    totals = evaluate_sizes(form.widths, config, key)
    groups = 1 if form.groups is None else evaluate_sizes([form.groups], config, key)[0]
    if sum(totals) != last or groups < 1 or any(total < 1 or total % groups for total in totals):
        raise RuleError(
            key,
            f"its last dim has {last} elements; by the rule table, it consists of parts with {list(totals)} elements "
            f"in {groups} groups",
        )
    return tuple(total // groups for total in totals), groups


class Span(NamedTuple):
    """A range of a tensor's last dim in Paddle, and of the same dim of a tensor in a Hugging Face checkpoint."""

    here: int
    there: int
    extent: int


def spans_of(form: HuggingFaceForm, config: Config, key: str, last: int) -> list[tuple[Span, ...]]:
    """For each tensor of the Hugging Face checkpoint, the ranges that make it up, in their order there.

    Parts of 8, 4 and 4 elements in 2 groups here, the first two of them one tensor with a single group there, are
    ``[(0, 0, 4), (8, 4, 4), (4, 8, 2), (12, 10, 2)]`` and ``[(6, 0, 2), (14, 2, 2)]``.
    """
    widths, groups = _widths_and_groups(form, config, key, last)
    groups_there = 1
    if form.groups_there is not None:
        (groups_there,) = evaluate_sizes([form.groups_there], config, key)
    spans_of_tensors = []
    for tensor in form.tensors:
        own = [part for part, spelled in enumerate(form.keys) if spelled == tensor]
        divided = groups_there if len(own) > 1 else 1
        totals = [widths[part] * groups for part in own]
        if divided < 1 or any(total % divided for total in totals):
            raise RuleError(
                key, f"parts of {totals} elements do not divide into {divided} groups ({form.groups_there})"
            )
        shares = [total // divided for total in totals]
        spans = [
            Span(
                first // width * sum(widths) + sum(widths[:part]) + first % width,
                first // share * sum(shares) + sum(shares[:place]) + first % share,
                stop - first,
            )
            for place, (part, share) in enumerate(zip(own, shares, strict=True))
            for width in [widths[part]]
            for first, stop in pairwise(
                sorted({*range(0, width * groups + 1, width), *range(0, width * groups + 1, share)})
            )
        ]
        spans_of_tensors.append(tuple(sorted(spans, key=lambda span: span.there)))
    return spans_of_tensors


class Match(NamedTuple):
    """The row of the rule table that matches a tensor of a Hugging Face checkpoint."""

    rule: Rule
    part: int
    """Index of the tensor among those that Paddle fuses."""
    key: str
    """Key of the tensor in Paddle."""
    expert: int | None
    """Number of its routed expert, if a tensor in Paddle holds several."""


class _Spelling(NamedTuple):
    pattern: re.Pattern[str]
    rule: Rule
    part: int


def matches_of(keys: Iterable[str], table: RuleTable, config: Config) -> dict[str, Match | None]:
    """Key in a Hugging Face checkpoint → the row of the table that matches it; ``None``: no row, or several."""
    spellings = [
        _Spelling(replace(rule, key=spelled).pattern(), rule, part)
        for rule in table.rules
        if rule.huggingface is not None and rule.applies(config) and not rule.former
        for part, spelled in enumerate(rule.huggingface.tensors)
    ]
    return {key: _match_of(key, spellings, table, config) for key in keys}


def _match_of(key: str, spellings: Sequence[_Spelling], table: RuleTable, config: Config) -> Match | None:
    fits = []
    for spelling in spellings:
        if (match := spelling.pattern.fullmatch(key)) is None:
            continue
        numbers, rule = {**_layer_alone(spelling.rule, table, config), **match.groupdict()}, spelling.rule
        if table.holds(rule, int(numbers["layer"]) if "layer" in numbers else None, config):
            expert = None if rule.of_expert else numbers.get("expert")
            fits.append(
                Match(
                    rule, spelling.part, rule.key.format(**numbers), None if expert is None else int(expert)
                )
            )
    if len(fits) > 1:
        stacked = any(config.get(entry) for entry in _STACKED_IF.get(table.convention, ()))
        fits = [fit for fit in fits if _form(fit.rule).stacked is None or stacked]
        fits = [fit for fit in fits if _form(fit.rule).stacked is not None] or fits
    if len(fits) > 1:
        fits = [fit for fit in fits if _is_fused(fit.rule) == bool(config.get(_fuse_entry(fit.rule)))]
    return fits[0] if len(fits) == 1 else None


def _layer_alone(rule: Rule, table: RuleTable, config: Config) -> dict[str, str]:
    """The layer number of a row in Paddle, if its keys in Hugging Face checkpoints have none; otherwise empty."""
    item = table.mtp_items.get(rule.item)
    if item is None or item.there is None:
        return {}
    return {"layer": str(table.first_mtp_layer(item, config))}


def _form(rule: Rule) -> HuggingFaceForm:
    assert rule.huggingface is not None  # noqa: S101
    return rule.huggingface


def _is_fused(rule: Rule) -> bool:
    return len(_form(rule).keys) > 1


def _fuse_entry(rule: Rule) -> str:
    """The config entry by which the library fuses parts of a row; off by default (PaddleNLP 3.0 ``LlmMetaConfig``)."""
    return "fuse_attention_qkv" if ".self_attn." in rule.key else "fuse_attention_ffn"


@dataclass(frozen=True, slots=True)
class PartsOfTensor:
    """The tensors of a Hugging Face checkpoint that make up a tensor in Paddle."""

    rule: Rule
    keys: tuple[tuple[str, ...], ...]
    """Their keys: a tuple per expert if Paddle stacks experts, otherwise a single tuple."""

    @property
    def form(self) -> HuggingFaceForm:
        """The form of the tensors, according to the row."""
        return _form(self.rule)


def parts_of_tensors(matches: Mapping[str, Match | None], config: Config) -> dict[str, PartsOfTensor]:
    """Key in Paddle → the tensors of a Hugging Face checkpoint that make it up, which have to be all of its parts."""
    keys: dict[str, dict[tuple[int, int], str]] = {}
    rules: dict[str, Rule] = {}
    for key, match in matches.items():
        if match is not None:
            rules[match.key] = match.rule
            keys.setdefault(match.key, {})[match.expert or 0, match.part] = key
    parts = {}
    for whole, of_whole in keys.items():
        rule = rules[whole]
        form = _form(rule)
        experts = 1 if form.stacked is None else evaluate_sizes([form.stacked], config, whole)[0]
        wanted = [[(expert, part) for part in range(len(form.tensors))] for expert in range(experts)]
        for expert, part in (part_of_expert for of_expert in wanted for part_of_expert in of_expert):
            if (expert, part) not in of_whole:
                spelled = rule.fill_in(form.key_of(part, expert), whole)
                raise CoverageError(spelled, f"no file holds it, and it is a part of {whole}")
        if more := sorted(
            of_whole.keys() - {part_of_expert for of_expert in wanted for part_of_expert in of_expert}
        ):
            raise CoverageError(
                of_whole[more[0]], f"config.json says {form.stacked}={experts}, so {whole} has no such part"
            )
        parts[whole] = PartsOfTensor(
            rule,
            tuple(tuple(of_whole[part_of_expert] for part_of_expert in of_expert) for of_expert in wanted),
        )
    return parts
