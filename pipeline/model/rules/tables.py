"""The rule tables of a conversion: those that come with the package, or the one that a user gives."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import ClassVar

from paddle_reshard.pipeline.model.rules.parse import parse_rule_table
from paddle_reshard.pipeline.model.rules.table import RuleTable


class RuleTables:
    """Tables from which that of a checkpoint is chosen; these ones were given, and are for any family and format.

    >>> tables = RuleTables(list(shipped_tables())[:1])
    >>> list(tables.that_mention("any")) == list(tables), tables.for_any_family
    (True, True)
    """

    for_any_family: ClassVar[bool] = True
    """Whether they are for any family, library and format, whichever model types and formats they name."""

    def __init__(self, given: Sequence[RuleTable] = (), preferred: str | None = None) -> None:
        self._given = given
        self.preferred = preferred
        """The library whose tables go before the others where a checkpoint does not tell by its keys which one it is
        of."""

    def __iter__(self) -> Iterator[RuleTable]:
        return iter(self._given)

    def that_mention(self, model_type: str) -> Sequence[RuleTable]:
        """The tables that may be for a model type; possibly more."""
        return self._given


class ShippedTables(RuleTables):
    """The tables that come with the package; every one lists its model types."""

    for_any_family: ClassVar[bool] = False

    def __init__(self, preferred: str | None = None) -> None:
        super().__init__(preferred=preferred)

    def __iter__(self) -> Iterator[RuleTable]:
        """All tables, in the order of their file names."""
        return map(_table, _texts())

    def that_mention(self, model_type: str) -> Sequence[RuleTable]:
        """The tables whose text contains a model type: those for it, and possibly more."""
        return [_table(name) for name, text in _texts().items() if f'"{model_type}"' in text]


@cache
def _texts() -> Mapping[str, str]:
    """The text of each table by the name of its file."""
    return {path.name: path.read_text("utf-8") for path in sorted(Path(__file__).parent.glob("*.json"))}


@cache
def _table(name: str) -> RuleTable:
    """A table, parsed on first use: most commands need one of them, and ``watch`` the same one every time."""
    return parse_rule_table(_texts()[name], name)


def shipped_tables(preferred: str | None = None) -> ShippedTables:
    """The tables that come with the package."""
    return ShippedTables(preferred)
