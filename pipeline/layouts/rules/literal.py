"""A rule table of a model that no table describes: every key has a row of its own."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property

from paddle_reshard.pipeline.core.errors import RuleError
from paddle_reshard.pipeline.layouts.rules import Config, HuggingFaceForm, Item, Rule, RuleTable

FAMILY = "by its keys"


@dataclass(frozen=True)
class LiteralTable(RuleTable):
    """Rows that are keys. A tensor is whole and goes out as it is, under its key.

    It tells nothing of tensor parallelism, of the order of layers or of parameter names.
    """

    def find(self, key: str, config: Config) -> tuple[Rule, int | None]:
        """The row for ``key``; of no layer."""
        rule = self._rows.get(key)
        if rule is None:
            raise RuleError(key, "no such tensor is in the model")
        return rule, None

    @cached_property
    def _rows(self) -> dict[str, Rule]:
        return {rule.key: rule for rule in self.rules}


def literal_table(keys: Collection[str], origin: RuleTable) -> RuleTable:
    """The table of a model with these keys, made of one that ``origin`` describes."""
    item = Item("model", "", repeated=True)
    rules = tuple(
        Rule(key, item.name, "", "the key itself", huggingface=HuggingFaceForm((key,))) for key in keys
    )
    return LiteralTable(
        FAMILY,
        origin.convention,
        (),
        (item,),
        rules,
        muon_exclude_patterns=origin.muon_exclude_patterns,
    )
