"""Read a rule table from JSON, and refuse one that contradicts itself."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from paddle_reshard.pipeline.core.errors import UsageError
from paddle_reshard.pipeline.model.rules.extends import expanded
from paddle_reshard.pipeline.model.rules.items import Item
from paddle_reshard.pipeline.model.rules.rule import Rule
from paddle_reshard.pipeline.model.rules.table import RuleTable
from paddle_reshard.storage.documents.strict_json import JsonError, parse_json
from paddle_reshard.storage.documents.typed_json import EntryError, typed

_AXES = {"tp", "pp", "sharding", "ep", "dp"}


def parse_rule_table(text: str, where: str) -> RuleTable:
    """Read a table from JSON.

    Raises
    ------
    UsageError
        If it is not valid JSON, an entry is unknown, missing or of the wrong type, or entries contradict each other.
    """
    try:
        entries = expanded(parse_json(text), where)
    except EntryError as error:
        raise UsageError(f"{where}: {error}") from error
    except JsonError as error:
        raise UsageError(f"{where}: not valid JSON: {error}") from error
    return typed_table(entries, where)


def typed_table(entries: Any, where: str = "the table") -> RuleTable:
    """A table of its entries, as :func:`parse_rule_table` reads them."""
    try:
        table = typed(_renamed(entries), RuleTable)
    except EntryError as error:
        raise UsageError(f"{where}: {error}") from error
    for fault in _faults(table):
        raise UsageError(f"{where}: {fault}")
    return replace(table, rules=(*table.rules, *_inner_rules(table)))


def _faults(table: RuleTable) -> Iterator[str]:
    """In what a table contradicts itself; each check relies on those before it."""
    after = {row.key: row.built_after for row in table.rules}
    alone = {item.name for item in table.items if item.there is not None}
    for row in table.rules:
        if fault := (
            _placeholder_fault(row)
            or _parts_fault(row)
            or _form_fault(row, row.item in alone)
            or _order_fault(row, after)
        ):
            yield f"the row of {row.key!r}: {fault}"
    if unknown := {rule.item for rule in table.rules} - {item.name for item in table.items}:
        yield f"rules refer to the items {sorted(unknown)}, which are not in 'items'"
    if sum(item.repeated for item in table.items) != 1:
        yield "exactly one of 'items' must be the repeated decoder layer"
    if fault := _item_fault(table.items):
        yield f"'items': {fault}"
    for text in table.unsupported_keys:
        try:
            re.compile(text)
        except re.error as error:
            yield f"'unsupported_keys': {text!r} is not a regular expression: {error}"
    colors = {row.color for row in table.rules if row.color is not None}
    if unknown := colors - set(table.colors) if table.described is None else set():
        yield f"rules have the colors {sorted(unknown)}, which are not in 'colors'"
    for name, named in (("refused", ",".join(table.refused)), ("needed", ",".join(table.needed))):
        if unknown := {axis for axis in named.split(",") if axis} - _AXES:
            yield f"{name!r} names {sorted(unknown)}; the axes are {', '.join(sorted(_AXES))}"


def _inner_rules(table: RuleTable) -> Iterator[Rule]:
    """The rows that layers of multi-token prediction have of the decoder layers, where they have them inside."""
    for item in table.items:
        for rule in table.rules:
            if item.inner is not None and rule.item == item.continues:
                yield replace(rule, key=item.inside(rule.key), item=item.name)


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
    if unknown := set(_PLACEHOLDER.findall(rule.tied_to or "")) - set(_PLACEHOLDER.findall(rule.key)):
        return f"it is tied to a key with {min(unknown)}, which its own key lacks"
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
