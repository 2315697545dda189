"""The rule tables of a conversion: those that come with the package, or the one that a user gives."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, overload

from paddle_reshard.pipeline.model.rules.parse import parse_rule_table
from paddle_reshard.pipeline.model.rules.table import RuleTable


class RuleTables(Sequence[RuleTable]):
    """Tables from which that of a checkpoint is chosen; these ones were given, and are for any family and format.

    >>> tables = RuleTables(list(shipped_tables())[:1])
    >>> tables.that_mention("any") == list(tables), tables.for_any_family
    (True, True)
    """

    for_any_family: ClassVar[bool] = True
    """Whether they are for any family and format, whichever model types and formats they name."""

    def __init__(self, given: Sequence[RuleTable] = (), preferred: str | None = None) -> None:
        self._given = given
        self.preferred = preferred
        """The library whose tables go before the others where a checkpoint does not tell by its keys which one it is
        of."""

    def __len__(self) -> int:
        return len(self._given)

    @overload
    def __getitem__(self, index: int) -> RuleTable: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[RuleTable]: ...

    def __getitem__(self, index: int | slice) -> RuleTable | Sequence[RuleTable]:
        """A table, or several, in their order."""
        return self._given[index]

    def that_mention(self, model_type: str) -> Sequence[RuleTable]:
        """The tables that may be for a model type; possibly more."""
        return self._given


class ShippedTables(RuleTables):
    """The tables that come with the package, each parsed on first use, since most commands need only one.

    Every table lists its model types.
    """

    for_any_family: ClassVar[bool] = False

    def __init__(self, preferred: str | None = None) -> None:
        super().__init__(preferred=preferred)
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
    def __getitem__(self, index: slice) -> Sequence[RuleTable]: ...

    def __getitem__(self, index: int | slice) -> RuleTable | Sequence[RuleTable]:
        """A table, or several, in the order of their file names."""
        if isinstance(index, slice):
            return [self._table(name) for name in self._names[index]]
        return self._table(self._names[index])

    def that_mention(self, model_type: str) -> Sequence[RuleTable]:
        """The tables whose text contains a model type: those for it, and possibly more."""
        return [self._table(name) for name, text in self._texts.items() if f'"{model_type}"' in text]

    def _table(self, name: str) -> RuleTable:
        if name not in self._parsed:
            self._parsed[name] = parse_rule_table(self._texts[name], name)
        return self._parsed[name]


def shipped_tables(preferred: str | None = None) -> ShippedTables:
    """The tables that come with the package."""
    return ShippedTables(preferred)
